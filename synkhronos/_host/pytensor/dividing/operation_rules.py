"""Rules of operations that PyTensor alone has."""

import functools
import operator

from pytensor import tensor
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.rewriting import inline_ofg_node
from pytensor.tensor import subtensor
from pytensor.tensor.basic import ExtractDiag, Nonzero
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.reshape import JoinDims, SplitDims
from pytensor.tensor.type_other import NoneTypeT

from synkhronos._host.base.dividing import indices
from synkhronos._host.base.dividing.division import CannotDivide, rule
from synkhronos._host.base.dividing.elementwise import as_it_is, dot
from synkhronos._host.base.dividing.relating import linear
from synkhronos._host.base.kinds import PART, ROWS, SAME, SHAPE, STREAM
from synkhronos._host.pytensor.library import Dot, RandomVariable, Retype, Variable

_WHOLE = slice(None)

rule(Nonzero)(indices.nonzero)
# The graph inside of an operation is put in its place.
rule(OpFromGraph)(lambda division, node: division.expand(node, inline_ofg_node))

linear(subtensor.AdvancedSubtensor, JoinDims, SplitDims, ExtractDiag, joint=(0,))
linear(subtensor.AdvancedIncSubtensor, joint=(0, 1))


def _reshaped(node):
    """Return a Reshape that does the same."""
    array, *shape = node.inputs
    lengths = [array.shape[i] for i in range(array.ndim)]
    if shape:
        new = [shape[0][i] for i in range(node.outputs[0].ndim - array.ndim + 1)]
        lengths[node.op.axis : node.op.axis + 1] = new
    else:
        axes = slice(node.op.start_axis, node.op.start_axis + node.op.n_axes)
        lengths[axes] = [functools.reduce(operator.mul, lengths[axes], tensor.constant(1))]
    return [array.reshape(lengths)]


rule(JoinDims, SplitDims)(lambda division, node: division.expand(node, _reshaped))


@rule(Retype)
def _specify_shape(division, node):
    value = division.of(node.inputs[0])
    if value.kind == ROWS and not isinstance(node.inputs[1 + value.axis].type, NoneTypeT):
        division.refuse(node, "rows, a fixed number of them")
    return as_it_is(division, node)


@rule(ExtractDiag)
def _diagonal(division, node):
    """Take diagonals of other axes than that of the rows."""
    value, axes = division.of(node.inputs[0]), (node.op.axis1, node.op.axis2)
    if value.kind != ROWS or value.axis in axes:
        return division.unruled(node)
    axis = value.axis - sum(each < value.axis for each in axes)
    return division.apply(node, [value.variable], ROWS, axis, value.exact)


@rule(Blockwise)
def _blockwise(division, node):
    """Compute each item of the first axes alone; one of these axes may be the rows."""
    values = [division.of(each) for each in node.inputs]
    axes = {value.axis for value in values if value.kind == ROWS}
    if not axes:
        return division.unruled(node)
    n_batch = node.op.batch_ndim(node)
    if isinstance(node.op.core_op, Dot) and max(axes) >= n_batch:
        return dot(division, node, n_batch)
    if len(axes) > 1 or max(axes) >= n_batch:
        division.refuse(node, "rows that lie along different axes")
    [axis] = axes
    new = _of_rows(division, node, node.inputs, axis)
    exact = any(value.exact for value in values if value.kind == ROWS)
    return division.apply(node, new, ROWS, axis, exact)


def _of_rows(division, node, variables, axis):
    """Return variables as the rank has them; those without rows must have the length 1 there."""
    for each in variables:
        if division.of(each).kind != ROWS:
            division.refuse_length(node, each, axis)
    return [division.given(each, ROWS) for each in variables]


@rule(RandomVariable)
def _random(division, node):
    """Draw the numbers of a rank's rows, from a stream of its own."""
    state, size, *parameters = node.inputs
    stream, shape = division.of(state), division.of(size)
    if stream.kind != STREAM:
        raise CannotDivide("draws random numbers from a state that is no shared variable")
    values = [division.of(each) for each in parameters]
    axes = {value.axis for value in values if value.kind == ROWS}
    if isinstance(size.type, NoneTypeT):
        exact = any(value.exact for value in values if value.kind == ROWS)
    else:
        axes |= {shape.axis} if shape.kind == SHAPE else set()
        exact = shape.exact
    if not axes or not (shape.kind == SHAPE or isinstance(size.type, NoneTypeT)):
        after, _ = division.apply(node, [stream.variable, *map(division.same, node.inputs[1:])])
        return [after._replace(kind=STREAM), division.NOT_FOR_ROWS]
    if len(axes) > 1 or max(axes) >= node.op.batch_ndim(node):
        division.refuse(node, "rows that lie along different axes")
    [axis] = axes
    rows = [each for each, value in zip(parameters, values) if value.kind == ROWS]
    if shape.kind == SHAPE:
        division.keep_equal(rows, [size[axis]])
    new = [stream.variable, division.given(size, SHAPE)]
    new += _of_rows(division, node, parameters, axis)
    after, numbers = division.apply(node, new, ROWS, axis, exact)
    return [after._replace(kind=STREAM, axis=0, exact=False), numbers]


