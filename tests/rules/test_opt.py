"""``theanompi.lib.opt`` against momentum SGD in NumPy on all rows, with ranks in one process."""

import numpy as np
import pytest
import theano
import theano.tensor as T

from synkhronos.rules.compatible.lib import opt

pytestmark = pytest.mark.usefixtures("quickly_compiled")

INPUTS, CLASSES, MU, ETA, LR = 3, 2, 0.9, 0.01, 0.05


class Model:
    """Linear regression in the contract of lib/opt.py, as model files are written."""

    use_momentum, use_nesterov_momentum, mu, eta = True, False, MU, ETA

    def __init__(self, x, y, dtype="float32", names=("W", "b"), rate="symbolic", **attributes):
        self.x, self.y = T.matrix("x", dtype="float32"), T.matrix("y", dtype="float32")
        self.shared_x_slice = theano.shared(np.asarray(x, dtype))
        self.shared_y_slice = theano.shared(np.asarray(y, dtype))
        random = np.random.RandomState(1)
        W, b = random.randn(INPUTS, CLASSES), random.randn(CLASSES)
        self.params = [
            theano.shared(value.astype(dtype), name) for value, name in zip((W, b), names)
        ]
        self.weight_types = ["W", "b"]
        self.shared_lr, self.subb_ind = theano.shared(np.float32(LR)), T.iscalar("subb_ind")
        if rate == "symbolic":
            self.lr = T.scalar("lr", dtype=dtype)
        residual = T.dot(self.x, self.params[0]) + self.params[1] - self.y
        self.cost, self.error = 0.5 * T.sqr(residual).sum(axis=1).mean(), residual.max()
        self.grads = T.grad(self.cost, self.params)
        self.compiled_train_fn_list = []
        vars(self).update(attributes)

    def compile_train(self, *dicts):
        for each in dicts:
            self.compiled_train_fn_list.append(theano.function(**each))

    def compile_val(self):
        self.val_fn = theano.function(
            [self.subb_ind],
            [self.cost, self.error],
            givens=[(self.x, T.cast(self.shared_x_slice, "float32"))]
            + [(self.y, T.cast(self.shared_y_slice, "float32"))],
            on_unused_input="ignore",
        )

    def values(self):
        return [each.get_value() for each in self.params]


def made_rows(number, seed=0):
    random = np.random.RandomState(seed)
    x = random.randn(number, INPUTS)
    return x, x.dot(random.randn(INPUTS, CLASSES)) + 0.1 * random.randn(number, CLASSES)


def serial(
    x, y, steps, rate=LR, mu=MU, eta=ETA, nesterov=False, scales=(1, 2), decays=(True, False)
):
    """Return W and b after steps of momentum SGD on all rows, in float64."""
    random = np.random.RandomState(1)
    params = [random.randn(INPUTS, CLASSES), random.randn(CLASSES)]
    velocities = [np.zeros_like(each) for each in params]
    for step in range(steps):
        residual = x.dot(params[0]) + params[1] - y
        grads = [x.T.dot(residual) / len(x), residual.mean(axis=0)]
        for i in (0, 1):
            g = grads[i] + (eta * params[i] if decays[i] else 0)
            velocities[i] = mu * velocities[i] + g
            moved = mu * velocities[i] + g if nesterov else velocities[i]
            lr = rate(step) if callable(rate) else rate
            params[i] = params[i] - scales[i] * lr * moved
    return params


def exchange(models):
    """Sum as BSP does: each rank's part weighs k rows_r / rows."""
    rows = [each.train_iter_fn.rows for each in models]
    for i in range(len(models[0].vels)):
        weights = [len(models) * n / sum(rows) for n in rows]
        total = sum(w * each.vels[i].get_value() for w, each in zip(weights, models))
        for each in models:
            each.vels2[i].set_value(total.astype(each.vels2[i].dtype))


def ranks(cuts, number=12, dtype="float32", **attributes):
    x, y = made_rows(number)
    parts = zip(np.split(x, cuts), np.split(y, cuts))
    models = [Model(*part, dtype=dtype, **attributes) for part in parts]
    for each in models:
        opt.pre_model_iter_fn(each, k=len(models))
    return models, x, y


