"""check="first", the default: what the division changes is told once, and nothing else is.

The graph is examined when a function is made; what has no rule is compared in calls.
"""

import functools
import sys
import tracemalloc

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.helpers import MODE
from support.layouts import Layout
from support.told import told, told_in
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.shared_randomstreams import RandomStreams

import synkhronos as synk
from synkhronos import PortingWarning, _systems
from synkhronos._calls import check as module

LAYOUTS = [Layout(2), Layout(3, master=1)]
pytestmark = [pytest.mark.usefixtures("any_time", "ranks"), pytest.mark.one_machine]
X = np.random.RandomState(0).randn(12, 2)


@pytest.fixture
def any_time(monkeypatch, caplog):
    """Compare calls however long they take: this machine may be slow. No comparison may fail."""
    monkeypatch.setattr(module, "SECONDS", np.inf)
    with caplog.at_level("DEBUG", "synkhronos"):
        yield
    assert "was not compared" not in caplog.text


def made(inputs, outputs=None, **kwargs):
    return synk.function(inputs, outputs, **{"check": "first", "name": "f", "mode": MODE, **kwargs})


def told_once(make, *args):
    """Return the one message that comes when a function is made, or in its first call."""
    f, making, (first, *others) = told(make, *args)
    assert others == [[], []] and len([*making, *first]) == 1
    assert making or f._proof.open
    return (*making, *first)[0]


def told_nothing(make, *args):
    _, making, calls = told(make, *args)
    assert (making, calls) == ([], [[], [], []])


