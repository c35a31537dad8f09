"""Calls that differ in the rows of ``batch`` only share one command: each computes its own rows."""

import numpy as np
import pytest
import theano.tensor as T
from support.helpers import function

import synkhronos as synk

VALUES = np.arange(60.0).reshape(20, 3)


@pytest.fixture
def f(ranks):
    """Return a function of a matrix and a vector: all of their selected rows, and a mean."""
    x, y = T.dmatrix("x"), T.dvector("y")
    return function([x, y], [(x, "gather"), (y, "gather"), x.mean() + y.mean()])


def check(results, rows, other=VALUES[:, 0]):
    x, y = VALUES[rows], other[rows]
    np.testing.assert_array_equal(results[0], x)
    np.testing.assert_array_equal(results[1], y)
    np.testing.assert_allclose(results[2], x.mean() + y.mean())


def test_rows_of_many_lengths_and_places(f):
    x, y = synk.data(VALUES), synk.data(VALUES[:, 0])
    random = np.random.RandomState(0)
    for _ in range(90):
        begin, end = sorted(random.choice(21, 2, replace=False).tolist())
        rows = slice(begin, end)
        form = random.randint(9)
        if form == 0:
            rows = slice(np.int64(begin), np.int64(end))
        elif form == 1:
            rows = slice(begin, end, 2)
        elif form == 2:
            rows = slice(begin - 20, end) if begin else slice(None, end)
        elif form == 3:
            rows = slice(begin, None)
        elif form == 4:
            rows = list(range(begin, end))
        elif form in (5, 6):
            rows = random.randint(0, 20, min(end - begin, 4))
        elif form == 7:
            rows = random.randint(-20, 20, min(end - begin, 4))
        check(f(x, y, batch=rows), rows)
    check(f(x, y, batch=7), slice(7))
    check(f(x, y), slice(None))


def test_two_functions_and_their_slices_in_turns(ranks):
    x = T.dvector("x")
    g, h = function([x], (x.sum(), "sum")), function([x], (x.max(), "max"))
    data = synk.data(np.arange(12.0))
    for begin in range(6):
        assert g(data, batch=slice(begin, begin + 4)) == 4 * begin + 6
        assert g(data, batch=slice(5, 5)) == 0
        assert h(data, batch=slice(begin + 1, begin + 5)) == begin + 4


def test_wrong_rows_after_right_ones(f):
    x, y = synk.data(VALUES), synk.data(VALUES[:, 0])
    check(f(x, y, batch=slice(0, 5)), slice(0, 5))
    for wrong in (slice(16, 21), slice(20, 25), slice(-21, -16), slice(21, 26)):
        with pytest.raises(ValueError, match="beyond the rows"):
            f(x, y, batch=wrong)
    for wrong in (slice(True, 6), slice(0.0, 5), slice("0", 5)):
        with pytest.raises(TypeError, match="batch"):
            f(x, y, batch=wrong)
    check(f(x, y, batch=slice(15, 20)), slice(15, 20))
    check(f(x, y, batch=np.array([3, 19, 3])), [3, 19, 3])
    for wrong in ([3, 20, 3], [-21, 0, 0], [2**62, 0, 0]):
        with pytest.raises(ValueError, match="batch asks for row"):
            f(x, y, batch=np.array(wrong))
    check(f(x, y, batch=np.array([-20, 0, -1])), [-20, 0, -1])
    check(f(x, y, batch=np.arange(9)[::-3]), [8, 5, 2])


def test_data_of_another_length_or_in_new_memory(f):
    x, y = synk.data(VALUES), synk.data(VALUES[:, 0])
    check(f(x, y, batch=slice(10, 15)), slice(10, 15))
    x.set_length(12)
    with pytest.raises(ValueError, match="beyond the rows"):
        f(x, y, batch=slice(10, 15))
    check(f(x, y, batch=slice(6, 11)), slice(6, 11))
    x.free_memory()
    x.set_value(VALUES)
    check(f(x, y, batch=slice(10, 15)), slice(10, 15))
    check(f(VALUES, y, batch=slice(10, 15)), slice(10, 15))
    check(f(VALUES, VALUES[:, 0], batch=slice(11, 16)), slice(11, 16))


def test_a_minibatch_beside_slices(f):
    x, minibatch = synk.data(VALUES), synk.data(VALUES[:6, 0], minibatch=True)
    for begin in (0, 3, 14):
        rows = slice(begin, begin + 6)
        results = f(x, minibatch, batch=rows)
        np.testing.assert_array_equal(results[0], VALUES[rows])
        np.testing.assert_array_equal(results[1], VALUES[:6, 0])
    with pytest.raises(ValueError, match="minibatch of 6 rows"):
        f(x, minibatch, batch=slice(0, 7))


def test_slices_with_num_slices_and_subsets(f):
    x, y = synk.data(VALUES), synk.data(VALUES[:, 0])
    for begin in (1, 5, 9):
        rows = slice(begin, begin + 9)
        check(f(x, y, batch=rows, num_slices=2), rows)
        check(f(x, y, batch=rows), rows)
        [found] = f(x, y, batch=rows, output_subset=[1])
        np.testing.assert_array_equal(found, VALUES[rows, 0])
