"""The state of a store's keys: rounds, buffers for their results, and pulls.

    push of device 0 ┐                 ┌ Pull of device 0
    push of device 1 ┼▶ Round ▶ Buffer ┤ Pull of device 1
    push of device 2 ┘ number v        └ Pull of device 2

The last push of a round closes it, and the next push opens the next round at once. A pull needs the
result of the last round in which its device has pushed, or of a later one. All fields are read and
written under the lock of the engine.
"""

from __future__ import annotations

import collections
import time
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

from synkhronos._arithmetic.blocks import reduce_block
from synkhronos._machine.log import log
from synkhronos._wording import seconds
from synkhronos.parameter_server.errors import CallbackFailed, StoreClosed
from synkhronos.parameter_server.reductions import Reduction, may_copy
from synkhronos.parameter_server.task_queues import TaskQueue, TaskQueues

SMALL = 4096  # elements, which are reduced and copied in less time than it takes to wake a thread
LOWEST = -(1 << 62)  # of priorities


class Future:
    """Something that a store does while the caller goes on.

    Notes
    -----
    A push is done when its round is closed and reduced: its array may be changed from then on. A
    pull is done when its array has the result and its callback has returned.
    """

    __slots__ = ("_engine", "error", "is_done", "value", "waiters")

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.is_done = False
        self.error: BaseException | None = None
        self.waiters: list[Any] | None = None
        self.value: Any = None

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the future as done, or failed, and wake all that wait; under the engine's lock."""
        if self.is_done:
            return
        self.error = error
        self.is_done = True
        if self.waiters is not None:
            for sleeper in self.waiters:
                sleeper.wake()
            self.waiters = None

    def done(self) -> bool:
        """Return whether it is done, or has failed."""
        return self.is_done

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until the future is done; return the pulled array, or None.

        Parameters
        ----------
        timeout : float, optional
            Seconds.

        Raises
        ------
        RoundTimeout
            After `timeout`. The push or pull goes on, and may be waited for again.
        ParameterServerError
            If the push or pull has failed.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error.with_traceback(None)
        return self.value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the future is done; return the exception with which it failed, or None."""
        limit = None if timeout is None else seconds("timeout", timeout)
        if not self.is_done:
            self._engine.wait(self, limit)
        return self.error


class Futures(Future):
    """The futures of a call with a list of keys, as one."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Future]) -> None:
        self._parts = list(parts)

    def done(self) -> bool:
        """Return whether all are done, or have failed."""
        return all(part.done() for part in self._parts)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until all are done; return the first exception of those that failed, or None."""
        limit = seconds("timeout", timeout)
        end = None if limit is None else time.monotonic() + limit
        errors = [
            part.exception(None if end is None else max(0.0, end - time.monotonic()))
            for part in self._parts
        ]
        return next((error for error in errors if error is not None), None)

    @property
    def is_done(self) -> bool:  # type: ignore[override]
        """Whether all are done, or have failed."""
        return self.done()

    @property
    def value(self) -> list[Any]:  # type: ignore[override]
        """The list of the values of all."""
        return [part.value for part in self._parts]


class Buffer:
    """Memory with the result of a round, and the number of pulls that still copy from it."""

    __slots__ = ("flat", "shaped", "users")

    def __init__(self, flat: np.ndarray, shape: tuple[int, ...]) -> None:
        self.flat = flat
        self.shaped = flat.reshape(shape)
        self.users = 0


class Slot:
    """The state of one device for one key."""

    __slots__ = ("device", "key", "position", "pull", "pulled", "rounds")

    def __init__(self, key: Key, position: int, device: int) -> None:
        self.key, self.position, self.device = key, position, device
        self.rounds = 0  # in which it has pushed
        self.pull: Any = None  # the last `Pull`
        self.pulled = -1  # the round whose result it got last


class Key:
    """A key: the shape and dtype of pushed arrays, its rounds and the newest result.

    `number` counts keys from 0 in the order in which they were made.
    """

    def __init__(
        self,
        name: int | str,
        number: int,
        shape: tuple[int, ...],
        dtype: np.dtype,
        op: str,
        devices: Sequence[int],
    ) -> None:
        self.name, self.number, self.shape, self.dtype, self.op = name, number, shape, dtype, op
        self.plane = plane(shape)
        self.size = self.plane[0] * self.plane[1]
        self.n_devices = len(devices)
        self.result_shape = shape
        if op == "gather":
            self.result_shape = (self.n_devices * self.plane[0], self.plane[1])
        self.is_small = self.size <= SMALL and op != "gather"
        self.slots = [Slot(self, at, device) for at, device in enumerate(devices)]
        self.round: PushRound | None = None  # the one that is open
        self.error: BaseException | None = None  # why it can't be used
        self.n_closed = 0  # rounds
        self.closed: collections.deque[PushRound] = collections.deque()  # closed, not yet reduced
        self.is_reducing = False  # whether the first of `closed` is being reduced
        self.set_aside: list[tuple[Any, Any]] = []  # (queue, entry) of rounds that must wait
        self.version = -1  # the round of `source`; 0 is the initial weight
        self.source: Buffer | None = None
        self.failures: dict[int, BaseException] = {}  # rounds without a result
        self.waiting: list[Any] = []  # pulls that need a round that is not there yet
        self.ready: list[Any] = []  # pulls in their queue
        self.buffers: list[Buffer] = []
        self.spare: list[Buffer] = []  # for rounds that are reduced before they are queued

    def free_buffer(self) -> Buffer:
        """Return memory for a result that nothing reads."""
        for buffer in self.buffers:
            if not buffer.users and buffer is not self.source:
                return buffer
        buffer = self.new_buffer()
        self.buffers.append(buffer)
        return buffer

    def new_buffer(self) -> Buffer:
        """Return new memory of the size of a result."""
        size = self.size * (self.n_devices if self.op == "gather" else 1)
        return Buffer(np.empty(size, self.dtype), self.result_shape)

    def missing(self) -> list[int]:
        """Return the devices that have not pushed in the open round, if one is open."""
        if self.round is None:
            return []
        parts = self.round.parts
        return [slot.device for slot, part in zip(self.slots, parts) if part is None]

    def whole_round(
        self,
        engine: Any,
        parts: Sequence[Any],
        priority: int,
        into: Sequence[Any] | None,
        queue: TaskQueue,
    ) -> tuple[PushRound, Pull | None]:
        """Return a round in which all devices have pushed, and its pull if `into` has arrays."""
        whole, pull = PushRound(engine, self, parts), None
        whole.priority = priority
        for slot in self.slots:
            slot.rounds += 1
        if into is not None:
            pull = Pull(engine, self, None, queue, into, whole.version, priority)
            self.waiting.append(pull)
        return whole, pull

    def publish(self, version: int, buffer: Buffer, queues: TaskQueues) -> None:
        """Make a buffer the result of a round, and of all before it."""
        if version < self.version:
            return  # a later round was published first
        self.version, self.source = version, buffer
        if self.failures:
            self.failures = {at: error for at, error in self.failures.items() if at > version}
        waiting, self.waiting = self.waiting, []
        for pull in waiting:
            if pull.needed <= version:
                pull.make_ready(queues, buffer)
            else:
                self.waiting.append(pull)

    def fail_pulls(self, error: BaseException, first: int = 0, last: int | None = None) -> None:
        """Fail waiting pulls that need a round from `first` to `last`."""
        waiting, self.waiting = self.waiting, []
        for pull in waiting:
            if first <= pull.needed and (last is None or pull.needed <= last):
                pull.finish(error)
            else:
                self.waiting.append(pull)

    def cancel(self, dropped: BaseException) -> None:
        """Fail the rounds and pulls that have not begun: the store is being closed."""
        begun = [self.closed[0]] if self.is_reducing else []
        for closed in list(self.closed)[len(begun) :]:
            closed.finish(dropped)
        self.closed = collections.deque(begun)
        self.set_aside = []
        missing = self.missing()
        why = f"{devices_have(missing)} not pushed" if missing else "its round was not closed"
        error = StoreClosed(f"the store was closed; key {self.name!r}: {why}.")
        # The round that runs finishes its own pulls.
        self.fail_pulls(error, begun[0].version + 1 if begun else 0)
        if self.round is not None:
            self.round.finish(error)


class PushRound(Future):
    """One push of each device, and the future of these pushes."""

    __slots__ = ("buffer", "key", "n_missing", "parts", "priority", "reduced", "version")

    def __init__(self, engine: Any, key: Key, parts: Sequence[Any]) -> None:
        super().__init__(engine)
        self.key = key
        self.version = key.n_closed + 1
        self.parts = list(parts)  # None for a device that has not pushed
        self.n_missing = len(self.parts)
        self.priority = LOWEST
        self.buffer: Buffer | None = None
        self.reduced: Buffer | None = None  # the result, if it was reduced before it was queued

    def __str__(self) -> str:
        return f"round {self.version} of key {self.key.name!r}"

    def missing(self) -> list[int]:
        """Return the devices that have not pushed."""
        return self.key.missing() if self.key.round is self else []

    def copies(self, parts: Sequence[np.ndarray]) -> tuple[list[Any], list[np.ndarray]]:
        """Return pulls whose arrays can be written block by block, and all these arrays.

        There are none for "gather", whose blocks are others.
        """
        pulls: list[Any] = []
        arrays: list[np.ndarray] = []
        waiting = () if self.key.op == "gather" else self.key.waiting
        for pull in waiting:
            fitting: list[np.ndarray] = []
            for array in pull.arrays if pull.needed == self.version else ():
                if type(array) is not np.ndarray or not array.flags.c_contiguous:
                    break
                if not may_copy(array, parts, [*arrays, *fitting]):
                    break
                fitting.append(array.reshape(-1))
            if fitting and len(fitting) == len(pull.arrays):
                pulls.append(pull)
                arrays += fitting
        return pulls, arrays

    def reduce(self, queues: TaskQueues) -> None:
        """Reduce a small round, and publish it."""
        key = self.key
        try:
            buffer = key.free_buffer()
            parts = arrays_of(self.parts, key.shape)
            reduce_block(key.op, parts, buffer.shaped, len(parts))
        except Exception as error:
            self.end(queues, None, error)
        else:
            self.end(queues, buffer, None)

    def end(self, queues: TaskQueues, buffer: Buffer | None, error: BaseException | None) -> None:
        """End the round, the first of the key's closed ones; publish its result if there is one."""
        key = self.key
        key.closed.popleft()
        key.is_reducing = False
        self.parts = [None] * len(self.parts)  # releases the caller's arrays
        if self.reduced is not None:
            key.spare.append(self.reduced)
        self.finish(error)
        if error is not None:
            key.failures[self.version] = error
            key.fail_pulls(error, last=self.version)
        elif buffer is not None:
            key.publish(self.version, buffer, queues)
        set_aside, key.set_aside = key.set_aside, []
        for queue, entry in set_aside:
            queues.put_back(queue, entry)

    def start(self, queue: Any, entry: Any) -> PushRound | None:
        """Return the key's next round, which may be another one; None if it must wait or is done.

        Rounds of a key are reduced in order, one at a time; meanwhile the entry is set aside.
        """
        key = self.key
        if key.is_reducing:
            key.set_aside.append((queue, entry))
            return None
        if not key.closed:
            return None
        key.is_reducing = True
        return key.closed[0]

    def run(self, queue: TaskQueue) -> None:
        """Reduce the round."""
        self._engine.reduce(self, queue)


