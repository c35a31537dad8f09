"""All-reduce in a graph: training in one function, order, weights, errors. Against plain Theano."""

import numpy as np
import pytest
import theano
import theano.tensor as T
from support import compiling, host_library
from support.expected import plain, reduced
from support.helpers import MODE, Call, function, shares
from support.layouts import CONFORMANCE, IS_MIXED, ON_DEVICES
from theano.ifelse import ifelse
from theano.tensor import raw_random

import synkhronos as synk
from synkhronos._arithmetic.operations import OPERATIONS
from synkhronos._host.base import rank_operations

LAYOUTS = CONFORMANCE
MODES = [None, "FAST_COMPILE", theano.Mode("py", None)]
IN_C = theano.Mode("vm", "fast_run")
# Where operations of devices are compiled, which takes minutes: the graph of one mode.
SOME_MODES = [None] if ON_DEVICES else [*MODES, IN_C]
# The graphs of the default mode. Theano would compile these for many seconds.
AS_BY_DEFAULT = None if host_library.ON_PYTENSOR or ON_DEVICES else compiling.IN_PYTHON
SERIAL = {"mode": MODE}
if ON_DEVICES:
    from theano.tensor.sharedvar import tensor_constructor

    SERIAL = {"mode": compiling.ON_HOST, "shared": tensor_constructor}
RANDOM = np.random.RandomState(0)
X, Y = RANDOM.randn(37, 4), RANDOM.randn(37)


def network(make, reduce, shared=theano.shared, **kwargs):
    """Return a training function with a clipped step, and its parameters."""
    x, y = T.dmatrix("x"), T.dvector("y")
    w1 = shared(np.random.RandomState(1).randn(4, 5), "w1")
    b1 = shared(np.zeros(5), "b1")
    w2 = shared(np.random.RandomState(2).randn(5), "w2")
    params = [w1, b1, w2]
    loss = ((T.dot(T.tanh(T.dot(x, w1) + b1), w2) - y) ** 2).mean()
    grads = [reduce(g) for g in T.grad(loss, params)]
    norm = T.sqrt(sum((g**2).sum() for g in grads))
    step = 0.1 * T.minimum(1, 3 / norm)
    return make(
        [x, y], [loss, norm], updates=[(p, p - step * g) for p, g in zip(params, grads)], **kwargs
    ), params


def assert_equal_everywhere(params, expected=None):
    for position, values in enumerate(map(synk.gather, params)):
        for value in values:
            if IS_MIXED:  # which round each in their way
                np.testing.assert_allclose(value, values[0], rtol=1e-10)
            else:
                assert np.array_equal(value, values[0])
        if expected is not None:
            np.testing.assert_allclose(values[0], expected[position].get_value(), rtol=1e-10)


def reduces(f):
    return [
        node.op
        for node in f._compiled.maker.fgraph.toposort()
        if isinstance(node.op, rank_operations.AllReduce)
    ]


@pytest.mark.parametrize(
    "mode",
    [*MODES, pytest.param(IN_C, marks=pytest.mark.thorough)],
    ids=["default", "FAST_COMPILE", "py", "vm"],
)
@pytest.mark.usefixtures("compiled_if_thorough")
def test_training_in_one_function_is_serial_training(ranks, mode):
    train, params = network(synk.function, synk.ops.all_reduce, mode=mode)
    serial, expected = network(theano.function, lambda g: g, **SERIAL)
    # Also with fewer rows than ranks: who has none takes part.
    for rows in (37, 1, 2, 5, 37):
        np.testing.assert_allclose(train(X[:rows], Y[:rows]), serial(X[:rows], Y[:rows]))
        assert_equal_everywhere(params, expected)
    for batch in (slice(3, 20), [5, 1, 1, 30], 2):
        rows = slice(batch) if isinstance(batch, int) else batch
        np.testing.assert_allclose(train(X, Y, batch=batch), serial(X[rows], Y[rows]))
        assert_equal_everywhere(params, expected)


