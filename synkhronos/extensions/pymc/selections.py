"""Selections of rows, moved to the data: ``(X @ b)[chosen]`` becomes ``X[chosen] @ b``.

    X ──▶ product with b ──▶ selection            X ──▶ selection ──▶ product with b

The number of rows of ``X`` is then that of the observations, as if the model were written so. A
selection is moved if it depends on data alone and takes no element twice. At an operation that has
no rule here it stops, which gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.tensor import math, subtensor
from pytensor.tensor.basic import Join
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.special import LogSoftmax, Softmax

from synkhronos.extensions.pymc.row_states import bounds, is_whole

_SELECTIONS = subtensor.Subtensor, subtensor.AdvancedSubtensor


class Selections:
    """Moves selections.

    ``is_moving(variable)`` says whether a variable is computed from parameters, `has_data` whether
    from arrays of data; `values_of` returns values of variables that are computed from data alone.

    In the methods `chosen` is a dict of axis -> numbers of elements, or a slice. Their results have
    the chosen elements along the first axis, and then all other axes.
    """

    def __init__(self, is_moving: Callable, has_data: Callable, values_of: Callable):
        self._is_moving, self._has_data, self._values_of = is_moving, has_data, values_of
        self._moved: dict[Variable, Variable] = {}

    def moved(self, variable: Variable) -> Variable | None:
        """Return a selection with its data selected instead; None for a variable that isn't moved.

        Call it first for the variables from which this one is computed.
        """
        node = variable.owner
        if node is None or not isinstance(node.op, _SELECTIONS):
            return None
        value, indices = node.inputs[0], _indices(node)
        has_mask = any(getattr(each, "dtype", "") == "bool" for each in node.inputs[1:])
        if not self._is_moving(value) or not (has_mask or self._has_data(value)):
            return None
        chosen = {
            axis: each
            for axis, each in enumerate(indices)
            if not is_whole(each) and getattr(each, "ndim", 1)
        }
        if not self._can_move(chosen, indices):
            return None
        taken = self._taken(value, chosen)
        at = min(chosen)
        first = at if max(chosen) - at + 1 == len(chosen) else 0
        rest = [each for axis, each in enumerate(indices) if axis not in chosen]
        rest.insert(first, slice(None))
        self._moved[variable] = pt.moveaxis(taken, 0, first)[tuple(rest)]
        return self._moved[variable]

    def _can_move(self, chosen, indices):
        arrays = [each for each in chosen.values() if not isinstance(each, slice)]
        is_slice = len(chosen) == 1 and not arrays
        is_advanced = len(arrays) == len(chosen) > 0 and all(
            isinstance(each, slice) or each.ndim == 1 for each in indices
        )
        parts = [*arrays, *(part for each in chosen.values() for part in bounds(each))]
        if not (is_slice or is_advanced) or any(map(self._is_moving, parts)):
            return False
        return is_slice or _distinct(self._values_of(arrays))

    def _taken(self, variable, chosen):
        """Return the chosen elements of a variable."""
        variable = self._moved.get(variable, variable)
        node = variable.owner
        is_mixed = self._is_moving(variable) and self._has_data(variable)
        if is_mixed and not all(variable.type.broadcastable[axis] for axis in chosen):
            for kind, rule in _RULES.items():
                found = rule(self, node, chosen) if isinstance(node.op, kind) else None
                if found is not None:
                    return found
        others = [axis for axis in range(variable.ndim) if axis not in chosen]
        return variable.dimshuffle(*chosen, *others)[tuple(chosen.values())]

    def _elemwise(self, node, chosen):
        return node.op(*(self._taken_once(each, chosen) for each in node.inputs))

    def _taken_once(self, variable, chosen):
        """Return the chosen elements; along an axis of length one the only element."""
        rest = {
            axis: each for axis, each in chosen.items() if not variable.type.broadcastable[axis]
        }
        left = [axis for axis in range(variable.ndim) if axis not in rest]
        taken = self._taken(variable, rest) if rest else variable.dimshuffle("x", *left)
        return taken.dimshuffle(0, *(1 + i for i, axis in enumerate(left) if axis not in chosen))

    def _dim_shuffle(self, node, chosen):
        [inner], order = node.inputs, node.op.new_order
        at = {order[axis]: each for axis, each in chosen.items()}
        if "x" in at:
            return None
        place = {axis: 1 + i for i, axis in enumerate(_left(inner, at))}
        rest = [place.get(old, "x") for axis, old in enumerate(order) if axis not in chosen]
        return self._taken(inner, at).dimshuffle(0, *rest)

    def _product(self, node, chosen):
        left, right = node.inputs
        is_dot = isinstance(getattr(node.op, "core_op", node.op), math.Dot)
        if not is_dot or not {left.ndim, right.ndim} <= {1, 2}:
            return None
        rows = chosen.get(0) if left.ndim == 2 else None
        columns = chosen.get(node.outputs[0].ndim - 1) if right.ndim == 2 else None
        if columns is None:
            return pt.dot(self._taken(left, {0: rows}), right)
        columns = self._taken(right, {1: columns})
        if rows is None:
            return pt.dot(columns, left.T)
        return (self._taken(left, {0: rows}) * columns).sum(axis=1)

    def _reduction(self, node, chosen):
        [inner] = node.inputs
        axes = range(inner.ndim) if node.op.axis is None else node.op.axis
        kept = [axis for axis in range(inner.ndim) if axis not in axes]
        at = {kept[axis]: each for axis, each in chosen.items()}
        reduced = [1 + i for i, axis in enumerate(_left(inner, at)) if axis in axes]
        return node.op.clone(axis=tuple(reduced))(self._taken(inner, at))

    def _along(self, node, chosen):
        [inner] = node.inputs
        if not isinstance(node.op.axis, int) or node.op.axis % inner.ndim in chosen:
            return None
        axis = 1 + _left(inner, chosen).index(node.op.axis % inner.ndim)
        return type(node.op)(axis=axis)(self._taken(inner, chosen))

    def _join(self, node, chosen):
        axis = node.op.axis % node.outputs[0].ndim
        if axis in chosen:
            return None
        parts = [self._taken(each, chosen) for each in node.inputs]
        return pt.join(1 + _left(node.outputs[0], chosen).index(axis), *parts)

    def _selection(self, node, chosen):
        """Take from ``v[:, 0]``, or from ``v[i]``: ``v[i][j]`` is ``v[i[j]]``."""
        value, indices = node.inputs[0], _indices(node)
        arrays = {at: each for at, each in enumerate(indices) if getattr(each, "ndim", 0)}
        if not arrays:
            kept = [axis for axis, each in enumerate(indices) if isinstance(each, slice)]
            at = {kept[axis]: each for axis, each in chosen.items()}
            if not all(is_whole(indices[axis]) for axis in at):
                return None
            return self._taken(value, at)[
                (slice(None), *(indices[axis] for axis in _left(value, at)))
            ]
        if list(chosen) != [0] or list(arrays) != [0] or arrays[0].ndim != 1:
            return None
        return value[(self._taken(arrays[0], chosen), *indices[1:])]


_RULES = {
    Elemwise: Selections._elemwise,
    DimShuffle: Selections._dim_shuffle,
    (math.Dot, Blockwise): Selections._product,
    CAReduce: Selections._reduction,
    (Softmax, LogSoftmax): Selections._along,
    Join: Selections._join,
    _SELECTIONS: Selections._selection,
}


def _left(variable, chosen):
    return [axis for axis in range(variable.ndim) if axis not in chosen]


def _distinct(numbers):
    n_numbers, *others = {len(each) for each in numbers}
    return not others and np.unique(np.stack(numbers), axis=1).shape[1] == n_numbers


def _indices(node):
    """Return the index of each axis; a mask as the numbers of its elements."""
    found = []
    for each in subtensor.indices_from_subtensor(node.inputs[1:], node.op.idx_list):
        is_mask = getattr(each, "dtype", "") == "bool"
        found += pt.as_tensor(each).nonzero() if is_mask else [each]
    return found + [slice(None)] * (node.inputs[0].ndim - len(found))
