"""Check by the graph that a log-likelihood computes each row by itself, up to one sum.

    data, rows along an axis ──▶ operations row by row ──▶ Sum over the rows ──▶ log-likelihood

Each variable that depends on rows has a state: the axis of its rows, or that it is a sum over them.
An operation that would compute something from several rows is refused, such as a mean over rows, a
cumulative sum or a number of rows; and so is any operation without a rule here or in `row_states`.
Numbers can't show that: rows may be combined for some parameters only, or for other data.
"""

from __future__ import annotations

import numpy as np
from pymc.logprob.utils import CheckParameterValue
from pytensor.compile.builders import OpFromGraph
from pytensor.graph.basic import Variable
from pytensor.graph.op import Op
from pytensor.graph.traversal import graph_inputs
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar import basic as scalar
from pytensor.tensor import math
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.extra_ops import CumOp
from pytensor.tensor.random.op import RandomVariable
from pytensor.tensor.sort import ArgSortOp, SortOp
from pytensor.tensor.special import LogSoftmax, Softmax

from synkhronos.extensions.pymc.row_states import (
    ALL,
    COUNTED,
    TOTAL,
    Along,
    Mixed,
    RowLengths,
    are_lengths,
    constant,
    mixed,
    only,
    refuse_length,
    rule,
    rule_of,
)

_MOST_NAMES = 3  # of parameters, in a message

__all__ = ["Mixed", "check", "row_wise"]


def row_wise(op: type[Op] | Op) -> type[Op] | Op:
    """Say that an operation computes each row by itself, so that its rows can be divided.

    Row ``i`` of each output may depend on row ``i`` of the inputs that have rows, along their first
    axes, and on inputs without rows. The operation must take any number of rows. Inside of
    :func:`likelihood` numbers are compared at two points, as for other operations.

    Parameters
    ----------
    op : pytensor.graph.op.Op, or a subclass
        A class stands for all its instances.

    Returns
    -------
    pytensor.graph.op.Op or type
        `op` itself, so ``@row_wise`` may stand above a class.
    """
    if not (isinstance(op, Op) or (isinstance(op, type) and issubclass(op, Op))):
        raise TypeError(f"op must be an operation of PyTensor, or a class of them, got {op!r}.")
    rule(op)(_first_axis)
    return op


def _first_axis(op, node, states):
    if not only(states, Along(0)) or any(each.ndim == 0 for each in node.outputs):
        raise mixed(node)
    return Along(0)


def check(logp: Variable, rows: dict[Variable, int]) -> dict[Variable, int]:
    """Raise Mixed unless a log-likelihood is a sum over rows, each computed by itself.

    `rows` has the inputs with a row for each observation, and the axes of their rows. Returns the
    same of all variables.
    """
    states = {variable: Along(axis) for variable, axis in rows.items()}
    try:
        _follow([logp], states)
    except Mixed as error:
        inputs = graph_inputs([each for each in error.inputs if isinstance(each, Variable)])
        named = [each for each in dict.fromkeys(inputs) if each.name]
        parameters = [each.name for each in named if each not in rows]
        error.sources = (parameters or [each.name for each in named])[:_MOST_NAMES]
        raise
    if states.get(logp) is not TOTAL:
        raise Mixed("it is no sum over rows")
    along = {each: state for each, state in states.items() if isinstance(state, Along)}
    return {each: state.axis for each, state in along.items() if not state.is_number}


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
    function = rule_of(node.op)
    if function is None:
        raise mixed(node, states)
    found = function(node.op, node, states)
    return found if isinstance(found, list) else [found] * len(node.outputs)


@rule(Elemwise)
def _elemwise(op, node, states):
    if are_lengths(states):
        return COUNTED
    scalar_op = op.scalar_op
    if only(states, ALL) and isinstance(scalar_op, scalar.AND):
        return ALL
    if only(states, TOTAL, ALL):
        return _total(node, scalar_op, states)
    axes = {state.axis for state in states if isinstance(state, Along)}
    if not only(states, *(Along(axis) for axis in axes)) or len(axes) != 1:
        raise mixed(node, states)
    [axis] = axes
    for each, state in zip(node.inputs, states, strict=True):
        if state is None:
            refuse_length(each, axis)
    return Along(axis)


def _total(node, scalar_op, states):
    """Return TOTAL for operations that are linear in a sum over rows."""
    n_totals = states.count(TOTAL)
    if ALL in states:  # minus infinity where a parameter is out of its bounds for any row
        is_switch = isinstance(scalar_op, scalar.Switch) and states == [ALL, TOTAL, None]
        if is_switch and constant(node.inputs[2]) == -np.inf:
            return TOTAL
        raise mixed(node)
    linear = scalar.Add, scalar.Sub, scalar.Neg, scalar.Identity, scalar.Cast
    is_float = node.outputs[0].dtype.startswith("float")
    others = [each for each, state in zip(node.inputs, states) if state is None]
    # The sum() of Python begins with a 0.
    if isinstance(scalar_op, linear) and all(constant(each) == 0 for each in others) and is_float:
        return TOTAL
    if isinstance(scalar_op, scalar.Mul) and n_totals == 1:
        return TOTAL
    if isinstance(scalar_op, scalar.TrueDiv) and states == [TOTAL, None]:
        return TOTAL
    if isinstance(scalar_op, scalar.Add | scalar.Sub):
        raise Mixed(
            "a summand of it belongs to no row",
            "put it inside of the sum over rows, as (r**2 / s**2 + pt.log(s)).sum(), or into "
            "a pm.Potential of its own",
            None,
            others,
        )
    if isinstance(scalar_op, scalar.TrueDiv | scalar.Mul):
        raise mixed(node, states)
    raise Mixed(
        f"it computes {scalar_op} of a sum over rows",
        "only a sum of log-probabilities, one of each row, can be divided",
        None,
        node.inputs,
    )


