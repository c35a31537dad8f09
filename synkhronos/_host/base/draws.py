"""Random numbers that all ranks draw alike, with equal states, and the rows that each rank takes.

A rank takes rows of what it draws only if the numbers have a row for each row of the inputs:
`OwnVariables` follows the variables of a graph that differ between ranks, from node to node.
"""

from synkhronos._host.base.calls import rows_of_ranks


def keep_state_equal(variable) -> None:
    """Mark a random state: `spread_random_state` leaves it equal on all ranks."""
    variable.tag.is_equal_on_ranks = True  # pickled with the variable


def is_state_equal(variable) -> bool:
    """Return whether a random state is marked by `keep_state_equal`."""
    return getattr(variable.tag, "is_equal_on_ranks", False)


def drawn_rows(size):
    """Return the number of rows that all ranks draw, and the first and last of this rank.

    Parameters
    ----------
    size : array of int
        The size of the random numbers of this rank.
    """
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


class OwnVariables:
    """Variables that differ between ranks, because they are computed from their rows.

    Each host library has a class that derives from this one, and knows its operations.

    Parameters
    ----------
    scattered : iterable of variable
        Of these each rank has other rows.
    """

    advice: str  # for numbers whose axis 0 is not the rows, or not certainly
    elementwise: type  # operations of the library
    shuffle: type
    reduction: type

    def __init__(self, scattered):
        self._own = {*scattered}
        self._moved = set()  # those of which axis 0 may not be that of the rows
        self._elsewhere = set()  # those of which it is certainly another one, as of x.T

    def follow(self, node):
        """Add the outputs of a node that is given some of these variables."""
        is_other_length = self.axis_of(node.outputs[0]) not in (None, 0)
        if is_other_length or not self._own.intersection(node.inputs):
            return
        if self._has_other_rows(node):
            self._elsewhere.update(node.outputs)
        self._own.update(node.outputs)
        if self.moves_rows(node) or self._moved.intersection(node.inputs):
            self._moved.update(node.outputs)

    def are_drawn_by(self, node):
        """Return whether axis 0 of the numbers that a node draws is the rows; if so, note them.

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
        first, *others = self.lengths(size)
        is_right = self.axis_of(first) == 0 and not self._own.intersection(others)
        if not is_right and self.shaped(size) in (None, *self._elsewhere):
            raise ValueError(
                f"serial_random: {node.op} draws numbers of size {size}. {self.advice}"
            )
        self._own.add(node.outputs[1])
        return True

    def axis_of(self, length):
        """Return the axis of which a variable is the length; None for another, or if unclear."""
        measured, axis = self.measured(length)
        is_unclear = (axis and measured in self._moved) or measured in self._elsewhere
        if measured not in self._own or is_unclear:
            return None
        return axis % measured.ndim

    def _has_other_rows(self, node):
        """Return whether axis 0 of a node's output is certainly not the rows, as of a gradient."""
        op, first = node.op, node.inputs[0]
        if self.is_product(op):
            return first.ndim == 2 and (first in self._elsewhere or first not in self._own)
        if isinstance(op, self.elementwise):
            return self._own.intersection(node.inputs) <= self._elsewhere
        if isinstance(op, self.shuffle):
            keeps = op.new_order[:1] == (0,)
        elif isinstance(op, self.reduction):
            keeps = op.axis is not None and 0 not in op.axis
        else:
            return False
        return first in self._elsewhere if keeps else first not in self._moved

    def moves_rows(self, node):
        """Return whether axis 0 of a node's output may be another one than that of its input."""
        raise NotImplementedError

    def lengths(self, size):
        """Return the lengths of which a size is made; the size itself if that is not known."""
        raise NotImplementedError

    def is_product(self, op):
        """Return whether an operation is a product of matrices."""
        raise NotImplementedError

    def shaped(self, size):
        """Return the variable of which a size is the whole shape; None if it is of none."""
        raise NotImplementedError

    def measured(self, length):
        """Return a variable and its axis, of which this is the length; None, None if unclear."""
        raise NotImplementedError
