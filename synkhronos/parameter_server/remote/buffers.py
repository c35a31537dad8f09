"""The arrays that a worker's script shares with its mover: two to send, two to receive per key.

    script                         memory                       mover
    outgoing(version)  ──────▶  2 arrays, by version % 2  ──▶  sends chunks of them
    incoming(version)  ◀──────  2 arrays, by version % 2  ◀──  receives chunks into them

The script creates the memory and tells the mover its place. The memory has no name, and lasts while
one of the two has it mapped: so a mover can send what a script pushed before it ended.
"""

from __future__ import annotations

import numpy as np

from synkhronos._machine.shared_memory import ArrayRef, Segment, Segments

_ALIGNED = 64  # bytes
_N_ARRAYS = 4


class Buffers:
    """The four arrays of a key, in one segment; `place` stands for the first one in messages."""

    def __init__(self, segment: Segment, place: ArrayRef) -> None:
        self.place = place
        stride = _stride(place.dtype, *place.shape)
        self._arrays = [
            segment.array(place.dtype, place.shape, i * stride) for i in range(_N_ARRAYS)
        ]

    @classmethod
    def create(cls, segments: Segments, dtype: np.dtype, size: int) -> Buffers:
        """Make the arrays of a key, filled with zeros."""
        segment = segments.create(_N_ARRAYS * _stride(dtype, size))
        return cls(segment, segment.reference(dtype, (size,)))

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
