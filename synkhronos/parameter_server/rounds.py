"""The state of the keys of a store: rounds, what their results are kept in, and pulls.

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
from typing import Any, Sequence

import numpy as np

from synkhronos._wording import seconds
from synkhronos.parameter_server.errors import StoreClosed
from synkhronos.parameter_server.reductions import may_copy

SMALL = 4096  # elements that are reduced and copied at once, in less time than a thread is woken


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
        self._engine.wait(self, seconds("timeout", timeout))
        if self.error is not None:
            raise self.error.with_traceback(None)
        return self.value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the future is done; return the exception with which it failed, or None."""
        self._engine.wait(self, seconds("timeout", timeout))
        return self.error


class Futures(Future):
    """Several of them, for a call with a list of keys."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Future]) -> None:
        self._parts = list(parts)

    def done(self) -> bool:
        """Return whether all are done, or have failed."""
        return all(part.done() for part in self._parts)

    def wait(self, timeout: float | None = None) -> list[Any]:
        """Wait until all are done; return the list of the values of all.

        Raises the first exception of those that have failed, once all are done.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error.with_traceback(None)
        return [part.value for part in self._parts]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until all are done; return the first exception, or None."""
        left = _Left(timeout)
        errors = [part.exception(left()) for part in self._parts]
        return next((error for error in errors if error is not None), None)

    @property
    def is_done(self) -> bool:  # type: ignore[override]
        """Whether all are done, or have failed."""
        return self.done()


class _Left:
    """Counts a timeout down."""

    def __init__(self, timeout):
        limit = seconds("timeout", timeout)
        self._end = None if limit is None else time.monotonic() + limit

    def __call__(self):
        return None if self._end is None else max(0.0, self._end - time.monotonic())


class Buffer:
    """Memory with the result of a round, and the number of pulls that still copy from it."""

    __slots__ = ("flat", "shaped", "users")

    def __init__(self, flat: np.ndarray, shape: tuple[int, ...]) -> None:
        self.flat = flat
        self.shaped = flat.reshape(shape)
        self.users = 0


class Slot:
    """A device's end of a key."""

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
        self.is_reducing = False  # the first of them
        self.set_aside: list[tuple[Any, Any]] = []  # queues, and entries of their heaps
        self.version = -1  # the round of `source`; 0 is the initial weight
        self.source: Buffer | None = None
        self.failures: dict[int, BaseException] = {}  # rounds without a result
        self.waiting: list[Any] = []  # pulls that need a round that is not there yet
        self.ready: list[Any] = []  # pulls in their queue
        self.buffers: list[Buffer] = []
        self.spare: list[Buffer] = []  # for what one caller pushes

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

    def fail_pulls(self, error: BaseException, first: int = 0, last: int | None = None) -> None:
        """Fail the pulls that wait, and need one of these rounds."""
        waiting, self.waiting = self.waiting, []
        for pull in waiting:
            if first <= pull.needed and (last is None or pull.needed <= last):
                pull.finish(error)
            else:
                self.waiting.append(pull)

    def cancel(self, dropped: BaseException) -> None:
        """Fail all that has not begun, as the store is closed."""
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
    """One push of each device; the future of all of them."""

    __slots__ = ("buffer", "key", "n_missing", "parts", "priority", "reduced", "version")

    def __init__(self, engine: Any, key: Key, n_parts: int) -> None:
        super().__init__(engine)
        self.key = key
        self.version = key.n_closed + 1
        self.parts: list[Any] = [None] * n_parts
        self.n_missing = n_parts
        self.priority = -(1 << 62)
        self.buffer: Buffer | None = None
        self.reduced: Buffer | None = None  # what has been reduced before it was queued

    def __str__(self) -> str:
        return f"round {self.version} of key {self.key.name!r}"

    def missing(self) -> list[int]:
        """Return the devices that have not pushed."""
        return self.key.missing() if self.key.round is self else []

    def copies(self, parts: Sequence[np.ndarray]) -> tuple[list[Any], list[np.ndarray]]:
        """Return pulls that can get the result while it is reduced, block by block; their arrays.

        A gathered result comes in other blocks.
        """
        found: list[Any] = []
        arrays: list[np.ndarray] = []
        waiting = () if self.key.op == "gather" else self.key.waiting
        for pull in waiting:
            own: list[np.ndarray] = []
            for array in pull.arrays if pull.needed == self.version else ():
                if type(array) is not np.ndarray or not array.flags.c_contiguous:
                    break
                if not may_copy(array, parts, [*arrays, *own]):
                    break
                own.append(array.reshape(-1))
            if own and len(own) == len(pull.arrays):
                found.append(pull)
                arrays += own
        return found, arrays

    def start(self, queue: Any, entry: Any) -> PushRound | None:
        """Return the round of the key that is next, which may be another one.

        Rounds of a key are reduced in order, and one at a time: meanwhile the entry is set aside.
        """
        key = self.key
        if key.is_reducing:
            key.set_aside.append((queue, entry))
            return None
        if not key.closed:
            return None
        key.is_reducing = True
        return key.closed[0]


def plane(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return a shape with two axes: the last one, and all others together.

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
