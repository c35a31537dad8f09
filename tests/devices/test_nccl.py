"""comm/nccl.py with NCCL, or on OpenCL ranks with a stand-in: see one_gpu.py and stand_in.py."""

import numpy as np
import pytest
import theano
import theano.tensor as T
from support import stand_in
from support.helpers import on_ranks
from support.layouts import Layout

import synkhronos as synk

RANDOM = np.random.RandomState(0)


LAYOUTS = [Layout(2)]


@pytest.fixture
def called(ranks):
    """Return a function that says how often the clique was called on each rank, and for what."""
    counts = on_ranks(lambda: len(stand_in.calls))

    def since():
        nonlocal counts
        before, counts = counts, on_ranks(lambda: len(stand_in.calls))
        [number] = {int(b - a) for a, b in zip(before, counts)}
        return stand_in.calls[len(stand_in.calls) - number :]

    return since


def test_equal_variables_stay_on_the_devices(ranks, called):
    variables = [theano.shared(RANDOM.rand(3, 2).astype("float32")) for _ in range(3)]
    synk.broadcast(variables)
    assert called() == ["broadcast"] * 3
    synk.all_reduce(variables, "sum")
    assert called() == ["all_reduce"] * 3
    synk.reduce(variables, "max")
    assert called() == ["all_reduce"] * 3
    synk.all_gather(variables[0])
    assert called() == ["all_gather"]


@pytest.mark.parametrize("op", ["avg", "sum", "prod", "min", "max"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "int64"])
def test_operations(ranks, called, op, dtype):
    if op == "avg" and dtype.startswith("int"):
        pytest.skip("integers have no average")
    values = RANDOM.randint(1, 4, (ranks.n, 5)).astype(dtype)
    wanted = {"avg": values.mean(axis=0, dtype="float64")}
    wanted.update({name: getattr(np, name)(values, axis=0) for name in ("sum", "prod")})
    wanted.update({"min": values.min(axis=0), "max": values.max(axis=0)})
    s = theano.shared(values[0])
    for root in (None, 0):
        for rank, value in enumerate(values):
            synk.set_value(rank, s, value)
        called()
        synk.all_reduce(s, op) if root is None else synk.reduce(s, op)
        assert called() == ["all_reduce"]
        changed = range(ranks.n) if root is None else [ranks.master]
        for rank in range(ranks.n):
            expected = wanted[op] if rank in changed else values[rank]
            np.testing.assert_allclose(synk.get_value(rank, s), expected, rtol=1e-3)


def test_nccl_can_be_declined(ranks, called):
    s = theano.shared(np.ones((2, 3), "float32"))
    synk.broadcast(s, nccl=False)
    synk.all_reduce(s, "sum", nccl=False)
    synk.reduce(s, "max", nccl=False)
    synk.all_gather(s, nccl=False)
    x = T.fmatrix("x")
    f = synk.function([x], [((x * s.sum()).sum(axis=0), "c_sum")])
    rows = np.ones((ranks.n, 3), "float32")
    assert np.array_equal(f(rows)[0], (rows * 6 * ranks.n**2).sum(axis=0))
    assert called() == []


def test_what_nccl_can_not_do_goes_the_exact_way(ranks, called):
    if ranks.n > 1:
        ragged = theano.shared(np.ones((2, 2), "float32"))
        synk.set_value(ranks.n - 1, ragged, np.ones((3, 2), "float32"))
        with pytest.raises(ValueError, match="same shape"):
            synk.all_reduce(ragged)
        synk.all_gather(ragged)
        assert synk.get_shapes(ragged) == [(2 * ranks.n + 1, 2)] * ranks.n
    for value in (np.ones(3, "uint8"), np.ones(3, "bool"), np.float32(1), np.ones((0, 3), "f4")):
        s = theano.shared(value)
        synk.all_reduce(s, "max")
        synk.broadcast(s)
    mixed = [theano.shared(np.ones(3, "float32")), theano.shared(np.ones(3, "uint16"))]
    synk.all_reduce(mixed, "sum")
    assert [synk.gather(s).tolist() for s in mixed] == [[[ranks.n] * 3] * ranks.n] * 2
    assert called() == []


def test_gradients_are_reduced_on_the_devices(ranks, called):
    w, b = theano.shared(np.zeros(4, "float32")), theano.shared(np.float32(0))
    x = T.fmatrix()
    loss = (T.dot(x, w) + b).mean()
    grads = [synk.ops.all_reduce(g) for g in T.grad(loss, [w, b])]
    f = synk.function([x], loss, updates=[(w, grads[0]), (b, grads[1])])
    for rows in (3 * ranks.n, 2 * ranks.n + 1):
        values = RANDOM.rand(rows, 4).astype("float32")
        f(values)
        assert called() == ["all_reduce"]  # the number b is on the host
        for value in synk.gather(w):
            np.testing.assert_allclose(value, values.mean(axis=0), rtol=1e-5)
        assert synk.gather(b).tolist() == [1] * ranks.n
        called()
    f(values[:1])  # a rank without rows has a neutral part
    assert called() == ["all_reduce"]
    np.testing.assert_allclose(w.get_value(), values[0], rtol=1e-5)


def test_outputs_are_reduced_on_the_devices(ranks, called):
    x = T.fmatrix()
    s = theano.shared(np.ones(3, "float32"))
    modes = ["avg", "sum", "prod", "min", "max"]
    f = synk.function(
        [x], [((x * s).sum(axis=0), mode) for mode in modes] + [(x, "gather"), x.mean()]
    )
    values = RANDOM.rand(2 * ranks.n + 1, 3).astype("float32")
    parts = np.array_split(values[::-1], ranks.n)[::-1]
    parts = [part[::-1] for part in parts]  # the last rank has the row that is left
    sums = np.array([part.sum(axis=0) for part in parts])
    weights = [len(part) for part in parts]
    wanted = [np.average(sums, axis=0, weights=weights)]
    wanted += [getattr(sums, mode)(axis=0) for mode in modes[1:]]
    for _ in range(2):
        *found, rows, mean = f(values)
        assert called() == ["all_reduce"] * 5
        for result, expected in zip(found, wanted):
            assert isinstance(result, np.ndarray)
            np.testing.assert_allclose(result, expected, rtol=1e-5)
        np.testing.assert_array_equal(rows, values)
        np.testing.assert_allclose(mean, values.mean(), rtol=1e-5)
    [total] = f(values, output_subset=[1])
    np.testing.assert_allclose(total, wanted[1], rtol=1e-5)
    assert called() == ["all_reduce"]
    f(values[:1])  # with a rank that has no rows all go the exact way
    assert called() == (["all_reduce"] * 5 if ranks.n == 1 else [])
    found = f(values, num_slices=2)
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-5)
    np.testing.assert_array_equal(f.as_theano(values)[5], values)
    assert isinstance(f.as_theano(values)[1], np.ndarray)
