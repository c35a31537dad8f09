"""Data: every member and rule, on arrays of any number of dimensions."""

import copy
import gc
import itertools
import os
import pickle
import re

import numpy as np
import pytest
import theano.tensor as T
from support.helpers import function
from support.layouts import Layout

import synkhronos as synk
from synkhronos import session as _session
from synkhronos.inputs import Data

LAYOUTS = [Layout(2)]
pytestmark = pytest.mark.usefixtures("ranks")


@pytest.fixture(autouse=True)
def nothing_launched():
    """Making and changing Data crosses no barrier."""
    before = _session._Current.session.gate.sequence
    yield
    assert _session._Current.session.gate.sequence == before


def test_from_an_array():
    a = np.arange(6, dtype="float32").reshape(2, 3)
    d = synk.data(a)
    found = d.dtype, d.ndim, d.shape, d.size, len(d), d.alloc_size, d.name, d.minibatch
    assert found == ("float32", 2, (2, 3), 6, 2, 6, None, False)
    assert type(d) is Data and type(d.dtype) is str and type(d.data) is np.ndarray
    np.testing.assert_array_equal(d.data, a)
    a[0] = 9
    assert d[0, 0] == 0
    np.testing.assert_array_equal(synk.data(a.T[::-1]).data, a.T[::-1])
    big = synk.data(a.astype(">f4")).data
    np.testing.assert_array_equal(big, a)
    assert big.dtype.isnative
    assert synk.data(a, shape=[2, 3]).shape == (2, 3)
    other = synk.data(np.arange(4.0).reshape(2, 2))
    d = synk.data(other)
    d.set_value(other)
    assert d.data.tolist() == [[0, 1], [2, 3]] and not np.shares_memory(d.data, other.data)


def test_from_a_variable():
    x = T.imatrix("pixels")
    d = synk.data(var=x)
    assert (d.dtype, d.ndim, d.shape, d.name, d.alloc_size) == ("int32", 2, (0, 0), "pixels", 0)
    d = synk.data(np.ones((2, 2), "uint8"), x, name="mine", minibatch=True)
    assert (d.dtype, d.name, d.minibatch) == ("int32", "mine", True)
    np.testing.assert_array_equal(d.data, 1)
    assert repr(synk.data(var=x, dtype="int32", ndim=2)) == "<Data 'pixels' of int32, shape (0, 0)>"
    assert repr(d) == "<Data 'mine' of int32, shape (2, 2), minibatch>"
    assert repr(synk.data([1.0])) == "<Data of float64, shape (1,)>"


def test_from_dtype_and_ndim_or_shape():
    d = synk.data(dtype="float64", ndim=3)
    assert (d.shape, d.alloc_size) == ((0, 0, 0), 0)
    d = synk.data(dtype=np.dtype("int16"), shape=(2, 5), oversize=1.5)
    assert (d.shape, d.alloc_size, d.dtype) == ((2, 5), 15, "int16")
    np.testing.assert_array_equal(d.data, 0)
    assert synk.data(dtype=np.float32, shape=(1,)).dtype == "float32"
    assert synk.data(dtype="int8", shape=(5, 2), oversize=1.55).alloc_size == 15
    for shape in (np.array([2, 3]), range(2, 4)):
        assert synk.data(dtype="int8", shape=shape).shape == (2, 3)


def test_from_lists_and_scalars():
    assert synk.data([1, 2, 3], dtype="int8", ndim=1).data.tolist() == [1, 2, 3]
    assert synk.data([[1.5]], dtype="float32").shape == (1, 1)
    assert synk.data(2.5, dtype="float32").data == np.float32(2.5)
    assert synk.data([True, False]).dtype == "bool"


