"""Outputs of functions on several machines: each leader sends those of its machine's ranks.

    ranks of a machine ── deposit ──▶ leader: combines their parts, where the mode allows it
                                      ── with the end of the call: small parts, places of others ──▶
    master: fetches what is not small when it combines all

So of sums, averages and the like one part crosses the network for each machine. As for reductions
inside functions, the order is: the ranks of each machine, then the machines.
"""

from typing import NamedTuple, Optional

import numpy as np

from synkhronos._arithmetic.reduction import Partial, combine_of_machines
from synkhronos.comm.outputs import Outputs

_SMALL = 1 << 15  # bytes of a machine's outputs that go with the message


class Deposited(NamedTuple):
    """The answer of a worker that has deposited outputs, to the leader of its machine."""

    key: int
    layout: Optional[tuple]  # if it is a new one


class Part(NamedTuple):
    """A part of an output, as a leader sends it: the array, or its place on that machine."""

    array: Optional[np.ndarray]
    place: Optional[tuple]
    n_parts: int  # of so many ranks, combined


class MachinesOutputs(Outputs):
    """One rank's outputs; on a leader those of its machine, on the master those of all."""

    combine = staticmethod(combine_of_machines)

    def __init__(self, memory, gate):
        super().__init__(memory)
        self._gate = gate
        self._combined = Outputs(memory)  # buffers for what a leader has combined
        self._layouts = {}  # key -> layout of that
        self._deposited = []  # (rank, key) of this call, on a leader
        self._parts = {}  # rank -> parts of a call, on the master
        self._taken = 0  # the number of that call
        self._collected = {}  # rank -> what `collect` returns of it

    def deposit(self, key, parts):
        """Copy the parts into this rank's buffer."""
        layout = super().deposit(key, parts)
        return layout if self._gate.layout.machine == 0 else Deposited(key, layout)

    def hear(self, rank, answer):
        """Take the answer of a worker of this machine; return whether it came from `deposit`."""
        rank -= self._gate.first
        if not isinstance(answer, Deposited):
            return self._gate.layout.machine == 0 and super().hear(rank, answer)
        if answer.layout is not None:
            super().hear(rank, answer.layout)
        self._deposited.append((rank, answer.key))
        return True

    def begin_call(self):
        """Forget, on a leader, what the ranks of this machine deposited in the last call."""
        self._deposited.clear()

    def of_machine(self, combine=None):
        """Return the outputs of this machine for the master: (rank, list of `Part` or None) each.

        Parameters
        ----------
        combine : callable, optional
            Takes a dict, rank -> parts; returns one in which some parts of several ranks are one
            `Partial` at the first of them, and None at the others.
        """
        first = self._gate.first
        found, places = {}, {}
        for rank, key in self._deposited:
            found[first + rank] = super().collect(key, rank)
            places[first + rank] = self.places(key, rank)
        combined = found if combine is None else combine(found)
        sent = {rank: list(map(_part, parts)) for rank, parts in combined.items()}
        every = [part for parts in sent.values() for part in parts if part is not None]
        if sum(part.array.nbytes for part in every) <= _SMALL:
            return [*sent.items()]
        partial = [part for part in every if part.n_parts > 1]
        if partial:
            key = self._deposited[0][1]
            layout = self._combined.deposit(key, [part.array for part in partial])
            if layout is not None:
                self._layouts[key] = layout
            layout = self._layouts[key]
            partial = [(layout.segment, *place) for place in layout.parts]
        for rank, parts in sent.items():
            for number, part in enumerate(parts):
                if part is not None:
                    place = partial.pop(0) if part.n_parts > 1 else places[rank][number]
                    parts[number] = Part(None, place, part.n_parts)
        return [*sent.items()]

    def take(self, sent):
        """Take, on the master, the outputs of another machine."""
        if self._taken != self._gate.sequence:
            self._parts.clear()  # of the last call that had outputs
            self._collected.clear()
            self._taken = self._gate.sequence
        self._parts.update(sent)

    def collect(self, key, rank):
        """Return the parts that `rank` deposited in the last call."""
        if rank in self._gate.layout.ranks():
            return super().collect(key, rank)
        found = self._collected.get(rank)
        if found is None:
            parts = self._parts[rank]
            places = [part.place for part in parts if part is not None and part.place is not None]
            fetched = iter(self._memory.fetch_all(rank, places) if places else ())
            found = self._collected[rank] = [_received(part, fetched) for part in parts]
        return found

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
        return Part(part.part, None, part.n_parts)
    return Part(part, None, 1)
