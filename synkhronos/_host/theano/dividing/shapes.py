"""Rules of shapes, and of operations that make arrays of a shape: which axis has the rows."""

from theano.compile.ops import Shape, Shape_i
from theano.tensor import basic, opt

from synkhronos._host.theano.dividing.division import (
    LENGTH,
    PART,
    POSITIONS,
    ROWS,
    SAME,
    SHAPE,
    UNKNOWN,
    CannotDivide,
    Value,
    counts_rows,
    keeps_sums,
    number,
    of_length,
    rule,
    vector_length,
)


@rule(Shape)
def _shape(division, node):
    value = division.of(node.inputs[0])
    if value.kind not in (ROWS, POSITIONS):
        return division.apply(node, [_any_value(division, node)])
    [mine] = division.apply(node, [value.variable])
    length, axis = division.length(value), value.axis
    items = [length.total if i == axis else mine.variable[i] for i in range(node.inputs[0].ndim)]
    return [Value(mine.variable, SHAPE, axis, length.exact, opt.MakeVector("int64")(*items))]


@rule(Shape_i)
def _length(division, node):
    value = division.of(node.inputs[0])
    if value.kind not in (ROWS, POSITIONS) or node.op.i != value.axis:
        return division.apply(node, [_any_value(division, node)])
    return [division.length(value)]


def _any_value(division, node):
    """Return what has the shape of an input: its value on a rank, whatever it is."""
    value = division.of(node.inputs[0])
    if value.kind == UNKNOWN:
        raise CannotDivide(value.reason)
    return value.variable


@rule(opt.MakeVector)
def _make_vector(division, node):
    values = [division.of(each) for each in node.inputs]
    at = [i for i, value in enumerate(values) if value.kind == LENGTH]
    if len(at) != 1 or any(value.kind not in (SAME, LENGTH) for value in values):
        return division.unruled(node)
    [new] = of_length(division, node, values)
    return [new._replace(kind=SHAPE, axis=at[0], exact=values[at[0]].exact)]


@rule(basic.Reshape)
def _reshape(division, node):
    value, shape = map(division.of, node.inputs)
    if value.kind == PART and shape.kind == SAME:
        return division.apply(node, [value.variable, shape.variable], PART)
    if value.kind != ROWS:
        return division.unruled(node)
    last = node.inputs[0].ndim - 1, node.outputs[0].ndim - 1
    if value.axis and (value.axis, shape.axis) == last and value.exact and shape.exact:
        return division.apply(node, [value.variable, shape.variable], ROWS, last[1], True)
    if value.axis != 0:
        division.refuse(node, "rows that don't lie along axis 0")
    if shape.kind == SHAPE:
        axis, exact = shape.axis, shape.exact
    elif shape.kind == SAME and node.outputs[0].ndim and _item(node.inputs[1], 0) == -1:
        axis, exact = 0, False
        if node.inputs[0].ndim == 1 and node.outputs[0].ndim > 1:
            division.refuse(node, "rows that become several rows in one")
        if node.outputs[0].ndim > 1:
            division.keep_whole(node.inputs[0], node.inputs[1])
    elif shape.kind == SAME and value.exact and (_item(node.inputs[1], 0) or 0) > 1:
        # With exactly this number of rows in the call each row becomes one row of the result.
        division.require(_item(node.inputs[1], 0))
        rest = [shape.variable[i] for i in range(1, node.outputs[0].ndim)]
        mine = opt.MakeVector("int64")(Shape_i(0)(value.variable), *rest)
        return division.apply(node, [value.variable, mine], ROWS, 0, True)
    else:
        division.refuse(node, "rows, to a fixed number of rows")
    if any(_item(node.inputs[1], i) != 1 for i in range(axis)):
        division.refuse(node, "rows that don't lie along axis 0 then")
    return division.apply(node, [value.variable, shape.variable], ROWS, axis, exact)


