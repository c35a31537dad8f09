"""What only ranks on devices do: values stay there, kernels that fail elsewhere work, transfers."""

import functools

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.compiling import ON_HOST
from support.helpers import Call, on_ranks, worker
from support.layouts import IS_MIXED, ON_CUDA, Layout
from theano.tensor.sharedvar import tensor_constructor as tensor_shared

import synkhronos as synk
from synkhronos import _host
from synkhronos import session as _session

RANDOM = np.random.RandomState(0)


LAYOUTS = [Layout(2)]


def is_on_device(s):
    """Return, for each rank, whether the value of a variable is on a device."""
    synk.gather(s)  # so that all have it
    [key] = _session._Current.session.registry.keys_of([s])

    def look():
        return float(_host.is_on_device(_host.peek(worker().variables[key])))

    return [bool(x) for x in on_ranks(look)]


def expected_places(ranks):
    return [device != "cpu" for device in ranks.session.devices]


def test_shared_variables_are_on_the_device_of_each_rank(ranks):
    s = theano.shared(RANDOM.rand(6, 3).astype("float32"), "s")
    assert is_on_device(s) == expected_places(ranks)
    for change in (
        lambda: synk.all_reduce(s),
        lambda: synk.scatter(s, RANDOM.rand(12, 3).astype("float32")),
        lambda: synk.all_gather(s),
        lambda: synk.broadcast(s, np.ones((2, 3), "float32")),
        lambda: synk.set_value(ranks.n - 1, s, np.zeros((1, 3), "float32")),
        lambda: synk.set_value(0, s, np.zeros((4, 3), "float32"), batch=[2, 0]),
    ):
        change()
        assert is_on_device(s) == expected_places(ranks)


def test_numbers_stay_on_the_host_beside_variables_on_the_device(ranks):
    number, vector = theano.shared(np.float32(2)), theano.shared(np.ones(3, "float32"))
    x = T.fvector()
    f = synk.function(
        [x], (x.sum() * number, "sum"), updates=[(number, number + 1), (vector, vector * number)]
    )
    assert not any(is_on_device(number))
    assert is_on_device(vector) == expected_places(ranks)
    assert f(np.ones(2 * ranks.n, "float32")) == 4 * ranks.n
    assert synk.gather(number).tolist() == [3] * ranks.n
    assert synk.gather(vector).tolist() == [[2, 2, 2]] * ranks.n


def test_selected_rows_and_slices_equal_numpy(ranks):
    data = RANDOM.rand(8 * ranks.n, 5).astype("float32")
    s = theano.shared(data[:1], "s")
    synk.scatter(s, data)
    f = synk.function([], [(s, "gather"), (s.sum(axis=0), "sum")], sliceable_shareds=[s])
    parts = np.split(data, ranks.n)
    for pick in (slice(None), slice(2, 7), slice(7, 0, -2), [3, 3, 0], np.arange(0)):
        wanted = np.concatenate([part[pick] for part in parts])
        for num_slices in (1, 3):
            rows, total = f(batch_s=pick, num_slices=num_slices)
            np.testing.assert_array_equal(rows, wanted)
            np.testing.assert_allclose(total, wanted.sum(axis=0), rtol=1e-5)
    assert is_on_device(s) == expected_places(ranks)


@pytest.mark.parametrize("where", ["device", "host"])
def test_all_reduce_is_computed_where_the_gradients_are(ranks, where):
    values = RANDOM.rand(ranks.n, 4).astype("float32")
    if where == "device":
        w = theano.shared(np.zeros(4, "float32"))
    else:
        w = tensor_shared(np.zeros(4, "float32"))
    x = T.fmatrix()
    loss = T.dot(x, w).mean()
    f = synk.function([x], loss, updates=[(w, w + synk.ops.all_reduce(T.grad(loss, w)))])
    f(values)
    for value in synk.gather(w):
        np.testing.assert_allclose(value, values.mean(axis=0), rtol=1e-6)


