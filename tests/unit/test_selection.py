"""Every form of a selection becomes a range or an array of indices, or is refused."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.helpers import nameless

from synkhronos._arithmetic.selection import select_each, select_rows


def rows(selection, length=10):
    return list(select_rows("batch", selection, length))


def each(selection, lengths=(10, 10)):
    return [list(selected) for selected in select_each("batch_s", selection, list(lengths))]


@pytest.mark.parametrize(
    "selection, expected",
    [
        (None, range(10)),
        (0, range(0)),
        (10, range(10)),
        (np.uint8(3), range(3)),
        (np.array(3), range(3)),
        (slice(10, None, -4), range(9, -1, -4)),
        (slice(np.int32(1), np.int64(3)), range(1, 3)),
        (range(2, 9, 3), range(2, 9, 3)),
        (range(-1, -11, -4), range(9, -1, -4)),
        (range(20, 20), range(0)),
        (range(-2, 3), [8, 9, 0, 1, 2]),
        (range(1, -3, -1), [1, 0, 9, 8]),
        ([], []),
        ([np.int64(2), np.int8(-2)], [2, 8]),
        ([np.array(2), np.array(-2)], [2, 8]),
        ([np.uint64(2), 1, np.uint64(0)], [2, 1, 0]),
        ((np.uint64(2), -1), [2, 9]),
        (np.array([], "int32"), []),
        (np.array([1, -1], ">i2"), [1, 9]),
        *[(np.array([0, 9, 3], dtype), [0, 9, 3]) for dtype in np.typecodes["AllInteger"]],
        (np.arange(10) % 3 == 0, [0, 3, 6, 9]),
        ([True] + [False] * 9, [0]),
        ((False,) * 10, []),
    ],
    ids=nameless,
)
def test_what_each_form_means(selection, expected):
    selected = select_rows("batch", selection, 10)
    assert list(selected) == list(expected)
    if isinstance(expected, range):
        assert isinstance(selected, range)
    else:
        assert (selected.dtype, selected.ndim) == (np.int64, 1)
        assert selected.dtype.isnative and selected.flags.c_contiguous


@given(st.integers(0, 12), st.data())
def test_any_slice_that_fits_means_what_it_means_in_numpy(length, data):
    bound = st.none() | st.integers(-length, length)
    step = st.none() | st.integers(1, 5) | st.integers(-5, -1)
    selection = slice(data.draw(bound), data.draw(bound), data.draw(step))
    assert rows(selection, length) == np.arange(length)[selection].tolist()


@given(st.integers(1, 12), st.data())
def test_any_indices_that_fit_mean_what_they_mean_in_numpy(length, data):
    indices = data.draw(st.lists(st.integers(-length, length - 1)))
    kind = data.draw(st.sampled_from([list, tuple, lambda i: np.array(i, "int16")]))
    selected = rows(kind(indices), length)
    assert selected == np.arange(length)[np.array(indices, int)].tolist()
    assert all(0 <= row < length for row in selected)


def test_the_callers_objects_stay_as_they_are_and_are_not_kept():
    for selection in (np.array([-1, 2, -3]), [-1, 2, -3], np.array([1, 2, 3])):
        before = list(selection)
        selected = select_rows("batch", selection, 10)
        selected[:] = 0
        assert list(selection) == before


KINDS = [
    3.0,
    "3",
    True,
    np.bool_(True),
    np.array(True),
    np.array(3.0),
    {1, 2},
    iter([1]),
    b"ab",
    1j,
]
NESTED = [[[1, 2]], np.zeros((2, 2), int), np.zeros((10, 1), bool), [np.arange(2)], [[1], [2, 3]]]
NESTED += [[1, [2]], [[]], [range(2), range(3)]]
DTYPES = [[1.0, 2.0], np.array([]), ["a"], [None], np.array([1j]), [2**70], [slice(0, 2)]]
DTYPES += [np.array([1], object), np.array(["2020"], "M8[Y]")]


@pytest.mark.parametrize(
    "selection, kind, said",
    [
        *[
            (wrong, TypeError, f"an integer, a slice, .* got {re.escape(repr(wrong))}")
            for wrong in KINDS
        ],
        *[
            (wrong, ValueError, f"batch={wrong} asks for the first .* 10")
            for wrong in (-1, 11, 2**70)
        ],
        (slice(0, 11), ValueError, "reaches beyond the rows: there are 10"),
        (slice(-11, None), ValueError, "reaches beyond the rows: there are 10"),
        (slice(12, 3, -1), ValueError, "reaches beyond the rows: there are 10"),
        (slice(0, 2**70), ValueError, "reaches beyond the rows: there are 10"),
        (slice(0, 3, 0), ValueError, "is not a slice of rows"),
        (slice(0.0, 3), TypeError, "is not a slice of rows"),
        (slice(None, None, 1.5), TypeError, "is not a slice of rows"),
        (slice(0, np.True_), TypeError, "is not a slice of rows"),
        (range(11), ValueError, "batch asks for row 10, but there are 10 rows"),
        (range(-11, 2), ValueError, "batch asks for row -11, but there are 10 rows"),
        (range(20, 3, -5), ValueError, "batch asks for row 20, but there are 10 rows"),
        ([10], ValueError, "asks for row 10, but there are 10 rows"),
        ([0, -11, 3], ValueError, "asks for row -11, but there are 10 rows"),
        (np.array([0, 2**40]), ValueError, f"asks for row {2**40}, but there are 10 rows"),
        *[(wrong, ValueError, "must hold integers or bools, got") for wrong in DTYPES],
        ([True, 2], ValueError, "must hold integers or bools, not both"),
        ((2, np.False_), ValueError, "must hold integers or bools, not both"),
        (np.ma.array([1, 2], mask=[0, 1]), ValueError, "batch has masked items, which are no rows"),
        *[(wrong, ValueError, "batch must have one dimension") for wrong in NESTED],
        (np.zeros(9, bool), ValueError, "a mask of 9 bools, but there are 10 rows"),
        (np.zeros(11, bool), ValueError, "a mask of 11 bools, but there are 10 rows"),
    ],
    ids=nameless,
)
def test_what_is_refused(selection, kind, said):
    with pytest.raises(kind, match=said):
        rows(selection)


def test_there_is_no_row_where_there_are_none():
    with pytest.raises(ValueError, match="but there are 0 rows"):
        rows([0], 0)
    assert rows(np.zeros(0, bool), 0) == []


# One for all ranks, or one for each.


@pytest.mark.parametrize(
    "selection, expected",
    [
        (None, [list(range(10)), list(range(10))]),
        (slice(None, None, -4), [[9, 5, 1], [9, 5, 1]]),
        ((9, 0), [[9, 0], [9, 0]]),
        ([], [[], []]),
        (np.array([9, 0, 0], "int32"), [[9, 0, 0], [9, 0, 0]]),
        ([[1, 2, 3], [4]], [[1, 2, 3], [4]]),
        (([1, 2], (4, 5)), [[1, 2], [4, 5]]),
        ([np.array([3]), slice(0, 0)], [[3], []]),
        ([[], [-1]], [[], [9]]),
        (range(3), [[0, 1, 2], [0, 1, 2]]),
        ([range(0), range(9, 6, -1)], [[], [9, 8, 7]]),
        ([np.array(1), 3, np.int8(2)], [[1, 3, 2], [1, 3, 2]]),
    ],
    ids=nameless,
)
def test_one_for_all_or_one_for_each(selection, expected):
    assert each(selection) == expected


def test_each_rank_counts_from_its_own_end():
    assert each(None, (2, 3, 0)) == [[0, 1], [0, 1, 2], []]
    assert each([-1, 0], (2, 3)) == [[1, 0], [2, 0]]
    assert each(slice(-2, None), (2, 3)) == [[0, 1], [1, 2]]
    assert each([[-1], [-1], []], (5, 7, 0)) == [[4], [6], []]
    assert each([np.array([True, False]), [False, True, True]], (2, 3)) == [[0], [1, 2]]


@pytest.mark.parametrize(
    "selection, kind, said",
    [
        *[
            (wrong, TypeError, f"batch_s must be a slice, .* got {re.escape(repr(wrong))}")
            for wrong in (3, 3.0, "ab", np.array(3), True, {1: 2}, iter([1]))
        ],
        ([[1], [2], [3]], TypeError, "one for each of the 2, got 3"),
        ([slice(0, 1)], TypeError, "one for each of the 2, got 1"),
        ([1, [2]], TypeError, "batch_s mixes"),
        ([slice(0, 1), 3], TypeError, "batch_s mixes"),
        ([[1], None], TypeError, "batch_s mixes"),
        ([3, np.array([1])], TypeError, "batch_s mixes"),
        ([1.0, 2.0], TypeError, "integers"),
        ([[1.0], [1]], TypeError, "integers"),
        ([True, 2], TypeError, r"batch_s \(rank 0\) must hold .* not both"),
        ([-3], ValueError, r"batch_s \(rank 0\).*row -3"),
        (slice(0, 3), ValueError, r"batch_s \(rank 0\).*beyond the rows"),
        ([[0], [3]], ValueError, r"batch_s \(rank 1\).*row 3"),
        (np.zeros((2, 2), int), ValueError, r"batch_s \(rank 0\).*one dimension"),
        ([[0], [[1]]], ValueError, r"batch_s \(rank 1\).*one dimension"),
        ([[0], np.zeros(5, bool)], ValueError, r"batch_s \(rank 1\).*mask of 5"),
    ],
    ids=nameless,
)
def test_what_is_refused_for_ranks(selection, kind, said):
    with pytest.raises(kind, match=said):
        each(selection, (2, 3))
