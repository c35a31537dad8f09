"""Task queues: each runs one task at a time, in its thread or in a caller that waits.

    schedule ──▶ queue ──▶ its thread, or a caller that waits ──▶ run ──▶ release

A queue runs tasks by priority, and first come, first served among equals. To wake a thread takes
longer than most tasks. So callers that wait run tasks themselves, and a thread that has just run a
task, or has just begun to wait, dozes: it looks for tasks every millisecond, without being woken.
But while a caller waits, a task that calls users' code wakes the thread at once, because the caller
may not be allowed to run it.
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


class TaskQueue:
    """A queue, and the thread that runs its tasks."""

    def __init__(self) -> None:
        self.heap: list[tuple[int, int, Any]] = []
        self.is_busy = False
        self.thread: threading.Thread | None = None
        self.sleeper: Sleeper | None = None  # of the thread, while it sleeps

    @property
    def is_idle(self) -> bool:
        """Whether no task of the queue runs or waits."""
        return not self.is_busy and not self.heap


class Sleeper:
    """A thread that sleeps until a task or a result comes."""

    __slots__ = ("_lock", "is_awake", "is_dozing", "queues")

    def __init__(self, queues: Sequence[TaskQueue], is_dozing: bool = False) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.is_awake = False
        self.is_dozing = is_dozing  # whether it looks for tasks without being woken
        self.queues = queues  # whose tasks it can run

    def wake(self) -> None:
        """Wake the thread; to be called under the lock of the queues."""
        if not self.is_awake:
            self.is_awake = True
            self._lock.release()

    def sleep(self, seconds: float) -> None:
        """Sleep until `wake`, or so long."""
        self._lock.acquire(timeout=seconds)


class TaskQueues:
    """The queues of a store, for pushes and for pulls.

    ``run((queue, task))`` runs a task, which then calls `release` for the queue;
    ``runs_users_code(task)`` says whether a task calls users' code. `lock` guards all state here
    and in the engine: callers of all methods but `stop` and `running` hold it.
    """

    def __init__(
        self,
        n_push: int,
        n_pull: int,
        run: Callable[[Any], None],
        runs_users_code: Callable[[Any], bool],
    ) -> None:
        self.lock = threading.Lock()
        self.push = [TaskQueue() for _ in range(n_push)]
        self.pull = [TaskQueue() for _ in range(n_pull)]
        self.is_ended = False
        self._users = threading.local()  # `queues`: those for which this thread runs users' code
        # Weak: the threads must not keep a store alive that the script has dropped.
        self._run = weakref.WeakMethod(run)
        self._runs_users_code = weakref.WeakMethod(runs_users_code)
        self._order = itertools.count()
        self._shared: list[tuple[TaskQueue, Any]] = []
        self._sleepers: list[Sleeper] = []

    @property
    def all(self) -> list[TaskQueue]:
        """The queues of both kinds."""
        return [*self.push, *self.pull]

    def schedule(self, queue: TaskQueue, task: Any) -> None:
        """Queue a task by its attribute `priority`."""
        self.put_back(queue, (-task.priority, next(self._order), task))

    def put_back(self, queue: TaskQueue, entry: tuple[int, int, Any]) -> None:
        """Queue a task that `take` has set aside, at its old place."""
        heapq.heappush(queue.heap, entry)
        if not queue.is_busy:
            self.wake(queue)

    def release(self, queue: TaskQueue) -> None:
        """Let the next task of a queue run, after one is done."""
        queue.is_busy = False
        if queue.heap:
            self.wake(queue)

    def take(self, queues: Sequence[TaskQueue], is_brief: bool = False) -> Any:
        """Return ``(queue, task)`` for a thread to run, and make the queue busy; or return None.

        A task that `share` was given comes first, and is taken by several threads. `is_brief`
        leaves out tasks that run users' code, which may take long. ``task.start()`` returns the
        task to run in its place, or None.
        """
        for at, (queue, task) in enumerate(self._shared):
            if not task.reduction.has_blocks:
                del self._shared[at]
                break
            if not (is_brief and self._is_users(task)):
                task.reduction.room -= 1
                return queue, task
        while True:
            best = None
            for queue in queues:
                if queue.heap and not queue.is_busy:
                    first = queue.heap[0]
                    if is_brief and self._is_users(first[2]):
                        continue
                    if best is None or first[:2] < best.heap[0][:2]:
                        best = queue
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

    @property
    def of_users_code(self) -> tuple[TaskQueue, ...]:
        """The queues for which this thread runs users' code."""
        return getattr(self._users, "queues", ())

    @contextlib.contextmanager
    def running(self, queue: TaskQueue) -> Iterator[None]:
        """Remember, in the block, that this thread runs users' code for a queue."""
        before = self.of_users_code
        self._users.queues = (*before, queue)
        try:
            yield
        finally:
            self._users.queues = before

    def share(self, queue: TaskQueue, task: Any) -> None:
        """Let other threads take blocks of the task's reduction, which this thread begins."""
        task.reduction.room -= 1
        self._shared.append((queue, task))
        number = task.reduction.room
        while number and self._sleepers:
            self._sleepers.pop().wake()
            number -= 1
        for each in self.push:
            if number and each.sleeper is not None:
                self._wake_thread(each)
                number -= 1

    def unshare(self, task: Any) -> None:
        """Forget a task of which all blocks are taken."""
        self._shared = [shared for shared in self._shared if shared[1] is not task]

    def add_sleeper(self, queues: Sequence[TaskQueue], is_main: bool, is_dozing: bool) -> Sleeper:
        """Return a sleeper for a caller that waits and can run tasks of these queues."""
        # A Ctrl-C may end the main thread's wait, so no task is left to it.
        sleeper = Sleeper(() if is_main else queues, is_dozing)
        self._sleepers.append(sleeper)
        for queue in queues if is_main else ():
            if queue.heap and not queue.is_busy:
                self.wake(queue)
        return sleeper

    def remove_sleeper(self, sleeper: Sleeper) -> None:
        """End a sleep; wake other threads for tasks that this one, which may leave, was to run."""
        sleeper.is_awake = True
        if sleeper in self._sleepers:
            self._sleepers.remove(sleeper)
        for queue in sleeper.queues:
            if queue.heap and not queue.is_busy:
                self.wake(queue)

    def wake(self, queue: TaskQueue) -> None:
        """Wake a caller that waits, or the thread of a queue, to run its next task."""
        is_urgent = bool(self._sleepers) and self._is_users(queue.heap[0][2])
        for at in range(len(self._sleepers) - 1, -1, -1):
            sleeper = self._sleepers[at]
            if queue in sleeper.queues and not sleeper.is_awake:
                if is_urgent or not sleeper.is_dozing:
                    self._sleepers.pop(at).wake()
                return
        if queue.thread is None:
            self._start(queue)
        elif queue.sleeper is not None and (is_urgent or not queue.sleeper.is_dozing):
            self._wake_thread(queue)

    def _start(self, queue):
        thread = threading.Thread(
            target=_serve, args=(self, queue), name="synkhronos-store", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # too many; the next wake tries again
            log.warning("a thread of the store can't start, so waits run its tasks: %s", error)
        else:
            queue.thread = thread

    @staticmethod
    def _wake_thread(queue):
        if queue.sleeper is not None:
            queue.sleeper.wake()
            queue.sleeper = None

    def cancel(self, error: BaseException) -> None:
        """Fail all tasks that have not begun."""
        for queue in self.all:
            for _, _, task in queue.heap:
                task.finish(error)
            queue.heap = []

    def stop(self, seconds: Callable[[], float]) -> bool:
        """End all threads; return whether all tasks end before `seconds`, the time left, is 0."""
        with self.lock:
            self.is_ended = True
            for queue in self.all:
                self._wake_thread(queue)
        own = self.of_users_code
        for queue in self.all:
            if queue.thread not in (None, threading.current_thread()) and queue not in own:
                queue.thread.join(seconds())
        others = [queue for queue in self.all if queue not in own]
        while any(queue.is_busy for queue in others):  # waiting callers run the rest
            if not seconds():
                return False
            time.sleep(DOZE)
        return True


def _serve(queues, queue):
    """Run the tasks of a queue in its thread; end with the store."""
    dozes = 0
    while True:
        with queues.lock:
            task = queues.take([queue])
            if task is None:
                if queues.is_ended or queues._run() is None:
                    return
                queue.sleeper = sleeper = Sleeper([queue], is_dozing=dozes > 0)
        if task is None:
            sleeper.sleep(DOZE if dozes else _SLEEP)
            dozes = max(0, dozes - 1)
            continue
        dozes = DOZES
        run = queues._run()
        if run is not None:
            run(task)
        del task, run
