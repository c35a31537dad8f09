"""The engine of a store: it closes rounds, reduces them, and copies results to pulls.

    push ──▶ Round, closed by its last push ──▶ push queue ──▶ reduction ──▶ backend ──▶ publish
    pull ──▶ Pull, ready when published     ──▶ pull queue ──▶ copy ──▶ callback ──▶ done

Each device has a queue for pushes and one for pulls. Small arrays skip an empty queue: the call
that closes their round also reduces and copies them.

A device's array is not copied when it is pushed: it is read when the round is closed. If one caller
pushes the arrays of all devices, `Engine.push_rounds` has read them when it returns.

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

from synkhronos._arithmetic.blocks import reduce_block
from synkhronos._machine.interrupts import interrupts_held
from synkhronos._machine.log import log
from synkhronos.parameter_server.backends import Backend
from synkhronos.parameter_server.errors import CallbackFailed, OutOfTurn, RoundTimeout, StoreClosed
from synkhronos.parameter_server.parameters import Parameters
from synkhronos.parameter_server.reductions import Reduction
from synkhronos.parameter_server.rounds import (
    Buffer,
    Future,
    Key,
    Pull,
    PushRound,
    SharedBlocks,
    Slot,
    arrays_of,
    devices_have,
)
from synkhronos.parameter_server.task_queues import DOZE, DOZES, TaskQueue, TaskQueues

WARN_AFTER = 10.0  # seconds of a wait
_NOT_HELD = nullcontext()
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
        self.queues = TaskQueues(n_push, n_pull, self._run, self._runs_users_code)
        self.lock = self.queues.lock
        self._bound = parameters["bigarray_bound"]
        cores = len(os.sched_getaffinity(0))
        self._n_threads = max(1, min(parameters["reduce_thread"], cores))

    def push(self, slot: Slot, array: Any, priority: int, now: bool = False) -> PushRound:
        """Add a device's array to the open round of a key.

        With `now` the push that closes the round also reduces it, however large it is.
        """
        key = slot.key
        with self._held(slot):
            with self.lock:
                self._check(key)
                push_round = key.round
                if push_round is None:
                    push_round = key.round = PushRound(self, key, [None] * key.n_devices)
                elif push_round.parts[slot.position] is not None:
                    raise OutOfTurn(
                        f"device {slot.device} has pushed key {key.name!r} already in round "
                        f"{push_round.version}, in which {devices_have(key.missing())} not pushed "
                        "yet: call pull_wait before the next push."
                    )
                push_round.parts[slot.position] = array
                push_round.n_missing -= 1
                slot.rounds += 1
                if priority > push_round.priority:
                    push_round.priority = priority
                if push_round.n_missing:
                    return push_round
                key.round = None
                queue = self.queues.push[slot.position % len(self.queues.push)]
                task = self._close(push_round, queue, self._is_free(key, queue, now))
            if task is not None:
                self._run(task)
            return push_round

    def push_rounds(
        self, rounds: Sequence[tuple[Key, Sequence[Any], Sequence[Any] | None]], priority: int
    ) -> list[Future]:
        """Push the arrays of all devices, a whole round of each key; return its pull, or the round.

        `rounds` has tuples (key, pushed arrays, arrays for the result, or None without a pull).
        First wait until fewer than `_MOST_AHEAD` rounds of each key are still to be reduced.
        """
        for key, _, _ in rounds:
            while len(key.closed) >= _MOST_AHEAD and not self.queues.of_users_code:
                with contextlib.suppress(IndexError):  # another thread has reduced it
                    self.wait(key.closed[0])
        futures = []
        with self._held(rounds):
            with self.lock:
                for key, _, _ in rounds[1:]:  # `_push_round` checks the first
                    self._refuse_open(key)
            for key, arrays, into in rounds:
                futures.append(self._push_round(key, arrays, into, priority))
        return futures

    def _refuse_open(self, key):
        self._check(key)
        if key.round is not None:
            raise OutOfTurn(
                f"a round of key {key.name!r} is open, in which {devices_have(key.missing())} not "
                "pushed yet: one caller for all devices can't push in the midst of it."
            )

    def _push_round(self, key, arrays, into, priority):
        """Close a round of one caller's arrays; return its pull, or the round if none is asked for.

        A round that must wait for earlier ones is reduced now, too, into memory of its own.
        """
        queue, into_queue = self.queues.push[0], self.queues.pull[0]
        with self.lock:
            self._refuse_open(key)
            is_free = self._is_free(key, queue, now=True)
            if is_free:
                whole, pull = key.whole_round(self, arrays, priority, into, into_queue)
                task = self._close(whole, queue, is_free)
            else:
                reduced = key.spare.pop() if key.spare else key.new_buffer()
        if not is_free:
            self._reduce_apart(key, arrays, reduced.flat)
            parts = reduced.flat.reshape(len(arrays) if key.op == "gather" else 1, -1)
            with self.lock:
                self._refuse_open(key)
                whole, pull = key.whole_round(self, parts, priority, into, into_queue)
                whole.reduced = reduced
                task = self._close(whole, queue, self._is_free(key, queue, now=False))
        if task is not None:
            self._run(task)
            self.wait(whole)  # other threads may still reduce blocks of it
        if pull is None:
            return whole
        if self.backend.is_remote and not pull.is_done:
            self.backend.request(key, pull.needed, priority)
        return pull

    @staticmethod
    def _reduce_apart(key, arrays, result):
        parts = arrays_of(arrays, -1)
        if key.is_small:
            reduce_block(key.op, parts, result, len(parts))
            return
        reduction = Reduction(key.op, parts, result)
        reduction.run()
        if reduction.error is not None:
            raise reduction.error

    def _is_free(self, key, queue, now):
        """Return whether a call may reduce the key's next round; a large one only if `now`."""
        if key.closed or not queue.is_idle:
            return False
        is_small = key.is_small and self.backend.is_plain
        return is_small or (now and self.backend.is_quick(key, key.n_closed + 1))

    def pull(
        self,
        key: Key,
        slot: Slot | None,
        arrays: Sequence[Any],
        priority: int,
        callback: Callable[[], Any] | None = None,
    ) -> Pull:
        """Ask for the result of a device's last round; without a slot, of the last closed round."""
        with self._held([(key, arrays)] if slot is None else slot):
            with self.lock:
                self._check(key)
                if slot is None:
                    queue = self.queues.pull[0]
                    pull = Pull(self, key, None, queue, arrays, key.n_closed, priority)
                else:
                    if slot.pull is not None and not slot.pull.is_done:
                        raise OutOfTurn(
                            f"device {slot.device} waits for a pull of key {key.name!r} already: "
                            "call pull_wait before the next pull_req."
                        )
                    queue = self.queues.pull[slot.position % len(self.queues.pull)]
                    pull = Pull(self, key, slot, queue, arrays, slot.rounds, priority, callback)
                    slot.pull = pull
                is_wanted = self._begin_pull(pull)
            if is_wanted:
                self.backend.request(key, pull.needed, priority)
            return pull

    def _begin_pull(self, pull):
        """Queue a pull, or let it wait for its round; return whether to ask the servers."""
        key = pull.key
        if pull.needed in key.failures and key.version <= pull.needed:
            pull.finish(key.failures[pull.needed])
            return False
        if self.backend.is_remote and self.backend.is_stale(key, pull):
            key.waiting.append(pull)
            return True
        if key.version >= pull.needed and key.source is not None:
            pull.make_ready(self.queues, key.source)
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
        queues = self.queues.push if queue is None else [*self.queues.push, queue]
        # A Ctrl-C is held while this thread runs a task, and users' code may outlast a timeout.
        is_brief = get_ident() == _MAIN.ident or timeout is not None
        warn_at, dozes = WARN_AFTER, DOZES
        while not future.is_done:
            sleeper = self._run_or_sleep(future, queues, is_brief, dozes > 0)
            if sleeper is None:
                continue
            waited = time.monotonic() - begun
            left = warn_at - waited if timeout is None else min(warn_at, timeout) - waited
            try:
                sleeper.sleep(max(0.0, min(left, DOZE) if dozes else left))
                dozes = max(0, dozes - 1)
            finally:
                with self.lock:
                    self.queues.remove_sleeper(sleeper)
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
        recording = self.recording  # another thread may make it None at any time
        if recording is not None:
            recording.record("wait", getattr(future, "key", None), begun, time.monotonic())

    def _run_or_sleep(self, future, queues, is_brief, is_dozing):
        """Run a task and return None; without one return a sleeper, which the future wakes."""
        with self._held():
            with self.lock:
                if future.is_done:
                    return None
                task = self.queues.take(queues, is_brief)
                if task is None:
                    sleeper = self.queues.add_sleeper(queues, is_brief, is_dozing)
                    if future.waiters is None:
                        future.waiters = []
                    future.waiters.append(sleeper)
                    return sleeper
            self._run(task)
            return None

    def _refuse_in_users_code(self, future, queue):
        """Raise if a callback or an updater waits for something that needs its own end first."""
        running = self.queues.of_users_code
        if queue is not None and queue in running:
            raise OutOfTurn(
                f"a callback can't wait for {future}: both are of one device, and the pull is "
                "finished after this callback."
            )
        if any(each in self.queues.push for each in running):
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

    def _close(self, push_round, queue, is_free):
        """Close a round: reduce it if small, queue it, or return (queue, round) for `_run`."""
        key = push_round.key
        key.n_closed = push_round.version
        key.closed.append(push_round)
        if not is_free:
            self.queues.schedule(queue, push_round)
        elif key.is_small and self.backend.is_plain:
            push_round.reduce(self.queues)
        else:
            queue.is_busy = key.is_reducing = True
            return queue, push_round
        return None

    def reduce(self, push_round: PushRound, queue: TaskQueue) -> None:
        """Reduce a round of any size; the thread that finishes it releases the queue."""
        key, begun = push_round.key, time.monotonic()
        try:
            reduction = self._prepare(push_round)
        except BaseException as error:
            return self.conclude(push_round, queue, error)
        if reduction is None:
            return self.conclude(push_round, queue, None)
        if reduction.has_blocks and reduction.room > 1:
            shared = SharedBlocks(push_round, reduction)
            with self.lock:
                self.queues.share(queue, shared)
            is_last = reduction.run()
            with self.lock:
                self.queues.unshare(shared)
        else:
            is_last = reduction.run()
        recording = self.recording
        if recording is not None:
            recording.record("reduce", key, begun, time.monotonic())
        if is_last:
            self.conclude(push_round, queue, reduction.error)

    def _prepare(self, push_round):
        """Return the reduction of a round, or None if that was reduced before it was queued."""
        key = push_round.key
        push_round.buffer = self.backend.memory_for(push_round)
        if push_round.buffer is not None and push_round.buffer is push_round.reduced:
            return None
        if push_round.buffer is None:
            with self.lock:
                push_round.buffer = key.free_buffer()
        parts = arrays_of(push_round.parts, -1)
        with self.lock:
            pulls, copies = push_round.copies(parts) if self.backend.is_plain else ((), ())
        n_threads = self._n_threads if key.size >= self._bound else 1
        reduction = Reduction(key.op, parts, push_round.buffer.flat, copies, n_threads)
        for pull in pulls:
            pull.is_copied = True
        return reduction

    def conclude(self, push_round: PushRound, queue: TaskQueue, error: Any) -> None:
        """Give the reduction to the backend, end the round, and release the queue."""
        buffer = None
        if error is None:
            recording = self.recording
            if recording is not None and self.backend.is_remote:
                recording.note_handed(push_round)
            try:
                with self.queues.running(queue):
                    buffer = self.backend.accept(push_round)
            except BaseException as caught:
                error = caught
                if self.backend.runs_users_code:
                    failed = CallbackFailed(
                        f"the update of key {push_round.key.name!r} in round {push_round.version} "
                        f"has raised {type(caught).__name__}: {caught}"
                    )
                    failed.__cause__ = caught
                    error = failed
        with self.lock:
            push_round.end(self.queues, buffer, error)
            self.queues.release(queue)

    def publish(self, key: Key, version: int, buffer: Buffer) -> None:
        """Make a buffer the result of a round, and of all before it."""
        recording = self.recording
        if recording is not None:
            recording.note_arrived(key, version)
        with self.lock:
            key.publish(version, buffer, self.queues)

    def fail(self, error: BaseException, keys: Sequence[Key]) -> None:
        """Fail all pulls that wait, and all calls from now on."""
        with self.lock:
            self.error = error
            for key in keys:
                key.fail_pulls(error)

    def fail_round(self, key: Key, version: int | None, error: BaseException) -> None:
        """Fail the pulls that wait for a round; without a version, all that wait for the key."""
        with self.lock:
            if version is not None:
                key.failures[version] = error
            key.fail_pulls(error, version or 0, version)

    def _runs_users_code(self, task):
        if isinstance(task, Pull):
            return task.callback is not None
        return self.backend.runs_users_code or self.backend.is_remote

    def _run(self, taken):
        queue, task = taken
        task.run(queue)

    def _held(self, pushed=None):
        """Return a context for a call of the engine; a Ctrl-C waits until it ends.

        With `pushed`, a device's slot or one caller's list of (key, ...), profiles record the call.
        Raise StoreClosed in a forked process: it lacks the threads, and the lock may be held.
        """
        if os.getpid() != self._process:
            raise StoreClosed("the store belongs to the process that has made it: make another.")
        # Only the main thread gets a KeyboardInterrupt, which would leave a round half closed.
        held = interrupts_held() if get_ident() == _MAIN.ident else _NOT_HELD
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
        """Wait until all closed rounds are reduced and all pulls that are ready are done.

        Raise RoundTimeout if something is left at `end`, a time of ``time.monotonic()``.
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
        """Finish closed rounds, or without `drain` fail them; fail the others, end all threads.

        Raise RoundTimeout if a callback or an updater still runs after `timeout` seconds.
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
            with self._held(), self.lock:
                self.queues.cancel(dropped)
                for key in keys:
                    key.cancel(dropped)
        if not self.queues.stop(lambda: max(0.0, end - time.monotonic())) and late is None:
            late = RoundTimeout(
                f"a callback or an updater has not returned {timeout:g} s after close()."
            )
        if late is not None:
            raise late
