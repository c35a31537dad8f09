"""Rules of shapes, and of operations that make arrays of a shape: which axis has the rows."""

import functools
import operator

import numpy as np

from synkhronos._host.base import chosen_library as host
from synkhronos._host.base.chosen_library import Constant, ancestors, indices_of, tensor
from synkhronos._host.base.dividing import chosen_operations
from synkhronos._host.base.dividing.chosen_operations import integer_dtypes, joined, scalar
from synkhronos._host.base.dividing.division import Value, keeps_sums, rule, vector_length
from synkhronos._host.base.functions import axis_of, is_by, nodes_of, number
from synkhronos._host.base.kinds import LENGTH, PART, POSITIONS, ROWS, SAME, SHAPE


@rule(host.Shape)
def _shape(division, node):
    value = division.of(node.inputs[0])
    if value.kind not in (ROWS, POSITIONS):
        return division.apply(node, [division.measured(node.inputs[0])])
    [mine] = division.apply(node, [value.variable])
    length, axis = division.length(value), value.axis
    items = [length.total if i == axis else mine.variable[i] for i in range(node.inputs[0].ndim)]
    return [Value(mine.variable, SHAPE, axis, length.exact, host.MakeVector("int64")(*items))]


@rule(host.Shape_i)
def _length(division, node):
    value = division.of(node.inputs[0])
    if value.kind not in (ROWS, POSITIONS) or node.op.i != value.axis:
        return division.apply(node, [division.measured(node.inputs[0])])
    return [division.length(value)]


def counts_rows(dtype):
    """Return whether a dtype holds any number of rows; smaller integers may wrap around."""
    return np.dtype(dtype).kind in "iu" and np.dtype(dtype).itemsize >= 4


@rule(host.MakeVector)
def _make_vector(division, node):
    values = [division.of(each) for each in node.inputs]
    at = [i for i, value in enumerate(values) if value.kind == LENGTH]
    if len(at) != 1 or any(value.kind not in (SAME, LENGTH) for value in values):
        return division.unruled(node)
    [new] = division.of_length(node, values)
    return [new._replace(kind=SHAPE, axis=at[0], exact=values[at[0]].exact)]


@rule(host.Reshape, knows_times=True)
def _reshape(division, node):
    """Reshape rows that stay whole: the lengths before their axis have the same product.

    The axes before may also be merged with that of the rows, which then repeat along it.
    """
    value, shape = map(division.of, node.inputs)
    if value.kind == PART and shape.kind == SAME:
        return division.apply(node, [value.variable, shape.variable], PART)
    if value.kind != ROWS:
        return division.unruled(node)
    lengths = _lengths(node.inputs[1], node.outputs[0].ndim)
    numbers = [constant(each) for each in lengths]
    is_rest = shape.kind == SAME and -1 in numbers
    is_first = value.exact and value.axis == 0 and value.times is None
    if shape.kind == SAME and is_first and numbers and (numbers[0] or 0) > 1:
        return _reshape_to_number(division, node, value, numbers)
    if shape.kind != SHAPE and not is_rest:
        division.refuse(node, "rows, to a fixed number of rows")
    if is_rest and is_first and numbers[0] == -1 and node.inputs[0].ndim == 1 < len(numbers):
        division.refuse(node, "rows that become several rows in one")
    axis = numbers.index(-1) if is_rest else shape.axis
    times = _times_after(division, node, value, shape, lengths[:axis], axis)
    array = node.inputs[0]
    items = [_length_of(array, i) for i in range(value.axis + 1, array.ndim)]
    repeats = [[each[0]] if each else [] for each in (times, shape.times)]
    exact = shape.exact and _are_equal(*repeats)
    if value.exact and _are_equal(items, lengths[axis + 1 :]):
        exact = True
    elif (is_rest or times) and not _are_equal(items, lengths[axis + 1 :]):
        _keep_whole(division, node, value, items, axis)
    [new] = division.apply(node, [value.variable, shape.variable], ROWS, axis, exact)
    return [new._replace(times=times)]


def _times_after(division, node, value, shape, lengths, axis):
    """Return the `times` of the rows after reshaping, for the new lengths before their axis."""
    array, result = node.inputs[0], node.outputs[0]
    refusal = "rows that it would tear apart: dimshuffle them to axis 0"
    before = [_length_of(array, i) for i in range(value.axis)]
    if value.times and shape.times and _are_equal(before, lengths):
        return value.times
    before += [value.times[0]] if value.times else []
    if _are_equal(before, lengths):
        return None
    is_last = value.axis == array.ndim - 1 and axis == result.ndim - 1
    if is_last and value.exact and shape.exact and value.times is shape.times is None:
        return None
    if all(constant(each) == 1 for each in lengths):
        if _is_one_now(_product(before)):
            division.remainders.append(_product(before) - 1)
            return None
        if shape.exact and shape.times is None:
            division.refuse(node, refusal)
        mine = _product([host.Shape_i(i)(value.variable) for i in range(value.axis)])
        return _product(before), mine * value.times[1] if value.times else mine
    if not before and any(constant(each) not in (None, 1) for each in lengths):
        division.refuse(node, refusal)
    after = [host.Shape_i(i)(result) for i in range(axis)]
    division.remainders.append(_product(after) - _product(before))
    return None


