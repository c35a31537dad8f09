"""A look at the graph of a log-likelihood: whether each row is computed by itself, up to one sum.

    data, rows along an axis ──▶ operations row by row ──▶ Sum over the rows ──▶ log-likelihood

Each variable that depends on rows has a state: the axis of its rows, or that it is a sum over them.
An operation that would compute something from several rows is refused, such as a mean over rows, a
cumulative sum or a number of rows; and so is any operation without a rule here. Numbers can't show
that: two rows may come together for some parameters only, or for other data.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np
from pymc.logprob.utils import CheckParameterValue
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.ops import ViewOp
from pytensor.graph.basic import Constant, Variable
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar import basic as scalar
from pytensor.tensor import basic, math, subtensor
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.extra_ops import CumOp
from pytensor.tensor.random.op import RandomVariable
from pytensor.tensor.shape import Reshape, Shape, Shape_i, SpecifyShape
from pytensor.tensor.sort import ArgSortOp, SortOp
from pytensor.tensor.special import LogSoftmax, Softmax
from pytensor.tensor.type_other import NoneTypeT

__all__ = ["Mixed", "check"]


class Mixed(ValueError):
    """An operation computes something from several rows."""


class _Kind(enum.Enum):
    TOTAL = "a sum over rows"
    ALL = "whether something holds for all rows"
    COUNTED = "computed from the number of rows"


TOTAL, ALL, COUNTED = _Kind


@dataclass(frozen=True)
class _Along:
    """Rows lie along an axis; `is_number` says that they are the numbers of rows, from 0 on."""

    axis: int
    is_number: bool = False


@dataclass(frozen=True)
class _Lengths:
    """A length, or a vector of lengths: for each one, whether it is the number of rows."""

    flags: tuple[bool, ...]


_Rule = Callable[[Any, Any, list], Any]
_rules: dict[type, _Rule] = {}


def check(logp: Variable, rows: dict[Variable, int]) -> None:
    """Raise Mixed unless a log-likelihood is a sum over rows, each computed by itself.

    Parameters
    ----------
    logp : Variable
        A scalar.
    rows : dict
        Variable with a row for each observation -> the axis of its rows.
    """
    states = {variable: _Along(axis) for variable, axis in rows.items()}
    _follow([logp], states)
    if states.get(logp) is not TOTAL:
        raise Mixed("its log-likelihood is no sum over rows")


def _follow(graphs, states):
    """Find the states of all variables of graphs; variables without one don't depend on rows."""
    stack = list(graphs)
    done = set(states)
    while stack:
        variable = stack[-1]
        if variable in done or variable.owner is None:
            done.add(stack.pop())
            continue
        waiting = [each for each in variable.owner.inputs if each not in done]
        if waiting:
            stack.extend(waiting)
            continue
        node = variable.owner
        found = [states.get(each) for each in node.inputs]
        if any(each is not None for each in found):
            results = _result(node, found)
            for output, state in zip(node.outputs, results, strict=True):
                if state is not None:
                    states[output] = state
        done.update(node.outputs)


def _result(node, states):
    """Return the states of a node's outputs; raise Mixed where there is no rule."""
    for kind in type(node.op).__mro__:
        if kind in _rules:
            found = _rules[kind](node.op, node, states)
            return found if isinstance(found, list) else [found] * len(node.outputs)
    raise _mixed(node)


def _mixed(node, why=None):
    name = str(node.op).partition("{")[0]
    return Mixed(why or f"{name} in its log-likelihood may compute something from several rows")


def _rule(*kinds):
    def register(function):
        _rules.update(dict.fromkeys(kinds, function))
        return function

    return register


def _only(states, *allowed):
    return all(state is None or state in allowed for state in states)


def _are_lengths(states):
    return all(state is None or state is COUNTED or isinstance(state, _Lengths) for state in states)


@_rule(Elemwise)
def _elemwise(op, node, states):
    if _are_lengths(states):
        return COUNTED
    scalar_op = op.scalar_op
    if _only(states, ALL) and isinstance(scalar_op, scalar.AND):
        return ALL
    if _only(states, TOTAL, ALL):
        return _total(node, scalar_op, states)
    axes = {state.axis for state in states if isinstance(state, _Along)}
    if not _only(states, *(_Along(axis) for axis in axes)) or len(axes) != 1:
        raise _mixed(node)
    [axis] = axes
    for each, state in zip(node.inputs, states, strict=True):
        if state is None and not each.type.broadcastable[axis]:
            raise Mixed("an array that is no data has as many elements as there are rows")
    return _Along(axis)


