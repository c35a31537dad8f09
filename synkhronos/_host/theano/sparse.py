"""Sparse matrices in functions: they travel as arrays, and graphs put them together.

    value ──▶ take_apart ──▶ data, indices, spans, length ──▶ Compose ──▶ a rank's rows
    a rank's rows ──▶ Decompose ──▶ data, indices, counts, length ──▶ put_together ──▶ value

The spans are the begin and the end, in data and indices, of each row of a CSR matrix (each column
of CSC). So some rows of the spans are some rows of the matrix, and data and indices stay whole.
"""

import numpy as np
import scipy.sparse
from theano import Apply, Op, sparse
from theano.sparse import SparseType
from theano.tensor import TensorType, lmatrix, lscalar, lvector

_MATRIX = {"csr": scipy.sparse.csr_matrix, "csc": scipy.sparse.csc_matrix}


def sparse_format(variable):
    """Return the format of a sparse variable, such as "csr"; None for any other variable."""
    return variable.type.format if isinstance(variable.type, SparseType) else None


class Compose(Op):
    """Makes a sparse matrix of its data, its indices, some of its spans, and its other length."""

    __props__ = ("format",)
    view_map = {0: [0]}  # noqa: RUF012 - Theano reads this attribute of operations

    def __init__(self, format):
        self.format = format

    def make_node(self, data, indices, spans, length):
        """Return the node that computes the matrix."""
        made = SparseType(self.format, data.dtype)()
        return Apply(self, [data, indices, spans, length], [made])

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
        outputs[0][0] = _matrix(self.format, data[chosen], indices[chosen], pointers, length)


class Decompose(Op):
    """Makes the data, the indices, the counts of each row, and the other length of a matrix."""

    __props__ = ()

    def make_node(self, matrix):
        """Return the node that computes the four arrays."""
        return Apply(
            self, [matrix], [TensorType(matrix.dtype, (False,))(), lvector(), lvector(), lscalar()]
        )

    def perform(self, node, inputs, outputs):
        """Copy the arrays out of the matrix."""
        [matrix] = inputs
        length = matrix.shape[matrix.format == "csr"]
        outputs[0][0] = np.array(matrix.data)
        outputs[1][0] = np.array(matrix.indices, np.int64)
        outputs[2][0] = np.diff(matrix.indptr).astype(np.int64)
        outputs[3][0] = np.array(length, np.int64)


def _matrix(format, data, indices, pointers, length):
    lengths = (len(pointers) - 1, int(length))
    shape = lengths if format == "csr" else lengths[::-1]
    return _MATRIX[format]((data, indices, pointers), shape=shape, copy=False)


def sparse_parts(variable):
    """Return variables for the parts of a sparse input, and the expression that composes them.

    The parts are data, indices, spans and length; the third one has a row for each row.
    """
    data = TensorType(variable.dtype, (False,))()
    parts = [data, lvector(), lmatrix(), lscalar()]
    for part, name in zip(parts, ("data", "indices", "spans", "length")):
        part.name = f"{name} of {variable}"  # messages name a variable that is not used
    return parts, Compose(variable.type.format)(*parts)


def take_apart(matrix):
    """Return the values of the parts of a sparse input."""
    pointers = matrix.indptr.astype(np.int64)
    spans = np.stack([pointers[:-1], pointers[1:]], axis=1)
    length = np.array(matrix.shape[matrix.format == "csr"], np.int64)
    return [matrix.data, matrix.indices.astype(np.int64), spans, length]


def decomposed(variable):
    """Return expressions of a sparse output's data, indices, counts and length."""
    return Decompose()(sparse.as_sparse_variable(variable))


def put_together(variable, data, indices, counts, length):
    """Return the value of a sparse output from its parts, those of several ranks joined."""
    pointers = np.concatenate([[0], np.cumsum(counts)])
    return _matrix(variable.type.format, data, indices, pointers, np.ravel(length)[0])
