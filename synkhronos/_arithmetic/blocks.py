"""Reduction over ranks in place, in blocks that fit into a core's cache.

    shares of the elements      rank 0          rank 1          rank 2
    one variable after another  |- w -|--- b ---|------- v -------|- c -|

Each rank reduces its share of every rank's arrays, and writes the result to the ranks that are to
have it: each element is computed once, so all ranks get the same bits.

Pure: nothing here knows of processes.
"""

import functools

import numpy as np

from synkhronos._arithmetic import partition

UFUNCS = {"avg": np.add, "sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
OPS = tuple(UFUNCS)


def _minimum(one, other, out):
    return np.minimum(one, other, out=out)


def _maximum(one, other, out):
    return np.maximum(one, other, out=out)


# For calls with three arrays in this order. An `out` by its name takes 0.6 us longer, but NumPy 2.5
# deprecates others for two of the ufuncs.
_INTO = {**UFUNCS, "min": _minimum, "max": _maximum}
BLOCK = 1 << 19  # bytes of each array that are reduced at a time: two blocks fit into an L2 cache


def plain_name(name, names):
    """Return a name without the prefix ``c_``, or None if it is not one of `names`."""
    plain = name[2:] if isinstance(name, str) and name.startswith("c_") else name
    return str(plain) if isinstance(plain, str) and plain in names else None


def parse_op(op):
    """Return the plain name of an operation, which may have the prefix ``c_``.

    Raises ``ValueError`` for anything that is not an operation.
    """
    plain = plain_name(op, OPS)
    if plain is None:
        raise ValueError(f"op must be one of {', '.join(OPS)}; got {op!r}.")
    return plain


def reduce_block(op, sources, out, divisor):
    """Reduce arrays of one shape into `out`, which may be the first array but no other.

    Parameters
    ----------
    op : str
        See `OPS`. Bools are combined with "or" (sum, max) and "and" (prod, min).
    sources : list of numpy.ndarray
        One for each rank, in rank order; at least one.
    out : numpy.ndarray
        Half precision is combined in single, whose 24 bits hold the sum of many ranks.
    divisor : float
        For the op ``avg``: the number to divide by.
    """
    ufunc = _INTO[op]
    if out.dtype == np.float16:
        total = sources[0].astype(np.float32)
    elif len(sources) == 1:
        total = out
        if out is not sources[0]:
            out[...] = sources[0]
    else:
        total = ufunc(sources[0], sources[1], out)
        sources = sources[1:]
    for source in sources[1:]:
        ufunc(total, source, total)
    if op == "avg" and divisor != 1:
        # Multiplying is faster, and exact where the divisor is a power of two.
        if divisor & (divisor - 1) == 0:
            np.multiply(total, _reciprocal(total.dtype, divisor), total)
        else:
            np.divide(total, total.dtype.type(divisor), total)
    if total is not out:
        out[...] = total


def reduction(op, sources, out, divisor):
    """Return a function that does what `reduce_block` does with the same arguments."""
    plain = len(sources) == 2 and out.dtype != np.float16
    if not plain or (op == "avg" and divisor & (divisor - 1)):
        return functools.partial(reduce_block, op, sources, out, divisor)
    ufunc, (first, second) = _INTO[op], sources
    if op != "avg":
        return functools.partial(ufunc, first, second, out)
    factor = _reciprocal(out.dtype, divisor)

    def average():
        np.add(first, second, out)
        np.multiply(out, factor, out)

    return average


@functools.lru_cache(maxsize=64)
def _reciprocal(dtype, divisor):
    # An array without axes: NumPy takes half the time that it takes for a scalar of its own.
    return np.array(1 / divisor, dtype)


def shares(sizes, n_ranks, rank):
    """Yield (position of an array, first element, element after the last) of one rank's blocks.

    Parameters
    ----------
    sizes : list of (int, int)
        For each array the number of elements, and the bytes of an element.
    """
    total = sum(elements * nbytes for elements, nbytes in sizes)
    begin, end = partition.share(total, n_ranks, rank)
    offset = 0
    for position, (elements, nbytes) in enumerate(sizes):
        # Both ends round up, so each element belongs to exactly one rank.
        first = min(max(-(-(begin - offset) // nbytes), 0), elements)
        last = min(max(-(-(end - offset) // nbytes), 0), elements)
        step = max(BLOCK // nbytes, 1)
        for at in range(first, last, step):
            yield position, at, min(at + step, last)
        offset += elements * nbytes


def cut(values, n_ranks, rank):
    """Yield (position, blocks) for one rank: the same elements of all arrays at that position.

    Parameters
    ----------
    values : list of list of numpy.ndarray
        At each position, contiguous arrays of one shape and dtype.
    """
    flat = [[value.reshape(-1) for value in each] for each in values]
    sizes = [(each[0].size, each[0].itemsize) for each in flat]
    for position, begin, end in shares(sizes, n_ranks, rank):
        yield position, [array[begin:end] for array in flat[position]]
