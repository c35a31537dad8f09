"""Collectives on the values of shared variables of several machines.

On each machine they go through its shared memory (`synkhronos.comm.variable_collectives`). Leaders
tell one another the places of values, and each asks its carrier to copy those that its machine
needs.
"""

import itertools

import numpy as np

from synkhronos import _host
from synkhronos._arithmetic.operations import wide
from synkhronos.comm.arrays import reduce_whole
from synkhronos.comm.mpi.arrays import EQUAL, UNEQUAL
from synkhronos.comm.variable_collectives import Variables, first_unequal, first_unequal_rows

_SMALL = 1 << 17  # bytes of values that a leader sends with their places


class MachinesVariables(Variables):
    """Values of shared variables, in regions of the shared memory of each machine."""

    def __init__(self, worker, storage, arrays, memory, gate):
        super().__init__(worker, storage)  # `worker` is that of this machine
        self._all, self._arrays, self._memory = gate, arrays, memory
        self._is_alone, self._leader = False, self._gate.master_rank
        self._exposed = {}  # (rank, key) -> its place, and the value or None, on the master
        self._taken = 0  # the number of the call in which they were exposed

    def broadcast(self, keys, root, between_devices=True):
        """Replace each variable, on all ranks, with the value on rank `root`."""
        gate, layout = self._all, self._all.layout
        machine = layout.machine_of(root)
        if layout.machine == machine:
            local = root - gate.first
            super().broadcast(keys, local)
            if gate.is_leader:
                self.storage.hear()
                limit = _SMALL // max(len(layout.counts) - 1, 1)  # to all others
                gate.tell_all(self._offered(keys, [local], limit))
            return
        if gate.is_leader:
            self.storage.begin()
            offered = [each for [each] in gate.told_by(machine)]
            arrays = [self._new(key, place[2]) for key, (place, _) in zip(keys, offered)]
            places = [self.storage.places(self._worker.rank, key)[0] for key in keys]
            self._copy({machine: zip(offered, arrays, places)}, "copy_to_all")
            for key, array in zip(keys, arrays):
                if self._lives_on_device(key):
                    _host.replace(self._worker.variables[key], array)
        super().broadcast(keys, self._leader)

    def _offered(self, keys, ranks, limit=_SMALL):
        """Return, for each variable and each of these ranks, the place of its value and the value.

        The values are None if all of them together have more than `limit` bytes. Leaders of other
        machines get the result.
        """
        storage = self.storage
        values = [[storage.value_of(rank, key) for rank in ranks] for key in keys]
        is_small = sum(value.nbytes for each in values for value in each) <= limit
        sent = [[value.copy() if is_small else None for value in each] for each in values]
        places = [[storage.places(rank, key)[0] for rank in ranks] for key in keys]
        return [list(zip(*each)) for each in zip(places, sent)]

    def _copy(self, pieces, how="copy"):
        """Copy values of other machines into arrays here.

        `pieces` has triples for each machine: an item of `_offered`, the array, and its place.
        """
        gate, numbers = self._all, []
        for machine, triples in pieces.items():
            far = []
            for (place, value), array, target in triples:
                if value is None:
                    far.append((place, target))
                else:
                    array[...] = value
            if far:
                numbers.append(gate.link.ask(how, gate.call_number, machine, *zip(*far)))
        for number in numbers:
            gate.wait_for_answer(number)

    def _new(self, key, shape):
        """Return an array in this rank's region of a variable; on a CPU it is the new value."""
        if self._lives_on_device(key):
            dtype = np.dtype(self._worker.variables[key].dtype).str
            return self.storage.room_for(key, ((dtype, tuple(shape)),))[0]
        return self.storage.new_value(key, tuple(shape))

    def reduce(self, keys, op, root, between_devices=True):
        """Replace each variable of rank `root`, or of all if it is None, with the reduction."""
        gate = self._all
        values = [_host.peek(self._worker.variables[key]) for key in keys]
        n_ranks = gate.n_ranks
        ops, weights = (op,) * len(keys), (1,) * n_ranks
        results, shapes = self._arrays.reduce(values, ops, weights, 1, n_ranks)
        values = None  # a reference would look like one of the script
        if results is None:
            return shapes and first_unequal(list(zip(*shapes)))
        if root in (None, gate.rank):
            for key, result in zip(keys, results):
                self._give(key, result)
        return None

    def all_gather(self, keys, between_devices=True):
        """Replace each variable, on all ranks, with the values of all ranks joined on axis 0."""
        gate, leader = self._all, self._leader
        self._meet(keys)
        offered = unequal = None
        if gate.is_leader:
            machines = gate.exchange(self._offered(keys, range(self._worker.n_ranks)))
            offered = [list(itertools.chain(*each)) for each in zip(*machines)]
            unequal = first_unequal_rows([[place[2] for place, _ in each] for each in offered])
        if gate.leader_decision(EQUAL if unequal is None else UNEQUAL) == UNEQUAL:
            return unequal
        if gate.is_leader:
            self._join(keys, offered)
        gate.leader_decision(0)
        self.storage.hear()
        for key in keys:
            if not self._lives_on_device(key):
                self.storage.turn((key,))
            self._give(key, self.storage.arrays_of(leader, _gathered(key))[0])
        return None

    def _join(self, keys, offered):
        """Join the values of all ranks of all machines in regions of this leader."""
        layout, storage, pieces = self._all.layout, self.storage, {}
        for key, everyone in zip(keys, offered):
            dtype = np.dtype(self._worker.variables[key].dtype).str
            rows = sum(place[2][0] for place, _ in everyone)
            name, shape = _gathered(key), (rows, *everyone[0][0][2][1:])
            [joined] = storage.room_for(name, ((dtype, shape),))
            segment, _, _, begin = storage.places(self._worker.rank, name)[0]
            first = 0
            for rank, each in enumerate(everyone):
                count = each[0][2][0]
                array = joined[first : first + count]
                place = segment, dtype, array.shape, begin + first * joined.strides[0]
                machine = layout.machine_of(rank)
                if machine == layout.machine:
                    array[...] = storage.value_of(rank - self._all.first, key)
                elif array.size:
                    pieces.setdefault(machine, []).append((each, array, place))
                first += count
        storage.post()
        self._copy(pieces)

    def forget(self, keys):
        """Drop the regions of these variables, and all views."""
        super().forget((*keys, *map(_gathered, keys)))

    def value_of(self, rank, key):
        """Return, on the master, the value that one rank has exposed."""
        layout = self._all.layout
        if rank in layout.ranks():
            return super().value_of(rank - self._all.first, key)
        place, value = self._exposed[rank, key]
        return self._memory.fetch_all(rank, [place])[0] if value is None else value

    def exposed(self, keys, rank):
        """Return, on a leader, the values that its ranks, or one of them, have exposed.

        The result maps (rank, key) to an item of `_offered`.
        """
        first = self._all.first
        ranks = range(self._worker.n_ranks)
        if rank is not None:
            ranks = [rank - first] if rank - first in ranks else []
        self.storage.hear()
        return {
            (first + each, key): offered
            for key, everyone in zip(keys, self._offered(keys, ranks))
            for each, offered in zip(ranks, everyone)
        }

    def take_exposed(self, offered):
        """Keep, on the master, the result of another leader's `exposed`, until the next one."""
        if offered and self._taken != self._all.sequence:
            self._exposed.clear()
            self._taken = self._all.sequence
        self._exposed.update(offered)

    def values_of(self, keys):
        """Return, on the master, the values of each variable that all ranks have exposed."""
        ranks = range(self._all.n_ranks)
        return [[self.value_of(rank, key) for rank in ranks] for key in keys]

    def are_little(self, keys):
        """Return False: the master has no access to the values on other machines."""
        return False

    def reduce_to_new(self, key, op):
        """Return, on the master, the reduction of the values that all ranks have exposed."""
        values = self.values(key)
        shapes = [value.shape for value in values]
        if len({*shapes}) > 1:
            return 0, shapes
        # As `all_reduce` does, so that the bits are the same: first over each machine's ranks.
        layout, parts = self._all.layout, []
        for machine in range(len(layout.counts)):
            ranks = layout.ranks(machine)
            part = np.empty(values[0].shape, wide(values[0].dtype))
            here = [values[rank].astype(part.dtype, copy=False) for rank in ranks]
            reduce_whole(op, here, part, 1)  # averages are divided below
            parts.append(part)
        result = np.empty(values[0].shape, parts[0].dtype)
        reduce_whole(op, parts, result, len(values))
        return result.astype(values[0].dtype, copy=False)


def _gathered(key):
    """Return the key of the region in which a leader joins the values of a variable."""
    return f"gathered {key}"
