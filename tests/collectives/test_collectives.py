"""Every verb, on every rank, for every dtype and shape, against NumPy."""

import numpy as np
import pytest
import theano
import theano.tensor as T
from support import host_library
from support.expected import combined, dtypes_of
from support.helpers import MODE, function, shares
from support.layouts import CONFORMANCE
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.shared_randomstreams import RandomStreams

import synkhronos as synk
from synkhronos._arithmetic.operations import OPERATIONS

LAYOUTS = CONFORMANCE
INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
FLOATS = ["float16", "float32", "float64", "complex64", "complex128"]
DTYPES = [*INTEGERS, *FLOATS, "bool"]
# 0-d, empty, one element, fewer than ranks, odd, matrices, 4-d.
SHAPES = [(), (0,), (1,), (3,), (1001,), (0, 3), (7, 5), (2, 3, 5, 7)]
SEVERAL_BLOCKS = (3, 100_001)  # of 2 bytes or more: longer than 512 KiB


def some(dtype, shape, seed=0):
    """Return values of all sizes that the dtype can hold; floats whose products stay small."""
    random = np.random.RandomState(seed)
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        data = random.bytes(dtype.itemsize * int(np.prod(shape)))
        return np.frombuffer(data, dtype).reshape(shape)
    if dtype.kind == "b":
        return np.asarray(random.rand(*shape) < 0.5)
    values = random.uniform(-2, 2, shape)
    if dtype.kind == "c":
        values = values + 1j * random.uniform(-2, 2, shape)
    return np.asarray(values, dtype)


def on_all(ranks, dtype, shape):
    """Return a value for each rank."""
    return [some(dtype, shape, seed) for seed in range(ranks.n)]


def shared_with(values, **kwargs):
    """Return a shared variable, used by no function, with these values on the ranks."""
    s = theano.shared(values[0], **kwargs)
    for rank, value in enumerate(values):
        synk.set_value(rank, s, value)
    return s


def held(ranks, s):
    """Return the value of each rank."""
    return [synk.get_value(rank, s) for rank in range(ranks.n)]


def assert_held(ranks, s, values):
    assert synk.get_shapes(s) == [value.shape for value in values]
    for rank, value in enumerate(values):
        found = synk.get_value(rank, s)
        assert found.dtype == value.dtype == s.dtype
        assert_same(found, value)
    assert_same(s.get_value(), values[ranks.master])


def assert_same(found, value):
    if found.dtype.kind == "c":  # NumPy 2 divides a complex array of one item in its own way
        np.testing.assert_allclose(found, value, rtol=1e-6)
    else:
        np.testing.assert_array_equal(found, value)


def reduced(op, values):
    """Return what NumPy makes of the values of all ranks."""
    dtype, stacked = values[0].dtype, np.stack(values)
    if dtype == np.float16:
        stacked = stacked.astype(np.float32)
    if dtype.kind == "b":
        result = {"sum": np.any, "max": np.any, "prod": np.all, "min": np.all}[op](stacked, 0)
    else:
        result = combined("sum" if op == "avg" else op, stacked)
    if op == "avg":
        result = result / stacked.dtype.type(len(values))
    return np.asarray(result, dtype)


def assert_reduced(found, op, values):
    expected = reduced(op, values)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    if expected.dtype.kind in "fc":
        digits = np.finfo(expected.dtype).eps * 4
        np.testing.assert_allclose(found, expected, rtol=digits, atol=digits)
    else:
        np.testing.assert_array_equal(found, expected)


def ops_of(dtype):
    return [op for op in OPERATIONS if dtypes_of(op, [dtype])]


