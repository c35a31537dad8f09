"""Ranks of one machine: every rank works on the arrays of all others where they are.

    bring home, post ──▶ meet ──▶ hear ──▶ reduce or copy     ──▶ finish barrier of the call
    every rank its own            where    the rank's own share
                                  all are  of every rank's array

Nothing is sent: a value is read from the home of the rank that has it. See `homes` for where they
are, `exchanges` for reductions inside a function, and `outboxes` for the outputs of functions.
"""

import numpy as np

from synkhronos import _blocks, _host, _shm
from synkhronos._partition import take_rows
from synkhronos.comm import Communicator, Memory, Variables
from synkhronos.comm.exchanges import SharedArrays, reduce_whole
from synkhronos.comm.homes import Homes
from synkhronos.comm.outboxes import SharedOutputs

_PLANS = 64  # lists of views that are kept


class SharedMemory(_shm.Segments, Memory):
    """Segments of shared memory, which all ranks map."""

    def fetch(self, reference, rows=None, buffer=None):
        """Return a view of the array, or some of its rows."""
        array = self.attach(reference.segment).array(reference.dtype, reference.shape)
        return array if rows is None else take_rows(array, rows, buffer)

    def forget(self, references):
        """Drop the maps of segments, which may be named by references to their arrays."""
        super().forget([getattr(each, "segment", each) for each in references])

    def holds(self, array):
        """Return whether an array is a view of a segment."""
        return _shm.is_in_a_segment(array)

    def mapped_by(self, pid):
        """Return the bytes of each segment that a process has mapped."""
        return _shm.mapped_by(pid)


class SharedVariables(Variables):
    """Values of shared variables, each of which lies in a home that all ranks map."""

    def __init__(self, worker, homes):
        self._worker, self._gate, self._homes = worker, worker.gate, homes
        self._has_devices = any(device != "cpu" for device in worker.devices)
        self._plans = {}

    def close(self):
        """Drop everything; the variables that are left keep their values."""
        self._plans.clear()
        self._homes.close()

    def forget(self, keys):
        """Drop what belongs to these variables."""
        self._plans.clear()
        self._homes.forget(keys)

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
            _host.replace(variable, take_rows(array, rows))
            return
        target = self._homes.new_value(key, (len(rows), *array.shape[1:]))
        if isinstance(rows, range) and rows.step > 0:
            target[...] = take_rows(array, rows)
        else:
            if np.may_share_memory(array, target):
                array = array.copy()
            take_rows(array, rows, target)

    def _meet(self, keys):
        self.expose(keys)
        self._gate.meet()
        self._homes.hear()

    def all_reduce(self, keys, op):
        """Replace each variable, on all ranks, with the reduction of all."""
        self._meet(keys)
        return self._reduce(keys, op, None)

    def reduce(self, keys, op, root):
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

    def broadcast(self, keys, root):
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

    def all_gather(self, keys):
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


def _first_unequal(values):
    for position, each in enumerate(values):
        shape = each[0].shape
        if any(value.shape != shape for value in each):
            return _mismatch(position, each)
    return None


def _mismatch(position, values):
    return position, [value.shape for value in values]


class SharedCommunicator(Communicator):
    """One rank's end of shared memory."""

    def forget(self, functions, variables):
        """Drop what belongs to functions and shared variables that are no more."""
        super().forget(functions, variables)
        if variables:
            self.arrays.close()  # its views may be of what has gone


def connect(worker, on_release) -> Communicator:
    """Return this rank's communicator; see `Segments` for `on_release`."""
    # A rank's memory goes with it: a rank that can't open it waits for the news of a death.
    memory = SharedMemory(on_release, lambda: worker.gate.check_alive(milliseconds=1000))
    homes = Homes(worker, memory)
    return SharedCommunicator(
        memory,
        SharedVariables(worker, homes),
        SharedOutputs(memory),
        SharedArrays(worker, homes),
    )
