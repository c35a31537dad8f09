"""Lanes: queues whose tasks run one at a time, the threads of lanes, and callers that help them.

    schedule ──▶ lane ──▶ its thread, or a caller that waits ──▶ run ──▶ release

Of the tasks of a lane those of the highest priority run first, and of equals the one that came
first. To wake a thread takes longer than most tasks. So callers that wait run tasks themselves, and
a thread that has run one, or has begun to wait, dozes for a while: it looks for tasks without being
woken. But while a caller waits, a task that calls functions of the user wakes it at once: such
callers may be unable to run it.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
import weakref
from typing import Any, Callable, Iterator, Sequence

from synkhronos._machine.log import log

DOZE, _SLEEP = 0.001, 5.0  # seconds
DOZES = 50


class Lane:
    """A queue of tasks that run one at a time, and its thread."""

    def __init__(self) -> None:
        self.heap: list[tuple[int, int, Any]] = []
        self.is_busy = False
        self.thread: threading.Thread | None = None
        self.sleeper: Sleeper | None = None  # of the thread, while it sleeps

    @property
    def is_idle(self) -> bool:
        """Whether a task could run at once without passing another one."""
        return not self.is_busy and not self.heap


class Sleeper:
    """A thread that sleeps until a task or a result comes."""

    __slots__ = ("_lock", "is_awake", "is_dozing", "lanes")

    def __init__(self, lanes: Sequence[Lane], is_dozing: bool = False) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.is_awake = False
        self.is_dozing = is_dozing  # whether it will look for tasks soon by itself
        self.lanes = lanes  # of which it can run tasks

    def wake(self) -> None:
        """Wake the thread; to be called under the lock of the lanes."""
        if not self.is_awake:
            self.is_awake = True
            self._lock.release()

    def sleep(self, seconds: float) -> None:
        """Sleep until `wake`, or so long."""
        self._lock.acquire(timeout=seconds)


class Lanes:
    """The lanes of a store, for pushes and for pulls.

    The method `run` runs a task, ``run((lane, ...))``, and calls `release` for the lane;
    `runs_users_code` returns whether a task calls functions of the user. `lock` is that of all that
    changes here, and in the engine: methods are called under it, but for `stop` and `running`.
    """

    def __init__(
        self,
        n_push: int,
        n_pull: int,
        run: Callable[[Any], None],
        runs_users_code: Callable[[Any], bool],
    ) -> None:
        self.lock = threading.Lock()
        self.push = [Lane() for _ in range(n_push)]
        self.pull = [Lane() for _ in range(n_pull)]
        self.is_ended = False
        self.users = threading.local()  # `lanes`: those whose users' code this thread runs
        # Weak, so that a store that nothing refers to can end.
        self._run = weakref.WeakMethod(run)
        self._runs_users_code = weakref.WeakMethod(runs_users_code)
        self._order = itertools.count()
        self._shared: list[tuple[Lane, Any, Any]] = []
        self._sleepers: list[Sleeper] = []

    @property
    def all(self) -> list[Lane]:
        """The lanes of both kinds."""
        return [*self.push, *self.pull]

    def schedule(self, lane: Lane, task: Any) -> None:
        """Queue a task by its attribute `priority`."""
        self.put_back(lane, (-task.priority, next(self._order), task))

    def put_back(self, lane: Lane, entry: tuple[int, int, Any]) -> None:
        """Queue a task that `take` has set aside, at its old place."""
        heapq.heappush(lane.heap, entry)
        if not lane.is_busy:
            self.wake(lane)

    def release(self, lane: Lane) -> None:
        """Let the next task of a lane run, after one is done."""
        lane.is_busy = False
        if lane.heap:
            self.wake(lane)

    def take(self, lanes: Sequence[Lane], is_brief: bool = False) -> Any:
        """Return what a thread can run now: ``(lane, task)``, which makes the lane busy.

        Or ``(lane, task, reduction)``, if `reduction` has blocks to share; or None. With `is_brief`
        only what runs no code of the user, which may take any time. A task whose method `start`
        returns another one stands for that one; one that can't start is set aside by it.
        """
        for at, shared in enumerate(self._shared):
            lane, task, reduction = shared
            if not reduction.has_blocks:
                del self._shared[at]
                break
            if not (is_brief and self._is_users(task)):
                reduction.room -= 1
                return shared
        while True:
            best = None
            for lane in lanes:
                if lane.heap and not lane.is_busy:
                    first = lane.heap[0]
                    if is_brief and self._is_users(first[2]):
                        continue
                    if best is None or first[:2] < best.heap[0][:2]:
                        best = lane
            if best is None:
                return None
            entry = heapq.heappop(best.heap)
            task = entry[2].start(best, entry)
            if task is not None:
                best.is_busy = True
                return best, task

    def _is_users(self, task):
        runs = self._runs_users_code()
        return runs is not None and runs(task)

    @contextlib.contextmanager
    def running(self, lane: Lane) -> Iterator[None]:
        """Remember, in the block, that this thread runs users' code for a lane."""
        before = getattr(self.users, "lanes", ())
        self.users.lanes = (*before, lane)
        try:
            yield
        finally:
            self.users.lanes = before

    def share(self, lane: Lane, task: Any, reduction: Any) -> None:
        """Let other threads take blocks of a reduction that this thread begins."""
        reduction.room -= 1
        self._shared.append((lane, task, reduction))
        number = reduction.room
        while number and self._sleepers:
            self._sleepers.pop().wake()
            number -= 1
        for each in self.push:
            if number and each.sleeper is not None:
                self._wake_thread(each)
                number -= 1

    def unshare(self, reduction: Any) -> None:
        """Forget a reduction of which all blocks are taken."""
        self._shared = [shared for shared in self._shared if shared[2] is not reduction]

    def lie_down(self, lanes: Sequence[Lane], is_main: bool, is_dozing: bool) -> Sleeper:
        """Return a sleeper for a caller that waits, and can run tasks of these lanes."""
        # A Ctrl-C may end the main thread's wait: it would take a task with it.
        sleeper = Sleeper(() if is_main else lanes, is_dozing)
        self._sleepers.append(sleeper)
        for lane in lanes if is_main else ():
            if lane.heap and not lane.is_busy:
                self.wake(lane)
        return sleeper

    def rise(self, sleeper: Sleeper) -> None:
        """End a sleep; wake another thread for a task that this one was expected to run.

        The caller may wait no more.
        """
        sleeper.is_awake = True
        if sleeper in self._sleepers:
            self._sleepers.remove(sleeper)
        for lane in sleeper.lanes:
            if lane.heap and not lane.is_busy:
                self.wake(lane)

    def wake(self, lane: Lane) -> None:
        """Wake a caller that waits, or the thread of a lane, to run its next task."""
        is_urgent = bool(self._sleepers) and self._is_users(lane.heap[0][2])
        for at in range(len(self._sleepers) - 1, -1, -1):
            sleeper = self._sleepers[at]
            if lane in sleeper.lanes and not sleeper.is_awake:
                if is_urgent or not sleeper.is_dozing:
                    self._sleepers.pop(at).wake()
                return
        if lane.thread is None:
            self._start(lane)
        elif lane.sleeper is not None and (is_urgent or not lane.sleeper.is_dozing):
            self._wake_thread(lane)

    def _start(self, lane):
        thread = threading.Thread(
            target=_serve, args=(self, lane), name="synkhronos-store", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # too many; the next wake tries again
            log.warning("a thread of the store can't start, so waits run its tasks: %s", error)
        else:
            lane.thread = thread

    @staticmethod
    def _wake_thread(lane):
        if lane.sleeper is not None:
            lane.sleeper.wake()
            lane.sleeper = None

    def cancel(self, error: BaseException) -> None:
        """Fail all tasks that have not begun."""
        for lane in self.all:
            for _, _, task in lane.heap:
                task.finish(error)
            lane.heap = []

    def stop(self, seconds: Callable[[], float]) -> bool:
        """End all threads; return whether all tasks have ended in the time `seconds` returns."""
        with self.lock:
            self.is_ended = True
            for lane in self.all:
                self._wake_thread(lane)
        own = getattr(self.users, "lanes", ())
        for lane in self.all:
            if lane.thread not in (None, threading.current_thread()) and lane not in own:
                lane.thread.join(seconds())
        others = [lane for lane in self.all if lane not in own]
        while any(lane.is_busy for lane in others):  # of callers that wait
            if not seconds():
                return False
            time.sleep(DOZE)
        return True


def _serve(lanes, lane):
    """Run the tasks of a lane in its thread; end with the store."""
    dozes = 0
    while True:
        with lanes.lock:
            task = lanes.take([lane])
            if task is None:
                if lanes.is_ended or lanes._run() is None:
                    return
                lane.sleeper = sleeper = Sleeper([lane], is_dozing=dozes > 0)
        if task is None:
            sleeper.sleep(DOZE if dozes else _SLEEP)
            dozes = max(0, dozes - 1)
            continue
        dozes = DOZES
        run = lanes._run()
        if run is not None:
            run(task)
        del task, run
