"""Matrices of rows and a few columns as vectors, one for each column.

    join(a, b, c)[arange(n), y]     a choice among vectors: switch(y == 0, a, switch(y == 1, b, c))
    sum and max over the columns    a + b + c
    gradients: sets, splits         vectors that are added, or left out

Log-likelihoods of ordered outcomes and of mixtures are made of such matrices: of (rows, 2), when a
distribution is inflated with zeros. numba would write and read them number by number, in loops of
two or four. Operations of vectors are fused, and LLVM computes several rows at once.

A graph is rebuilt if a matrix of that kind is put together in it. Other operations get the columns
joined, as a matrix again.
"""

from __future__ import annotations

import functools
from typing import Any

import pytensor.tensor as pt
from pytensor.graph.basic import Constant
from pytensor.graph.rewriting.basic import graph_rewriter
from pytensor.raise_op import Assert
from pytensor.tensor import basic, subtensor
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.type import integer_dtypes

_MOST = 8  # columns
_NAME = "synkhronos_columns"


@graph_rewriter
def take_apart(fgraph):
    """Rebuild a graph that puts narrow matrices together from operations of their columns."""
    nodes = fgraph.toposort()
    if not any(_width(out) > 1 and _puts_together(node) for node in nodes for out in node.outputs):
        return
    columns = _Columns()
    for node in nodes:
        columns.follow(node)
    pairs = [(out, columns.rebuilt(out)) for out in fgraph.outputs]
    fgraph.replace_all_validate([pair for pair in pairs if pair[0] is not pair[1]], reason=_NAME)


def _width(variable):
    """Return the number of columns of a matrix of rows, if they are few and known, or 0."""
    shape = getattr(variable.type, "shape", ())
    is_narrow = len(shape) == 2 and shape[0] != 1 and shape[1] is not None and shape[1] <= _MOST
    return shape[1] if is_narrow else 0


def _puts_together(node):
    """Return whether a matrix consists of columns that are computed apart, or is a table of them.

    A table is computed of a vector for the rows and one for the columns.
    """
    if isinstance(node.op, basic.Join):
        return getattr(node.op, "axis", None) == 1
    if not isinstance(node.op, Elemwise) or len(node.outputs) != 1:
        return False
    kinds = {each.type.broadcastable for each in node.inputs}
    return (False, True) in kinds and (True, False) in kinds and (False, False) not in kinds