CASTS = {  # up, and down by force only
    "int32": (["uint8", "int16", "bool"], ["int64", "float32"]),
    "uint8": (["bool"], ["int8"]),
    "float32": (["float16", "uint8", "int16"], ["int32", "float64"]),
    "float64": (["float32", "int64"], ["complex64"]),
    "complex64": (["float32"], ["complex128"]),
    "bool": ([], ["int8"]),
}


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("own", CASTS)
def test_casts_up_and_down_by_force(own):
    up, down = CASTS[own]
    d = synk.data(np.zeros(2, own), name="d")
    for given in down:
        value = np.array([0, 1, 1], given)
        for refused in (d.set_value, d.condition_data):
            with pytest.raises(TypeError) as caught:
                refused(value)
            assert all(word in str(caught.value) for word in (given, own, "force_cast", "'d'"))
        assert d.shape == (2,)
        conditioned = d.condition_data(value, force_cast=True)
        assert (conditioned.dtype, conditioned.tolist()) == (own, [0, 1, 1])
        assert d.shape == (2,)  # it was a dry run
        d.set_value(value, force_cast=True)
        assert (d.dtype, d.data.tolist()) == (own, [0, 1, 1])
        assert synk.data(value, dtype=own, force_cast=True).data.tolist() == [0, 1, 1]
        d.set_value(np.zeros(2, own))
    for given in up:
        assert d.condition_data(np.zeros(2, given)).dtype == own
        d.set_value(np.array([0, 1, 1], given))
        assert (d.dtype, d.data.tolist()) == (own, [0, 1, 1])
        assert synk.data(np.ones(2, given), dtype=own).dtype == own


@pytest.mark.parametrize(
    "value, dtype, wrong",
    [
        ([1, 300, -1], "uint8", "300"),
        ([[1, 2], [3, -4]], "uint16", "-4"),
        (1.5, "int32", "1.5"),
        ([0.0, float("nan")], "int64", "nan"),
        ([2], "bool", "2"),
        ([1, 2**24 + 1], "float32", "16777217"),
        ([2**53 + 1], "float64", "9007199254740993"),
        ([1.0, 1e300], "float32", "1e+300"),
        ([1, 2j], "float32", "2j"),
        ([-1, 2**63], "uint64", "-1"),
        (np.int64(-1), "uint64", "-1"),
        ([[1, 2**63]], "int64", "9223372036854775808"),
        ([np.array([2**63], "uint64")], "int64", "9223372036854775808"),
        ([np.uint64(2**63), -1], "int64", "9223372036854775808"),
        (2**64 - 1, "int32", "18446744073709551615"),
        ([2.0**64], "uint64", "1.8446744073709552e+19"),
        ([2**53 + 1, 0.5], "int64", "0.5"),
    ],
    ids=repr,
)
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in cast")  # of NumPy 2
def test_the_number_that_does_not_fit_is_named(value, dtype, wrong):
    with pytest.raises(TypeError) as error:
        synk.data(value, dtype=dtype, name="d")
    assert f"Data 'd' is of dtype {dtype}, which can't hold {wrong}. Cast" in str(error.value)
    d = synk.data(dtype=dtype, ndim=np.ndim(value))
    with pytest.raises(TypeError, match="can't hold"):
        d.set_value(value)
    assert d.size == (1 if d.ndim == 0 else 0)
    if not isinstance(value, list) or 2j not in value:
        d.set_value(value, force_cast=True)
        assert d.shape == np.shape(value)


def test_indexing_is_that_of_the_array():
    a = np.arange(24.0).reshape(4, 6)
    d = synk.data(a)
    for key in (1, -1, slice(1, 3), (0, 5), [3, 0, 0], (slice(None), 2), a > 7, ..., None):
        np.testing.assert_array_equal(d[key], a[key])
    d[1] = 5
    d[[0, 3], 0] = [7, 8]
    d[d.data > 20] = 0
    a[1] = 5
    a[[0, 3], 0] = [7, 8]
    a[a > 20] = 0
    np.testing.assert_array_equal(d.data, a)
    with pytest.raises(IndexError):
        d[4]
    assert [row.sum() for row in d] == a.sum(1).tolist()