# Reductions.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.sample(5)
def test_all_reduce_and_reduce(ranks, dtype):
    shapes = [*SHAPES, SEVERAL_BLOCKS]
    values = [on_all(ranks, dtype, shape) for shape in shapes]
    variables = [shared_with(each) for each in values]

    def reset():
        for rank in range(ranks.n):
            synk.set_value(rank, variables, [each[rank] for each in values])

    for op in ops_of(dtype):
        results = synk.reduce(variables, op, in_place=False)
        for each, result in zip(values, results):
            assert_reduced(result, op, each)
            assert type(result) is np.ndarray
        assert synk.reduce(variables, "c_" + op) is None
        on_master = synk.get_value(ranks.master, variables)
        for s, each, found, result in zip(variables, values, on_master, results):
            assert_same(found, result)
            assert_held(ranks, s, [*each[: ranks.master], found, *each[ranks.master + 1 :]])
        reset()
        assert synk.all_reduce(variables, op) is None
        for s, result in zip(variables, results):
            assert_held(ranks, s, [result] * ranks.n)
        reset()


def test_all_dtypes_in_one_call(ranks):
    values = [
        on_all(ranks, dtype, shape)
        for dtype in DTYPES
        for shape in [(), (3,), (17, 31), (0,), (90_001,)]
    ]
    variables = [shared_with(each) for each in values]
    synk.all_reduce(variables, "sum")
    for s, each in zip(variables, values):
        assert_reduced(s.get_value(), "sum", each)
        assert_held(ranks, s, [s.get_value()] * ranks.n)


def test_the_default_is_the_average(ranks):
    s = shared_with([np.full(2, rank + 1.0) for rank in range(ranks.n)])
    mean = (ranks.n + 1) / 2
    np.testing.assert_allclose(synk.reduce(s, in_place=False), mean)
    synk.all_reduce(s, nccl=False)
    np.testing.assert_allclose(synk.gather(s, nccl=False), mean)


def test_every_rank_gets_the_same_bits(ranks):
    random = np.random.RandomState(5)
    for size in (1, 5, 1000, 300_001):
        # Of all magnitudes, so that every order of additions has another result.
        values = [
            (random.randn(size) * 10.0 ** random.randint(-8, 8, size)).astype("float32")
            for _ in range(ranks.n)
        ]
        for op in ("sum", "avg", "prod"):
            s = shared_with(values)
            synk.all_reduce(s, op)
            bits = [value.tobytes() for value in held(ranks, s)]
            assert len(set(bits)) == 1


def test_half_precision_is_accumulated_in_single(ranks):
    # In float16, 2048 + 1 is 2048; and the sum of the 60000s is not finite before the average.
    values = [np.array([2048, 60000], "float16")] + [np.array([1, 60000], "float16")] * (
        ranks.n - 1
    )
    s = shared_with(values)
    s_max = shared_with(values)
    with np.errstate(over="ignore"):
        assert synk.reduce(s, "sum", in_place=False)[0] == np.float16(2048 + ranks.n - 1)
    synk.all_reduce(s)
    for value in held(ranks, s):
        assert value[0] == np.float16((2048 + ranks.n - 1) / ranks.n)
        assert value[1] == np.float16(60000)
    synk.all_reduce(s_max, "max")
    np.testing.assert_array_equal(synk.get_value(ranks.n - 1, s_max), values[0])


def test_not_a_number_is_passed_on(ranks):
    values = [np.array([np.nan, np.inf, rank]) for rank in range(ranks.n)]
    for op in ("avg", "sum", "prod", "min", "max"):
        s = shared_with(values)
        synk.all_reduce(s, op)
        found = synk.get_value(ranks.n - 1, s)
        assert np.isnan(found[0]) and np.isinf(found[1])


# Broadcast.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.sample(5)
def test_broadcast(ranks, dtype):
    shapes = [*SHAPES, SEVERAL_BLOCKS]
    values = [on_all(ranks, dtype, shape) for shape in shapes]
    variables = [shared_with(each) for each in values]
    assert synk.broadcast(variables) is None
    for s, each in zip(variables, values):
        assert_held(ranks, s, [each[ranks.master]] * ranks.n)
    new = [some(dtype, shape[::-1], 9) for shape in shapes]
    synk.broadcast(variables, [synk.data(v) if i % 2 else v for i, v in enumerate(new)])
    for s, value in zip(variables, new):
        assert_held(ranks, s, [value] * ranks.n)
    for s, value in zip(variables, new):
        synk.broadcast(s, values=value)
        assert_held(ranks, s, [value] * ranks.n)