class _Columns:
    """The columns of narrow matrices, and all other variables of a graph, rebuilt."""

    def __init__(self):
        self._columns: dict[Any, list] = {}  # of matrices that are apart
        self._selected: dict[Any, list] = {}  # of matrices that stay together
        self._rebuilt: dict[Any, Any] = {}
        self._in_range: dict[Any, Any] = {}  # checked numbers of columns, by number and width
        self._fills: dict[Any, Any] = {}  # a column of equal numbers: a vector of one of them

    def follow(self, node):
        """Rebuild a node, whose inputs have been followed."""
        kind = next((each for each in type(node.op).__mro__ if each in _RULES), None)
        found = _RULES[kind](self, node) if kind else None
        if found is None and any(_width(each) for each in node.outputs):
            found = self._compute(node)
        if isinstance(found, list):
            for out, columns in zip(node.outputs, found):
                self._columns[out] = columns
        elif found is not None:
            self._rebuilt[node.outputs[0]] = found
        else:
            inputs = [self.rebuilt(each) for each in node.inputs]
            if inputs != node.inputs:
                for out, new in zip(node.outputs, node.clone_with_new_inputs(inputs).outputs):
                    self._rebuilt[out] = new

    def rebuilt(self, variable):
        """Return a variable of the new graph in place of one of the old."""
        if variable in self._columns and variable not in self._rebuilt:
            columns = [each.dimshuffle(0, "x") for each in self._columns[variable]]
            new = columns[0] if len(columns) == 1 else pt.join(1, *columns)
            self._rebuilt[variable] = new
        return self._rebuilt.get(variable, variable)

    def _of(self, matrix, width):
        """Return that many columns of a matrix, one of one column over and over."""
        found = self._columns.get(matrix) or self._selected.get(matrix)
        if found is None:
            found = self._selected[matrix] = self._select(matrix)
        return found * width if len(found) == 1 else found

    def _select(self, matrix):
        node = matrix.owner
        op = node and node.op
        if isinstance(matrix, Constant):
            return [pt.constant(each, dtype=matrix.dtype) for each in matrix.data.T]
        if isinstance(op, DimShuffle) and op.new_order == (0, "x"):
            return [self.rebuilt(node.inputs[0])]
        if isinstance(op, basic.Alloc) and node.inputs[0].type.broadcastable == (True, True):
            one = self.rebuilt(node.inputs[0]).dimshuffle(0)
            column = pt.alloc(one, self.rebuilt(node.inputs[1]))
            self._fills[column] = one
            return [column] * matrix.type.shape[1]
        new = self.rebuilt(matrix)
        if matrix.type.broadcastable[1]:
            return [new.dimshuffle(0)]
        return [new[:, k] for k in range(matrix.type.shape[1])]

    def _compute(self, node):
        """Return the columns of an elementwise operation of matrices that are apart, or None."""
        op, [out, *others] = node.op, node.outputs
        if not isinstance(op, Elemwise) or others or not _width(out):
            return None
        width = _width(out)
        are_known = any(each in self._columns for each in node.inputs)
        if width > 1 and not are_known and not _puts_together(node):
            return None
        if any(each.type.shape[1] is None for each in node.inputs):
            return None
        given = [self._of(each, width) for each in node.inputs]
        return [[self._apply(op, each) for each in zip(*given)]]

    def _apply(self, op, columns):
        others = [each for each in columns if each not in self._fills]
        if not all(each.type.broadcastable[0] for each in others):  # else none has all rows
            columns = [self._fills.get(each, each) for each in columns]
        return Elemwise(op.scalar_op)(*columns)

    def join(self, node):
        """Return the columns of all matrices."""
        if getattr(node.op, "axis", None) != 1 or not _width(node.outputs[0]):
            return None
        if not all(map(_width, node.inputs)):
            return None
        dtype = node.outputs[0].dtype
        columns = [column for each in node.inputs for column in self._of(each, 1)]
        return [[pt.cast(each, dtype) for each in columns]]

    def split(self, node):
        """Return the columns of each part."""
        matrix = node.inputs[0]
        if getattr(node.op, "axis", None) != 1 or not self._is_apart(matrix):
            return None
        if not all(map(_width, node.outputs)):
            return None
        columns = iter(self._of(matrix, 1))
        return [[next(columns) for _ in range(_width(out))] for out in node.outputs]

    def subtensor(self, node):
        """Return some columns, or a vector of one."""
        matrix = node.inputs[0]
        numbers = self._numbers(node, node.inputs[1:]) if self._is_apart(matrix) else None
        if numbers is None:
            return None
        columns = self._of(matrix, 1)
        if isinstance(numbers, int):
            return columns[numbers]
        return [[columns[k] for k in numbers]]

    def _numbers(self, node, indices):
        """Return the number of a column of all rows that is selected, or a range; or None."""
        found = subtensor.indices_from_subtensor(indices, node.op.idx_list)
        if len(found) != 2 or found[0] != slice(None):
            return None
        try:
            constants = subtensor.get_constant_idx(node.op.idx_list, (None, *indices))
        except (basic.NotScalarConstantError, TypeError):
            return None
        width = node.inputs[0].type.shape[1]
        found = range(width)[constants[1]]
        return None if found == range(0) else found

    def set_columns(self, node):
        """Return columns of which some are set, or added to."""
        matrix, new = node.inputs[:2]
        numbers = self._numbers(node, node.inputs[2:]) if _width(matrix) else None
        if isinstance(numbers, int) and new.ndim == 1:
            numbers, added = [numbers], [self.rebuilt(new)]
        elif isinstance(numbers, range) and _width(new):
            added = self._of(new, len(numbers))
        else:
            return None
        if any(each.type.broadcastable[0] for each in added):
            return None
        columns = self._blank(matrix) or list(self._of(matrix, 1))
        for k, each in zip(numbers, added):
            adds = not node.op.set_instead_of_inc and columns[k] is not None
            columns[k] = columns[k] + each if adds else each
        return [self._filled(columns, node)]

    def pick(self, node):
        """Return the column of what each row selects."""
        matrix = node.inputs[0]
        number = self._number_of_rows(node, 1) if self._is_apart(matrix) else None
        if number is None:
            return None
        columns = self._of(matrix, 1)
        picked = columns[-1]
        for k in reversed(range(len(columns) - 1)):
            picked = pt.switch(pt.eq(number, k), columns[k], picked)
        return picked if node.outputs[0].ndim == 1 else [[picked]]

    def add_picked(self, node):
        """Return columns, to which each row adds a number in one place."""
        matrix, new = node.inputs[:2]
        is_of_rows = new.ndim < 2 or new.type.broadcastable[1]
        number = self._number_of_rows(node, 2) if _width(matrix) and is_of_rows else None
        if number is None or node.op.set_instead_of_inc:
            return None
        counted = node.inputs[2].owner
        counted = counted.inputs[0].owner if isinstance(counted.op, DimShuffle) else counted
        has_all_rows = matrix.owner and counted.inputs[1] in matrix.owner.inputs
        columns = (has_all_rows and self._blank(matrix)) or list(self._of(matrix, 1))
        value = self._of(new, 1)[0] if new.ndim == 2 else self.rebuilt(new)
        for k, before in enumerate(columns):
            added = pt.switch(pt.eq(number, k), value, 0)
            columns[k] = added if before is None else before + added
        return [self._filled(columns, node)]

    def _number_of_rows(self, node, n_given):
        """Return the number that each of all rows selects: ``x[arange(n), y]``."""
        if tuple(node.op.idx_list) != (0, 1):
            return None
        rows, index = node.inputs[n_given:]
        if index.dtype not in integer_dtypes:  # a mask
            return None
        are_columns = _width(index) == 1 and _width(rows) == 1
        if not are_columns and (rows.ndim, index.ndim) != (1, 1):
            return None
        if are_columns and isinstance(rows.owner and rows.owner.op, DimShuffle):
            rows = rows.owner.inputs[0]
        counted = rows.owner
        if counted is None or not isinstance(counted.op, basic.ARange):
            return None
        begin, end, step = (getattr(each, "data", None) for each in counted.inputs)
        if (begin, end, step) != (0, None, 1):  # a number as end may be that of some rows
            return None
        number = self._of(index, 1)[0] if are_columns else self.rebuilt(index)
        width = node.inputs[0].type.shape[1]
        if (number, width) not in self._in_range:
            inside = pt.ge(number, -width) & pt.lt(number, width)
            checked = Assert(f"an index is out of bounds for {width} columns")(number, inside.all())
            found = pt.switch(pt.lt(checked, 0), checked + width, checked)
            self._in_range[number, width] = found
        return self._in_range[number, width]

    def _blank(self, matrix):
        """Return a list with None for each column, if the matrix is one of zeros; or None."""
        node = matrix.owner
        is_zero = node is not None and isinstance(node.op, basic.Alloc)
        is_zero = is_zero and isinstance(node.inputs[0], Constant) and not node.inputs[0].data.any()
        return [None] * matrix.type.shape[1] if is_zero else None

    def _filled(self, columns, node):
        dtype = node.outputs[0].dtype
        zeros = pt.zeros_like(next(each for each in columns if each is not None), dtype)
        return [zeros if each is None else pt.cast(each, dtype) for each in columns]

    def dimshuffle(self, node):
        """Return the vector of the only column."""
        [matrix] = node.inputs
        if node.op.new_order == (0,) and self._is_apart(matrix):
            return self._of(matrix, 1)[0]
        return None

    def reduce(self, node):
        """Return the reduction of all columns to one vector, or of each."""
        [matrix], op = node.inputs, node.op
        if len(node.outputs) != 1 or not self._is_apart(matrix):
            return None
        columns, axes = self._of(matrix, 1), op.axis
        dtype = node.outputs[0].dtype if op.acc_dtype is None else op.acc_dtype
        if axes == (0,):
            of_rows = op.clone(axis=(0,))
            return pt.stack([of_rows(each) for each in columns])
        together = Elemwise(op.scalar_op)
        whole = functools.reduce(together, [pt.cast(each, dtype) for each in columns])
        if axes == (1,):
            return pt.cast(whole, node.outputs[0].dtype)
        return op.clone(axis=(0,))(whole) if axes in (None, (0, 1)) else None

    def _is_apart(self, variable):
        return variable in self._columns and _width(variable) > 0


# A rule (columns, node) returns a variable in place of the only output, or a list that has for each
# output a list of columns. None leaves the node as it is.
_RULES = {
    basic.Join: _Columns.join,
    basic.Split: _Columns.split,
    subtensor.Subtensor: _Columns.subtensor,
    subtensor.IncSubtensor: _Columns.set_columns,
    subtensor.AdvancedSubtensor: _Columns.pick,
    subtensor.AdvancedIncSubtensor: _Columns.add_picked,
    DimShuffle: _Columns.dimshuffle,
    CAReduce: _Columns.reduce,
}
