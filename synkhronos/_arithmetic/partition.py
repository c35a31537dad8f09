"""Partition of rows over the ranks: pure arithmetic, one policy everywhere.

Edges are ``linspace(0, rows, n + 1)`` floored, in rank order, so later ranks get the rows that are
left over, and some ranks have none if there are fewer rows than ranks.
"""

from typing import List, Optional, Tuple, Union

import numpy as np


def edges(rows: int, parts: int) -> Tuple[int, ...]:
    """Return the ``parts + 1`` edges that split `rows` rows."""
    return tuple(rows * part // parts for part in range(parts + 1))


def share(rows: int, parts: int, part: int) -> Tuple[int, int]:
    """Return the first row of one part and the row after its last."""
    return rows * part // parts, rows * (part + 1) // parts


def counts(rows: int, parts: int) -> List[int]:
    """Return the number of rows of each part."""
    return [rows * (part + 1) // parts - rows * part // parts for part in range(parts)]


def take_rows(
    array: np.ndarray,
    rows: Union[range, np.ndarray],
    buffer: Optional[np.ndarray] = None,
    axis: int = 0,
) -> np.ndarray:
    """Return rows of an array along an axis: a view of a range that goes forward, else a copy.

    That the rows are within the array is not checked. A copy goes to the `buffer`, which has room
    for as many rows.
    """
    if isinstance(rows, range):
        if rows.step > 0:
            chosen = slice(rows.start, rows.stop, rows.step)
            return array[(*(slice(None),) * axis, chosen)] if axis else array[chosen]
        rows = np.arange(rows.start, rows.stop, rows.step)
    # The rows were checked before the launch; "clip" saves a second buffer inside NumPy.
    return np.take(array, rows, axis=axis, out=buffer, mode="clip")
