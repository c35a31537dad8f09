"""Updates whose loops GCC vectorizes: the same bits as without."""

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.layouts import ON_DEVICES, Layout

import synkhronos as synk
from synkhronos._host.theano.faster.elementwise import VectorizedElemwise

LAYOUTS = [Layout(2)]
N = 1003  # elements: vectors of 16, and some more

pytestmark = pytest.mark.skipif(ON_DEVICES, reason="updates on devices are no loops")


def trained(extensions, rule, dtype, vectorized):
    """Return the nodes of a training function, and all values after some steps, on each rank."""
    mode = theano.compile.get_default_mode()
    mode = mode if vectorized else mode.excluding("synkhronos_vectorize")
    x = T.matrix("x", dtype)
    w = theano.shared(np.linspace(-1, 1, N).astype(dtype), "w")
    loss = T.sqr(T.dot(x, w)).mean()
    rule, options = getattr(extensions.update_rules, rule), {"mode": mode}
    step = extensions.train.make_train_step([x], loss, [w], rule, 0.1, options=options)
    random = np.random.RandomState(0)
    for rows in (5, 2, 7):
        step(random.randn(rows, N).astype(dtype))
    nodes = step._compiled.maker.fgraph.apply_nodes
    values = [
        [synk.get_value(rank, variable).tobytes() for rank in range(2)]
        for variable in step._compiled.get_shared()
    ]
    return [node.op for node in nodes], values


@pytest.mark.slow("compiles a step of training twice")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rule", ["adam", "adamax", "adagrad", "rmsprop", "adadelta"])
def test_the_bits_are_the_same(ranks, extensions, rule, dtype):
    ops, values = trained(extensions, rule, dtype, vectorized=True)
    others, expected = trained(extensions, rule, dtype, vectorized=False)
    assert any(isinstance(op, VectorizedElemwise) for op in ops)
    assert not any(isinstance(op, VectorizedElemwise) for op in others)
    assert values == expected
    assert all(mine == other for mine, other in values)


@pytest.mark.usefixtures("compiled_if_thorough")
def test_other_expressions_stay(ranks, extensions):
    ops, _ = trained(extensions, "momentum", "float32", vectorized=True)
    assert not any(isinstance(op, VectorizedElemwise) for op in ops)


@pytest.mark.usefixtures("compiled_if_thorough")
def test_only_updates(ranks):
    x, w = T.dvector("x"), theano.shared(np.ones(3), "w")
    g = synk.ops.all_reduce(x)
    f = synk.function([], (T.sqrt(g) / 3, None), updates=[(w, w / g)], givens=[(x, w + 1)])
    ops = [node.op for node in f._compiled.maker.fgraph.apply_nodes]
    assert [isinstance(op, VectorizedElemwise) for op in ops].count(True) == 1
    np.testing.assert_allclose(f(), np.sqrt(2) / 3 * np.ones(3))
    np.testing.assert_allclose(w.get_value(), 0.5)
