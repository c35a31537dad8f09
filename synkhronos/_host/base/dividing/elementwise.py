"""Rules of elementwise operations and of reductions: which values are rows, which are parts."""

import numpy as np

from synkhronos._host.base import chosen_library as host
from synkhronos._host.base.chosen_library import Constant, ancestors, tensor
from synkhronos._host.base.dividing.chosen_operations import all_reduce, as_row, of_type, scalar
from synkhronos._host.base.dividing.division import Value, fits, keeps_sums, rule, vector_length
from synkhronos._host.base.dividing.shapes import constant, counts_rows, measured_in, quotient
from synkhronos._host.base.functions import axis_of, is_by, number
from synkhronos._host.base.kinds import LENGTH, PART, POSITIONS, ROWS, SAME, SHAPE, STREAM, UNKNOWN


@rule(host.Elemwise)
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
        if isinstance(op, scalar.Cast) and counts_rows(node.outputs[0].dtype):
            return division.apply(node, [values[0].variable], POSITIONS, 0, values[0].exact)
        division.refuse(node, "the numbers of rows")
    if isinstance(op, scalar.IntDiv) and [value.kind for value in values] == [LENGTH, SAME]:
        divided = _divided_length(division, node, values)
        if divided is not None:
            return [divided]
    if LENGTH in kinds and isinstance(op, scalar.Switch):
        chosen = _chosen_length(node, values)
        if chosen is not None:
            return [chosen]
    if kinds & {LENGTH, SHAPE} and _is_proportional(op, node, values):
        return division.of_length(node, values)
    if PART in kinds and _is_linear(op, node, values):
        new = [
            v.variable if v.kind == PART else division.same(i) for i, v in zip(node.inputs, values)
        ]
        if isinstance(op, scalar.Cast) and _is_wider(new[0].dtype, node.outputs[0].dtype):
            return [Value(new[0], PART)]
        return division.apply(node, new, PART)
    new = [v.variable if v.kind == SAME else division.same(i) for i, v in zip(node.inputs, values)]
    return division.apply(node, new)


def _elemwise_of_rows(division, node, values):
    axes = {value.axis for value in values if value.kind == ROWS}
    if len(axes) > 1:
        division.refuse(node, "rows that lie along different axes")
    [axis] = axes
    exact = any(value.exact for value in values if value.kind == ROWS)
    new = []
    for each, value in zip(node.inputs, values):
        if value.kind != ROWS:
            division.refuse_length(node, each, axis)
        new.append(value.variable if value.kind in (ROWS, SAME) else division.same(each))
    return division.apply(node, new, ROWS, axis, exact)


def _chosen_length(node, values):
    """Return the length that a constant condition chooses, else None."""
    condition, dtype = constant(node.inputs[0]), node.outputs[0].dtype
    if condition is None:
        return None
    value = values[1 if condition else 2]
    total = tensor.cast(value.total, dtype) if value.kind == LENGTH else None
    return value._replace(variable=tensor.cast(value.variable, dtype), total=total)


def _is_proportional(op, node, values):
    """Return whether a number that is computed from one length is proportional to it, too."""
    dtype = node.outputs[0].dtype
    if isinstance(op, scalar.Cast) and dtype in ("float32", "float64"):
        return True  # Keras casts lengths to floats, and back
    if not counts_rows(dtype):
        return False
    if isinstance(op, (scalar.Cast, scalar.Identity)):
        return True
    kinds = [value.kind for value in values]
    is_of_one = kinds.count(LENGTH) == 1 and {*kinds} <= {LENGTH, SAME}
    return isinstance(op, scalar.Mul) and node.outputs[0].ndim == 0 and is_of_one


