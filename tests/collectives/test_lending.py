"""Large all-reduces inside functions: in shares, landing in shared memory, lent from it."""

import numpy as np
import pytest
import theano
import theano.tensor as T
from support import compiling
from support.expected import dtypes_of, reduced
from support.layouts import ON_DEVICES, Layout
from theano.compile.nanguardmode import NanGuardMode

import synkhronos as synk
from synkhronos._arithmetic.operations import OPERATIONS

pytestmark = [
    pytest.mark.skipif(ON_DEVICES, reason="what is on devices is not lent"),
    pytest.mark.usefixtures("compiled_if_thorough"),
]
RANDOM = np.random.RandomState(0)
WIDTH = 300  # two matrices of which are more than ranks reduce each for itself


LAYOUTS = [Layout(2), Layout(3, master=1)]


def network(dtype):
    x, y = T.matrix("x", dtype), T.vector("y", dtype)
    random = np.random.RandomState(1)
    shapes = [(20, WIDTH), (WIDTH,), (WIDTH, WIDTH), (WIDTH,), (WIDTH,)]
    params = [theano.shared(0.1 * random.randn(*shape).astype(dtype)) for shape in shapes]
    w1, b1, w2, b2, w3 = params
    hidden = T.tanh(T.dot(T.tanh(T.dot(x, w1) + b1), w2) + b2)
    return [x, y], params, ((T.dot(hidden, w3) - y) ** 2).mean()


@pytest.fixture(autouse=True)
def same_rows_in_any_order():
    """Draw the same rows whichever tests ran before: a step of adam is a sign where they cancel."""
    RANDOM.seed(0)


@pytest.fixture
def not_fused(compiled_if_thorough):
    """Compute in NumPy, one operation after another: Python computes fused ones by the number."""
    with compiling.by_default(compiling.IN_PYTHON.excluding("fusion")):
        yield


def nodes(function, name):
    graph = function._compiled.maker.fgraph
    return [node for node in graph.apply_nodes if type(node.op).__name__ == name]


def rows(n, dtype="float64"):
    return RANDOM.randn(n, 20).astype(dtype), RANDOM.randn(n).astype(dtype)


@pytest.mark.slow("compiles a network twice")
@pytest.mark.usefixtures("not_fused")
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("rule", ["sgd", "momentum", "adam"])
@pytest.mark.sample(1)
def test_training_is_serial_training(ranks, extensions, rule, dtype):
    rule = getattr(extensions.rules, rule)
    inputs, params, loss = network(dtype)
    step = extensions.train.make_train_step(inputs, loss, params, rule, 0.05)
    inputs, own, loss = network(dtype)
    serial = theano.function(inputs, loss, updates=rule(loss, own, 0.05))
    [reduction] = nodes(step, "TheanoAllReduce")
    assert len(nodes(step, "Landing")) == 2 and sum(reduction.op.lent) >= 4
    tolerance = 1e-9 if dtype == "float64" else 2e-3
    for n, num_slices in [(40, 1), (41, 1), (41, 3), (ranks.n - 1, 1), (2 * ranks.n, 2), (64, 1)]:
        if rule is extensions.rules.adam:
            num_slices = 1  # it is not linear in the gradient, so the average of steps is another
        batch = rows(n, dtype)
        np.testing.assert_allclose(
            step(*batch, num_slices=num_slices), serial(*batch), rtol=tolerance
        )
        for param, other in zip(params, own):
            replicas = synk.gather(param)
            assert all(replica.tobytes() == replicas[0].tobytes() for replica in replicas)
            np.testing.assert_allclose(
                replicas[0], other.get_value(), rtol=tolerance, atol=tolerance
            )


def test_what_outlives_a_call_is_not_lent(ranks):
    x, y = T.dmatrix("x"), T.dmatrix("y")
    products = [synk.ops.all_reduce(T.dot((k * x).T, y), "sum") for k in range(1, 6)]
    kept = theano.shared(np.zeros((WIDTH, WIDTH)), "kept")
    part = theano.shared(np.zeros((WIDTH, WIDTH)), "part")
    f = synk.function(
        [x, y],
        [(products[0], None), (products[1].T, None), (products[4].sum(), None)],
        updates=[(kept, products[2]), (part, products[3][::-1])],
    )
    [reduction] = nodes(f, "TheanoAllReduce")
    assert sum(reduction.op.lent) == 1  # the one that is summed
    first, second = (RANDOM.randn(2, 3 * ranks.n, WIDTH) for _ in range(2))
    expected = first[0].T @ first[1]
    found = f(*first)
    after = [synk.gather(kept), synk.gather(part)]
    f(*second)
    np.testing.assert_allclose(found[0], expected)
    np.testing.assert_allclose(found[1], 2 * expected.T)
    np.testing.assert_allclose(found[2], 5 * expected.sum())
    for replicas, value in zip(after, (3 * expected, 4 * expected[::-1])):
        for replica in replicas:
            np.testing.assert_allclose(replica, value)
    for replica in synk.gather(kept):
        np.testing.assert_allclose(replica, 3 * second[0].T @ second[1])


