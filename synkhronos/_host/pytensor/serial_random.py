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
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.random.op import RandomVariable
from pytensor.tensor.shape import Reshape, Shape, Shape_i
from pytensor.tensor.subtensor import Subtensor, indices_from_subtensor

from synkhronos._host.pytensor.graph import RankOperation, rows_of_ranks

_ADVICE = (
    "Each rank can take its rows of random numbers only if axis 0 of their size is x.shape[0] of an"
    " input, as in size=x.shape, and no other axis depends on it."
)


def share(size):
    """Return the number of rows on all ranks, and the first and last of this rank."""
    counts, rank = rows_of_ranks()
    if counts is None or not size[0]:
        return size[0], 0, size[0]
    mine = counts[rank]
    if size[0] != (mine or 1):  # a rank without rows computes one, with weight 0
        raise ValueError(
            f"serial_random: random numbers of size {tuple(map(int, size))} were asked for on a "
            f"rank with {mine} rows. Axis 0 of the size must be that of the rows of an input."
        )
    begin = sum(counts[:rank]) if mine else 0
    return sum(counts), begin, begin + size[0]


class WholeSize(RankOperation):
    """The size of the random numbers of all ranks, from the size of those of this rank."""

    __props__ = ()

    def make_node(self, size):
        """Return the node."""
        return Apply(self, [size], [size.type()])

    def perform(self, node, inputs, output_storage):
        """Replace the length of axis 0."""
        whole = np.array(inputs[0])
        whole[0] = share(inputs[0])[0]
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
        _, begin, end = share(size)
        output_storage[0][0] = numbers[begin:end]

    def infer_shape(self, node, shapes):
        """Return the shape of the numbers, with as many rows as this rank has."""
        return [(node.inputs[1][0], *shapes[0][1:])]


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
    rows = _Rows(scattered)
    new = {}  # variable -> the one in its place
    for node in io_toposort([], expressions):
        _refuse_draws_inside(node)
        inputs = [new.get(v, v) for v in node.inputs]
        if isinstance(node.op, RandomVariable):
            if rows.are_drawn_by(node):
                size, inputs[1] = inputs[1], WholeSize()(inputs[1])
                state, numbers = node.clone_with_new_inputs(inputs).outputs
                new.update(zip(node.outputs, [state, OwnRows()(numbers, size)]))
                continue
        else:
            rows.follow(node)
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


class _Rows:
    """Variables that differ between ranks, because they are computed from their rows."""

    def __init__(self, scattered):
        self._own = {*scattered}
        self._moved = set()  # those of which axis 0 may not be that of the rows

    def follow(self, node):
        """Add the outputs of a node that is given some of these variables."""
        is_other_length = self._axis_of(node.outputs[0]) not in (None, 0)
        if is_other_length or not self._own.intersection(node.inputs):
            return
        self._own.update(node.outputs)
        moves = False
        if isinstance(node.op, Reshape):
            moves = self._axis_of(_lengths(node.inputs[1])[0]) != 0
        elif isinstance(node.op, DimShuffle):
            moves = node.op.new_order[:1] != (0,)
        if moves or self._moved.intersection(node.inputs):
            self._moved.update(node.outputs)

    def are_drawn_by(self, node):
        """Return whether axis 0 of the numbers that a node draws is the rows.

        Raises ``ValueError`` if that is unclear, or if the ranks would draw other numbers.
        """
        _, size, *parameters = node.inputs
        if self._own.intersection(parameters):
            raise ValueError(
                f"serial_random: the parameters of {node.op} depend on the rows of an input, "
                "and each rank has only some of them. Draw uniform numbers, and compute the "
                "others from them."
            )
        if size not in self._own:
            return False
        first, *others = _lengths(size)
        is_right = self._axis_of(first) == 0 and not self._own.intersection(others)
        is_right = is_right or isinstance(getattr(_without_casts(size).owner, "op", None), Shape)
        if not is_right:
            raise ValueError(f"serial_random: {node.op} draws numbers of size {size}. {_ADVICE}")
        self._own.add(node.outputs[1])
        return True

    def _axis_of(self, length):
        """Return the axis of which a variable is the length; None for another, or if unclear."""
        node, axis = length.owner, None
        if node is not None and isinstance(node.op, Shape_i):
            [of], axis = node.inputs, node.op.i
        elif node is not None and isinstance(node.op, Subtensor):
            shape = node.inputs[0].owner
            if shape is None or not isinstance(shape.op, Shape):
                return None
            [of] = shape.inputs
            [index] = indices_from_subtensor(node.inputs[1:], node.op.idx_list)
            if not isinstance(index, Constant):
                return None
            axis = int(index.data)
        if axis is None or of not in self._own or (axis and of in self._moved):
            return None
        return axis % of.ndim


def _lengths(size):
    """Return the lengths of which a size is made; the size itself if that is not known."""
    size = _without_casts(size)
    if size.owner is not None and isinstance(size.owner.op, MakeVector):
        return [_without_casts(length) for length in size.owner.inputs]
    return [size]


def _without_casts(variable):
    while variable.owner is not None and (
        isinstance(variable.owner.op, (ScalarFromTensor, TensorFromScalar))
        or (isinstance(variable.owner.op, Elemwise) and len(variable.owner.inputs) == 1)
    ):
        variable = variable.owner.inputs[0]
    return variable
