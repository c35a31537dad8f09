"""Training with losses that are no mean over rows: the numbers of serial Theano, or a word."""

import sys

import numpy as np
import pytest
import theano
import theano.tensor as T
from support import compiling
from support.helpers import MODE
from support.layouts import ON_DEVICES, Layout
from theano.sandbox.rng_mrg import MRG_RandomStreams

import synkhronos as synk
from synkhronos import PortingWarning
from synkhronos.extensions import train, update_rules, updates

LAYOUTS = [Layout(2), Layout(3, master=1)]
pytestmark = [
    pytest.mark.usefixtures("quickly_compiled"),
    pytest.mark.skipif(ON_DEVICES, reason="double precision of the CPU"),
]
RANDOM = np.random.RandomState(0)
ROWS = [12, 12, 11, 9, 1]  # the last one fewer than ranks


class Model:
    """Inputs, parameters, and what losses are made of."""

    def __init__(self):
        random = np.random.RandomState(1)
        self.x, self.y, self.m = T.dmatrix("x"), T.dvector("y"), T.dvector("m")
        self.inputs = [self.x, self.y, self.m]
        self.w = theano.shared(random.randn(3, 4), "w")
        self.v = theano.shared(random.randn(4), "v")
        self.params = [self.w, self.v]
        self.hidden = T.tanh(self.x.dot(self.w))
        self.errors = T.sqr(self.hidden.dot(self.v) - self.y)

    @property
    def centred(self):
        return self.hidden - self.hidden.mean(axis=0)

    @property
    def normal(self):
        return self.centred / T.sqrt(self.hidden.var(axis=0) + 1e-3)


