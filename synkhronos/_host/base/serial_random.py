"""Random numbers of a serial program: each rank draws those of all rows, and takes its own.

    state, x.shape ──▶ draw ──▶ numbers                                as the user writes it
    state, x.shape ──▶ WholeSize ──▶ draw ──▶ OwnRows ──▶ numbers      as it is compiled

The state is equal on all ranks, and every rank advances it by the draws of the whole minibatch. In
a plain function both operations return what they get. A rank takes its rows of the numbers only if
these have a row for each row of the inputs. To see this, `_OwnVariables` follows from node to node
which variables differ between ranks.
"""

import numpy as np

from synkhronos._host.base import chosen_library as host
from synkhronos._host.base.calls import rows_of_ranks
from synkhronos._host.base.chosen_library import ancestors, indices_of, io_toposort
from synkhronos._host.base.functions import is_by, number, updates_by_default
from synkhronos._host.base.rank_operations import RankOperation, has_inside
from synkhronos._machine.deep_recursion import recurses_deep


def keep_state_equal(variable) -> None:
    """Mark a random state: `spread_random_state` leaves it equal on all ranks."""
    variable.tag.is_equal_on_ranks = True  # pickled with the variable


def is_state_equal(variable) -> bool:
    """Return whether a random state is marked by `keep_state_equal`."""
    return getattr(variable.tag, "is_equal_on_ranks", False)


def drawn_rows(size):
    """Return the number of rows that all ranks draw, and where those of this rank begin and end."""
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
        return host.Apply(self, [size], [size.type()])

    def perform(self, node, inputs, output_storage):
        whole = np.array(inputs[0])
        whole[0] = drawn_rows(inputs[0])[0]
        output_storage[0][0] = whole

    def infer_shape(self, node, shapes):
        return shapes


class OwnRows(RankOperation):
    """The rows of this rank, of size `size`, of the random numbers of all ranks."""

    __props__ = ()

    view_map = {0: [0]}  # noqa: RUF012 - as host libraries have it

    def make_node(self, numbers, size):
        return host.Apply(self, [numbers, size], [numbers.type()])

    def perform(self, node, inputs, output_storage):
        numbers, size = inputs
        _, begin, end = drawn_rows(size)
        output_storage[0][0] = numbers[begin:end]

    def infer_shape(self, node, shapes):
        return [(node.inputs[1][0], *shapes[0][1:])]


@recurses_deep
def draws_of_all_rows(scattered, outputs, updates, kwargs):
    """Return outputs, updates and keyword arguments of a function that draws as a serial one.

    `scattered` are the inputs and shared variables of which each rank has other rows.
    """
    givens = kwargs.get("givens") or ()
    replace = dict(givens.items() if hasattr(givens, "items") else givens)
    values = [target.type.filter_variable(value) for target, value in updates]
    left_out = kwargs.get("no_default_updates") or ()
    targets, defaults = {target for target, _ in updates}, {}
    while True:
        expressions = [*outputs, *values, *defaults.values()]
        if replace:
            expressions = host.clone_replace(expressions, replace)
        used = () if left_out is True else dict.fromkeys(ancestors(expressions))
        known = {*targets, *defaults, *(() if left_out is True else left_out)}
        more = updates_by_default(each for each in used if each not in known)
        if not more:
            break
        defaults.update(more)
    new = _rebuilt(expressions, {*scattered})
    pairs = zip([*(target for target, _ in updates), *defaults], new[len(outputs) :])
    return new[: len(outputs)], list(pairs), {**kwargs, "givens": []}


def _rebuilt(expressions, scattered):
    """Return expressions in which each rank draws the numbers of all rows."""
    own = _OwnVariables(scattered)
    new = {}  # variable -> the one in its place
    for node in io_toposort([], expressions):
        if has_inside(node.op, *host.DRAWS):
            raise ValueError(
                f"serial_random: random numbers are drawn inside of {node.op}, where ranks can't "
                "take their rows. Draw them before it, and give them to it as a sequence."
            )
        inputs = [new.get(v, v) for v in node.inputs]
        if isinstance(node.op, host.DRAWS):
            if own.draws_one_item_per_row(node):
                own.variables.add(node.outputs[1])
                size, inputs[1] = inputs[1], WholeSize()(inputs[1])
                state, numbers = node.clone_with_new_inputs(inputs).outputs
                new.update(zip(node.outputs, [state, OwnRows()(numbers, size)]))
                continue
        else:
            own.follow(node)
        if any(now is not before for now, before in zip(inputs, node.inputs)):
            new.update(zip(node.outputs, node.clone_with_new_inputs(inputs).outputs))
    return [new.get(v, v) for v in expressions]


