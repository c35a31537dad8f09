"""Inputs and outputs with their rows on another axis than 0, against plain Theano and NumPy."""

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.helpers import MODE, Call, function, shares
from support.layouts import Layout

import synkhronos as synk
from synkhronos import ops

LAYOUTS = [Layout(2), Layout(3, master=1)]
pytestmark = pytest.mark.usefixtures("ranks")

RNG = np.random.RandomState(0)
TIMES, ROWS = 4, 10
SEQUENCES = RNG.normal(size=(TIMES, ROWS, 3))
LABELS = RNG.randint(0, 3, ROWS).astype("int32")
X, Y = T.dtensor3("x"), T.ivector("y")
SELECTIONS = [None, 7, slice(2, 9), slice(None, None, -2), slice(1, 8, 3), [9, 0, 4, 4, 1], [3], []]


@pytest.fixture(scope="module")
def joined(ranks):
    """Return a function that gathers its input along the axis of rows, and the rows of each."""
    out, transposed = 2 * X, X.dimshuffle(1, 2, 0)
    f = function(
        [X, Y],
        [(out, "gather"), (transposed, "gather"), (Y, "gather"), (X.shape[1], "gather"), X.mean()],
        axes={X: 1, out: -2},
    )
    yield f
    del f


@pytest.mark.every
@pytest.mark.parametrize("batch", SELECTIONS, ids=str)
@pytest.mark.parametrize("num_slices", [1, 3])
@pytest.mark.parametrize("kind", ["array", "data"])
def test_rows_are_selected_scattered_sliced_and_gathered(ranks, joined, batch, num_slices, kind):
    rows = np.arange(ROWS)[: batch if isinstance(batch, int) else None]
    rows = rows if batch is None or isinstance(batch, int) else rows[batch]
    x, y = (synk.data(SEQUENCES), synk.data(LABELS)) if kind == "data" else (SEQUENCES, LABELS)
    if not len(rows):
        found = joined(x, y, batch=batch, output_subset=[0, 1, 2], num_slices=num_slices)
    else:
        found = joined(x, y, batch=batch, num_slices=num_slices)
        np.testing.assert_allclose(found[4], SEQUENCES[:, rows].mean())
        if num_slices == 1:
            counts = [len(each) for each in shares(rows, ranks.n) if len(each)]
            assert found[3].tolist() == counts
    np.testing.assert_array_equal(found[0], 2 * SEQUENCES[:, rows])
    np.testing.assert_array_equal(found[1], SEQUENCES[:, rows].transpose(1, 2, 0))
    np.testing.assert_array_equal(found[2], LABELS[rows])


def test_a_rank_reads_a_view_of_its_part(ranks):
    d = synk.data(SEQUENCES)
    address = Call(lambda x: [x.__array_interface__["data"][0] % 4096, *x.strides])
    f = function([X], (address(X), "gather"), axes={X: 1})
    base = d.data.__array_interface__["data"][0]
    found = f(d).reshape(-1, 4)
    first_rows = [share[0] for share in shares(range(ROWS), ranks.n)]
    for (offset, *strides), first in zip(found, first_rows):
        assert offset == (base + first * d.data.strides[1]) % 4096
        assert tuple(strides) == d.data.strides


def test_copies_of_selected_rows_share_one_buffer_over_calls_of_any_size(joined):
    for n in (9, 3, 10, 1, 6):
        rows = np.random.RandomState(n).permutation(ROWS)[:n]
        found = joined(SEQUENCES, LABELS, batch=rows)
        np.testing.assert_array_equal(found[0], 2 * SEQUENCES[:, rows])


def test_minibatch_data_and_rows_on_different_axes():
    a, b, c = T.dmatrix("a"), T.dmatrix("b"), T.dvector("c")
    f = function([a, b, c], (a.T + b + c.dimshuffle(0, "x"), "gather"), axes={a: 1, b: 0})
    A, B, C = RNG.normal(size=(3, 10)), RNG.normal(size=(10, 3)), RNG.normal(size=6)
    rows = [8, 2, 5, 9]
    found = f(A, B, synk.data(C, minibatch=True), batch=rows)
    np.testing.assert_allclose(found, A.T[rows] + B[rows] + C[:4, None], rtol=1e-14)
    few = synk.data(A[:, :4], minibatch=True, name="few")
    found = f(few, B, synk.data(C, minibatch=True), batch=rows, num_slices=2)
    np.testing.assert_allclose(found, A.T[:4] + B[rows] + C[:4, None], rtol=1e-14)
    with pytest.raises(
        ValueError, match=r"'a' of .* is a minibatch of 4 rows, but batch selects 5"
    ):
        f(few, B, C, batch=[0, 1, 2, 3, 4])


def test_averages_are_weighted_and_updates_see_the_rows(ranks):
    s = theano.shared(np.zeros(3), "s")
    mean = ops.all_reduce(X.mean(axis=(0, 1)))
    f = function([X], [X.mean(), (X.sum(axis=1), "sum")], updates=[(s, s + mean)], axes={X: 1})
    found = f(SEQUENCES[:, :7])
    np.testing.assert_allclose(found[0], SEQUENCES[:, :7].mean())
    np.testing.assert_allclose(found[1], SEQUENCES[:, :7].sum(axis=1))
    f(SEQUENCES[:, :5], num_slices=2)
    expected = SEQUENCES[:, :7].mean(axis=(0, 1)) + SEQUENCES[:, :5].mean(axis=(0, 1))
    for value in synk.gather(s).reshape(ranks.n, 3):
        np.testing.assert_allclose(value, expected, atol=1e-15)