def batches():
    """Return minibatches whose mask is full at first; the last ones leave little."""
    for number, n in enumerate(ROWS):
        mask = np.ones(n) if number == 0 else (np.arange(n) < n // 2 + 1) * 1.0
        yield RANDOM.randn(n, 3), RANDOM.randn(n), mask


def whitened(model):
    covariance = T.dot(model.centred.T, model.centred) / model.x.shape[0] + 0.5 * T.eye(4)
    eigh = T.linalg.eigh if hasattr(T, "linalg") else T.nlinalg.eigh  # of PyTensor
    values, vectors = eigh(covariance)
    return T.sqr(T.dot(model.centred, vectors)).mean() + T.log(values).sum() / 9 + model.v.sum() / 9


def two_heads(model):
    """A mean with a bias, whose gradient begins with equal numbers, and a masked mean."""
    likelihood = T.nnet.categorical_crossentropy(
        T.nnet.softmax(model.x.dot(model.w) + model.v), labels(model)
    )
    return likelihood.mean() + (model.m * model.errors).sum() / model.m.sum()


def labels(model):
    return T.cast(T.gt(model.y, 0), "int64")


def by_size_of_class(model):
    sizes = T.inc_subtensor(T.zeros((2,))[labels(model)], 1.0) + 1
    return (model.errors / sizes[labels(model)]).mean()


def padded(model):
    longest = labels(model).max() + 1
    return model.errors.sum() / (model.x.shape[0] * model.x[:, :longest].shape[1])


def averages_that_are_clipped_in_steps(model):
    states, _ = theano.scan(
        lambda x, h: theano.gradient.grad_clip(T.tanh(x[:, None] * model.v + h), -1e-3, 1e-3),
        model.x.T,
        outputs_info=T.zeros((model.x.shape[0], 4)),
    )
    return T.sqr(states[-1]).mean() + 0.1 * model.errors.mean()


LOSSES = {
    "two heads": two_heads,
    "by size of class": by_size_of_class,
    "padded": padded,
    "clipped in steps": averages_that_are_clipped_in_steps,
    "mean": lambda model: model.errors.mean(),
    "sum by a number": lambda model: model.errors.sum() / 12,
    "masked mean": lambda model: (model.m * model.errors).sum() / model.m.sum(),
    "root": lambda model: T.sqrt(model.errors.mean()),
    "largest": lambda model: model.errors.max() + 0.1 * model.errors.mean(),
    "covariance": lambda model: (
        T.sqr(T.dot(model.centred.T, model.centred) / model.x.shape[0]).sum() + T.sqr(model.v).sum()
    ),
    "normalized": lambda model: T.sqr(model.normal.dot(model.v) - model.y).mean(),
    "deviation as a feature": lambda model: T.sqr(
        (model.hidden * model.hidden.std(axis=0)).dot(model.v) - model.y
    ).mean(),
    "whitened": whitened,
}
FORMS = {
    "one function": lambda model, loss: train.make_train_step(
        model.inputs, loss, model.params, update_rules.adam, 0.05, max_norm=1.0,
        options={"mode": MODE, "on_unused_input": "ignore"},
    ),
    "serial": lambda model, loss: theano.function(
        model.inputs,
        loss,
        updates=update_rules.adam(
            train.clip_by_global_norm(T.grad(loss, model.params), 1.0), model.params, 0.05
        ),
        mode=MODE,
        on_unused_input="ignore",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_steps_are_those_of_serial_theano(ranks, name, monkeypatch):
    monkeypatch.setitem(sys.modules, "theano.scan_module.scan_perform_ext", None)
    models = Model(), Model()
    step, serial = (FORMS[form](model, LOSSES[name](model)) for form, model in zip(FORMS, models))
    for batch in list(batches())[: 3 if name == "whitened" else None]:
        np.testing.assert_allclose(step(*batch), serial(*batch), rtol=1e-9)
        assert_same(*models)


def assert_same(model, serial, rtol=1e-9):
    for param, other in zip(model.params, serial.params):
        replicas = synk.gather(param, nd_up=1)
        np.testing.assert_allclose(replicas[0], other.get_value(), rtol=rtol, atol=1e-12)
        assert all(each.tobytes() == replicas[0].tobytes() for each in replicas)


@pytest.mark.parametrize("rule", ["momentum", "sgd_nonflat"])
@pytest.mark.parametrize("name", ["mean", "masked mean", "covariance"])
def test_two_steps(ranks, name, rule):
    models, functions = (Model(), Model()), []
    makers = train.make_train_function, train.make_train_function_theano
    for model, make in zip(models, makers):
        both = T.dmatrix("both")
        loss = LOSSES[name](model) + 0 * model.y.sum() + T.sqr(model.v).sum()
        loss = theano.clone(loss, {model.x: both[:, :3], model.m: both[:, 3]})
        functions.append(make(loss, model.params, both, model.y, getattr(updates, rule), 0.05))
    for x, y, mask in batches():
        both = np.column_stack([x, mask])
        found, expected = (f(both, y) for f in functions)
        np.testing.assert_allclose(found, expected, rtol=1e-9)
        assert_same(*models)


def running(model):
    """Give a variable a default update, as Lasagne's batch normalization does."""
    mean = theano.shared(np.zeros(4), "mean")
    mean.default_update = 0.9 * mean + 0.1 * model.hidden.mean(axis=0)
    variance = theano.shared(np.ones(4), "variance")
    variance.default_update = 0.9 * variance + 0.1 * model.hidden.var(axis=0)
    return mean, variance


@pytest.mark.parametrize("per_rank", [None, "loss", "normalization"])
@pytest.mark.filterwarnings("ignore:Setting default_update")
def test_running_statistics_are_equal_on_all_ranks(ranks, per_rank):
    models, steps, statistics = (Model(), Model()), [], []
    for model in models:
        kept = running(model)
        statistics.append(kept)
        used = sum(0 * each.sum() for each in kept)
        loss = T.sqr(model.normal.dot(model.v) - model.y).mean() + used
        if model is models[0]:
            options = {"mode": MODE, "on_unused_input": "ignore"}
            step = train.make_train_step(
                model.inputs, loss, model.params, update_rules.sgd, 0.05, options=options,
                per_rank=per_rank,
            )  # fmt: skip
        else:
            new = update_rules.sgd(loss, model.params, 0.05)
            step = theano.function(
                model.inputs, loss, updates=new, mode=MODE, on_unused_input="ignore"
            )
        steps.append(step)
    for batch in list(batches())[:3]:
        [found, expected] = [step(*batch) for step in steps]
        for own, serial in zip(*statistics):
            replicas = synk.gather(own, nd_up=1)
            assert all(each.tobytes() == replicas[0].tobytes() for each in replicas)
            is_serial = np.allclose(replicas[0], serial.get_value(), rtol=1e-9)
            assert is_serial or per_rank
        assert np.allclose(found, expected, rtol=1e-9) == (per_rank is None)


def test_each_ranks_own_loss_is_averaged_on_purpose(ranks):
    model = Model()
    loss = LOSSES["masked mean"](model)
    options = {"mode": MODE}
    step = train.make_train_step(
        model.inputs, loss, model.params, update_rules.sgd, 0.0, options=options, per_rank="loss"
    )
    value = theano.function(model.inputs, loss, mode=MODE)
    batch = [RANDOM.randn(9, 3), RANDOM.randn(9), np.arange(9) % 4 + 1.0]
    edges = [(9 * r // ranks.n, 9 * (r + 1) // ranks.n) for r in range(ranks.n)]
    losses = [value(*(each[a:b] for each in batch)) for a, b in edges]
    expected = np.average(losses, weights=[b - a for a, b in edges])
    np.testing.assert_allclose(step(*batch), expected, rtol=1e-9)
    with pytest.raises(ValueError, match='per_rank="normalization", but the loss is no mean'):
        train.make_train_step(
            model.inputs, loss, model.params, update_rules.sgd, 0.1, per_rank="normalization"
        )


def selected(model):
    mask = MRG_RandomStreams(3).binomial(model.hidden.shape, p=0.5, dtype="float64")
    errors = T.sqr((model.hidden * mask).dot(model.v) - model.y)
    return errors[model.m.nonzero()].mean()


def test_what_has_no_rule_is_told_when_it_is_made_and_right(ranks):
    models = Model(), Model()
    said = r"can't be divided .* Nonzero of a mask of rows \(test_any_loss.py:\d+\). So each rank"
    with pytest.warns(PortingWarning, match=said) as caught:
        step = FORMS["one function"](models[0], selected(models[0]))
    [message] = [str(each.message) for each in caught if each.category is PortingWarning]
    assert "(mask * x).sum() / mask.sum()" in message and 'per_rank="loss"' in message
    serial = FORMS["serial"](models[1], selected(models[1]))
    for batch in batches():
        np.testing.assert_allclose(step(*batch), serial(*batch), rtol=1e-9)
        assert_same(*models)
    batch = [*batches()][1]
    data = [synk.data(batch[0]), *batch[1:]]
    np.testing.assert_allclose(
        step(*data, batch=[5, 0, 1]), serial(*(each[[5, 0, 1]] for each in batch)), rtol=1e-9
    )
    assert_same(*models)
    with pytest.raises(ValueError, match=r"num_slices=2, but each rank of .* computes all rows"):
        step(*batch, num_slices=2)


def test_a_loss_without_a_rule_that_reduces_itself(ranks):
    one, two = models = Model(), Model()
    losses = [
        model.errors[T.gt(model.y, 0).nonzero()].mean() + synk.ops.all_reduce(model.errors.mean())
        for model in models
    ]
    rows, y = next(batches())[0], np.arange(12.0)
    with pytest.warns(PortingWarning, match="So the ranks average the gradients of their own"):
        f = train.make_train_step([one.x, one.y], losses[0], one.params, update_rules.sgd, 0.1)
    with pytest.warns(PortingWarning, match="So the ranks average the gradients of their own"):
        g = train.make_train_function(losses[1], two.params, two.x, two.y, updates.sgd, 0.1)
    np.testing.assert_allclose(f(rows, y), g(rows, y))
    assert_same(one, two, rtol=1e-7)


def test_outputs_have_their_serial_values(ranks):
    model = Model()
    outputs = [
        model.normal,
        model.normal.sum(axis=1).max(),
        T.eq(model.m, 1).sum(),
        (model.m * model.y).sum() / model.m.sum(),
        (model.errors.mean(), "gather"),
        (model.normal.sum(axis=0), "sum"),
        model.w.sum(),
    ]
    options = {"mode": MODE}
    step = train.make_train_step(
        model.inputs, model.errors.mean(), model.params, update_rules.sgd, 0.0, outputs=outputs,
        options=options,
    )  # fmt: skip
    variables = [each[0] if isinstance(each, tuple) else each for each in outputs]
    serial = theano.function(model.inputs, variables, mode=MODE)
    for batch in list(batches())[:4]:
        _, *found = step(*batch)
        for number, (one, other) in enumerate(zip(found, serial(*batch))):
            if number == 4:  # asked for: the loss of each rank's rows
                assert one.shape == (ranks.n,)
                continue
            assert one.dtype == other.dtype
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


def test_a_variable_that_ranks_update_differently_is_told(ranks):
    model, cache = Model(), theano.shared(np.zeros(4), "cache")
    sums = [(cache, model.hidden.sum(axis=0))]
    collect = synk.function([model.x], updates=sums, check="first")
    loss = T.sqr(model.hidden - cache).mean()
    options = {"mode": MODE}
    step = train.make_train_step([model.x], loss, [model.w], update_rules.sgd, 0.1, options=options)
    rows = RANDOM.randn(9, 3)
    collect(rows)
    with pytest.warns(PortingWarning, match="The update of cache in .* uses it"):
        step(rows)
    synk.all_reduce(cache)
    step(rows)


def test_slices_of_a_loss_that_is_no_mean_are_refused(ranks):
    model = Model()
    options = {"mode": MODE, "on_unused_input": "ignore"}
    step = train.make_train_step(
        model.inputs, LOSSES["root"](model), model.params, update_rules.sgd, 0.1, options=options
    )
    batch = next(batches())
    with pytest.raises(ValueError, match=r"num_slices=2, but .* Leave num_slices out"):
        step(*batch, num_slices=2)
    assert np.isfinite(step(*batch))


def test_rows_that_a_reshape_tears_apart_are_refused(ranks):
    x, w = T.dmatrix("x"), theano.shared(np.ones(4), "w")
    loss = T.sqr(x.reshape((-1, 4)).dot(w)).mean()
    step = train.make_train_step([x], loss, [w], update_rules.sgd, 0.1, options={"mode": MODE})
    assert np.isfinite(step(np.ones((6, 8)))) and np.isfinite(step(np.ones((7, 4))))
    with pytest.raises(ValueError, match=r"shapes \(12, 3\). Reshape to \(x.shape\[0\]"):
        step(np.ones((12, 3)))
    assert np.isfinite(step(np.ones((6, 8)), num_slices=2))


def test_a_fixed_number_of_rows(ranks):
    x, w = T.dmatrix("x"), theano.shared(np.ones(2), "w")
    loss = T.sqr(x.reshape((12, 2, 2)).sum(axis=1).dot(w)).mean()
    step = train.make_train_step([x], loss, [w], update_rules.sgd, 0.0, options={"mode": MODE})
    assert float(step(np.ones((12, 4)))) == 16
    with pytest.raises(ValueError, match=r"reshapes to 12 rows, .* but the call has 11"):
        step(np.ones((11, 4)))


def test_clipped_gradients_inside_of_a_loss(ranks):
    models = Model(), Model()

    def loss(model):
        errors = theano.gradient.grad_clip(model.errors, -0.01, 0.01)
        return errors.mean()

    step, serial = (FORMS[form](model, loss(model)) for form, model in zip(FORMS, models))
    for batch in batches():
        np.testing.assert_allclose(step(*batch), serial(*batch), rtol=1e-9)
        assert_same(*models)


def test_minibatches_by_number_and_rows_of_each_rank(ranks):
    """``rows()``, ``sliceable_shareds`` and ``batch`` select the rows of a masked mean."""
    data = [RANDOM.randn(24, 3), RANDOM.randn(24), (np.arange(24) % 3 > 0) * 1.0]
    models, index = (Model(), Model()), T.lscalar("index")
    model, serial = models
    shared = [theano.shared(each) for each in data]
    numbers = synk.rows(index, 8)
    given = [(each, value[numbers]) for each, value in zip(model.inputs, shared)]
    loss = LOSSES["masked mean"]
    options = {"mode": MODE, "givens": given}
    step = train.make_train_step(
        [index], loss(model), model.params, update_rules.sgd, 0.1, options=options
    )
    expected = theano.function(
        serial.inputs, loss(serial), updates=update_rules.sgd(loss(serial), serial.params, 0.1),
        mode=MODE,
    )  # fmt: skip
    for i in (0, 2, 1):
        rows = slice(8 * i, 8 * i + 8)
        np.testing.assert_allclose(step(i), expected(*(d[rows] for d in data)), rtol=1e-9)
        assert_same(*models)


def test_dropout_of_one_process(ranks):
    models = Model(), Model()

    def loss(model):
        mask = MRG_RandomStreams(3).binomial(model.hidden.shape, p=0.5, dtype="float64")
        errors = T.sqr((model.hidden * mask).dot(model.v) - model.y)
        return (model.m * errors).sum() / model.m.sum()

    model, serial = models
    step = train.make_train_step(
        model.inputs, loss(model), model.params, update_rules.sgd, 0.1,
        options={"mode": MODE, "serial_random": True},
    )  # fmt: skip
    value = loss(serial)
    expected = theano.function(
        serial.inputs, value, updates=update_rules.sgd(value, serial.params, 0.1), mode=MODE
    )
    for batch in batches():
        np.testing.assert_allclose(step(*batch), expected(*batch), rtol=1e-9)
        assert_same(*models)


@pytest.mark.slow("compiles C code")
def test_steps_in_c_code(ranks):
    with compiling.in_python():
        models = Model(), Model()
    step, serial = (
        FORMS[form](model, LOSSES["masked mean"](model)) for form, model in zip(FORMS, models)
    )
    for batch in batches():
        np.testing.assert_allclose(step(*batch), serial(*batch), rtol=1e-9)
