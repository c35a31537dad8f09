"""Rows of minibatches in graphs: their numbers, outputs with an item for each row, and slices.

    data[Rows(index, size)] ──▶ data[numbers]        numbers: an input that is scattered

`without_row_numbers` replaces each Rows of a function by an input, which its user does not see: at
each call the master computes the row numbers from the operands of Rows.
"""

from typing import Any, List, NamedTuple

import numpy as np

from synkhronos._arithmetic import partition
from synkhronos._host.base import chosen_library as host
from synkhronos._host.base.calls import rows_of_ranks
from synkhronos._host.base.chosen_library import Constant, Variable, ancestors, tensor
from synkhronos._host.base.functions import is_by, nodes_of, swapped
from synkhronos._host.base.rank_operations import AllReduce, RankNumbers, has_inside
from synkhronos._machine.deep_recursion import recurses_deep
from synkhronos._machine.interrupts import raised_here

_COPIES = (host.DeepCopyOp, host.ViewOp)


class RowNumbers(NamedTuple):
    """The input that stands for row numbers in a function."""

    variable: Any
    operands: List[Any]  # index, size, and the length if there is one
    indexed: List[Any]  # the shared variables whose rows they are


def numbers_of_rows(index, size, length=None):
    """Return the numbers of the rows of a minibatch, an array; raise ValueError below 0."""
    if index < 0 or size < 0:
        raise ValueError(f"rows({index}, {size}) has a negative number.")
    end = (index + 1) * size
    return np.arange(index * size, end if length is None else min(end, length), dtype=np.int64)


class Rows(host.Operation):
    """The numbers of the rows of one minibatch, from index, size and perhaps the length."""

    __props__ = ()

    def make_node(self, *operands):
        operands = [tensor.as_tensor_variable(each) for each in operands]
        return host.Apply(self, operands, [tensor.lvector()])

    def perform(self, node, inputs, output_storage):
        output_storage[0][0] = numbers_of_rows(*map(int, inputs))

    def infer_shape(self, node, shapes):
        index, size, *length = node.inputs
        if not length:
            return [(size,)]
        return [(tensor.maximum(tensor.minimum(size, length[0] - index * size), 0),)]

    def connection_pattern(self, node):
        """Return that row numbers have no gradient."""
        return [[False] for _ in node.inputs]


def total_rows(mine):
    """Return the running call's number of rows; outside of a call, `mine`."""
    counts, _ = rows_of_ranks()
    return mine if counts is None else sum(counts)


class TotalRows(RankNumbers):
    """The number of rows of all ranks, computed from this rank's."""

    def make_node(self, mine):
        return host.Apply(self, [tensor.as_tensor_variable(mine)], [tensor.lscalar()])

    def perform(self, node, inputs, output_storage):
        output_storage[0][0] = np.asarray(total_rows(inputs[0]), np.int64)


def bounds_of_rank(start, stop, length):
    """Return [start, stop] of this rank's part of a slice, and the number of rows of the slice."""
    start, stop, _ = slice(start, stop).indices(length)
    n_rows = max(0, stop - start)
    first, end = 0, n_rows
    counts, rank = rows_of_ranks()
    if counts is not None:
        first, end = partition.share(n_rows, len(counts), rank)
    return np.array([start + first, start + end, n_rows], np.int64)


class RowsOfRank(RankNumbers):
    """The bounds of this rank's part of a slice, and the number of rows of the slice."""

    def make_node(self, start, stop, length):
        inputs = [tensor.as_tensor_variable(each) for each in (start, stop, length)]
        return host.Apply(self, inputs, [tensor.lscalar(), tensor.lscalar(), tensor.lscalar()])

    def perform(self, node, inputs, output_storage):
        for storage, result in zip(output_storage, bounds_of_rank(*map(int, inputs))):
            storage[0] = np.asarray(result)


@recurses_deep
def without_row_numbers(expressions, givens, inputs):
    """Return expressions with inputs in place of row numbers, a RowNumbers for each, and a bool.

    Equal row numbers get one input. The bool says whether the expressions depended on all `inputs`:
    a host library would call one unused on which only row numbers depend. `givens`, pairs
    (variable, replacement), are applied to the operands of row numbers.
    """
    variables = [each for each in expressions if isinstance(each, Variable)]
    equal = {}
    used, nodes = {*ancestors(variables)}, nodes_of(variables)
    for node in nodes:
        if isinstance(node.op, Rows):
            key = tuple(int(x.data) if isinstance(x, Constant) else x for x in node.inputs)
            equal.setdefault(key, []).append(node.outputs[0])
        elif has_inside(node.op, Rows):
            whole = "a scan" if isinstance(node.op, host.Scan) else node.op
            raise ValueError(
                f"rows() is inside of {whole}, where it can't be divided over the ranks. Call it "
                "before, and give what it selects."
            )
    if not equal:
        return expressions, [], True
    numbers, replace = [], {}
    for same in equal.values():
        hidden = tensor.lvector()
        replace.update(dict.fromkeys(same, hidden))
        operands = same[0].owner.inputs
        needed = set(ancestors(operands))
        replaced = {variable: value for variable, value in givens if variable in needed}
        operands = host.clone_replace(operands, replace=replaced) if replaced else list(operands)
        numbers.append(RowNumbers(hidden, operands, _indexed_by(nodes, same)))
    return swapped(expressions, replace), numbers, all(each in used for each in inputs)


