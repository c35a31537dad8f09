"""Ranks of one machine: every rank works on the arrays of all others where they are.

    bring home, post ──▶ meet ──▶ hear ──▶ reduce or copy     ──▶ finish barrier of the call
    every rank its own            where    the rank's own share
                                  all are  of every rank's array

Nothing is sent: a value is read from the home of the rank that has it. See `homes` for where they
are, `exchanges` for reductions inside a function, and `outboxes` for the outputs of functions.
"""

import numpy as np

from synkhronos import _blocks, _host
from synkhronos.comm import Communicator
from synkhronos.comm.exchanges import Exchanges, reduce_whole
from synkhronos.comm.homes import Homes
from synkhronos.comm.outboxes import Outboxes

_PLANS = 64  # lists of views that are kept


class SharedMemory(Outboxes, Exchanges, Communicator):
    """One rank's end: its homes and outboxes, and its views of all others'."""

    def __init__(self, worker):
        Outboxes.__init__(self, worker)
        Exchanges.__init__(self, worker, Homes(worker))
        self._plans = {}

    def close(self):
        """Drop everything; the variables that are left keep their values."""
        super().close()
        self._plans.clear()
        self.forget_exchanges()
        self._homes.close()

    def forget_variables(self, keys):
        """Drop what belongs to these variables."""
        self._plans.clear()
        self.forget_exchanges()
        self._homes.forget(keys)

    # Values of shared variables.

    def expose(self, keys):
        """Have the master see the values; it may do so after the finish barrier."""
        self._homes.begin()
        self._homes.bring_home(keys)
        self._homes.post()

    def values(self, key):
        """Return, on the master, what every rank has exposed, in rank order."""
        self._homes.hear()
        return self._homes.values(key)

    def value_of(self, rank, key):
        """Return, on the master, what one rank has exposed."""
        self._homes.hear()
        return self._homes.value_of(rank, key)

    def assign(self, key, array, rows=None):
        """Give this rank's variable a value, or some of its rows: a range or indices."""
        self._homes.begin()
        variable = self._worker.variables[key]
        if rows is None:
            self._give(key, array)
            return
        if _host.lives_on_device(variable):
            _host.replace(variable, _rows_of(array, rows))
            return
        target = self._homes.new_value(key, (len(rows), *array.shape[1:]))
        if isinstance(rows, range) and rows.step > 0:
            target[...] = array[rows.start : rows.stop : rows.step]
        else:
            if np.may_share_memory(array, target):
                array = array.copy()
            np.take(array, rows, axis=0, out=target, mode="clip")

    def _meet(self, keys):
        self.expose(keys)
        self._gate.meet()
        self._homes.hear()

    def all_reduce(self, keys, op, nccl=True):
        """Replace each variable, on all ranks, with the reduction of all."""
        self._meet(keys)
        return self._reduce(keys, op, None)

    def reduce(self, keys, op, root, nccl=True):
        """Replace each variable of the rank `root` with the reduction of all."""
        self._meet(keys)
        return self._reduce(keys, op, root)

    def _reduce(self, keys, op, root):
        plan = self._plans.get((keys, root))
        if plan is None or plan[0] != self._homes.version:
            values = [self._homes.values(key) for key in keys]
            unequal = _first_unequal(values)
            if unequal is not None:
                return unequal
            if plan or len(self._plans) >= _PLANS:
                self._plans.clear()  # views of what may be gone
            plan = self._homes.version, self._plan(values, root)
            self._plans[keys, root] = plan
        divisor = self._worker.n_ranks
        for sources, out, copies in plan[1]:
            _blocks.reduce_block(op, sources, out, divisor)
            for copy in copies:
                copy[...] = out
        if self._has_devices:
            self._gate.meet()
            self._homes.copy_back(keys if root in (None, self._worker.rank) else ())
        return None

    def _plan(self, values, root):
        """Return the blocks that this rank reduces: sources, where to, and who gets a copy."""
        buffers = {}
        blocks = []
        for _, sources in _blocks.cut(values, self._worker.n_ranks, self._worker.rank):
            if root is None:
                out, copies = sources[0], sources[1:]
            elif root == 0:
                out, copies = sources[0], []
            else:
                # The root's own value is needed until its turn comes.
                dtype = sources[0].dtype
                if dtype not in buffers:
                    buffers[dtype] = np.empty(_blocks.BLOCK, np.uint8).view(dtype)
                out, copies = buffers[dtype][: sources[0].size], [sources[root]]
            blocks.append((sources, out, copies))
        return blocks

    def reduce_to_new(self, key, op):
        """Return, on the master, the reduction of what all ranks have exposed, or a mismatch."""
        values = self.values(key)
        unequal = _first_unequal([values])
        if unequal is not None:
            return unequal
        result = np.empty(values[0].shape, values[0].dtype)
        reduce_whole(op, values, result, len(values))
        return result

    def broadcast(self, keys, root, nccl=True):
        """Replace each variable with the value on rank `root`."""
        mine = self._worker.rank == root
        if mine:
            self.expose(keys)
        else:
            self._homes.begin()
        self._gate.meet()
        self._homes.hear()
        if mine:
            return
        for key in keys:
            self._give(key, self._homes.value_of(root, key))

    def _give(self, key, value):
        variable = self._worker.variables[key]
        if _host.lives_on_device(variable):
            _host.replace(variable, value)
        else:
            self._homes.new_value(key, value.shape)[...] = value

    def all_gather(self, keys, nccl=True):
        """Replace each variable with the values of all ranks, joined along axis 0."""
        self._meet(keys)
        values = [self._homes.values(key) for key in keys]
        for position, each in enumerate(values):
            if len({value.shape[1:] for value in each}) > 1:
                return _mismatch(position, each)
        for key, each in zip(keys, values):
            variable = self._worker.variables[key]
            if _host.lives_on_device(variable):
                _host.replace(variable, _host.join_on_device(each, variable.dtype))
                continue
            rows = sum(len(value) for value in each)
            joined = self._homes.replace_home(key, (rows, *each[0].shape[1:]))
            np.concatenate(each, out=joined)
        # Who is done leaves its old home as it was: others may still read it.
        return None


def _rows_of(array, rows):
    if isinstance(rows, range) and rows.step > 0:
        return array[rows.start : rows.stop : rows.step]
    return np.take(array, rows, axis=0, mode="clip")


def _first_unequal(values):
    for position, each in enumerate(values):
        shape = each[0].shape
        if any(value.shape != shape for value in each):
            return _mismatch(position, each)
    return None


def _mismatch(position, values):
    return position, [value.shape for value in values]
