"""Collectives on the values of shared variables, in memory that ranks share.

    store, post ──▶ meet ──▶ hear ───────▶ reduce or copy ──▶ finish barrier of the call
    own values               where those   own share of
                             of others are all arrays

No value is sent: each rank reads it in the region of the rank that has it. See `variable_memory`.

A rank writes only its own share of other ranks' values, and only between the meeting and the finish
barrier. So a view of another rank's value is valid from the meeting until the finish barrier; the
master may read what ranks have exposed until it starts the next command.
"""

import numpy as np

from synkhronos import _host
from synkhronos._arithmetic.blocks import plan
from synkhronos._arithmetic.partition import take_rows
from synkhronos.comm.arrays import reduce_whole

_MOST_ENTRIES = 64  # in a cache
# Up to this many bytes of each rank, the master reduces for all after the finish barrier: a meeting
# in the call takes longer, above all with more ranks than cores.
_LITTLE = 1 << 14


class Variables:
    """One rank's values of shared variables, which are named by their keys.

    Collectives that need equal shapes on all ranks return None; if shapes differ, they change no
    value and return the position of the first variable whose shapes differ, with its shape on each
    rank. `devices`, an Nccl or None, does what it can between devices, unless a method is called
    with ``between_devices=False``; other values on devices go through the memory of the host.
    """

    def __init__(self, worker, storage, devices=None):
        self._worker, self._gate, self.storage = worker, worker.gate, storage
        self._devices = devices
        self._has_devices = any(device != "cpu" for device in worker.devices)
        self._is_alone = self._gate.n_ranks == 1  # then values stay where they are
        self._plans = _Cache(storage)  # (keys, operation, root, number of shares) -> steps
        self._copies = _Cache(storage)  # (keys, root) -> pairs of target and source
        self._values = _Cache(storage)  # keys -> values on all ranks

    def close(self):
        """Drop all memory and views; the variables that are left keep their values."""
        self._drop_views()
        self.storage.close()

    def forget(self, keys):
        """Drop the memory and the views that belong to these variables."""
        self._drop_views()
        self.storage.forget(keys)

    def _drop_views(self):
        for cache in self._plans, self._copies, self._values:
            cache.clear()

    def are_little(self, keys):
        """Return, on the master, whether `all_reduce_exposed` is faster for these variables."""
        if self._has_devices:
            return False  # each rank copies its value back to its device
        cells, nbytes = self.storage.cells_of(keys)
        return nbytes <= _LITTLE and bool(cells)

    def all_reduce_exposed(self, keys, op):
        """Reduce, on the master, what all ranks have exposed, and write it to all ranks."""
        self.storage.hear()
        return self._reduce(keys, op, None, n_shares=1, share=0)

    def expose(self, keys):
        """Put this rank's values where the master can read them after the finish barrier."""
        if not self._is_alone:
            self.storage.expose(keys)

    def values_of(self, keys):
        """Return, on the master, what `values` returns, for each variable."""
        if self._is_alone:
            return [[self.value_of(0, key)] for key in keys]
        self.storage.hear()
        values = self._values.find(keys)
        if values is None:
            values = self._values.keep(keys, [self.storage.values(key) for key in keys])
        return values

    def values(self, key):
        """Return, on the master, views of what all ranks have exposed, until the next command."""
        return self.values_of((key,))[0]

    def value_of(self, rank, key):
        """Return, on the master, the value that one rank has exposed: a view, see `values`."""
        if self._is_alone:
            return _host.to_host(_host.peek(self._worker.variables[key]))
        self.storage.hear()
        return self.storage.value_of(rank, key)

    def make_room(self, shapes):
        """Make memory, in one segment, for values of these shapes that are assigned next."""
        self.storage.begin()
        self.storage.make_room(
            {key: shape for key, shape in shapes.items() if not self._is_apart(key)}
        )

    def assign(self, key, array, rows=None):
        """Copy an array, or some of its rows (a range or indices), into this rank's variable."""
        self.storage.begin()
        if rows is None:
            self._give(key, array)
        elif isinstance(rows, range) or self._is_apart(key):
            self._give(key, take_rows(array, rows))
        else:
            target = self.storage.new_value(key, (len(rows), *array.shape[1:]))
            take_rows(array, rows, target)

    def _lives_on_device(self, key):
        return self._has_devices and _host.lives_on_device(self._worker.variables[key])

    def _is_apart(self, key):
        """Return whether a variable has memory that no other rank reads."""
        return self._is_alone or self._lives_on_device(key)

    def _meet(self, keys):
        self.storage.expose(keys)
        if self._gate.meet() != self.storage.heard:
            self.storage.hear()

    def reduce(self, keys, op, root, between_devices=True):
        """Replace each variable of rank `root`, or of all if it is None, with the reduction."""
        devices = self._devices if between_devices else None
        if (devices is not None and devices.reduce(keys, op, root)) or self._is_alone:
            return None
        self._meet(keys)
        return self._reduce(keys, op, root)

    def _reduce(self, keys, op, root, n_shares=None, share=None):
        """Reduce one share of the values, by default this rank's of those of all ranks."""
        if n_shares is None:
            n_shares, share = self._worker.n_ranks, self._worker.rank
        name = keys, op, root, n_shares
        steps = self._plans.find(name)
        if steps is None:
            values = [self.storage.values(key) for key in keys]
            unequal = first_unequal([[value.shape for value in each] for each in values])
            if unequal is not None:
                return unequal
            runs = self.storage.runs(keys, range(self._worker.n_ranks))
            steps = self._plans.keep(name, plan(op, runs, n_shares, share, root))
        for step, arguments in steps:
            step(*arguments)
        if self._has_devices:
            self._gate.meet()  # until then other ranks write to this rank's regions
            self.storage.copy_back(keys if root in (None, self._worker.rank) else ())
        return None

    def reduce_to_new(self, key, op):
        """Return, on the master, the reduction of the values that all ranks have exposed."""
        values = self.values(key)
        unequal = first_unequal([[value.shape for value in values]])
        if unequal is not None:
            return unequal
        result = np.empty(values[0].shape, values[0].dtype)
        return reduce_whole(op, values, result, len(values))

    def broadcast(self, keys, root, between_devices=True):
        """Replace each variable, on all ranks, with the value on rank `root`."""
        devices = self._devices if between_devices else None
        if (devices is not None and devices.broadcast(keys, root)) or self._is_alone:
            return
        mine = self._worker.rank == root
        if mine:
            self.expose(keys)
        else:
            self.storage.begin()
        self._gate.meet()
        self.storage.hear()
        if mine:
            return
        copies = self._copies.find((keys, root))
        if self.storage.are_in_place(keys):
            if copies is None:
                copies = self._copies.keep((keys, root), self._plan_copies(keys, root))
            if copies:
                for target, source in copies:
                    target[...] = source
                return
        values = {key: self.storage.value_of(root, key) for key in keys}
        self.make_room({key: value.shape for key, value in values.items()})
        for key, value in values.items():
            self._give(key, value)

    def _plan_copies(self, keys, root):
        """Return pairs (array of this rank, array of the root), or () if not all shapes are equal.

        Values in their regions that keep their shape are overwritten where they are.
        """
        here, there = self._worker.rank, root
        shapes = [
            [self.storage.value_of(rank, key).shape for rank in (here, there)] for key in keys
        ]
        return () if first_unequal(shapes) else self.storage.runs(keys, (here, there))

    def _give(self, key, value):
        if self._lives_on_device(key):
            _host.replace(self._worker.variables[key], value)
        elif self._is_alone:
            _host.replace(self._worker.variables[key], np.array(value))
        else:
            self.storage.new_value(key, value.shape)[...] = value

    def all_gather(self, keys, between_devices=True):
        """Replace each variable, on all ranks, with the values of all ranks joined on axis 0."""
        devices = self._devices if between_devices else None
        if (devices is not None and devices.all_gather(keys)) or self._is_alone:
            return None
        self._meet(keys)
        values = [self.storage.values(key) for key in keys]
        unequal = first_unequal_rows([[value.shape for value in each] for each in values])
        if unequal is not None:
            return unequal
        shapes = {
            key: (sum(len(value) for value in each), *each[0].shape[1:])
            for key, each in zip(keys, values)
            if not self._lives_on_device(key)
        }
        self.storage.turn(shapes)
        self.storage.make_room(shapes)
        for key, each in zip(keys, values):
            if key in shapes:
                np.concatenate(each, out=self.storage.new_value(key, shapes[key]))
            else:
                variable = self._worker.variables[key]
                _host.replace(variable, _host.join_on_device(each, variable.dtype))
        # The old region stays as it is until the next gather: other ranks may still read it.
        return None


class _Cache:
    """Keeps what was computed for keys, for one version of the storage."""

    def __init__(self, storage):
        self._storage, self._version, self._entries = storage, None, {}
        self.clear = self._entries.clear

    def find(self, key):
        """Return what was kept for a key, or None."""
        if self._version != self._storage.version:
            self.clear()  # its views may be of freed memory, and keep it mapped
        return self._entries.get(key)

    def keep(self, key, entry):
        """Keep what is true of a key now, and return it."""
        if self._version != self._storage.version or len(self._entries) >= _MOST_ENTRIES:
            self.clear()
        self._version = self._storage.version
        self._entries[key] = entry
        return entry


def first_unequal(shapes):
    """Return (position, shapes on the ranks) of the first variable whose shapes differ, or None.

    `shapes` has the shapes on all ranks for each variable.
    """
    for position, on_ranks in enumerate(shapes):
        if any(shape != on_ranks[0] for shape in on_ranks):
            return position, list(on_ranks)
    return None


def first_unequal_rows(shapes):
    """Return what `first_unequal` does, for shapes that may differ in their number of rows."""
    unequal = first_unequal([[shape[1:] for shape in each] for each in shapes])
    return None if unequal is None else (unequal[0], list(shapes[unequal[0]]))
