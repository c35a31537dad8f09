"""check=True: what differs from serial Theano is told, with its cause; what doesn't is not."""

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.helpers import MODE
from support.layouts import ON_DEVICES, Layout
from support.told import told_in
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.shared_randomstreams import RandomStreams

import synkhronos as synk
from synkhronos import PortingWarning

LAYOUTS = [Layout(2), Layout(3, master=1)]
X = np.arange(14.0).reshape(7, 2) / 5
FOR_ROWS = pytest.mark.skipif(ON_DEVICES, reason="operations of this test run on the host only")


def made(inputs, outputs=None, **kwargs):
    """Make a function; what is told then is in its attribute `messages`."""
    f, messages = told_in(
        lambda: synk.function(inputs, outputs, check=True, name="f", mode=MODE, **kwargs)
    )
    f.messages = messages
    return f


def told(ranks, f, *args, **kwargs):
    """Call three times; return the messages, which come when it is made, or with the first call."""
    _, first = told_in(lambda: f(*args, **kwargs))
    for _ in range(2):
        f(*args, **kwargs)  # told already
    assert ranks.n > 1 or not [*f.messages, *first]  # it is serial Theano
    return [*f.messages, *first]


OUTPUTS = {
    "sum of rows": (lambda x: x.sum(), "avg", "(output, 'sum')"),
    "average of a sum": (lambda x: x.mean(), "sum", "(output, 'avg')"),
    "max": (lambda x: x.max(), "avg", "(output, 'max')"),
    "min": (lambda x: x.min(), "max", "(output, 'min')"),
    "product": (lambda x: (1 + x).prod(), "avg", "(output, 'prod')"),
    "rows": (lambda x: x.sum(axis=1), None, "(output, 'gather')"),
    "argmax of rows": (lambda x: T.argmax(x, axis=1), "max", "(output, 'gather')"),
    "in no mode": (lambda x: x.std(), "avg", "write (output, None) in a function with bcast_inp"),
    "median": (lambda x: T.sort(x[:, 0])[x.shape[0] // 2], "avg", "in any mode."),
}


@FOR_ROWS
@pytest.mark.parametrize("what", OUTPUTS)
def test_modes(ranks, what):
    make, mode, wanted = OUTPUTS[what]
    x = T.dmatrix("x")
    rows = X if mode is None or "rows" not in what else X[: 2 * ranks.n]
    messages = told(ranks, made([x], (make(x), mode)), rows)
    if ranks.n > 1:
        [message] = messages
        assert f"Output 0 of Function 'f', mode {mode!r}, is not what serial" in message
        assert wanted in message


def test_what_is_right_is_not_told_of(ranks):
    x, y = T.dmatrix("x"), T.dvector("y")
    w, count = theano.shared(np.ones(2), "w"), theano.shared(0.0, "count")
    loss = T.sqr(T.dot(x, w) - y).mean()
    grad = synk.ops.all_reduce(T.grad(loss, w))
    f = made(
        [x, y],
        [loss, (x, "gather"), (x.sum(0), "sum"), (y.max(), "max"), (y.shape[0], "sum")],
        updates=[(w, w - 0.1 * grad), (count, count + 1)],
    )
    for batch in (None, slice(2, 6), [5, 1, 0, 4]):
        f(X, X[:, 0], batch=batch)
    assert float(count.get_value()) == 3
    f = made([x], [x.sum()], givens={}, bcast_inputs=[y], on_unused_input="ignore")
    assert (ranks.n > 1) == ("'sum'" in "".join(told(ranks, f, X, X[0])))


@pytest.mark.usefixtures("compiled_if_thorough")
def test_variables_are_as_without_the_check(ranks):
    x = T.dmatrix("x")
    values = []
    for check in (0, 2):
        w = theano.shared(np.ones(2), "w")
        total = theano.shared(np.zeros(2), "total")
        streams = MRG_RandomStreams(5)
        f = synk.function(
            [x],
            [(x.sum(0), "sum"), (streams.uniform((2,), ndim=1) + 0 * w, None)],
            updates=[(w, 2 * w), (total, total + w)],
            check=check,
        )
        if check and ranks.n > 1 and ranks.master:
            with pytest.warns(PortingWarning, match="random numbers"):
                results = [f(X)]
        else:
            results = [f(X)]
        results += [f(X) for _ in range(3)]
        values.append((results, synk.gather(w), synk.gather(total)))
    np.testing.assert_equal(values[0], values[1])


def test_updates_with_the_rows_of_each_rank(ranks, extensions):
    x, w = T.dmatrix("x"), theano.shared(np.ones(2), "w")
    loss = T.sqr(T.dot(x, w)).mean()
    f = made([x], updates=[(w, w - 0.01 * T.grad(loss, w))])
    messages = told(ranks, f, X[: 2 * ranks.n])
    if ranks.n > 1:
        assert "The update of w in Function 'f' is not what" in messages[0]
        assert "synk.ops.all_reduce(g)" in messages[0] and "synk.all_reduce(w)" in messages[0]
    v = theano.shared(np.ones(2), "v")
    grad = synk.ops.all_reduce(T.grad(T.sqr(T.dot(x, v)).mean(), v))
    f = made([x], updates=extensions.update_rules.adam([grad], [v]))
    for _ in range(3):
        f(X)


@pytest.mark.parametrize("dtype, rate", [("float32", 1e-5), ("float64", 1e-9)])
def test_updates_with_a_small_learning_rate(ranks, dtype, rate):
    x = T.matrix("x", dtype)
    rows = (np.arange(1, 4 * ranks.n + 1).reshape(-1, 2) / 5).astype(dtype)
    for reduced in (False, True):
        w = theano.shared(np.ones(2, dtype), "w")
        grad = T.grad(T.sqr(T.dot(x, w)).mean(), w)
        step = np.array(rate, dtype) * (synk.ops.all_reduce(grad) if reduced else grad)
        f = made([x], updates=[(w, w - step)])
        if reduced:
            f(rows)
        else:
            for message in told(ranks, f, rows):
                assert "The update of w in Function 'f' is not what" in message


def test_gradients_that_are_0_but_for_rounding(ranks):
    x, b = T.fmatrix("x"), theano.shared(np.zeros(2, "float32"), "b")
    w = theano.shared(np.ones((2, 2), "float32"), "w")
    product = T.dot(x, w) + b
    centered = product - synk.ops.all_reduce(product.mean(0))  # as in a batch normalization
    loss = T.sqr(3 * centered - x).mean()
    grads = [synk.ops.all_reduce(g) for g in T.grad(loss, [w, b])]
    f = made([x], updates=[(p, p - np.float32(0.01) * g) for p, g in zip([w, b], grads)])
    rows = np.random.RandomState(1).rand(7 * ranks.n, 2).astype("float32")
    for _ in range(3):
        f(rows)
    assert 0 < abs(b.get_value()).max() < 1e-6


def test_ranks_without_rows_do_not_update(ranks):
    x, calls = T.dvector("x"), theano.shared(0, "calls")
    f = made([x], x.mean(), updates=[(calls, calls + 1)])
    for message in told(ranks, f, X[: max(ranks.n - 1, 1), 0]):
        assert "Ranks without rows do not run" in message
    if ranks.n == 3:
        assert synk.gather(calls).tolist() != [3] * 3


@pytest.mark.usefixtures("compiled_if_thorough")
def test_variables_that_the_script_has_set(ranks):
    x, w = T.dmatrix("x"), theano.shared(np.ones(2), "w")
    f = synk.function([x], T.dot(x, w).mean(), check=2, name="f")
    f(X)
    if ranks.n > 1:
        w.set_value([2.0, 3.0])
        with pytest.warns(PortingWarning) as caught:
            f(X)
        messages = [str(warning.message) for warning in caught]
        assert "w was set in the master only" in messages[0]
        assert "Before the call, ranks had different values of w: write synk.br" in messages[1]


@pytest.mark.parametrize("streams", [MRG_RandomStreams, RandomStreams])
def test_random_numbers(ranks, streams):
    x = T.dmatrix("x")
    f = made([x], (x + streams(3).uniform(x.shape, ndim=2), "gather"))
    for message in told(ranks, f, X):
        assert "draws random numbers" in message


def test_sequences_along_axis_0(ranks):
    x = T.dtensor3("x")  # time, rows, features
    steps = np.random.RandomState(0).rand(6, 2 * ranks.n, 3)
    f = made([x], T.sqr(x.cumsum(axis=0)[-1]).mean())
    for message in told(ranks, f, steps):
        assert "write axes={x: 1} in function(), with the mode 'avg'" in message


def test_axes_of_gathered_outputs(ranks):
    x = T.dmatrix("x")
    steps = np.arange(8.0 * ranks.n).reshape(4, -1)
    f = made([x], (2 * x, "gather"), axes={x: 1})
    for message in told(ranks, f, steps):
        assert "Write (output, 'gather') and axes={output: 1}" in message
    f = made([x], (x.cumsum(axis=0), "gather"))
    for message in told(ranks, f, np.arange(4.0 * ranks.n**2).reshape(2 * ranks.n, -1)):
        assert "write axes={x: 1, output: 1} in function(), with the mode 'gather'" in message


def test_outputs_where_nothing_is_scattered(ranks):
    s = theano.shared(np.ones(3), "s")
    f = made([], [2 * s, (s.sum(), "max"), (s, None)])
    f()
    for mode in ("gather", "sum"):
        for message in told(ranks, made([], (2 * s, mode))):
            assert "each rank computes the whole. Write (output, None)" in message


def test_rules_in_two_steps(ranks, extensions):
    x, y, w = T.dmatrix("x"), T.dvector("y"), theano.shared(np.ones(2), "w")
    loss = T.sqr(T.dot(x, w) - y).mean()
    for rule in (extensions.updates.adam, extensions.updates.sgd_nonflat):
        grad_updates, param_updates, grads = rule(loss, [w], 0.1)
        first, second = made([x, y], loss, updates=grad_updates), made([], updates=param_updates)
        for _ in range(2):
            first(X, X[:, 0])
            synk.all_reduce(grads)
            second()
    first(X, X[:, 0])  # and the script forgets to reduce
    message = " ".join(told(ranks, made([], updates=param_updates)))
    assert ("ranks had different values of w_grad_s" in message) == (ranks.n > 1)
    assert ("The update of w_grad_s" in message) == (ranks.n > 1)


def test_sliceable_shared_variables(ranks):
    d, w = theano.shared(np.zeros((1, 2)), "d"), theano.shared(np.ones(2), "w")
    synk.scatter(d, X)
    f = made([], [T.dot(d, w).mean(), (d, "gather")], sliceable_shareds=[d])
    f()
    f(batch_s=slice(0, 1))
    f = made([], d.sum(), sliceable_shareds=[d])
    for message in told(ranks, f):
        assert "serial" in message


def test_errors_are_those_of_the_call(ranks):
    x = T.dmatrix("x")
    f = made([x], x.mean())
    with pytest.raises(TypeError, match="takes 1 input"):
        f()
    with pytest.raises(ValueError, match="batch"):
        f(X, batch=[77])
    f(X)
    g = made([x], T.dot(x, np.ones(2)).mean())
    with pytest.raises(synk.WorkerError):
        g(np.ones((4, 3)))


@pytest.mark.usefixtures("compiled_if_thorough")
def test_a_number_of_calls(ranks):
    x = T.dmatrix("x")
    f, messages = told_in(lambda: synk.function([x], x.sum(), check=1, name="f"))
    f(X)
    assert len(messages) == (ranks.n > 1)
    assert "_run" not in vars(f)
    for wrong, what in ((-1, "at least 0"), (2.5, "an integer"), ("yes", '"first", a bool')):
        with pytest.raises((TypeError, ValueError), match=f"check must be {what}"):
            synk.function([x], x.mean(), check=wrong)