def _total(node, scalar_op, states):
    """Return TOTAL for operations that are linear in a sum over rows."""
    n_totals = states.count(TOTAL)
    if ALL in states:  # minus infinity where a parameter is out of its bounds for any row
        is_switch = isinstance(scalar_op, scalar.Switch) and states == [ALL, TOTAL, None]
        if is_switch and _constant(node.inputs[2]) == -np.inf:
            return TOTAL
        raise _mixed(node)
    linear = scalar.Add, scalar.Sub, scalar.Neg, scalar.Identity, scalar.Cast
    if isinstance(scalar_op, linear) and n_totals == len(states):
        return TOTAL
    if isinstance(scalar_op, scalar.Mul) and n_totals == 1:
        return TOTAL
    if isinstance(scalar_op, scalar.TrueDiv) and states == [TOTAL, None]:
        return TOTAL
    if isinstance(scalar_op, scalar.Add | scalar.Sub):
        raise Mixed("its log-likelihood has a summand that belongs to no row")
    raise _mixed(node)


def _constant(variable):
    """Return the number that a variable holds, if it is a constant."""
    while variable.owner and isinstance(variable.owner.op, DimShuffle):
        [variable] = variable.owner.inputs
    return (
        variable.data.item() if isinstance(variable, Constant) and variable.data.size == 1 else None
    )


@_rule(DimShuffle)
def _dim_shuffle(op, node, states):
    [state] = states
    if not isinstance(state, _Along):
        return state
    if state.axis not in op.new_order:
        raise _mixed(node)
    return _Along(op.new_order.index(state.axis), state.is_number)


@_rule(CAReduce)
def _reduction(op, node, states):
    [state] = states
    if isinstance(state, _Lengths) or state is COUNTED:
        return COUNTED
    if isinstance(state, _Along):
        axes = range(node.inputs[0].ndim) if op.axis is None else op.axis
        axes = {axis % node.inputs[0].ndim for axis in axes}
        if state.is_number:
            raise _mixed(node)
        if state.axis not in axes:
            return _Along(state.axis - sum(axis < state.axis for axis in axes))
        if isinstance(op, math.Sum):
            return TOTAL
        if isinstance(op, math.All):
            return ALL
    if (state is TOTAL and isinstance(op, math.Sum)) or (state is ALL and isinstance(op, math.All)):
        return state
    raise _mixed(node)


@_rule(CumOp, SortOp, ArgSortOp, Softmax, LogSoftmax, math.Argmax)
def _along_an_axis(op, node, states):
    [state] = states
    axes = op.axis if isinstance(op.axis, tuple | list) else [op.axis]
    if not isinstance(state, _Along) or state.is_number or None in axes:
        raise _mixed(node)
    axes = {int(axis) % node.inputs[0].ndim for axis in axes}
    if state.axis in axes:
        raise _mixed(node)
    removed = sum(axis < state.axis for axis in axes) if isinstance(op, math.Argmax) else 0
    return _Along(state.axis - removed)


@_rule(math.Dot)
def _dot(op, node, states):
    return _product(node, [each.ndim for each in node.inputs], states)


def _product(node, ndims, states):
    """Return the state of a product of matrices or vectors; rows may be summed up in it."""
    left, right = states
    along = [isinstance(state, _Along) and not state.is_number for state in states]
    if any(state is not None and not is_one for state, is_one in zip(states, along, strict=True)):
        raise _mixed(node)
    summed = ndims[0] - 1, max(ndims[1] - 2, 0)
    is_summed = [
        is_one and state.axis == axis for is_one, state, axis in zip(along, states, summed)
    ]
    if all(is_summed):
        return TOTAL
    if any(is_summed) or all(along):
        raise _mixed(node)
    if along[0]:
        return _Along(left.axis)
    return _Along(ndims[0] - 1 + right.axis - (right.axis > summed[1]))


@_rule(Blockwise)
def _blockwise(op, node, states):
    n_cores = [len(core) for core in op.inputs_sig]
    if not _only(states, *(s for s in states if isinstance(s, _Along) and not s.is_number)):
        raise _mixed(node)
    n_batch = max(each.ndim - n for each, n in zip(node.inputs, n_cores, strict=True))
    axes = set()
    in_core = False
    for each, n, state in zip(node.inputs, n_cores, states, strict=True):
        if state is None:
            continue
        before = each.ndim - n
        if state.axis >= before:
            in_core = True
        else:
            axes.add(state.axis + n_batch - before)
    if not in_core:
        if len(axes) != 1:
            raise _mixed(node)
        [axis] = axes
        _refuse_fixed(node, states, n_cores, n_batch, axis)
        return _Along(axis)
    if axes or n_batch or not isinstance(op.core_op, math.Dot):
        return _columns(op, node, states, n_batch)
    return _product(node, [each.ndim for each in node.inputs], states)


