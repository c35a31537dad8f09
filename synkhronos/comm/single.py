"""One rank, and no other process: the plainest transport.

The reduction over one rank is the rank's own value, and its memory is private to the process. A
block's memory goes with the block and its views; references keep none.
"""

import weakref

import numpy as np

from synkhronos import _host
from synkhronos._arithmetic.partition import take_rows
from synkhronos.comm import Arrays, Communicator, Gate, Memory, Outputs, Variables
from synkhronos.errors import SharedMemoryFull

_NO_WORKERS = "A single rank has no workers."


class SingleGate(Gate):
    """The gate of the master alone: it counts the calls, and never waits."""

    posts_bounds = True

    def __init__(self, master_rank=0):
        super().__init__(1, master_rank)
        self._sequence = self._finished = self._rows = 0
        self._bounds = 0, 0

    def start(self, command):
        """Begin the next call."""
        self._sequence += 1

    def finish(self):
        """End the call."""
        self._finished = self._sequence

    @property
    def is_open(self):
        """Whether the master left the last call early."""
        return self._sequence != self._finished

    @property
    def sequence(self):
        """The number of the last call that was started."""
        return self._sequence

    def check_alive(self, milliseconds=0):
        """Return: there are no workers."""

    def abort(self):
        """Return: no other rank is in the call."""

    def meet(self):
        """Return: the only rank has come."""

    def agree(self, ballot):
        """Return True: the only rank agrees with itself."""
        return True

    def post_bounds(self, begin, end):
        """Keep the bounds of the rows that the next call selects."""
        self._bounds = begin, end

    def bounds(self):
        """Return these bounds."""
        return self._bounds

    def report_rows(self, rows):
        """Keep the number of rows that this rank computed from."""
        self._rows = rows

    def rows(self):
        """Return the number of rows that was reported in the last call, in a list."""
        return [self._rows]

    def watch(self, rank, process):
        """Raise: there are no workers."""
        raise NotImplementedError(_NO_WORKERS)

    @property
    def descriptors(self):
        """Raise: there are no workers."""
        raise NotImplementedError(_NO_WORKERS)

    def become_worker(self, rank):
        """Raise: there are no workers."""
        raise NotImplementedError(_NO_WORKERS)

    def next_command(self):
        """Raise: there are no workers."""
        raise NotImplementedError(_NO_WORKERS)

    def worker_finish(self, reply=None, error=None):
        """Raise: there are no workers."""
        raise NotImplementedError(_NO_WORKERS)

    def close_in_child(self):
        """Return: no process but the master holds the gate."""

    def close(self):
        """Return: nothing is open."""


class _Reference:
    """An array in a block. Equal to itself only, so that equal references mean the same array."""

    __slots__ = ("_memory", "dtype", "offset", "shape")

    def __init__(self, memory, dtype, shape, offset):
        # Weak: a function keeps the references of its last call, but not the user's memory.
        self._memory, self.dtype, self.shape = weakref.ref(memory), dtype, tuple(shape)
        self.offset = offset

    @property
    def array(self):
        return np.ndarray(self.shape, self.dtype, self._memory(), self.offset)


class _Block:
    """Memory of this process."""

    def __init__(self, nbytes):
        try:
            self._bytes = np.zeros(max(nbytes, 1), np.uint8)
        except (MemoryError, ValueError) as error:  # ValueError: NumPy can't count so many
            raise SharedMemoryFull(f"No room for {nbytes:,} bytes of memory.") from error

    def array(self, dtype, shape, offset=0):
        return np.ndarray(shape, dtype, self._bytes, offset)

    def reference(self, dtype, shape, offset=0):
        return _Reference(self._bytes, dtype, shape, offset)


class SingleMemory(Memory):
    """Memory of one process."""

    def create(self, nbytes):
        """Make a zero-filled block."""
        return _Block(nbytes)

    def fetch(self, reference, rows=None, buffer=None, axis=0):
        """Return the array, or some of its rows."""
        array = reference.array
        if rows is None:
            return array
        if axis:
            return take_rows(array, rows, buffer, axis)
        if rows.__class__ is range and rows.step > 0:  # as `take_rows`, without one call more
            return array[rows.start : rows.stop : rows.step]
        return take_rows(array, rows, buffer)

    def forget(self, references):
        """Return: references keep no memory."""

    def holds(self, array):
        """Return False: there are no other ranks."""
        return False

    def mapped_by(self, pid):
        """Return no blocks: none is shared."""
        return {}


class SingleVariables(Variables):
    """Values of shared variables, which stay where they are."""

    def __init__(self, worker):
        self._worker = worker

    def expose(self, keys):
        """Return: the master reads the variables themselves."""

    def values(self, key):
        """Return the one value, in a list."""
        return [self.value_of(0, key)]

    def value_of(self, rank, key):
        """Return the value; a copy if it is on a device."""
        return _host.to_host(_host.peek(self._worker.variables[key]))

    def make_room(self, shapes):
        """Return: values have memory of their own."""

    def assign(self, key, array, rows=None):
        """Give a variable a copy of an array, or of some of its rows."""
        chosen = array if rows is None else take_rows(array, rows)
        _host.replace(self._worker.variables[key], np.array(chosen))

    def broadcast(self, keys, root):
        """Return: the only rank is the root."""

    def reduce(self, keys, op, root):
        """Return: the reduction of one value is the value."""

    def all_reduce(self, keys, op):
        """Return: the reduction of one value is the value."""

    def reduce_to_new(self, key, op):
        """Return a copy of the value."""
        return np.array(self.value_of(0, key))

    def all_gather(self, keys):
        """Return: one value joined is the value."""

    def forget(self, keys):
        """Return: nothing is kept beside the variables."""

    def close(self):
        """Return: nothing is kept beside the variables."""


class SingleOutputs(Outputs):
    """Outputs of workers, of which there are none."""

    def deposit(self, key, parts):
        """Raise: there are no workers."""
        raise NotImplementedError(_NO_WORKERS)

    def collect(self, key, rank):
        """Raise: there are no workers."""
        raise NotImplementedError(_NO_WORKERS)

    def hear(self, rank, answer):
        """Return False: no answer is from `deposit`."""
        return False

    def forget(self, key):
        """Return: nothing is kept."""

    def close(self):
        """Return: nothing is kept."""


class SingleArrays(Arrays):
    """Reductions inside of functions: the reduction of one rank's array is the array."""

    def exchange(self, arrays, ops, weights, targets):
        """Copy each array into its target, unless the target is the array."""
        results = []
        for array, target in zip(arrays, targets):
            if target is None:
                target = array
            elif target is array:
                pass  # reduced in place
            elif _host.is_on_device(target):
                _host.copy_to_device(target, array)
            else:
                target[...] = array
            results.append(target)
        return results

    def close(self):
        """Return: nothing is kept."""


def connect(worker) -> Communicator:
    """Return the communicator of the only rank."""
    return Communicator(SingleMemory(), SingleVariables(worker), SingleOutputs(), SingleArrays())
