"""States of variables that depend on rows; rules for lengths, shapes and indices: see `row_axes`.

A rule finds the states of an operation's outputs from the states of its inputs. A variable that
does not depend on rows has None.

The number of rows may give an array its length, and the numbers of rows may pick an element of each
row; nothing else may be computed from them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from pytensor.compile.ops import FromFunctionOp, ViewOp
from pytensor.graph.basic import Constant
from pytensor.scalar import basic as scalar
from pytensor.scan.op import Scan
from pytensor.tensor import basic, math, subtensor
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.extra_ops import CumOp
from pytensor.tensor.shape import Reshape, Shape, Shape_i, SpecifyShape
from pytensor.tensor.sort import ArgSortOp, SortOp
from pytensor.tensor.type_other import NoneTypeT


class Mixed(ValueError):
    """Something is computed from several rows: `what`, and what to write `instead`.

    `inputs` are those of the operation, and `sources` names of parameters that they come from.
    `variable`, if it is known, has no rows, but would need them.
    """

    def __init__(self, what: str, instead: str = "", variable=None, inputs=()):
        super().__init__(what, instead)
        self.what, self.instead, self.variable = what, instead, variable
        self.inputs, self.sources = inputs, ()

    def __str__(self):
        of = f", computed from {' and '.join(map(repr, self.sources))}" if self.sources else ""
        return ": ".join([f"{self.what}{of}", *filter(None, [self.instead])])


class Kind(enum.Enum):
    """A state that needs no axis."""

    TOTAL = "a sum over rows"
    ALL = "whether something holds for all rows"
    COUNTED = "computed from the number of rows"


TOTAL, ALL, COUNTED = Kind


@dataclass(frozen=True)
class Along:
    """Rows lie along an axis; `is_number` says that they are the numbers of rows, from 0 on."""

    axis: int
    is_number: bool = False


@dataclass(frozen=True)
class RowLengths:
    """A length, or a vector of lengths: for each one, whether it is the number of rows."""

    flags: tuple[bool, ...]


Rule = Callable[[Any, Any, list], Any]
RULES: dict[Any, Rule] = {}  # by kinds of operations, and by operations


def mixed(node, states=(), variable=None) -> Mixed:
    """Return the exception for an operation that no rule allows, with inputs of these states."""
    what, instead = _coupling(node, states)
    return Mixed(what, instead, variable, node.inputs)


def _coupling(node, states):
    """Say in a sentence what couples the rows, and what to write instead."""
    op = node.op
    if isinstance(op, Elemwise):
        has_number = COUNTED in states or any(isinstance(each, RowLengths) for each in states)
        is_mean = isinstance(op.scalar_op, scalar.TrueDiv) and states[0] is TOTAL
        if has_number and not is_mean:
            return "the number of its rows goes into it", _NUMBER
        if TOTAL in states:
            return "a sum or a mean over its rows goes into it", _MEANS
        if len({*states} - {None}) > 1:
            return "its rows are compared with one another, as in a covariance", _PROCESSES
    if isinstance(op, Scan | basic.AllocEmpty) and _are_side_by_side(op, states):
        return (
            "its rows lie side by side in a loop (scan)",
            "write one of few steps as a for loop of Python",
        )
    for kinds, text in _TEXTS.items():
        if isinstance(op, kinds):
            return text
    name = str(op).partition("{")[0]
    if rule_of(op) is None and _is_own(op):
        return f"{name} may compute something from several rows", (
            "if it computes each row by itself, say so with row_wise"
        )
    return f"{name} may compute something from several of its rows", ""


def _are_side_by_side(op, states):
    """Return whether no step of a loop is one of a row; its results are allocated before it."""
    n_steps, *rest = states
    sequences = rest[: op.info.n_seqs] if isinstance(op, Scan) else []
    return n_steps is None and Along(0) not in sequences


def _is_own(op):
    """Return whether an operation is from the user's code."""
    module = type(op).__module__.partition(".")[0]
    return module not in ("pytensor", "pymc") or isinstance(op, FromFunctionOp)