def _indexed_by(nodes, numbers):
    """Return the shared variables, cast or not, whose rows the numbers select."""
    shared = []
    for node in nodes:
        if host.taken_rows(node) in numbers:
            whole = node.inputs[0]
            while whole.owner is not None and _keeps_rows(whole.owner):
                [whole] = whole.owner.inputs
            if isinstance(whole, host.SharedVariable):
                shared.append(whole)
    return list(dict.fromkeys(shared))


def _keeps_rows(node):
    is_move = type(node.op).__name__ == "HostFromGpu"
    return is_move or (isinstance(node.op, host.Elemwise) and len(node.inputs) == 1)


def compile_number(expression, inputs):
    """Return a function that computes an integer from the values of all inputs, in Python."""
    if isinstance(expression, Constant):
        value = int(expression.data)
        return lambda values: value
    if isinstance(expression, host.SharedVariable):
        storage = expression.container.storage
        return lambda values: int(storage[0])
    if expression in inputs:
        position = inputs.index(expression)
        return lambda values: int(values[position])
    needed = [each for each in ancestors([expression]) if each.owner is None]
    for each in needed:
        if not isinstance(each, (Constant, host.SharedVariable)) and each not in inputs:
            raise ValueError(f"depends on {each}")  # the caller adds the subject
    positions = [position for position, each in enumerate(inputs) if each in needed]
    used = [inputs[position] for position in positions]
    function = host.compile_serially(used, expression, mode=host.Mode("py", "fast_compile"))
    return lambda values: int(function(*[values[position] for position in positions]))


def divides(expressions):
    """Return whether expressions contain Rows or an AllReduce."""
    variables = [each for each in expressions if isinstance(each, Variable)]
    return any(isinstance(node.op, (Rows, AllReduce)) for node in nodes_of(variables))


def input_of_values(function, n_inputs):
    """Return an input of which a compiled function uses more than the shape; else None."""
    fgraph = function.maker.fgraph
    for each in fgraph.inputs[:n_inputs]:
        if not all(_measures(*client) for client in host.clients_of(fgraph, each)):
            return each
    return None


def _measures(client, position):
    """Return whether a node uses the shape of its input at a position, and nothing else of it."""
    op = getattr(client, "op", None)
    is_fill = isinstance(op, host.Elemwise) and type(op.scalar_op).__name__ == "Second"
    return isinstance(op, (host.Shape_i, host.Shape)) or (is_fill and position == 0)


def axes_of_rows(function, rows_of):
    """Return for each output of a compiled function its axes that grow with the rows.

    `rows_of` maps positions of inputs, and shared variables, to their axis of rows. An axis whose
    length the library could not infer from shapes is left out.
    """
    fgraph = function.maker.fgraph
    shapes = getattr(fgraph, "shape_feature", None)
    if shapes is None:  # a mode without optimizations
        return [() for _ in fgraph.outputs]
    axis_of = {}
    for position, (spec, variable) in enumerate(zip(function.maker.inputs, fgraph.inputs)):
        axis_of[variable] = rows_of.get(spec.variable, rows_of.get(position))
    # The last operation of an output may be a copy, which has no inferred shape.
    computed = [x.owner.inputs[0] if is_by(x, *_COPIES) else x for x in fgraph.outputs]
    return [
        tuple(
            axis
            for axis in range(getattr(output, "ndim", 0))
            if not output.type.broadcastable[axis] and _counts_rows(shapes, output, axis, axis_of)
        )
        for output in computed
    ]


def _counts_rows(shapes, output, axis, axis_of):
    try:
        length = shapes.get_shape(output, axis)
    except raised_here(Exception):  # an operation's own inference
        return False
    return any(
        isinstance(node.op, host.Shape_i) and axis_of.get(node.inputs[0]) == node.op.i
        for node in nodes_of([length])
    )


def sliced_by_inputs(expressions, inputs):
    """Return shared variables, such as ``data``, of slices ``data[i * n : (i + 1) * n]``."""
    inputs, shared = set(inputs), []
    for node in nodes_of([each for each in expressions if isinstance(each, Variable)]):
        if isinstance(node.op, host.Subtensor):
            shared += sliced_minibatch(node, inputs)[1]
    return list(dict.fromkeys(shared))


def sliced_minibatch(node, inputs):
    """Return the bounds of a Subtensor, and the shared variables that it slices.

    These are None and [] unless both bounds depend on inputs, and the array does not.
    """
    rows = host.indices_of(node)[0]
    bounds = [rows.start, rows.stop] if isinstance(rows, slice) else [None]
    for each in bounds:
        if not isinstance(each, Variable) or inputs.isdisjoint(ancestors([each])):
            return None, []
    sliced = ancestors([node.inputs[0]])
    shared = [each for each in sliced if isinstance(each, host.SharedVariable)]
    return (bounds, shared) if shared and inputs.isdisjoint(sliced) else (None, [])