def test_broadcast_takes_lists_and_keeps_what_is_none(ranks):
    s, t = shared_with(on_all(ranks, "float64", (3,))), shared_with(on_all(ranks, "int8", (2, 2)))
    kept = t.get_value()
    synk.broadcast([s, t], [[1, 2.5], None], nccl=False)
    assert_held(ranks, s, [np.array([1, 2.5])] * ranks.n)
    assert_held(ranks, t, [kept] * ranks.n)
    synk.broadcast(t, [[5, 6]])
    assert_held(ranks, t, [np.array([[5, 6]], "int8")] * ranks.n)
    synk.broadcast((s,), (np.arange(3, dtype="float32"),))  # cast up, as by set_value
    assert_held(ranks, s, [np.arange(3.0)] * ranks.n)


def test_shapes_that_differ_before_a_broadcast(ranks):
    s = shared_with([np.ones(rank) for rank in range(ranks.n)])
    assert synk.get_lengths(s) == list(range(ranks.n))
    synk.broadcast(s)
    assert synk.get_lengths(s) == [ranks.master] * ranks.n


def test_shapes_of_more_variables_than_one_answer_has_room_for(ranks):
    shapes = [(i % 3,) + (1,) * 31 for i in range(1100)]
    variables = [theano.shared(np.zeros(shape)) for shape in shapes]
    assert synk.get_shapes(variables) == tuple([shape] * ranks.n for shape in shapes)
    assert synk.get_lengths(variables) == tuple([shape[0]] * ranks.n for shape in shapes)


# Scatter, gather.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.sample(5)
def test_scatter_and_gather(ranks, dtype):
    for shape in [shape for shape in SHAPES if shape] + [(SEVERAL_BLOCKS[1], 3)]:
        value = some(dtype, shape, 3)
        s = theano.shared(some(dtype, (1,) * len(shape)))
        for given in (value, synk.data(value), value.tolist()):
            if isinstance(given, list) and (value.size == 0 or value.size > 5000):
                continue
            assert synk.scatter(s, given) is None
            assert_held(ranks, s, shares(value, ranks.n))
            np.testing.assert_array_equal(synk.gather(s, nd_up=0), value)
            assert synk.gather(s, nd_up=0).dtype == dtype
        values = on_all(ranks, dtype, shape)
        s = shared_with(values)
        np.testing.assert_array_equal(synk.gather(s), np.stack(values))
        np.testing.assert_array_equal(synk.gather(s, nd_up=0), np.concatenate(values))
        assert_held(ranks, s, values)


BATCHES = [0, np.int32(5), slice(None, None, -2), slice(4, 4), range(8, 0, -3), [9, 0, 5], (3,)]
BATCHES += [[], [-1, 0, 0, 3, 3], np.array([1, 2, 3], "int16"), np.arange(10) % 3 == 0]


@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_batch(ranks, batch):
    value = some("float32", (10, 3))
    chosen = value[:batch] if isinstance(batch, (int, np.integer)) else value[_index(batch)]
    s, t = theano.shared(value), theano.shared(np.zeros(2, "int16"))
    for given in (value, synk.data(value)):
        synk.scatter([s, t], [given, np.arange(10, dtype="int16")], batch=batch)
        assert_held(ranks, s, shares(chosen, ranks.n))
        assert len(synk.gather(t, nd_up=0)) == len(chosen)
        for rank in range(ranks.n):
            before = held(ranks, s)
            before[rank] = chosen
            synk.set_value(rank, s, given, batch=batch)
            assert_held(ranks, s, before)


