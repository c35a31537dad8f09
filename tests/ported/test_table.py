"""What scripts for serial Theano do, line by line: told, refused, or right; and check=True."""

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.layouts import ON_DEVICES, Layout, forked

import synkhronos as synk
from synkhronos import PortingWarning

pytestmark = [
    pytest.mark.skipif(ON_DEVICES, reason="forks sessions of its own"),
    pytest.mark.usefixtures("quickly_compiled"),
    pytest.mark.every,
]
X = np.arange(24.0).reshape(6, 4)
B = 6


@pytest.fixture(
    params=[Layout(2), pytest.param(Layout(3, master=1), marks=pytest.mark.thorough)], ids=str
)
def where(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["", "check"])
def checked(request, where):
    """Fork, and return whether the first calls are checked."""
    with forked(where, check=request.param):
        yield request.param


def told(call, *wanted):
    """Return the result of a call that tells these things, and nothing else, in this order."""
    with pytest.warns(PortingWarning) as caught:
        result = call()
    messages = [str(each.message) for each in caught]
    assert len(messages) == len(wanted), messages
    for message, text in zip(messages, wanted):
        assert text in message
    return result


def if_checked(checked, call, *wanted):
    return told(call, *wanted) if checked else call()


def test_set_value_is_told(checked):
    x, w = T.dmatrix("x"), theano.shared(1.0, "w")
    f = synk.function([x], w * x.mean(), name="f")
    f(X)
    w.set_value(3.0)
    cause = ["Before the call, ranks had different values of w: write synk.broadcast(w)"]
    found = told(lambda: f(X), "w was set in the master only", *(cause if checked else []))
    assert found != pytest.approx(3 * X.mean())
    synk.broadcast(w)
    assert f(X) == pytest.approx(3 * X.mean())


def test_set_value_is_followed(where):
    with forked(where, follow=True, check=True):
        x, w = T.dmatrix("x"), theano.shared(1.0, "w")
        f = synk.function([x], w * x.mean(), name="f")
        f(X)
        w.set_value(3.0)
        assert f(X) == pytest.approx(3 * X.mean())


@pytest.mark.parametrize("what", [lambda x: x.sum(axis=1), lambda x: T.argmax(x, axis=1)])
def test_outputs_for_each_row_are_told(checked, what):
    x = T.dmatrix("x")
    f = synk.function([x], what(x), name="f")
    cause = ["its shape is"] if checked else []
    told(lambda: f(X), "'gather'", *cause)
    f = synk.function([x], (what(x), "gather"))
    expected = theano.function([x], what(x))(X)
    np.testing.assert_array_equal(f(X), expected)


def test_sums_are_found_by_the_check(checked):
    x = T.dmatrix("x")
    f = if_checked(checked, lambda: synk.function([x], x.sum(), name="f"), "Write (output, 'sum')")
    assert f(X) < X.sum()
    assert synk.function([x], (x.sum(), "sum"))(X) == pytest.approx(X.sum())


def test_minibatches_by_index_are_told(checked):
    x, index, data = T.dmatrix("x"), T.lscalar("index"), theano.shared(X, "data")
    f = synk.function([index], x.mean(), givens={x: data[index * 3 : (index + 1) * 3]}, name="f")
    found = told(lambda: f(1), "divides no rows")
    assert found == pytest.approx(X[3:].mean())
    f = synk.function([index], [x.mean(), (x, "gather")], givens={x: data[synk.rows(index, 3)]})
    mean, rows = f(1)
    assert mean == pytest.approx(X[3:].mean())
    np.testing.assert_array_equal(rows, X[3:])


def test_time_on_axis_0_is_found_by_the_check(checked):
    x = T.dtensor3("x")
    last = theano.scan(lambda now, sum: sum + now, x, T.zeros_like(x[0]))[0][-1]
    steps = np.arange(6.0 * B * 2).reshape(6, B, 2)
    f = synk.function([x], T.sqr(last).mean(), name="f")
    found = if_checked(checked, lambda: f(steps), "write axes={x: 1} in function()")
    expected = np.square(steps.sum(axis=0)).mean()
    assert found != pytest.approx(expected)
    f = synk.function([x], T.sqr(last).mean(), axes={x: 1})
    assert f(steps) == pytest.approx(expected)


def test_a_batch_of_nothing_is_refused(checked, where):
    s = theano.shared(X, "s")
    f = synk.function([], (s, "gather"), sliceable_shareds=[s], name="f")
    with pytest.raises(ValueError, match="batch_s"):
        f(batch=[0, 1])
    np.testing.assert_array_equal(f(batch_s=[0, 1]), np.tile(X[:2], (where.ranks, 1)))


def test_a_fixed_number_of_rows_is_explained(checked, where):
    x = T.dmatrix("x")
    f = synk.function([x], (x.reshape((B, 2, 2)).sum(axis=2), "gather"), name="f")
    with pytest.raises(synk.WorkerError, match=rf"had {B // where.ranks} of the {B} rows"):
        f(X)
    f = synk.function([x], (x.reshape((-1, 2, 2)).sum(axis=2), "gather"))
    np.testing.assert_array_equal(f(X), X.reshape(B, 2, 2).sum(axis=2))


def test_data_compare_as_arrays(checked):
    y = synk.data([1, 2, 1])
    np.testing.assert_array_equal(y == 1, [True, False, True])
    np.testing.assert_array_equal(y[y == 1], [1, 1])


def test_updates_with_the_rows_of_each_rank_are_found_by_the_check(checked):
    x, w = T.dmatrix("x"), theano.shared(np.ones(4), "w")
    loss = T.sqr(T.dot(x, w)).mean()
    f = synk.function([x], loss, updates=[(w, w - 1e-4 * T.grad(loss, w))], name="f")
    if_checked(checked, lambda: f(X), "synk.ops.all_reduce(g)")
    assert not np.array_equal(*synk.gather(w, nd_up=1)[:2])
