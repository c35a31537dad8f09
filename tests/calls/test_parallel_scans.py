"""`parallel`: scans over other axes than the rows', and reshaping that such programs need."""

import logging

import numpy as np
import pytest
import theano
import theano.tensor as T
from support import compiling
from support.host_library import ON_PYTENSOR
from support.layouts import ON_DEVICES, Layout
from theano.compile.function_module import Function
from theano.gof.graph import ancestors
from theano.ifelse import ifelse
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.scan_module.scan_op import Scan
from theano.scan_module.scan_utils import until
from theano.tensor.shared_randomstreams import RandomStreams

import synkhronos as synk
from synkhronos._host.base.rank_operations import AllReduce, has_inside
from synkhronos.porting import ParallelFunction

pytestmark = [
    pytest.mark.skipif(ON_DEVICES, reason="graphs of the CPU"),
    pytest.mark.usefixtures("quickly_compiled"),
]
# PyTensor makes scans slowly.
LAYOUTS = [Layout(2)] if ON_PYTENSOR else [Layout(2), Layout(3, master=1), Layout(1)]
ROWS, TIME, FEATURES, UNITS = 7, 5, 3, 4
TOLERANCES = {"float64": 1e-9, "float32": 2e-5}


class Variables:
    """Sequences in rows, and with the time first, weights, and values for the inputs."""

    def __init__(self, dtype="float64"):
        rng = np.random.RandomState(0)
        self.dtype = dtype
        self.x = T.TensorType(dtype, (False,) * 3)("x")
        self.mask = T.TensorType(dtype, (False,) * 2)("mask")
        self.y = T.ivector("y")
        self.inputs = [self.x, self.mask, self.y]
        self.steps, self.masks = self.x.dimshuffle(1, 0, 2), self.mask.dimshuffle(1, 0)
        self.zeros = T.zeros((self.x.shape[0], UNITS), dtype)
        self.w, self.u, self.b = self.weights = [
            theano.shared(rng.uniform(-1, 1, shape).astype(dtype), name)
            for name, shape in (("w", (FEATURES, UNITS)), ("u", (UNITS, UNITS)), ("b", (UNITS,)))
        ]
        mask = rng.rand(ROWS, TIME) < 0.7
        mask[:, 0] = True
        self.values = [
            rng.randn(ROWS, TIME, FEATURES).astype(dtype),
            mask.astype(dtype),
            rng.randint(0, UNITS, ROWS).astype("int32"),
        ]

    def first_rows(self):
        """Return the first item of each row in all units."""
        return self.x[:, 0, 0].dimshuffle(0, "x") + self.zeros


def recurrent(v, **kwargs):
    def step(x, mask, h):
        new = T.tanh(x.dot(v.w) + h.dot(v.u) + v.b)
        return T.switch(mask.dimshuffle(0, "x"), new, h)

    return theano.scan(step, [v.steps, v.masks], v.zeros, **kwargs)[0]


def gated(v):
    """Return the states of a scan with two of them, whose projections are computed before it."""
    projected = T.dot(v.steps, v.w) + v.b

    def step(x, mask, h, c):
        gate = T.nnet.sigmoid(x + h.dot(v.u))
        c = gate * c + (1 - gate) * T.tanh(x)
        c = mask[:, None] * c + (1 - mask)[:, None] * c / 2
        return gate * T.tanh(c), c

    sequences, start = [projected, v.masks], T.alloc(np.asarray(0, v.dtype), v.x.shape[0], UNITS)
    states, _ = theano.scan(step, sequences, [start, T.zeros_like(start)], n_steps=v.x.shape[1])
    return states


def pooled(v):
    """Return the loss of the mean state of each row."""
    mean = (gated(v)[0] * v.masks[:, :, None]).sum(axis=0) / v.masks.sum(axis=0)[:, None]
    p = T.nnet.softmax(mean)
    return -T.log(p[T.arange(v.y.shape[0]), v.y] + 1e-6).mean()


def with_gradients(v, loss):
    return [loss, *T.grad(loss, [*v.weights, v.x], disconnected_inputs="ignore")]


def totals(v):
    """Return sums over the rows that a scan adds up, and states."""

    def step(x, total, h):
        h = T.tanh(h + x)
        return total + h.sum(), h

    start = [T.zeros((), v.dtype), T.zeros_like(v.x[:, 0])]
    return theano.scan(step, v.steps, start)[0]


