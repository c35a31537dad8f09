"""All-reduces by MPI's own collective, on a network that is trusted: MPI knows fast fabrics.

    carrier ── arrays ──▶ a thread ═══ MPI_Allreduce ═══ the threads of other carriers
            ◀── a byte ──

All machines begin the same all-reduces in the same order (see `Reductions`).
A collective that waits is twice as fast as one that a loop polls (``MPI_Iallreduce``).
"""

import os
import queue
import threading
import time

from mpi4py import MPI

from synkhronos._arithmetic.blocks import with_one_nan
from synkhronos._arithmetic.operations import OPERATIONS, divide
from synkhronos._machine.heartbeats import lost_seconds

_OPS = {"sum": MPI.SUM, "avg": MPI.SUM}  # MPI's largest number is not NumPy's where there are NaNs
_DTYPES = "bBhHiIlLqQfdFD"  # of the numbers that MPI knows, too


class MpiReductions:
    """A carrier's thread that waits in MPI; `ends` can be read when an all-reduce has ended."""

    def __init__(self, comm):
        self._comm, self._begun = comm, queue.SimpleQueue()
        self.ends, self._sink = os.pipe()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def take(self, arrays, ops, compress):
        """Return whether MPI can reduce these arrays; all machines have the same answer."""
        return not compress and all(
            op in _OPS and array.dtype.char in _DTYPES for op, array in zip(ops, arrays)
        )

    def begin(self, arrays, ops, divisor):
        """Begin to reduce contiguous arrays in place; return the all-reduce."""
        work = MpiAllReduce(arrays, ops, divisor)
        self._begun.put(work)
        return work

    def end(self, seconds):
        """Wait for the end of all that has begun; return whether it has come."""
        self._begun.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _serve(self):
        for work in iter(self._begun.get, None):
            work.run(self._comm)
            os.write(self._sink, b"\0")


class MpiAllReduce:
    """One all-reduce of contiguous arrays, in place."""

    def __init__(self, arrays, ops, divisor):
        self._arrays, self._ops, self._divisor = arrays, ops, divisor
        self._is_over, self._error = False, None

    def run(self, comm):
        """Do all, in the thread."""
        try:
            for op, array in zip(self._ops, self._arrays):
                comm.Allreduce(MPI.IN_PLACE, array, _OPS[op])
                if OPERATIONS[op].divides and self._divisor != 1:
                    divide(array, self._divisor)
                same = with_one_nan(array)
                if same is not array:
                    array[...] = same
        except MPI.Exception as error:
            time.sleep(lost_seconds() + 2)  # the carrier may end before: it knows of lost machines
            self._error = error
        self._is_over = True

    def progress(self):
        """Return whether the all-reduce has ended."""
        if self._error is not None:
            raise self._error
        return self._is_over
