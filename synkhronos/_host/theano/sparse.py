"""Operations that put sparse matrices together, and take them apart: see `base.sparse_matrices`."""

import numpy as np
from theano import Apply, Op, sparse
from theano.sparse import SparseType
from theano.tensor import TensorType, lscalar, lvector

from synkhronos._host.base.sparse_matrices import matrix_of, part_variables


class Compose(Op):
    """Makes a sparse matrix of its data, its indices, some of its spans, and its other length."""

    __props__ = ("format",)
    view_map = {0: [0]}  # noqa: RUF012 - Theano reads this attribute of operations

    def __init__(self, format):
        self.format = format

    def make_node(self, data, indices, spans, length):
        matrix = SparseType(self.format, data.dtype)()
        return Apply(self, [data, indices, spans, length], [matrix])

    def perform(self, node, inputs, outputs):
        """Compute the matrix: views of the data and indices where the spans are adjacent."""
        data, indices, spans, length = inputs
        begins, ends = spans[:, 0], spans[:, 1]
        pointers = np.zeros(len(spans) + 1, np.int64)
        np.cumsum(ends - begins, out=pointers[1:])
        if len(spans) and (begins[1:] == ends[:-1]).all():
            chosen = slice(begins[0], ends[-1])
        else:
            chosen = np.repeat(begins - pointers[:-1], ends - begins) + np.arange(pointers[-1])
        outputs[0][0] = matrix_of(self.format, data[chosen], indices[chosen], pointers, length)


class Decompose(Op):
    """Makes the data, the indices, the counts of each row, and the other length of a matrix."""

    __props__ = ()

    def make_node(self, matrix):
        return Apply(
            self, [matrix], [TensorType(matrix.dtype, (False,))(), lvector(), lvector(), lscalar()]
        )

    def perform(self, node, inputs, outputs):
        [matrix] = inputs
        length = matrix.shape[matrix.format == "csr"]
        outputs[0][0] = np.array(matrix.data)
        outputs[1][0] = np.array(matrix.indices, np.int64)
        outputs[2][0] = np.diff(matrix.indptr).astype(np.int64)
        outputs[3][0] = np.array(length, np.int64)


def sparse_parts(variable):
    """Return variables for the parts of a sparse input, and the expression that composes them."""
    parts = part_variables(variable)
    return parts, Compose(variable.type.format)(*parts)


def decomposed(variable):
    """Return expressions of a sparse output's data, indices, counts and length."""
    return Decompose()(sparse.as_sparse_variable(variable))
