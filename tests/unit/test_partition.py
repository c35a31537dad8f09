"""Every row goes to one rank, in order, as the documented edges say."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from synkhronos._arithmetic.partition import counts, edges, share

rows = st.integers(0, 10**12)
parts = st.integers(1, 300)


@pytest.mark.parametrize(
    "n_rows, n, expected", [(5, 3, [1, 2, 2]), (7, 3, [2, 2, 3]), (2, 3, [0, 1, 1]), (0, 2, [0, 0])]
)
def test_counts_as_documented(n_rows, n, expected):
    assert np.diff(edges(n_rows, n)).tolist() == counts(n_rows, n) == expected


@given(rows, parts)
def test_edges_begin_at_0_end_at_the_rows_and_differ_by_at_most_one(n_rows, n):
    found = edges(n_rows, n)
    lengths = np.diff(found)
    assert (found[0], found[-1], len(found)) == (0, n_rows, n + 1)
    assert lengths.tolist() == counts(n_rows, n)
    assert lengths.min() >= 0
    assert lengths.max() - lengths.min() <= 1


@given(st.integers(0, 10**6), parts)
def test_edges_are_those_of_linspace(n_rows, n):
    # linspace itself rounds, so that a whole number may come out a hair below it.
    exact = np.linspace(0, n_rows, n + 1)
    assert edges(n_rows, n) == tuple(np.floor(exact + 1e-7).astype(int))


@given(rows, parts, st.data())
def test_a_share_lies_between_two_edges(n_rows, n, data):
    part = data.draw(st.integers(0, n - 1))
    assert share(n_rows, n, part) == edges(n_rows, n)[part : part + 2]