def _item(vector, position):
    """Return the item of a vector if it is a constant, else None."""
    try:
        return int(basic.get_scalar_constant_value(vector[position]))
    except (basic.NotScalarConstantError, IndexError, ValueError):
        return None


@rule(basic.Alloc, basic.AllocEmpty)
def _alloc(division, node):
    first = 1 if isinstance(node.op, basic.Alloc) else 0
    values = [division.of(each) for each in node.inputs]
    at = [i for i, value in enumerate(values[first:]) if value.kind == LENGTH]
    if any(value.kind == ROWS for value in values):
        return _alloc_rows(division, node, values, at)
    if len(at) != 1:
        return division.unruled(node)
    new = [division.same(each) for each in node.inputs[:first]]
    for filling in new:
        division.refuse_length(node, filling, at[0] - (node.outputs[0].ndim - filling.ndim))
    new += [division.given(each, LENGTH) for each in node.inputs[first:]]
    return division.apply(node, new, ROWS, at[0], values[first + at[0]].exact)


def _alloc_rows(division, node, values, at):
    filling = values[0]
    axis = filling.axis + node.outputs[0].ndim - node.inputs[0].ndim
    if filling.kind != ROWS or at != [axis]:
        division.refuse(node)
    division.keep_equal(node.inputs[:1], [node.inputs[1 + axis]])
    new = [division.given(each, ROWS, LENGTH) for each in node.inputs]
    return division.apply(node, new, ROWS, axis, filling.exact)


@rule(basic.ARange)
def _arange(division, node):
    start, stop, step = map(division.of, node.inputs)
    constants = [number(node.inputs[0]), number(node.inputs[2])]
    is_each_row = stop.kind == LENGTH and stop.exact and counts_rows(node.outputs[0].dtype)
    if is_each_row and constants == [0, 1]:
        return division.apply(node, [start.variable, stop.variable, step.variable], POSITIONS)
    return division.unruled(node)


@rule(basic.Join)
def _join(division, node):
    axis, arrays = number(node.inputs[0]), node.inputs[1:]
    values = [division.of(each) for each in arrays]
    kinds = {value.kind for value in values}
    join = node.inputs[0]
    if SHAPE in kinds and kinds <= {SHAPE, SAME} and [v.kind for v in values].count(SHAPE) == 1:
        return [_join_shapes(division, node, values)]
    dtype = node.outputs[0].dtype
    if kinds == {PART} and all(keeps_sums(value.variable, dtype) for value in values):
        return division.apply(node, [join, *(value.variable for value in values)], PART)
    if ROWS not in kinds:
        return division.unruled(node)
    axes = {value.axis for value in values}
    if kinds != {ROWS} or len(axes) > 1 or axis is None:
        division.refuse(node, "rows and something else")
    if int(axis) % node.outputs[0].ndim in axes:
        division.refuse(node, "rows, one after the other")
    exact = any(value.exact for value in values)
    return division.apply(node, [join, *(v.variable for v in values)], ROWS, axes.pop(), exact)


def _join_shapes(division, node, values):
    before = 0
    for each, value in zip(node.inputs[1:], values):
        if value.kind == SHAPE:
            break
        length = vector_length(each)
        if length is None:
            division.refuse(node, "shapes of unknown length")
        before += length
    [new] = of_length(division, node, [division.of(node.inputs[0]), *values])
    return new._replace(axis=before + value.axis, exact=value.exact)


@rule(basic.Split)
def _split(division, node):
    value, axis = division.of(node.inputs[0]), number(node.inputs[1])
    if value.kind not in (ROWS, PART):
        return division.unruled(node)
    if value.kind == ROWS and (axis is None or int(axis) % node.inputs[0].ndim == value.axis):
        division.refuse(node)
    rest = [division.same(each) for each in node.inputs[1:]]
    return division.apply(node, [value.variable, *rest], value.kind, value.axis, value.exact)
