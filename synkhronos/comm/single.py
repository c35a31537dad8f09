"""One rank, and no other process: the plainest transport.

The reduction over one rank is the rank's own value, and its memory is private to the process. The
memory is freed with its block and views; references don't keep it.
"""

import weakref

import numpy as np

from synkhronos._arithmetic.partition import take_rows
from synkhronos.comm import Gate, Memory
from synkhronos.errors import SharedMemoryFull


class SingleGate(Gate):
    """The gate of the master alone: it counts the calls, and never waits."""

    posts_bounds = True

    def __init__(self, master_rank=0):
        super().__init__(1, master_rank)
        self.sequence = self._rows = 0
        self.is_in_call = False
        self._bounds = 0, 0

    def start(self, command):
        """Begin the next call."""
        self.is_in_call = True
        self.sequence += 1

    def finish(self):
        """End the call."""
        self.is_in_call = False

    def abort(self):
        """Return: no other rank is in the call."""

    def meet(self):
        """Return: the only rank has come."""

    def agree(self, vote):
        """Return True: the only rank agrees with itself."""
        return True

    def post_bounds(self, begin, end):
        """Keep the bounds of the rows that the next call selects."""
        self._bounds = begin, end

    def bounds(self):
        """Return the bounds that were posted."""
        return self._bounds

    def report_rows(self, rows):
        """Keep the number of rows that this rank computed from."""
        self._rows = rows

    def rows(self):
        """Return the number of rows that was reported in the last call, in a list."""
        return [self._rows]


class _Reference:
    """An array in a block. Equal to itself only, so that equal references mean the same array."""

    __slots__ = ("_memory", "dtype", "offset", "shape")

    def __init__(self, memory, dtype, shape, offset):
        # A function keeps the references of its last call, which must not keep the user's memory.
        self._memory, self.dtype, self.shape = weakref.ref(memory), dtype, tuple(shape)
        self.offset = offset

    @property
    def array(self):
        return np.ndarray(self.shape, self.dtype, self._memory(), self.offset)


class _ProcessMemory:
    """Memory of this process."""

    def __init__(self, nbytes):
        try:
            self._bytes = np.zeros(max(nbytes, 1), np.uint8)
        except (MemoryError, ValueError) as error:  # ValueError: NumPy can't count so many
            raise SharedMemoryFull(f"No room for {nbytes:,} bytes of memory.") from error

    def array(self, dtype, shape, offset=0):
        return np.ndarray(shape, dtype, self._bytes, offset)

    def reference(self, dtype, shape, offset=0):
        return _Reference(self._bytes, dtype, shape, offset)


class SingleMemory(Memory):
    """Memory of one process."""

    def create(self, nbytes):
        """Make a zero-filled block."""
        return _ProcessMemory(nbytes)

    def fetch(self, reference, rows=None, buffer=None, axis=0):
        """Return the array, or some of its rows."""
        array = reference.array
        return array if rows is None else take_rows(array, rows, buffer, axis)
