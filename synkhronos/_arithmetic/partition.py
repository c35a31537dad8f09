"""Partition of rows over the ranks, in rank order; the same everywhere.

The edges are ``linspace(0, rows, n + 1)``, rounded down. So later ranks get the rows that are left
over, and some ranks get none if there are fewer rows than ranks.
"""

from __future__ import annotations

import numpy as np


def edges(rows: int, parts: int) -> tuple[int, ...]:
    """Return the ``parts + 1`` edges that split `rows` rows."""
    return tuple(rows * part // parts for part in range(parts + 1))


def share(rows: int, parts: int, part: int) -> tuple[int, int]:
    """Return the first row of one part and the row after its last."""
    return rows * part // parts, rows * (part + 1) // parts


def counts(rows: int, parts: int) -> list[int]:
    """Return the number of rows of each part."""
    return [rows * (part + 1) // parts - rows * part // parts for part in range(parts)]


def take_rows(
    array: np.ndarray, rows: range | np.ndarray, buffer: np.ndarray | None = None, axis: int = 0
) -> np.ndarray:
    """Return rows along an axis: a view for a range that goes forward, else a copy.

    The rows must be within the array. A copy goes to the `buffer`, which has the result's shape.
    """
    if isinstance(rows, range):
        if rows.step > 0:
            chosen = slice(rows.start, rows.stop, rows.step)
            return array[(*(slice(None),) * axis, chosen)] if axis else array[chosen]
        rows = np.arange(rows.start, rows.stop, rows.step)
    # Rows were checked before the call, so "clip" does nothing but save a buffer inside NumPy.
    return np.take(array, rows, axis=axis, out=buffer, mode="clip")