def _divided_length(division, node, values):
    """Return a multiple of the number of rows that is divided by a factor of it, else None."""
    factors, (length, divisor) = quotient(*node.inputs), node.inputs
    if not counts_rows(node.outputs[0].dtype) or values[0].times is not None:
        return None
    if factors is None:
        if values[0].exact or not number(divisor):
            return None
        division.remainders.append(length // tensor.maximum(division.serial_rows(), 1) % divisor)
    [new] = division.of_length(node, values)
    return new._replace(exact=factors is not None and _is_number_of_rows(division, factors))


def _is_number_of_rows(division, factors):
    if len(factors) != 1 or not is_by(factors[0], host.Shape_i):
        return False
    value = division.of(factors[0].owner.inputs[0])
    is_length = value.kind == ROWS and value.axis == factors[0].owner.op.i
    return is_length and value.exact and value.times is None


def _is_linear(op, node, values):
    parts = [value.kind == PART for value in values]
    [dtype] = {each.dtype for each in node.outputs}
    if np.dtype(dtype).kind not in "fciu":
        return False
    if not all(keeps_sums(value.variable, dtype) for value in values if value.kind == PART):
        return False
    if isinstance(op, (scalar.Cast, scalar.Neg, scalar.Identity, scalar.Add, scalar.Sub)):
        return all(parts)
    if isinstance(op, scalar.Mul):
        factors = [each for each, part in zip(node.inputs, parts) if not part]
        return sum(parts) == 1 and all(map(_is_safe_factor, factors))
    if isinstance(op, scalar.TrueDiv):
        # Quotients of integers are rounded: they need not add up to the quotient of the sum.
        is_rounded = np.dtype(values[0].variable.dtype).kind not in "fc"
        return parts == [True, False] and not is_rounded and _is_divisor(*node.inputs)
    if isinstance(op, scalar.Second):
        return parts == [False, True]
    return False


def _is_safe_factor(variable):
    """Return whether the graph says that numbers, constants or lengths, are finite and not 0.

    Times other numbers, parts may become infinite: with different signs they add up to NaN.
    """
    if isinstance(variable, Constant):
        return bool(np.all(np.isfinite(variable.data) & (variable.data != 0)))
    if variable.owner is None:
        return False
    op, inputs = variable.owner.op, variable.owner.inputs
    if isinstance(op, (host.Shape, host.Shape_i)):
        return True
    is_product = isinstance(getattr(op, "scalar_op", None), (scalar.Cast, scalar.Mul))
    if isinstance(op, host.MakeVector) or (isinstance(op, host.Elemwise) and is_product):
        return all(map(_is_safe_factor, inputs))
    moves = host.DimShuffle, host.Subtensor, host.TensorFromScalar, host.ScalarFromTensor
    return isinstance(op, (host.Prod, *moves)) and _is_safe_factor(inputs[0])


def _is_divisor(number, length):
    """Return whether a number is 0 wherever the length that divides it is, as in means."""
    if isinstance(length, Constant):
        return _is_safe_factor(length)
    return _is_safe_factor(length) and {*measured_in(length)} <= {*ancestors([number])}


@rule(host.ViewOp, host.DeepCopyOp, host.CpuContiguous, host.Assert)
@rule(host.TensorFromScalar, host.ScalarFromTensor)
def as_it_is(division, node):
    """Pass the first input on."""
    value = division.of(node.inputs[0])
    rest = [division.given(each, ROWS, POSITIONS) for each in node.inputs[1:]]
    [new] = division.apply(node, [value.variable, *rest])
    total = None
    if value.total is not None:
        total = division.apply(node, [value.total, *rest])[0].variable
    return [value._replace(variable=new.variable, total=total)]


@rule(host.IfElse)
def _if_else(division, node):
    """Choose between values of one kind by a condition that is the same on all ranks."""
    condition, n = division.same(node.inputs[0]), node.op.n_outs
    pairs = list(zip(node.inputs[1 : n + 1], node.inputs[n + 1 :]))
    values = [_alike(division, node, pair) for pair in pairs]
    branches = zip(*(_of_one_type(pair, value) for pair, value in zip(pairs, values)))
    new = division.apply(node, [condition, *(each for branch in branches for each in branch)])
    return [
        Value(each.variable, one.kind, one.axis, one.exact and other.exact)
        for each, (one, other) in zip(new, values)
    ]


def _alike(division, node, variables):
    """Return the values of two variables, which must be of one kind."""
    one, other = values = [division.of(each) for each in variables]
    kinds = {one.kind, other.kind}
    if kinds == {ROWS}:
        if one.axis != other.axis:
            division.refuse(node, "rows that lie along different axes")
        division.keep_equal(variables)
        return values
    if ROWS in kinds:
        division.refuse(
            node, f"rows and {variables[one.kind == ROWS]}, which has a fixed number of rows"
        )
    is_zero = [number(each) == 0 for each in variables]
    if PART in kinds and all(v.kind == PART or zero for v, zero in zip(values, is_zero)):
        return [Value(value.variable, PART) for value in values]
    return [Value(division.same(each)) for each in variables]


def _of_one_type(serial, values):
    dtype = scalar.upcast(*(value.variable.dtype for value in values))
    pairs = zip(serial, values)
    return [of_type(value.variable, each.type.clone(dtype=dtype)) for each, value in pairs]


@rule(host.DimShuffle)
def _dimshuffle(division, node):
    value, order = division.of(node.inputs[0]), node.op.new_order
    if value.kind == ROWS and value.axis in order:
        axis = order.index(value.axis)
        return division.apply(node, [value.variable], ROWS, axis, value.exact)
    if value.kind in (PART, STREAM):
        return division.apply(node, [value.variable], value.kind)
    return division.unruled(node)


@rule(host.CAReduce)
def _reduce(division, node):
    value, op = division.of(node.inputs[0]), node.op.scalar_op
    axes = reduced_axes(node)
    is_length = value.kind == SHAPE and counts_rows(node.outputs[0].dtype)
    if is_length and isinstance(op, scalar.Mul) and list(axes) == [0]:
        [new] = division.of_length(node, [value])
        exact = value.exact and vector_length(node.inputs[0]) == 1
        return [new._replace(kind=LENGTH, exact=exact)]
    if value.kind == PART and isinstance(op, scalar.Add):
        is_half = node.outputs[0].dtype in ("float16", "bool")
        if is_half or not keeps_sums(value.variable, _accumulator(node)):
            return division.unruled(node)
        return [_add_up(division, node, value)]
    if value.kind != ROWS:
        return division.unruled(node)
    if value.axis not in axes:
        axis = _axis_without(axes, value)
        return division.apply(node, [value.variable], ROWS, axis, value.exact)
    is_of_all = len(axes) == node.inputs[0].ndim
    if isinstance(op, scalar.Add) and is_of_all and number(node.inputs[0]) == 1:  # it counts items
        size = node.inputs[0].size
        return division.expand(node, lambda _: [tensor.cast(size, node.outputs[0].dtype)])
    if isinstance(op, (scalar.Add, scalar.Mul)):
        return [_add_up(division, node, value)]
    for kind, how in _REDUCED.items():
        if kind in (scalar.AND, scalar.OR) and node.outputs[0].dtype != "bool":
            continue  # these combine the bits of integers
        if isinstance(op, kind):
            [mine] = division.apply(node, [value.variable])
            return [Value(_all_reduce(mine.variable, how))]
    return division.unruled(node)


def reduced_axes(node):
    """Return the axes along which a node reduces."""
    return range(node.inputs[0].ndim) if node.op.axis is None else node.op.axis


def _axis_without(axes, value):
    """Return the axis of rows after other axes were reduced."""
    return value.axis - sum(each < value.axis for each in axes)


def is_truncated(before, after):
    """Return whether a cast of floats cuts off the fraction."""
    return np.dtype(before).kind in "fc" and np.dtype(after).kind not in "fc"


def _is_wider(dtype, other):
    dtype, other = np.dtype(dtype), np.dtype(other)
    return dtype.kind == other.kind in "fc" and dtype.itemsize > other.itemsize


def _accumulator(node):
    """Return the dtype in which serial Theano adds up, or multiplies."""
    return getattr(node.op, "acc_dtype", None) or node.outputs[0].dtype


def _add_up(division, node, value):
    """Return the sum or product of rows or parts, in the dtype that serial Theano computes in."""
    before, within, after = value.variable.dtype, _accumulator(node), node.outputs[0].dtype
    if is_truncated(before, within) or {within, after} & {"float16", "bool"}:
        division.refuse(node, f"{node.inputs[0].dtype} numbers as {after}")
    is_sum, kinds = isinstance(node.op.scalar_op, scalar.Add), {_kind(within), _kind(after)}
    wraps = kinds == {"i"} and np.dtype(within).itemsize >= np.dtype(after).itemsize
    if within == after or wraps or (is_sum and fits(before, within)):
        [part] = division.apply(node, [value.variable], PART)
    else:
        wide = type(node.op)(axis=node.op.axis, dtype=within, acc_dtype=within)
        part = Value(wide(value.variable), PART)
    if is_sum and (part.variable.dtype == after or _is_wider(within, after)):
        return part
    whole = _all_reduce(part.variable, "sum" if is_sum else "prod")
    if whole.dtype == after:
        return Value(whole)
    # Serial Theano casts in the sum: an operation Cast may raise an error for values such as NaN.
    narrow = type(node.op)(axis=[0], dtype=after, acc_dtype=within)
    return Value(narrow(as_row(whole)))


def _kind(dtype):
    return np.dtype(dtype).kind.replace("u", "i")


_REDUCED = {scalar.Maximum: "max", scalar.Minimum: "min", scalar.AND: "min", scalar.OR: "max"}


def _all_reduce(variable, how):
    if variable.dtype != "bool":
        return all_reduce(variable, how)
    return tensor.cast(all_reduce(tensor.cast(variable, "int8"), how), "bool")


@rule(host.CumOp, host.RepeatOp, host.SortOp, host.ArgSortOp)
def along_an_axis(division, node):
    """Accumulate, sort or repeat along another axis than that of the rows."""
    value = division.of(node.inputs[0])
    if value.kind != ROWS:
        return division.unruled(node)
    if axis_of(node) in (None, value.axis):
        division.refuse(node, "rows of its inputs along their axis, where each depends on others")
    rest = [division.same(each) for each in node.inputs[1:]]
    return division.apply(node, [value.variable, *rest], ROWS, value.axis, value.exact)


@rule(host.Argmax)
def argmax(division, node):
    """Find the largest values and their indices, but no indices of rows."""
    value = division.of(node.inputs[0])
    if value.kind != ROWS or len(node.inputs) > 1:
        return division.unruled(node)
    axes = reduced_axes(node)
    axes = [axes] if isinstance(axes, int) else list(axes)
    new = division.apply(node, [value.variable])
    if value.axis not in axes:
        axis = _axis_without(axes, value)
        return [each._replace(kind=ROWS, axis=axis, exact=value.exact) for each in new]
    unknown = Value(None, UNKNOWN, reason="computes which row has the largest value")
    if len(new) == 1:
        return [unknown]
    return [Value(_all_reduce(new[0].variable, "max")), unknown]


@rule(host.Dot)
def dot(division, node, n_batch=0):
    """Multiply matrices, or stacks of matrices, with `n_batch` axes before those of a matrix."""
    x, y = map(division.of, node.inputs)
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
