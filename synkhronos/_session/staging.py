"""Put values of the master into memory that all ranks can fetch from."""

import math
import pickle
import sys
from typing import NamedTuple, Optional

import numpy as np

from synkhronos._session import commands
from synkhronos._wording import shown
from synkhronos.comm import Block, Memory, Reference

_ALIGN = 64  # bytes of a cache line


class Contents(NamedTuple):
    """The state of a growing array, replaced as a whole: other threads see the old or the new."""

    block: Optional[Block]  # keeps the memory, as the array does
    allocated: int  # so many items fit into the memory
    array: np.ndarray
    ref: Optional[Reference]  # for commands; None while the array has no memory

    @property
    def shape(self):
        """The shape of the array."""
        return self.array.shape

    def with_assigned_shape(self) -> "Contents":
        """Return the contents with the shape that the user has assigned to the array in place."""
        assert self.block is not None
        return self._replace(ref=self.block.reference(self.array.dtype, self.shape))


class GrowingArray:
    """A typed array in memory that all ranks can fetch from; it keeps the memory when it shrinks.

    The items of a new shape are the first items of the old memory, in flat order. If the array
    grows beyond its memory, they are copied to a new block. The old block is freed when the last
    view of it is gone, also those of the user. To use the array and its reference together, read
    `contents` once.
    """

    def __init__(self, memory: Memory, dtype, ndim: int):
        self._memory = memory
        self._dtype = np.dtype(dtype)
        self.ndim = ndim
        self.free()

    @property
    def array(self) -> np.ndarray:
        """The array."""
        return self.contents.array

    def resize(self, shape, oversize=1.0, keep=True, value=None) -> None:
        """Give the array another shape; with `keep` the old items stay.

        New memory, if it needs any, gets room for `oversize` times as many items.
        With `value` the array gets these items before it is seen.
        """
        block, allocated, _, _ = self.contents
        items = math.prod(shape)
        if math.prod(n for n in shape if n) * self._dtype.itemsize > sys.maxsize:
            # NumPy refuses such a shape, too, even if it has a 0 and so takes no memory.
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
        if value is not None:
            array[...] = value
        self.contents = Contents(block, allocated, array, block.reference(self._dtype, shape))
        self._empty = None

    def put(self, array: np.ndarray, recorder=None) -> Contents:
        """Copy an array of any shape in, and return the contents; `recorder` records it."""
        if recorder is not None:
            with recorder.span("stage") as span:
                span.moved(array)
                return self.put(array)
        contents = self.contents
        if contents.ref is None or contents.array.shape != array.shape:
            self.resize(array.shape, keep=False)
            contents = self.contents
        contents.array[...] = array
        return contents

    def free(self) -> None:
        """Drop the memory; it is freed when no view of it is left."""
        self.contents = Contents(None, 0, np.zeros((0,) * self.ndim, self._dtype), None)
        self._empty = None
        if not self.ndim:
            self.resize(())  # an array of 0 dimensions always has one item, so it needs memory

    def empty(self) -> Contents:
        """Return contents of no items that ranks can fetch; the array itself stays as it is."""
        contents = self._empty
        if contents is None:
            shape = (0,) * self.ndim
            block = self._memory.create(self._dtype.itemsize)
            array = block.array(self._dtype, shape)
            contents = Contents(block, 0, array, block.reference(self._dtype, shape))
            self._empty = contents
        return contents


class StagedArrays:
    """Memory for the plain arrays of one call, which is kept for the next call.

    They lie in one block, because each block takes descriptors. Workers read them only during the
    call, so the next call may overwrite them.
    """

    def __init__(self, session):
        self._session = session
        self.clear()

    def clear(self):
        """Drop the memory; it is freed when no view of it is left."""
        self._block, self.nbytes = None, 0
        self._layout, self._arrays, self._references = None, [], []

    def put(self, arrays):
        """Copy arrays in; return the references to them for commands."""
        recorder = self._session.worker.recorder
        if recorder is None:
            return self._copy(arrays)
        with recorder.span("stage") as span:
            references = self._copy(arrays)
            span.moved(*arrays)
            return references

    def _copy(self, arrays):
        layout = [(array.dtype, array.shape) for array in arrays]
        if layout != self._layout:
            self._lay_out(layout)
        for target, array in zip(self._arrays, arrays):
            target[...] = array
        return self._references

    def _lay_out(self, layout):
        self._layout = None  # set last: after a Ctrl-C on the way all are laid out again
        begins, end = [], 0
        for dtype, shape in layout:
            begins.append(end)
            end += -(-dtype.itemsize * math.prod(shape) // _ALIGN) * _ALIGN
        if self._block is None or end > self.nbytes:
            self.clear()
            self._block = self._session.comm.memory.create(end)
            self.nbytes = end
        places = [(*each, begin) for each, begin in zip(layout, begins)]
        self._arrays = [self._block.array(*place) for place in places]
        self._references = [self._block.reference(*place) for place in places]
        self._layout = layout


def send_objects(session, keys, objects, rank=None) -> None:
    """Set variables that hold no arrays, on one rank, or on all if `rank` is None."""
    pickled = pickle.dumps(objects, pickle.HIGHEST_PROTOCOL)
    # The block owns the memory, and must live until the ranks have read it.
    _block, reference = session.comm.memory.wrap(pickled)
    session.run(commands.SetObject(keys, reference, rank))
