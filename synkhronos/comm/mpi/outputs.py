"""Outputs of functions on several machines: each leader sends those of its machine's workers.

Small ones go with the message that ends the call; the master fetches larger ones when it combines
them.
"""

from typing import NamedTuple, Optional

from synkhronos.comm import Outputs

_SMALL = 1 << 15  # bytes of a machine's outputs that go with the message


class Deposited(NamedTuple):
    """The answer of a worker that has deposited outputs, to the leader of its machine."""

    key: int
    layout: Optional[tuple]  # if it is a new one


class MachinesOutputs(Outputs):
    """One rank's outputs; on a leader those of its machine, on the master those of all."""

    def __init__(self, base, memory, gate):
        self._base, self._memory, self._gate = base, memory, gate
        self._deposited = []  # (rank, key) of this call, on a leader
        self._parts = {}  # rank -> arrays, or their places, of a call, on the master
        self._taken = 0  # the number of that call

    def deposit(self, key, parts):
        """Copy the parts into this rank's buffer."""
        layout = self._base.deposit(key, parts)
        return layout if self._gate.layout.machine == 0 else Deposited(key, layout)

    def hear(self, rank, answer):
        """Take the answer of a worker of this machine; return whether it came from `deposit`."""
        rank -= self._gate.first
        if not isinstance(answer, Deposited):
            return self._gate.layout.machine == 0 and self._base.hear(rank, answer)
        if answer.layout is not None:
            self._base.hear(rank, answer.layout)
        self._deposited.append((rank, answer.key))
        return True

    def begin_call(self):
        """Forget, on a leader, what the ranks of this machine deposited in the last call."""
        self._deposited.clear()

    def of_machine(self):
        """Return the outputs of this machine for the master: arrays, or their places if large."""
        found = {rank: self._base.collect(key, rank) for rank, key in self._deposited}
        is_small = sum(part.nbytes for parts in found.values() for part in parts) <= _SMALL
        sent = [
            (
                self._gate.first + rank,
                [part.copy() for part in found[rank]] if is_small else None,
                None if is_small else self._base.places(key, rank),
            )
            for rank, key in self._deposited
        ]
        return sent

    def take(self, sent):
        """Take, on the master, the outputs of another machine."""
        if self._taken != self._gate.sequence:
            self._parts.clear()  # of the last call that had outputs
            self._taken = self._gate.sequence
        for rank, arrays, places in sent:
            self._parts[rank] = arrays, places

    def collect(self, key, rank):
        """Return the parts that `rank` deposited in the last call."""
        if rank in self._gate.layout.ranks():
            return self._base.collect(key, rank)
        arrays, places = self._parts[rank]
        if arrays is None:
            arrays = self._memory.fetch_all(rank, places)
            self._parts[rank] = arrays, None
        return arrays

    def forget(self, key):
        """Drop the memory and the views that belong to function `key`."""
        self._base.forget(key)

    def close(self):
        """Drop all memory and views."""
        self._parts.clear()
        self._base.close()
