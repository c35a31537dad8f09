"""Functions, collectives and training on ranks that compute with JAX: `test_jax_ranks` runs it.

All of these tests share one session, as a process can start JAX once; see support/layouts.py.
"""

import concurrent.futures

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import synkhronos as synk
from synkhronos import WorkerError, _host
from synkhronos.extensions.train import make_train_step
from synkhronos.extensions.update_rules import adam

pytestmark = pytest.mark.filterwarnings("ignore:RandomVariable Ops:DeprecationWarning")
ROWS = 7  # no multiple of 2 or 3
REDUCTIONS = {"sum": np.sum, "avg": np.mean, "max": np.max, "min": np.min, "prod": np.prod}


@pytest.fixture(autouse=True)
def on_ranks(ranks):
    """Run each test on the ranks of this run."""


def matrix(dtype="float64", rows=ROWS):
    return (np.arange(rows * 3).reshape(rows, 3) % 5 + 1).astype(dtype)


def is_on_device(variable):
    return _host.is_on_device(_host.peek(variable))


def equal(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-5 if found.dtype == "float32" else 1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
def test_outputs_of_all_modes(dtype):
    x, whole = pt.matrix("x", dtype=dtype), matrix(dtype)
    reductions = {"sum": x.sum(0), "max": x.max(0), "min": x.min(0), "prod": x.prod(0)}
    if dtype.startswith("float"):
        reductions["avg"] = x.mean(0)
    outputs = [(expression, mode) for mode, expression in reductions.items()]
    f = synk.function([x], [*outputs, (x * 2, "gather")])
    for num_slices in 1, 2:
        *found, gathered = f(whole, num_slices=num_slices)
        for each, (expression, mode) in zip(found, outputs, strict=True):
            expected = REDUCTIONS[mode](whole, 0)
            assert each.dtype == expression.dtype and type(each) is np.ndarray
            equal(each, expected)
        np.testing.assert_array_equal(gathered, whole * 2)
        gathered[:] = 0  # it is the caller's own
    np.testing.assert_array_equal(f(whole, batch=[3, 1, 1])[-1], whole[[3, 1, 1]] * 2)
    [first] = f(whole, output_subset=[0])
    equal(first, whole.sum(0))


def test_inputs_that_are_whole_on_each_rank(ranks):
    x, w = pt.dmatrix("x"), pt.dvector("w")
    f = synk.function([x], [((x @ w).sum(), "sum"), (w.sum(), "sum")], bcast_inputs=[w])
    total, sums = f(matrix(), np.arange(3.0))
    equal(total, (matrix() @ np.arange(3.0)).sum())
    equal(sums, 3.0 * ranks.n)


def test_other_numbers_of_rows_than_ranks(ranks):
    x = pt.dmatrix("x")
    f = synk.function([x], [(x.sum(), "sum"), (x, "gather")])
    for rows in (1, ranks.n, 2 * ranks.n + 1):
        total, gathered = f(matrix(rows=rows))
        equal(total, matrix(rows=rows).sum())
        np.testing.assert_array_equal(gathered, matrix(rows=rows))


def test_values_stay_on_the_device():
    x = pt.dmatrix("x")
    w, data = pytensor.shared(np.zeros(3), "w"), pytensor.shared(matrix(), "data")
    new = w + synk.ops.all_reduce(x.sum(0), "sum")
    step = synk.function([x], (data.sum(), None), updates=[(w, new)])
    step(matrix())
    kept = _host.peek(data)
    assert is_on_device(w) and is_on_device(data)
    step(matrix())
    assert _host.peek(data) is kept  # it was not sent again
    value = w.get_value(borrow=True)
    assert type(value) is np.ndarray and value.flags.writeable
    equal(value, 2 * matrix().sum(0))
    w.set_value(np.ones(3))
    synk.broadcast(w)
    step(matrix())
    equal(w.get_value(), 1 + matrix().sum(0))


def test_an_update_that_is_an_argument_keeps_its_value():
    x, last = pt.dvector("x"), pytensor.shared(np.zeros(640), "last")
    f = synk.function([], [], bcast_inputs=[x], updates=[(last, x)])
    given = np.arange(640.0)
    f(given)
    other = synk.function([], [x.sum()], bcast_inputs=[x])
    other(given * 0)  # in the same memory
    np.testing.assert_array_equal(last.get_value(), given)


def test_updates_over_slices(ranks):
    x, total = pt.dmatrix("x"), pytensor.shared(np.ones(3), "total")
    f = synk.function([x], [], updates=[(total, total + x.sum(0), "sum")])
    whole = matrix(rows=4 * ranks.n)
    f(whole, num_slices=2)
    assert is_on_device(total)
    synk.all_reduce(total, "sum")
    equal(total.get_value(), 2 * ranks.n + whole.sum(0))


def test_rows_of_shared_variables(ranks):
    data = pytensor.shared(np.zeros((1, 2)), "data")
    f = synk.function([], [(data, "gather"), (data.sum(), "sum")], sliceable_shareds=[data])
    whole = np.arange(22.0).reshape(11, 2)
    synk.scatter(data, whole)
    for _ in range(2):
        gathered, total = f(num_slices=2)
        np.testing.assert_array_equal(gathered, whole)
        assert total == whole.sum()
        kept = _host.peek(data)
    lengths = synk.get_lengths(data)
    for batch_s in (slice(0, 2), [1, 0, 1], slice(2, 0, -1)):
        rows, at = [], 0
        for length in lengths:
            rows.append(whole[at : at + length][batch_s])
            at += length
        np.testing.assert_array_equal(f(batch_s=batch_s)[0], np.concatenate(rows))
        assert _host.peek(data) is kept


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
@pytest.mark.parametrize("on_device", [False, True])
def test_collectives(ranks, dtype, on_device):
    n, op = ranks.n, "sum" if dtype == "int64" else "avg"
    s = pytensor.shared(np.zeros(4, dtype), "s")
    touch = synk.function([], (s * 1, "gather"), updates=[(s, s)])
    if on_device:
        touch()
    parts = [np.arange(4, dtype=dtype) + rank for rank in range(n)]
    for rank, part in enumerate(parts):
        synk.set_value(rank, s, part)
    np.testing.assert_array_equal(touch(), np.concatenate(parts))
    np.testing.assert_array_equal(synk.gather(s), np.stack(parts))
    np.testing.assert_array_equal(synk.get_value(n - 1, s), parts[-1])
    equal(synk.reduce(s, op=op, in_place=False), REDUCTIONS[op](parts, 0).astype(dtype))
    synk.all_reduce(s, op=op)
    np.testing.assert_allclose(touch(), np.tile(REDUCTIONS[op](parts, 0), n), rtol=1e-6)
    s.set_value(parts[0])
    synk.broadcast(s)
    np.testing.assert_array_equal(touch(), np.tile(parts[0], n))
    synk.all_gather(s)
    assert is_on_device(s)
    np.testing.assert_array_equal(touch(), np.tile(np.tile(parts[0], n), n))
    synk.scatter(s, np.arange(4 * n).astype(dtype))
    np.testing.assert_array_equal(touch(), np.arange(4 * n))
    np.testing.assert_array_equal(s.get_value(), np.arange(4) + 4 * ranks.master)


def test_reductions_of_several_levels(ranks):
    x = pt.dmatrix("x")
    mean = synk.ops.all_reduce(x.mean(0), "avg")
    variance = synk.ops.all_reduce(((x - mean) ** 2).mean(0), "avg")
    largest = synk.ops.all_reduce((x / variance).max(), "max")
    number = synk.ops.all_reduce(pt.constant(1), "sum")
    f = synk.function([x], [(each, None) for each in (mean, variance, largest, number)])
    for rows in (ROWS, 2 * ROWS):
        whole = matrix(rows=rows) * np.linspace(1, 2, rows)[:, None]
        found = f(whole)
        equal(found[0], whole.mean(0))
        equal(found[1], whole.var(0))
        equal(found[2], (whole / whole.var(0)).max())
        assert found[3] == ranks.n


def test_large_arrays_are_reduced():
    x, n = pt.dvector("x"), 300_000
    f = synk.function([], (synk.ops.all_reduce(x * 2, "avg"), None), bcast_inputs=[x])
    np.testing.assert_array_equal(f(np.arange(n)), np.arange(n) * 2)


def shared_rng(seed=5):
    return pytensor.shared(np.random.default_rng(seed), "rng")


def test_random_streams(ranks):
    rng = shared_rng()
    following, numbers = pt.random.uniform(size=(50,), rng=rng).owner.outputs
    f = synk.function([], (numbers, "gather"), updates=[(rng, following)])
    draws = np.concatenate([f() for _ in range(3)])
    assert draws.shape == (150 * ranks.n,) and len(np.unique(draws)) == len(draws)
    assert 0 <= draws.min() < 0.1 < 0.9 < draws.max() <= 1
    again = synk.function([], (numbers, "gather"))  # it has no update
    np.testing.assert_array_equal(again(), again())
    other = shared_rng()
    following, numbers = pt.random.uniform(size=(50,), rng=other).owner.outputs
    g = synk.function([], (numbers, "gather"), updates=[(other, following)])
    np.testing.assert_array_equal(np.concatenate([g() for _ in range(3)]), draws)


def test_random_numbers_of_a_serial_program():
    x, rows = pt.dmatrix("x"), []
    for scatters in (True, False):
        rng = shared_rng()
        following, numbers = pt.random.normal(size=x.shape, rng=rng).owner.outputs
        inputs = {"inputs": [x]} if scatters else {"inputs": [], "bcast_inputs": [x]}
        output = (x * 0 + numbers, "gather" if scatters else None)
        f = synk.function(outputs=output, updates=[(rng, following)], serial_random=True, **inputs)
        rows.append([f(matrix(rows=n)) for n in (ROWS, ROWS, ROWS + 1)])
    for parts, whole in zip(*rows):
        np.testing.assert_array_equal(parts, whole)


def classifier():
    """Return inputs, a loss, parameters, and a minibatch."""
    rng = np.random.default_rng(0)
    x, y = pt.dmatrix("x"), pt.lvector("y")
    shapes = {"w": (3, 8), "b": (8,), "v": (8, 4)}
    params = [pytensor.shared(rng.normal(size=s), name) for name, s in shapes.items()]
    w, b, v = params
    logits = pt.tanh(x @ w + b) @ v
    loss = -pt.special.log_softmax(logits, axis=1)[pt.arange(y.shape[0]), y].mean()
    return [x, y], loss, params, [rng.normal(size=(23, 3)), rng.integers(0, 4, 23)]


def trained(make):
    inputs, loss, params, batch = classifier()
    step = make(inputs, loss, params)
    losses = [float(step(*batch)) for _ in range(5)]
    return losses, params


def serial_step(inputs, loss, params):
    return pytensor.function(inputs, loss, updates=adam(loss, params), mode="FAST_COMPILE")


def parallel_step(inputs, loss, params):
    with synk.parallel():
        return pytensor.function(inputs, loss, updates=adam(loss, params))


def train_step(inputs, loss, params):
    return make_train_step(inputs, loss, params, adam)


@pytest.mark.parametrize("make", [train_step, parallel_step])
def test_training_is_serial_training(make):
    expected, plain = trained(serial_step)
    found, params = trained(make)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    for one, other in zip(params, plain):
        np.testing.assert_allclose(one.get_value(), other.get_value(), rtol=1e-7, atol=1e-9)
        values = [synk.get_value(rank, one) for rank in range(len(synk.get_lengths(one)))]
        assert len({each.tobytes() for each in values}) == 1


@pytest.mark.filterwarnings("ignore:.*in the master alone")  # a second, while JAX compiles
def test_parallel_with_dropout_and_row_numbers():
    x, i = pt.dmatrix("x"), pt.lscalar("i")
    data, rng = pytensor.shared(matrix(rows=20), "data"), shared_rng()
    following, mask = pt.random.bernoulli(0.5, size=x.shape, rng=rng).owner.outputs
    loss = (x * mask).sum()
    with synk.parallel():
        f = pytensor.function(
            [i], [loss, mask.sum()], updates=[(rng, following)], givens={x: data[synk.rows(i, 8)]}
        )
    (first, kept), (second, _) = f(0), f(0)
    assert 0 < kept < 24 and first != second


def test_a_checkpoint_has_values_and_states(tmp_path):
    x, w, rng = pt.dmatrix("x"), pytensor.shared(np.zeros(3), "w"), shared_rng()
    following, numbers = pt.random.normal(size=(3,), rng=rng).owner.outputs
    new = w + synk.ops.all_reduce(x.mean(0) + numbers, "avg")
    f = synk.function([x], (w.sum(), None), updates=[(w, new), (rng, following)])
    f(matrix())
    synk.save(tmp_path / "state.npz", f)
    f(matrix())
    after = w.get_value()
    synk.load(tmp_path / "state.npz", f)
    f(matrix())
    np.testing.assert_array_equal(w.get_value(), after)


@pytest.mark.parametrize("mode", ["NUMBA", "CVM", "FAST_COMPILE"])
def test_other_modes_are_refused(mode):
    x = pt.dvector("x")
    with pytest.raises(ValueError, match="leave the mode out, or write mode='JAX'"):
        synk.function([x], x.sum(), mode=mode)
    assert synk.function([x], (x.sum(), "sum"), mode="JAX")([1.0, 2.0]) == 3


def test_operations_that_jax_lacks_are_named():
    x, i = pt.dvector("x"), pt.lscalar("i")
    with pytest.raises(NotImplementedError, match=r"operation Nonzero, made in .*jax_cases.py:\d+"):
        synk.function([x], (x.nonzero()[0], "gather"))
    data = pytensor.shared(np.arange(9.0), "data")
    f = synk.function([], (data[i : i + 2].sum(), None), bcast_inputs=[i])
    with pytest.raises(WorkerError, match=r"operation Subtensor, made in .*jax_cases.py:\d+"):
        f(1)


def test_an_error_leaves_the_session_usable(ranks):
    x, w = pt.dmatrix("x"), pytensor.shared(np.zeros(3), "w")
    gradient = synk.ops.all_reduce(x.sum(1), "sum")  # as long as the rank has rows
    f = synk.function([x], [], updates=[(w, w + gradient.sum())])
    if ranks.n > 1:
        with pytest.raises(WorkerError, match="different shapes"):
            f(matrix(rows=ranks.n + 1))
        np.testing.assert_array_equal(w.get_value(), np.zeros(3))
    f(matrix(rows=ranks.n))
    equal(w.get_value(), np.full(3, matrix(rows=ranks.n).sum()))


def test_a_rank_whose_rows_do_not_fit_is_told_of(ranks):
    x = pt.dvector("x")
    total = synk.ops.all_reduce(x.reshape((2, -1)).sum(), "sum")
    f = synk.function([x], (total, None))
    for rows in (4 * ranks.n, 8 * ranks.n):
        if ranks.n > 1:
            with pytest.raises(WorkerError, match=rf"had \d of the {rows + 1} rows"):
                f(np.ones(rows + 1))  # the other ranks wait for this one
        assert f(np.ones(rows)) == rows


def test_plain_functions_of_other_threads_reduce_nothing(ranks):
    x = pt.dvector("x")
    total = synk.ops.all_reduce(x.sum(), "sum")
    f, plain = synk.function([x], (total, None)), pytensor.function([x], total)
    f(np.ones(ranks.n))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = pool.submit(lambda: [float(plain([2.0])) for _ in range(100)])
        assert {float(f(np.ones(ranks.n))) for _ in range(100)} == {ranks.n}
        assert {*found.result()} == {2}
