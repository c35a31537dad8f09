"""Reduction in blocks: every element is done once, by one rank, and as NumPy would."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synkhronos._arithmetic.blocks import BLOCK, parse_op, shares
from synkhronos._arithmetic.operations import OPERATIONS

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


def test_names_of_operations():
    for op in OPERATIONS:
        assert parse_op(op) == parse_op("c_" + op) == op
    for op in ("", "c_", "mean", "c_c_sum", "SUM", None, 3, ["sum"], b"sum"):
        with pytest.raises(ValueError, match=f"op must be one of {', '.join(OPERATIONS)}; got"):
            parse_op(op)