def test_it_converts_to_an_array():
    d, e = synk.data(np.arange(4.0), name="d"), synk.data(np.arange(4.0))
    np.testing.assert_array_equal(np.asarray(d), np.arange(4.0))
    assert np.shares_memory(np.asarray(d), d.data) and not np.shares_memory(np.array(d), d.data)
    assert np.asarray(d, "float32").dtype == "float32"
    assert not np.shares_memory(d.__array__(copy=True), d.data)
    assert np.sum(d) == 6 and np.mean(d) == 1.5 and np.add(d, 1).tolist() == [1, 2, 3, 4]
    assert {d: 1, e: 2} == {d: 1, e: 2} and len({d, e, d}) == 2 and hash(d) != hash(e)
    assert (d == e).all() and not (d != e).any()
    assert type(d + T.dvector("x")) is type(T.dvector("x") + 1)


def test_the_array_can_not_be_replaced():
    d = synk.data(np.arange(4.0), name="d")
    d.data *= 2
    d.data[1:] += 1
    d[0] -= 1
    d[...] /= 2
    view = d.data
    assert view.tolist() == [-0.5, 1.5, 2.5, 3.5]
    d.set_length(100)
    for other in (view, d.data.copy(), d.data[:]):
        with pytest.raises(AttributeError, match=r"Data 'd' can't be replaced.*set_value"):
            d.data = other
    assert d.data[:4].tolist() == [-0.5, 1.5, 2.5, 3.5]


def test_operators_give_the_arrays_of_numpy():
    array = np.array([1.0, 2.0, 3.0])
    d = synk.data(array)
    others = [2.0, np.array([[1.0], [2.0]]), [3.0, 1.0, 2.0], np.float32(3)]
    symbols = ["+", "-", "*", "/", "//", "%", "**", "==", "!=", "<", "<=", ">", ">="]
    for symbol, other in itertools.product(symbols, others):
        for text in (
            f"d {symbol} other",
            f"other {symbol} d",
            f"d {symbol} d",
            f"array {symbol} d",
        ):
            found = eval(text, {"d": d, "array": array, "other": other})
            expected = eval(text, {"d": array, "array": array, "other": other})
            assert type(found) is np.ndarray and found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected, text)
    np.testing.assert_array_equal(d.data, array)


def test_operators_of_integers_and_bools_and_with_one_operand():
    array, matrix = np.array([5, 6, -7]), np.arange(6).reshape(3, 2)
    d, m, mask = synk.data(array), synk.data(matrix), synk.data(array > 5)
    for text in ("d & 3", "3 | d", "d ^ d", "d << 1", "2 << abs(d)", "d >> 1", "-d", "+d", "~d"):
        np.testing.assert_array_equal(eval(text, {"d": d}), eval(text, {"d": array}))
    for text in ("d @ m", "m.T @ d", "list(d) @ m", "divmod(d, 3)", "divmod(7, d)", "abs(d)"):
        found = eval(text, {"d": d, "m": m if text == "d @ m" else matrix})
        np.testing.assert_array_equal(found, eval(text, {"d": array, "m": matrix}))
    np.testing.assert_array_equal(~mask, array <= 5)
    np.testing.assert_array_equal(d[d == 6], [6])
    np.testing.assert_array_equal(d[mask], [6])
    np.testing.assert_array_equal(m[mask, synk.data(1)], [3])
    d[mask] = 0
    assert list(d) == [5, 0, -7] and 5 in d and 6 not in d
    one = synk.data(2)
    assert (int(one), float(one), complex(one), bool(synk.data(0.0))) == (2, 2.0, 2.0, False)
    assert range(5)[synk.data(3)] == 3
    with pytest.raises(TypeError):
        float(d)
    assert bool(d) and not synk.data(dtype="int64", ndim=1)  # the length, as of lists


def test_operators_in_place_write_to_the_shared_memory():
    d = same = synk.data([1.0, 2.0])
    view = d.data
    d += 1
    d *= synk.data([2.0, 3.0])
    d -= [1, 2]
    d /= 2
    d **= 2
    assert d is same and d.data is view and view.tolist() == [2.25, 12.25]
    with pytest.raises(TypeError, match=r"shape \(2,\)> can't be changed in place by x"):
        d += T.dvector("x")
    with pytest.raises(TypeError):
        synk.data([1, 2]).__itruediv__(2)  # as NumPy: the result has no integers