_MEANS = (
    "write it with data alone, as (x - x.mean(axis=0)) @ b, and a mean of log-probabilities as "
    "their sum, divided by a number"
)
_NUMBER = "where it does not change, write it as a number, such as n = len(y)"
_NUMBERED = "the numbers of its rows, 0, 1, 2 and so on, go into it"
_PROCESSES = "a Gaussian process of many rows can be divided as pm.gp.HSGP"
_GROUPS = (
    "for groups of one size, give the data a row for each group, as x of (groups, alternatives, "
    "columns), and write pm.math.softmax((x * b).sum(axis=-1), axis=1)"
)
LOOP = (
    "a loop (scan) runs over its rows",
    "what a row takes from those before can be data, as y[:-1] for y[1:], or columns of lags for a "
    "carry-over, as lags @ decay ** n; what depends on parameters, as a moving average of errors "
    "does, can't be divided",
)
_SELECTED = "some of its rows are selected from what parameters go into"
_TEXTS: dict[Any, tuple[str, str]] = {
    subtensor.Subtensor: (_SELECTED, "select rows of data, as x[rows] @ b"),
    subtensor.AdvancedSubtensor: (_SELECTED, f"select rows of data, as x[rows] @ b; {_GROUPS}"),
    (subtensor.IncSubtensor, subtensor.AdvancedIncSubtensor): (
        "its rows are put together, or added up in groups",
        _GROUPS,
    ),
    Reshape: (
        "its rows get another shape",
        "keep the rows first, and write -1 for their number, as x.reshape((-1, 3)); a product "
        "with x of three axes is (x * b).sum(axis=-1)",
    ),
    CumOp: ("a cumulative sum runs over its rows", "write it with data alone, as x.cumsum() * b"),
    math.Prod: ("a product over its rows goes into it", "write the sum of the logarithms"),
    (math.Max, math.Min): ("an extreme over its rows goes into it", ""),
    CAReduce: ("a sum or a mean over its rows goes into it", _MEANS),
    (SortOp, ArgSortOp): ("a sort orders its rows", ""),
    Blockwise: (
        "a system of equations, as of a covariance, couples its rows",
        f"give independent vectors a row each; {_PROCESSES}",
    ),
    (Scan, basic.AllocEmpty): LOOP,
}


def rule(*kinds):
    """Register a function (op, node, states) as the rule for kinds of operations."""

    def register(function):
        RULES.update(dict.fromkeys(kinds, function))
        return function

    return register


def rule_of(op) -> Rule | None:
    """Return the rule for an operation, None if there is none."""
    return next((RULES[kind] for kind in (op, *type(op).__mro__) if kind in RULES), None)


def refuse_length(variable, axis):
    """Raise Mixed for an array that is no data, unless its length along the axis of rows is 1."""
    if axis >= 0 and not variable.type.broadcastable[axis]:
        what = "an array that is no data has as many elements as there are rows"
        raise Mixed(what, "", variable, [variable])


def only(states, *allowed) -> bool:
    """Return whether all inputs that depend on rows have one of these states."""
    return all(state is None or state in allowed for state in states)


def are_lengths(states) -> bool:
    """Return whether all inputs that depend on rows depend on their number alone."""
    return all(
        state is None or state is COUNTED or isinstance(state, RowLengths) for state in states
    )


def constant(variable):
    """Return the number that a variable holds, if it is a constant."""
    while variable.owner and isinstance(variable.owner.op, DimShuffle):
        [variable] = variable.owner.inputs
    return (
        variable.data.item() if isinstance(variable, Constant) and variable.data.size == 1 else None
    )


@rule(Shape)
def _shape(op, node, states):
    [state] = states
    if isinstance(state, Along):
        return RowLengths(tuple(axis == state.axis for axis in range(node.inputs[0].ndim)))
    return None


@rule(Shape_i)
def _shape_i(op, node, states):
    [state] = states
    return RowLengths((True,)) if isinstance(state, Along) and state.axis == op.i else None


@rule(basic.ScalarFromTensor, basic.TensorFromScalar, ViewOp)
def _same(op, node, states):
    return states[0]