def _index(batch):
    if isinstance(batch, (slice, np.ndarray)):
        return batch
    return np.array(batch, bool if any(b is True for b in batch) else int)


def test_gather_of_shapes_that_do_not_fit_together(ranks):
    values = [np.ones((rank + 1, 2)) * rank for rank in range(ranks.n)]
    s = shared_with(values)
    np.testing.assert_array_equal(synk.gather(s, nd_up=0), np.concatenate(values))
    found = synk.gather(s)
    if ranks.n == 1:
        assert found.shape == (1, 1, 2)
    else:
        assert type(found) is list
        for value, expected in zip(found, values):
            np.testing.assert_array_equal(value, expected)
        s = shared_with([np.ones((2, rank)) for rank in range(ranks.n)])
        assert [v.shape for v in synk.gather(s, nd_up=0)] == [(2, r) for r in range(ranks.n)]


def test_what_is_gathered_is_a_copy(ranks):
    s = shared_with([np.zeros(2)] * ranks.n)
    gathered, own = synk.gather(s), synk.get_value(ranks.master, s)
    gathered += 1
    own += 1
    assert_held(ranks, s, [np.zeros(2)] * ranks.n)
    synk.set_value(ranks.master, s, [5.0, 6.0])
    np.testing.assert_array_equal(own, [1, 1])


def test_kinds_of_results(ranks):
    s, t = shared_with([np.ones(2)] * ranks.n), shared_with([np.float32(1)] * ranks.n)
    n = ranks.n
    assert synk.gather([s]).shape == (n, 2)
    assert [g.shape for g in synk.gather((s, t))] == [(n, 2), (n,)]
    assert type(synk.gather([s, t])) is tuple
    assert type(synk.get_value(0, [s])) is tuple and type(synk.get_value(0, s)) is np.ndarray
    assert synk.get_value(0, t).shape == ()
    assert synk.get_lengths(s) == [2] * n and synk.get_lengths([s]) == ([2] * n,)
    assert synk.get_shapes(t) == [()] * n and synk.get_shapes((t, s)) == ([()] * n, [(2,)] * n)
    assert type(synk.reduce([s], in_place=False)) is tuple
    # The keywords of 2017.
    synk.set_value(rank=n - 1, shared_vars=s, values=np.zeros(3), batch=2)
    np.testing.assert_array_equal(synk.get_value(rank=n - 1, shared_vars=s), [0, 0])
    synk.all_reduce(shared_vars=t, op="sum", nccl=True)
    synk.reduce(shared_vars=t, op="max", in_place=True, nccl=True)
    synk.broadcast(shared_vars=t, values=np.float32(2), nccl=True)
    synk.scatter(shared_vars=s, values=np.ones(3), batch=None)
    assert synk.gather(shared_vars=t, nd_up=1, nccl=True).tolist() == [2] * n


# all_gather.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.sample(5)
def test_all_gather(ranks, dtype):
    shapes = [shape for shape in SHAPES if shape] + [SEVERAL_BLOCKS]
    # Lengths that differ between ranks, but for the first variable.
    values = [
        [some(dtype, ((shape[0] + rank * (i > 0)), *shape[1:]), rank) for rank in range(ranks.n)]
        for i, shape in enumerate(shapes)
    ]
    variables = [shared_with(each) for each in values]
    assert synk.all_gather(variables) is None
    for s, each in zip(variables, values):
        assert_held(ranks, s, [np.concatenate(each)] * ranks.n)
    synk.all_gather(variables[2])  # repeats compound
    assert_held(ranks, variables[2], [np.concatenate(values[2] * ranks.n)] * ranks.n)


