"""The worked examples of batches, slices and updates, number by number, on two ranks."""

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.helpers import function
from support.layouts import Layout
from support.replicas import put, replicas

import synkhronos as synk

LAYOUTS = [Layout(2), Layout(2, master=1)]

pytestmark = pytest.mark.usefixtures("ranks")


def test_batch():
    x = T.dvector("x")
    f = function([x], [(x, "gather"), (x.shape[:1], "gather")])
    for batch, rows, counts in [
        (3, [0, 1, 2], [1, 2]),
        (slice(2, 7), [2, 3, 4, 5, 6], [2, 3]),
        ([9, 0, 5], [9, 0, 5], [1, 2]),
        ([-1, 0], [9, 0], [1, 1]),
    ]:
        found = f(np.arange(10.0), batch=batch)
        assert [part.tolist() for part in found] == [rows, counts]


def test_minibatch():
    x, y = T.dvector("x"), T.dvector("y")
    f = function([x, y], [(x, "gather"), (y, "gather")])
    w = synk.data(np.arange(100.0, 104), minibatch=True)
    for batch, rows in ((4, [0, 1, 2, 3]), (slice(5, 8), [5, 6, 7]), ([9, 2, 4], [9, 2, 4])):
        first, second = f(np.arange(10.0), w, batch=batch)
        assert first.tolist() == rows
        assert second.tolist() == [100, 101, 102, 103][: len(rows)]
    with pytest.raises(ValueError, match="minibatch of 4 rows, but batch selects 5"):
        f(np.arange(10.0), w, batch=5)
    with pytest.raises(ValueError, match="same length"):
        f(np.arange(10.0), w)


def test_batch_s():
    d, x = theano.shared(np.zeros(0)), T.dvector()
    f = function([], (d, "gather"), sliceable_shareds=[d])
    function([x], updates=[(d, x)])(np.arange(20.0))
    for batch_s, rows in [
        (slice(2, 5), [2, 3, 4, 12, 13, 14]),
        ([9, 0, 0], [9, 0, 0, 19, 10, 10]),
        ([[1, 2, 3], [4]], [1, 2, 3, 14]),
        ([slice(0, 2), slice(8, 10)], [0, 1, 18, 19]),
    ]:
        assert f(batch_s=batch_s).tolist() == rows
    put(d, [np.arange(4.0), np.arange(4.0)])
    both = function([x], ((x + d).sum(), "sum"), sliceable_shareds=[d])
    assert both(np.ones(4), batch_s=slice(0, 2)) == 6


def test_batch_s_of_images():
    # As the 2017 test of batch_s had it: rows 0 to 49 on rank 0, 100 to 149 on rank 1.
    d = theano.shared(np.zeros((0, 3)))
    numbers = np.repeat(np.arange(50.0)[:, None], 3, axis=1)
    put(d, [numbers, 100 + numbers])
    f = function([], (d, "gather"), sliceable_shareds=[d])
    for batch_s, rows in [
        ([0, 1, 2, 3, 4, 5], [*range(6), *range(100, 106)]),
        ([49, 23, 1, 7, 23], [49, 23, 1, 7, 23, 149, 123, 101, 107, 123]),
        ([list(range(6)), list(range(10, 16))], [*range(6), *range(110, 116)]),
        (slice(3, 17), [*range(3, 17), *range(103, 117)]),
    ]:
        for slices in (1, 2, 3):
            assert f(batch_s=batch_s, num_slices=slices).tolist() == [[row] * 3 for row in rows]


def test_slices(ranks):
    x = T.dmatrix("x")
    total, product, small = x.sum(0), x.prod(0), x.min(0)
    f = function(
        [x],
        [(total, "sum"), (total, "avg"), (product, "prod"), (small, "min"), (x.max(0), "max")]
        + [(total, None)],
    )
    value = np.arange(1.0, 9).reshape(4, 2)
    *found, last = [part.tolist() for part in f(value)]
    assert found == [[16, 20], [8, 10], [105, 384], [1, 2], [7, 8]]
    assert last == ([12, 14] if ranks.master else [4, 6])
    *found, last = [part.tolist() for part in f(value, num_slices=2)]
    assert found == [[16, 20], [4, 5], [105, 384], [1, 2], [7, 8]]
    assert last == ([7, 8] if ranks.master else [3, 4])


def test_avg_is_the_mean_over_all_rows():
    v = T.dvector("v")
    f = function([v], [v.mean(), (v.sum(), "sum")])
    for slices in (1, 2, 3, 50):
        np.testing.assert_allclose(f(np.arange(1.0, 6), num_slices=slices), [3, 15], rtol=1e-15)


def test_output_subset():
    x = T.dvector("x")
    f = function([x], [(x.sum(), "sum"), (x.max(), "max"), (x.min(), "min")])
    numbers = np.arange(1.0, 7)
    assert f(numbers, output_subset=[2, 0]) == [21, 1]
    assert f(numbers, output_subset=[0, 2]) == [21, 1]
    assert f(numbers) == [21, 6, 1]


def test_updates_without_slices():
    s, x = theano.shared(np.ones(2)), T.dmatrix("x")
    f = function([x], updates=[(s, (x * s).sum(0))])
    f(np.repeat([[1.0], [2.0], [3.0], [4.0]], 2, axis=1))
    assert [part.tolist() for part in replicas(s)] == [[3, 3], [7, 7]]


@pytest.mark.parametrize(
    "mode, expected",
    [("sum", [10, 26]), ("avg", [5, 13]), ("max", [7, 15]), ("min", [3, 11])]
    + [("prod", [21, 165]), (None, [7, 15])],
)
def test_updates_over_slices(mode, expected):
    s, x = theano.shared(0.0), T.dvector("x")
    f = function([x], updates=[(s, x.sum(), mode)])
    assert f(np.arange(1.0, 9), num_slices=2) == []
    assert replicas(s) == expected


def test_gathered_updates_over_slices():
    s, x = theano.shared(np.zeros(1)), T.dvector("x")
    f = function([x], updates=[(s, T.unbroadcast(x.sum().dimshuffle("x"), 0), "gather")])
    f(np.arange(1.0, 9), num_slices=2)
    assert [part.tolist() for part in replicas(s)] == [[3, 7], [11, 15]]


def test_an_update_that_adds_counts_the_original_value_for_every_slice():
    s, x = theano.shared(100.0), T.dvector("x")
    f = function([x], updates=[(s, s + x.sum(), "sum")])
    f(np.arange(1.0, 9), num_slices=2)
    assert replicas(s) == [210, 226]
