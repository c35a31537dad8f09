"""The engine of a store: it closes rounds, reduces them, and copies results to pulls.

    push ──▶ Round, closed by its last push ──▶ push queue ──▶ reduction ──▶ backend ──▶ publish
    pull ──▶ Pull, ready when published     ──▶ pull queue ──▶ copy ──▶ callback ──▶ done

Each device has a queue for pushes and one for pulls. Small arrays are reduced and copied at once by
the call that completes them, if nothing waits before them.

Arrays of devices are not copied when they are pushed: they are read when the round is closed. Those
of one caller for all devices have been read when the call returns, which reduces them: see
`Engine.push_all`.

References
----------
mshadow-ps (2014), the level of one machine; T. Chen et al., MXNet, arXiv:1512.01274, section 2.3.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from _thread import get_ident
from contextlib import nullcontext
from typing import Any, Callable, Sequence

import numpy as np

from synkhronos._arithmetic.blocks import reduce_block
from synkhronos._machine.interrupts import interrupts_held
from synkhronos._machine.log import log
from synkhronos.parameter_server.backends import Backend
from synkhronos.parameter_server.errors import CallbackFailed, OutOfTurn, RoundTimeout, StoreClosed
from synkhronos.parameter_server.parameters import Parameters
from synkhronos.parameter_server.pulls import Pull
from synkhronos.parameter_server.reductions import Reduction
from synkhronos.parameter_server.rounds import Buffer, Future, Key, PushRound, Slot, devices_have
from synkhronos.parameter_server.task_queues import DOZE, DOZES, TaskQueues

WARN_AFTER = 10.0  # seconds of a wait
_AT_ONCE = nullcontext()
_MOST_AHEAD = 2  # rounds of a key that one caller pushes before the first is reduced
_MAIN = threading.main_thread()


class Engine:
    """Runs the rounds of all keys of one store; the backend says what becomes of a reduction."""

    def __init__(self, parameters: Parameters, n_devices: int, backend: Backend) -> None:
        self.backend = backend
        self.error: BaseException | None = None  # the failure after which all calls fail
        self._is_closing = False
        self._process = os.getpid()
        self.recording: Any = None  # a StoreRecording, while a profile is recorded
        n_push = n_devices if parameters["push_thread"] == "ndev" else 1
        n_pull = n_devices if parameters["pull_thread"] == "ndev" else 1
        self._queues = TaskQueues(n_push, n_pull, self._run, self._runs_users_code)
        self.lock = self._queues.lock
        self._bound = parameters["bigarray_bound"]
        cores = len(os.sched_getaffinity(0))
        self._n_threads = max(1, min(parameters["reduce_thread"], cores))

    def push(self, slot: Slot, array: Any, priority: int, now: bool = False) -> PushRound:
        """Add a device's array to the open round of a key.

        With `now` the last device of a round reduces it in this call, however large it is.
        """
        key = slot.key
        with self.lock:
            self._check(key)
            opened = key.round
            if opened is None:
                opened = key.round = PushRound(self, key, key.n_devices)
            elif opened.parts[slot.position] is not None:
                raise OutOfTurn(
                    f"device {slot.device} has pushed key {key.name!r} already in round "
                    f"{opened.version}, in which {devices_have(key.missing())} not pushed yet: "
                    "call pull_wait before the next push."
                )
            opened.parts[slot.position] = array
            opened.n_missing -= 1
            slot.rounds += 1
            if priority > opened.priority:
                opened.priority = priority
            if opened.n_missing:
                return opened
            task = self._close(opened, slot.position, now)
        if task is not None:
            self._run(task)
        return opened

    def make_room(self, pairs: Sequence[tuple[Key, Sequence[Any]]]) -> None:
        """Wait until fewer than `_MOST_AHEAD` rounds of each key are to be reduced."""
        for key, _ in pairs:
            while len(key.closed) >= _MOST_AHEAD and not getattr(self._queues.users, "queues", ()):
                with contextlib.suppress(IndexError):  # another thread has ended it
                    self.wait(key.closed[0])

    def push_all(
        self, pairs: Sequence[tuple[Key, Sequence[Any]]], priority: int
    ) -> list[PushRound]:
        """Make a whole round of each key from arrays of one caller, or of none.

        The arrays have been read when this returns.
        """
        with self.lock:
            self._refuse_open(pairs)
        return [self._push_all(key, arrays, priority)[0] for key, arrays in pairs]

    def _refuse_open(self, pairs):
        for key, _ in pairs:
            self._check(key)
            if key.round is not None:
                raise OutOfTurn(
                    f"a round of key {key.name!r} is open, in which "
                    f"{devices_have(key.missing())} not pushed yet: one caller for all devices "
                    "can't push in the midst of it."
                )

    def _push_all(self, key, arrays, priority, into=None):
        """Make a round, and a pull of it into arrays; read what was pushed.

        A round that can't be reduced in this call gets its sum, or what is to be gathered, in
        memory of its own.
        """
        reduced = None
        with self.lock:
            self._refuse_open([(key, arrays)])
            is_free = self._is_free(key)
            if is_free:
                made, pull, task = self._close_all(key, arrays, None, priority, into)
            else:
                reduced = key.spare.pop() if key.spare else key.new_buffer()
        if not is_free:
            self._reduce_apart(key, arrays, reduced.flat)
            with self.lock:
                self._refuse_open([(key, arrays)])
                made, pull, task = self._close_all(key, arrays, reduced, priority, into)
        if task is not None:
            self._run(task)
            self.wait(made)  # for other threads, which have taken blocks
        return made, pull

    @staticmethod
    def _reduce_apart(key, arrays, result):
        parts = [each.reshape(-1) for each in _arrays(arrays, None)]
        if key.is_small:
            reduce_block(key.op, parts, result, len(parts))
            return
        reduction = Reduction(key.op, parts, result)
        reduction.run()
        if reduction.error is not None:
            raise reduction.error

    def _is_free(self, key):
        """Return whether the next round can be reduced in a caller's thread at once."""
        if key.closed or not self._queues.push[0].is_idle:
            return False
        is_small = key.is_small and self.backend.is_plain
        return is_small or self.backend.is_quick(key, key.n_closed + 1)

    def _close_all(self, key, arrays, reduced, priority, into):
        if reduced is not None:
            n_parts = len(key.slots) if key.op == "gather" else 1
            arrays = list(reduced.flat.reshape(n_parts, -1))
        made, pull = PushRound(self, key, len(arrays)), None
        made.parts, made.priority, made.reduced = list(arrays), priority, reduced
        for slot in key.slots:
            slot.rounds += 1
        if into is not None:
            pull = self._pull_of_caller(key, into, made.version, priority)
            key.waiting.append(pull)
        return made, pull, self._close(made, 0, now=reduced is None)

    def pull(
        self,
        key: Key,
        slot: Slot | None,
        arrays: Sequence[Any],
        priority: int,
        callback: Callable[[], Any] | None = None,
    ) -> Pull:
        """Ask for the result of a device's last round, or without a slot of all closed ones."""
        with self.lock:
            self._check(key)
            if slot is None:
                pull = self._pull_of_caller(key, arrays, key.n_closed, priority)
            else:
                if slot.pull is not None and not slot.pull.is_done:
                    raise OutOfTurn(
                        f"device {slot.device} waits for a pull of key {key.name!r} already: call "
                        "pull_wait before the next pull_req."
                    )
                queue = self._queues.pull[slot.position % len(self._queues.pull)]
                pull = Pull(self, key, slot, queue, arrays, slot.rounds, priority, callback)
                slot.pull = pull
            is_wanted = self._begin_pull(pull)
        if is_wanted:
            self.backend.request(key, pull.needed, priority)
        return pull

    def push_pull(
        self,
        pairs: Sequence[tuple[Key, Sequence[Any]]],
        into: Sequence[Sequence[Any]],
        priority: int,
    ) -> list[Pull]:
        """Make whole rounds, and ask for their results: pulls are there when the rounds close."""
        with self.lock:
            self._refuse_open(pairs)
        pulls = []
        for (key, arrays), own in zip(pairs, into):
            pull = self._push_all(key, arrays, priority, own)[1]
            if self.backend.is_remote and not pull.is_done:
                self.backend.request(key, pull.needed, priority)
            pulls.append(pull)
        return pulls

    def _pull_of_caller(self, key, arrays, needed, priority):
        return Pull(self, key, None, self._queues.pull[0], arrays, needed, priority, None)

    def _begin_pull(self, pull):
        """Queue a pull, or let it wait for its round; return whether the backend is to be asked."""
        key = pull.key
        if pull.needed in key.failures and key.version <= pull.needed:
            pull.finish(key.failures[pull.needed])
            return False
        if self.backend.is_remote and self.backend.is_stale(key, pull):
            key.waiting.append(pull)
            return True
        if key.version >= pull.needed and key.source is not None:
            pull.make_ready(self._queues, key.source)
            return False
        key.waiting.append(pull)
        return self.backend.is_remote

    def wait(self, future: Future, timeout: float | None = None) -> None:
        """Wait until a future is done, and run tasks until then."""
        if future.is_done:
            return
        queue = getattr(future, "queue", None)
        self._refuse_in_users_code(future, queue)
        begun = time.monotonic()
        is_main = get_ident() == _MAIN.ident
        # Users' code may take longer than the timeout, and a Ctrl-C is held while it runs here.
        is_brief = is_main or timeout is not None
        queues = self._queues.push if queue is None else [*self._queues.push, queue]
        warn_at, dozes = WARN_AFTER, DOZES
        while not future.is_done:
            with self.held():
                with self.lock:
                    if future.is_done:
                        break
                    task = self._queues.take(queues, is_brief)
                    if task is None:
                        sleeper = self._queues.add_sleeper(queues, is_brief, dozes > 0)
                        if future.waiters is None:
                            future.waiters = []
                        future.waiters.append(sleeper)
                if task is not None:
                    self._run(task)
                    continue
            waited = time.monotonic() - begun
            left = warn_at - waited if timeout is None else min(warn_at, timeout) - waited
            try:
                sleeper.sleep(max(0.0, min(left, DOZE) if dozes else left))
                dozes = max(0, dozes - 1)
            finally:
                with self.lock:
                    self._queues.remove_sleeper(sleeper)
                    if future.waiters is not None:
                        future.waiters.remove(sleeper)
            waited = time.monotonic() - begun
            if not future.is_done and timeout is not None and waited >= timeout:
                raise RoundTimeout(
                    f"waited {waited:.1f} s for {self._waits_for(future)}",
                    future.key.name,
                    future.missing(),
                )
            if not future.is_done and waited >= warn_at:
                log.warning("has waited %.0f s for %s", waited, self._waits_for(future))
                warn_at *= 2
        recording = self.recording  # another thread may end it at any time
        if recording is not None:
            recording.record("wait", getattr(future, "key", None), begun, time.monotonic())

    def _refuse_in_users_code(self, future, queue):
        """Raise for a wait, in a callback or an updater, that would wait for its own end."""
        running = getattr(self._queues.users, "queues", ())
        if queue is not None and queue in running:
            raise OutOfTurn(
                f"a callback can't wait for {future}: both are of one device, and the pull is "
                "finished after this callback."
            )
        if any(each in self._queues.push for each in running):
            raise OutOfTurn(f"an updater can't wait for {future} of its own store.")

    def _waits_for(self, future):
        """Return what a future waits for, in words."""
        missing = future.missing()
        if missing:
            why = f"{devices_have(missing)} not pushed"
        elif self.backend.is_remote:
            why = self.backend.waits_for(future)
        elif isinstance(future, Pull) and not future.needed and future.key.version < 0:
            why = "no device has pushed, and there is no initial weight"
        else:
            why = "its reduction, copy or callback runs"
        return f"{future}: {why}."

    def _close(self, closed, position, now):
        """Queue a round whose last push has come; return it with its queue if it is to run now."""
        key = closed.key
        key.round = None
        key.n_closed = closed.version
        key.closed.append(closed)
        queue = self._queues.push[position % len(self._queues.push)]
        is_free = len(key.closed) == 1 and queue.is_idle
        if is_free and key.is_small and self.backend.is_plain:
            self._reduce_small(closed)
        elif is_free and now and self.backend.is_quick(key, closed.version):
            queue.is_busy = key.is_reducing = True
            return queue, closed
        else:
            self._queues.schedule(queue, closed)
        return None

    def _reduce_small(self, closed):
        """Reduce and publish a small round, under the lock."""
        key = closed.key
        try:
            buffer = key.free_buffer()
            parts = _arrays(closed.parts, key.shape)
            reduce_block(key.op, parts, buffer.shaped, len(parts))
        except Exception as error:
            self._end_round(closed, None, error)
        else:
            self._end_round(closed, buffer, None)

    def _run_round(self, closed, queue):
        """Reduce a round of any size; the thread that finishes it releases the queue."""
        key, begun = closed.key, time.monotonic()
        error = None
        try:
            closed.buffer = self.backend.memory_for(closed)
            if closed.buffer is not None and closed.buffer is closed.reduced:
                return self._conclude(closed, queue, None)
            if closed.buffer is None:
                with self.lock:
                    closed.buffer = key.free_buffer()
            parts = [part.reshape(-1) for part in _arrays(closed.parts, None)]
            with self.lock:
                pulls, copies = closed.copies(parts) if self.backend.is_plain else ((), ())
            n_threads = self._n_threads if key.size >= self._bound else 1
            reduction = Reduction(key.op, parts, closed.buffer.flat, copies, n_threads)
        except BaseException as caught:
            error = caught
        if error is not None:
            return self._conclude(closed, queue, error)
        for pull in pulls:
            pull.is_copied = True
        if reduction.has_blocks and n_threads > 1:
            with self.lock:
                self._queues.share(queue, closed, reduction)
            is_last = reduction.run()
            with self.lock:
                self._queues.unshare(reduction)
        else:
            is_last = reduction.run()
        recording = self.recording
        if recording is not None:
            recording.record("reduce", key, begun, time.monotonic())
        if is_last:
            self._conclude(closed, queue, reduction.error)

    def _conclude(self, closed, queue, error):
        """Give the reduction to the backend, end the round, and release the queue."""
        buffer = None
        if error is None:
            recording = self.recording
            if recording is not None and self.backend.is_remote:
                recording.note_handed(closed)
            try:
                with self._queues.running(queue):
                    buffer = self.backend.accept(closed)
            except BaseException as caught:
                error = caught
                if self.backend.runs_users_code:
                    failed = CallbackFailed(
                        f"the update of key {closed.key.name!r} in round {closed.version} has "
                        f"raised {type(caught).__name__}: {caught}"
                    )
                    failed.__cause__ = caught
                    error = failed
        with self.lock:
            self._end_round(closed, buffer, error)
            self._queues.release(queue)

    def _end_round(self, closed, buffer, error):
        key = closed.key
        key.closed.popleft()
        key.is_reducing = False
        closed.parts = [None] * len(closed.parts)  # they are the caller's
        if closed.reduced is not None:
            key.spare.append(closed.reduced)
        closed.finish(error)
        if error is not None:
            key.failures[closed.version] = error
            key.fail_pulls(error, last=closed.version)
        elif buffer is not None:
            self._publish(key, closed.version, buffer)
        set_aside, key.set_aside = key.set_aside, []
        for queue, entry in set_aside:
            self._queues.put_back(queue, entry)

    def publish(self, key: Key, version: int, buffer: Buffer) -> None:
        """Make a buffer the result of a round, and of all before it."""
        recording = self.recording
        if recording is not None:
            recording.note_arrived(key, version)
        with self.lock:
            self._publish(key, version, buffer)

    def _publish(self, key, version, buffer):
        if version < key.version:
            return  # a later one has come before
        key.version, key.source = version, buffer
        key.failures = {number: e for number, e in key.failures.items() if number > version}
        waiting, key.waiting = key.waiting, []
        for pull in waiting:
            if pull.needed <= version:
                pull.make_ready(self._queues, buffer)
            else:
                key.waiting.append(pull)

    def fail(self, error: BaseException, keys: Sequence[Key]) -> None:
        """Fail all pulls that wait, and all calls from now on."""
        with self.lock:
            self.error = error
            for key in keys:
                key.fail_pulls(error)

    def fail_round(self, key: Key, version: int | None, error: BaseException) -> None:
        """Fail the pulls of a round; without a number all pulls of a key that wait."""
        with self.lock:
            if version is not None:
                key.failures[version] = error
            key.fail_pulls(error, version or 0, version)

    def _runs_users_code(self, task):
        if isinstance(task, Pull):
            return task.callback is not None
        return self.backend.runs_users_code or self.backend.is_remote

    def _run(self, task):
        if len(task) == 3:
            queue, closed, reduction = task
            if reduction.run():
                self._conclude(closed, queue, reduction.error)
        elif isinstance(task[1], Pull):
            task[1].run(self._queues, self.recording)
        else:
            self._run_round(task[1], task[0])

    def held(self, pushed: Slot | Sequence[tuple[Key, Any]] | None = None) -> Any:
        """Return a context for calls of the engine in any thread, which a Ctrl-C does not split.

        A profile records those that push or pull: `pushed` is the slot of a device, or pairs of
        keys and arrays of one caller.

        Raises
        ------
        StoreClosed
            In a child process: the threads are its parent's, and the lock may be held for ever.
        """
        if os.getpid() != self._process:
            raise StoreClosed("the store belongs to the process that has made it: make another.")
        # Only the main thread gets a KeyboardInterrupt, and it would leave a round half closed.
        held = interrupts_held() if get_ident() == _MAIN.ident else _AT_ONCE
        recording = self.recording
        return held if recording is None or pushed is None else recording.call(held, pushed)

    def _check(self, key):
        error = self.error or key.error
        if error is not None:
            raise error.with_traceback(None)
        if self._is_closing:
            raise StoreClosed("the store is closed: make another one with create().")

    def forget(self, key: Key, error: BaseException) -> None:
        """Fail all calls with a key that could not be made."""
        with self.lock:
            key.error = error
            key.fail_pulls(error)
            if key.round is not None:
                key.round.finish(error)

    def drain(self, keys: Sequence[Key], end: float | None = None) -> None:
        """Wait until all rounds that are closed are reduced, and all pulls done that are ready.

        Raises RoundTimeout if something is left at `end`, a time of ``time.monotonic()``.
        """
        for key in keys:
            while True:
                with self.lock:
                    left = [each for each in (*key.closed, *key.ready) if not each.is_done]
                if not left:
                    break
                try:
                    self.wait(left[0], None if end is None else max(0.0, end - time.monotonic()))
                except OutOfTurn:  # in a callback or an updater
                    break

    def close(self, keys: Sequence[Key], drain: bool, timeout: float) -> None:
        """Finish what can be finished, or drop it; fail the rest, and end all threads.

        A callback or an updater that runs can't be stopped: RoundTimeout after `timeout` seconds.
        """
        end = time.monotonic() + timeout
        with self.lock:
            self._is_closing = True
        late, dropped = None, StoreClosed("the store was closed before this was done.")
        try:
            if drain:
                self.drain(keys, end)
        except RoundTimeout as error:
            late = error
        finally:
            with self.held(), self.lock:
                self._queues.cancel(dropped)
                for key in keys:
                    key.cancel(dropped)
        if not self._queues.stop(lambda: max(0.0, end - time.monotonic())) and late is None:
            late = RoundTimeout(
                f"a callback or an updater has not returned {timeout:g} s after close()."
            )
        if late is not None:
            raise late


def _arrays(parts, shape):
    """Return the arrays of a round, of a device's or on the host."""
    arrays = [x if type(x) is np.ndarray else x.read() for x in parts]
    if shape is None:
        return arrays
    return [x if x.shape == shape else x.reshape(shape) for x in arrays]