class _OwnVariables:
    """Variables that differ between ranks, because they are computed from `scattered` ones."""

    def __init__(self, scattered):
        self.variables = {*scattered}
        self._moved = set()  # those whose axis 0 may not be the rows
        self._elsewhere = set()  # those whose axis 0 is certainly not the rows, such as x.T

    def follow(self, node):
        """Add the outputs of a node that is given some of these variables."""
        is_other_length = self.axis_of(node.outputs[0]) not in (None, 0)
        if is_other_length or not self.variables.intersection(node.inputs):
            return
        if self._has_other_rows(node):
            self._elsewhere.update(node.outputs)
        self.variables.update(node.outputs)
        if self._moves_rows(node) or self._moved.intersection(node.inputs):
            self._moved.update(node.outputs)

    def draws_one_item_per_row(self, node):
        """Return whether axis 0 of the numbers that a node draws is the rows; refuse if unclear."""
        _, size, *parameters = node.inputs
        if self.variables.intersection(parameters):
            raise ValueError(
                f"serial_random: the parameters of {node.op} depend on the rows of an input, "
                "and each rank has only some of them. Draw uniform numbers, and compute the "
                "others from them."
            )
        if size not in self.variables:
            return False
        first, *others = _lengths(size)
        is_right = self.axis_of(first) == 0 and not self.variables.intersection(others)
        whole = _without_casts(size)
        shaped = whole.owner.inputs[0] if is_by(whole, host.Shape) else None
        if not is_right and shaped in (None, *self._elsewhere):
            raise ValueError(
                f"serial_random: {node.op} draws numbers of size {size}. Each rank can take its "
                f"rows of random numbers only if axis 0 of their size is x.shape[0] of an input, "
                f"{host.SIZES}"
            )
        return True

    def axis_of(self, length):
        """Return the axis whose length a variable is; None if it is none, or unclear."""
        measured, axis = _measured(length)
        is_unclear = (axis and measured in self._moved) or measured in self._elsewhere
        if measured not in self.variables or is_unclear:
            return None
        return axis % measured.ndim

    def _has_other_rows(self, node):
        """Return whether axis 0 of a node's output is certainly not the rows, as of a gradient."""
        op, first = node.op, node.inputs[0]
        if isinstance(getattr(op, "core_op", op), host.Dot):
            return first.ndim == 2 and (first in self._elsewhere or first not in self.variables)
        if isinstance(op, host.Elemwise):
            return self.variables.intersection(node.inputs) <= self._elsewhere
        if isinstance(op, host.DimShuffle):
            keeps = op.new_order[:1] == (0,)
        elif isinstance(op, host.CAReduce):
            keeps = op.axis is not None and 0 not in op.axis
        else:
            return False
        return first in self._elsewhere if keeps else first not in self._moved

    def _moves_rows(self, node):
        """Return whether axis 0 of a node's output may be another one than that of its input."""
        if isinstance(node.op, host.Reshape):
            return self.axis_of(_lengths(node.inputs[1])[0]) != 0
        return isinstance(node.op, host.DimShuffle) and node.op.new_order[:1] != (0,)


def _lengths(size):
    """Return the lengths of which a size is made; the size itself if that is not known."""
    size = _without_casts(size)
    if is_by(size, host.MakeVector):
        return [_without_casts(length) for length in size.owner.inputs]
    return [size]


def _measured(length):
    """Return the variable and axis whose length this is; None, None if unclear."""
    node = length.owner
    if is_by(length, host.Shape_i):
        return node.inputs[0], node.op.i
    if is_by(length, host.Subtensor) and is_by(node.inputs[0], host.Shape) and not length.ndim:
        axis = number(*indices_of(node))
        if axis is not None:
            return node.inputs[0].owner.inputs[0], int(axis)
    return None, None


def _without_casts(variable):
    casts = host.Elemwise, host.ScalarFromTensor, host.TensorFromScalar
    while is_by(variable, *casts) and len(variable.owner.inputs) == 1:
        [variable] = variable.owner.inputs
    return variable
