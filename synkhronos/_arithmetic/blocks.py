"""Reduction over ranks in place, in blocks that fit into a core's cache.

    shares of the elements      rank 0          rank 1          rank 2
    one variable after another  |- w -|--- b ---|------- v -------|- c -|

Each rank reduces its share of the elements of all ranks' arrays, and writes the result to the ranks
that need it. Each element is computed once, so all ranks get the same bits.
"""

import functools
import operator

import numpy as np

from synkhronos._arithmetic import partition
from synkhronos._arithmetic.operations import HALF, OPERATIONS, divide, reciprocal

BLOCK = 1 << 19  # bytes of a block of one array; two blocks fit into an L2 cache


def plain_name(name, names):
    """Return a name without the prefix ``c_``, or None if it is not one of `names`."""
    plain = name[2:] if isinstance(name, str) and name.startswith("c_") else name
    return str(plain) if isinstance(plain, str) and plain in names else None


def parse_op(op):
    """Return the name of an operation without ``c_``; raise ValueError for anything else."""
    plain = plain_name(op, OPERATIONS)
    if plain is None:
        raise ValueError(f"op must be one of {', '.join(OPERATIONS)}; got {op!r}.")
    return plain


def reduce_block(op, sources, out, divisor):
    """Reduce arrays of one shape, at least one, into `out`; averages are divided by the `divisor`.

    It may be the first array, or the second, but no other.
    """
    combine, divides = OPERATIONS[op].combine, OPERATIONS[op].divides
    if out.dtype.char == HALF:
        total = sources[0].astype(np.float32)
    elif len(sources) == 1:
        total = out
        if out is not sources[0]:
            out[...] = sources[0]
    else:
        total = combine(sources[0], sources[1], out=out)
        sources = sources[1:]
    for source in sources[1:]:
        combine(total, source, out=total)
    if divides and divisor != 1:
        divide(total, divisor)
    if total is not out:
        out[...] = total


def with_one_nan(array):
    """Return a copy of an array with the same bits in all NaNs; the array itself if it has none.

    A sum of two NaNs has the bits of one of them: which, depends on the place of the arrays in
    memory and on the processor. So the same sum may have other bits in another process.
    """
    if array.dtype.kind not in "fc":
        return array
    nans = np.isnan(array)
    return np.where(nans, array.dtype.type(np.nan), array) if nans.any() else array


def _steps(op, sources, out, divisor):
    """Return pairs (function, its arguments) that do what `reduce_block` does, with fewer calls."""
    row = OPERATIONS[op]
    is_simple = len(sources) == 2 and out.dtype.char != HALF and isinstance(row.combine, np.ufunc)
    if not is_simple or (row.divides and divisor & (divisor - 1)):
        return [(reduce_block, (op, sources, out, divisor))]
    steps = [(functools.partial(row.combine, out=out), sources)]  # NumPy 2.5 wants the name `out`
    if row.divides:
        steps.append((np.multiply, (out, reciprocal(out.dtype, divisor), out)))
    return steps


def shares(sizes, n_ranks, rank, count=1):
    """Yield (position of an array, first element, element after the last) of one rank's blocks.

    `sizes` has the number of elements of each array, and the bytes of an element. With `count`, the
    blocks are those of several ranks, from this one on.
    """
    total = sum(elements * nbytes for elements, nbytes in sizes)
    begin, _ = partition.share(total, n_ranks, rank)
    _, end = partition.share(total, n_ranks, rank + count - 1)
    offset = 0
    for position, (elements, nbytes) in enumerate(sizes):
        # Both ends round up, so each element belongs to exactly one rank.
        first = min(max(-(-(begin - offset) // nbytes), 0), elements)
        last = min(max(-(-(end - offset) // nbytes), 0), elements)
        step = max(BLOCK // nbytes, 1)
        for at in range(first, last, step):
            yield position, at, min(at + step, last)
        offset += elements * nbytes


def cut(values, n_ranks, rank, count=1):
    """Yield (position, blocks) for one rank: the same elements of all arrays at that position.

    At each position `values` has a list of contiguous arrays of one shape and dtype. For `count`
    see `shares`.
    """
    sizes = [(arrays[0].size, arrays[0].itemsize) for arrays in values]
    for position, begin, end in shares(sizes, n_ranks, rank, count):
        # Arrays are flattened here, because most positions are in the shares of other ranks.
        yield position, [value.reshape(-1)[begin:end] for value in values[position]]


def plan(op, values, n_shares, share, root=None):
    """Return the steps that reduce a share: pairs (function, its arguments), to call in turn.

    `values` are as in `cut`, with the arrays of all ranks in rank order. If `root` is given, only
    the arrays of this rank get the results.
    """
    buffers, steps = {}, []
    for _, sources in cut(values, n_shares, share):
        if root is None:
            out, copies = sources[0], sources[1:]
        elif root == 0:
            out, copies = sources[0], []
        else:
            # `reduce_block` may overwrite the first source only, and the root's is a later one. So
            # the result goes to a buffer, which is copied to the root's array.
            dtype = sources[0].dtype
            if dtype not in buffers:
                buffers[dtype] = np.empty(BLOCK, np.uint8).view(dtype)
            out, copies = buffers[dtype][: sources[0].size], [sources[root]]
        steps += _steps(op, sources, out, len(sources))
        steps += [(operator.setitem, (copy, ..., out)) for copy in copies]
    return steps