# One rank.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.sample(5)
def test_set_value_and_get_value(ranks, dtype):
    values = [some(dtype, shape, 1) for shape in SHAPES]
    variables = [theano.shared(value) for value in values]
    old = [value.copy() for value in values]
    for rank in range(ranks.n):
        new = [some(dtype, shape[::-1], rank + 2) for shape in SHAPES]
        synk.set_value(rank, variables, [synk.data(v) if rank % 2 else v for v in new])
        for found, value in zip(synk.get_value(np.int64(rank), variables), new):
            assert found.dtype == dtype and type(found) is np.ndarray
            np.testing.assert_array_equal(found, value)
        for other in range(rank + 1, ranks.n):
            for found, value in zip(synk.get_value(other, variables), old):
                np.testing.assert_array_equal(found, value)


def test_values_are_not_kept(ranks):
    value, data = np.ones(3), synk.data(np.ones(3))
    for given in (value, data):
        for rank in range(ranks.n):
            s = theano.shared(np.zeros(1))
            synk.set_value(rank, s, given)
            given[:] = 5
            np.testing.assert_array_equal(synk.get_value(rank, s), np.ones(3))
            given[:] = 1
        synk.broadcast(s, given)
        given[:] = 5
        assert_held(ranks, s, [np.ones(3)] * ranks.n)
        given[:] = 1


def test_broadcastable_variables(ranks):
    column = theano.shared(np.ones((3, 1), "float32"), broadcastable=(False, True))
    row = theano.shared(np.ones((1, 3)), broadcastable=(True, False))
    synk.scatter(column, np.arange(5, dtype="float32")[:, None])
    assert_held(ranks, column, shares(np.arange(5, dtype="float32")[:, None], ranks.n))
    synk.all_gather(column)
    assert_held(ranks, column, [np.arange(5, dtype="float32")[:, None]] * ranks.n)
    synk.scatter(column, [[1], [2]])
    np.testing.assert_array_equal(synk.gather(column, nd_up=0), [[1], [2]])
    synk.broadcast([row, column], [[[1, 2]], np.array([[3]], "int8")])
    synk.all_reduce([row, column], "sum")
    assert_held(ranks, row, [ranks.n * np.array([[1.0, 2]])] * ranks.n)
    assert_held(ranks, column, [ranks.n * np.array([[3]], "float32")] * ranks.n)
    synk.set_value(ranks.n - 1, row, np.arange(4.0).reshape(2, 2), batch=[1])
    np.testing.assert_array_equal(synk.get_value(ranks.n - 1, row), [[2, 3]])
    add = function([], (row + column, "gather"))
    assert add().shape == (ranks.n, 2)


# Random states.


@pytest.mark.numba
def test_random_states(ranks):
    streams = RandomStreams(seed=3)
    x = streams.uniform((2,))
    state = x.rng
    draw = function([], (x, "gather"))

    def drawn():
        return draw().reshape(ranks.n, 2)

    assert len(np.unique(drawn())) == 2 * ranks.n
    synk.broadcast(state)
    numbers = drawn()
    assert (numbers == numbers[0]).all()
    own = host_library.random_state(8)
    for rank in range(ranks.n):
        synk.set_value(rank, state, host_library.random_state(rank))
    synk.set_value(ranks.n - 1, [state], [own])
    expected = [host_library.random_state(rank).uniform(size=2) for rank in range(ranks.n)]
    expected[-1] = host_library.random_state(8).uniform(size=2)
    np.testing.assert_allclose(drawn(), expected)
    own.uniform()  # it was copied
    there = synk.get_value(ranks.n - 1, state)
    after = host_library.random_state(8)
    after.uniform(size=2)
    assert type(there) is type(own)
    assert there.uniform() == after.uniform()
    assert type(synk.get_value(0, [state])) is tuple
    s = theano.shared(np.zeros(1))
    synk.broadcast([s, state], [[1.0], host_library.random_state(2)])
    np.testing.assert_allclose(drawn(), [host_library.random_state(2).uniform(size=2)] * ranks.n)
    assert_held(ranks, s, [np.ones(1)] * ranks.n)
    states = synk.get_value(ranks.n - 1, [state, s])
    assert type(states[0]) is type(own) and states[1] == 1