def test_arrays_that_change_their_shapes(ranks):
    x, y, z = T.dmatrix("x"), T.dmatrix("y"), T.dmatrix("z")
    one, two = (synk.ops.all_reduce(T.dot(a.T, b), "sum") for a, b in ((x, y), (x, z)))
    f = synk.function([x, y, z], [(T.sqr(one).sum(), None), (T.sqr(two).sum(), None)])
    assert len(nodes(f, "Landing")) == 2
    for widths in [(200, 300), (200, 100), (200, 300), (90, 300), (10, 3), (300, 200)]:
        a = RANDOM.randn(2 * ranks.n + 1, 150)
        b, c = (RANDOM.randn(len(a), width) for width in widths)
        np.testing.assert_allclose(f(a, b, c), [((a.T @ b) ** 2).sum(), ((a.T @ c) ** 2).sum()])


def test_functions_that_take_turns(ranks):
    x, y = T.dmatrix("x"), T.dmatrix("y")
    product = T.dot(x.T, y)
    functions = [
        (synk.function([x, y], (T.exp(synk.ops.all_reduce(k * product, "sum")).sum(), None)), k)
        for k in (0.1, 0.2, 0.3)
    ]
    for _ in range(3):
        for f, k in functions:
            a, b = RANDOM.rand(2, 2 * ranks.n + 1, WIDTH) / 10
            np.testing.assert_allclose(f(a, b), np.exp(k * (a.T @ b)).sum())


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int32"])
@pytest.mark.sample(2)
def test_what_is_no_product_is_copied(ranks, op, dtype):
    if not dtypes_of(op, [dtype]):
        pytest.skip(f"{op} does not take {dtype}")
    x = T.matrix("x", dtype)
    y = synk.ops.all_reduce(x[0], op)
    f = synk.function([x], [(y, None), ((y + y).mean(), None)])
    values = RANDOM.randint(1, 4, (ranks.n, 200_000)).astype(dtype)
    expected = reduced(op, values, [1] * ranks.n)
    for _ in range(2):
        found, total = f(values)
        np.testing.assert_allclose(found, expected, rtol=1e-3)
        np.testing.assert_allclose(total, 2.0 * found.astype("float64").mean(), rtol=1e-2)


@pytest.mark.parametrize("width", [2, 200_000])
def test_half_precision_is_weighted_in_single(ranks, width):
    x = T.matrix("x", "float16")
    f = synk.function([x], [(synk.ops.all_reduce(x[0] * 1), None)])
    rows = np.full(((300 if width == 2 else 3) * ranks.n + 1, width), 300, "float16")
    assert (f(rows)[0] == 300).all()


@pytest.mark.slow("compiles a network")
def test_modes_that_check_values(ranks, extensions):
    options = {"mode": NanGuardMode(True, True, True)}
    inputs, params, loss = network("float64")
    rule = extensions.rules.sgd
    step = extensions.train.make_train_step(inputs, loss, params, rule, 0.05, options=options)
    for n in (8, 9, 8):
        step(*rows(n))
    assert nodes(step, "Landing")


@pytest.mark.slow("compiles graphs with several all-reduces")
@pytest.mark.usefixtures("not_fused")
def test_several_rounds(ranks):
    x = T.dvector("x")
    spread = T.outer(x, T.arange(float(WIDTH * WIDTH))).mean(axis=0)
    for _ in range(4):
        spread = T.tanh(synk.ops.all_reduce(spread, "sum") / (WIDTH * WIDTH * x.mean().clip(1, 1)))
    f = synk.function([x], [(spread, None)])
    assert len(nodes(f, "TheanoAllReduce")) == 4
    assert not any(any(node.op.lent) for node in nodes(f, "TheanoAllReduce"))
    values = np.ones(ranks.n)
    expected = np.arange(float(WIDTH * WIDTH))
    for _ in range(4):
        expected = np.tanh(ranks.n * expected / (WIDTH * WIDTH))
    for _ in range(2):
        np.testing.assert_allclose(f(values)[0], expected, rtol=1e-12)


def test_shapes_that_differ_are_told_of_and_the_session_lives_on(ranks):
    x, y = T.dmatrix("x"), T.dmatrix("y")
    f = synk.function([x, y], (T.sqr(synk.ops.all_reduce(T.dot(x, y.T), "sum")).sum(), None))
    same = RANDOM.rand(2, 200 * ranks.n, 30)
    for _ in range(2):
        found = f(*same)
        with pytest.raises(synk.WorkerError, match="different shapes"):
            f(*RANDOM.rand(2, 200 * ranks.n + 1, 30))
    a, b = (part.reshape(ranks.n, 200, 30) for part in same)
    np.testing.assert_allclose(found, ((a @ b.transpose(0, 2, 1)).sum(axis=0) ** 2).sum())
    np.testing.assert_allclose(f(*same), found)


@pytest.mark.slow("compiles a network twice")
@pytest.mark.usefixtures("not_fused")
def test_outside_of_a_session_it_computes_what_theano_does():
    inputs, params, loss = network("float64")
    grads = [synk.ops.all_reduce(g) for g in T.grad(loss, params)]
    mode = theano.compile.get_default_mode().including("synkhronos")
    found = theano.function(inputs, [T.sqr(g).sum() for g in grads], mode=mode)
    plain = theano.function(inputs, [T.sqr(g).sum() for g in T.grad(loss, params)])
    batch = rows(7)
    np.testing.assert_allclose(found(*batch), plain(*batch))
