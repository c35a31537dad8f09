"""Random numbers of serial PyTensor: each rank draws those of all rows, and takes those of its own.

    state, x.shape ──▶ draw ──▶ numbers                                as the user writes it
    state, x.shape ──▶ WholeSize ──▶ draw ──▶ OwnRows ──▶ numbers      as it is compiled

The state is equal on all ranks, and every rank advances it by the draws of the whole minibatch. In
a plain PyTensor function both operations return what they get.
"""

import numpy as np
from pytensor.graph.basic import Apply, Constant
from pytensor.graph.op import HasInnerGraph
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors, io_toposort
from pytensor.tensor.basic import MakeVector, ScalarFromTensor, TensorFromScalar
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.random.op import RandomVariable
from pytensor.tensor.shape import Reshape, Shape, Shape_i
from pytensor.tensor.subtensor import Subtensor, indices_from_subtensor

from synkhronos._host.base.draws import OwnVariables, drawn_rows
from synkhronos._host.pytensor.graph import RankOperation
from synkhronos._machine.deep_recursion import recurses_deep


class WholeSize(RankOperation):
    """The size of the random numbers of all ranks, from the size of those of this rank."""

    __props__ = ()

    def make_node(self, size):
        """Return the node."""
        return Apply(self, [size], [size.type()])

    def perform(self, node, inputs, output_storage):
        """Replace the length of axis 0."""
        whole = np.array(inputs[0])
        whole[0] = drawn_rows(inputs[0])[0]
        output_storage[0][0] = whole

    def infer_shape(self, node, shapes):
        """Return the shape of the size."""
        return shapes


class OwnRows(RankOperation):
    """The rows of this rank, of the random numbers of all ranks."""

    __props__ = ()

    view_map = {0: [0]}  # noqa: RUF012 - as PyTensor has it

    def make_node(self, numbers, size):
        """Return the node; `size` is the size on this rank."""
        return Apply(self, [numbers, size], [numbers.type()])

    def perform(self, node, inputs, output_storage):
        """Take the rows."""
        numbers, size = inputs
        _, begin, end = drawn_rows(size)
        output_storage[0][0] = numbers[begin:end]

    def infer_shape(self, node, shapes):
        """Return the shape of the numbers, with as many rows as this rank has."""
        return [(node.inputs[1][0], *shapes[0][1:])]


@recurses_deep
def draws_of_all_rows(scattered, outputs, updates, kwargs):
    """Return outputs, updates and keyword arguments of a function that draws as serial PyTensor.

    Raises ``ValueError`` for random numbers that can't be drawn so.

    Parameters
    ----------
    scattered : list of variable
        The inputs and shared variables of which each rank has other rows.
    outputs, updates, kwargs
        As for ``pytensor.function``.
    """
    givens = kwargs.get("givens") or ()
    replace = dict(givens.items() if hasattr(givens, "items") else givens)
    values = [target.type.filter_variable(value) for target, value in updates]
    left_out = kwargs.get("no_default_updates") or ()
    given, defaults = {target for target, _ in updates}, {}
    while True:
        expressions = [*outputs, *values, *defaults.values()]
        if replace:
            expressions = clone_replace(expressions, replace)
        known = {*given, *defaults, *(() if left_out is True else left_out)}
        more = {} if left_out is True else _default_updates(expressions, known)
        if not more:
            break
        defaults.update(more)
    new = _rebuilt(expressions, {*scattered})
    targets = [*(target for target, _ in updates), *defaults]
    kwargs = {**kwargs, "givens": None}
    return new[: len(outputs)], list(zip(targets, new[len(outputs) :])), kwargs


def _default_updates(expressions, known):
    """Return the default updates of the variables of expressions, but for known ones, as a dict."""
    return {
        variable: variable.type.filter_variable(variable.default_update)
        for variable in dict.fromkeys(ancestors(expressions))
        if getattr(variable, "default_update", None) is not None and variable not in known
    }


def _rebuilt(expressions, scattered):
    """Return expressions with draws of all rows."""
    own = _OwnVariables(scattered)
    new = {}  # variable -> the one in its place
    for node in io_toposort([], expressions):
        _refuse_draws_inside(node)
        inputs = [new.get(v, v) for v in node.inputs]
        if isinstance(node.op, RandomVariable):
            if own.are_drawn_by(node):
                size, inputs[1] = inputs[1], WholeSize()(inputs[1])
                state, numbers = node.clone_with_new_inputs(inputs).outputs
                new.update(zip(node.outputs, [state, OwnRows()(numbers, size)]))
                continue
        else:
            own.follow(node)
        if any(now is not before for now, before in zip(inputs, node.inputs)):
            new.update(zip(node.outputs, node.clone_with_new_inputs(inputs).outputs))
    return [new.get(v, v) for v in expressions]


def _refuse_draws_inside(node):
    """Raise ValueError for random numbers that are drawn inside of a scan or OpFromGraph."""
    inner = node.op.inner_outputs if isinstance(node.op, HasInnerGraph) else ()
    for variable in ancestors(inner):
        if variable.owner is not None and isinstance(variable.owner.op, RandomVariable):
            raise ValueError(
                f"serial_random: random numbers are drawn inside of {node.op}, where ranks can't "
                "take their rows. Draw them before it, and give them to it as a sequence."
            )


class _OwnVariables(OwnVariables):
    """Variables that differ between ranks, in graphs of PyTensor."""

    advice = (
        "Each rank can take its rows of random numbers only if axis 0 of their size is x.shape[0] "
        "of an input, as in size=x.shape, and no other axis depends on it."
    )

    elementwise, shuffle, reduction = Elemwise, DimShuffle, CAReduce

    def moves_rows(self, node):
        if isinstance(node.op, Reshape):
            return self.axis_of(self.lengths(node.inputs[1])[0]) != 0
        return isinstance(node.op, DimShuffle) and node.op.new_order[:1] != (0,)

    def lengths(self, size):
        size = _without_casts(size)
        if size.owner is not None and isinstance(size.owner.op, MakeVector):
            return [_without_casts(length) for length in size.owner.inputs]
        return [size]

    def is_product(self, op):
        return isinstance(getattr(op, "core_op", op), Dot)

    def shaped(self, size):
        node = _without_casts(size).owner
        return node.inputs[0] if node is not None and isinstance(node.op, Shape) else None

    def measured(self, length):
        node = length.owner
        if node is not None and isinstance(node.op, Shape_i):
            return node.inputs[0], node.op.i
        if node is not None and isinstance(node.op, Subtensor):
            shape = node.inputs[0].owner
            if shape is None or not isinstance(shape.op, Shape):
                return None, None
            [measured] = shape.inputs
            [index] = indices_from_subtensor(node.inputs[1:], node.op.idx_list)
            if isinstance(index, Constant):
                return measured, int(index.data)
        return None, None


def _without_casts(variable):
    while variable.owner is not None and (
        isinstance(variable.owner.op, (ScalarFromTensor, TensorFromScalar))
        or (isinstance(variable.owner.op, Elemwise) and len(variable.owner.inputs) == 1)
    ):
        variable = variable.owner.inputs[0]
    return variable
