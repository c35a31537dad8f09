"""Every form of a selection becomes a range or an array of indices, or is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.helpers import nameless

from synkhronos._arithmetic.selection import select_each, select_rows


def rows(selection, length=10, name="batch"):
    return list(select_rows(name, selection, length))


# What each form means.


@pytest.mark.parametrize(
    "selection, expected",
    [
        (None, range(10)),
        (0, range(0)),
        (10, range(10)),
        (np.uint8(3), range(3)),
        (np.array(3), range(3)),
        (slice(8, 1, -3), range(8, 1, -3)),
        (slice(10, None, -4), range(9, -1, -4)),
        (slice(np.int32(1), np.int64(3)), range(1, 3)),
    ],
    ids=nameless,
)
def test_counts_and_slices_are_ranges(selection, expected):
    selected = select_rows("batch", selection, 10)
    assert isinstance(selected, range)
    assert selected == expected


@pytest.mark.parametrize(
    "selection, expected",
    [
        ([], []),
        ([np.int64(2), np.int8(-2)], [2, 8]),
        ([np.array(2), np.array(-2)], [2, 8]),
        ([np.uint64(2), 1, np.uint64(0)], [2, 1, 0]),
        ((np.uint64(2), -1), [2, 9]),
        (np.array([], "int32"), []),
        (np.array([1, -1], ">i2"), [1, 9]),
        *[(np.array([0, 9, 3], dtype), [0, 9, 3]) for dtype in np.typecodes["AllInteger"]],
    ],
    ids=nameless,
)
def test_lists_and_arrays_are_indices(selection, expected):
    selected = select_rows("batch", selection, 10)
    assert isinstance(selected, np.ndarray)
    assert (selected.dtype, selected.ndim) == (np.int64, 1)
    assert selected.dtype.isnative and selected.flags.c_contiguous
    assert selected.tolist() == expected


def test_masks():
    mask = np.array([True, False, False, True])
    assert select_rows("batch", mask, 4).tolist() == [0, 3]
    assert select_rows("batch", mask.tolist(), 4).tolist() == [0, 3]
    assert select_rows("batch", tuple(mask.tolist()), 4).tolist() == [0, 3]
    assert rows(np.zeros(10, bool)) == []
    assert rows(np.ones(10, bool)) == list(range(10))
    assert select_rows("batch", np.zeros(0, bool), 0).tolist() == []


RANGES = [range(3), range(2, 9, 3), range(9, -1, -1), range(-3, 0), range(-1, -11, -4)]


@pytest.mark.parametrize("selection", RANGES + [range(0), range(5, 2), range(20, 20)], ids=nameless)
def test_a_range_means_what_its_list_means_and_is_no_copy(selection):
    selected = select_rows("batch", selection, 10)
    assert isinstance(selected, range)
    assert list(selected) == rows(list(selection))


def test_a_range_that_passes_the_end():
    assert rows(range(-2, 3)) == [8, 9, 0, 1, 2]
    assert rows(range(1, -3, -1)) == [1, 0, 9, 8]
    for wrong, row in ((range(11), 10), (range(-11, 2), -11), (range(20, 3, -5), 20)):
        with pytest.raises(ValueError, match=f"batch asks for row {row}, but there are 10 rows"):
            rows(wrong)


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
    array, indices = np.array([-1, 2, -3]), [-1, 2, -3]
    for selection in (array, indices):
        selected = select_rows("batch", selection, 10)
        assert list(selection) == [-1, 2, -3]
        selected[:] = 0
        assert list(selection) == [-1, 2, -3]
    array = np.array([1, 2, 3])
    assert not np.shares_memory(select_rows("batch", array, 10), array)


# What is refused.


@pytest.mark.parametrize(
    "selection",
    [3.0, "3", True, False, np.bool_(True), np.array(True), np.array(3.0), {1, 2}, iter([1])]
    + [b"ab", {}, object(), 1j, np.float32(2)],
    ids=nameless,
)
def test_other_kinds_are_refused(selection):
    with pytest.raises(
        TypeError, match="batch must be an integer, a slice, or a list or array"
    ) as e:
        rows(selection)
    assert repr(selection) in str(e.value)


@pytest.mark.parametrize("count", [-1, 11, np.int64(11), 2**70])
def test_counts_beyond_the_rows_are_refused(count):
    with pytest.raises(ValueError, match=f"batch={count} asks for the first {count} rows.* 10"):
        rows(count)


@pytest.mark.parametrize(
    "selection",
    [slice(0, 11), slice(11, None), slice(-11, None), slice(None, -11, -1)]
    + [slice(20, 30), slice(12, 3, -1), slice(0, 2**70)],
    ids=nameless,
)
def test_slices_beyond_the_rows_are_refused(selection):
    with pytest.raises(ValueError, match="reaches beyond the rows: there are 10"):
        rows(selection)


@pytest.mark.parametrize(
    "selection, kind",
    [
        (slice(0, 3, 0), ValueError),
        (slice(0.0, 3), TypeError),
        (slice(None, "3"), TypeError),
        (slice(None, None, 1.5), TypeError),
        (slice([1], 3), TypeError),
        (slice(True, None), TypeError),
        (slice(0, np.True_), TypeError),
    ],
    ids=nameless,
)
def test_slices_of_wrong_fields_are_refused(selection, kind):
    with pytest.raises(kind, match="is not a slice of rows"):
        rows(selection)


@pytest.mark.parametrize("wrong", [10, 11, -11, 2**40, -(2**40)])
def test_indices_beyond_the_rows_are_refused(wrong):
    for selection in ([wrong], [0, wrong, 3], np.array([0, wrong])):
        with pytest.raises(ValueError, match=rf"asks for row {wrong}, but there are 10 rows"):
            rows(selection)
    with pytest.raises(ValueError, match="but there are 0 rows"):
        rows([0], 0)


@pytest.mark.parametrize(
    "selection",
    [[1.0, 2.0], np.array([1.0]), np.array([]), ["a"], [None], np.array([1j]), [0, "a"]]
    + [[2**70], [slice(0, 2)], np.array([1], object), np.array(["2020"], "M8[Y]")],
    ids=nameless,
)
def test_arrays_of_other_dtypes_are_refused(selection):
    with pytest.raises(ValueError, match="must hold integers or bools, got"):
        rows(selection)


def test_bools_among_integers_and_masked_items_are_refused():
    for selection in ([True, 2], [np.True_, 2], (2, False)):
        with pytest.raises(ValueError, match="must hold integers or bools, not both"):
            rows(selection)
        with pytest.raises(TypeError, match=r"batch_s \(rank 0\) must hold .* not both"):
            each(selection)
    with pytest.raises(ValueError, match="batch has masked items, which are no rows"):
        rows(np.ma.array([1, 2], mask=[0, 1]))


@pytest.mark.parametrize(
    "selection",
    [[[1, 2]], [[1, 2], [3, 4]], np.zeros((2, 2), int), np.zeros((10, 1), bool), [np.arange(2)]]
    + [[[1], [2, 3]], [1, [2]], [[]], np.zeros((0, 3), int), [range(2), range(3)]],
    ids=nameless,
)
def test_nested_lists_are_refused_and_so_are_arrays_of_more_axes(selection):
    with pytest.raises(ValueError, match="batch must have one dimension"):
        rows(selection)


@pytest.mark.parametrize("count", [0, 9, 11])
def test_masks_of_another_length_are_refused(count):
    with pytest.raises(ValueError, match=f"a mask of {count} bools, but there are 10 rows"):
        rows(np.zeros(count, bool))


# One for all ranks, or one for each.


def each(selection, lengths=(10, 10)):
    return [list(selected) for selected in select_each("batch_s", selection, list(lengths))]


@pytest.mark.parametrize(
    "selection, expected",
    [
        (None, [list(range(10)), list(range(10))]),
        (slice(2, 5), [[2, 3, 4], [2, 3, 4]]),
        (slice(None, None, -4), [[9, 5, 1], [9, 5, 1]]),
        ([9, 0, 0], [[9, 0, 0], [9, 0, 0]]),
        ((9, 0), [[9, 0], [9, 0]]),
        ([], [[], []]),
        (np.array([9, 0, 0], "int32"), [[9, 0, 0], [9, 0, 0]]),
        ([np.int64(1), 2], [[1, 2], [1, 2]]),
        ([[1, 2, 3], [4]], [[1, 2, 3], [4]]),
        ([(1, 2), [4]], [[1, 2], [4]]),
        (([1, 2], [4, 5]), [[1, 2], [4, 5]]),
        ([slice(0, 2), slice(8, 10)], [[0, 1], [8, 9]]),
        ([np.array([3]), slice(0, 0)], [[3], []]),
        ([[], [-1]], [[], [9]]),
        (range(3), [[0, 1, 2], [0, 1, 2]]),
        ([range(3), range(9, 6, -1)], [[0, 1, 2], [9, 8, 7]]),
        ([range(0), [4]], [[], [4]]),
        ([np.array(1), np.array(3)], [[1, 3], [1, 3]]),
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


def test_masks_for_each_rank():
    masks = [np.array([True, False]), [False, True, True]]
    assert each(masks, (2, 3)) == [[0], [1, 2]]


@pytest.mark.parametrize(
    "selection",
    [3, 3.0, "ab", np.int64(3), np.array(3), True, {1: 2}, iter([1])],
    ids=nameless,
)
def test_other_kinds_for_ranks_are_refused(selection):
    with pytest.raises(
        TypeError, match="batch_s must be a slice, a list or array of integers"
    ) as e:
        each(selection)
    assert repr(selection) in str(e.value)


@pytest.mark.parametrize(
    "selection",
    [[[1], [2], [3]], [[1]], [slice(0, 1)], [[1, 2]] * 3, [slice(0, 1)] * 4],
    ids=nameless,
)
def test_another_number_of_selections_than_ranks_is_refused(selection):
    with pytest.raises(TypeError, match=f"one for each of the 2.*got {len(selection)}"):
        each(selection)


@pytest.mark.parametrize(
    "selection",
    [[1, [2]], [slice(0, 1), 3], [[1], None], [[1], "a"], [3, np.array([1])]],
    ids=nameless,
)
def test_numbers_and_selections_mixed_are_refused(selection):
    with pytest.raises(TypeError, match="batch_s mixes"):
        each(selection)


@pytest.mark.parametrize(
    "selection",
    [[1.0, 2.0], np.array([0.5]), [[1.0], [1]], [[1], np.array([2.0])], ["a", "b"]],
    ids=nameless,
)
def test_other_dtypes_for_ranks_are_refused_by_type(selection):
    with pytest.raises(TypeError, match="integers"):
        each(selection)


@pytest.mark.parametrize(
    "selection, rank, said",
    [
        ([2], 0, "row 2"),
        ([-3], 0, "row -3"),
        (slice(0, 3), 0, "beyond the rows"),
        ([[0], [3]], 1, "row 3"),
        ([[0], slice(0, 4)], 1, "beyond the rows"),
        (np.zeros((2, 2), int), 0, "one dimension"),
        ([[0], [[1]]], 1, "one dimension"),
        ([[0], np.zeros(5, bool)], 1, "mask of 5"),
    ],
    ids=nameless,
)
def test_errors_name_the_rank(selection, rank, said):
    with pytest.raises(ValueError, match=rf"batch_s \(rank {rank}\).*{said}"):
        each(selection, (2, 3))
