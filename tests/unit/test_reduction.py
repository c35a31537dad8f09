"""The parts of the ranks become one result, by pure arithmetic."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from support.expected import dtypes_of

from synkhronos._arithmetic import reduction
from synkhronos._arithmetic.operations import OPERATIONS
from synkhronos._arithmetic.reduction import (
    combine,
    combine_of_machines,
    combine_some,
    parse_mode,
    result_dtype,
)

f64, f32 = np.dtype("float64"), np.dtype("float32")

PARTS = [np.array([[1.0, 2.0], [3.0, 4.0]])]


@pytest.mark.parametrize("mode", [*OPERATIONS, "gather"])
def test_modes_with_and_without_the_prefix_are_the_same(mode):
    assert parse_mode(mode) == parse_mode("c_" + mode) == mode


@pytest.mark.parametrize("axis", [1, 2])
def test_a_gather_joins_along_its_axis(axis):
    mode = pickle.loads(pickle.dumps(reduction.Gather(axis=axis)))
    assert mode == "gather" and mode.axis == axis and repr(mode) == "'gather'"
    whole = np.arange(60.0).reshape(3, 4, 5)
    parts = np.split(whole, [1, 3], axis)
    np.testing.assert_array_equal(combine(mode, parts, [1, 2, 1], f64), whole)
    slices = reduction.Accumulator(mode, 3, "it")
    for part in parts:
        slices.add(part, 1)
    np.testing.assert_array_equal(slices.result(), whole)
    apart = combine(mode, [whole, whole[:, :, :1] if axis == 1 else whole[:, :1]], [1, 1], f64)
    assert isinstance(apart, list) and len(apart) == 2


@pytest.mark.parametrize("mode", ["mean", "c_c_sum", 3, b"sum", ["sum"]])
def test_other_modes_are_refused_by_name(mode):
    with pytest.raises(ValueError, match=r"not a reduce mode.*gather") as caught:
        parse_mode(mode)
    assert repr(mode) in str(caught.value)


def test_none_is_the_first_part_itself():
    assert parse_mode(None) is None
    assert combine(None, PARTS[:1], [1, 1], None) is PARTS[0]


def test_gather_joins_rows_and_stacks_scalars():
    rows = [np.zeros((0, 2)), np.ones((1, 2)), np.full((3, 2), 2.0)]
    np.testing.assert_array_equal(
        combine("gather", rows, [0, 1, 3], f64), [[1, 1], [2, 2], [2, 2], [2, 2]]
    )
    stacked = combine("gather", [np.array(3), np.array(1)], [1, 1], np.dtype("int64"))
    np.testing.assert_array_equal(stacked, [3, 1])
    assert stacked.dtype == np.int64


def test_gather_of_ragged_parts_is_a_list_of_copies():
    parts = [np.ones((2, 3)), np.ones((2, 4))]
    result = combine("gather", parts, [2, 2], f64)
    assert isinstance(result, list)
    for part, copy in zip(parts, result):
        np.testing.assert_array_equal(part, copy)
        assert not np.shares_memory(part, copy)


@pytest.mark.parametrize("mode", OPERATIONS)
def test_unequal_shapes_are_refused_even_if_they_would_broadcast(mode):
    with pytest.raises(ValueError, match="different shapes") as caught:
        combine(mode, [np.ones((1, 3)), np.ones((2, 3))], [1, 2], f64)
    assert "(1, 3)" in str(caught.value) and "(2, 3)" in str(caught.value)
    assert repr(mode) in str(caught.value)


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int64", "bool"])
def test_averages_of_integers_and_bools_are_in_floatx(dtype):
    for float_dtype in ("float32", "float64"):
        wanted = result_dtype("avg", dtype, float_dtype)
        assert wanted == float_dtype
        parts = [np.array([0, 1], dtype), np.array([1, 1], dtype)]
        result = combine("avg", parts, [1, 1], wanted)
        np.testing.assert_array_equal(result, [0.5, 1])
        assert result.dtype == float_dtype
        # One part alone is an average, too.
        alone = combine("avg", parts[:1], [1], wanted)
        assert alone.dtype == float_dtype
        np.testing.assert_array_equal(alone, [0, 1])


@pytest.mark.parametrize("mode", [*OPERATIONS, "gather"])
def test_all_others_keep_their_dtype(mode):
    dtypes = "float16", "complex64", "int8", "bool"
    for dtype in dtypes if mode == "gather" else dtypes_of(mode, dtypes):
        assert result_dtype(mode, dtype, "float64") == dtype


@given(
    arrays(np.float64, (7, 3), elements=st.floats(-1e3, 1e3)),
    st.lists(st.integers(0, 7), min_size=0, max_size=4).map(sorted),
)
def test_average_of_means_is_the_mean_of_all_rows(rows, cuts):
    pieces = [p for p in np.split(rows, cuts) if len(p)]
    result = combine("avg", [p.mean(0) for p in pieces], [len(p) for p in pieces], f64)
    np.testing.assert_allclose(result, rows.mean(0), rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i4", "?"])
@pytest.mark.parametrize("mode", [*OPERATIONS, "gather"])
def test_parts_may_be_combined_machine_by_machine(mode, dtype):
    if mode not in ("avg", "gather") and not dtypes_of(mode, [dtype]):
        return  # outputs of this operation are refused before
    rng, weights = np.random.RandomState(1), [3, 2, 2, 1, 4]
    parts = [(4 * rng.rand(7)).astype(dtype) for _ in weights]
    wanted = result_dtype(mode, dtype, f32)
    partial = combine_some(mode, parts[2:4], weights[2:4])
    if partial is None:
        assert mode == "gather" or (mode == "avg" and dtype in ("i4", "?"))
        return
    some = [*parts[:2], partial, None, parts[4]]
    found = combine_of_machines(mode, some, weights, wanted)
    whole = combine(mode, parts, weights, wanted)
    assert found.dtype == whole.dtype == wanted
    np.testing.assert_allclose(found, whole, rtol=1e-3 if dtype == "f2" else 1e-6)
    alone = combine_of_machines(mode, [partial, None], weights[2:4], wanted)
    np.testing.assert_array_equal(alone, combine(mode, parts[2:4], weights[2:4], wanted))


def test_shapes_of_partial_results_are_those_of_each_of_their_ranks():
    assert combine_some("sum", [np.zeros(2), np.zeros(3)], [1, 1]) is None
    partial = combine_some("sum", [np.zeros(2), np.zeros(2)], [1, 1])
    with pytest.raises(ValueError, match=r"different shapes, \[\(3,\), \(2,\), \(2,\)\]"):
        combine_of_machines("sum", [np.zeros(3), partial, None], [1, 1, 1], f64)
