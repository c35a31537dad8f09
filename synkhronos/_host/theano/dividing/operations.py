"""Operations of divided graphs: a rank's part of a slice, and the number of rows of all ranks."""

import numpy as np
from theano import gof
from theano.tensor import as_tensor_variable, lscalar

from synkhronos._arithmetic import partition
from synkhronos._host.base.calls import rows_of_ranks
from synkhronos._host.base.graph import RankOperation


class TotalRows(RankOperation):
    """The number of rows of all ranks, where each rank has the number of its own."""

    __props__ = ()

    def make_node(self, mine):
        """Return the node, for this rank's number of rows."""
        return gof.Apply(self, [as_tensor_variable(mine)], [lscalar()])

    def perform(self, node, inputs, output_storage):
        """Store the number of all rows of the running call; outside of a call, all are here."""
        counts, _ = rows_of_ranks()
        n_rows = inputs[0] if counts is None else sum(counts)
        output_storage[0][0] = np.asarray(n_rows, np.int64)

    def infer_shape(self, node, shapes):
        """Return an empty shape: it has no axes."""
        return [()]

    def connection_pattern(self, node):
        """Return that a number of rows has no gradient."""
        return [[False]]


class RowsOfRank(RankOperation):
    """The slice of an array that is this rank's part of a slice, and the number of all its rows."""

    __props__ = ()

    def make_node(self, start, stop, length):
        """Return the node, for the bounds of the slice and the length of the array."""
        inputs = [as_tensor_variable(each) for each in (start, stop, length)]
        return gof.Apply(self, inputs, [lscalar(), lscalar(), lscalar()])

    def perform(self, node, inputs, output_storage):
        """Store the bounds of the running call's rank; outside of a call, those of the slice."""
        start, stop, length = map(int, inputs)
        start, stop, _ = slice(start, stop).indices(length)
        n_rows = max(0, stop - start)
        first, end = 0, n_rows
        counts, rank = rows_of_ranks()
        if counts is not None:
            first, end = partition.share(n_rows, len(counts), rank)
        for storage, result in zip(output_storage, (start + first, start + end, n_rows)):
            storage[0] = np.asarray(result, np.int64)

    def infer_shape(self, node, shapes):
        """Return empty shapes: the outputs have no axes."""
        return [(), (), ()]

    def connection_pattern(self, node):
        """Return that numbers of rows have no gradients."""
        return [[False] * 3 for _ in node.inputs]


def rows_of_rank(start, stop, length):
    """Return the bounds of this rank's part of a slice, and the number of rows of all ranks."""
    return RowsOfRank()(start, stop, length)


def total_rows(mine):
    """Return the number of rows of all ranks, for a function that scatters its rows."""
    return TotalRows()(mine)
