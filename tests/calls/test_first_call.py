"""check="first", the default: what the division changes is told once, and nothing else is."""

import sys
import tracemalloc
import warnings

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.helpers import MODE
from support.layouts import Layout
from theano.tensor.shared_randomstreams import RandomStreams

import synkhronos as synk
from synkhronos import PortingWarning
from synkhronos._calls import check as module
from synkhronos._session.current import Current
from synkhronos.extensions import train, update_rules, updates

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


def told_in_calls(f, *args):
    """Call three times; return the messages of each call."""
    messages = []
    for _ in range(3):
        with pytest.warns(PortingWarning) as caught:
            f(*args)
            warnings.warn("the last", PortingWarning, stacklevel=1)  # one is wanted
        messages.append([str(each.message) for each in caught][:-1])
    assert "_run" not in vars(f)
    return messages


OUTPUTS = {
    "sum": (lambda x: x.sum(), "Write (output, 'sum')"),
    "max": (lambda x: x.max(axis=0), "Write (output, 'max')"),
    "rows": (lambda x: T.sqr(x).sum(axis=1), "Write (output, 'gather')"),
    "std": (lambda x: x.std(), "Write (output, None) in a function with bcast_inputs=[x] in"),
    "median": (lambda x: T.sort(x[:, 0])[x.shape[0] // 2], "in any mode. Write (output, None)"),
    "scan": (lambda x: scanned(x.sum(axis=1)), "in any mode. Write (output, None)"),
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
    first, *others = told_in_calls(made([x], make(x)), X)
    if what == "rows":  # the call itself has told it
        assert "has an item for each row" in first[0]
    else:
        assert "Output 0 of Function 'f', mode 'avg', is not what serial" in first[0]
    assert advice in first[0] or what == "rows"
    assert len(first) == 1 and others == [[], []]


def test_a_part_of_the_rows_of_each_rank_is_told():
    x = T.dvector("x")
    f = made([x], [(x[1:] - x[:-1], "gather"), (x[:2], "gather")])  # the second is of each rank
    [first], *others = told_in_calls(f, X[:, 0])
    assert "Output 0" in first and "in any mode" in first and others == [[], []]


def test_a_largest_value_that_parts_of_other_numbers_share_is_told():
    x = T.lvector("x")
    [first], *_ = told_in_calls(made([x], x.max()), np.repeat([3, 4, 5], 4))
    assert "Write (output, 'max')" in first


def test_the_check_takes_as_much_memory_as_the_inputs():
    x, rows = T.dmatrix("x"), np.random.RandomState(0).randn(1 << 18, 4)
    f = made([x], x.sum())
    tracemalloc.start()
    try:
        with pytest.warns(PortingWarning, match="'sum'"):
            f(rows)
        # PyTensor's sum takes as much by itself.
        assert tracemalloc.get_traced_memory()[1] < 3 * rows.nbytes
    finally:
        tracemalloc.stop()


def test_what_is_right_is_not_told():
    x, small, whole = T.dmatrix("x"), T.fmatrix("small"), T.dvector("whole")
    w = theano.shared(np.ones(2), "w")
    rows = np.random.RandomState(1).randn(3000, 2).astype("float32")
    plain = [x.mean(), (x.sum(0), "sum"), (x, "gather"), (x.max(), "max"), (x.std(), None)]
    each = [(x.std(), "gather"), (T.stack([x.shape[0]]), "gather"), (w, "gather")]
    rounded = [x.mean(), (x - x.mean(1, keepdims=True)).sum()]  # some 1e-17
    random = RandomStreams(1).uniform(x.shape, ndim=2)
    functions = [
        (made([x], plain), X),
        (made([x], each), X),
        (made([x], [T.log(x).mean(), (T.log(x), "gather")]), np.abs(X) - 1e-3),
        (made([x], rounded), X - X.mean(axis=0)),
        (made([x], random.std()), X),
        (made([small], [small.mean(), (T.exp(small).sum(), "sum")]), rows),
        (made([x], x.std()), X[:1]),  # one rank has all rows
        (made([], x.std(), bcast_inputs=[x]), X),
        (made([whole], x.std(), bcast_inputs=[x], on_unused_input="ignore"), X[:, 0], X),
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
def test_local_gradients_are_told_by_the_next_call(outputs):
    w, v, other, *unnamed = (
        theano.shared(np.ones(2), name) for name in ("w", "v", "u", None, None)
    )
    x, loss, steps = local(w)
    steps += [(each, 0.9 * each - T.grad(loss, w)) for each in (*unnamed, v, other)]
    first, second, third = told_in_calls(made([x], loss if outputs else None, updates=steps), X)
    assert (first, third) == ([], [])
    assert "The update of w in Function 'f' is not what serial" in second[0]
    assert "synk.ops.all_reduce(g)" in second[0] and "call synk.all_reduce(w) after" in second[0]
    assert second[0].endswith("each call. The same is true of v, u, 2 other variables.")


def test_a_first_call_that_is_not_cheap_is_followed_by_one_that_is(monkeypatch):
    # As where it compiles: PyTensor does in its default mode.
    x, loss, steps = local(theano.shared(np.ones(2), "w"))
    f = made([x], loss, updates=steps)
    with monkeypatch.context() as patch:
        patch.setattr(module, "SECONDS", 0)
        f(X)
    assert [len(each) for each in told_in_calls(f, X)] == [0, 1, 0]


def test_a_gradient_that_is_not_reduced_beside_others_is_told():
    v, w = theano.shared(np.ones(2), "v"), theano.shared(np.ones(2), "w")
    x, loss, steps = local(w, synk.ops.all_reduce)
    f = made([x], loss, updates=[*steps, (v, v - T.grad(T.exp(T.dot(x, v)).mean(), v))])
    messages = told_in_calls(f, X)
    assert [len(each) for each in messages] == [0, 1, 0] and "The update of v" in messages[1][0]


@pytest.mark.parametrize("rows", [12, 11])
@pytest.mark.parametrize("op, cost, advice", [("avg", "sum", "(g, 'sum')"), ("sum", "mean", "(g)")])
def test_gradients_that_are_reduced_in_the_wrong_way_are_told(op, cost, advice, rows):
    x, w = T.dmatrix("x"), theano.shared(np.ones(2), "w")
    loss = getattr(T.sqr(T.dot(x, w) - 1), cost)()
    grad = synk.ops.all_reduce(T.grad(loss, w), op)
    outputs = (loss, "sum" if cost == "sum" else "avg")
    f = made([x], outputs, updates=update_rules.adam([grad], [w]))
    first, second, third = told_in_calls(f, X[:rows])
    assert (first, third) == ([], []) and f"synk.ops.all_reduce{advice}." in second[0]


@pytest.mark.parametrize("reduces_all", [True, False])
def test_a_penalty_that_is_summed_over_the_ranks_is_told(reduces_all):
    x, w = T.dmatrix("x"), theano.shared(np.ones(2), "w")
    loss, penalty = T.sqr(T.dot(x, w) - 1).sum(), 3 * T.sqr(w).sum()
    grad = T.grad(loss + penalty, w)
    outputs = [(loss + penalty, "sum")]
    if not reduces_all:
        grad = synk.ops.all_reduce(T.grad(loss, w), "sum") + T.grad(penalty, w)
        outputs = [(loss, "sum"), (penalty, None)]
    else:
        grad = synk.ops.all_reduce(grad, "sum")
    f = made([x], outputs, updates=[(w, w - 0.001 * grad)])
    first, second, third = told_in_calls(f, X[:11])
    assert (len(first), len(second), third) == (reduces_all, reduces_all, [])
    if reduces_all:
        assert "make it an output of its own, of mode None" in first[0]
        assert "all_reduce(T.grad(loss, w), 'sum') + T.grad(penalty, w)" in second[0]


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
@pytest.mark.parametrize("is_made", [True, False])
def test_losses_that_are_no_means_are_told(name, is_made):
    x, m, w = T.dmatrix("x"), T.dvector("m"), theano.shared(np.full(2, 0.5), "w")
    make, is_told = LOSSES[name]
    loss = make(T.sqr(T.dot(x, w) - 1) + 0 * m, m, w)
    if is_made:
        options = {"check": "first", "mode": MODE}
        f = train.make_train_step([x, m], loss, [w], update_rules.sgd, 0.05, options=options)
    else:
        grad = synk.ops.all_reduce(T.grad(loss, w))
        f = made([x, m], loss, updates=[(w, w - 0.05 * grad)])
    mask = np.arange(12) > 4 - X[:, 0]
    first, *others = told_in_calls(f, X, mask * 1.0)
    assert len(first) == is_told and others == [[], []]
    if is_told:
        assert "It is no mean over the rows." in first[0] and "all_reduce(w" in first[0]


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
def test_batch_normalization_is_not_told(name):
    x, gamma = T.dtensor4("x"), theano.shared(np.ones(3), "gamma")
    loss = NORMALIZED[name](x, gamma).mean()
    f = made([x], loss, updates=[(gamma, gamma - 0.1 * synk.ops.all_reduce(T.grad(loss, gamma)))])
    for _ in range(3):
        f(np.random.RandomState(2).randn(12, 3, 2, 2))
    assert "_run" not in vars(f)


@pytest.mark.parametrize("reduce", [lambda e: T.sqr(e.mean(axis=0)).sum(), lambda e: e.var()])
def test_means_of_columns_are_no_batch_normalization(reduce):
    x, w = T.dmatrix("x"), theano.shared(np.ones(2), "w")
    loss = reduce(x * w)
    f = made([x], loss, updates=[(w, w - 0.1 * synk.ops.all_reduce(T.grad(loss, w)))])
    assert [len(each) for each in told_in_calls(f, X)] == [1, 0, 0]


def test_functions_that_only_count_calls_are_none_of_training():
    x, n = T.dmatrix("x"), theano.shared(0, "n")
    first, *others = told_in_calls(made([x], x.std(), updates=[(n, n + 1)]), X)
    assert "Write (output, None)" in first[0] and others == [[], []]


CHANCES = {
    "largest": (lambda i: i.max(), [3, 0, 1, 3, 0, 3], [], "(output, 'max')"),
    "any": (lambda i: T.any(i > 2), [3, 0, 1, 3, 0, 3], [], "a sum over"),
    "rare": (lambda i: T.eq(i, 9).sum(), [3] * 6, [9, 0, 1, 1, 0, 2], "(output, 'sum')"),
}


@pytest.mark.parametrize("name", CHANCES)
def test_what_agrees_by_chance_is_told(name):
    i = T.lvector("i")
    make, rows, later, advice = CHANCES[name]
    f = made([i], make(i))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for each in (rows, rows, later or rows):
            f(each)
    [message] = [str(each.message) for each in told if each.category is PortingWarning]
    assert advice in message and ("in another order" in message) == (name != "rare")


@pytest.mark.parametrize("n_rows", [1, 2, 3])
def test_the_masters_part_is_its_own_also_where_ranks_have_no_rows(ranks, n_rows):
    x, total = T.dmatrix(), theano.shared(np.zeros(2))
    f = made([x], updates={total: total + x.sum(axis=0)}, check=None)
    serial = module.Serial(Current.session, f._definition, None)
    serial.select([X[:n_rows]], None)
    serial.read_variables(None)
    f(X[:n_rows])
    np.testing.assert_array_equal(serial.made(0, total), total.get_value())


def test_integers_that_are_right_are_not_told(ranks):
    i, x = T.lvector("i"), T.dmatrix("x")
    functions = [
        (
            made([i], [(i.max(), "max"), (T.eq(i, 9).sum(), "sum"), i.mean(), (i, "gather")]),
            [3] * 6,
        ),
        (made([i], (i.max(), None)), [3] * 6),
        (made([i], (T.extra_ops.Unique()(i).shape[0], "sum")), range(12)),
        (made([x], [(T.argmax(x, axis=1), "gather"), T.eq(T.argmax(x, axis=1), 1).mean()]), X),
        (made([x], (T.neq(T.argmax(T.exp(x), axis=1), 1).sum(), "sum")), X),
    ]
    for f, value in functions:
        for _ in range(3):
            f(value)
        assert "_run" not in vars(f)


def test_calls_with_slices_are_compared():
    x, w, n = T.dmatrix("x"), theano.shared(np.ones(2), "w"), theano.shared(0, "n")
    wrong = [
        (made([x], x.sum()), "Write (output, 'sum')"),
        (made([x], [(x, "gather"), x.max()]), "Write (output, 'max')"),
        (made([x], x.std(), updates=[(n, n + 1, "max")]), "in any mode"),
    ]
    right = [
        made([x], [x.mean(), (x.sum(), "sum"), (x, "gather"), (x.std(), None)]),
        made([x], x.mean(), updates=[(w, w - 0.1 * T.grad(T.sqr(T.dot(x, w)).mean(), w))]),
        made([x], (T.dot(x, w) - synk.ops.all_reduce(T.dot(x, w).mean())).mean()),
    ]
    for f, advice in wrong:
        with pytest.warns(PortingWarning) as told:
            f(X, num_slices=2)
        assert len(told) == 1 and advice in str(told[0].message)
        f(X, num_slices=2)
    for f in right:
        for _ in range(3):
            f(X, num_slices=2)


def test_the_check_of_a_call_with_slices_computes_some_rows_at_a_time(monkeypatch):
    seen, x, run = [], T.dmatrix("x"), module.Serial._run

    def watching(self, arrays, values=()):
        seen.append(len(arrays[0]))
        return run(self, arrays, values)

    monkeypatch.setattr(module.Serial, "_run", watching)
    with pytest.warns(PortingWarning, match="'sum'"):
        made([x], x.sum())(np.ones((1000, 2)), num_slices=10)
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
    rows, normal = T.dot(x, w), (x - x.mean(axis=0)) / x.std(axis=0)
    for loss, is_told in (
        (T.sqr(scanned(rows) - 1), True),
        (T.dot(T.exp(normal), w).mean(), False),
    ):
        steps = [(w, w - 0.1 * synk.ops.all_reduce(T.grad(loss, w)))]
        first, *others = told_in_calls(made([x], loss, updates=steps), X)
        assert others == [[], []] and len(first) == is_told
        assert not is_told or "depends on the order of the rows" in first[0]


def test_updates_that_scripts_put_right_are_not_told():
    for way in ("in the graph", "after each call", "two steps"):
        w = theano.shared(np.ones(2), "w")
        x, loss, steps = local(w)
        if way == "in the graph":
            grad = synk.ops.all_reduce(T.grad(loss, w))
            f = made([x], loss, updates=update_rules.adam([grad], [w]))
        elif way == "after each call":
            f = made([x], loss, updates=steps)
        else:
            steps, second, grads = updates.adam(loss, [w])
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


def test_functions_that_are_left_out(monkeypatch):
    x, s = T.dmatrix("x"), theano.shared(np.ones((2, 2)), "s")
    for f, *values in [
        (made([x], theano.printing.Print("seen")(x).sum()), X),
        (made([x], Counted()(x).sum()), X),
        (made([x], (RandomStreams(1).uniform(x.shape, ndim=2) + x).sum()), X),
        (made([theano.In(x, value=X, update=2 * x)], x.sum()),),
        (made([], s.sum(), sliceable_shareds=[s]),),
        (made([x], x.sum(), profile=theano.compile.ProfileStats(atexit_print=False)), X),
    ]:
        f(*values)
        assert "_run" not in vars(f)
    synk.broadcast(s, np.ones((2, 2)))
    f = made([x], (x.sum() + s.sum()))
    f(X[:1])  # fewer rows than ranks
    monkeypatch.setattr(module, "SECONDS", 0)  # too long
    f(X)
    f(X)
    assert "_run" not in vars(f)


def test_a_failure_of_the_check_is_none_of_the_call(monkeypatch, caplog):
    x = T.dmatrix("x")
    for method in ("select", "whole", "is_of_division"):
        with monkeypatch.context() as patch:
            patch.setattr(module.Serial, method, lambda *_, **__: 1 / 0)
            assert float(made([x], x.sum())(np.ones((6, 2)))) > 0
        assert "was not compared" in caplog.text
        caplog.clear()
    f = made([x], T.dot(x, np.ones(2)).sum())
    with pytest.raises(synk.WorkerError):
        f(np.ones((6, 3)))
    caplog.clear()
    with pytest.warns(PortingWarning, match="'sum'"):
        f(np.ones((6, 2)))


def test_variables_that_differ_between_ranks_are_not_told(ranks):
    x, w = T.dvector("x"), theano.shared(np.ones(1), "w")
    synk.scatter(w, np.arange(ranks.n))
    f = made([x], (w.sum() * x.sum(), "sum"))
    for _ in range(3):
        f(X[:, 0])