def step(models):
    """Take one step of all ranks; return their costs."""
    costs = [each.train_iter_fn(0)[0] for each in models]
    exchange(models)
    for each in models:
        each.train_iter_fn.finish()
    return costs


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("cuts", [[6], [2], [1, 4]], ids=["even", "uneven", "three ranks"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_cdd_is_momentum_sgd_on_all_rows(cuts, nesterov, dtype):
    models, x, y = ranks(cuts, dtype=dtype, use_nesterov_momentum=nesterov)
    for _ in range(50):
        step(models)
    for each in models:
        for got, expected in zip(each.values(), serial(x, y, 50, nesterov=nesterov)):
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    n_rows = np.diff([0, *cuts, 12])
    assert [each.train_iter_fn.rows for each in models] == [*CLASSES * n_rows]  # labels


def test_no_step_waits_for_the_next_iteration():
    """The first iteration applied nothing, and the last one was pending at validation."""
    models, x, y = ranks([6])
    before = models[0].values()
    for each in models:
        assert len(each.train_iter_fn(0)) == 2 and each.train_iter_fn.is_pending
    exchange(models)
    assert (models[0].values()[0] == before[0]).all()
    models[0].train_iter_fn.finish()
    np.testing.assert_allclose(models[0].values()[0], serial(x, y, 1)[0], atol=1e-6)
    models[0].train_iter_fn.finish()  # once only
    np.testing.assert_allclose(models[0].values()[0], serial(x, y, 1)[0], atol=1e-6)
    models[1].train_iter_fn(0)  # a pending step is finished first
    np.testing.assert_allclose(models[1].values()[0], serial(x, y, 1)[0], atol=1e-6)


def test_the_learning_rate_is_that_of_its_own_step():
    """A pending step was applied with the learning rate of the next epoch."""
    models, x, y = ranks([6])
    for number in range(4):
        for each in models:
            each.shared_lr.set_value(np.float32(0.1 / (number + 1)))
        step(models)
    expected = serial(x, y, 4, rate=lambda number: 0.1 / (number + 1))
    np.testing.assert_allclose(models[1].values()[0], expected[0], atol=1e-6)


@pytest.mark.parametrize("sync_type", ["avg", "swap"])
@pytest.mark.parametrize("given", ["argument", "attribute", "in place of k"])
def test_avg_moves_parameters(sync_type, given):
    """With 'avg' and several ranks, parameters never moved."""
    x, y = made_rows(12)
    model = Model(x, y)
    if given == "argument":
        opt.pre_model_iter_fn(model, k=2, sync_type=sync_type)
    elif given == "attribute":
        model.sync_type = sync_type
        opt.pre_model_iter_fn(model, 2)
    else:
        opt.pre_model_iter_fn(model, sync_type)
    assert model.vels == model.vels2 == [] and model.descent_vel is None
    for _ in range(3):
        model.train_iter_fn(0)
        assert not model.train_iter_fn.is_pending
    for got, expected in zip(model.values(), serial(x, y, 3)):
        np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("k", [1, 2])
def test_nesterov_descends(nesterov, k):
    """With the wrong sign, p of p^2/2 went 1.19, 1.57, 2.18, 3.08, 4.40."""
    models, _, _ = ranks([6] if k == 2 else [], use_nesterov_momentum=nesterov)
    costs = []
    for _ in range(20):
        costs.append(np.mean(step(models)))
    assert costs[-1] < costs[5] < costs[1] < costs[0]


@pytest.mark.parametrize("k", [1, 2])
def test_without_momentum_it_is_sgd(k):
    models, x, y = ranks([4] if k == 2 else [], use_momentum=False)
    for _ in range(10):
        step(models)
    for got, expected in zip(models[0].values(), serial(x, y, 10, mu=0)):
        np.testing.assert_allclose(got, expected, atol=1e-5)
    assert models[0].velocities == []


def test_float64_is_accepted():
    """With floatX float64 the functions could not be compiled: TypeError."""
    x, y = made_rows(12)
    with theano.change_flags(floatX="float64"):
        model = Model(x, y, dtype="float64")
        opt.pre_model_iter_fn(model)
    model.train_iter_fn(0)
    assert model.params[0].dtype == model.velocities[0].dtype == "float64"
    np.testing.assert_allclose(model.values()[0], serial(x, y, 1)[0], atol=1e-6)


@pytest.mark.parametrize("k", [1, 2])
def test_parameters_of_batch_normalization_do_not_decay_and_are_exchanged(k):
    """gamma and beta were updated locally only, so they drifted apart."""
    models, x, y = ranks([4] if k == 2 else [], names=("gamma", "beta"), weight_types=["W", "W"])
    for _ in range(10):
        step(models)
    expected = serial(x, y, 10, scales=(1, 2), decays=(False, False))
    for each in models:
        for got, wanted in zip(each.values(), expected):
            np.testing.assert_allclose(got, wanted, atol=1e-5)
        assert len(each.vels) == (2 if k == 2 else 0)


def test_sub_batches_are_steps_of_their_own():
    x, y = made_rows(12)
    model = Model(x, y)
    ind, rows = model.subb_ind, 4
    model.shared_x_slice = model.shared_x_slice[ind * rows : (ind + 1) * rows]
    model.shared_y_slice = model.shared_y_slice[ind * rows : (ind + 1) * rows]
    opt.pre_model_iter_fn(model, k=1)
    costs = [float(model.train_iter_fn(i)[0]) for i in range(3)]
    assert model.train_iter_fn.rows == 4 * CLASSES and len(set(costs)) == 3
    assert np.isfinite(model.val_iter_fn(0)).all()


@pytest.mark.parametrize("rate", ["symbolic", "shared"])
def test_a_model_without_compile_train_and_its_own_gradients(monkeypatch, rate):
    monkeypatch.delattr(Model, "compile_train")
    x, y = made_rows(12)
    model = Model(x, y, rate=rate)
    del model.grads, model.weight_types
    opt.pre_model_iter_fn(model)
    model.train_iter_fn(0)
    np.testing.assert_allclose(model.values()[1], serial(x, y, 1)[1], atol=1e-6)


@pytest.mark.parametrize("where", ["config", "attribute"])
def test_the_number_of_workers_is_the_models_own_by_default(where):
    """Outdated models name only the sync type: TypeError."""
    x, y = made_rows(12)
    own = {"config": {"size": 2}} if where == "config" else {"size": 2}
    model = Model(x, y, **own)
    opt.pre_model_iter_fn(model, sync_type="cdd", f_val=False)
    assert len(model.vels) == 2 and not hasattr(model, "val_iter_fn")


def test_a_model_is_compiled_again():
    x, y = made_rows(12)
    model = Model(x, y)
    opt.pre_model_iter_fn(model, k=2)
    opt.pre_model_iter_fn(model, k=1)
    assert model.vels == [] and model.descent_vel is None
    assert len(model.compiled_train_fn_list) == 1


def test_validation_only():
    x, y = made_rows(12)
    model = Model(x, y)
    opt.pre_model_iter_fn(model, f_train=False)
    assert model.val_iter_fn is model.val_fn and not hasattr(model, "train_iter_fn")
    model.compile_val = lambda: "returned".upper
    opt.pre_model_iter_fn(model, f_train=False)
    assert model.val_iter_fn() == "RETURNED"


@pytest.mark.parametrize(
    "change, arguments, kind, said",
    [
        ({}, {"k": 0}, ValueError, "k must be the number of workers, at least 1, got 0"),
        ({}, {"k": 1.5}, TypeError, "k must be the number of workers, an integer, got 1.5"),
        ({}, {"sync_type": "average"}, ValueError, "sync_type must be one of cdd, avg, swap"),
        ({"grads": []}, {}, ValueError, "one gradient for each of the 2 params"),
        ({"weight_types": ["W", "x"]}, {}, ValueError, "weight_types must have a 'W' or a 'b'"),
        ({"compile_val": None}, {}, AttributeError, r"Model lacks compile_val\(\)"),
        (
            {"compile_train": lambda a: None, "compiled_train_fn_list": [1, 2]},
            {"k": 2, "sync_type": "cdd"},
            TypeError,
            "positional",
        ),
    ],
)
def test_what_can_not_be_compiled_is_refused(change, arguments, kind, said):
    x, y = made_rows(4)
    with pytest.raises(kind, match=said):
        opt.pre_model_iter_fn(Model(x, y, **change), **arguments)


def test_missing_attributes_are_listed():
    x, y = made_rows(4)
    model = Model(x, y)
    del model.cost, model.subb_ind
    with pytest.raises(AttributeError, match="Model lacks cost, subb_ind, which pre_model_iter_fn"):
        opt.pre_model_iter_fn(model)


def test_a_compile_train_that_appends_too_little_is_refused():
    x, y = made_rows(4)
    model = Model(x, y)
    model.compile_train = lambda *dicts: model.compiled_train_fn_list.append(print)
    with pytest.raises(ValueError, match=r"for each of the 2 dicts .* has appended 1"):
        opt.pre_model_iter_fn(model, k=2)


def test_expressions_get_the_broadcasting_of_their_variables():
    row = theano.shared(np.zeros((1, 3)), broadcastable=(True, False))
    [(variable, fixed)] = opt.fix_update_bcasts({row: row + T.dmatrix()})
    assert variable is row and fixed.type == row.type


def test_both_orders_of_momentum_are_one():
    assert opt._BSP_MSGD is opt.BSP_MSGD


def test_gradients_are_clipped():
    x = T.dvector()
    clipped = theano.function([x], opt._clip_paramlist([x], scale=2))
    assert clipped([-3, 1, 5])[0].tolist() == [-2, 1, 2]
