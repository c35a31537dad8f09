"""Arrays between carriers: small ones in the message that announces them, others in parts."""

from __future__ import annotations

import pickle
from typing import Any, Iterator

import numpy as np

GIVEN_UP = "given up"  # the answer to a reduction that not all machines have begun
SMALL = 1 << 15  # bytes that travel in the message that announces them
_TO_ALL = 1 << 17  # bytes that a machine sends to all others in such messages, at most
PART = 1 << 20  # bytes in one message, at most


def small_for_all(n_machines: int) -> int:
    """Return the most bytes of arrays that travel in a message to all other machines.

    >>> small_for_all(2), small_for_all(12), small_for_all(64)
    (32768, 11915, 2080)
    """
    return min(SMALL, _TO_ALL // max(n_machines - 1, 1))


def pickled(message: tuple) -> tuple[bytes, list[np.ndarray]]:
    """Return a pickled message without its large arrays, and the bytes of these arrays."""
    large: list[np.ndarray] = []

    def is_small(buffer):
        raw = buffer.raw()
        if raw.nbytes <= SMALL:
            return True
        large.append(np.frombuffer(raw, np.uint8))
        return False

    return pickle.dumps(message, 5, buffer_callback=is_small), large


def bytes_of(buffer: Any) -> np.ndarray:
    """Return the memory of a contiguous array, or of bytes, as bytes."""
    if not isinstance(buffer, np.ndarray):
        return np.frombuffer(buffer, np.uint8)
    if not buffer.flags.c_contiguous:
        raise ValueError("arrays that are sent must be contiguous")
    return buffer.reshape(-1).view(np.uint8)


def parts_of(array: np.ndarray, nbytes: int = PART) -> Iterator[np.ndarray]:
    """Yield the bytes of a contiguous array in pieces, one for each message."""
    flat = bytes_of(array)
    for begin in range(0, len(flat), nbytes):
        yield flat[begin : begin + nbytes]