class SharedBlocks(NamedTuple):
    """The blocks of a round's reduction, which several threads take."""

    push_round: PushRound
    reduction: Reduction

    def run(self, queue: TaskQueue) -> None:
        """Take blocks until none is left; end the round after the last one."""
        if self.reduction.run():
            engine = self.push_round._engine
            engine.conclude(self.push_round, queue, self.reduction.error)


class Pull(Future):
    """A request for the result of a round: its arrays are written, then its callback is called."""

    __slots__ = (
        "arrays",
        "callback",
        "is_copied",
        "key",
        "needed",
        "priority",
        "queue",
        "slot",
        "source",
    )

    def __init__(
        self,
        engine: Any,
        key: Key,
        slot: Slot | None,
        queue: TaskQueue,
        arrays: Sequence[Any],
        needed: int,
        priority: int,
        callback: Callable[[], Any] | None = None,
    ) -> None:
        super().__init__(engine)
        self.key, self.slot, self.queue, self.arrays = key, slot, queue, arrays
        self.needed, self.priority, self.callback = needed, priority, callback
        self.source: Buffer | None = None
        self.is_copied = False

    def __str__(self) -> str:
        of = "" if self.slot is None else f" of device {self.slot.device}"
        return f"the pull{of} of key {self.key.name!r}, round {max(self.needed, 1)}"

    def start(self, queue: TaskQueue, entry: Any) -> Pull:
        """Return this pull, which can always start."""
        return self

    def finish(self, error: BaseException | None = None) -> None:
        """Finish, and release the caller's arrays."""
        super().finish(error)
        self.arrays, self.callback = (), None

    def missing(self) -> list[int]:
        """Return the devices that have not pushed in the round that it needs."""
        key, needed = self.key, max(self.needed, 1)
        if self.source is not None or key.version >= self.needed or key.n_closed >= needed:
            return []
        return key.missing() if key.round is not None else [slot.device for slot in key.slots]

    def make_ready(self, queues: TaskQueues, buffer: Buffer) -> None:
        """Take the result: copy it now if it is small, else queue this pull. Under the lock."""
        self.source = buffer
        if self.slot is not None:
            self.slot.pulled = self.key.version
        if self.callback is None:
            if self.is_copied:
                return self.finish()
            if self.key.is_small and self.queue.is_idle:
                try:
                    self._write()
                except Exception as error:
                    return self.finish(error)
                return self.finish()
        buffer.users += 1
        self.key.ready.append(self)
        return queues.schedule(self.queue, self)

    def run(self, queue: TaskQueue) -> None:
        """Copy the result, call the callback, and release the queue."""
        queues, recording = self._engine.queues, self._engine.recording
        error, begun = None, time.monotonic()
        try:
            if not self.is_copied:
                self._write()
        except Exception as caught:
            error = caught
        copied = time.monotonic()
        with queues.lock:
            self.source.users -= 1
        callback = self.callback
        if error is None and callback is not None:
            error = self._call(callback, queues)
        if recording is not None:
            recording.record("copy", self.key, begun, copied)
            if callback is not None:
                recording.record("callback", self.key, copied, time.monotonic())
        with queues.lock:
            self.key.ready.remove(self)
            self.finish(error)
            queues.release(queue)

    def _call(self, callback, queues):
        """Call a callback; return the error that waits for this pull raise, or None."""
        try:
            with queues.running(self.queue):
                callback()
        except BaseException as caught:
            error = CallbackFailed(
                f"the callback of {self} has raised {type(caught).__name__}: {caught}"
            )
            error.__cause__ = caught
            log.error("%s", error, exc_info=caught)
            return error
        return None

    def _write(self):
        """Copy the result to the arrays that were given."""
        shaped = self.source.shaped
        if not self.arrays:
            self.value = shaped.copy()
            return
        for array in self.arrays:
            fitting = shaped if array.shape == shaped.shape else shaped.reshape(array.shape)
            if type(array) is np.ndarray:
                array[...] = fitting
            else:
                array.write(fitting)


def arrays_of(parts: Sequence[Any], shape: Any) -> list[np.ndarray]:
    """Return the arrays and operands of a round as NumPy arrays of a shape."""
    return [(x if type(x) is np.ndarray else x.read()).reshape(shape) for x in parts]


def plane(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return a shape as two axes: all but the last one merged, and the last one.

    >>> plane((2, 3, 4)), plane((4,)), plane(())
    ((6, 4), (1, 4), (1, 1))
    """
    rows = 1
    for length in shape[:-1]:
        rows *= length
    return rows, (shape[-1] if shape else 1)


def devices_have(devices: Sequence[int]) -> str:
    """Return devices with a verb, in words.

    >>> devices_have([1]), devices_have([0, 2])
    ('device 1 has', 'devices 0, 2 have')
    """
    if len(devices) == 1:
        return f"device {devices[0]} has"
    return f"devices {', '.join(map(str, devices))} have"