def _refuse_fixed(node, states, n_cores, n_batch, axis):
    for each, n, state in zip(node.inputs, n_cores, states, strict=True):
        own = axis - (n_batch - (each.ndim - n))
        if state is None and 0 <= own < each.ndim - n and not each.type.broadcastable[own]:
            raise Mixed("an array that is no data has as many elements as there are rows")


def _columns(op, node, states, n_batch):
    """Return the state of a triangular system whose right sides, its columns, are rows."""
    name = type(op.core_op).__name__
    right = node.inputs[-1]
    is_right = states[-1] is not None and _only(states[:-1])
    solves = name in ("SolveTriangular", "Solve", "CholeskySolve") and is_right and not n_batch
    has_columns = right.ndim == 2 and getattr(op.core_op, "b_ndim", 0) == 2
    if solves and has_columns and states[-1].axis == 1:
        return _Along(1)
    if isinstance(op.core_op, math.Dot) and n_batch:
        ndims = [len(core) for core in op.inputs_sig]
        before = [each.ndim - n for each, n in zip(node.inputs, ndims, strict=True)]
        inner = [
            None if s is None else _Along(s.axis - b) for s, b in zip(states, before, strict=True)
        ]
        if all(s is None or s.axis >= 0 for s in inner):
            found = _product(node, ndims, inner)
            return found if found is TOTAL else _Along(found.axis + n_batch)
    raise _mixed(node)


@_rule(Shape)
def _shape(op, node, states):
    [state] = states
    if isinstance(state, _Along):
        return _Lengths(tuple(axis == state.axis for axis in range(node.inputs[0].ndim)))
    return None


@_rule(Shape_i)
def _shape_i(op, node, states):
    [state] = states
    return _Lengths((True,)) if isinstance(state, _Along) and state.axis == op.i else None


@_rule(basic.ScalarFromTensor, basic.TensorFromScalar, ViewOp)
def _same(op, node, states):
    return states[0]


@_rule(basic.MakeVector)
def _make_vector(op, node, states):
    if _are_lengths(states):
        return _lengths(states, [1] * len(states))
    if _only(states, ALL):
        return ALL
    if _only(states, TOTAL) and None not in states:
        return TOTAL
    raise _mixed(node)


def _lengths(states, sizes):
    if COUNTED in states:
        return COUNTED
    flags = [
        flag
        for state, size in zip(states, sizes, strict=True)
        for flag in (state.flags if state else [False] * size)
    ]
    return _Lengths(tuple(flags))


@_rule(basic.Join)
def _join(op, node, states):
    if _are_lengths(states):
        sizes = [each.type.shape[0] if each.ndim == 1 else None for each in node.inputs]
        return COUNTED if None in sizes else _lengths(states, sizes)
    if _only(states, ALL):
        return ALL
    if all(state is TOTAL for state in states):
        return TOTAL
    [first, *_] = states
    if not isinstance(first, _Along) or set(states) != {first} or first.is_number:
        raise _mixed(node)
    if first.axis == op.axis % node.inputs[0].ndim:
        raise _mixed(node)
    return first


def _rows_of_shape(node, sizes):
    """Return the axis that has the number of rows, of those whose lengths have these states."""
    found = [axis for axis, state in enumerate(sizes) if state is not None]
    if len(found) > 1 or any(sizes[axis] != _Lengths((True,)) for axis in found):
        raise _mixed(node, "its log-likelihood computes with the number of rows")
    return found[0] if found else None


@_rule(basic.Alloc)
def _alloc(op, node, states):
    value, *sizes = states
    if value is ALL or value is TOTAL:
        if _only(sizes):
            return value
        raise _mixed(node)
    axis = _rows_of_shape(node, sizes)
    if value is None:
        own = axis - (len(sizes) - node.inputs[0].ndim)
        if own >= 0 and not node.inputs[0].type.broadcastable[own]:
            raise Mixed("an array that is no data has as many elements as there are rows")
        return _Along(axis)
    if not isinstance(value, _Along) or value.is_number:
        raise _mixed(node)
    own = value.axis + len(sizes) - node.inputs[0].ndim
    if axis not in (None, own):
        raise _mixed(node)
    return _Along(own)


@_rule(basic.ARange)
def _arange(op, node, states):
    begin, _, step = node.inputs
    is_count = states[:1] + states[2:] == [None, None] and states[1] == _Lengths((True,))
    if is_count and _constant(begin) == 0 and _constant(step) == 1:
        return _Along(0, is_number=True)
    raise _mixed(node, "its log-likelihood computes with the numbers of rows")