OUTPUTS = {
    "sum": (lambda x: x.sum(), "Write (output, 'sum')"),
    "max": (lambda x: x.max(axis=0), "Write (output, 'max')"),
    "min": (lambda x: x.min(axis=0), "Write (output, 'min')"),
    "std": (lambda x: x.std(), "(output, None) in a function with bcast_inputs=[x] in"),
    "median": (lambda x: T.sort(x[:, 0])[x.shape[0] // 2], "in any mode. Write (output, None)"),
    "scan": (lambda x: scanned(x.sum(axis=1)), "depends on the order of the rows"),
}


def scanned(x):
    states, _ = theano.scan(
        lambda row, h: T.tanh(0.5 * h + row), sequences=x, outputs_info=T.zeros_like(x[0])
    )
    return states[-1]


@pytest.mark.parametrize("what", OUTPUTS)
def test_outputs(what, monkeypatch):
    monkeypatch.setitem(sys.modules, "theano.scan_module.scan_perform_ext", None)
    make, advice = OUTPUTS[what]
    x = T.dmatrix("x")
    message = told_once(lambda: made([x], make(x)), X)
    assert "Output 0 of Function 'f', mode 'avg', is not what serial" in message
    assert advice in message


def test_rows_are_told_by_the_first_call():
    x = T.dmatrix("x")
    _, making, (first, *others) = told(lambda: made([x], T.sqr(x).sum(axis=1)), X)
    assert making == [] and others == [[], []]
    assert len(first) == 1 and "has an item for each row" in first[0]


def test_a_part_of_the_rows_of_each_rank_is_told():
    x = T.dvector("x")
    outputs = [(x[1:] - x[:-1], "gather"), (x[:2], "gather")]  # the second is of each rank
    message = told_once(lambda: made([x], outputs), X[:, 0])
    assert "Output 0" in message and "depends on the order of the rows" in message


def test_the_comparison_takes_as_much_memory_as_the_inputs():
    x, rows = T.dmatrix("x"), np.random.RandomState(0).randn(1 << 18, 4)
    f = made([x], x[::2].sum())
    tracemalloc.start()
    try:
        with pytest.warns(PortingWarning, match="is not what serial"):
            f(rows)
        # PyTensor's sum takes as much by itself.
        assert tracemalloc.get_traced_memory()[1] < 3.5 * rows.nbytes
    finally:
        tracemalloc.stop()


def test_what_is_right_is_not_told():
    """See test_proof.py for more."""
    x, small = T.dmatrix("x"), T.fmatrix("small")
    rows = np.random.RandomState(1).randn(3000, 2).astype("float32")
    rounded = [x.mean(), (x - x.mean(1, keepdims=True)).sum(axis=1).mean()]  # some 1e-17
    random = RandomStreams(1).uniform(x.shape, ndim=2)
    counted = (T.neq(T.isnan(x).sum(), 0), "max")
    functions = [
        (made([x], [T.log(x).mean(), (T.log(x), "gather")]), np.abs(X) - 1e-3),
        (made([x], rounded), X - X.mean(axis=0)),
        (made([x], [random.mean(), counted, x.mean() + 0 * x.sum()]), X),
        (made([x], [(x.min(), "min"), (-x.max(axis=0), "min"), (T.exp(x.max()), "max")]), X),
        (made([small], [small.mean(), (T.exp(small).sum(), "sum")]), rows),
    ]
    for f, *values in functions:
        with np.errstate(all="ignore"):
            for _ in range(3):
                f(*values)
        assert "_run" not in vars(f)


def local(w, reduce=lambda g: g):
    """Return a loss, and the updates of w with the gradient of each rank's rows, or another."""
    x = T.dmatrix("x")
    loss = T.sqr(T.dot(x, w) - 1).mean()
    return x, loss, [(w, w - 0.1 * reduce(T.grad(loss, w)))]


@pytest.mark.parametrize("outputs", [True, False])
@pytest.mark.parametrize("rate", [0.1, 0.0])
def test_local_gradients_are_told_by_the_next_call(outputs, rate):
    w, v, other, *unnamed = (
        theano.shared(np.ones(2), name) for name in ("w", "v", "u", None, None)
    )
    step = theano.shared(rate, "rate")  # as in a warm-up, it may be 0 at first
    x, loss, _ = local(w)
    steps = [(w, w - step * T.grad(loss, w))]
    for each in (*unnamed, v, other):
        steps.append((each, each - step * T.grad(T.sqr(T.dot(x, each) - 1).mean(), each)))
    f, making, calls = told(lambda: made([x], loss if outputs else None, updates=steps), X)
    assert (making, calls[0], calls[2]) == ([], [], []) and len(calls[1]) == 1
    message = calls[1][0]
    assert "The update of w in Function 'f' is not what serial" in message
    assert "synk.ops.all_reduce(g)" in message and "call synk.all_reduce(w) after" in message
    assert message.endswith("2 other variables.") and "u" in message.rpartition("true of")[2]
    assert "_run" not in vars(f)


@pytest.mark.parametrize("streams", [RandomStreams, MRG_RandomStreams])
def test_local_gradients_with_dropout_are_told(streams):
    x, w = T.dmatrix("x"), theano.shared(np.ones(2), "w")
    rows = x * streams(3).binomial(x.shape, p=0.5, dtype="float64")
    loss = T.sqr(T.dot(rows, w) - 1).mean()
    steps = [(w, w - 0.1 * T.grad(loss, w))]
    _, making, calls = told(lambda: made([x], loss, updates=steps), X)
    assert making == [] and [len(each) for each in calls] == [0, 1, 0]
    reduced = [(w, w - 0.1 * synk.ops.all_reduce(T.grad(loss, w)))]
    told_nothing(lambda: made([x], loss, updates=reduced), X)


def test_running_statistics_are_told_by_the_function_that_uses_them(extensions):
    x, mean = T.dmatrix("x"), theano.shared(np.zeros(2), "mean")
    step = made([x], x.mean(), updates=[(mean, 0.9 * mean + 0.1 * x.mean(axis=0))])
    validate = made([x], T.sqr(x - mean).mean())
    assert told_in(lambda: (step(X), step(X), synk.all_reduce(mean)))[1] == []
    assert told_in(lambda: validate(X))[1] == []
    step(X)
    [message] = told_in(lambda: validate(X))[1]
    assert "The update of mean" in message and "train.average_updates" in message
    other = theano.shared(np.zeros(2), "other")
    averaged = extensions.train.average_updates([(other, 0.9 * other + 0.1 * x.mean(axis=0))])
    step, validate = made([x], updates=averaged), made([x], T.sqr(x - other).mean())
    assert told_in(lambda: (step(X), validate(X)))[1] == []


def test_a_gradient_that_is_not_reduced_beside_others_is_told():
    v, w = theano.shared(np.ones(2), "v"), theano.shared(np.ones(2), "w")
    x, loss, steps = local(w, synk.ops.all_reduce)
    steps = [*steps, (v, v - T.grad(T.exp(T.dot(x, v)).mean(), v))]
    _, making, calls = told(lambda: made([x], loss, updates=steps), X)
    assert making == [] and [len(each) for each in calls] == [0, 1, 0]
    assert "The update of v" in calls[1][0]


@pytest.mark.parametrize("op, cost, advice", [("avg", "sum", "(g, 'sum')"), ("sum", "mean", "(g)")])
def test_gradients_that_are_reduced_in_the_wrong_way_are_told(extensions, op, cost, advice):
    x, w = T.dmatrix("x"), theano.shared(np.ones(2), "w")
    loss = getattr(T.sqr(T.dot(x, w) - 1), cost)()
    grad = synk.ops.all_reduce(T.grad(loss, w), op)
    outputs = (loss, "sum" if cost == "sum" else "avg")
    steps = extensions.update_rules.adam([grad], [w])
    message = told_once(lambda: made([x], outputs, updates=steps), X)
    assert f"takes synk.ops.all_reduce{advice}." in message and "test_first_call.py:" in message


@pytest.mark.parametrize("reduces_all", [True, False])
def test_a_penalty_that_is_summed_over_the_ranks_is_told(reduces_all):
    x, w = T.dmatrix("x"), theano.shared(np.ones(2), "w")
    loss, penalty = T.sqr(T.dot(x, w) - 1).sum(), 3 * T.sqr(w).sum()
    if reduces_all:
        grad = synk.ops.all_reduce(T.grad(loss + penalty, w), "sum")
        outputs = [(loss + penalty, "sum")]
    else:
        grad = synk.ops.all_reduce(T.grad(loss, w), "sum") + T.grad(penalty, w)
        outputs = [(loss, "sum"), (penalty, None)]
    _, making, calls = told(lambda: made([x], outputs, updates=[(w, w - 0.001 * grad)]), X[:11])
    assert len(making) == 2 * reduces_all and calls == [[], [], []]
    if reduces_all:
        assert "all_reduce(T.grad(loss, w), 'sum') + T.grad(penalty, w)" in making[0]
        assert "make it an output of its own, of mode None" in making[1]


def correlation(a, b):
    a, b = a - a.mean(), b - b.mean()
    return (a * b).mean() / T.sqrt(T.sqr(a).mean() * T.sqr(b).mean())


LOSSES = {
    "masked mean": (lambda e, m, w: (e * m).sum() / m.sum(), True),
    "root of a mean": (lambda e, m, w: T.sqrt(e.mean()), True),
    "correlation": (lambda e, m, w: correlation(e, m), True),
    "mean": (lambda e, m, w: e.mean() + T.sqr(w).sum(), False),
    "weights over all ranks": (
        lambda e, m, w: (e * m).mean() / synk.ops.all_reduce(m.mean()),
        False,
    ),
    "root over all ranks": (lambda e, m, w: T.sqrt(synk.ops.all_reduce(e.mean())), False),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_are_no_means_are_told_also_if_the_first_mask_is_full(name):
    x, m, w = T.dmatrix("x"), T.dvector("m"), theano.shared(np.full(2, 0.5), "w")
    make, is_told = LOSSES[name]
    loss = make(T.sqr(T.dot(x, w) - 1) + 0 * m, m, w)
    grad = synk.ops.all_reduce(T.grad(loss, w))
    _, making, calls = told(
        lambda: made([x, m], loss, updates=[(w, w - 0.05 * grad)]), X, np.linspace(1, 1.1, 12)
    )
    assert len(making) == is_told and calls == [[], [], []]
    if is_told:
        assert _systems.advice("any loss") in making[0] and "output 0" in making[0]


def over_all(x, gamma):
    mean = x.mean(axis=(0, 2, 3), keepdims=True)
    normal = (x - mean) / T.sqrt(T.sqr(x - mean).mean(axis=(0, 2, 3), keepdims=True) + 1e-5)
    return T.exp(normal * gamma.dimshuffle("x", 0, "x", "x"))


NORMALIZED = {
    "pictures": over_all,
    "Theano's own": lambda x, gamma: T.exp(
        T.nnet.bn.batch_normalization_train(x, gamma, gamma, "spatial")[0]
    ),
    "columns": lambda x, gamma: T.exp(
        gamma * (x.mean(axis=(2, 3)) - x.mean(axis=(0, 2, 3))) / x.std(axis=(0, 2, 3))
    ),
}


@pytest.mark.parametrize("name", NORMALIZED)
def test_batch_normalization_with_each_ranks_statistics_is_told(name):
    x, gamma = T.dtensor4("x"), theano.shared(np.ones(3), "gamma")
    loss = NORMALIZED[name](x, gamma).mean()
    steps = [(gamma, gamma - 0.1 * synk.ops.all_reduce(T.grad(loss, gamma)))]
    rows = np.random.RandomState(2).randn(12, 3, 2, 2)
    told_once(lambda: made([x], loss, updates=steps), rows)


@pytest.mark.parametrize("reduce", [lambda e: T.sqr(e.mean(axis=0)).sum(), lambda e: e.var()])
def test_means_of_columns_are_no_batch_normalization(reduce):
    x, w = T.dmatrix("x"), theano.shared(np.ones(2), "w")
    loss = reduce(x * w)
    steps = [(w, w - 0.1 * synk.ops.all_reduce(T.grad(loss, w)))]
    told_once(lambda: made([x], loss, updates=steps), X)


def test_functions_that_only_count_calls_are_none_of_training():
    x, n = T.dmatrix("x"), theano.shared(0, "n")
    message = told_once(lambda: made([x], x.std(), updates=[(n, n + 1)]), X)
    assert "(output, None)" in message


CHANCES = {
    "largest": (lambda i: i.max(), "(output, 'max')"),
    "any": (lambda i: T.any(i > 2), "(output, 'max')"),
    "rare": (lambda i: T.eq(i, 9).sum(), "(output, 'sum')"),
}


@pytest.mark.parametrize("name", CHANCES)
def test_what_agrees_by_chance_is_told(name):
    i = T.lvector("i")
    make, advice = CHANCES[name]
    assert advice in told_once(lambda: made([i], make(i)), [3, 0, 1, 3, 0, 3])


class Counter:
    """Calls of a function, and the numbers of those that told something."""

    def __init__(self, f):
        self.f, self.told = f, []

    def __call__(self, *args):
        self.told.append(len(told_in(lambda: self.f(*args))[1]))


def test_what_has_no_rule_is_looked_at_again():
    x, m = T.dvector("x"), T.dvector("m")
    call = Counter(made([x, m], x[m.nonzero()].mean()))
    rows = np.repeat([1.0, 2.0, 3.0], 4)
    for _ in range(6):  # ranks have equally many each
        call(np.tile([1.0, 2.0], 6), np.tile([1.0, 1.0], 6))
    assert call.told == [0] * 6
    call(rows, np.array([1.0] * 5 + [0.0] * 6 + [1.0]))
    assert call.told[-1] == 1 and "_run" not in vars(call.f)


def test_steps_that_change_nothing_say_nothing():
    x, w, rate = T.dmatrix("x"), theano.shared(np.ones(2), "w"), theano.shared(0.0, "rate")
    loss = T.sqr(T.dot(x[::2], w)).mean()
    steps = [(w, w - rate * synk.ops.all_reduce(T.grad(loss, w)))]
    call = Counter(made([x], (loss, None), updates=steps))
    rows = X[:11]
    for _ in range(5):
        call(rows)
    assert call.told == [0] * 5
    synk.broadcast(rate, 0.1)
    call(rows)
    assert call.told[-1] == 1


@pytest.mark.parametrize("mode", ["NanGuardMode", "MonitorMode"])
def test_modes_that_watch(mode):
    if mode == "NanGuardMode":
        from theano.compile.nanguardmode import NanGuardMode

        watching = NanGuardMode(nan_is_error=True, inf_is_error=True, big_is_error=False)
    else:
        watching = theano.compile.MonitorMode(pre_func=lambda *_: None)
    x = T.dmatrix("x")
    _, making = told_in(lambda: made([x], x.sum(), mode=watching))
    assert len(making) == 1 and "Write (output, 'sum')" in making[0]
    _, making = told_in(lambda: made([x], x[::2].mean(), mode=watching))
    assert len(making) == 1 and "Run it once in the default mode" in making[0]
    assert told_in(lambda: made([x], x.mean(), mode=watching))[1] == []


def test_calls_with_slices_are_compared():
    x, n = T.dmatrix("x"), theano.shared(0, "n")
    wrong = [
        (lambda: made([x], [(x, "gather"), x.max()]), "Write (output, 'max')"),
        (lambda: made([x], x[::2].sum(), updates=[(n, n + 1, "max")]), "is not what serial"),
    ]
    w = theano.shared(np.ones(2), "w")
    right = [
        made([x], [x.mean(), (x.sum(), "sum"), (x, "gather"), (x.std(), None)]),
        made([x], (T.dot(x, w) - synk.ops.all_reduce(T.dot(x, w).mean())).mean()),
    ]
    for make, advice in wrong:
        f, making = told_in(make)
        call = functools.partial(f, X, num_slices=2)
        [message] = [*making, *told_in(call)[1]]
        assert advice in message
        assert told_in(call)[1] == []
    for f in right:
        for _ in range(3):
            f(X, num_slices=2)


def test_the_check_of_a_call_with_slices_computes_some_rows_at_a_time(monkeypatch):
    seen, x, run = [], T.dmatrix("x"), module.Serial._run

    def watching(self, arrays, values=()):
        seen.append(len(arrays[0]))
        return run(self, arrays, values)

    monkeypatch.setattr(module.Serial, "_run", watching)
    with pytest.warns(PortingWarning, match="is not what serial"):
        made([x], x[::2].sum())(np.ones((1000, 2)), num_slices=10)
    assert seen and max(seen) <= 100


def test_ranks_that_fall_behind_are_told_once(ranks):
    x, w, n = T.dmatrix("x"), theano.shared(np.ones(2), "w"), theano.shared(0, "n")
    total, data = theano.shared(0.0, "total"), theano.shared(X, "data")
    f = made([x], x.mean(), updates=[(n, n + 1), (total, total + x.sum())])
    f(X)
    with pytest.warns(PortingWarning) as told:
        f(X[:1])
    [message] = [str(each.message) for each in told]
    assert "n of Function 'f' differs between the ranks" in message
    assert f"has 1 row for {ranks.n} ranks. Give it at least" in message
    f(X[:1])
    index = T.lscalar("index")
    for right, value in [
        (made([x], updates=[(total, total + x.sum()), (w, x.sum(axis=0))]), X[:1]),
        (made([x], updates=[(n, n + 1), (total, synk.ops.all_reduce(x.mean()))]), X[:1]),
        (made([x], x.mean()), X[:1]),
        (made([index], updates=[(w, x[0])], givens={x: data[synk.rows(index, 1)]}), 3),
        (made([x], x.mean(), updates=[(n, n + 1)], check=False), X[:1]),
    ]:
        right(value)


def test_a_state_that_is_carried_over_rows_is_told_in_training(monkeypatch):
    monkeypatch.setitem(sys.modules, "theano.scan_module.scan_perform_ext", None)
    x, w = T.dmatrix("x"), theano.shared(np.ones(2), "w")
    loss = T.sqr(scanned(T.dot(x, w)) - 1)
    steps = [(w, w - 0.1 * synk.ops.all_reduce(T.grad(loss, w)))]
    assert "depends on the order" in told_once(lambda: made([x], loss, updates=steps), X)


def test_updates_that_scripts_put_right_are_not_told(extensions):
    for way in ("in the graph", "after each call", "two steps"):
        w = theano.shared(np.ones(2), "w")
        x, loss, steps = local(w)
        if way == "in the graph":
            grad = synk.ops.all_reduce(T.grad(loss, w))
            f = made([x], loss, updates=extensions.update_rules.adam([grad], [w]))
        elif way == "after each call":
            f = made([x], loss, updates=steps)
        else:
            steps, second, grads = extensions.updates.adam(loss, [w])
            f, step = made([x], loss, updates=steps), made([], updates=second)
        for _ in range(3):
            f(X)
            if way == "after each call":
                synk.all_reduce(w)
            elif way == "two steps":
                synk.all_reduce(grads)
                step()
        assert "_run" not in vars(f)


def test_values_that_ranks_collect_are_not_told():
    x, rows = T.dmatrix("x"), theano.shared(np.zeros((0, 2)), "rows")
    total, largest = theano.shared(0.0, "total"), theano.shared(-np.inf, "largest")
    n, mean = theano.shared(0, "n"), theano.shared(0.0, "mean")
    collect = [
        (rows, x),
        (total, total + x.sum()),
        (n, n + x.shape[0]),
        (mean, 0.9 * mean + 0.1 * x.std()),
        (largest, T.maximum(largest, x.max())),
    ]
    f = made([x], updates=collect)
    for _ in range(3):
        f(X)
    assert synk.gather(total).sum() == pytest.approx(3 * X.sum())


def test_results_and_variables_are_as_without_it():
    values = []
    for check in (0, "first"):
        w, calls = theano.shared(np.ones(2), "w"), theano.shared(0, "calls")
        x, loss, steps = local(w, synk.ops.all_reduce)
        f = synk.function(
            [x],
            [loss, (x + w, "gather")],
            updates=[*steps, (calls, calls + 1)],
            check=check,
            mode=MODE,
        )
        results = [f(X) for _ in range(3)]
        values.append((results, synk.gather(w), synk.gather(calls)))
    np.testing.assert_equal(values[0], values[1])


class Counted(theano.Op):
    """An operation of a script, which might have effects."""

    __props__ = ()

    def make_node(self, x):
        return theano.Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs):
        outputs[0][0] = inputs[0].copy()


def test_functions_that_are_not_compared(monkeypatch):
    x, s = T.dmatrix("x"), theano.shared(np.ones((2, 2)), "s")
    some = x[::2]
    for f, *values in [
        (made([x], theano.printing.Print("seen")(some).sum()), X),
        (made([x], Counted()(x).sum()), X),
        (made([x], (RandomStreams(1).uniform(x.shape, ndim=2) + x)[::2].sum()), X),
        (made([theano.In(x, value=X, update=2 * x)], some.sum()),),
        (made([], s[::2].sum(), sliceable_shareds=[s]),),
        (made([x], some.sum(), profile=theano.compile.ProfileStats(atexit_print=False)), X),
    ]:
        f(*values)
        assert "_run" not in vars(f)
    synk.broadcast(s, np.ones((2, 2)))
    f = made([x], (some.sum() + s.sum()))
    f(X[:1])  # fewer rows than ranks
    monkeypatch.setattr(module, "SECONDS", 0)  # too long
    f(X)
    f(X)
    f(X)
    assert "_run" not in vars(f)


def test_a_failure_of_the_check_is_none_of_the_call(monkeypatch, caplog):
    x = T.dmatrix("x")
    for method in ("nbytes", "whole", "is_of_division"):
        with monkeypatch.context() as patch:
            patch.setattr(module.Serial, method, lambda *_, **__: 1 / 0)
            assert float(made([x], x[::2].sum())(np.ones((6, 2)))) > 0
        assert "was not compared" in caplog.text
        caplog.clear()
    with monkeypatch.context() as patch:
        patch.setattr(module._host, "examine", lambda *_, **__: 1 / 0)
        f = made([x], x.sum())  # its numbers are compared, then
    assert "could not be examined" in caplog.text
    with pytest.warns(PortingWarning, match="'sum'"):
        f(np.ones((6, 2)))
    f = made([x], T.dot(x[::2], np.ones(2)).sum())
    caplog.clear()
    with pytest.raises(synk.WorkerError):
        f(np.ones((6, 3)))
    caplog.clear()
    with pytest.warns(PortingWarning, match="is not what serial"):
        f(np.ones((6, 2)))


def test_variables_that_differ_between_ranks_are_not_told(ranks):
    x, w = T.dvector("x"), theano.shared(np.ones(1), "w")
    synk.scatter(w, np.arange(ranks.n))
    f = made([x], (w.sum() * x.sum(), "sum"))
    for _ in range(3):
        f(X[:, 0])