@rule(subtensor.AdvancedSubtensor)
def _take(division, node):
    chosen = _chosen(node.op, node.inputs[1:])
    _refuse_masks(division, node)
    if all(isinstance(each, Variable) for each in chosen):
        is_vector = len(chosen) == 1 and chosen[0].ndim == 1
        return (indices.take if is_vector else indices.take_items)(division, node)
    value, rest = division.of(node.inputs[0]), node.inputs[1:]
    if value.kind == ROWS:
        axis = _axis_after(division, node, chosen, value.axis)
        new = [value.variable, *map(division.same, rest)]
        return division.apply(node, new, ROWS, axis, value.exact)
    if value.kind == PART:
        return division.apply(node, [value.variable, *map(division.same, rest)], PART)
    arrays, ndim, begin = _arrays(chosen)
    rows = [each for each in arrays if division.of(each).kind == ROWS]
    axes = {division.of(each).axis + ndim - each.ndim for each in rows}
    if not axes:
        return division.unruled(node)
    if len(axes) > 1 or any(division.of(each).kind not in (ROWS, SAME) for each in rest):
        division.refuse(node, "rows that lie along different axes")
    [axis] = axes
    for each in arrays:
        if each not in rows:
            division.refuse_length(node, each, axis - (ndim - each.ndim))
    division.keep_equal(rows)
    new = [division.same(node.inputs[0]), *(division.given(each, ROWS) for each in rest)]
    exact = any(division.of(each).exact for each in rows)
    return division.apply(node, new, ROWS, begin + axis, exact)


@rule(subtensor.AdvancedIncSubtensor)
def _add_to_items(division, node):
    chosen = _chosen(node.op, node.inputs[2:])
    _refuse_masks(division, node)
    if all(isinstance(each, Variable) for each in chosen):
        return indices.add_to_items(division, node)
    x, y = map(division.of, node.inputs[:2])
    if ROWS not in (x.kind, y.kind):
        is_linear = not node.op.set_instead_of_inc
        return indices.add_to(division, node, x, y, is_linear)
    if x.kind != ROWS:
        division.refuse(node, f"rows and {node.inputs[0]}, which has a fixed number of rows")
    axis = _axis_after(division, node, chosen, x.axis)
    arrays, ndim, _ = _arrays(chosen)
    place = axis - (node.inputs[0].ndim - len(arrays) + ndim - node.inputs[1].ndim)
    new = [x.variable, indices.placed(division, node, y, place)]
    division.keep_equal(node.inputs[:2])
    new += map(division.same, node.inputs[2:])
    return division.apply(node, new, ROWS, x.axis, x.exact)


def _chosen(op, variables):
    """Return the indices of all axes up to the last one that is not taken whole."""
    chosen = list(subtensor.indices_from_subtensor(variables, op.idx_list))
    while chosen and chosen[-1] == _WHOLE:
        chosen.pop()
    return chosen


def _refuse_masks(division, node):
    """Refuse masks beside rows, except vectors: others merge several axes into one."""
    if all(division.of(each).kind != ROWS for each in node.inputs):
        return
    masks = [each for each in node.inputs[1:] if getattr(each.type, "dtype", "") == "bool"]
    if any(each.ndim > 1 or division.of(each).kind != SAME for each in masks):
        division.refuse(node, "items that a mask selects", indices.SELECT)


def _arrays(chosen):
    """Return the indices that are arrays, how many axes they have, and the first of these axes."""
    at = [i for i, each in enumerate(chosen) if isinstance(each, Variable)]
    arrays = [chosen[i] for i in at]
    is_together = at[-1] - at[0] == len(at) - 1
    return arrays, max(each.ndim for each in arrays), at[0] if is_together else 0


def _axis_after(division, node, chosen, axis):
    """Return the axis of rows after indexing; refuse indices of the rows."""
    if axis < len(chosen) and chosen[axis] != _WHOLE:
        division.refuse(node, "rows that are selected by their number", indices.SELECT)
    _, ndim, begin = _arrays(chosen)
    axis -= sum(isinstance(each, Variable) for each in chosen[:axis])
    return axis + ndim if axis >= begin else axis