def _keep_whole(division, node, value, items, axis):
    """Let only calls be divided in which each row becomes one or more whole rows of the result."""
    items, (array, _), [result] = _product(items), node.inputs, node.outputs
    if result.ndim == axis + 1:
        return
    if not value.exact:
        times = value.times[0] if value.times else 1
        n_rows = division.serial_rows() * times
        items *= host.Shape_i(value.axis)(array) // tensor.maximum(n_rows, 1)
    new = _product([host.Shape_i(i)(result) for i in range(axis + 1, result.ndim)])
    division.remainders.append(items % tensor.maximum(new, 1))


def _reshape_to_number(division, node, value, numbers):
    """Reshape to a constant number of rows; only calls with so many rows are divided."""
    division.require(numbers[0])
    shape = division.same(node.inputs[1])
    rest = [shape[i] for i in range(1, len(numbers))]
    mine = host.MakeVector("int64")(host.Shape_i(0)(value.variable), *rest)
    return division.apply(node, [value.variable, mine], ROWS, 0, True)


def _lengths(shape, ndim):
    """Return the items of a shape, as the graph says them if it does."""
    node = shape.owner
    if isinstance(shape, Constant):
        return [tensor.constant(each) for each in shape.data]
    if is_by(shape, host.MakeVector):
        return list(node.inputs)
    if is_by(shape, host.Shape):
        return [host.Shape_i(i)(node.inputs[0]) for i in range(ndim)]
    if is_by(shape, host.Elemwise) and isinstance(node.op.scalar_op, scalar.Cast):
        return _lengths(node.inputs[0], ndim)
    if is_by(shape, host.Join) and number(joined(node)[0]) == 0 and _n_items(shape) is not None:
        return [item for each in joined(node)[1] for item in _lengths(each, vector_length(each))]
    if is_by(shape, host.Subtensor):
        length = vector_length(node.inputs[0])
        chosen, is_slice = lengths_taken(node, length)
        if is_slice and chosen is not None:
            items = _lengths(node.inputs[0], length)
            return [items[i] for i in chosen]
    return [shape[i] for i in range(ndim)]


def lengths_taken(node, n_lengths):
    """Return the positions of the items that are taken of a shape, or None, and if by a slice."""
    [index] = indices_of(node)
    is_slice = isinstance(index, slice)
    bounds = [index.start, index.stop, index.step] if is_slice else [index]
    numbers = [each if each is None else constant(each) for each in bounds]
    is_known = all((each is None) == (bound is None) for each, bound in zip(numbers, bounds))
    if n_lengths is None or not is_known:
        return None, is_slice
    places = range(n_lengths)
    return (places[slice(*numbers)] if is_slice else [places[numbers[0]]]), is_slice


def _n_items(vector):
    if is_by(vector, host.Join):
        items = [vector_length(each) for each in joined(vector.owner)[1]]
        return None if None in items else sum(items)
    return vector_length(vector)


def _length_of(array, axis):
    """Return the length of an axis: the number that the array was made with, if there is one."""
    if is_by(array, host.DimShuffle):
        source = array.owner.op.new_order[axis]
        return tensor.constant(1) if source == "x" else _length_of(array.owner.inputs[0], source)
    if is_by(array, host.Alloc):
        return array.owner.inputs[1 + axis]
    return host.Shape_i(axis)(array)


def _factors(length):
    """Return the factors of a length, as the graph says them."""
    node = length.owner
    if node is None:
        return [length]
    moves = host.DimShuffle, host.TensorFromScalar, host.ScalarFromTensor
    if isinstance(node.op, moves) and length.ndim == 0:
        return _factors(node.inputs[0])
    op = node.op.scalar_op if isinstance(node.op, host.Elemwise) else None
    dtypes = {getattr(each, "dtype", None) for each in node.inputs}
    # A float that is cast to a length loses its fraction.
    if isinstance(op, (scalar.Cast, scalar.Mul)) and dtypes <= {*integer_dtypes}:
        return [factor for each in node.inputs for factor in _factors(each)]
    if isinstance(op, scalar.IntDiv):
        factors = quotient(*node.inputs)
        return [length] if factors is None else factors
    if isinstance(node.op, host.Prod) and vector_length(node.inputs[0]) is not None:
        vector = node.inputs[0]
        return [f for each in _lengths(vector, vector_length(vector)) for f in _factors(each)]
    if isinstance(node.op, host.Subtensor) and length.ndim == 0:
        vector, index = node.inputs[0], number(*indices_of(node))
        n_items = _n_items(vector)
        if None not in (index, n_items) and -n_items <= index < n_items:
            item = _lengths(vector, n_items)[int(index)]
            if not (item.owner and item.owner.op == node.op):
                return _factors(item)
    return [length]


