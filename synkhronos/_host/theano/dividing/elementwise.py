"""Rules of operations item by item, and over axes: which values are rows, which are parts."""

import numpy as np
from theano import scalar, tensor
from theano.compile.ops import DeepCopyOp, Rebroadcast, Shape, Shape_i, ViewOp
from theano.gof import Constant
from theano.tensor import basic, blas, elemwise, extra_ops, opt, subtensor

from synkhronos._host.theano.dividing.division import (
    LENGTH,
    PART,
    POSITIONS,
    ROWS,
    SAME,
    SHAPE,
    STREAM,
    UNKNOWN,
    Value,
    of_length,
    rule,
    vector_length,
)
from synkhronos._host.theano.graph import all_reduce


@rule(elemwise.Elemwise)
def _elemwise(division, node):
    op, values = node.op.scalar_op, [division.of(each) for each in node.inputs]
    if isinstance(op, scalar.Second) and values[0].kind == PART:
        values[0] = Value(values[0].variable)  # only its shape counts
    kinds = {value.kind for value in values}
    if kinds & {UNKNOWN, STREAM}:
        return division.unruled(node)
    if ROWS in kinds:
        return _elemwise_of_rows(division, node, values)
    if POSITIONS in kinds:
        if isinstance(op, scalar.Cast):
            return division.apply(node, [values[0].variable], POSITIONS)
        division.refuse(node, "the numbers of rows")
    if kinds & {LENGTH, SHAPE} and _is_proportional(op, node, values):
        return of_length(division, node, values)
    if PART in kinds and _is_linear(op, node, values):
        new = [v.variable if v.kind == PART else division.same(i) for i, v in _pairs(node, values)]
        return division.apply(node, new, PART)
    new = [v.variable if v.kind == SAME else division.same(i) for i, v in _pairs(node, values)]
    return division.apply(node, new)


def _pairs(node, values):
    return list(zip(node.inputs, values))


def _elemwise_of_rows(division, node, values):
    axes = {value.axis for value in values if value.kind == ROWS}
    if len(axes) > 1:
        division.refuse(node, "rows that lie along different axes")
    [axis] = axes
    exact = any(value.exact for value in values if value.kind == ROWS)
    new = []
    for each, value in _pairs(node, values):
        if value.kind == ROWS:
            new.append(value.variable)
            continue
        if not each.broadcastable[axis]:
            division.refuse(node, f"rows and {each}, which has a fixed number of rows")
        new.append(value.variable if value.kind == SAME else division.same(each))
    return division.apply(node, new, ROWS, axis, exact)


def _is_proportional(op, node, values):
    """Return whether a number that is computed from one length is proportional to it, too."""
    if node.outputs[0].dtype not in tensor.integer_dtypes:
        return False
    if isinstance(op, (scalar.Cast, scalar.Identity)):
        return True
    lengths = [value for value in values if value.kind == LENGTH]
    others = [value for value in values if value.kind != LENGTH]
    return (
        isinstance(op, scalar.Mul)
        and len(lengths) == 1
        and node.outputs[0].ndim == 0
        and all(value.kind == SAME for value in others)
    )


def _is_linear(op, node, values):
    parts = [value.kind == PART for value in values]
    [dtype] = {each.dtype for each in node.outputs}
    if np.dtype(dtype).kind not in "fciu":
        return False
    if not all(_converts(each.dtype, dtype) for each, part in zip(node.inputs, parts) if part):
        return False
    if isinstance(op, (scalar.Cast, scalar.Neg, scalar.Identity, scalar.Add, scalar.Sub)):
        return all(parts)
    if isinstance(op, scalar.Mul):
        factors = [each for each, part in zip(node.inputs, parts) if not part]
        return sum(parts) == 1 and all(map(_is_finite, factors))
    if isinstance(op, scalar.TrueDiv):
        return parts == [True, False] and _is_finite(node.inputs[1])
    if isinstance(op, scalar.Second):
        return parts == [False, True]
    return False


def _converts(before, after):
    """Return whether parts still add up to the whole in another dtype.

    Sums of small or unsigned integers wrap around where they don't fit, which a wider dtype shows.
    """
    if before == after or before == "int64":
        return True
    before, after = np.dtype(before), np.dtype(after)
    if before.kind in "iu":
        return after.kind in "iu" and after.itemsize <= before.itemsize
    return after.kind in "fc"


def _is_finite(variable):
    """Return whether the graph says that numbers are finite and not 0: constants and lengths.

    Others are no factors of parts: infinite parts with different signs add up to NaN.
    """
    if isinstance(variable, Constant):
        return bool(np.all(np.isfinite(variable.data) & (variable.data != 0)))
    if variable.owner is None:
        return False
    op, inputs = variable.owner.op, variable.owner.inputs
    if isinstance(op, (Shape, Shape_i)):
        return True
    if isinstance(op, elemwise.Elemwise):
        return isinstance(op.scalar_op, (scalar.Cast, scalar.Mul)) and all(map(_is_finite, inputs))
    if isinstance(op, opt.MakeVector):
        return all(map(_is_finite, inputs))
    is_same = isinstance(op, (elemwise.DimShuffle, elemwise.Prod, subtensor.Subtensor))
    is_same = is_same or isinstance(op, (basic.TensorFromScalar, basic.ScalarFromTensor))
    return is_same and _is_finite(inputs[0])