@rule(DimShuffle)
def _dim_shuffle(op, node, states):
    [state] = states
    if not isinstance(state, Along):
        return state
    if state.axis not in op.new_order:
        raise mixed(node)
    return Along(op.new_order.index(state.axis), state.is_number)


@rule(CAReduce)
def _reduction(op, node, states):
    [state] = states
    if isinstance(state, RowLengths) or state is COUNTED:
        return COUNTED
    if isinstance(state, Along):
        axes = range(node.inputs[0].ndim) if op.axis is None else op.axis
        axes = {axis % node.inputs[0].ndim for axis in axes}
        if state.is_number:
            raise mixed(node)
        if state.axis not in axes:
            return Along(state.axis - sum(axis < state.axis for axis in axes))
        if isinstance(op, math.Sum):
            return TOTAL
        if isinstance(op, math.All):
            return ALL
    if (state is TOTAL and isinstance(op, math.Sum)) or (state is ALL and isinstance(op, math.All)):
        return state
    raise mixed(node)


@rule(CumOp, SortOp, ArgSortOp, Softmax, LogSoftmax, math.Argmax)
def _along_an_axis(op, node, states):
    state, *_ = states
    axes = getattr(op, "axis", None)  # sorts have it as an input in older releases of PyTensor
    axes = axes if isinstance(axes, tuple | list) else [axes]
    if not isinstance(state, Along) or state.is_number or None in axes:
        raise mixed(node)
    axes = {int(axis) % node.inputs[0].ndim for axis in axes}
    if state.axis in axes:
        raise mixed(node)
    removed = sum(axis < state.axis for axis in axes) if isinstance(op, math.Argmax) else 0
    return Along(state.axis - removed)


@rule(math.Dot)
def _dot(op, node, states):
    return _product(node, [each.ndim for each in node.inputs], states)


def _product(node, ndims, states):
    """Return the state of a product of matrices or vectors; rows may be summed up in it."""
    left, right = states
    along = [isinstance(state, Along) and not state.is_number for state in states]
    if any(state is not None and not is_one for state, is_one in zip(states, along, strict=True)):
        raise mixed(node)
    summed = ndims[0] - 1, max(ndims[1] - 2, 0)
    is_summed = [
        is_one and state.axis == axis for is_one, state, axis in zip(along, states, summed)
    ]
    if all(is_summed):
        return TOTAL
    if any(is_summed) or all(along):
        raise mixed(node, variable=node.inputs[along.index(False)] if False in along else None)
    if along[0]:
        return Along(left.axis)
    return Along(ndims[0] - 1 + right.axis - (right.axis > summed[1]))


@rule(Blockwise)
def _blockwise(op, node, states):
    n_cores = [len(core) for core in op.inputs_sig]
    if not only(states, *(s for s in states if isinstance(s, Along) and not s.is_number)):
        raise mixed(node)
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
            raise mixed(node)
        [axis] = axes
        for each, n, state in zip(node.inputs, n_cores, states, strict=True):
            if state is None:
                refuse_length(each, axis - (n_batch - (each.ndim - n)))
        return Along(axis)
    if axes or n_batch or not isinstance(op.core_op, math.Dot):
        return _columns(op, node, states, n_batch)
    return _product(node, [each.ndim for each in node.inputs], states)


def _columns(op, node, states, n_batch):
    """Return the state of a linear system with a row in each column, or of batched products."""
    name = type(op.core_op).__name__
    right = node.inputs[-1]
    is_right = states[-1] is not None and only(states[:-1])
    solves = name in ("SolveTriangular", "Solve", "CholeskySolve") and is_right and not n_batch
    has_columns = right.ndim == 2 and getattr(op.core_op, "b_ndim", 0) == 2
    if solves and has_columns and states[-1].axis == 1:
        return Along(1)
    if isinstance(op.core_op, math.Dot) and n_batch:
        ndims = [len(core) for core in op.inputs_sig]
        before = [each.ndim - n for each, n in zip(node.inputs, ndims, strict=True)]
        inner = [
            None if s is None else Along(s.axis - b) for s, b in zip(states, before, strict=True)
        ]
        if all(s is None or s.axis >= 0 for s in inner):
            found = _product(node, ndims, inner)
            return found if found is TOTAL else Along(found.axis + n_batch)
    raise mixed(node)


@rule(CheckParameterValue, CheckAndRaise)
def _check_and_raise(op, node, states):
    value, *conditions = states
    if not only(conditions, ALL, COUNTED):
        raise mixed(node)
    return value


@rule(OpFromGraph)
def _from_graph(op, node, states):
    inside = {
        variable: state
        for variable, state in zip(op.fgraph.inputs, states, strict=True)
        if state is not None
    }
    _follow(op.fgraph.outputs, inside)
    return [inside.get(each) for each in op.fgraph.outputs]


@rule(RandomVariable)
def _random(op, node, states):
    raise Mixed("its log-likelihood draws random numbers", "", None, node.inputs)