@rule(basic.MakeVector)
def _make_vector(op, node, states):
    if are_lengths(states):
        return _lengths(states, [1] * len(states))
    if only(states, ALL):
        return ALL
    if only(states, TOTAL) and None not in states:
        return TOTAL
    raise mixed(node)


def _lengths(states, sizes):
    if COUNTED in states:
        return COUNTED
    flags = [
        flag
        for state, size in zip(states, sizes, strict=True)
        for flag in (state.flags if state else [False] * size)
    ]
    return RowLengths(tuple(flags))


@rule(basic.Join)
def _join(op, node, states):
    if are_lengths(states):
        sizes = [each.type.shape[0] if each.ndim == 1 else None for each in node.inputs]
        return COUNTED if None in sizes else _lengths(states, sizes)
    if only(states, ALL):
        return ALL
    if all(state is TOTAL for state in states):
        return TOTAL
    [first, *_] = states
    without = [each for each, state in zip(node.inputs, states, strict=True) if state is None]
    if not isinstance(first, Along) or set(states) != {first} or first.is_number:
        raise mixed(node, variable=without[0] if without else None)
    if first.axis == op.axis % node.inputs[0].ndim:
        raise mixed(node)
    return first


def _rows_of_shape(node, sizes):
    """Return the axis whose length is the number of rows, by the states of all lengths."""
    found = [axis for axis, state in enumerate(sizes) if state is not None]
    if len(found) > 1 or any(sizes[axis] != RowLengths((True,)) for axis in found):
        raise Mixed("the number of its rows goes into it", _NUMBER, None, node.inputs)
    return found[0] if found else None


@rule(basic.Alloc)
def _alloc(op, node, states):
    value, *sizes = states
    if value is ALL or value is TOTAL:
        if only(sizes):
            return value
        raise mixed(node)
    axis = _rows_of_shape(node, sizes)
    if value is None:
        refuse_length(node.inputs[0], axis - (len(sizes) - node.inputs[0].ndim))
        return Along(axis)
    if not isinstance(value, Along) or value.is_number:
        raise mixed(node)
    own = value.axis + len(sizes) - node.inputs[0].ndim
    if axis not in (None, own):
        raise mixed(node)
    return Along(own)


@rule(basic.ARange)
def _arange(op, node, states):
    begin, _, step = node.inputs
    is_count = states[:1] + states[2:] == [None, None] and states[1] == RowLengths((True,))
    if is_count and constant(begin) == 0 and constant(step) == 1:
        return Along(0, is_number=True)
    raise Mixed(_NUMBERED, "", None, node.inputs)


@rule(Reshape)
def _reshape(op, node, states):
    state, lengths = states
    value, new = node.inputs
    if lengths is None and state in (TOTAL, ALL):
        return state
    if not isinstance(state, Along) or lengths is COUNTED:
        raise mixed(node)
    if isinstance(lengths, RowLengths):  # rows stay the first axis, and the rest is as large
        if state.axis == 0 and lengths.flags == (True, *[False] * (op.ndim - 1)):
            return state
        raise mixed(node)
    sizes = new.data.tolist() if isinstance(new, Constant) else []
    rest = [n for axis, n in enumerate(value.type.shape) if axis != state.axis]
    if len(sizes) == op.ndim and None not in rest and sizes.count(-1) == 1:
        at, size = sizes.index(-1), int(np.prod(rest))
        is_alone = int(np.prod([n for n in sizes if n != -1])) == size
        if is_alone and (size == 1 or (state.axis == 0 and at == 0)):
            return Along(at, state.is_number)
    raise mixed(node)


@rule(SpecifyShape)
def _specify_shape(op, node, states):
    state, *sizes = states
    if isinstance(state, Along) and not isinstance(node.inputs[1 + state.axis].type, NoneTypeT):
        raise mixed(node)
    return state if only(sizes) else COUNTED


