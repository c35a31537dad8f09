"""Collectives on the values of shared variables of several machines.

On each machine they go through its shared memory (`synkhronos.comm.variables`); between the
machines its leader has them carried.
"""

import itertools

import numpy as np

from synkhronos import _host
from synkhronos._arithmetic.operations import wide
from synkhronos.comm.arrays import reduce_whole
from synkhronos.comm.mpi.arrays import EQUAL, UNEQUAL, Unequal
from synkhronos.comm.variables import Variables, first_unequal, first_unequal_rows


class MachinesVariables(Variables):
    """Values of shared variables, in regions of the shared memory of each machine."""

    def __init__(self, worker, storage, arrays, memory, gate):
        super().__init__(worker, storage)  # `worker` is that of this machine
        self._all, self._arrays, self._memory = gate, arrays, memory
        self._is_alone = False
        self._exposed = {}  # (rank, key) -> place, on the master

    @property
    def _leader(self):
        return self._gate.master_rank

    def broadcast(self, keys, root, between_devices=True):
        """Replace each variable, on all ranks, with the value on rank `root`."""
        gate, layout = self._all, self._all.layout
        machine = layout.machine_of(root)
        if layout.machine == machine:
            local = root - gate.first
            super().broadcast(keys, local)
            if gate.is_leader:
                id = gate.next_id()
                self._storage.hear()
                shapes = [value.shape for value in self._values_of(keys, local)]
                gate.link.tell(None, ("exchanged", id, shapes))
                self._spread(machine, [self._storage.places(local, key)[0] for key in keys])
        else:
            if gate.is_leader:
                self._storage.begin()
                shapes = gate.told_by(machine, gate.next_id())
                targets = [self._new(key, shape) for key, shape in zip(keys, shapes)]
                self._spread(
                    machine, [self._storage.places(self._worker.rank, key)[0] for key in keys]
                )
                self._give_to_devices(keys, targets)
            super().broadcast(keys, self._leader)

    def _values_of(self, keys, rank):
        return [self._storage.value_of(rank, key) for key in keys]

    def _new(self, key, shape):
        """Return an array in this rank's region of a variable, which gets it if it is on a CPU."""
        variable = self._worker.variables[key]
        if _host.lives_on_device(variable):
            dtype = np.dtype(variable.dtype).str
            return self._storage.room_for(key, ((dtype, tuple(shape)),))[0]
        return self._storage.new_value(key, tuple(shape))

    def _give_to_devices(self, keys, arrays):
        for key, array in zip(keys, arrays):
            variable = self._worker.variables[key]
            if _host.lives_on_device(variable):
                _host.replace(variable, array)

    def _spread(self, machine, places):
        """Copy arrays from one machine to all others; every leader does this in the same order."""
        gate = self._all
        id = gate.next_id()
        gate.link.spread(id, machine, places)
        gate.wait_for_answer(id)

    def reduce(self, keys, op, root, between_devices=True):
        """Replace each variable of rank `root`, or of all if it is None, with the reduction."""
        gate = self._all
        values = [_host.peek(self._worker.variables[key]) for key in keys]
        n_ranks = gate.n_ranks
        results = self._arrays.reduce(values, (op,) * len(keys), (1,) * n_ranks, 1, n_ranks)
        values = None  # a reference would count as one that is held
        if isinstance(results, Unequal):
            return results.of_ranks and first_unequal(list(zip(*results.of_ranks)))
        if root in (None, gate.rank):
            for key, result in zip(keys, results):
                self._give(key, result)
        return None

    def all_gather(self, keys, between_devices=True):
        """Replace each variable, on all ranks, with the values of all ranks joined on axis 0."""
        gate = self._all
        self._meet(keys)
        here = [[value.shape for value in self._storage.values(key)] for key in keys]
        shapes = unequal = None
        if gate.is_leader:
            machines = gate.exchange(here)
            shapes = [list(itertools.chain(*each)) for each in zip(*machines)]
            unequal = first_unequal_rows(shapes)
        if gate.verdict(EQUAL if unequal is None else UNEQUAL) == UNEQUAL:
            return unequal
        if gate.is_leader:
            for key, each in zip(keys, shapes):
                self._gather(key, each)
        gate.verdict(0)
        self._storage.hear()
        leader = self._leader
        if self._worker.rank != leader:
            for key in keys:
                joined = self._storage.arrays_of(leader, _gathered(key))[0]
                self._give_joined(key, joined)
        else:
            for key in keys:
                self._give_joined(key, self._storage.region_of(_gathered(key)).arrays[0])
        return None

    def _gather(self, key, shapes):
        """Join the values of all machines in a region of this leader."""
        layout, storage = self._all.layout, self._storage
        dtype = np.dtype(self._worker.variables[key].dtype).str
        rows = sum(shape[0] for shape in shapes)
        name = _gathered(key)
        [joined] = storage.room_for(name, ((dtype, (rows, *shapes[0][1:])),))
        storage.post()
        segment, _, _, begin = storage.places(self._worker.rank, name)[0]
        row = joined.itemsize * int(np.prod(joined.shape[1:], dtype=np.int64))
        first = 0
        for machine in range(len(layout.counts)):
            ranks = layout.ranks(machine)
            count = sum(shapes[rank][0] for rank in ranks)
            if machine == layout.machine:
                np.concatenate(storage.values(key), out=joined[first : first + count])
            if count and row:
                shape = (count, *joined.shape[1:])
                self._spread(machine, [(segment, dtype, shape, begin + first * row)])
            first += count

    def _give_joined(self, key, joined):
        variable = self._worker.variables[key]
        if _host.lives_on_device(variable):
            _host.replace(variable, joined)
        else:
            self._storage.turn((key,))
            self._storage.new_value(key, joined.shape)[...] = joined

    def forget(self, keys):
        """Drop the regions of these variables, and all views."""
        super().forget((*keys, *map(_gathered, keys)))
        self._exposed = {
            place: each for place, each in self._exposed.items() if place[1] not in keys
        }

    def value_of(self, rank, key):
        """Return, on the master, the value that one rank has exposed."""
        layout = self._all.layout
        if rank in layout.ranks():
            return super().value_of(rank - self._all.first, key)
        return self._memory.fetch_all(rank, [self._exposed[rank, key]])[0]

    def exposed_places(self, keys, rank):
        """Return, on a leader, the places of what its ranks, or one of them, have exposed."""
        first = self._all.first
        ranks = range(self._worker.n_ranks)
        if rank is not None:
            ranks = [rank - first] if rank - first in ranks else []
        self._storage.hear()
        return {
            (first + each, key): self._storage.places(each, key)[0]
            for each in ranks
            for key in keys
        }

    def take_exposed(self, places):
        """Keep, on the master, the places of values that other machines have exposed."""
        self._exposed.update(places)

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
        # In the order of `all_reduce`, so that the bits are the same: each machine's ranks first.
        layout, parts = self._all.layout, []
        for machine in range(len(layout.counts)):
            ranks = layout.ranks(machine)
            part = np.empty(values[0].shape, wide(values[0].dtype))
            here = [values[rank].astype(part.dtype, copy=False) for rank in ranks]
            reduce_whole("sum" if op == "avg" else op, here, part, 1)
            parts.append(part)
        result = np.empty(values[0].shape, parts[0].dtype)
        reduce_whole(op, parts, result, len(values))
        return result.astype(values[0].dtype, copy=False)


def _gathered(key):
    """Return the key of the region in which a leader joins the values of a variable."""
    return f"gathered {key}"
