"""The graphs of functions that begin reductions early; machines/test_overlap.py runs them."""

import pickle

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.compiling import IN_PYTHON
from theano.ifelse import ifelse

import synkhronos as synk
from synkhronos import _host
from synkhronos._host.base.rank_operations import AllReduce
from synkhronos._host.theano import compiling, overlapping
from synkhronos._host.theano.overlapping import Begin, End

RANDOM = np.random.RandomState(0)


@pytest.fixture(autouse=True)
def overlapped(monkeypatch):
    monkeypatch.setattr(overlapping, "BUCKET_BYTES", 100)
    _host.overlap_reductions(True)
    yield
    _host.overlap_reductions(False)


def network(make, reduce, sizes=(3, 20, 20, 2), rule=lambda p, g: p - 0.1 * g, **kwargs):
    x = T.dmatrix("x")
    layers = list(zip(sizes, sizes[1:]))
    params = [theano.shared(np.full(shape, 0.1), f"w{i}") for i, shape in enumerate(layers)]
    h = x
    for w in params:
        h = T.tanh(T.dot(h, w))
    grads = [reduce(g) for g in T.grad((h**2).mean(), params)]
    updates = [(p, rule(p, g)) for p, g in zip(params, grads)]
    return make([x], (h**2).sum(), updates=updates, **kwargs), params


def compiled(inputs, outputs, updates, mode=IN_PYTHON):
    everything = [outputs, *[new for _, new in updates]]
    return theano.function(
        inputs, outputs, updates=updates, mode=compiling.mode_for(everything, mode)
    )


def order(f):
    """Return the products, Begins and Ends of a function in the order in which they run."""
    words = []
    for node in f.maker.fgraph.toposort():
        if isinstance(node.op, (Begin, End)):
            words.append(f"{type(node.op).__name__} {node.op.bucket}")
        elif type(node.op).__name__.startswith(("Dot", "Gemm")):
            words.append("product")
    return words


def test_each_bucket_begins_as_soon_as_its_gradients_are_computed():
    f, _ = network(compiled, synk.ops.all_reduce)
    # Forward three products; then one for each gradient, and one for the error of a layer before.
    computing = ["product"] * 4 + ["Begin 0"] + (["product"] * 2 + ["Begin 1"])
    computing += ["product"] * 2 + ["Begin 2"]
    assert order(f) == computing + ["End 0", "End 1", "End 2"]


def test_the_order_outlives_pickling():
    f, _ = network(compiled, synk.ops.all_reduce)
    assert order(pickle.loads(pickle.dumps(f))) == order(f)


def test_begins_keep_their_order_in_copies():
    f, _ = network(compiled, synk.ops.all_reduce)
    begins = [word for word in order(f.copy()) if word.startswith("Begin")]
    assert begins == ["Begin 0", "Begin 1", "Begin 2"]


def test_small_gradients_share_a_bucket():
    f, _ = network(compiled, synk.ops.all_reduce, sizes=(2, 2, 2, 5, 5))
    # 40 and 80 bytes beside 200, in the order in which they can be computed.
    buckets = [n.op.serials for n in f.maker.fgraph.toposort() if isinstance(n.op, End)]
    assert [len(serials) for serials in buckets] == [1, 2, 1]


def test_sizes_are_those_of_the_parameters_also_behind_moments():
    f, _ = network(
        compiled, synk.ops.all_reduce, rule=lambda p, g: p - 0.1 * T.clip(g, -1, 1) / (1 + abs(g))
    )
    assert order(f).count("Begin 2") == 1


def test_what_another_operation_destroys_is_no_memory_of_other_ranks():
    x = T.dmatrix("x")
    a, b = (synk.ops.all_reduce(T.dot(x.T, each)) for each in (x, T.exp(x)))
    updates = [(theano.shared(np.zeros((3, 3))), 2 * a - 1), (theano.shared(np.zeros((3, 3))), b)]
    f = compiled([x], T.sqrt(T.sqr(a).sum()), updates)
    ends = [node for node in f.maker.fgraph.toposort() if isinstance(node.op, End)]
    assert len(ends) == 2
    assert f.maker.fgraph.has_destroyers([ends[0].outputs[0]])
    assert not any(lent for node in ends for lent in node.op.lent)


def none_begins(f):
    ops = [node.op for node in f.maker.fgraph.toposort()]
    return any(isinstance(op, AllReduce) for op in ops) and not any(
        isinstance(op, (Begin, End)) for op in ops
    )


def test_little_is_reduced_at_once(monkeypatch):
    monkeypatch.setattr(overlapping, "BUCKET_BYTES", 1 << 20)
    assert none_begins(network(compiled, synk.ops.all_reduce)[0])


def test_several_levels_branches_and_other_modes_are_reduced_at_once():
    def twice(g):
        return synk.ops.all_reduce(g * synk.ops.all_reduce(g).sum())

    def branch(p, g):
        return ifelse(T.gt(p.sum(), 0), p - g, p)

    assert none_begins(network(compiled, twice)[0])
    assert none_begins(network(compiled, synk.ops.all_reduce, rule=branch)[0])
    assert none_begins(network(compiled, synk.ops.all_reduce, mode="FAST_COMPILE")[0])


def test_on_one_machine_such_a_function_computes_the_same(ranks):
    x = RANDOM.randn(7, 3)
    f, params = network(synk.function, synk.ops.all_reduce, mode=IN_PYTHON)
    assert "Begin 2" in order(f._compiled)
    serial, expected = network(theano.function, lambda g: g, mode=IN_PYTHON)
    synk.distribute()
    for rows in (7, 2, 7):
        f(x[:rows])
        serial(x[:rows])
    f(x, num_slices=2)
    serial(x)
    for p, right in zip(params, expected):
        for rank in range(ranks.n):
            np.testing.assert_allclose(
                synk.get_value(rank, p), right.get_value(), rtol=1e-10, atol=1e-14
            )


def test_outside_of_a_call_it_is_the_identity():
    f, params = network(compiled, synk.ops.all_reduce)
    serial, expected = network(theano.function, lambda g: g, mode=IN_PYTHON)
    x = RANDOM.randn(7, 3)
    f(x)
    serial(x)
    for p, right in zip(params, expected):
        np.testing.assert_allclose(p.get_value(), right.get_value(), rtol=1e-12)