@pytest.mark.numba
def test_the_gradients_of_a_model_take_one_round(ranks):
    for mode in [AS_BY_DEFAULT] if ON_DEVICES else [*MODES[1:], AS_BY_DEFAULT]:
        train, _ = network(synk.function, synk.ops.all_reduce, mode=mode)
        [op] = reduces(train)
        assert op.ops == ("avg",) * 3
    # In FAST_COMPILE of PyTensor nothing works in place.
    if host_library.MODE != "FAST_COMPILE" or not host_library.ON_PYTENSOR:
        assert op.inplace


@pytest.mark.numba
def test_slices_weigh_their_rows(ranks):
    x = T.dmatrix("x")
    total = theano.shared(np.zeros(4), "total")
    mean = synk.ops.all_reduce(x.mean(axis=0))
    f = function([x], [x.mean(), mean], updates=[(total, mean)])
    for rows, slices in ((37, 5), (37, 1), (5, 3), (3, 2), (2, 7), (1, 4)):
        total.set_value(np.zeros(4))
        whole, average = f(X[:rows], num_slices=slices)
        np.testing.assert_allclose(whole, X[:rows].mean())
        np.testing.assert_allclose(total.get_value(), X[:rows].mean(axis=0))
        assert_equal_everywhere([total])
        np.testing.assert_allclose(average, X[:rows].mean(axis=0))


def test_sliceable_shareds(ranks):
    s = theano.shared(np.zeros((1, 4)), "s")
    mean = synk.ops.all_reduce(s.mean(axis=0))
    f = function([], mean, sliceable_shareds=[s])
    synk.scatter(s, X)
    np.testing.assert_allclose(f(), X.mean(axis=0))
    parts = shares(X, ranks.n)
    expected = np.concatenate([part[:3] for part in parts]).mean(axis=0)
    np.testing.assert_allclose(f(batch_s=slice(3)), expected)
    np.testing.assert_allclose(f(batch_s=slice(3), num_slices=2), expected)
    picks = [list(range(1 + rank)) for rank in range(ranks.n)]
    expected = np.concatenate([part[pick] for part, pick in zip(parts, picks)]).mean(axis=0)
    np.testing.assert_allclose(f(batch_s=picks), expected)
    if ranks.n > 1:
        with pytest.raises(ValueError, match="each needs rows of the sliceable_shareds"):
            f(batch_s=[[], *picks[1:]])
        np.testing.assert_allclose(f(), X.mean(axis=0))


