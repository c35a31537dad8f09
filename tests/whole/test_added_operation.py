"""An operation that has only a row in the table works at every door, for the dtypes of its row."""

import re
from unittest import mock

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.groups import run
from support.helpers import Call, function
from support.layouts import Layout, forked
from support.replicas import put, replicas

import synkhronos as synk
from synkhronos import parameter_server as ps
from synkhronos._arithmetic.operations import OPERATIONS, ReduceOperation

# Not on several machines: their carriers are other processes, which have no row of a test.
LAYOUTS = [Layout(1), Layout(3, master=1)]
OP = "logsumexp"
ROW = ReduceOperation(np.logaddexp, lambda dtype: -np.inf, kinds="f")
X = np.random.RandomState(3).randn(11, 2)
OTHERS = ["int32", "uint8", "bool", "complex64"]


@pytest.fixture(scope="module", autouse=True)
def added():
    with mock.patch.dict(OPERATIONS, {OP: ROW}):
        yield


@pytest.fixture(scope="module")
def ranks(layout, added):
    with forked(layout) as ranks:
        yield ranks


def total(values):
    """Return what NumPy makes of the values along axis 0."""
    return np.logaddexp.reduce(np.asarray(values, "float64"), axis=0)


def refused(what, dtype, caller):
    words = f"{caller} can't reduce {what}, of dtype {dtype}, with '{OP}', which takes floats"
    return pytest.raises(TypeError, match=re.escape(words))


def shared(dtype="float64"):
    return theano.shared(np.zeros(3, dtype), "s")


@pytest.mark.parametrize("size", [3, 100_000])  # the master reduces little, the ranks share more
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_collectives(ranks, dtype, size):
    values = np.random.RandomState(size).randn(ranks.n, size).astype(dtype)
    s = theano.shared(values[0], "s")
    put(s, values)
    accuracy = {"rtol": 2 * np.finfo(dtype).eps, "atol": 2 * np.finfo(dtype).eps}
    np.testing.assert_allclose(synk.reduce(s, OP, in_place=False), total(values), **accuracy)
    synk.all_reduce(s, f"c_{OP}")
    for found in replicas(s):
        np.testing.assert_allclose(found, total(values), **accuracy)


@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize("rows", [1, 2, 11])  # with fewer rows than ranks, some have none
def test_functions(ranks, rows, slices):
    x, s = T.dmatrix("x"), theano.shared(np.full(3, -np.inf), "s")
    result = T.log(T.exp(x).sum(axis=0))
    outputs = [(result, OP)]
    if slices == 1:
        outputs.append((synk.ops.all_reduce(result, OP), None))
    f = function([x], outputs, updates=[(s, T.log(T.exp(x).sum()) + T.zeros(3), OP)])
    for found in f(X[:rows], num_slices=slices):
        np.testing.assert_allclose(found, total(X[:rows]))
    # A rank without rows that reduces inside of the function runs with a row of another rank.
    if rows >= ranks.n or slices > 1:
        np.testing.assert_allclose(total(replicas(s)), total(X[:rows].ravel()) + np.zeros(3))


@pytest.mark.layouts(Layout(3, master=1))
def test_what_is_told(ranks):
    """Nothing where it makes the serial value; else its name, where no rule says what does."""
    x = T.dmatrix("x")
    result = T.log(T.exp(x).sum(axis=0))
    outputs = [(result, OP), (synk.ops.all_reduce(result, OP), None)]
    function([x], outputs, check=True)(X)
    f = function([x], Call(total)(x), check=True)
    with pytest.warns(synk.PortingWarning, match=rf"Write \(output, '{OP}'\)"):
        f(X)


@pytest.mark.parametrize("dtype", OTHERS)
def test_dtypes_that_it_does_not_take_are_refused(ranks, dtype):
    s, x = shared(dtype), T.TensorType(dtype, (False,))("x")
    for name in ("reduce", "all_reduce"):
        with refused("s", dtype, f"{name}()"):
            getattr(synk, name)(s, OP)
    with refused("x", dtype, "all_reduce"):
        synk.ops.all_reduce(x, OP)
    with refused("output 1", dtype, "function()"):
        function([x], [(x, "gather"), (x, OP)])
    with refused("the update of s", dtype, "function()"):
        function([x], [], updates=[(s, x, OP)])
    values = np.ones(2 * ranks.n, dtype)
    np.testing.assert_array_equal(function([x], (x, "gather"))(values), values)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_groups(size):
    def reduce(group):
        refusals = []
        for dtype in OTHERS:
            array = group.allocate(3, dtype)
            try:
                group.all_reduce(array, OP)
            except TypeError as error:
                refusals.append(str(error))
        array = group.allocate(3, "float32")
        array[...] = group.rank
        group.all_reduce(array, OP)
        return refusals, array.copy()

    for refusals, array in run(size, reduce):
        for dtype, error in zip(OTHERS, refusals):
            with refused("array", dtype, "all_reduce()"):
                raise TypeError(error)
        assert len(refusals) == len(OTHERS)
        np.testing.assert_allclose(array, [total(range(size))] * 3, rtol=1e-6)


def test_stores():
    with ps.create("local", devices=[0, 1]) as store:
        store.set_param("push_op[0]", OP)
        with pytest.raises(TypeError, match="dtype must be one of numbers, got bool"):
            store.init_key((2,), 0, 0, dtype="bool")
        for dtype in set(OTHERS) - {"bool"}:
            with pytest.raises(TypeError, match=f"{dtype} can't be reduced by {OP}, which takes"):
                store.init_key((2,), 0, 0, dtype=dtype)
        values = X[:2].astype("float32")
        for device in (0, 1):
            store.init_key((2,), 0, device)
        for device, value in enumerate(values):
            store.push(value.copy(), 0, device)
        for device in (0, 1):
            out = np.zeros(2, "float32")
            store.pull_req(out, 0, device)
            store.pull_wait(0, device)
            np.testing.assert_allclose(out, total(values), rtol=1e-6)
