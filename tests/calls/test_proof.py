"""What the graph of a function tells when it is made: modes and reductions, before any call."""

import functools

import numpy as np
import pytest
import theano
import theano.tensor as T
from support import host_library
from support.helpers import MODE
from support.layouts import Layout
from support.told import told, told_in
from theano.tensor.shared_randomstreams import RandomStreams

import synkhronos as synk
from synkhronos._calls import check as check_module

LAYOUTS = [Layout(2), Layout(3, master=1)]
pytestmark = [pytest.mark.usefixtures("ranks"), pytest.mark.one_machine]
X = np.random.RandomState(0).randn(12, 2)
SILENT = [[], [], []]


def made(inputs, outputs=None, **kwargs):
    return synk.function(inputs, outputs, **{"check": "first", "name": "f", "mode": MODE, **kwargs})


def assert_silent(make, *args):
    f, making, calls = told(make, *args)
    assert making == [] and calls == SILENT
    assert "_run" not in vars(f)  # there is a rule for everything: nothing is compared


OUTPUTS = {
    "mean": (lambda x: (x.mean(), "sum"), "it is a mean over the rows. Write (output, 'avg')"),
    "min": (lambda x: (x.min(), "max"), "Write (output, 'min')"),
    "product": (lambda x: (1 + x).prod(), "Write (output, 'prod')"),
    "any": (lambda x: T.any(x > 2), "Write (output, 'max')"),
    "count": (lambda x: T.eq(T.argmax(x, axis=1), 7).sum(), "Write (output, 'sum')"),
    "length": (
        lambda x: x.shape[0],
        "proportional to the number of the rows. Write (output, 'sum')",
    ),
    "noise": (
        lambda x: RandomStreams(1).uniform(x.shape).std(),
        "function with bcast_inputs=[x]",
    ),
    "norm": (
        lambda x: (T.sqrt(T.sqr(x).sum()), "sum"),
        "each rank computes sqrt of what it has of its own rows (test_proof.py:",
    ),
    "centred": (lambda x: (x - x.mean(axis=0), "gather"), "each rank computes sub of what"),
}


@pytest.mark.parametrize("what", OUTPUTS)
def test_outputs(what):
    make, advice = OUTPUTS[what]
    x = T.dmatrix("x")
    output = make(x)
    mode = output[1] if isinstance(output, tuple) else "avg"
    f, [message], calls = told(lambda: made([x], output), X)
    assert f"Output 0 of Function 'f', mode '{mode}', is not what serial" in message
    assert advice in message
    assert calls == SILENT and "_run" not in vars(f)


def test_each_output_is_told_by_itself():
    x = T.dmatrix("x")
    outputs = [x.sum(), (x.sum(), "sum"), x.mean(), (x.max(), "min"), (x.std(), None)]
    _, messages, calls = told(lambda: made([x], outputs), X)
    assert [each.split(" of ")[0] for each in messages] == ["Output 0", "Output 3"]
    assert calls == SILENT


def test_what_is_right_is_not_told():
    x, i, whole = T.dmatrix("x"), T.lvector("i"), T.dvector("whole")
    w = theano.shared(np.ones(2), "w")
    largest = T.argmax(x, axis=1)
    for outputs in (
        [x.mean(), (x.sum(0), "sum"), (x, "gather"), (x.max(), "max"), (x.std(), None)],
        [(x.std(), "gather"), (T.stack([x.shape[0]]), "gather"), (x + w, "gather")],
        [(x - x.mean(1, keepdims=True)).mean(), RandomStreams(1).uniform(x.shape, ndim=2).mean()],
        [T.log(abs(x)).mean(), T.sqrt(synk.ops.all_reduce(T.sqr(x).mean()))],
        [(largest, "gather"), T.eq(largest, 1).mean(), (T.neq(largest, 1).sum(), "sum")],
    ):
        assert_silent(lambda each=outputs: made([x], each), X)
    labels = [(i.max(), "max"), (T.eq(i, 9).sum(), "sum"), i.mean(), (i, "gather"), (i.min(), None)]
    assert_silent(lambda: made([i], labels), [3, 0, 1, 3, 0, 3])
    assert_silent(lambda: made([], x.std(), bcast_inputs=[x]), X)
    assert_silent(
        lambda: made([whole], x.std(), bcast_inputs=[x], on_unused_input="ignore"), X[:, 0], X
    )


def test_reductions_of_one_function_are_told_together():
    x, pair = T.dmatrix("x"), [theano.shared(np.ones(2), name) for name in "vw"]
    loss = T.sqr(T.dot(x, pair[0]) * T.dot(x, pair[1])).sum()
    grads = [synk.ops.all_reduce(each) for each in T.grad(loss, pair)]
    steps = [(each, each - 0.001 * grad) for each, grad in zip(pair, grads)]
    _, [message], calls = told(lambda: made([x], (loss, "sum"), updates=steps), X)
    assert "takes synk.ops.all_reduce(g, 'sum'). The same is true of 1 other reduction" in message
    assert calls == SILENT


def test_clipping_before_the_reduction():
    x, w = T.dmatrix("x"), theano.shared(np.ones(2), "w")
    clipped = T.clip(T.grad(T.sqr(T.dot(x, w)).mean(), w), -0.1, 0.1)
    steps = [(w, w - 0.1 * synk.ops.all_reduce(clipped))]
    _, [message], calls = told(lambda: made([x], updates=steps), X)
    assert "Each rank clips its own gradients (test_proof.py:" in message
    assert "Clip them after the reduction" in message
    assert calls == SILENT


