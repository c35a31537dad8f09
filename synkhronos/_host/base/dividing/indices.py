"""Rules of indexing: ranks select rows of what all of them have, and never rows by their number."""

from synkhronos._host.base import chosen_library as host
from synkhronos._host.base.chosen_library import Variable, indices_of, io_toposort, tensor
from synkhronos._host.base.dividing import chosen_operations
from synkhronos._host.base.dividing.chosen_operations import all_reduce, is_array_variable, scalar
from synkhronos._host.base.dividing.division import Value, ending, rule, vector_length
from synkhronos._host.base.dividing.shapes import lengths_taken
from synkhronos._host.base.functions import axis_of, copied, number
from synkhronos._host.base.kinds import LENGTH, PART, POSITIONS, ROWS, SAME, SHAPE, STREAM
from synkhronos._host.base.rows import sliced_minibatch

MASK = "Multiply by the mask in place of a selection: (mask * x).sum() / mask.sum()."
SELECT = "Select them before the call, or with synkhronos.function and its argument batch."
_ADD_ALL = "If no two indices are equal, leave out ignore_duplicates."


def _axis_after(division, node, axis):
    """Return the axis of rows after basic indexing; refuse indices of the rows."""
    indices = node.op.idx_list
    if axis < len(indices) and indices[axis] != slice(None, None, None):
        if axis == 0 and node.outputs[0] in division.loops:
            division.refuse_steps(division.loops[node.outputs[0]])
        division.refuse(node, "rows that are selected by their number", SELECT)
    return axis - sum(not isinstance(each, slice) for each in indices[:axis])


@rule(host.Subtensor)
def _subtensor(division, node):
    value = division.of(node.inputs[0])
    if value.kind == SHAPE:
        return _subtensor_of_shape(division, node, value)
    if value.kind == SAME and not division.scatters:
        bounds = _bounds_of_minibatch(division, node)
        if bounds is not None:
            begin, end = division.rows_of(*bounds, value.variable)
            others = [slice(None)] * (node.inputs[0].ndim - 1)
            return [Value(value.variable[(slice(begin, end), *others)], ROWS, exact=True)]
    if value.kind not in (ROWS, PART, STREAM):
        return division.unruled(node)
    rest = [division.same(each) for each in node.inputs[1:]]
    axis = _axis_after(division, node, value.axis) if value.kind == ROWS else 0
    return division.apply(node, [value.variable, *rest], value.kind, axis, value.exact)


def _bounds_of_minibatch(division, node):
    """Return the bounds of ``data[i * n : (i + 1) * n]``, for shared data and an input i."""
    first, *others = indices_of(node)
    bounds, _ = sliced_minibatch(node, set(division.inputs))
    is_plain = bounds and first.step is None and all(each == slice(None) for each in others)
    return bounds if is_plain else None


def _subtensor_of_shape(division, node, value):
    chosen, is_slice = lengths_taken(node, vector_length(node.inputs[0]))
    if chosen is None:
        return division.unruled(node)
    [mine] = division.apply(node, [value.variable, *node.inputs[1:]])
    if value.axis not in chosen:
        return [mine]
    [total] = division.apply(node, [value.total, *node.inputs[1:]])
    kind, axis = (SHAPE, chosen.index(value.axis)) if is_slice else (LENGTH, 0)
    return [value._replace(variable=mine.variable, kind=kind, axis=axis, total=total.variable)]


@rule(host.IncSubtensor)
def _inc_subtensor(division, node):
    x, y = map(division.of, node.inputs[:2])
    if y.kind == STREAM and x.kind == SAME:  # a scan's first state, put beside the others
        new = [x.variable, y.variable, *map(division.same, node.inputs[2:])]
        return division.apply(node, new, STREAM)
    if ROWS not in (x.kind, y.kind):
        return add_to(division, node, x, y, is_linear=not node.op.set_instead_of_inc)
    if x.kind != ROWS:
        division.refuse(node, f"rows and {node.inputs[0]}, which has a fixed number of rows")
    axis = _axis_after(division, node, x.axis)
    n_ints = sum(not isinstance(each, slice) for each in node.op.idx_list)
    place = axis - (node.inputs[0].ndim - n_ints - node.inputs[1].ndim)
    new = placed(division, node, y, place)
    division.keep_equal(node.inputs[:2])
    rest = [division.same(each) for each in node.inputs[2:]]
    return division.apply(node, [x.variable, new, *rest], ROWS, x.axis, x.exact)


def placed(division, node, y, place):
    """Return what is written to an array with rows; its own axis of rows must be `place`."""
    new = division.given(node.inputs[1], ROWS)
    if y.kind != ROWS:
        division.refuse_length(node, node.inputs[1], place)
    elif y.axis != place:
        division.refuse(node, "rows that lie along different axes")
    return new


def add_to(division, node, x, y, is_linear):
    """Add parts, or values that are the same, to items of an array that has no rows."""
    if y.kind == PART and node.inputs[1].dtype == node.outputs[0].dtype:
        rest = [division.same(each) for each in node.inputs[2:]]
        if (x.kind == PART and is_linear) or (x.kind == SAME and number(node.inputs[0]) == 0):
            dtype = scalar.upcast(x.variable.dtype, y.variable.dtype)
            new = [tensor.cast(each.variable, dtype) for each in (x, y)]
            return division.apply(node, [*new, *rest], PART)
    return division.unruled(node)