@pytest.mark.parametrize("op", [*OPERATIONS, "c_sum"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int8", "complex64"])
def test_operations(ranks, op, dtype):
    x = T.TensorType(dtype, (False, False))("x")
    if np.dtype(dtype).kind not in OPERATIONS[plain(op)].kinds:
        with pytest.raises(TypeError, match="can't average" if op == "avg" else "can't reduce"):
            synk.ops.all_reduce(x, op)
        return
    f = function([x], (synk.ops.all_reduce(x.sum(axis=0, dtype=dtype), op), "gather"))
    value = (np.arange(4 * ranks.n * 3).reshape(-1, 3) % 5).astype(dtype)
    parts = [part.sum(axis=0) for part in shares(value, ranks.n)]
    expected = reduced(op, [part.astype(value.dtype) for part in parts], [1] * len(parts))
    result = f(value)
    assert result.dtype == dtype
    for row in result.reshape(ranks.n, 3):
        np.testing.assert_allclose(row, expected.astype(dtype), rtol=1e-3)


def test_what_has_no_rows_counts_for_nothing(ranks):
    x = T.dvector("x")
    f = function([x], [(synk.ops.all_reduce(x.sum(), op), None) for op in ("sum", "avg", "max")])
    assert [float(value) for value in f([7.0])] == [7, 7, 7]


def test_nothing_scattered(ranks):
    s = theano.shared(np.zeros(3), "s")
    for rank in range(ranks.n):
        synk.set_value(rank, s, np.arange(3.0) + rank)
    f = function([], synk.ops.all_reduce(s, "sum"))
    np.testing.assert_array_equal(f(), sum(np.arange(3.0) + rank for rank in range(ranks.n)))
    np.testing.assert_array_equal(synk.get_value(0, s), np.arange(3.0))  # not in place of s


@pytest.mark.slow("compiles graphs with several all-reduces")
def test_several_levels_and_kinds(ranks):
    x = T.dvector("x")
    mean = synk.ops.all_reduce(x.mean())
    largest = synk.ops.all_reduce(abs(x - mean).max(), "max")
    variance = synk.ops.all_reduce(((x - mean) ** 2).mean())
    total = synk.ops.all_reduce((x / largest).sum(), "sum")
    for mode in SOME_MODES:
        f = function([x], [mean, largest, variance, total], mode=mode)
        assert sorted(len(op.ops) for op in reduces(f)) == [1, 1, 2]
        value = RANDOM.randn(11)
        np.testing.assert_allclose(
            f(value),
            [
                value.mean(),
                abs(value - value.mean()).max(),
                value.var(),
                (value / abs(value - value.mean()).max()).sum(),
            ],
        )
        # Only what is asked for is computed, by all.
        np.testing.assert_allclose(f(value, output_subset=[0]), [value.mean()])


def test_large_arrays_are_reduced_in_blocks(ranks):
    x = T.fmatrix("x")
    f = function([x], [(synk.ops.all_reduce(x[0]), "gather")])
    value = RANDOM.rand(ranks.n, 200_001).astype("float32")
    [result] = f(value)
    rows = result.reshape(ranks.n, -1)
    np.testing.assert_allclose(rows[0], value.mean(axis=0), rtol=1e-6)
    for row in rows:
        assert np.array_equal(row, rows[0])


def test_gradients(ranks):
    x, w = T.dvector("x"), theano.shared(0.5)
    # A loss of the mean over all rows, not the rank's own: as batch normalisation over ranks has.
    centred = x * w - synk.ops.all_reduce((x * w).mean())
    gradient = synk.ops.all_reduce(T.grad((centred**2).mean(), w))
    f = function([x], gradient)
    value = RANDOM.randn(13)
    np.testing.assert_allclose(f(value), 2 * 0.5 * value.var())
    y = synk.ops.all_reduce(x.sum() * w, "sum")
    g = function([x], (T.grad(y**2, w), None))
    own = shares(value, ranks.n)[ranks.master].sum()
    np.testing.assert_allclose(g(value), own * ranks.n * 2 * value.sum() * 0.5)
    with pytest.raises((NotImplementedError, TypeError, theano.gradient.NullTypeGradError)):
        T.grad(synk.ops.all_reduce(x.sum(), "max"), x)
    v = theano.shared(2.0)
    directional = T.Rop(synk.ops.all_reduce(w * x.mean()), w, v)
    np.testing.assert_allclose(function([x], directional)(value), 2 * value.mean())


def test_outside_of_a_call_it_is_the_identity(ranks):
    x = T.dvector("x")
    y = synk.ops.all_reduce(x, "sum")
    np.testing.assert_array_equal(theano.function([x], y)([1, 2]), [1, 2])
    f = function([x], (y.sum(), "sum"))
    assert f.as_theano([1.0, 2.0]) == 3


@pytest.mark.slow("starts an interpreter")
def test_outside_of_a_session_it_is_the_identity(script):
    done = script("""
import synkhronos as synk
import theano, theano.tensor as T
x = T.dvector("x")
print(theano.function([x], 2 * synk.ops.all_reduce(x), mode="FAST_COMPILE")([1, 2]))
""")
    assert done.stdout == "[2. 4.]\n"


def test_its_results_are_not_overwritten_by_the_next_call(ranks):
    x = T.dvector("x")
    f = function([x], [(synk.ops.all_reduce(x.sum() * T.ones(5)), None)])
    [first] = f(np.ones(8 * ranks.n))
    [second] = f(np.zeros(8 * ranks.n))
    assert first.tolist() == [8.0] * 5 and second.tolist() == [0.0] * 5


def test_a_default_update_that_reduces(ranks):
    x, s = T.dvector("x"), theano.shared(0.0, "s")
    s.default_update = synk.ops.all_reduce(x.mean())
    function([x], (x.sum() + s, "sum"))(np.arange(7.0))
    np.testing.assert_allclose(synk.gather(s), [3.0] * ranks.n)


# What fails.


def test_a_rank_that_raises_strands_nobody(ranks):
    x = T.dvector("x")

    def fail(value):
        if (value < 0).any():
            raise ValueError("less than nothing")
        return value

    checked = Call(fail)(x)
    f = function([x], synk.ops.all_reduce(checked.mean()))
    for row in range(ranks.n):
        value = np.ones(ranks.n)
        value[row] = -1
        with pytest.raises(synk.WorkerError, match="less than nothing") as caught:
            f(value)
        assert caught.value.rank == row
        assert f(np.ones(ranks.n)) == 1


def test_unequal_shapes_are_an_error_on_every_rank(ranks):
    if ranks.n == 1:
        pytest.skip("one rank has one shape")
    x = T.dvector("x")
    f = function([x], (synk.ops.all_reduce(x), "gather"))
    with pytest.raises(synk.WorkerError, match="different shapes"):
        f(np.ones(2 * ranks.n + 1))
    assert f(np.ones(ranks.n)).tolist() == [1.0] * ranks.n


def test_a_branch_that_only_some_ranks_take_is_an_error(ranks):
    if ranks.n == 1 or host_library.MODE == "NUMBA":
        pytest.skip("one rank takes one branch, and numba's code computes both")
    x = T.dvector("x")
    f = function([x], ifelse(T.gt(x[0], 0), synk.ops.all_reduce(x.sum()), x.sum()), mode=None)
    value = np.ones(ranks.n)
    value[-1] = -1
    with pytest.raises(synk.WorkerError, match="has left a call"):
        f(value)
    assert f(np.ones(ranks.n)) == 1


@pytest.mark.parametrize("op", ["average", None, 3])
def test_an_unknown_operation(op):
    with pytest.raises(ValueError, match=f"op must be one of {', '.join(OPERATIONS)}; got"):
        synk.ops.all_reduce(T.dvector(), op)


@pytest.mark.parametrize(
    "x", ["a", None, [T.dscalar(), T.dscalar()], raw_random.random_state_type()]
)
def test_what_is_no_tensor(x):
    with pytest.raises(TypeError, match=r"all_reduce\(\) takes a tensor variable, got"):
        synk.ops.all_reduce(x)


def test_inside_of_another_graph(ranks):
    s = theano.shared(np.ones(2), "s")
    doubled, _ = theano.scan(
        lambda a: synk.ops.all_reduce(a * 2, "sum"), outputs_info=[s], n_steps=3
    )
    x = T.dvector()
    inner = synk.ops.all_reduce(x, "sum")
    for outputs in (doubled[-1], theano.OpFromGraph([x], [inner])(s), [s, doubled[-1] + inner]):
        with pytest.raises(TypeError, match=r"ops\.all_reduce is inside of"):
            function([x], outputs, on_unused_input="ignore")
    f = function([], (theano.OpFromGraph([x], [inner], inline=True)(s), "gather"), mode=None)
    assert f().tolist() == [ranks.n] * 2 * ranks.n


@pytest.mark.parametrize("mode", [None, "FAST_COMPILE"])
def test_constants_are_reduced_too(ranks, mode):
    x = T.dvector("x")
    outputs = [synk.ops.all_reduce(T.constant(3.0), op) for op in ("sum", "avg", "prod")]
    f = synk.function([x], outputs, mode=mode, on_unused_input="ignore")
    assert [float(each) for each in f(np.ones(2 * ranks.n))] == [3 * ranks.n, 3, 3**ranks.n]