def test_random_states_of_the_mrg_streams(ranks):
    streams = MRG_RandomStreams(seed=3)
    x = streams.uniform((4,))
    draw = function([], (x, "gather"))
    [state] = draw.get_shared()
    assert len(np.unique(draw())) == 4 * ranks.n
    synk.broadcast(state)
    drawn = draw().reshape(ranks.n, 4)
    assert (drawn == drawn[0]).all()
    kept = synk.get_value(ranks.n - 1, state)
    first = draw()
    for rank in range(ranks.n):
        synk.set_value(rank, state, kept)
    np.testing.assert_array_equal(draw(), first)


# With functions.


@pytest.mark.numba
def test_functions_see_what_collectives_do_and_the_other_way_round(ranks):
    x = T.dvector("x")
    s = theano.shared(np.zeros(3), "s")
    read = function([], (s, "gather"))
    add = function([x], updates=[(s, s + x.sum())])
    rows = np.arange(2.0 * ranks.n)
    parts = np.array([part.sum() for part in shares(rows, ranks.n)])
    add(rows)
    np.testing.assert_array_equal(synk.gather(s), np.tile(parts[:, None], 3))
    synk.all_reduce(s, "sum")
    np.testing.assert_array_equal(read(), [rows.sum()] * 3 * ranks.n)
    for _ in range(3):
        add(rows)
        np.testing.assert_array_equal(read(), np.repeat(parts + rows.sum(), 3))
        synk.set_value(0, s, [rows.sum()] * 3)
        for rank in range(1, ranks.n):
            synk.set_value(rank, s, synk.data([rows.sum()] * 3))
    add(rows, num_slices=2)
    synk.scatter(s, np.arange(7.0))
    np.testing.assert_array_equal(read(), np.arange(7.0))
    f = function([], [(s, "gather"), (s.sum(), "sum")], sliceable_shareds=[s])
    for num_slices in (1, 2):
        gathered, total = f(num_slices=num_slices)
        np.testing.assert_array_equal(gathered, np.arange(7.0))
        assert total == 21
    if ranks.n == 2:
        np.testing.assert_array_equal(f(batch_s=[[0], [-1, 0]])[0], [0, 6, 3])
    synk.all_gather(s)
    np.testing.assert_array_equal(f(batch_s=slice(1, 3))[0], [1, 2] * ranks.n)


def test_plain_theano_sees_the_masters_value(ranks):
    s = theano.shared(np.zeros(2))
    synk.broadcast(s, [1.0, 2.0])
    double = theano.function([], s * 2, updates=[(s, s + 1)], mode=MODE)
    np.testing.assert_array_equal(double(), [2, 4])
    expected = [np.array([1.0, 2.0])] * ranks.n
    expected[ranks.master] = np.array([2.0, 3.0])
    assert_held(ranks, s, expected)


def test_the_collectives_of_2017s_example(ranks):
    if (ranks.n, ranks.master) != (2, 0):
        pytest.skip("has figures for 2 ranks")
    x, s = T.dmatrix("x"), theano.shared(np.ones(2))
    f = function([x], updates=[(s, T.sum(x * s, axis=0))])
    f(np.array([[1.0, 1], [2, 2], [3, 3], [4, 4]]))
    assert s.get_value().tolist() == [3, 3]
    assert synk.gather(s, nd_up=1).tolist() == [[3, 3], [7, 7]]
    synk.reduce(s, op="sum")
    assert s.get_value().tolist() == [10, 10]
    assert synk.gather(s).tolist() == [[10, 10], [7, 7]]
    synk.broadcast(s, np.array([3.0, 3]))
    synk.set_value(1, s, np.array([7.0, 7]))
    synk.all_reduce(s, op="sum")
    assert synk.gather(s).tolist() == [[10, 10], [10, 10]]
