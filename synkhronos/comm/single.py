"""One rank, and no other process: the plainest transport.

A reduction over one rank is the rank's own value, and its memory is private to the process.
"""

import numpy as np

from synkhronos import _host
from synkhronos._arithmetic.partition import take_rows
from synkhronos.comm import Arrays, Communicator, Gate, Memory, Outputs, Variables
from synkhronos.errors import SharedMemoryFull


class SingleGate(Gate):
    """The gate of the master alone: it counts the calls, and never waits."""

    def __init__(self, master_rank=0):
        super().__init__(1, master_rank)
        self._sequence = self._finished = self._rows = 0

    def _start(self, command):
        self._sequence += 1

    def _finish(self):
        self._finished = self._sequence

    @property
    def is_open(self):
        """Whether the master left a call early and has begun no other since."""
        return self._sequence != self._finished

    @property
    def sequence(self):
        """The number of the last call that was started."""
        return self._sequence

    def check_alive(self, milliseconds=0):
        """Return: there are no workers."""

    def abort(self):
        """Return: no other rank is in the call."""

    def _meet(self):
        pass  # all ranks are there

    def agree(self, ballot):
        """Return that all ranks agree."""
        return True

    def report_rows(self, rows):
        """Tell from how many rows this rank computed."""
        self._rows = rows

    def rows_of(self, rank):
        """Return the number that was reported in the last call."""
        return self._rows

    def become_worker(self, rank):
        """Raise: there are no workers."""
        raise NotImplementedError("A single rank has no workers.")

    next_command = worker_finish = become_worker

    def close_in_child(self):
        """Return: nothing is shared."""

    def close(self):
        """Return: nothing is open."""


class _Reference:
    """An array itself. Equal to no other, so that a repeated call is known by it."""

    __slots__ = ("array",)

    def __init__(self, array):
        self.array = array

    @property
    def shape(self):
        return self.array.shape

    @property
    def dtype(self):
        return self.array.dtype


class _Block:
    """Memory of this process."""

    def __init__(self, nbytes):
        try:
            self._bytes = np.zeros(max(nbytes, 1), np.uint8)
        except (MemoryError, ValueError) as error:  # the latter beyond what NumPy can count
            raise SharedMemoryFull(f"No room for {nbytes:,} bytes of memory.") from error

    def array(self, dtype, shape, offset=0):
        return np.ndarray(shape, dtype, self._bytes, offset)

    def reference(self, dtype, shape):
        return _Reference(self.array(dtype, shape))


class SingleMemory(Memory):
    """Memory of one process; a reference holds its array."""

    def create(self, nbytes):
        """Make a zero-filled block."""
        return _Block(nbytes)

    def fetch(self, reference, rows=None, buffer=None):
        """Return the array, or some of its rows."""
        array = reference.array
        return array if rows is None else take_rows(array, rows, buffer)

    def forget(self, references):
        """Return: an array lives as long as its references."""

    def holds(self, array):
        """Return that no array can be had by other ranks."""
        return False

    def mapped_by(self, pid):
        """Return that no block is shared."""
        return {}


class SingleVariables(Variables):
    """Values of shared variables, where they are."""

    def __init__(self, worker):
        self._worker = worker

    def expose(self, keys):
        """Return: the master has the values."""

    def values(self, key):
        """Return the one value, in a list."""
        return [self.value_of(0, key)]

    def value_of(self, rank, key):
        """Return the value; a copy if it is on a device."""
        return _host.to_host(_host.peek(self._worker.variables[key]))

    def assign(self, key, array, rows=None):
        """Give a variable a copy of an array, or of some of its rows."""
        chosen = array if rows is None else take_rows(array, rows)
        _host.replace(self._worker.variables[key], np.array(chosen))

    def broadcast(self, keys, root):
        """Return: all ranks have the root's values."""

    def reduce(self, keys, op, root):
        """Return: a value is its own reduction."""

    def all_reduce(self, keys, op):
        """Return: a value is its own reduction."""

    def reduce_to_new(self, key, op):
        """Return a copy of the value."""
        return np.array(self.value_of(0, key))

    def all_gather(self, keys):
        """Return: a value alone is joined already."""

    def forget(self, keys):
        """Return: nothing is kept beside the variables."""

    def close(self):
        """Return: nothing is kept beside the variables."""


class SingleOutputs(Outputs):
    """There are no workers to hear from."""

    def deposit(self, key, parts):
        """Raise: there are no workers."""
        raise NotImplementedError("A single rank has no workers.")

    collect = deposit

    def hear(self, rank, answer):
        """Return that no answer is expected."""
        return False

    def forget(self, key):
        """Return: nothing is kept."""

    def close(self):
        """Return: nothing is kept."""


class SingleArrays(Arrays):
    """The reduction of one rank's array is the array."""

    def exchange(self, arrays, ops, weights, targets):
        """Copy each array into its target, if that is another one."""
        results = []
        for array, target in zip(arrays, targets):
            if target is None:
                target = array
            elif target is not array:
                target[...] = array
            results.append(target)
        return results

    def close(self):
        """Return: nothing is kept."""


def connect(worker) -> Communicator:
    """Return the communicator of the only rank."""
    return Communicator(SingleMemory(), SingleVariables(worker), SingleOutputs(), SingleArrays())