def classifier(make, shared, reduce):
    """A training function with what was seen to fail on OpenCL: maximum, integer targets."""
    random = np.random.RandomState(1)
    x, y = T.fmatrix("x"), T.ivector("y")
    w1, w2 = [shared(random.randn(*s).astype("float32")) for s in ((6, 8), (8, 3))]
    hidden = T.maximum(T.dot(x, w1), 0) + T.minimum(T.dot(x, w1), 0) / 3
    out = T.nnet.softmax(T.dot(hidden, w2))
    loss = T.nnet.categorical_crossentropy(out, y).mean()
    grads = [reduce(g) for g in T.grad(loss, [w1, w2])]
    f = make(
        [x, y],
        loss,
        updates=[(w, w - np.float32(0.1) * g.astype("float32")) for w, g in zip([w1, w2], grads)],
    )
    return f, [w1, w2]


def test_training_is_serial_training_on_the_cpu(ranks):
    train, params = classifier(synk.function, theano.shared, synk.ops.all_reduce)
    make = functools.partial(theano.function, mode=ON_HOST)
    serial, expected = classifier(make, tensor_shared, lambda g: g)
    for rows in (7 * ranks.n, 7 * ranks.n + 1, 1, 5):
        x = RANDOM.randn(rows, 6).astype("float32")
        y = RANDOM.randint(0, 3, rows).astype("int32")
        np.testing.assert_allclose(train(x, y), serial(x, y), rtol=1e-5)
    for param, wanted in zip(params, expected):
        values = synk.gather(param)
        if not IS_MIXED:  # kinds of devices round each in their way
            assert all(np.array_equal(value, values[0]) for value in values)
        np.testing.assert_allclose(values[0], wanted.get_value(), rtol=1e-5, atol=1e-6)


def test_products_with_vectors_do_not_add_what_was_in_memory(ranks):
    """CLBlast adds 0 times the result's old contents, which may be NaN."""
    w = theano.shared(np.ones(50, "float32"))
    m = T.fmatrix()
    f = synk.function([m], (T.dot(m, w), "gather"))
    poison = synk.function([m], (m * np.float32("nan"), "gather"))
    for rows in range(ranks.n, 6 * ranks.n):
        values = np.ones((rows, 50), "float32")
        poison(values)
        assert f(values).tolist() == [50] * rows


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32"])
def test_reductions(ranks, dtype):
    x = T.TensorType(dtype, (False, False))()
    f = synk.function([x], [(x.sum(axis=1), "gather"), (x.max(), "max"), (x.min(axis=0), "min")])
    values = RANDOM.randint(0, 9, (3 * ranks.n, 4)).astype(dtype)
    found = f(values)
    for result, wanted in zip(found, (values.sum(axis=1), values.max(), values.min(axis=0))):
        np.testing.assert_array_equal(result, wanted)


def test_cumsum_and_scan(ranks):
    x = T.fvector()
    total, _ = theano.scan(lambda a, b: a + b, x, np.float32(0))
    f = synk.function([x], [(T.cumsum(x), "gather"), (total, "gather")])
    values = np.arange(2 * ranks.n, dtype="float32")
    wanted = np.concatenate([part.cumsum() for part in np.split(values, ranks.n)])
    for result in f(values):
        np.testing.assert_array_equal(result, wanted)


def test_functions_of_python_only_modes_run(ranks):
    s = theano.shared(np.ones(3, "float32"))
    x = T.fvector()
    f = synk.function([x], (s + x.sum(), "sum"), mode="FAST_COMPILE")
    np.testing.assert_array_equal(f(np.ones(ranks.n, "float32")), [2 * ranks.n] * 3)


def test_outputs_and_inputs_of_device_types(ranks):
    if not is_master_on_device(ranks):
        pytest.skip("the master's variables are on the host")
    s = theano.shared(np.arange(4, dtype="float32"), "s")
    x = s.type("x")
    f = synk.function([x], [((x * 2).transfer(None), "gather"), (x.sum(), "sum")])
    values = np.arange(3 * ranks.n, dtype="float32")
    twice, total = f(values)
    assert _host.is_on_device(twice) and isinstance(total, np.ndarray)
    np.testing.assert_array_equal(np.asarray(twice), 2 * values)
    assert total == values.sum()


def test_device_outputs_of_ragged_parts(ranks):
    if not is_master_on_device(ranks):
        pytest.skip("the master's variables are on the host")
    x = T.fvector()
    f = synk.function([x], (T.outer(x, x).transfer(None), "gather"))
    parts = f(np.ones(3 * ranks.n + 1, "float32"))
    assert [np.asarray(part).shape[0] for part in parts][-1] == 4
    assert all(map(_host.is_on_device, parts))


