"""Reduction in blocks: every element is done once, by one rank, and as NumPy would."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synkhronos._arithmetic.blocks import BLOCK, OPS, parse_op, reduce_block, shares

SIZES = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 40), st.integers(0, 400_000)), st.sampled_from([1, 2, 4, 8, 16])
    ),
    min_size=1,
    max_size=8,
)


@given(SIZES, st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_shares_cover_every_element_once(sizes, n_ranks):
    blocks = [block for rank in range(n_ranks) for block in shares(sizes, n_ranks, rank)]
    assert blocks == sorted(blocks)
    position, at = 0, 0
    for where, begin, end in blocks:
        while where > position:
            assert at == sizes[position][0]
            position, at = position + 1, 0
        assert begin == at and begin < end
        assert (end - begin) * sizes[position][1] <= BLOCK
        at = end
    for elements, _ in sizes[position + 1 :]:
        assert elements == 0
    assert at == sizes[position][0]


@given(SIZES, st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_shares_are_even(sizes, n_ranks):
    total = sum(elements * nbytes for elements, nbytes in sizes)
    for rank in range(n_ranks):
        mine = sum(
            (end - begin) * sizes[position][1]
            for position, begin, end in shares(sizes, n_ranks, rank)
        )
        assert abs(mine - total / n_ranks) <= 2 * 16


@pytest.mark.parametrize("dtype", ["int8", "uint64", "float16", "float32", "complex64", "bool"])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_reduce_block(dtype, n):
    random = np.random.RandomState(n)
    sources = [(random.rand(50) * 4).astype(dtype) for _ in range(n)]
    kept = [source.copy() for source in sources]
    wide = np.stack(sources).astype("float32" if dtype == "float16" else dtype)
    expected = {
        "sum": wide.sum(0, dtype=wide.dtype),
        "prod": wide.prod(0, dtype=wide.dtype),
        "min": np.minimum.reduce(wide),
        "max": np.maximum.reduce(wide),
    }
    if np.dtype(dtype).kind in "fc":
        expected["avg"] = expected["sum"] / wide.dtype.type(n)
    digits = 1e-3 if dtype == "float16" else 1e-6
    for op, result in expected.items():
        out = np.empty(50, dtype)
        reduce_block(op, sources, out, n)
        np.testing.assert_allclose(out, result.astype(dtype), rtol=digits)
        for source, was in zip(sources, kept):
            np.testing.assert_array_equal(source, was)
        first = sources[0].copy()
        reduce_block(op, [first, *sources[1:]], first, n)
        np.testing.assert_array_equal(first, out)


def test_names_of_operations():
    for op in OPS:
        assert parse_op(op) == parse_op("c_" + op) == op
    for op in ("", "c_", "mean", "c_c_sum", "SUM", None, 3, ["sum"], b"sum"):
        with pytest.raises(ValueError, match="op must be one of avg, sum, prod, min, max; got"):
            parse_op(op)