def quotient(length, divisor):
    """Return the factors of a quotient of lengths without remainder, else None."""
    return _without(_factors(length), _factors(divisor))


def _without(factors, others):
    """Return factors without some others; None if one of these is not among them."""
    left = list(factors)
    for each in others:
        same = next((other for other in left if host.equal_computations([each], [other])), None)
        if same is None:
            return None
        left.remove(same)
    return left


def _is_one_now(length):
    """Return whether a length that depends on shared variables only is 1 now."""
    leaves = [each for each in ancestors([length]) if each.owner is None]
    if not all(isinstance(each, (Constant, host.SharedVariable)) for each in leaves):
        return False
    return int(length.eval()) == 1


def _are_equal(lengths, others):
    """Return whether the graph says that two products of lengths are equal."""
    rest, products = [], []
    for each in (lengths, others):
        factors = [factor for length in each for factor in _factors(length)]
        known = [constant(factor) for factor in factors]
        products.append(int(np.prod([k for k in known if k is not None], dtype="int64")))
        rest.append([factor for factor, k in zip(factors, known) if k is None])
    return _without(*rest) == [] and products[0] == products[1] >= 0


def _product(lengths):
    return functools.reduce(operator.mul, lengths, tensor.constant(1, dtype="int64"))


def constant(length):
    """Return the number that a length always is, as far as Theano can say, else None."""
    known = number(length)
    if known is None and length.owner and not is_by(length, host.Shape_i, host.Subtensor):
        [length, *others] = _factors(_simplified(length))
        known = None if others else number(length)
    return None if known is None else int(known)


def measured_in(length):
    """Return the arrays on whose shapes a length depends."""
    nodes = nodes_of([length])
    return [node.inputs[0] for node in nodes if isinstance(node.op, (host.Shape, host.Shape_i))]


def _simplified(length):
    """Return a length whose graph, from the arrays that it measures on, Theano has simplified."""
    measured = [each for each in measured_in(length) if not is_by(each, host.Join)]
    measured = [each for each in measured if each.ndim != 1 or vector_length(each) is None]
    inputs = list(dict.fromkeys(each for each in measured if not isinstance(each, Constant)))
    blocked = ancestors([length], blockers=inputs)
    leaves = [each for each in blocked if each.owner is None and not isinstance(each, Constant)]
    graph = chosen_operations.FunctionGraph(
        [*inputs, *(each for each in leaves if each not in inputs)], [length]
    )
    chosen_operations.simplify(graph)
    return graph.outputs[0]


@rule(host.Alloc, host.AllocEmpty)
def _alloc(division, node):
    first = 1 if isinstance(node.op, host.Alloc) else 0
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


@rule(host.ARange)
def _arange(division, node):
    start, stop, step = map(division.of, node.inputs)
    constants = [number(node.inputs[0]), number(node.inputs[2])]
    is_each_row = stop.kind == LENGTH and counts_rows(node.outputs[0].dtype)
    if is_each_row and constants == [0, 1]:
        new = [start.variable, stop.variable, step.variable]
        return division.apply(node, new, POSITIONS, 0, stop.exact)
    return division.unruled(node)


@rule(host.Join)
def _join(division, node):
    axis, arrays = joined(node)
    axis, before = number(axis), node.inputs[: -len(arrays)]
    values = [division.of(each) for each in arrays]
    kinds = {value.kind for value in values}
    if SHAPE in kinds and kinds <= {SHAPE, SAME} and [v.kind for v in values].count(SHAPE) == 1:
        return [_join_shapes(division, node, values)]
    dtype = node.outputs[0].dtype
    if kinds == {PART} and all(keeps_sums(value.variable, dtype) for value in values):
        return division.apply(node, [*before, *(value.variable for value in values)], PART)
    if ROWS not in kinds:
        return division.unruled(node)
    axes = {value.axis for value in values}
    if kinds != {ROWS} or len(axes) > 1 or axis is None:
        division.refuse(node, "rows and something else")
    if int(axis) % node.outputs[0].ndim in axes:
        division.refuse(node, "rows, one after the other")
    exact = any(value.exact for value in values)
    return division.apply(node, [*before, *(v.variable for v in values)], ROWS, axes.pop(), exact)


def _join_shapes(division, node, values):
    before, (_, arrays) = 0, joined(node)
    for each, value in zip(arrays, values):
        if value.kind == SHAPE:
            break
        length = vector_length(each)
        if length is None:
            division.refuse(node, "shapes of unknown length")
        before += length
    axis = map(division.of, node.inputs[: -len(arrays)])
    [new] = division.of_length(node, [*axis, *values])
    return new._replace(axis=before + value.axis, exact=value.exact)


@rule(host.Split)
def _split(division, node):
    value = division.of(node.inputs[0])
    if value.kind not in (ROWS, PART):
        return division.unruled(node)
    if value.kind == ROWS and axis_of(node) in (None, value.axis):
        division.refuse(node)
    rest = [division.same(each) for each in node.inputs[1:]]
    return division.apply(node, [value.variable, *rest], value.kind, value.axis, value.exact)
