"""Sparse matrices in functions: they travel as arrays, and graphs put them together.

    value ──▶ take_apart ──▶ data, indices, spans, length ──▶ sparse_parts ──▶ a rank's rows
    a rank's rows ──▶ decomposed ──▶ data, indices, counts, length ──▶ put_together ──▶ value

The spans are the begin and the end, in data and indices, of each row of a CSR matrix (each column
of CSC). So some rows of the spans are some rows of the matrix, and data and indices stay whole.
"""

import numpy as np
import scipy.sparse
from pytensor import tensor


def sparse_format(variable):
    """Return the format of a sparse variable, such as "csr"; None for any other variable."""
    return getattr(variable.type, "format", None)


def sparse_parts(variable):
    """Return variables for the parts of a sparse input, and the expression that composes them.

    The parts are data, indices, spans and length; the third one has a row for each row.
    """
    from pytensor.sparse.basic import CSM

    parts = [
        tensor.TensorType(variable.dtype, shape=(None,))(),
        tensor.lvector(),
        tensor.lmatrix(),
        tensor.lscalar(),
    ]
    for part, name in zip(parts, ("data", "indices", "spans", "length")):
        part.name = f"{name} of {variable}"  # messages name a variable that is not used
    data, indices, spans, length = parts
    begins, counts = spans[:, 0], spans[:, 1] - spans[:, 0]
    pointers = tensor.concatenate([tensor.zeros(1, "int64"), tensor.cumsum(counts)])
    chosen = tensor.repeat(begins - pointers[:-1], counts) + tensor.arange(pointers[-1])
    lengths = [spans.shape[0], length]
    shape = tensor.stack(lengths if variable.type.format == "csr" else lengths[::-1])
    made = CSM(variable.type.format)(
        data[chosen],
        tensor.cast(indices[chosen], "int32"),
        tensor.cast(pointers, "int32"),
        tensor.cast(shape, "int32"),
    )
    return parts, made


def take_apart(matrix):
    """Return the values of the parts of a sparse input."""
    pointers = matrix.indptr.astype(np.int64)
    spans = np.stack([pointers[:-1], pointers[1:]], axis=1)
    length = np.array(matrix.shape[matrix.format == "csr"], np.int64)
    return [matrix.data, matrix.indices.astype(np.int64), spans, length]


def decomposed(variable):
    """Return expressions of a sparse output's data, indices, counts and length."""
    from pytensor.sparse.basic import csm_properties

    data, indices, pointers, shape = csm_properties(variable)
    length = shape[1 if variable.type.format == "csr" else 0]
    pointers = tensor.cast(pointers, "int64")
    return [
        data,
        tensor.cast(indices, "int64"),
        pointers[1:] - pointers[:-1],
        tensor.cast(length, "int64"),
    ]


def put_together(variable, data, indices, counts, length):
    """Return the value of a sparse output from its parts, those of several ranks joined."""
    pointers = np.concatenate([[0], np.cumsum(counts)])
    made = {"csr": scipy.sparse.csr_matrix, "csc": scipy.sparse.csc_matrix}[variable.type.format]
    lengths = (len(pointers) - 1, int(np.ravel(length)[0]))
    shape = lengths if variable.type.format == "csr" else lengths[::-1]
    return made((data, indices, pointers), shape=shape, copy=False)
