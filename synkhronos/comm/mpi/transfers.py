"""Arrays in messages between carriers: small ones in one that announces them, others in parts."""

import numpy as np

GIVEN_UP = "given up"  # the answer about a reduction that not all machines have begun
SMALL = 1 << 15  # bytes that travel in the message that announces them
_PART = 1 << 20  # bytes of an array in one message


def bytes_of(array):
    """Return the memory of a contiguous array as bytes."""
    return array.reshape(-1).view(np.uint8)


def parts(array):
    """Yield the bytes of a contiguous array in pieces of one message each."""
    flat = bytes_of(array)
    for begin in range(0, len(flat), _PART):
        yield flat[begin : begin + _PART]
