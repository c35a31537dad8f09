"""Operations in code that numba compiles, and that a second process reads from disk."""

import contextlib
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("pytensor", reason="Theano's suites have their own tests of these operations")

import pytensor
import pytensor.tensor as pt
from support.layouts import Layout

import synkhronos as synk

LAYOUTS = [Layout(2)]
MODES = pytest.mark.parametrize("mode", ["NUMBA", "CVM"])
RANDOM = np.random.RandomState(0)
X, Y = RANDOM.randn(9, 3), RANDOM.randn(9)


def regression():
    """Return inputs, parameters and the loss of a linear regression."""
    x, y = pt.dmatrix("x"), pt.dvector("y")
    w, b = pytensor.shared(np.ones(3), "w"), pytensor.shared(0.0, "b")
    return [x, y], [w, b], ((x @ w + b - y) ** 2).mean()


@MODES
@pytest.mark.slow("numba compiles")
def test_a_step_of_training_is_that_of_one_process(ranks, extensions, mode):
    train, adam = extensions.train, extensions.update_rules.adam
    inputs, params, loss = regression()
    step = train.make_train_step(
        inputs, loss, params, adam, learning_rate=0.1, options={"mode": mode}
    )
    own, own_params, own_loss = regression()
    updates = adam(own_loss, own_params, learning_rate=0.1)
    serial = pytensor.function(own, own_loss, updates=updates, mode=mode)
    for rows in (9, 1, 4):  # with 1 row a rank has none
        np.testing.assert_allclose(step(X[:rows], Y[:rows]), serial(X[:rows], Y[:rows]))
    for param, expected in zip(params, own_params):
        for value in synk.gather(param).reshape(ranks.n, *expected.get_value().shape):
            np.testing.assert_allclose(value, expected.get_value(), rtol=1e-10)


@MODES
@pytest.mark.slow("numba compiles")
def test_the_gradient_of_a_sum_over_ranks(ranks, mode):
    x = pt.dvector("x")
    total = synk.ops.all_reduce((x**2).sum(), "sum")
    f = synk.function([x], (pytensor.grad(total**2, x), "gather"), mode=mode)
    # The gradient of the sum of all ranks' losses, of which each is the square of the total.
    np.testing.assert_allclose(f([1.0, 2.0, 3.0]), 2 * 14 * ranks.n * 2 * np.array([1.0, 2.0, 3.0]))


@MODES
@pytest.mark.slow("numba compiles")
def test_random_numbers_of_all_rows(ranks, mode):
    x = pt.dmatrix("x")

    def draws():
        rng = pytensor.shared(np.random.default_rng(3))
        after, kept = pt.random.binomial(1, 0.5, size=x.shape, rng=rng, return_next_rng=True)
        return x * kept, [(rng, after)]

    (own, updates), (masked, others) = draws(), draws()
    serial = pytensor.function([x], own, updates=updates, mode=mode)
    f = synk.function([x], (masked, "gather"), updates=others, serial_random=True, mode=mode)
    for rows in (9, 2, 5):
        np.testing.assert_array_equal(f(X[:rows]), serial(X[:rows]))


WRITE = """
import pickle, sys
import numpy as np, pytensor, pytensor.tensor as pt, synkhronos as synk
x = pt.dvector("x")
data = pytensor.shared(np.arange(10.0))
reduced = synk.ops.all_reduce(x, "sum") * synk.ops.rank_weight()
f = pytensor.function([x], [reduced, data[synk.rows(1, 2)]], mode="NUMBA")
f(np.ones(3))
with open(sys.argv[1], "wb") as file:
    pickle.dump(f, file)
"""

READ = """
import pickle, sys
import numpy as np
with open(sys.argv[1], "rb") as file:
    f = pickle.load(file)
print([each.tolist() for each in f(np.ones(3))])
"""


@pytest.mark.slow("numba compiles")
def test_another_process_reads_the_code_from_disk(tmp_path):
    for script in (WRITE, READ):
        done = subprocess.run(
            [sys.executable, "-c", script, tmp_path / "f"],
            capture_output=True,
            text=True,
            check=True,
        )
    assert done.stdout == "[[1.0, 1.0, 1.0], [2.0, 3.0]]\n"


def test_a_scan_that_reduces_is_refused(ranks):
    x = pt.dvector("x")
    doubled = pytensor.scan(
        lambda a: synk.ops.all_reduce(2 * a, "sum"),
        outputs_info=[x],
        n_steps=3,
        return_updates=False,
    )
    with pytest.raises(TypeError, match=r"ops\.all_reduce is inside of"):
        synk.function([x], (doubled, "gather"))


@MODES
@pytest.mark.slow("numba compiles")
def test_functions_in_blocks_of_parallel(ranks, mode):
    i, size = pt.lscalar("i"), 4
    own, expected = pytensor.shared(X, "rows"), []
    for block in (contextlib.nullcontext(), synk.parallel()):
        inputs, [w, b], loss = regression()
        x, y = inputs
        updates = [(w, w - 0.1 * pytensor.grad(loss, w)), (b, b + y.mean())]
        sliced = own[i * size : (i + 1) * size]
        with block:
            step = pytensor.function(inputs, [loss, x.dot(w)], updates=updates, mode=mode)
            total = pytensor.function([i], [(sliced**2).mean(), sliced.sum(axis=1)], mode=mode)
        found = [*step(X, Y), *step(X[:4], Y[:4]), *total(1), w.get_value(), b.get_value()]
        expected = expected or found
    for result, serial in zip(found, expected):
        np.testing.assert_allclose(result, serial, rtol=1e-10)
    told = synk.parallel_report().functions[-2:]
    assert all(each.calls == each.calls_on_ranks > 0 for each in told)