def normalized(x, gamma, reduce=lambda mean: mean):
    mean = reduce(x.mean(axis=(0, 2, 3), keepdims=True))
    variance = reduce(T.sqr(x - mean).mean(axis=(0, 2, 3), keepdims=True))
    return T.exp((x - mean) / T.sqrt(variance + 1e-5) * gamma.dimshuffle("x", 0, "x", "x"))


def test_batch_normalization_over_all_ranks():
    x, gamma = T.dtensor4("x"), theano.shared(np.ones(3), "gamma")
    loss = normalized(x, gamma, synk.ops.all_reduce).mean()
    steps = [(gamma, gamma - 0.1 * synk.ops.all_reduce(T.grad(loss, gamma)))]
    assert_silent(lambda: made([x], loss, updates=steps), np.random.randn(12, 3, 2, 2))


def test_losses_of_training_functions_are_right_or_asked_for(extensions):
    x, m, w = T.dmatrix("x"), T.dvector("m"), theano.shared(np.full(2, 0.5), "w")
    errors = T.sqr(T.dot(x, w) - 1)
    options = {"check": "first", "mode": MODE}
    for loss in ((errors * m).sum() / m.sum(), errors.var() + 0 * m.mean()):
        for per_rank in (None, "loss"):
            make = functools.partial(
                extensions.train.make_train_step, [x, m], loss, [w], extensions.update_rules.sgd,
                0.05, options=options, per_rank=per_rank,
            )  # fmt: skip
            assert_silent(make, X, np.ones(12))


COLLECTED = {
    "mean by counts": lambda x, old: old + (x.mean(0) - old) * x.shape[0] / 100.0,
    "moving average": lambda x, old: 0.9 * old + (1 - 0.9) * x.std(0),
    "largest": lambda x, old: T.maximum(old, x.max(axis=0)),
    "items": lambda x, old: T.inc_subtensor(old[T.argmax(x, axis=1)], 1.0),
    "product": lambda x, old: old * x.mean(0),
    "step": lambda x, old: old - T.grad(T.sqr(x + old).mean(), old),
}


@pytest.mark.parametrize("name", COLLECTED)
def test_totals_of_each_rank_are_for_the_script_to_collect(name):
    x, kept = T.dmatrix("x"), theano.shared(np.zeros(2), "kept")
    steps = [(kept, COLLECTED[name](x, kept))]
    _, making, (first, second, third) = told(lambda: made([x], updates=steps), X)
    assert (making, first, third) == ([], [], [])
    assert len(second) == (name in ("product", "step"))


@pytest.mark.skipif(host_library.ON_PYTENSOR, reason="linkers of Theano")
def test_a_linker_of_the_script():
    linker = theano.gof.WrapLinkerMany([theano.gof.PerformLinker()], [lambda _, __, thunk: thunk()])
    x, mode = T.dmatrix("x"), theano.Mode(linker)
    _, [message], calls = told(lambda: made([x], x.sum(), mode=mode), X)
    assert "Write (output, 'sum')" in message and calls == SILENT
    assert_silent(lambda: made([x], x.mean(), mode=mode), X)
    _, [message], calls = told(lambda: made([x], T.sort(x, axis=0)[0].max(), mode=mode), X)
    assert "Function 'f' may compute something else than serial" in message
    assert "computes SortOp of rows" in message and "Run it once in the default mode" in message
    assert calls == SILENT


def test_nothing_is_told_where_it_is_turned_off():
    x, w = T.dmatrix("x"), theano.shared(np.ones(2), "w")
    loss = T.sqr(T.dot(x, w)).sum()
    steps = [(w, w - 0.001 * synk.ops.all_reduce(T.grad(loss, w)))]
    for check in (0, False):
        assert_silent(lambda check=check: made([x], loss, updates=steps, check=check), X)


@pytest.mark.parametrize("is_averaged", [True, False])
def test_default_updates_are_told_by_the_function_that_uses_them(extensions, is_averaged):
    """As of the running means of Lasagne's batch normalization."""
    x, mean = T.dmatrix("x"), theano.shared(np.zeros(2), "mean")
    running = theano.clone(mean, share_inputs=False)
    running.default_update = 0.9 * running + 0.1 * x.mean(axis=0)
    rows, updates = x + 0 * running, []
    if is_averaged:
        updates = extensions.train.average_updates([(running, running.default_update)])
    step = made([x], rows.mean(), updates=updates)
    validate = made([x], T.sqr(x - mean).mean())
    assert told_in(lambda: (step(X), step(X), synk.all_reduce(mean), validate(X)))[1] == []
    assert told_in(lambda: step(X))[1] == []
    messages = told_in(lambda: validate(X))[1]
    assert len(messages) == (not is_averaged)
    assert is_averaged or "The update of mean in Function 'f'" in messages[0]
    assert told_in(lambda: validate(X))[1] == []


AGAIN = {
    "rows": (lambda i: T.sort(i)[0].mean(), [2] * 6, [1, 2, 2, 2, 2, 2, 2]),
    "labels": (lambda i: T.extra_ops.bincount(i)[i[0]].sum(), [2] * 6, [2, 1, 1, 0, 0, 0]),
}


@pytest.mark.parametrize("name", AGAIN)
def test_what_has_no_rule_is_compared_again_where_calls_are_others(name, monkeypatch):
    monkeypatch.setattr(check_module, "SECONDS", np.inf)
    make, usual, other = AGAIN[name]
    i = T.lvector("i")
    f = made([i], (make(i), "max" if name == "rows" else "sum"))
    for _ in range(5):
        assert told_in(lambda: f(usual))[1] == []
    [message] = told_in(lambda: f(other))[1]
    assert "Output 0 of Function 'f'" in message and "_run" not in vars(f)
