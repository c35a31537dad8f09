r"""The arithmetic of the rules: pure functions of arrays and numbers, which send no messages.

References
----------
Goyal et al., "Accurate, Large Minibatch SGD", arXiv:1706.02677 (`warmed_up`).

Zhang, Choromanska, LeCun, "Deep learning with Elastic Averaging SGD", arXiv:1412.6651
(`elastic_step`).

Blot, Picard, Cord, Thome, "Gossip training for deep learning", arXiv:1611.09726 (`gossip_merge`).
"""

from __future__ import annotations

from typing import Iterator, Sequence

import numpy as np

_BLOCK = 1 << 16  # elements; a temporary array of this length stays in the cache


def warmed_up(epoch: int, size: int, epochs: int) -> float:
    r"""Return the factor by which the warm-up has raised the learning rate when an epoch begins.

    It grows by :math:`k^{1/epochs}` at each of the epochs 1 to `epochs`, up to `k`, the number of
    ranks.

    >>> [round(warmed_up(epoch, 8, 3), 6) for epoch in range(5)]
    [1.0, 2.0, 4.0, 8.0, 8.0]
    """
    return float(size) ** (min(max(epoch, 0), epochs) / epochs)


def elastic_step(own: np.ndarray, other: np.ndarray, alpha: float) -> None:
    r"""Move an array towards another one, in place.

    .. math:: own \leftarrow own + \alpha (other - own)

    A worker and the server both take this step, each with the other's old value.

    >>> worker, center = np.array([0.0, 8.0]), np.array([4.0, 4.0])
    >>> before = worker.copy()
    >>> elastic_step(worker, center, 0.25); elastic_step(center, before, 0.25)
    >>> worker, center
    (array([1., 7.]), array([3., 5.]))
    """
    for own_part, part in blocks(own, other):
        own_part += own_part.dtype.type(alpha) * (part - own_part)


def gossip_merge(own: np.ndarray, weight: float, other: np.ndarray, other_weight: float) -> float:
    r"""Merge a peer's parameters into this worker's `own`, in place; return the new weight.

    .. math:: x \leftarrow (\alpha x + \alpha_s x_s) / (\alpha + \alpha_s), \quad
              \alpha \leftarrow \alpha + \alpha_s

    >>> x = np.array([0.0, 4.0])
    >>> gossip_merge(x, 0.25, np.array([2.0, 4.0]), 0.25), x
    (0.5, array([1., 4.]))
    """
    total = weight + other_weight
    elastic_step(own, other, other_weight / total)
    return total


def pairs_of(order: Sequence[int]) -> dict[int, int]:
    """Return the partner of each rank: neighbours in `order` are paired.

    With an odd number of ranks the last one has no partner.

    >>> pairs_of([2, 0, 1, 3])
    {2: 0, 0: 2, 1: 3, 3: 1}
    >>> pairs_of([1, 2, 0])
    {1: 2, 2: 1}
    """
    partners = {}
    for one, other in zip(order[::2], order[1::2]):
        partners[one], partners[other] = other, one
    return partners


def blocks(*arrays: np.ndarray) -> Iterator[list[np.ndarray]]:
    """Yield one block of each array, at equal places: views, if the arrays are contiguous."""
    flat = [array.reshape(-1) for array in arrays]
    for begin in range(0, arrays[0].size, _BLOCK):
        yield [array[begin : begin + _BLOCK] for array in flat]
