"""Graphs that put sparse matrices together, and take them apart: see `base.sparse_matrices`."""

from pytensor import tensor

from synkhronos._host.base.sparse_matrices import part_variables


def sparse_parts(variable):
    """Return variables for the parts of a sparse input, and the expression that composes them."""
    from pytensor.sparse.basic import CSM

    data, indices, spans, length = parts = part_variables(variable)
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
