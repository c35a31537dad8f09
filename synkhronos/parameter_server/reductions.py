"""Reductions of the arrays of a round: in a fixed order, in blocks that threads share.

    array of device 0  ┐ block
    array of device 1  ┼──────▶ result ──▶ the arrays of devices that have asked for it
    array of device 2  ┘ by block

Arrays are combined in the order of the devices, in whatever order they were pushed, and whichever
thread takes a block. So all devices get the same bits in every run. A block fits the cache, so its
result is still there when it is copied to the devices. NumPy computes such blocks without the GIL.
"""

from __future__ import annotations

import itertools
import threading
from typing import Sequence

import numpy as np

from synkhronos._arithmetic.blocks import reduce_block
from synkhronos._arithmetic.operations import OPERATIONS, kinds_in_words

NUMBERS = "iufc"  # kinds of dtypes: a sum of bools would be no bool
_BLOCK_BYTES = 1 << 18


def names() -> list[str]:
    """Return the names of reductions in stores, where the average is called "mean"."""
    return [*(name for name in OPERATIONS if name != "avg"), "mean", "gather"]


def refuse_dtype(op: str, dtype: np.dtype, name: str) -> None:
    """Raise TypeError if an operation can't reduce arrays of a dtype."""
    taken = NUMBERS
    if op != "gather":
        row = OPERATIONS[op]
        taken = "".join(kind for kind in row.kinds if kind in row.kinds_in_stores)
    if dtype.kind not in taken:
        advice = " The mean is not of this dtype: use sum." if op == "mean" else ""
        raise TypeError(
            f"{name}: arrays of {dtype} can't be reduced by {op}, which takes "
            f"{kinds_in_words(taken)}.{advice}"
        )


class Reduction:
    """A reduction of large flat arrays; at most `n_threads` threads take blocks of it.

    For "gather", `result` is as long as all parts together. Each block of the result is also copied
    to `copies`, which must satisfy `may_copy`.
    """

    def __init__(
        self,
        op: str,
        parts: Sequence[np.ndarray],
        result: np.ndarray,
        copies: Sequence[np.ndarray] = (),
        n_threads: int = 1,
    ) -> None:
        self._op, self._result, self._copies = op, result, copies
        pieces = [(parts, 0)]
        if op == "gather":
            pieces = [([part], at * part.size) for at, part in enumerate(parts)]
            self._op = "sum"  # of one part: a copy
        size = max(1, _BLOCK_BYTES // result.itemsize)
        self._blocks = [
            (*piece, start, min(start + size, piece[0][0].size))
            for piece in pieces
            for start in range(0, piece[0][0].size, size)
        ]
        self._next = itertools.count()  # next() is atomic under the GIL
        self._lock = threading.Lock()
        self._left = len(self._blocks)
        self.room = n_threads  # how many more threads may take blocks
        self.error: BaseException | None = None

    @property
    def has_blocks(self) -> bool:
        """Whether another thread could take a block."""
        return self.room > 0 and self._left > 1

    def run(self) -> bool:
        """Take blocks until none is left; return True in the thread that finishes the last one."""
        is_last = not self._blocks
        while True:
            number = next(self._next)
            if number >= len(self._blocks):
                return is_last
            try:
                self._reduce(*self._blocks[number])
            except BaseException as error:
                self.error = error
            with self._lock:
                self._left -= 1
                is_last = self._left == 0

    def _reduce(self, parts, offset, start, stop):
        result = self._result[offset + start : offset + stop]
        reduce_block(self._op, [part[start:stop] for part in parts], result, len(parts))
        for copy in self._copies:
            copy[offset + start : offset + stop] = result


def may_copy(copy: np.ndarray, parts: Sequence[np.ndarray], copies: Sequence[np.ndarray]) -> bool:
    """Return whether a reduction may write an array block by block while it reads its parts.

    All arrays are contiguous.

    >>> both = np.zeros(6)
    >>> may_copy(both[:3], [both[:3], both[3:]], []), may_copy(both[1:4], [both[:3]], [])
    (True, False)
    """
    begin, end = _bounds(copy)
    for other in (*parts, *copies):
        low, high = _bounds(other)
        if low < end and begin < high and (low, high) != (begin, end):
            return False
    return True


def _bounds(array):
    begin = array.__array_interface__["data"][0]
    return begin, begin + array.nbytes