@rule(
    ViewOp,
    DeepCopyOp,
    Rebroadcast,
    extra_ops.CpuContiguous,
    opt.Assert,
    basic.TensorFromScalar,
    basic.ScalarFromTensor,
)
def _first_as_it_is(division, node):
    value = division.of(node.inputs[0])
    if isinstance(node.op, Rebroadcast) and node.op.axis.get(value.axis) and value.kind == ROWS:
        division.refuse(node)
    rest = []
    for each in node.inputs[1:]:
        of_each = division.of(each)
        is_mine = of_each.kind in (ROWS, POSITIONS)
        rest.append(of_each.variable if is_mine else division.same(each))
    [new] = division.apply(node, [value.variable, *rest])
    total = None
    if value.total is not None:
        total = division.apply(node, [value.total, *rest])[0].variable
    return [value._replace(variable=new.variable, total=total)]


@rule(elemwise.DimShuffle)
def _dimshuffle(division, node):
    value, order = division.of(node.inputs[0]), node.op.new_order
    if value.kind == ROWS and value.axis in order:
        axis = order.index(value.axis)
        return division.apply(node, [value.variable], ROWS, axis, value.exact)
    if value.kind == PART:
        return division.apply(node, [value.variable], PART)
    return division.unruled(node)


@rule(elemwise.CAReduce)
def _reduce(division, node):
    value, op = division.of(node.inputs[0]), node.op.scalar_op
    axes = range(node.inputs[0].ndim) if node.op.axis is None else node.op.axis
    if value.kind == SHAPE and isinstance(op, scalar.Mul) and list(axes) == [0]:
        [new] = of_length(division, node, [value])
        exact = value.exact and vector_length(node.inputs[0]) == 1
        return [new._replace(kind=LENGTH, exact=exact)]
    if isinstance(node.op, basic.Mean):
        return division.unruled(node)
    if value.kind == PART and isinstance(op, scalar.Add):
        return division.apply(node, [value.variable], PART)
    if value.kind != ROWS:
        return division.unruled(node)
    if value.axis not in axes:
        axis = value.axis - sum(each < value.axis for each in axes)
        return division.apply(node, [value.variable], ROWS, axis, value.exact)
    if isinstance(op, scalar.Add):
        return division.apply(node, [value.variable], PART)
    for kind, how in _REDUCED.items():
        if kind in (scalar.AND, scalar.OR) and node.outputs[0].dtype != "bool":
            continue  # of the bits of integers
        if isinstance(op, kind):
            [mine] = division.apply(node, [value.variable])
            return [Value(_all_reduce(mine.variable, how))]
    return division.unruled(node)


_REDUCED = {
    scalar.Mul: "prod",
    scalar.Maximum: "max",
    scalar.Minimum: "min",
    scalar.AND: "min",
    scalar.OR: "max",
}


def _all_reduce(variable, how):
    if variable.dtype != "bool":
        return all_reduce(variable, how)
    return tensor.cast(all_reduce(tensor.cast(variable, "int8"), how), "bool")


@rule(basic.MaxAndArgmax, basic.Argmax)
def _argmax(division, node):
    value = division.of(node.inputs[0])
    if value.kind != ROWS or len(node.inputs) > 1:
        return division.unruled(node)
    axes = node.op.axis
    axes = range(node.inputs[0].ndim) if axes is None else axes
    axes = [axes] if isinstance(axes, int) else list(axes)
    new = division.apply(node, [value.variable])
    if value.axis not in axes:
        axis = value.axis - sum(each < value.axis for each in axes)
        return [each._replace(kind=ROWS, axis=axis, exact=value.exact) for each in new]
    unknown = Value(None, UNKNOWN, reason="computes which row has the largest value")
    if len(new) == 1:
        return [unknown]
    return [Value(_all_reduce(new[0].variable, "max")), unknown]


@rule(basic.Dot, blas.BatchedDot)
def _dot(division, node):
    (x, y), n_batch = map(division.of, node.inputs), int(isinstance(node.op, blas.BatchedDot))
    x_ndim, y_ndim = (each.ndim for each in node.inputs)
    inner_x, inner_y = x_ndim - 1, n_batch if y_ndim == n_batch + 1 else y_ndim - 2
    kinds = x.kind, y.kind
    if ROWS not in kinds:
        return division.unruled(node)
    if kinds == (ROWS, ROWS):
        if n_batch and x.axis == y.axis == 0:
            return division.apply(node, [x.variable, y.variable], ROWS, 0, x.exact or y.exact)
        if (x.axis, y.axis) == (inner_x, inner_y):
            return division.apply(node, [x.variable, y.variable], PART)
        division.refuse(node, "rows that lie along different axes")
    mine, inner, other = (x, inner_x, 1) if x.kind == ROWS else (y, inner_y, 0)
    if mine.axis == inner or mine.axis < n_batch:
        division.refuse(node, f"rows and {node.inputs[other]}, which has a fixed number of rows")
    whole = division.same(node.inputs[other])
    if other:
        return division.apply(node, [x.variable, whole], ROWS, x.axis, x.exact)
    return division.apply(node, [whole, y.variable], ROWS, node.outputs[0].ndim - 1, y.exact)