@rule(subtensor.Subtensor)
def _subtensor(op, node, states):
    state, *others = states
    indices = subtensor.indices_from_subtensor(node.inputs[1:], op.idx_list)
    if isinstance(state, RowLengths):
        return _part_of_lengths(state, indices)
    if not only(others):
        raise mixed(node)
    if state in (TOTAL, ALL, COUNTED):
        return state
    if state.axis < len(indices) and not is_whole(indices[state.axis]):
        raise mixed(node)
    gone = sum(not isinstance(each, slice) for each in indices[: state.axis])
    return Along(state.axis - gone, state.is_number)


def bounds(index) -> list[Any]:
    """Return start, stop and step of a slice, without those that are None."""
    parts = (index.start, index.stop, index.step) if isinstance(index, slice) else ()
    return [
        part
        for part in parts
        if part is not None and not isinstance(getattr(part, "type", None), NoneTypeT)
    ]


def is_whole(index) -> bool:
    """Return whether an index takes all elements of an axis."""
    return isinstance(index, slice) and not bounds(index)


def _part_of_lengths(state, indices):
    def number(part):
        return None if part is None or isinstance(part.type, NoneTypeT) else _fixed(part)

    [index] = indices
    try:
        if isinstance(index, slice):
            parts = slice(number(index.start), number(index.stop), number(index.step))
            return RowLengths(state.flags[parts])
        return RowLengths((state.flags[_fixed(index)],)) if state.flags[_fixed(index)] else None
    except _NotFixed:
        return COUNTED


class _NotFixed(Exception):
    """An index is no constant."""


def _fixed(variable):
    while variable.owner and isinstance(
        variable.owner.op, (basic.ScalarFromTensor, basic.TensorFromScalar)
    ):
        [variable] = variable.owner.inputs
    if not isinstance(variable, Constant):
        raise _NotFixed
    return int(variable.data)


@rule(subtensor.AdvancedSubtensor)
def _advanced_subtensor(op, node, states):
    """Follow indices with rows: ``a[group]``, and ``p[numbers of rows, class]``."""
    value, *given = node.inputs
    state = states[0]
    state_of = dict(zip(given, states[1:], strict=True))
    indices = list(subtensor.indices_from_subtensor(given, op.idx_list))
    indices += [slice(None)] * (value.ndim - len(indices))
    arrays = {at: each for at, each in enumerate(indices) if not isinstance(each, slice)}
    slices = [each for each in indices if isinstance(each, slice)]
    bounds = [part for each in slices for part in (each.start, each.stop, each.step)]
    if any(part is not None and state_of.get(part) is not None for part in bounds):
        raise mixed(node)
    n_new = max(each.ndim for each in arrays.values())
    places = set()  # axes of rows, among those that the arrays of indices make
    for each in arrays.values():
        index = state_of.get(each)
        if index is not None and not isinstance(index, Along):
            raise mixed(node)
        if index is not None:
            places.add(index.axis + n_new - each.ndim)
    for each in arrays.values():
        if state_of.get(each) is None and places:
            [own] = [place - (n_new - each.ndim) for place in places][:1]
            if own >= 0 and not each.type.broadcastable[own]:
                raise mixed(node, variable=each if state is not None else value)
    at = min(arrays)
    are_adjacent = max(arrays) - at + 1 == len(arrays)
    first = at if are_adjacent else 0
    numbered = {at for at, each in arrays.items() if getattr(state_of.get(each), "is_number", 0)}
    if len(places) > 1:
        raise mixed(node)
    if state is None:
        if numbered:
            raise Mixed(_NUMBERED, "", value, node.inputs)
        return Along(first + places.pop())
    if not isinstance(state, Along) or state.is_number:
        raise mixed(node)
    if places:  # row i of the indices picks from row i of the value, and from no other
        if numbered != {state.axis}:
            raise mixed(node)
        return Along(first + places.pop())
    if state.axis in arrays or not is_whole(indices[state.axis]):
        raise mixed(node)
    before = [axis for axis in range(value.ndim) if axis not in arrays and axis < state.axis]
    is_behind = not are_adjacent or state.axis > at
    return Along(len(before) + (n_new if is_behind else 0))
