"""All-reduces by MPI's own collective, on a network that is trusted: MPI knows fast fabrics.

    carrier ── arrays ──▶ a thread ═══ MPI_Allreduce ═══ the threads of other carriers
            ◀── a byte ──

All machines begin the same all-reduces in the same order (see `Reductions`). A collective that
waits is twice as fast as one that a loop polls (``MPI_Iallreduce``).
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor

from synkhronos._arithmetic.blocks import with_one_nan
from synkhronos._arithmetic.operations import OPERATIONS, divide
from synkhronos._machine.heartbeats import lost_seconds
from synkhronos.comm.mpi.mpi_library import MPI

_OPS = {"sum": MPI.SUM, "avg": MPI.SUM}  # no maximum: MPI's is not NumPy's where there are NaNs
_DTYPES = "bBhHiIlLqQfdFD"  # characters of the dtypes that MPI can sum


class MpiReductions:
    """A thread of the carrier, until `stack` ends; `ends` can be read after an all-reduce."""

    def __init__(self, comm, stack):
        self._comm, self._thread = comm, stack.enter_context(ThreadPoolExecutor(1))
        self.ends, self._sink = os.pipe()

    def can_reduce(self, arrays, ops, compress):
        """Return whether MPI, which counts in an int, can reduce these; all machines agree."""
        known = [array.dtype.char in _DTYPES and array.size < 1 << 31 for array in arrays]
        return not compress and all(known) and all(op in _OPS for op in ops)

    def begin(self, arrays, ops, divisor):
        """Begin to reduce contiguous arrays in place; return what tells whether it has ended."""
        begun = self._thread.submit(self._reduce, arrays, ops, divisor)
        begun.add_done_callback(lambda _: os.write(self._sink, b"\0"))
        return lambda: begun.done() and begun.result() is None  # or it raises

    def _reduce(self, arrays, ops, divisor):
        try:
            for op, array in zip(ops, arrays):
                self._comm.Allreduce(MPI.IN_PLACE, array, _OPS[op])
                if OPERATIONS[op].divides and divisor != 1:
                    divide(array, divisor)
                same = with_one_nan(array)
                if same is not array:
                    array[...] = same
        except MPI.Exception:
            time.sleep(lost_seconds() + 2)  # meanwhile the carrier learns who is lost, and ends
            raise