def take(division, node):
    """Take rows, or items along axis 0, by a vector of numbers."""
    x, indices = map(division.of, node.inputs)
    if x.kind == ROWS and x.axis > 0:
        rest = division.same(node.inputs[1])
        return division.apply(node, [x.variable, rest], ROWS, x.axis, x.exact)
    if x.kind == ROWS and indices.kind == POSITIONS:
        division.keep_equal(node.inputs)
        return division.apply(node, [x.variable, indices.variable], ROWS, 0, indices.exact)
    if indices.kind == ROWS and x.kind != ROWS:
        whole = division.same(node.inputs[0])
        return division.apply(node, [whole, indices.variable], ROWS, 0, indices.exact)
    if x.kind == PART:
        return division.apply(node, [x.variable, division.same(node.inputs[1])], PART)
    return division.unruled(node)


def nonzero(division, node):
    """Refuse to number the rows that a mask selects."""
    if division.of(node.inputs[0]).kind == ROWS:
        division.refuse(node, "a mask of rows", MASK)
    return division.unruled(node)


def take_items(division, node):
    """Take items by arrays of numbers, one array for each of the first axes."""
    x, indices = division.of(node.inputs[0]), node.inputs[1:]
    values = [division.of(each) for each in indices]
    if {x.kind, *(value.kind for value in values)} <= {SAME, PART, LENGTH, SHAPE}:
        return division.unruled(node)
    axis = _axis_of_indices(division, node, x, indices, values)
    division.keep_equal(node.inputs)
    new = [division.given(each, ROWS, POSITIONS) for each in indices]
    whole = division.given(node.inputs[0], ROWS)
    exact = x.exact or any(value.exact for value in values)
    return division.apply(node, [whole, *new], ROWS, axis, exact)


@ending(host.AdvancedSubtensor)
def _sorted_back(node):
    """Find the gradient of a sort, which puts sorted items back in their first order."""
    gradient, *indices = node.inputs
    if len(indices) != gradient.ndim or not all(isinstance(each, Variable) for each in indices):
        return None
    sorts = [n for n in io_toposort([gradient], indices) if isinstance(n.op, host.ArgSortOp)]
    first = [n.inputs[0].owner for n in sorts if n.inputs[0].owner in sorts]
    if not first:
        return None
    leaves = [first[-1].inputs[0], gradient]
    axis = axis_of(first[-1])
    if axis is None or leaves[0].ndim != gradient.ndim:
        return None
    # Compare the nodes with those that the library itself makes for this gradient.
    expected = chosen_operations.gradient_of_sort(first[-1], gradient)
    if not host.equal_computations(node.outputs, [expected], leaves, leaves):
        return None
    others = [each for each in io_toposort(leaves, node.outputs) if each is not node]
    return others, lambda division: _sort_back(division, node, leaves, axis)


def _sort_back(division, node, leaves, axis):
    """Sort each row back on its rank; return None if the sort goes along the axis of rows."""
    values = [division.of(each) for each in leaves]
    axes = {value.axis if value.kind == ROWS else None for value in values}
    if len(axes) > 1 or axes & {None, axis % node.outputs[0].ndim}:
        return None
    division.keep_equal(leaves)
    [new] = copied(node.outputs, {each: v.variable for each, v in zip(leaves, values)})
    exact, times = any(value.exact for value in values), division.times_of(node, leaves)
    return {node.outputs[0]: Value(new, ROWS, *axes, exact, times=times)}


def _axis_of_indices(division, node, x, indices, values):
    """Return the axis of rows in the items that indices select; refuse what has no rule."""
    if not all(isinstance(each, Variable) and is_array_variable(each) for each in indices):
        division.refuse(node)
    ndim, axes = max(each.ndim for each in indices), set()
    pairs = list(zip(indices, values))
    if x.kind == ROWS:  # each row selects items of its own
        if x.axis or values[0].kind != POSITIONS or ndim != 1:
            division.refuse(node)
        pairs, axes = pairs[1:], {0}
    if any(value.kind == POSITIONS for _, value in pairs):
        division.refuse(node)
    axes |= {value.axis + ndim - each.ndim for each, value in pairs if value.kind == ROWS}
    if len(axes) != 1:
        division.refuse(node, "rows that lie along different axes")
    [axis] = axes
    for each, value in pairs:
        place = axis - (ndim - each.ndim)
        if value.kind != ROWS:
            division.refuse_length(node, each, place)
    return axis


def add_to_items(division, node):
    """Add to items, or set them, by arrays of numbers, one for each of the first axes."""
    x, y, *values = map(division.of, node.inputs)
    if ROWS not in {x.kind, y.kind, *(value.kind for value in values)}:
        return add_to(division, node, x, y, is_linear=not node.op.set_instead_of_inc)
    indices = node.inputs[2:]
    axis = _axis_of_indices(division, node, x, indices, values)
    division.keep_equal(node.inputs)
    new = [division.given(each, ROWS, POSITIONS) for each in indices]
    ndim = max(each.ndim for each in indices) + node.inputs[0].ndim - len(indices)
    place = axis - (ndim - node.inputs[1].ndim)
    added = placed(division, node, y, place)
    if x.kind == ROWS:
        return division.apply(node, [x.variable, added, *new], ROWS, 0, x.exact)
    if node.op.set_instead_of_inc:
        division.refuse(node, "rows, where a later one replaces an earlier one")
    if getattr(node.op, "ignore_duplicates", False):
        division.refuse(node, "rows, of which it adds only the last one to each item", _ADD_ALL)
    whole = division.same(node.inputs[0])
    if number(node.inputs[0]) == 0:
        return division.apply(node, [whole, added, *new], PART)
    [part] = division.apply(node, [tensor.zeros_like(whole), added, *new], PART)
    return [Value(whole + all_reduce(part.variable, "sum"))]