@pytest.mark.filterwarnings("ignore:Creating an ndarray from ragged")
@pytest.mark.parametrize(
    "value",
    ["ab", b"ab", ["a"], [None], np.array([None]), [[1], [1, 2]], {1, 2}, {1: 2}, T.dvector("x")]
    + [[10**400], np.zeros(2, [("a", int)]), np.zeros(2, "M8[s]"), np.ma.array([1], mask=[1])],
    ids=lambda value: str(value)[:20],
)
def test_what_holds_no_numbers_is_refused_and_takes_no_memory(value):
    gc.collect()
    d, before = synk.data(np.arange(2.0)), len(os.listdir("/proc/self/fd"))
    with pytest.raises(TypeError) as caught:
        synk.data(value, name="d")
    for change in (d.set_value, d.condition_data, lambda value: d.set_value(value, oversize=2)):
        with pytest.raises(TypeError):
            change(value)
    assert "Data 'd'" in str(caught.value) and d.data.tolist() == [0, 1]
    del caught
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    "kwargs, words",
    [
        ({}, ["dtype", "ndim"]),
        ({"dtype": "float32"}, ["ndim"]),
        ({"shape": (2, 2)}, ["dtype"]),
        ({"dtype": object, "ndim": 1}, ["dtype", "object"]),
        ({"dtype": "S3", "ndim": 1}, ["dtype"]),
        ({"value": np.zeros(2), "var": T.fvector("v")}, ["'v'", "float64", "float32"]),
        ({"value": np.zeros(2), "var": T.dmatrix("v")}, ["'v'", "2 dimensions"]),
        ({"value": np.zeros(2), "ndim": 2}, ["2 dimensions"]),
        ({"value": np.zeros(2), "dtype": "float32"}, ["float64", "float32"]),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_one_another(kwargs, words):
    with pytest.raises(TypeError) as caught:
        synk.data(**kwargs)
    assert all(word in str(caught.value) for word in words)


def test_documented_allocations():
    gc.collect()
    d = synk.data(dtype="float32", shape=(5, 4))
    before = len(os.listdir("/proc/self/fd"))
    for shape, oversize, allocated in (
        ((5, 4), 1, 20),
        ((2000, 10), 1.1, 22000),
        ((2100, 10), 1, 22000),
        ((100, 8), 1, 22000),
        ((3000, 8), 1, 24000),
    ):
        d.set_value(np.ones(shape, "float32"), oversize=oversize)
        assert (d.shape, d.size, d.alloc_size) == (shape, np.prod(shape), allocated)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before  # the old memory was given back
    d.free_memory()
    assert (d.shape, d.alloc_size) == ((0, 0), 0)
    d.set_value(np.ones((100, 8), "float32"))
    assert (d.size, d.alloc_size) == (800, 800)


def test_set_value_takes_the_shape_and_keeps_the_number_of_dimensions():
    d = synk.data(np.zeros((2, 3)), name="d")
    d.set_value(np.ones((5, 1)))
    assert d.shape == (5, 1)
    for bad in (np.ones(3), np.ones((1, 1, 1)), 1.0):
        with pytest.raises(TypeError, match="dimensions"):
            d.set_value(bad)
    np.testing.assert_array_equal(d.data, np.ones((5, 1)))


def test_growing_and_shrinking_keep_the_contents():
    d = synk.data(np.arange(6.0).reshape(3, 2))
    d.set_length(2)
    np.testing.assert_array_equal(d.data, [[0, 1], [2, 3]])
    d.set_length(3)
    np.testing.assert_array_equal(d.data, [[0, 1], [2, 3], [4, 5]])
    d.set_length(100)
    np.testing.assert_array_equal(d[:3], [[0, 1], [2, 3], [4, 5]])
    np.testing.assert_array_equal(d[3:], 0)
    d.set_shape((2, 3))
    np.testing.assert_array_equal(d.data, [[0, 1, 2], [3, 4, 5]])
    d.set_shape((300, 4), oversize=2)
    assert d.alloc_size == 2400
    np.testing.assert_array_equal(d.data.ravel()[:6], np.arange(6.0))


def test_0d():
    d = synk.data(np.array(2.5))
    assert (d.shape, d.ndim, d.size, d.alloc_size) == ((), 0, 1, 1)
    assert d[()] == 2.5 and float(d.data) == 2.5
    d[...] = 4
    d.set_value(7)
    assert d.data == 7
    with pytest.raises(TypeError):
        len(d)
    with pytest.raises(TypeError, match="axis 0"):
        d.set_length(2)
    d.set_shape(())
    assert d.data == 7
    d.free_memory()
    assert (d.shape, d.alloc_size) == ((), 1)
    d.set_value(3.0)
    assert d.data == 3
    assert synk.data(dtype="int64", ndim=0).data == 0
    assert synk.data(dtype="int64", shape=()).data == 0


def test_empty():
    for shape in ((0,), (0, 3), (3, 0, 2)):
        d = synk.data(np.zeros(shape))
        assert (d.shape, d.size) == (shape, 0)
    d = synk.data(np.zeros((0, 3)))
    d.set_length(2)
    np.testing.assert_array_equal(d.data, np.zeros((2, 3)))
    unallocated = synk.data(dtype="float32", ndim=2)
    unallocated.set_length(4)
    assert unallocated.shape == (4, 0)
    unallocated.set_shape((4, 5))
    np.testing.assert_array_equal(unallocated.data, np.zeros((4, 5)))


def test_old_views_stay_readable_and_are_detached_by_reallocation():
    d = synk.data(np.arange(3.0))
    view = d.data
    view[0] = 9
    assert d[0] == 9
    d.set_length(2)
    view[1] = 8  # the same memory still
    assert d[1] == 8
    d.set_length(1000)
    view[2] = 7
    assert d[2] == 2
    np.testing.assert_array_equal(view, [9, 8, 7])
    d.free_memory()
    np.testing.assert_array_equal(view, [9, 8, 7])


class TestInCalls:
    """Data that is used by functions."""

    @pytest.fixture(autouse=True)
    def nothing_launched(self):
        """Calls do cross."""

    def test_functions_see_every_change_without_a_copy(self):
        x = T.dmatrix("x")
        f = function([x], (x.sum(1), "gather"))
        d = synk.data(np.ones((4, 2)))
        np.testing.assert_array_equal(f(d), [2] * 4)
        for row in range(4):
            d[row] = row
            np.testing.assert_array_equal(f(d)[: row + 1], 2 * np.arange(row + 1.0))
        d.set_shape((2, 4))
        np.testing.assert_array_equal(f(d), [2, 10])
        d.set_length(3)
        np.testing.assert_array_equal(f(d), [2, 10, 0])

    def test_empty_and_0d_data_are_inputs(self):
        x, a = T.dvector("x"), T.dscalar("a")
        f = function([x], (x.sum() + a, "sum"), bcast_inputs=[a])
        d = synk.data(dtype="float64", ndim=1)
        assert f(d, synk.data(np.array(2.0))) == 2
        d.set_value([1.0, 2.0])
        assert f(d, 0) == 3


@pytest.mark.parametrize("copy_of", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_copy_is_refused_in_words(copy_of):
    d = synk.data(np.arange(3.0), name="d")
    with pytest.raises(
        TypeError, match=r"Data 'd' can't be pickled or copied: .* numpy.array\(d\)"
    ):
        copy_of(d)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(d.data)), d.data)


@pytest.mark.parametrize("name", [5, T.dvector("x"), np.array([1, 2]), b"ab"], ids=repr)
def test_any_name_is_shown_as_text(name):
    d = synk.data(np.arange(3.0), name=name)
    assert d.name == str(name)
    with pytest.raises(TypeError, match=re.escape(f"Data {str(name)!r} has 1 dimension, but")):
        d.set_value(np.ones((2, 2)))
