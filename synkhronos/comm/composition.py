"""A transport on top of another one: what it does not do itself, the transport underneath does."""

from synkhronos.comm import Arrays, Outputs, Variables


class VariablesOver(Variables):
    """Values of shared variables as the transport underneath has them."""

    def __init__(self, base: Variables):
        self._base = base

    def expose(self, keys):
        """Show the master the values of this rank, after the finish barrier."""
        self._base.expose(keys)

    def values(self, key):
        """Return, on the master, a variable's exposed value on each rank."""
        return self._base.values(key)

    def value_of(self, rank, key):
        """Return, on the master, a variable's exposed value on one rank."""
        return self._base.value_of(rank, key)

    def assign(self, key, array, rows=None):
        """Give this rank's variable a value, or some of its rows."""
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
        """Replace each variable, on all ranks, with the values of all joined along axis 0."""
        return self._base.all_gather(keys)

    def forget(self, keys):
        """Drop what belongs to these variables."""
        self._base.forget(keys)

    def close(self):
        """Drop everything."""
        self._base.close()


class OutputsOver(Outputs):
    """Outputs of functions as the transport underneath carries them."""

    def __init__(self, base: Outputs):
        self._base = base

    def deposit(self, key, parts):
        """Hand over a worker's parts of the outputs of a function."""
        return self._base.deposit(key, parts)

    def hear(self, rank, answer):
        """Take a worker's answer, on the master."""
        return self._base.hear(rank, answer)

    def collect(self, key, rank):
        """Return the parts that a rank deposited in the last call."""
        return self._base.collect(key, rank)

    def forget(self, key):
        """Drop what belongs to a function."""
        self._base.forget(key)

    def close(self):
        """Drop everything."""
        self._base.close()


class ArraysOver(Arrays):
    """Reductions inside of functions as the transport underneath makes them."""

    def __init__(self, base: Arrays):
        self._base = base

    def exchange(self, arrays, ops, weights, targets):
        """Reduce arrays that every rank has computed, into arrays of its own."""
        return self._base.exchange(arrays, ops, weights, targets)

    def landing_place(self, position, shape, dtype):
        """Return an array to compute the one at a position of the next exchange in, or None."""
        return self._base.landing_place(position, shape, dtype)

    def close(self):
        """Drop everything."""
        self._base.close()