@_rule(Reshape)
def _reshape(op, node, states):
    state, lengths = states
    value, new = node.inputs
    if lengths is None and state in (TOTAL, ALL):
        return state
    if not isinstance(state, _Along) or lengths is COUNTED:
        raise _mixed(node)
    if isinstance(lengths, _Lengths):  # rows stay the first axis, and the rest is as large
        if state.axis == 0 and lengths.flags == (True, *[False] * (op.ndim - 1)):
            return state
        raise _mixed(node)
    sizes = new.data.tolist() if isinstance(new, Constant) else []
    rest = [n for axis, n in enumerate(value.type.shape) if axis != state.axis]
    if len(sizes) == op.ndim and None not in rest and sizes.count(-1) == 1:
        at, size = sizes.index(-1), int(np.prod(rest))
        is_alone = int(np.prod([n for n in sizes if n != -1])) == size
        if is_alone and (size == 1 or (state.axis == 0 and at == 0)):
            return _Along(at, state.is_number)
    raise _mixed(node)


@_rule(SpecifyShape)
def _specify_shape(op, node, states):
    state, *sizes = states
    if isinstance(state, _Along) and not isinstance(node.inputs[1 + state.axis].type, NoneTypeT):
        raise _mixed(node)
    return state if _only(sizes) else COUNTED


@_rule(CheckParameterValue, CheckAndRaise)
def _check_and_raise(op, node, states):
    value, *conditions = states
    if not _only(conditions, ALL, COUNTED):
        raise _mixed(node)
    return value


@_rule(subtensor.Subtensor)
def _subtensor(op, node, states):
    state, *others = states
    indices = subtensor.indices_from_subtensor(node.inputs[1:], op.idx_list)
    if isinstance(state, _Lengths):
        return _part_of_lengths(state, indices)
    if not _only(others):
        raise _mixed(node)
    if state in (TOTAL, ALL, COUNTED):
        return state
    if state.axis < len(indices) and not _is_whole(indices[state.axis]):
        raise _mixed(node)
    gone = sum(not isinstance(each, slice) for each in indices[: state.axis])
    return _Along(state.axis - gone, state.is_number)


def _is_whole(index):
    return isinstance(index, slice) and all(
        part is None or isinstance(getattr(part, "type", None), NoneTypeT)
        for part in (index.start, index.stop, index.step)
    )


def _part_of_lengths(state, indices):
    def number(part):
        return None if part is None or isinstance(part.type, NoneTypeT) else _fixed(part)

    [index] = indices
    try:
        if isinstance(index, slice):
            parts = slice(number(index.start), number(index.stop), number(index.step))
            return _Lengths(state.flags[parts])
        return _Lengths((state.flags[_fixed(index)],)) if state.flags[_fixed(index)] else None
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


@_rule(subtensor.AdvancedSubtensor)
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
        raise _mixed(node)
    n_new = max(each.ndim for each in arrays.values())
    places = set()  # of the rows, in the axes that the arrays of indices make
    for each in arrays.values():
        index = state_of.get(each)
        if index is not None and not isinstance(index, _Along):
            raise _mixed(node)
        if index is not None:
            places.add(index.axis + n_new - each.ndim)
    for each in arrays.values():
        if state_of.get(each) is None and places:
            [own] = [place - (n_new - each.ndim) for place in places][:1]
            if own >= 0 and not each.type.broadcastable[own]:
                raise _mixed(node)
    at = min(arrays)
    are_adjacent = max(arrays) - at + 1 == len(arrays)
    first = at if are_adjacent else 0
    numbered = {at for at, each in arrays.items() if getattr(state_of.get(each), "is_number", 0)}
    if len(places) > 1:
        raise _mixed(node)
    if state is None:
        if numbered:
            raise _mixed(node, "its log-likelihood computes with the numbers of rows")
        return _Along(first + places.pop())
    if not isinstance(state, _Along) or state.is_number:
        raise _mixed(node)
    if places:  # row i of the indices picks from row i of the value, and from no other
        if numbered != {state.axis}:
            raise _mixed(node)
        return _Along(first + places.pop())
    if state.axis in arrays or not _is_whole(indices[state.axis]):
        raise _mixed(node)
    before = [axis for axis in range(value.ndim) if axis not in arrays and axis < state.axis]
    is_behind = not are_adjacent or state.axis > at
    return _Along(len(before) + (n_new if is_behind else 0))


@_rule(OpFromGraph)
def _from_graph(op, node, states):
    inside = {
        variable: state
        for variable, state in zip(op.fgraph.inputs, states, strict=True)
        if state is not None
    }
    _follow(op.fgraph.outputs, inside)
    return [inside.get(each) for each in op.fgraph.outputs]


@_rule(RandomVariable)
def _random(op, node, states):
    raise Mixed("its log-likelihood draws random numbers")
