"""Pulls: results are copied to the arrays that devices gave, then callbacks are called."""

from __future__ import annotations

import time
from typing import Any, Callable, Sequence

import numpy as np

from synkhronos._machine.log import log
from synkhronos.parameter_server.errors import CallbackFailed
from synkhronos.parameter_server.rounds import Buffer, Future, Key, Slot
from synkhronos.parameter_server.task_queues import TaskQueue, TaskQueues


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
        callback: Callable[[], Any] | None,
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
        """Finish, and let go of the arrays, which are the caller's."""
        super().finish(error)
        self.arrays, self.callback = (), None

    def missing(self) -> list[int]:
        """Return the devices that have not pushed in the round that it needs."""
        key, needed = self.key, max(self.needed, 1)
        if self.source is not None or key.version >= self.needed or key.n_closed >= needed:
            return []
        return key.missing() if key.round is not None else [slot.device for slot in key.slots]

    def make_ready(self, queues: TaskQueues, buffer: Buffer) -> None:
        """Finish if the result, which is there now, is small, or else queue; under the lock."""
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

    def run(self, queues: TaskQueues, recording: Any) -> None:
        """Copy the result, call the callback, and release the queue."""
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
            queues.release(self.queue)

    def _call(self, callback, queues):
        """Call a callback; return its exception, as the one that the pull's waits raise."""
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
