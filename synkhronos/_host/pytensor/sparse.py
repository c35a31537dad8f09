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
    numbers = [tensor.cast(each, "int32") for each in (indices[chosen], pointers, shape)]
    return parts, CSM(variable.type.format)(data[chosen], *numbers)


def decomposed(variable):
    """Return expressions of a sparse output's data, indices, counts and length."""
    from pytensor.sparse.basic import csm_properties

    data, indices, pointers, shape = csm_properties(variable)
    length = shape[1 if variable.type.format == "csr" else 0]
    numbers = indices, pointers[1:] - pointers[:-1], length
    return [data, *(tensor.cast(each, "int64") for each in numbers)]
