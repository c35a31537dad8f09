"""Outputs of functions on several machines: each leader sends those of its machine's ranks.

    ranks of a machine ── deposit ──▶ leader: combines their parts, where the mode allows it
                                      ── at the end of the call: small parts, places of others ──▶
    master: fetches parts that are not small when it combines all

So one part for each machine crosses the network for sums, averages and the like. First the ranks of
each machine are combined, then the machines, as in reductions inside functions.
"""

from typing import NamedTuple, Optional

import numpy as np

from synkhronos._arithmetic.reduction import Partial, combine_of_machines
from synkhronos.comm.outputs import Outputs

_SMALL = 1 << 15  # bytes of a machine's outputs that go with the message


class OutputPart(NamedTuple):
    """A part of an output, as a leader sends it: the array, or its place on that machine."""

    array: Optional[np.ndarray]
    place: Optional[tuple]
    n_parts: int  # the number of ranks that are combined in it


class MachinesOutputs(Outputs):
    """One rank's outputs; on a leader those of its machine, on the master those of all."""

    combine = staticmethod(combine_of_machines)

    def __init__(self, memory, gate):
        super().__init__(memory)
        self._gate = gate
        self._combined = Outputs(memory)  # buffers for what a leader has combined
        self._layouts = {}  # key -> layout of its buffer there
        self._parts = {}  # rank -> parts of a call, on the master
        self._taken = 0  # the number of that call
        self._collected = {}  # rank -> what `collect` returns

    def hear(self, rank, answer):
        """Take the answer of a worker of this machine; return whether it came from `deposit`."""
        return super().hear(rank - self._gate.first, answer)

    def of_machine(self, key, combined):
        """Return the outputs of this machine for the master: (rank, `OutputPart`s or None) each.

        `combined` has the parts of each rank. Where those of several ranks were combined, the first
        of them has a `Partial`, and the others have None.
        """
        sent = {rank: list(map(_part, parts)) for rank, parts in combined.items()}
        every = [part for parts in sent.values() for part in parts if part is not None]
        if sum(part.array.nbytes for part in every) <= _SMALL:
            return [*sent.items()]
        partial = [part for part in every if part.n_parts > 1]
        if partial:
            layout = self._combined.deposit(key, [part.array for part in partial])
            if layout is not None:
                self._layouts[key] = layout
            layout = self._layouts[key]
            partial = [(layout.segment, *place) for place in layout.parts]
        for rank, parts in sent.items():
            places = self.places(key, rank - self._gate.first)
            for number, part in enumerate(parts):
                if part is not None:
                    place = partial.pop(0) if part.n_parts > 1 else places[number]
                    parts[number] = OutputPart(None, place, part.n_parts)
        return [*sent.items()]

    def take(self, sent):
        """Take, on the master, the outputs of another machine."""
        if self._taken != self._gate.sequence:
            self._parts.clear()  # of the last call that had outputs
            self._collected.clear()
            self._taken = self._gate.sequence
        self._parts.update(sent)

    def collect(self, key, rank):
        """Return the parts that a rank has deposited in the last call; the master, of any rank."""
        if rank in self._gate.layout.ranks():
            return super().collect(key, rank - self._gate.first)
        if rank not in self._collected:
            parts = self._parts[rank]
            places = [part.place for part in parts if part is not None and part.place is not None]
            fetched = iter(self._memory.fetch_all(rank, places) if places else ())
            self._collected[rank] = [_received(part, fetched) for part in parts]
        return self._collected[rank]

    def forget(self, key):
        """Drop the memory and the views that belong to function `key`."""
        super().forget(key)
        self._combined.forget(key)
        self._layouts.pop(key, None)

    def close(self):
        """Drop all memory and views."""
        self._parts.clear()
        self._collected.clear()
        self._layouts.clear()
        super().close()
        self._combined.close()


def _received(part, fetched):
    if part is None:
        return None
    array = part.array if part.place is None else next(fetched)
    return Partial(array, part.n_parts) if part.n_parts > 1 else array


def _part(part):
    if part is None:
        return None
    if isinstance(part, Partial):
        return OutputPart(part.part, None, part.n_parts)
    return OutputPart(part, None, 1)
