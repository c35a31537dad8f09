"""Collectives on the values of shared variables, in shared memory.

    store, post ──▶ meet ──▶ hear ──▶ reduce or copy        ──▶ finish barrier of the call
    every rank      where    the rank's own share
    its own values  they are of every rank's array

No value is sent: each rank reads it in the region of the rank that has it. See `storage`.

A rank writes only its own share of other ranks' values, and only between the meeting and the finish
barrier. So a view of another rank's value is valid from the meeting until the finish barrier; the
master may read what ranks have exposed until it starts the next command.
"""

import numpy as np

from synkhronos import _host
from synkhronos._arithmetic.blocks import BLOCK, cut, reduce_block
from synkhronos._arithmetic.partition import take_rows
from synkhronos.comm import Variables
from synkhronos.comm.shared.arrays import reduce_whole

_PLANS = 64  # lists of views that are kept


class SharedVariables(Variables):
    """Values of shared variables, each in a region of shared memory that all ranks map."""

    def __init__(self, worker, storage):
        self._worker, self._gate, self._storage = worker, worker.gate, storage
        self._has_devices = any(device != "cpu" for device in worker.devices)
        self._plans = {}  # (keys, root) -> version of the storage, blocks

    def close(self):
        """Drop all memory and views; the variables that are left keep their values."""
        self._plans.clear()
        self._storage.close()

    def forget(self, keys):
        """Drop the regions of these variables, and all views."""
        self._plans.clear()
        self._storage.forget(keys)

    def expose(self, keys):
        """Put this rank's values where the master can read them after the finish barrier."""
        self._storage.begin()
        self._storage.store(keys)
        self._storage.post()

    def values(self, key):
        """Return, on the master, the values that all ranks have exposed, in rank order: views."""
        self._storage.hear()
        return self._storage.values(key)

    def value_of(self, rank, key):
        """Return, on the master, the value that one rank has exposed: a view."""
        self._storage.hear()
        return self._storage.value_of(rank, key)

    def assign(self, key, array, rows=None):
        """Copy an array, or some of its rows (a range or indices), into this rank's variable."""
        self._storage.begin()
        variable = self._worker.variables[key]
        if rows is None:
            self._give(key, array)
            return
        if _host.lives_on_device(variable):
            _host.replace(variable, take_rows(array, rows))
            return
        target = self._storage.new_value(key, (len(rows), *array.shape[1:]))
        if isinstance(rows, range) and rows.step > 0:
            target[...] = take_rows(array, rows)
        else:
            take_rows(array, rows, target)

    def _meet(self, keys):
        self.expose(keys)
        self._gate.meet()
        self._storage.hear()

    def all_reduce(self, keys, op):
        """Replace each variable, on all ranks, with the reduction over all ranks."""
        self._meet(keys)
        return self._reduce(keys, op, None)

    def reduce(self, keys, op, root):
        """Replace each variable of rank `root` with the reduction over all ranks."""
        self._meet(keys)
        return self._reduce(keys, op, root)

    def _reduce(self, keys, op, root):
        plan = self._plans.get((keys, root))
        if plan is None or plan[0] != self._storage.version:
            values = [self._storage.values(key) for key in keys]
            unequal = first_unequal([[value.shape for value in each] for each in values])
            if unequal is not None:
                return unequal
            if plan or len(self._plans) >= _PLANS:
                self._plans.clear()  # their views may be of freed memory
            plan = self._storage.version, self._plan(values, root)
            self._plans[keys, root] = plan
        divisor = self._worker.n_ranks
        for sources, out, copies in plan[1]:
            reduce_block(op, sources, out, divisor)
            for copy in copies:
                copy[...] = out
        if self._has_devices:
            self._gate.meet()  # until then other ranks write to this rank's regions
            self._storage.copy_back(keys if root in (None, self._worker.rank) else ())
        return None

    def _plan(self, values, root):
        """Return the blocks that this rank reduces: sources, target, and views that get a copy."""
        buffers = {}
        blocks = []
        for _, sources in cut(values, self._worker.n_ranks, self._worker.rank):
            if root is None:
                out, copies = sources[0], sources[1:]
            elif root == 0:
                out, copies = sources[0], []
            else:
                # `reduce_block` may write to the first source only, and the root's is a later one:
                # so it reduces into a buffer, and copies that to the root.
                dtype = sources[0].dtype
                if dtype not in buffers:
                    buffers[dtype] = np.empty(BLOCK, np.uint8).view(dtype)
                out, copies = buffers[dtype][: sources[0].size], [sources[root]]
            blocks.append((sources, out, copies))
        return blocks

    def reduce_to_new(self, key, op):
        """Return, on the master, the reduction of the values that all ranks have exposed."""
        values = self.values(key)
        unequal = first_unequal([[value.shape for value in values]])
        if unequal is not None:
            return unequal
        result = np.empty(values[0].shape, values[0].dtype)
        reduce_whole(op, values, result, len(values))
        return result

    def broadcast(self, keys, root):
        """Replace each variable, on all ranks, with the value on rank `root`."""
        mine = self._worker.rank == root
        if mine:
            self.expose(keys)
        else:
            self._storage.begin()
        self._gate.meet()
        self._storage.hear()
        if mine:
            return
        for key in keys:
            self._give(key, self._storage.value_of(root, key))

    def _give(self, key, value):
        variable = self._worker.variables[key]
        if _host.lives_on_device(variable):
            _host.replace(variable, value)
        else:
            self._storage.new_value(key, value.shape)[...] = value

    def all_gather(self, keys):
        """Replace each variable, on all ranks, with the values of all ranks joined on axis 0."""
        self._meet(keys)
        values = [self._storage.values(key) for key in keys]
        unequal = first_unequal_rows([[value.shape for value in each] for each in values])
        if unequal is not None:
            return unequal
        for key, each in zip(keys, values):
            variable = self._worker.variables[key]
            if _host.lives_on_device(variable):
                _host.replace(variable, _host.join_on_device(each, variable.dtype))
                continue
            rows = sum(len(value) for value in each)
            joined = self._storage.new_region(key, (rows, *each[0].shape[1:]))
            np.concatenate(each, out=joined)
        # The old region stays as it is until the next gather: other ranks may still read it.
        return None


def first_unequal(shapes):
    """Return (position, shapes on the ranks) of the first variable whose shapes differ, or None.

    `shapes` has the shapes on all ranks for each variable.
    """
    for position, each in enumerate(shapes):
        if any(shape != each[0] for shape in each):
            return position, list(each)
    return None


def first_unequal_rows(shapes):
    """Return the same for shapes that differ beyond their number of rows."""
    unequal = first_unequal([[shape[1:] for shape in each] for each in shapes])
    return None if unequal is None else (unequal[0], list(shapes[unequal[0]]))
