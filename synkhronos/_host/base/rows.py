"""Rows of a minibatch: their numbers, and the input that stands for them in a function."""

from typing import Any, List, NamedTuple

import numpy as np


class RowNumbers(NamedTuple):
    """The input that stands for row numbers in a function."""

    variable: Any
    operands: List[Any]  # index, size, and the length if there is one
    indexed: List[Any]  # the shared variables whose rows they are


def numbers_of_rows(index, size, length=None):
    """Return the numbers of the rows of a minibatch, an array; raise ValueError below 0."""
    if index < 0 or size < 0:
        raise ValueError(f"rows({index}, {size}) has a negative number.")
    end = (index + 1) * size
    return np.arange(index * size, end if length is None else min(end, length), dtype=np.int64)
