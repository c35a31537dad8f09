"""The keys of a training step in a parameter server: one for each parameter, one for the rows."""

from __future__ import annotations

import numpy as np

from synkhronos import _host
from synkhronos._hints import SharedVariable, Variable
from synkhronos._host import tensor as T
from synkhronos.extensions._precision import wide
from synkhronos.extensions._store_operations import awaited, push


class Port:
    """One key of the store, as operations in a graph use it: `_store_operations`."""

    def __init__(self, store, key, devid, position):
        self.key, self.position = key, position
        self.is_used = False  # in this call
        self.failure = None
        self._store, self._devid = store, devid
        self._array = self._future = None

    def push(self, array):
        self.is_used = True
        try:
            self._store._push(array, self.key, self._devid, -self.position, now=True)
            self._future = self._store.pull_req(array, self.key, self._devid, -self.position)
        except BaseException as error:
            self.failure = error
            raise
        self._array = array

    def pull(self, array):
        """Ask for the present value, without a push."""
        self._future = self._store.pull_req(array, self.key, self._devid, -self.position)
        self._array = array

    def complete(self):
        """Wait for the pulled array, so that the next `wait` returns at once."""
        if self._future is not None:
            self._future.wait()
            self._future = None

    def wait(self):
        self.is_used = True
        try:
            self.complete()
        except BaseException as error:
            self.failure = error
            raise
        array, self._array = self._array, None
        return array

    def __repr__(self):
        return f"key {self.key!r}"


class Exchange:
    """The keys of a step in a store, and the expressions that push to them and pull from them.

    `targets` are the shared variables that get the pulled arrays, or a rule's new values. With
    `counts_rows` each round also sums the rows of all workers, and divides pulled arrays by them.
    """

    def __init__(self, store, devid, targets, keys, counts_rows):
        self.keys = keys
        self.deferred: list[SharedVariable] = list(targets)
        self._store, self._devid, self._targets = store, devid, targets
        self._tokens: list[Variable] = []
        self._rows = Port(store, f"rows of {keys[0]}", devid, -1) if counts_rows else None
        self._of_targets = [Port(store, key, devid, k) for k, key in enumerate(keys)]
        self.ports = [*self._of_targets, *filter(None, [self._rows])]
        taken = [port.key for port in self.ports if store.has_key(port.key, devid)]
        if taken:
            raise ValueError(
                f"keys must be new in the store, but device {devid} has {taken} already: give "
                "each training step keys of its own, such as keys=['G W', 'G b']."
            )
        for port in self.ports:
            op = store.op_of(port.key)
            if op != "sum":
                raise ValueError(
                    f"push_op[{port.key}] must be sum for a training step, which divides the sum "
                    f"by the rows of all workers, got {op}."
                )

    def pulled(self):
        """Return expressions of the pulled arrays, divided by the rows if they are counted."""
        arrays, self._tokens = [], []
        for port, target in zip(self._of_targets, self._targets):
            fixed = _host.fixed_axes(target)
            array, token = awaited(port, _shape(target), wide(target), fixed)
            arrays.append(array)
            self._tokens.append(token)
        if self._rows is not None:
            rows, token = awaited(self._rows, (1,), "float64", (False,))
            self._tokens.append(token)
            arrays = [array / T.cast(rows[0], array.dtype) for array in arrays]
        return [T.cast(a, target.dtype) for a, target in zip(arrays, self._targets)]

    def pushes(self, values, rows, goes_on):
        """Return dummy outputs that push a value for each target, and then the rows."""
        values = [T.cast(v, wide(target)) for v, target in zip(values, self._targets)]
        if self._rows is not None:
            values.append(T.shape_padleft(T.cast(rows, "float64")))
        before = self._tokens if goes_on else [None] * len(values)
        return [push(*each) for each in zip(self.ports, values, before)]

    def open(self):
        """Make the keys in the store, and set the targets to the store's first values."""
        store, devid = self._store, self._devid
        for port, target in zip(self._of_targets, self._targets):
            weight = np.array(target.get_value(), wide(target))
            store.init_key(weight.shape, port.key, devid, dtype=weight.dtype, weight=weight)
            port.pull(weight)
        if self._rows is not None:
            store.init_key((1,), self._rows.key, devid, dtype="float64")
        for port, target in zip(self._of_targets, self._targets):
            target.set_value(port.wait().astype(target.dtype, copy=False), borrow=True)

    def take_weights(self):
        """Wait for the pulled arrays, and make them the values of the targets."""
        for port, target in zip(self._of_targets, self._targets):
            _host.replace(target, port.wait())


def _shape(target):
    return _host.peek(target).shape
