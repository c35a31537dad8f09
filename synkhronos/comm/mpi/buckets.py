"""Buckets: reductions that a function begins long before it needs the results.

    rank      fills buffers ── ("bucket", id, buffers) ──▶ carrier            and computes on
    carrier   when all ranks of its machine have begun it: reduces into the buffers of the first
              rank, then between machines ── ("done", id, places) ──▶ all ranks of its machine
    rank      uses the buffers of the first rank where they are, or copies them

No rank waits for another one, or for the carrier, before it needs a result.
"""

from synkhronos._arithmetic.blocks import cut, reduce_block
from synkhronos._arithmetic.operations import OPERATIONS


class Bucket:
    """A bucket on the carrier, until all ranks of the machine have begun it."""

    def __init__(self, n_ranks):
        self._peers = []
        self._places = [None] * n_ranks
        self._layouts = [None] * n_ranks

    def add(self, rank, peer, places, layout):
        """Take the part of one rank, which has this number on its machine."""
        self._peers.append(peer)
        self._places[rank], self._layouts[rank] = places, layout

    def answer(self, post, *message):
        """Send a message to all ranks that have begun it."""
        for peer in self._peers:
            post(peer, *message)

    @property
    def is_complete(self):
        """Whether all ranks of this machine have begun it."""
        return len(self._peers) == len(self._places)

    @property
    def layout(self):
        """The dtypes and shapes of all ranks of this machine, or ("unequal", shapes of each)."""
        first, *others = self._layouts
        kinds = [kind for kind, _ in first]
        shapes = [[shape for _, shape in layout] for layout in self._layouts]
        if all(layout == first for layout in others):
            return kinds, shapes[0]
        return "unequal", shapes

    @property
    def places(self):
        """The places of the results: the buffers of the first rank."""
        return self._places[0]

    def reduce(self, open_place, ops, counting):
        """Reduce the buffers of the `counting` ranks into those of the first; return these."""
        buffers = [[open_place(place) for place in places] for places in self._places]
        reduce_into_first(buffers, ops, counting, 1, 0)
        return buffers[0]


def reduce_into_first(everyone, ops, counting, n_parts, part):
    """Reduce one of `n_parts` of the buffers of some ranks into those of the first rank.

    `everyone` has the buffers of each rank of this machine, `counting` the numbers that the ranks
    with rows have on this machine.
    """
    if not counting:
        if part == 0:
            for op, buffer in zip(ops, everyone[0]):
                buffer.fill(OPERATIONS[op].identity(buffer.dtype))
        return
    if list(counting) == [0]:
        return
    sources = [everyone[rank] for rank in counting]
    for position, (out, *blocks) in cut(list(zip(everyone[0], *sources)), n_parts, part):
        reduce_block(ops[position], blocks, out, 1)  # averages are divided between the machines