def of_two_before(v):
    start = {"initial": v.steps[:2], "taps": [-2, -1]}
    return theano.scan(
        lambda x, two, one, last: T.tanh(two * last + one.dot(v.u[:3, :3]) + x),
        v.steps,
        start,
        non_sequences=v.x[:, -1],
    )[0]


def nested(v):
    def step(x, h):
        inner, _ = theano.scan(lambda z: T.tanh(z + x), T.stack([h, h * 2]))
        return inner.sum(axis=0)

    return theano.scan(step, v.steps, T.zeros_like(v.x[:, 0]))[0]


def until_it_is_small(v):
    def step(x, h, k):
        return [h + x, k / 2], until(T.lt(k, 1))

    start = [T.zeros_like(v.x[:, 0]), T.constant(3, dtype=v.dtype)]
    return theano.scan(step, v.steps, start)[0]


def means_of_steps(v):
    return theano.scan(lambda x, b: T.sqr(x.dot(v.w) + b).mean(), v.steps, non_sequences=v.b)[0]


def merged(v):
    return T.dot(v.steps, v.w).reshape((-1, UNITS))


def in_two_levels(v):
    """Return the states of a scan over those of scans over features, one for each step."""
    features = v.x.reshape((-1, FEATURES)).T

    def step(x, h):
        return T.tanh(x[:, None] + h.dot(v.u))

    zeros = T.zeros((features.shape[1], UNITS), v.dtype)
    inner = theano.scan(step, features, zeros)[0][-1]
    steps = inner.reshape((-1, TIME, UNITS)).dimshuffle(1, 0, 2)
    return theano.scan(lambda x, h: T.tanh(x + h), steps, v.zeros)[0][-1].dot(v.w.T)


def first_state(v):
    """Return an initial state for all rows, of a shared variable with one row."""
    state = theano.shared(v.b.get_value()[None], "state")
    return T.repeat(state, v.x.shape[0], axis=0)


def losses_of_all(v, outputs, labels):
    """Return the losses of all steps of all rows, and gradients."""
    n_labels = outputs.shape[-1]
    n = T.prod(outputs.shape) // n_labels
    p = T.nnet.softmax(outputs.reshape((n, n_labels)))[T.arange(n), labels.reshape((n,))]
    return [T.log(p), *T.grad(T.log(p).mean(), [v.w, v.x])]


def masks_as_wide(v, rows):
    """Return the first item of each mask as often as a row has items."""
    repeats = T.concatenate([[1], rows.shape[1:]])
    return T.tile(T.eq(v.mask[:, 0], 1).dimshuffle(0, "x"), repeats, ndim=2)


def losses_of_merged(v):
    p, labels = T.nnet.softmax(merged(v)), T.cast(v.masks.flatten(), "int32")
    return -T.log(p)[T.arange(labels.shape[0]), labels]


def normalized(h):
    return (h - h.mean(axis=0)) / T.sqrt(h.var(axis=0) + 0.01)


def normalized_steps(v):
    """Return states that each step normalizes over all rows, their means, and a loss of each."""

    def step(x, h, mean, total):
        new = T.tanh(normalized(x.dot(v.w)) + normalized(h.dot(v.u)) + v.b)
        mean = 0.9 * mean + 0.1 * new.mean(axis=0)
        return new, mean, total * T.sqr(new - mean).mean(), T.sqr(new).sum() / h.shape[0]

    start = [v.zeros, T.ones((UNITS,), v.dtype), T.ones((), v.dtype), None]
    return theano.scan(step, v.steps, start)[0]


def descended(v):
    """Return weights that three steps of gradient descent in a scan have changed, and gradients."""

    def step(w):
        loss = T.sqr(T.tanh(v.x[:, 0].dot(w))).mean()
        return w - 0.5 * T.grad(loss, w)

    weights, _ = theano.scan(step, outputs_info=v.w, n_steps=3)
    return [weights, *T.grad(T.sqr(v.x[:, 1].dot(weights[-1])).mean(), [v.w, v.x])]


def sums_in_two_levels(v):
    def step(x, h, total):
        inner, _ = theano.scan(lambda z: normalized(z + x), T.stack([h, h * 2]))
        new = inner.sum(axis=0)
        return new, total * new.mean() + inner.sum()

    start = [T.zeros_like(v.x[:, 0]), T.ones((), v.dtype)]
    return theano.scan(step, v.steps, start)[0]


