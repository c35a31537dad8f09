"""Composition of two transports: the upper one inherits here all methods that the base does."""

from synkhronos.comm import Arrays, Outputs, Variables


class VariablesOver(Variables):
    """Values of shared variables, all by the base."""

    def __init__(self, base: Variables):
        self._base = base

    def expose(self, keys):
        """Put this rank's values where the master can read them after the finish barrier."""
        self._base.expose(keys)

    def values(self, key):
        """Return, on the master, the values of a variable that all ranks have exposed."""
        return self._base.values(key)

    def value_of(self, rank, key):
        """Return, on the master, the value that one rank has exposed."""
        return self._base.value_of(rank, key)

    def assign(self, key, array, rows=None):
        """Copy an array, or some of its rows, into this rank's variable."""
        self._base.assign(key, array, rows)

    def broadcast(self, keys, root):
        """Replace each variable, on all ranks, with the value on rank `root`."""
        self._base.broadcast(keys, root)

    def reduce(self, keys, op, root):
        """Replace each variable of rank `root` with the reduction over all ranks."""
        return self._base.reduce(keys, op, root)

    def all_reduce(self, keys, op):
        """Replace each variable, on all ranks, with the reduction over all ranks."""
        return self._base.all_reduce(keys, op)

    def reduce_to_new(self, key, op):
        """Return, on the master, the reduction of the values that all ranks have exposed."""
        return self._base.reduce_to_new(key, op)

    def all_gather(self, keys):
        """Replace each variable, on all ranks, with the values of all ranks joined on axis 0."""
        return self._base.all_gather(keys)

    def forget(self, keys):
        """Drop the memory and the views that belong to these variables."""
        self._base.forget(keys)

    def close(self):
        """Drop all memory and views."""
        self._base.close()


class OutputsOver(Outputs):
    """Outputs of functions, all by the base."""

    def __init__(self, base: Outputs):
        self._base = base

    def deposit(self, key, parts):
        """Copy a worker's parts of the outputs to where the master reads them."""
        return self._base.deposit(key, parts)

    def hear(self, rank, answer):
        """Take a worker's answer, on the master."""
        return self._base.hear(rank, answer)

    def collect(self, key, rank):
        """Return the parts that a rank deposited in the last call."""
        return self._base.collect(key, rank)

    def forget(self, key):
        """Drop the memory and the views that belong to a function."""
        self._base.forget(key)

    def close(self):
        """Drop all memory and views."""
        self._base.close()


class ArraysOver(Arrays):
    """Reductions inside of functions, all by the base."""

    def __init__(self, base: Arrays):
        self._base = base

    def exchange(self, arrays, ops, weights, targets):
        """Reduce arrays that every rank has computed, into arrays of its own."""
        return self._base.exchange(arrays, ops, weights, targets)

    def landing_place(self, position, shape, dtype):
        """Return memory for the array at a position of the next exchange, or None."""
        return self._base.landing_place(position, shape, dtype)

    def close(self):
        """Drop all memory and views."""
        self._base.close()
