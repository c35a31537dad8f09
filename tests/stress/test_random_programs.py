"""`parallel`: programs of random operations have serial values, on all ranks, or stay Theano's."""

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.layouts import ON_DEVICES, Layout

import synkhronos as synk
from synkhronos.porting import ParallelFunction

pytestmark = pytest.mark.skipif(ON_DEVICES, reason="graphs of the CPU")
LAYOUTS = [Layout(2), Layout(3, master=1)]
PROGRAMS = 20

# Operations on two matrices; the second is an earlier value of the program, or w.
STEPS = [
    lambda a, b: a * b,
    lambda a, b: a - b.mean(axis=0),
    lambda a, b: T.dot(a, b),
    lambda a, b: T.dot(a.T, b),
    lambda a, b: T.concatenate([a, b], axis=1)[:, 2:6],
    lambda a, b: a + b.sum(),
    lambda a, b: T.switch(a > b.max(axis=0), a, 0.5),
    lambda a, b: T.set_subtensor(a[:, 1], b[:, 0]),
    lambda a, b: T.inc_subtensor(T.zeros_like(a)[:, 1:3], b[:, :2]),
    lambda a, b: a / (1 + abs(b).sum(axis=1, keepdims=True)),
    lambda a, b: a[T.cast(abs(b[:, 0]), "int64") % 2],
    lambda a, b: b * T.cast(a.shape[0], "float64"),
    lambda a, b: T.tensordot(a, b, [[0], [0]]),
    lambda a, b: T.alloc(b.mean(axis=0), a.shape[0], 4),
    lambda a, b: a[::-1] + b,
    lambda a, b: T.nnet.softmax(a) - b,
    lambda a, b: T.argmax(a, axis=1).dimshuffle(0, "x") * b,
    lambda a, b: T.sort(a, axis=1) * b,
    lambda a, b: a.reshape((-1, 8)).reshape((-1, 4)) + b,
]


def program(seed, steps=3):
    """Return arguments of ``theano.function``, and the shared variables that it updates."""
    rng = np.random.RandomState(seed)
    x, w = T.dmatrix("x"), theano.shared(np.random.RandomState(0).randn(4, 4), "w")
    mean = theano.shared(np.zeros(4), "mean")
    values = [w, x]
    for step in rng.choice(len(STEPS), steps):
        values.append(STEPS[step](values[-1], values[rng.randint(len(values))]))
    loss = T.sqr(T.tanh(values[-1])).mean()
    updates = [(w, w - T.grad(loss, w, disconnected_inputs="ignore")), (mean, x.mean(axis=0))]
    return ([x], [values[-1], loss], updates), [w, mean]


@pytest.mark.sample(4)
@pytest.mark.usefixtures("quickly_compiled")
@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_random_programs_have_serial_values(ranks, seed):
    arguments, variables = program(seed)
    (inputs, outputs, updates), expected = program(seed)
    serial = theano.function(inputs, outputs, updates=updates, on_unused_input="ignore")
    with synk.parallel(check=False):
        inputs, outputs, updates = arguments
        f = theano.function(inputs, outputs, updates=updates, on_unused_input="ignore")
    for n_rows in (6, 1, 7):
        x = np.random.RandomState(seed + n_rows).randn(n_rows, 4)
        try:
            wanted = serial(x)
        except (ValueError, IndexError):  # this number of rows does not fit in the program
            break
        for one, other in zip(f(x), wanted):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-10)
        for one, other in zip(variables, expected):
            np.testing.assert_allclose(one.get_value(), other.get_value(), rtol=1e-8, atol=1e-10)
        # After the call of one row, which the master alone runs, ranks have older values.
        if n_rows != 1 and type(f) is ParallelFunction:
            assert_equal_on_ranks(variables, ranks.n)


def assert_equal_on_ranks(variables, n):
    for each in variables:
        values = synk.gather(each, nd_up=1)
        np.testing.assert_allclose(values, [values[0]] * n, rtol=1e-12)
