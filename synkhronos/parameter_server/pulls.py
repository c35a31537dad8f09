"""Pulls: results are copied to the arrays that devices gave, then callbacks are called."""

from __future__ import annotations

import time
from typing import Callable

import numpy as np

from synkhronos._machine.log import log
from synkhronos.parameter_server.errors import CallbackFailed
from synkhronos.parameter_server.rounds import Buffer, Pull
from synkhronos.parameter_server.task_queues import TaskQueue, TaskQueues


class Pulls:
    """The pulls of all keys of one store."""

    def __init__(self, queues: TaskQueues) -> None:
        self._queues = queues

    def make_ready(self, pull: Pull, buffer: Buffer) -> None:
        """Finish a pull whose result is there at once if it is small, or else queue it.

        To be called under the lock.
        """
        pull.source = buffer
        if pull.slot is not None:
            pull.slot.pulled = pull.key.version
        if pull.callback is None:
            if pull.is_copied:
                return pull.finish()
            if pull.key.is_small and pull.queue.is_idle:
                try:
                    _write(pull)
                except Exception as error:
                    return pull.finish(error)
                return pull.finish()
        buffer.users += 1
        pull.key.ready.append(pull)
        return self._queues.schedule(pull.queue, pull)

    def run(self, pull: Pull, queue: TaskQueue, record: Callable[..., None] | None) -> None:
        """Copy the result, call the callback, and release the queue."""
        error, begun = None, time.monotonic()
        try:
            if not pull.is_copied:
                _write(pull)
        except Exception as caught:
            error = caught
        copied = time.monotonic()
        with self._queues.lock:
            pull.source.users -= 1
        callback = pull.callback
        if error is None and callback is not None:
            error = self._call(pull, callback, queue)
        if record is not None:
            record("copy", pull.key, begun, copied)
            if callback is not None:
                record("callback", pull.key, copied, time.monotonic())
        with self._queues.lock:
            pull.key.ready.remove(pull)
            pull.finish(error)
            self._queues.release(queue)

    def _call(self, pull, callback, queue):
        """Call a callback; return its exception, as the one that the pull's waits raise."""
        try:
            with self._queues.running(queue):
                callback()
        except BaseException as caught:
            error = CallbackFailed(
                f"the callback of {pull} has raised {type(caught).__name__}: {caught}"
            )
            error.__cause__ = caught
            log.error("%s", error, exc_info=caught)
            return error
        return None


def _write(pull):
    """Copy a result to the arrays that were given."""
    shaped = pull.source.shaped
    if not pull.arrays:
        pull.value = shaped.copy()
        return
    for array in pull.arrays:
        fitting = shaped if array.shape == shaped.shape else shaped.reshape(array.shape)
        if type(array) is np.ndarray:
            array[...] = fitting
        else:
            array.write(fitting)