def several_loops(v):
    """Return what loops and sums that need one another, and ones that don't, have reduced."""
    one, two = (theano.scan(lambda x, k=k: normalized(x * k), v.steps)[0] for k in (2, 3))
    scale = T.sqr(v.x).mean() + T.sqr(one).sum()
    three, _ = theano.scan(lambda x, scale: normalized(x * scale), v.steps, non_sequences=scale)
    return [one + three, two / T.sqr(v.x.sum()), T.sqr(three).mean() * T.sqr(two).sum(axis=1)]


EXPRESSIONS = {
    "normalized steps": lambda v: [
        *normalized_steps(v),
        *T.grad(sum(each.sum() for each in normalized_steps(v)), [*v.weights, v.x]),
    ],
    "steps that grow by sums": lambda v: [
        theano.scan(lambda x, c: c * x.sum(), v.steps, T.ones((), v.dtype))[0]
    ],
    "descended": descended,
    "sums in two levels": lambda v: [
        *sums_in_two_levels(v),
        *T.grad(sums_in_two_levels(v)[1].sum(), [v.x]),
    ],
    "several loops that reduce": several_loops,
    "states": lambda v: [recurrent(v), recurrent(v)[-1], recurrent(v).dimshuffle(1, 0, 2)],
    "gradients": lambda v: with_gradients(v, T.sqr(recurrent(v)[-1]).mean() + recurrent(v).sum()),
    "backwards and truncated": lambda v: with_gradients(
        v, T.sqr(recurrent(v, go_backwards=True, truncate_gradient=2)).mean()
    ),
    "several states": lambda v: [*gated(v), *with_gradients(v, pooled(v))],
    "unrolled": lambda v: [
        theano.scan(lambda h: T.tanh(h.dot(v.u)), outputs_info=v.first_rows(), n_steps=3)[0]
    ],
    "sums of steps": lambda v: [*totals(v), *with_gradients(v, totals(v)[0][-1])],
    "means of steps": lambda v: [means_of_steps(v), *with_gradients(v, means_of_steps(v).sum())],
    "states of several steps before": lambda v: [
        of_two_before(v),
        *with_gradients(v, T.sqr(of_two_before(v)).mean()),
    ],
    "scans in a scan": lambda v: [nested(v), *with_gradients(v, T.sqr(nested(v)).mean())],
    "until": lambda v: [*until_it_is_small(v), T.grad(until_it_is_small(v)[0].sum(), v.x)],
    "steps without rows": lambda v: [
        v.x[:, 0].dot(theano.scan(lambda w: T.tanh(w.dot(v.u)), v.w)[0]).sum(axis=0)
    ],
    "products": lambda v: with_gradients(v, T.sqr(T.dot(v.steps, v.w)).sum()),
    "merged": lambda v: [merged(v), v.masks.flatten(), losses_of_merged(v), merged(v).mean(axis=0)],
    "merged and parted": lambda v: [
        merged(v).reshape((v.x.shape[1], v.x.shape[0], UNITS)) * 2,
        merged(v).reshape((TIME, -1, UNITS)),
        *with_gradients(v, losses_of_merged(v).mean()),
    ],
    "rows that become several": lambda v: [
        v.x.reshape((-1, FEATURES)).dot(v.w).reshape((-1, TIME, UNITS)),
        v.x.flatten(2).reshape((v.x.shape[0], v.x.shape[1], -1)),
        v.steps.reshape((TIME, -1)),
    ],
    "scans of reshaped rows": lambda v: [
        theano.scan(
            lambda x, h: T.tanh(x + h),
            v.x.reshape((-1, FEATURES)).dot(v.w).reshape((-1, TIME, UNITS)).dimshuffle(1, 0, 2),
            v.zeros,
        )[0]
    ],
    "computed numbers of rows": lambda v: [
        *losses_of_all(v, v.x[:, 0].dot(v.w), v.y),
        *losses_of_all(v, T.dot(v.x, v.w), T.cast(v.mask, "int32")),
        v.x.reshape((v.x.size // FEATURES, -1)),
    ],
    "an initial state of one row": lambda v: [
        theano.scan(lambda x, h: T.tanh(x + h), T.dot(v.steps, v.w), first_state(v))[0]
    ],
    "chosen": lambda v: [
        ifelse(T.gt(v.b.sum(), 0), v.x, v.x * 2),
        ifelse(T.gt(v.x.sum(), 0), v.x.sum(axis=0), v.x.mean(axis=0)),
        *T.grad(
            T.sqr(ifelse(T.gt(v.x.sum(), 0), v.x.dot(v.w), v.x.dot(v.w * 2))).sum(), [v.w, v.x]
        ),
    ],
    "sums and loops that are chosen": lambda v: [
        ifelse(T.gt(v.b.sum(), k), normalized_steps(v)[2].sum(), T.sqr(v.x.mean()) / v.x.sum())
        for k in (-9, 9)
    ],
    "scans of several rows for each": lambda v: [
        theano.scan(
            lambda x, h: T.tanh(x + h).dot(v.u) / T.cast(x.shape[0], v.dtype),
            T.stack([merged(v), merged(v) * 2]),
            T.zeros((merged(v).shape[0], UNITS), v.dtype),
        )[0],
        in_two_levels(v),
        *T.grad(T.sqr(in_two_levels(v)).mean(), [v.w, v.u, v.x]),
    ],
    "tiled": lambda v: [
        T.switch(masks_as_wide(v, v.x[:, 0]), v.x[:, 0], 0),
        T.tile(v.x, (1, 1, 2)),
        T.tile(v.x[:, 0, :1], [1, 4]),
        T.repeat(v.x, 2, axis=2),
    ],
}


def assert_divided(inputs, outputs, values, tolerance=1e-9):
    """Compare what all ranks compute with serial Theano."""
    expected = theano.function(inputs, outputs, on_unused_input="ignore")(*values)
    with synk.parallel(check=False):
        f = theano.function(inputs, outputs, on_unused_input="ignore")
    assert type(f) is ParallelFunction
    for result, wanted in zip(f(*values), expected):
        assert (result.shape, result.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_allclose(result, wanted, rtol=tolerance, atol=tolerance)
    assert f._theano is None, "it was computed serially"


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_divided_scans_have_serial_values(ranks, name, dtype):
    with theano.change_flags(floatX=dtype):
        v = Variables(dtype)
        assert_divided(v.inputs, EXPRESSIONS[name](v), v.values, TOLERANCES[dtype])


def test_inputs_whose_first_axis_is_the_time_are_divided_along_the_second(ranks):
    v = Variables()
    steps, masks = T.dtensor3("steps"), T.dmatrix("masks")
    outputs = theano.clone(
        [gated(v)[0], pooled(v), *T.grad(pooled(v), v.weights)],
        {v.x: steps.dimshuffle(1, 0, 2), v.mask: masks.dimshuffle(1, 0)},
    )
    x, mask, y = v.values
    assert_divided([steps, masks, v.y], outputs, [x.transpose(1, 0, 2), mask.T, y])


@pytest.mark.layouts(Layout(3, master=1))
def test_means_that_are_states_are_rounded_as_serially(ranks):
    v = Variables()

    def step(x, mean):
        return x.mean(axis=0), T.neq(mean, 0)

    outputs = theano.scan(step, v.steps, [T.ones((FEATURES,)), None])[0]
    x = np.random.RandomState(0).randint(-9, 9, (10, TIME, FEATURES)).astype(float)
    x[-1] -= x.sum(axis=0)
    assert_divided([v.x], outputs, [x])


@pytest.mark.layouts(Layout(2))
def test_rows_of_scans_are_counted_without_their_steps(ranks):
    v = Variables()
    with compiling.in_python(), synk.parallel(check=False):
        f = theano.function(v.inputs, EXPRESSIONS["several states"](v))
    assert f._count is not None
    assert not [each for each in f._count.maker.fgraph.toposort() if isinstance(each.op, Scan)]


def test_training_through_a_scan_leaves_serial_values(ranks):
    expected, _ = trained()
    with synk.parallel():
        found, step = trained()
    assert type(step) is ParallelFunction
    for each, wanted in zip(found, expected):
        np.testing.assert_allclose(each, wanted, rtol=1e-9)


def trained():
    v = Variables()
    loss = pooled(v)
    updates = [(w, w - 0.5 * T.grad(loss, w)) for w in v.weights]
    step = theano.function(v.inputs, loss, updates=updates)
    losses = [step(*v.values) for _ in range(3)]
    return [*losses, *(w.get_value() for w in v.weights)], step


@pytest.mark.layouts(Layout(2), Layout(3, master=1))
@pytest.mark.parametrize("kind", [RandomStreams, MRG_RandomStreams])
def test_steps_draw_random_numbers_for_the_rows_of_each_rank(ranks, kind):
    v, streams = Variables(), kind(5)
    ones = T.ones((v.x.shape[0], 2))

    def step(h):
        return h * streams.binomial(n=1, p=0.5, size=h.shape, dtype="float64")

    states, updates = theano.scan(step, outputs_info=ones, n_steps=2)
    with synk.parallel():
        f = theano.function([v.x], states, updates=updates)
    assert type(f) is ParallelFunction
    first, last = f(np.ones((3000, 1, 1)))
    assert abs(first.mean() - 0.5) < 0.03 and abs(last.mean() - 0.25) < 0.03
    assert abs(np.mean(first[:1000] == first[-1000:]) - 0.5) < 0.05
    assert np.any(f(np.ones((3000, 1, 1)))[0] != first)


@pytest.mark.layouts(Layout(2), Layout(3, master=1))
def test_steps_draw_normal_numbers_for_the_rows_of_each_rank(ranks):
    v, streams = Variables(), MRG_RandomStreams(5)

    def step(h):
        return h + streams.normal(size=(h.shape[0], 2), std=3)

    states, updates = theano.scan(step, outputs_info=T.zeros((v.x.shape[0], 2)), n_steps=2)
    with synk.parallel():
        f = theano.function([v.x], states, updates=updates)
    assert type(f) is ParallelFunction
    first, last = f(np.ones((3000, 1, 1)))
    for each in (first / 3, (last - first) / 3):
        assert abs(each.mean()) < 0.05 and abs(each.std() - 1) < 0.05
        assert abs(np.corrcoef(each[:1000, 0], each[-1000:, 0])[0, 1]) < 0.15
    assert abs(np.corrcoef(first[:, 0], (last - first)[:, 0])[0, 1]) < 0.1
    assert np.any(f(np.ones((3000, 1, 1)))[0] != first)


@pytest.mark.layouts(Layout(2))
def test_loops_that_theano_rewrites_are_in_the_chain_of_what_ranks_reduce(ranks):
    v = Variables()
    states, _ = theano.scan(
        lambda x, h: T.tanh(normalized(x.dot(v.w) + h.dot(v.u))), v.steps, v.zeros
    )
    outputs = T.grad(T.sqr(states[-1]).sum() * T.sqr(v.x.mean()), [v.w, v.u])
    with compiling.in_python(), synk.parallel():
        f = theano.function([v.x], outputs)
    for found, wanted in zip(f(v.values[0]), f.serial(v.values[0])):
        np.testing.assert_allclose(found, wanted, rtol=1e-9)
    nodes = f._on_ranks.maker.fgraph.toposort()
    chain = [n for n in nodes if isinstance(n.op, AllReduce) or has_inside(n.op, AllReduce)]
    assert any("reduces_in_steps" not in n.op.info for n in chain if has_inside(n.op, AllReduce))
    assert len(chain) == 3
    for before, node in zip(chain, chain[1:]):
        assert {*before.outputs} & {*ancestors(node.inputs)}


@pytest.mark.layouts(Layout(2), Layout(3, master=1))
def test_a_rank_that_raises_in_a_step_ends_the_loops_of_all(ranks):
    v = Variables()
    kept = theano.shared(np.zeros(()), "kept")

    def step(x):
        found = v.w[v.y] + x.dot(v.w)
        return found - found.mean(axis=0)

    total = T.sqr(theano.scan(step, v.steps)[0]).sum() + kept
    with synk.parallel():
        f = theano.function([v.x, v.y], total, updates=[(kept, total)])
    x, _, y = v.values
    right = (y % FEATURES).astype("int32")
    wrong = np.append(right[:-1], np.int32(99))
    before = f(x, right)
    with pytest.raises(IndexError):
        f(x, wrong)
    assert kept.get_value() == before and f._theano is None
    np.testing.assert_allclose(f(x, right), 2 * before)


REFUSED = {
    "sums over all rows in each step, until a condition": lambda v: theano.scan(
        lambda x, h: (h + x, until(T.lt(h.sum(), 5))), v.steps, T.zeros_like(v.x[:, 0])
    )[0],
    "until the means of rows": lambda v: theano.scan(
        lambda x, k: (k + x.mean(), until(T.lt(k, 5))), v.steps, T.zeros((), v.dtype)
    )[0],
    "a fixed number of rows": lambda v: theano.scan(
        lambda x, h: h + x, v.steps, T.zeros((ROWS, FEATURES), v.dtype)
    )[0],
    "rows in different orders": lambda v: merged(v) * v.mask.flatten()[:, None],
    "rows that it would tear apart": lambda v: v.steps.reshape((v.x.shape[0], -1)),
}


@pytest.mark.layouts(Layout(2))
@pytest.mark.parametrize("reason", REFUSED)
def test_scans_that_cannot_be_divided_stay_theanos(ranks, caplog, reason):
    caplog.set_level(logging.INFO, "synkhronos")
    v = Variables()
    output = REFUSED[reason](v)
    expected = theano.function(v.inputs, output, on_unused_input="ignore")(*v.values)
    with synk.parallel():
        f = theano.function(v.inputs, output, on_unused_input="ignore")
    assert isinstance(f, Function) and type(f) is not ParallelFunction
    if reason != "until the means of rows":
        assert reason in caplog.text
    np.testing.assert_array_equal(f(*v.values), expected)


@pytest.mark.layouts(Layout(2))
def test_merged_rows_of_sequences_of_different_lengths_run_in_the_master(ranks):
    x, y = T.dmatrix("x"), T.dmatrix("y")
    with synk.parallel():
        f = theano.function([x, y], x.T.flatten()[:, None] + y.T.reshape((-1, 1)))
    one, other = np.arange(12.0).reshape(4, 3), np.arange(4.0, 16).reshape(4, 3)
    np.testing.assert_array_equal(f(one, other), (one.T.ravel() + other.T.ravel())[:, None])
    assert f._theano is None
    with pytest.raises(ValueError):
        f(one, np.ones((4, 2)))


@pytest.mark.layouts(Layout(2))
def test_merged_rows_that_reshaping_would_tear_apart_run_in_the_master(ranks):
    x = T.dmatrix("x")
    steps = x.reshape((-1, 2, 2)).dimshuffle(1, 0, 2)
    with synk.parallel():
        f = theano.function([x], steps.reshape((steps.shape[1], -1)))
        g = theano.function([x], x.reshape((x.size // 3, -1)))
    value = np.arange(24.0).reshape(6, 4)
    expected = value.reshape(6, 2, 2).transpose(1, 0, 2).reshape(6, -1)
    np.testing.assert_array_equal(f(value), expected)
    np.testing.assert_array_equal(g(value), value.reshape(8, 3))


@pytest.mark.layouts(Layout(2), Layout(3, master=1))
def test_shapes_that_readers_found_to_be_divided_wrongly(ranks):
    """Merged axes inside of steps, and factors that are no whole numbers."""
    x = T.dmatrix("x")
    steps, _ = theano.scan(lambda t, x: x.T.flatten() * t, T.arange(1.0, 3.0), non_sequences=x)
    y = T.dtensor3("y")
    turned = y.dimshuffle(1, 0, 2)
    torn = turned.reshape((T.cast(y.shape[1] * 1.5, "int64"), y.shape[0], -1))
    half = T.zeros((turned.reshape((-1, 1)).shape[0] // 2,)) + y.sum()
    rows, stack = np.arange(20.0).reshape(5, 4), np.arange(30.0).reshape(5, 2, 3)
    for inputs, outputs, value in (
        ([x], [steps, steps.mean(), steps.shape], rows),
        ([y], [torn, torn.sum(axis=0)], stack),
        ([y], [half], stack),
    ):
        expected = theano.function(inputs, outputs)(value)
        with synk.parallel():
            found = theano.function(inputs, outputs)(value)
        for one, other in zip(found, expected):
            np.testing.assert_allclose(one, other)


@pytest.mark.layouts(Layout(2))
def test_lists_are_taken_where_the_rows_lie_along_axis_1(ranks):
    tokens, labels, table = T.imatrix("tokens"), T.ivector("labels"), theano.shared(np.eye(4))
    states, _ = theano.scan(lambda t, h: h + t, table[tokens], T.zeros((tokens.shape[1], 4)))
    score = states[-1][T.arange(labels.shape[0]), labels].sum()
    given = [[0, 1, 2], [1, 1, 3], [2, 0, 3]], [1, 1, 3]
    expected = theano.function([tokens, labels], score)(*given)
    with synk.parallel():
        f = theano.function([tokens, labels], score)
    assert type(f) is ParallelFunction
    assert f(*given) == expected
