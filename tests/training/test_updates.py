"""Flat gradients: written in place, reduced in one round, equal to serial training."""

import numpy as np
import pytest
import theano
import theano.tensor as T
from support import host_library
from support.helpers import model, step_of
from support.layouts import ON_DEVICES

import synkhronos as synk
from synkhronos.extensions import updates

RANDOM = np.random.RandomState(0)


def step(rule, dtype="float64", mode=None, **kwargs):
    inputs, params, loss = model(dtype)
    made = rule(loss, params, **kwargs)
    return step_of(inputs, loss, *made, mode), params, made[-1]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.sample(1)
@pytest.mark.usefixtures("compiled_if_thorough")
@pytest.mark.numba
def test_sgd_is_serial_sgd(ranks, dtype):
    train, params, _ = step(updates.sgd, dtype, learning_rate=0.1)
    inputs, expected, loss = model(dtype)
    rate = np.asarray(0.1, dtype)
    serial = theano.function(
        inputs, loss, updates=[(p, p - rate * T.grad(loss, p)) for p in expected]
    )
    x, y = RANDOM.randn(8 * ranks.n, 4).astype(dtype), RANDOM.randn(8 * ranks.n).astype(dtype)
    tolerance = 1e-10 if dtype == "float64" else 1e-4
    for _ in range(3):
        np.testing.assert_allclose(train(x, y), serial(x, y), rtol=tolerance)
        for param, other in zip(params, expected):
            values = synk.gather(param)
            assert all(np.array_equal(value, values[0]) for value in values)
            np.testing.assert_allclose(values[0], other.get_value(), rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(ON_DEVICES, reason="a variable on a device is copied to its home and back")
@pytest.mark.usefixtures("compiled_if_thorough")
def test_the_flat_vector_stays_where_it_is(ranks):
    # FAST_COMPILE of PyTensor updates nothing in place.
    mode = "CVM" if host_library.ON_PYTENSOR else None
    train, _, flat = step(updates.sgd, learning_rate=0.1, mode=mode)
    x, y = RANDOM.randn(2 * ranks.n, 4), RANDOM.randn(2 * ranks.n)
    train(x, y)  # brings it home
    home = flat.get_value(borrow=True)
    for _ in range(3):
        train(x, y)
        assert flat.get_value(borrow=True) is home
    assert flat.name == "flat_grad_s" and home.shape == (16,)


@pytest.mark.usefixtures("quickly_compiled")
def test_mixed_dtypes():
    a, b = theano.shared(np.ones(2, "float32"), "a"), theano.shared(np.ones((2, 2)), "b")
    loss = (a**2).sum() + (b**3).sum()
    flat, flat_grad, parts = updates.flat_unflat_grads(loss, [a, b])
    assert flat.dtype == "float64" and [part.dtype for part in parts] == ["float32", "float64"]
    theano.function([], updates=[(flat, flat_grad)])()
    assert flat.get_value().tolist() == [2, 2, 3, 3, 3, 3]
    assert parts[1].eval().tolist() == [[3, 3], [3, 3]]


def test_nonflat_grads():
    _, params, loss = model("float64")
    shareds, grads = updates.nonflat_grads(loss, params)
    assert [s.type for s in shareds] == [p.type for p in params]
    assert [s.name for s in shareds] == ["w_grad_s", "b_grad_s", "s_grad_s"]
    assert [g.ndim for g in grads] == [2, 2, 0]
