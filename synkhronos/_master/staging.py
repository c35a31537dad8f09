"""Arrays in memory that all ranks can fetch from, kept from one call to the next."""

import math
import sys
from typing import NamedTuple, Optional

import numpy as np

from synkhronos._wording import shown
from synkhronos.comm import Block, Memory, Reference


class _State(NamedTuple):
    """A growing array at one time; whole, so that no Ctrl-C can leave half of a new one."""

    block: Optional[Block]
    allocated: int
    array: np.ndarray
    ref: Optional[Reference]


class GrowingArray:
    """A typed array in memory that all ranks see, whose allocation is kept when it shrinks.

    Its own arithmetic is that of a flat allocation: the items of a new shape are the first ones
    of the old allocation, and growing beyond it copies what was there.
    """

    def __init__(self, memory: Memory, dtype, ndim: int):
        self._memory = memory
        self._dtype = np.dtype(dtype)
        self._ndim = ndim
        self.free()

    @property
    def array(self) -> np.ndarray:
        """The array."""
        return self._state.array

    @property
    def ref(self) -> Optional[Reference]:
        """The reference to the array for messages; None while it has no memory."""
        return self._state.ref

    @property
    def allocated(self) -> int:
        """The number of items that there is memory for."""
        return self._state.allocated

    def resize(self, shape, oversize=1.0, keep=True) -> None:
        """Give the array another shape; with `keep` the old items stay.

        If it must be allocated anew, it gets room for `oversize` times as many items.
        """
        block, allocated, _, _ = self._state
        items = math.prod(shape)
        if math.prod(n for n in shape if n) * self._dtype.itemsize > sys.maxsize:
            # NumPy has none either, though it may take no memory at all.
            raise ValueError(
                f"No array of {self._dtype} can have the shape {shown(tuple(shape))}: it is beyond "
                "what memory can hold."
            )
        if block is None or items > allocated:
            old, before = block, allocated
            allocated = max(int(items * oversize), items)
            block = self._memory.create(allocated * self._dtype.itemsize)
            if keep and old is not None:
                block.array(self._dtype, (before,))[...] = old.array(self._dtype, (before,))
        array = block.array(self._dtype, shape)
        self._state = _State(block, allocated, array, block.reference(self._dtype, shape))

    def free(self) -> None:
        """Let the memory go (as soon as no view of it is left)."""
        self._state = _State(None, 0, np.zeros((0,) * self._ndim, self._dtype), None)
        if not self._ndim:
            self.resize(())  # a number is never without its memory


class StagedInput:
    """Shared memory that a function keeps for plain arrays given for one of its inputs."""

    def __init__(self, session, dtype, ndim):
        self._worker = session.worker
        self._store = GrowingArray(session.comm.memory, dtype, ndim)

    @property
    def nbytes(self):
        """The size of the memory that it keeps."""
        return self._store.allocated * self._store.array.itemsize

    def put(self, array):
        """Copy the array in; return what stands for it on other ranks."""
        recorder = self._worker.recorder
        if recorder is None:
            return self._copy(array)
        with recorder.span("stage") as span:
            ref = self._copy(array)
            span.moved(array)
            return ref

    def _copy(self, array):
        store = self._store
        if store.ref is None or store.array.shape != array.shape:
            store.resize(array.shape, keep=False)
        store.array[...] = array
        return store.ref