def test_what_is_given_in_the_middle(ranks):
    s, big = theano.shared(np.arange(4.0), "s"), theano.shared(np.ones((2, 9)), "big")
    x, m = T.dvector("x"), T.dmatrix("m")
    largest, position = T.max_and_argmax(s, axis=0)
    f = synk.function(
        [x], [(largest + x.sum() * 0, "max"), (position, "max")], givens={largest: 5.0}
    )
    assert [float(value) for value in f(np.ones(ranks.n))] == [5, 3]
    hidden = T.dot(x.dimshuffle(0, "x") * np.ones((1, 2)), big)
    g = synk.function([x], (hidden.sum(), "sum"), givens={hidden: x.dimshuffle(0, "x") * 3})
    assert g(np.ones(ranks.n)) == 3 * ranks.n
    row = T.drow("row")
    t = theano.shared(np.zeros((1, 3)), "t")
    h = synk.function([], updates=[(t, m * 2)], bcast_inputs=[row], givens={m: row})
    h(np.ones((1, 3)))
    assert synk.gather(t).tolist() == [[[2, 2, 2]]] * ranks.n


@pytest.mark.skipif(IS_MIXED, reason="an OpFromGraph brings the code of the master's device")
def test_an_inner_graph_with_a_reduction(ranks):
    a = T.fvector()
    inner = theano.OpFromGraph([a], [(a**2).sum()])
    x, s = T.fvector(), theano.shared(np.ones(3, "float32"))
    f = synk.function([x], (inner(s) + x.sum(), "avg"))
    for _ in range(2):
        assert f(np.ones(2 * ranks.n, "float32")) == 5


def is_master_on_device(ranks):
    return ranks.session.devices[ranks.master] != "cpu"


def test_random_numbers_differ_between_ranks_and_repeat(ranks):
    from theano.sandbox.rng_mrg import MRG_RandomStreams

    draws = []
    for _ in range(2):
        numbers = MRG_RandomStreams(5).uniform((4,), dtype="float32")
        f = synk.function([], (numbers.dimshuffle("x", 0), "gather"))
        draws.append([f(), f()])
    np.testing.assert_array_equal(draws[0], draws[1])
    assert len({tuple(row) for row in np.concatenate(draws[0])}) == 2 * ranks.n


def test_an_error_on_one_rank_leaves_the_session_usable(ranks):
    s = theano.shared(np.ones(4, "float32"))
    x = T.fvector()

    def fail(values):
        if worker().rank == ranks_failing:
            raise ArithmeticError("on purpose")
        return values

    ranks_failing = ranks.n - 1
    f = synk.function([x], (Call(fail, T.fvector)(x) + s.sum(), "gather"))
    with pytest.raises(synk.WorkerError, match="on purpose") as caught:
        f(np.ones(ranks.n, "float32"))
    assert caught.value.rank == ranks_failing
    synk.all_reduce(s, "sum")
    assert synk.gather(s).tolist() == [[ranks.n] * 4] * ranks.n


def test_large_variables(ranks):
    values = RANDOM.rand(ranks.n, 1 << 24 if ON_CUDA else 1 << 20).astype("float32")
    s = theano.shared(np.zeros(1, "float32"))
    for rank, value in enumerate(values):
        synk.set_value(rank, s, value)
    np.testing.assert_array_equal(synk.gather(s), values)
    total = values.sum(axis=0)
    np.testing.assert_allclose(synk.reduce(s, "sum", in_place=False), total, rtol=1e-6)
    synk.all_reduce(s, "sum")
    for value in synk.gather(s):
        np.testing.assert_allclose(value, total, rtol=1e-6)
    synk.broadcast(s, values[-1])
    synk.all_gather(s)
    np.testing.assert_array_equal(synk.get_value(ranks.n - 1, s), np.tile(values[-1], ranks.n))
    synk.scatter(s, values[0])
    np.testing.assert_array_equal(synk.gather(s, nd_up=0), values[0])


def test_a_second_session_is_refused(ranks):
    with pytest.raises(RuntimeError):
        synk.fork(devices=ranks.session.devices)
    assert ranks.session is _session._Current.session