def recurrent(reduce):
    """Return parameters, loss, and new values of a recurrent network on time-major data."""
    rng = np.random.RandomState(1)
    w, v = (theano.shared(0.3 * rng.normal(size=(3, 3)), name) for name in "wv")
    states, _ = theano.scan(
        lambda x, h: T.tanh(T.dot(x, v) + T.dot(h, w)), X, T.zeros((X.shape[1], 3))
    )
    p = T.nnet.softmax(states[-1])
    loss = -T.mean(T.log(p)[T.arange(Y.shape[0]), Y])
    return [w, v], loss, [(p, p - 0.5 * reduce(T.grad(loss, p))) for p in (w, v)], states


@pytest.mark.usefixtures("quickly_compiled")
def test_a_recurrent_network_trains_as_serial_theano(ranks):
    serial_params, loss, updates, states = recurrent(lambda g: g)
    serial = theano.function([X, Y], [loss, states], updates=updates, mode=MODE)
    params, loss, updates, states = recurrent(ops.all_reduce)
    train = synk.function(
        [X, Y], [loss, (states, "gather")], updates=updates, axes={X: 1, states: 1}, mode=MODE
    )
    for rows in (10, 7, 10):
        expected = serial(SEQUENCES[:, :rows], LABELS[:rows])
        for given, wanted in zip(train(SEQUENCES, LABELS, batch=rows), expected):
            np.testing.assert_allclose(given, wanted, rtol=1e-10)
    for mine, theirs in zip(params, serial_params):
        np.testing.assert_allclose(mine.get_value(), theirs.get_value(), rtol=1e-10)


def test_lengths_that_do_not_agree_are_refused(ranks):
    f = function([X, Y], X.sum() + Y.sum(), name="f", axes={X: 1})
    with pytest.raises(ValueError, match=r"the same number of rows, got: 'x' 10 \(axis 1\), 'y' 9"):
        f(SEQUENCES, LABELS[:9])
    g = function([X, Y], X.sum() + Y.sum(), name="g")
    with pytest.raises(ValueError, match=r"along axis 0, got: 'x' 4, 'y' 10.* axes={x: 1}"):
        g(SEQUENCES, LABELS)
    column = T.TensorType("float64", (False, True))("column")
    h = function([column], (column, "gather"), axes={column: 1}, name="h")
    assert h(np.ones((4, 1))).shape == (4, 1)
    with pytest.raises(ValueError, match="broadcastable along axis 1: it has exactly one row"):
        h(np.ones((4, 1)), batch=[0, 0])


def test_parts_that_differ_elsewhere_stay_apart(ranks):
    ragged = X[: X[0, 0, 0].astype("int64")]
    f = function([X], (ragged, "gather"), axes={X: 1, ragged: 1})
    x = np.ones((4, ranks.n, 2))
    x[0, :, 0] = np.arange(ranks.n) + 1
    found = f(x)
    assert [part.shape for part in found] == [(n + 1, 1, 2) for n in range(ranks.n)] or ranks.n == 1
    with pytest.raises(synk.WorkerError, match="beyond axis 1"):
        f(np.concatenate([x, 3 * x], axis=1), num_slices=2)


def test_other_uses_of_axes_are_refused():
    s, whole, out = theano.shared(np.ones((2, 2)), "s"), T.dmatrix("whole"), X.sum(axis=2)
    with pytest.raises(ValueError, match="axes names s, one of sliceable_shareds"):
        function([], s.sum(), sliceable_shareds=[s], axes={s: 1})
    with pytest.raises(ValueError, match="axes names whole, which is neither"):
        function([X], X.sum() + whole.sum(), bcast_inputs=[whole], axes={whole: 1})
    with pytest.raises(ValueError, match="nor an output of mode 'gather'"):
        function([X], (out, "sum"), axes={out: 1})


def test_calls_with_axes_are_checked(ranks):
    total, out = X.sum(axis=(0, 1)), 2 * X
    f = function([X], [(out, "gather"), (total, "sum")], axes={X: 1, out: 1}, check=True)
    for batch in (None, slice(2, 9), [4, 0, 1]):
        f(SEQUENCES, batch=batch)
    if ranks.n > 1:
        with pytest.warns(synk.PortingWarning, match=r"Write \(output, 'sum'\)"):
            wrong = function([X], total, axes={X: 1}, check=1, name="wrong")
        wrong(SEQUENCES)


def test_averages_of_rows_on_another_axis_are_told(ranks):
    out = X.sum(axis=2)
    f = function([X], out, axes={X: 1})
    if ranks.n == 2:
        with pytest.warns(synk.PortingWarning, match="'gather'.* and axes={variable: 1}"):
            f(SEQUENCES)
    function([X], X.sum(axis=1), axes={X: 1})(SEQUENCES)
