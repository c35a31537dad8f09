"""Sparse matrices in functions: they travel as arrays, and graphs put them together.

    value ──▶ take_apart ──▶ data, indices, spans, length ──▶ sparse_parts ──▶ a rank's rows
    a rank's rows ──▶ decomposed ──▶ data, indices, counts, length ──▶ put_together ──▶ value

The spans say where each row of a CSR matrix (each column of CSC) begins and ends in data and
indices. To select rows of the matrix, select rows of the spans; data and indices stay whole.
`sparse_parts` and `decomposed` are in the folder of each host library.
"""

import numpy as np
import scipy.sparse

from synkhronos._host.base.chosen_library import tensor

_MATRIX = {"csr": scipy.sparse.csr_matrix, "csc": scipy.sparse.csc_matrix}


def sparse_format(variable):
    """Return the format of a sparse variable, such as "csr"; None for any other variable."""
    return getattr(variable.type, "format", None)


def part_variables(variable):
    """Return variables for the parts of a sparse input; the spans have a row for each row."""
    data = tensor.vector(dtype=variable.dtype)
    parts = [data, tensor.lvector(), tensor.lmatrix(), tensor.lscalar()]
    for part, name in zip(parts, ("data", "indices", "spans", "length")):
        part.name = f"{name} of {variable}"  # messages name a variable that is not used
    return parts


def take_apart(matrix):
    """Return the values of the parts of a sparse input."""
    pointers = matrix.indptr.astype(np.int64)
    spans = np.stack([pointers[:-1], pointers[1:]], axis=1)
    length = np.array(matrix.shape[matrix.format == "csr"], np.int64)
    return [matrix.data, matrix.indices.astype(np.int64), spans, length]


def put_together(variable, data, indices, counts, length):
    """Return the value of a sparse output from its parts, those of several ranks joined."""
    pointers = np.concatenate([[0], np.cumsum(counts)])
    return matrix_of(variable.type.format, data, indices, pointers, np.ravel(length)[0])


def matrix_of(format, data, indices, pointers, length):
    """Return a sparse matrix that uses the memory of its parts."""
    lengths = (len(pointers) - 1, int(length))
    shape = lengths if format == "csr" else lengths[::-1]
    return _MATRIX[format]((data, indices, pointers), shape=shape, copy=False)
