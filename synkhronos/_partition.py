"""Partition of rows over the ranks: pure arithmetic, one policy everywhere.

Edges are ``linspace(0, rows, n + 1)`` floored, in rank order, so later ranks get the rows that are
left over, and some ranks have none if there are fewer rows than ranks.
"""

from typing import Tuple


def edges(rows: int, parts: int) -> Tuple[int, ...]:
    """Return the ``parts + 1`` edges that split `rows` rows."""
    return tuple(rows * part // parts for part in range(parts + 1))


def share(rows: int, parts: int, part: int) -> Tuple[int, int]:
    """Return the first row of one part and the row after its last."""
    return rows * part // parts, rows * (part + 1) // parts


def ranks_with_rows(rows: int, n_ranks: int) -> Tuple[int, ...]:
    """Return the ranks whose share is not empty, in rank order."""
    bounds = edges(rows, n_ranks)
    return tuple(rank for rank in range(n_ranks) if bounds[rank] < bounds[rank + 1])
