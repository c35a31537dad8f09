"""The arrays that a worker's script shares with its mover: two to send and two to receive, a key.

    script                         memory                       mover
    outgoing(version)  ──────▶  2 arrays, by version % 2  ──▶  sends chunks of them
    incoming(version)  ◀──────  2 arrays, by version % 2  ◀──  receives chunks into them

The script creates the memory and tells the mover its reference. It has no name, and lasts as long
as one of them has it mapped: a mover can send what a script has pushed before it ended.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from synkhronos._machine.shared_memory import SegmentRef, Segments

_ALIGNED = 64  # bytes
_N_BOXES = 4


class Place(NamedTuple):
    """Stands for the arrays of a key in messages."""

    segment: SegmentRef
    dtype: str
    size: int


class Boxes:
    """The four arrays of a key, in one segment."""

    def __init__(self, segment, dtype, size):
        self.place = Place(segment.ref, np.dtype(dtype).str, size)
        stride = _stride(dtype, size)
        self._arrays = [segment.array(dtype, (size,), i * stride) for i in range(_N_BOXES)]

    @classmethod
    def create(cls, segments: Segments, dtype, size: int) -> Boxes:
        """Make the arrays of a key, filled with zeros."""
        return cls(segments.create(_N_BOXES * _stride(dtype, size)), dtype, size)

    @classmethod
    def open(cls, segments: Segments, place: Place) -> Boxes:
        """Map the arrays that another process has made."""
        return cls(segments.open(place.segment), place.dtype, place.size)

    def outgoing(self, version: int) -> np.ndarray:
        """Return the array of a push: flat."""
        return self._arrays[version % 2]

    def incoming(self, version: int) -> np.ndarray:
        """Return the array of a pull: flat."""
        return self._arrays[2 + version % 2]


def _stride(dtype, size):
    """Return the bytes from one array to the next."""
    nbytes = np.dtype(dtype).itemsize * size
    return -(-nbytes // _ALIGNED) * _ALIGNED or _ALIGNED
