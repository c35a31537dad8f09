"""Update rules: NumPy's arithmetic on the gradients of serial Theano, with one function and two."""

import numpy as np
import pytest
import theano
import theano.tensor as T
from support import compiling
from support.helpers import MODE, model, step_of
from support.layouts import IS_MIXED, ON_DEVICES, Layout

import synkhronos as synk
from synkhronos.extensions import rules, train, update_rules, updates

RANDOM = np.random.RandomState(0)
V = theano.shared(1.0, "v")


LAYOUTS = [Layout(2), Layout(3, master=1)]
# What each rule does, from the papers: (parameter, gradient, state, step number) -> parameter.


def sgd(p, g, s, t, learning_rate):
    return p - learning_rate * g


def momentum(p, g, s, t, learning_rate, momentum=0.9):
    s["v"] = momentum * s.get("v", 0) - learning_rate * g
    return p + s["v"]


def nesterov_momentum(p, g, s, t, learning_rate, momentum=0.9):
    s["v"] = momentum * s.get("v", 0) - learning_rate * g
    return p + momentum * s["v"] - learning_rate * g


def adagrad(p, g, s, t, learning_rate=1.0, epsilon=1e-6):
    s["a"] = s.get("a", 0) + g**2
    return p - learning_rate * g / np.sqrt(s["a"] + epsilon)


def rmsprop(p, g, s, t, learning_rate=1.0, rho=0.9, epsilon=1e-6):
    s["a"] = rho * s.get("a", 0) + (1 - rho) * g**2
    return p - learning_rate * g / np.sqrt(s["a"] + epsilon)


def adadelta(p, g, s, t, learning_rate=1.0, rho=0.95, epsilon=1e-6):
    s["a"] = rho * s.get("a", 0) + (1 - rho) * g**2
    step = g * np.sqrt(s.get("d", 0) + epsilon) / np.sqrt(s["a"] + epsilon)
    s["d"] = rho * s.get("d", 0) + (1 - rho) * step**2
    return p - learning_rate * step


def adam(p, g, s, t, learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-8):
    s["m"] = beta1 * s.get("m", 0) + (1 - beta1) * g
    s["v"] = beta2 * s.get("v", 0) + (1 - beta2) * g**2
    rate = learning_rate * np.sqrt(1 - beta2**t) / (1 - beta1**t)
    return p - rate * s["m"] / (np.sqrt(s["v"]) + epsilon)


def adamax(p, g, s, t, learning_rate=0.002, beta1=0.9, beta2=0.999, epsilon=1e-8):
    s["m"] = beta1 * s.get("m", 0) + (1 - beta1) * g
    s["u"] = np.maximum(beta2 * s.get("u", 0), abs(g))
    return p - learning_rate / (1 - beta1**t) * s["m"] / (s["u"] + epsilon)


# name, hyperparameters, how many variables it updates: of each parameter, and beside them
CASES = [
    (sgd, {"learning_rate": 0.1}, 1, 0),
    (momentum, {"learning_rate": 0.1, "momentum": 0.8}, 2, 0),
    (nesterov_momentum, {"learning_rate": 0.1}, 2, 0),
    (adagrad, {"learning_rate": 0.1}, 2, 0),
    (rmsprop, {"learning_rate": 0.1, "rho": 0.8}, 2, 0),
    (adadelta, {"epsilon": 1e-3}, 3, 0),
    (adam, {"learning_rate": 0.05, "beta2": 0.99}, 3, 1),
    (adamax, {}, 3, 1),
]
IDS = [case[0].__name__ for case in CASES]


def minibatches(dtype, n_ranks):
    """Return minibatches whose rows do not divide evenly, one with fewer rows than ranks."""
    return [
        (RANDOM.randn(n, 4).astype(dtype), RANDOM.randn(n).astype(dtype))
        for n in (2 * n_ranks + 1, 3 * n_ranks - 1, n_ranks - 1, 4 * n_ranks)
    ]


def in_one_function(rule, inputs, params, loss, **kwargs):
    return train.make_train_step(
        inputs, loss, params, getattr(rules, rule), options={"mode": MODE}, **kwargs
    )


def in_two_functions(rule, inputs, params, loss, **kwargs):
    return train.make_train_function(loss, params, *inputs, getattr(updates, rule), **kwargs)


def assert_trains_as(step, params, loss_and_grads, expected, batches, new_values, tolerance):
    """Train, and compare with what ``new_values(values, grads, t)`` returns, on all ranks."""
    values = [value.astype("float64") for value in expected]
    for t, (x, y) in enumerate(batches, 1):
        for param, value in zip(loss_and_grads.params, values):
            param.set_value(value.astype(param.dtype))
        loss, *grads = loss_and_grads(x, y)
        values = new_values(values, [np.asarray(g).astype("float64") for g in grads], t)
        np.testing.assert_allclose(step(x, y), loss, rtol=tolerance)
        for param, value in zip(params, values):
            replicas = [synk.get_value(rank, param) for rank in range(synk_ranks())]
            if not IS_MIXED:
                assert all(r.tobytes() == replicas[0].tobytes() for r in replicas), param
            np.testing.assert_allclose(replicas[0], value, rtol=tolerance, atol=tolerance)


def synk_ranks():
    from synkhronos import session

    return session._Current.session.n_ranks


class Serial:
    """Plain Theano's loss and gradients on all rows."""

    def __init__(self, dtype):
        inputs, self.params, loss = model(dtype)
        self.function = theano.function(inputs, [loss, *T.grad(loss, self.params)], mode=MODE)

    def __call__(self, x, y):
        return self.function(x, y)


@pytest.fixture
def adam_compiled_if_thorough(request, reference):
    """Compile C code for Adam only, which takes seconds for each rule.

    That of other rules' expressions is tested by test_updates.py and test_vectorized_updates.py.
    """
    if reference is adam:
        request.getfixturevalue("compiled_if_thorough")
        yield
        return
    with compiling.in_python():
        yield


@pytest.mark.parametrize("form", [in_one_function, in_two_functions], ids=["one", "two"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("reference", "hyper", "of_each", "beside"), CASES, ids=IDS)
@pytest.mark.usefixtures("adam_compiled_if_thorough")
def test_rules(ranks, reference, hyper, of_each, beside, dtype, form):
    inputs, params, loss = model(dtype)
    first = [param.get_value() for param in params]
    step = form(reference.__name__, inputs, params, loss, **hyper)
    states = [{} for _ in params]

    def new_values(values, grads, t):
        return [reference(p, g, s, t, **hyper) for p, g, s in zip(values, grads, states)]

    # What the devices compute in single precision differs a little more.
    tolerance = 1e-10 if dtype == "float64" else 2e-4
    batches = minibatches(dtype, ranks.n)
    assert_trains_as(step, params, Serial(dtype), first, batches, new_values, tolerance)


@pytest.mark.parametrize(("reference", "hyper", "of_each", "beside"), CASES, ids=IDS)
def test_what_rules_return(reference, hyper, of_each, beside):
    _, params, loss = model("float32")
    one = getattr(rules, reference.__name__)(loss, params, **hyper)
    grad_updates, param_updates, flat = getattr(updates, reference.__name__)(loss, params, **hyper)
    assert len(one) == len(param_updates) == of_each * len(params) + beside
    assert [target for target, _ in grad_updates] == [flat]
    assert (flat.name, flat.ndim, flat.dtype) == ("flat_grad_s", 1, "float32")
    for pairs in (one.items(), param_updates):
        for target, value in pairs:
            assert value.dtype == target.dtype and value.ndim == target.ndim
    assert reference.__name__ in updates.__all__ and reference.__name__ in rules.__all__


@pytest.mark.usefixtures("compiled_if_thorough")
def test_sgd_nonflat(ranks):
    inputs, params, loss = model("float64")
    first = [param.get_value() for param in params]
    grad_updates, param_updates, shareds = updates.sgd_nonflat(loss, params, 0.1)
    assert [s.type for s in shareds] == [p.type for p in params]
    step = step_of(inputs, loss, grad_updates, param_updates, shareds)

    def new_values(values, grads, t):
        return [p - 0.1 * g for p, g in zip(values, grads)]

    batches = minibatches("float64", ranks.n)
    assert_trains_as(step, params, Serial("float64"), first, batches, new_values, 1e-10)


@pytest.mark.parametrize("nesterov", [False, True], ids=["plain", "nesterov"])
@pytest.mark.usefixtures("compiled_if_thorough")
def test_momentum_is_momentum_applied_to_sgd(ranks, nesterov):
    name = "nesterov_momentum" if nesterov else "momentum"
    apply = updates.apply_nesterov_momentum if nesterov else updates.apply_momentum
    inputs, params, loss = model("float64")
    first = [param.get_value() for param in params]
    grad_updates, param_updates, flat = updates.sgd(loss, params, 0.1)
    step = step_of(inputs, loss, grad_updates, apply(param_updates, 0.8), flat)
    states = [{} for _ in params]
    reference = globals()[name]

    def new_values(values, grads, t):
        return [reference(p, g, s, t, 0.1, 0.8) for p, g, s in zip(values, grads, states)]

    batches = minibatches("float64", ranks.n)
    assert_trains_as(step, params, Serial("float64"), first, batches, new_values, 1e-10)


def test_momentum_of_some_of_the_updates():
    _, params, loss = model("float64")
    given = rules.adam(loss, params)
    more = rules.apply_momentum(given, params, 0.5)
    assert len(more) == len(given) + len(params)
    for variable, value in given.items():
        assert (more[variable] is value) == (variable not in params)


@pytest.mark.usefixtures("compiled_if_thorough")
@pytest.mark.numba
def test_slices_accumulate_to_the_same_step(ranks):
    x, y = minibatches("float64", ranks.n)[1]
    after = []
    for form in (in_one_function, in_two_functions):
        for num_slices in (1, 3) if ON_DEVICES else (1, 2, 3):  # compiling for devices takes long
            inputs, params, loss = model("float64")
            if form is in_one_function:
                step = form("sgd", inputs, params, loss, learning_rate=0.1)
            else:
                step = step_of(inputs, loss, *updates.sgd(loss, params, 0.1))
            step(x, y, num_slices=num_slices)
            after.append([param.get_value() for param in params])
    for values in after[1:]:
        for value, other in zip(values, after[0]):
            np.testing.assert_allclose(value, other, rtol=1e-12)


@pytest.mark.skipif(ON_DEVICES, reason="devices have single precision")
@pytest.mark.usefixtures("quickly_compiled")
def test_hyperparameters_are_not_rounded_to_floatx():
    w = theano.shared(np.zeros(1), "w")
    with theano.change_flags(floatX="float32"):
        assert theano.function([], rules.sgd(w.sum(), [w], 0.1)[w])()[0] == -0.1


@pytest.mark.usefixtures("quickly_compiled")
def test_hyperparameters_may_be_variables():
    w, rate = theano.shared(np.zeros(2, "float32"), "w"), T.dscalar("rate")
    f = theano.function([rate], updates=rules.sgd(w.sum(), [w], rate))
    f(0.5)
    assert w.get_value().tolist() == [-0.5, -0.5] and w.dtype == "float32"


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((T.dvector("l"), [theano.shared(1.0)]), TypeError, "scalar of floats, got l"),
        ((T.iscalar("l"), [theano.shared(1.0)]), TypeError, "scalar of floats, got l"),
        ((3.0, [theano.shared(1.0)]), TypeError, "scalar variable, got 3.0"),
        (([T.dscalar()] * 2, [theano.shared(1.0)]), ValueError, "each of 1 param, got 2"),
        (
            (T.dscalar(), theano.shared(1.0, "p")),
            TypeError,
            "shared variables, got p.",
        ),
        ((T.dscalar(), [T.dscalar("q")]), TypeError, "got q in it"),
        ((T.dscalar(), []), ValueError, "nothing to train"),
        ((T.dscalar(), [V, V]), ValueError, "has v twice"),
        ((T.dscalar(), None), TypeError, "shared variables, got None"),
        ((V**2, [V, theano.shared(1.0, "other")]), ValueError, r"no derivative by \['other'\]"),
    ],
)
def test_bad_arguments(arguments, kind, message):
    for rule in (rules.sgd, rules.adam):
        with pytest.raises(kind, match=message):
            rule(*arguments, learning_rate=0.1)


@pytest.mark.parametrize("rate", [None, "0.1", [0.1, 0.2], T.dvector("rate"), 1j, True])
def test_a_learning_rate_is_a_number_or_a_scalar(rate):
    with pytest.raises(TypeError, match=r"Hyperparameters must be .*, got ."):
        rules.sgd(V**2, [V], rate)


X, N = T.dvector("x"), theano.shared(3, "n")
TWICE = [(V, V + 1), (V, V + 2)]


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: step_with(updates.adam), TypeError, r"use synkhronos\..*\.update_rules\.adam"),
        (lambda: step_with(lambda *_: None), TypeError, "must be pairs .*, got None"),
        (lambda: step_with(lambda *_: [5]), TypeError, "must be pairs .*, got 5 among them"),
        (lambda: step_with(lambda *_: TWICE), ValueError, "once, but v comes twice"),
        (lambda: step_with(averages=[(V, V + 1)]), ValueError, "once, but v comes twice"),
        (lambda: step_with(averages=TWICE), ValueError, "averages must .* v comes twice"),
        (
            lambda: step_with(options={"updates": []}),
            TypeError,
            r"options can't have \['updates'\]",
        ),
        (lambda: step_with(outputs=X.sum()), TypeError, "outputs must be a list"),
        (lambda: step_with(max_norm="1"), TypeError, "max_norm must be a number.*got '1'"),
        (lambda: step_with(max_norm=[1]), TypeError, r"max_norm must be a number.*got \[1\]"),
        (lambda: step_with(max_norm=0), ValueError, "max_norm must be above zero, got 0"),
        (lambda: train.clip_by_global_norm(X, 1), TypeError, "grads must be a list"),
        (
            lambda: train.make_train_function(X.sum() * V, [V], X, X, rules.adam),
            TypeError,
            "returned OrderedDict. Rules of one step are for make_train_step",
        ),
        (lambda: updates.sgd(V**2, [V]), TypeError, r"sgd\(\): missing .*'learning_rate'"),
        (lambda: updates.sgd(V**2, [N], 0.1), TypeError, "params must be of floats, got n of type"),
        (lambda: updates.adadelta(X.sum(), [V]), ValueError, r"no derivative by \['v'\]"),
        (lambda: rules.apply_momentum([], [V]), ValueError, "updates; v is not"),
        (lambda: rules.apply_momentum(5), TypeError, "updates must be pairs .*, got 5"),
        (lambda: rules.apply_nesterov_momentum(TWICE), ValueError, "v comes twice"),
        (lambda: updates.apply_momentum(updates.sgd(V**2, [V], 0.1)), TypeError, "be pairs"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(ranks, call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def step_with(rule=rules.sgd, **kwargs):
    arguments = (0.1,) if rule is rules.sgd else ()
    return train.make_train_step([X], X.mean() * V, [V], rule, *arguments, **kwargs)


@pytest.mark.slow("compiles all operations for half precision")
def test_rates_near_one_in_half_precision():
    for rule, rates in ((rules.adam, {"beta2": 0.9999}), (rules.rmsprop, {"rho": 0.9999})):
        found = []
        for dtype in ("float16", "float64"):
            w = theano.shared(np.array([1.0, -2.0], dtype), "w")
            f = theano.function([], updates=rule(T.sqr(w).sum(), [w], 0.01, **rates))
            assert w.dtype == dtype and [f() for _ in range(3)]
            found.append(w.get_value())
        np.testing.assert_allclose(*found, atol=2e-3)


def test_a_weighted_mean_is_that_of_serial_theano(ranks):
    def steps(of_all):
        [x, y], params, _ = model("float64")
        weights = T.dvector("weights")
        errors = (T.tanh(T.dot(x, params[0]) + params[1]).sum(axis=1) * params[2] - y) ** 2
        loss = (weights * errors).mean() / of_all(weights.mean())
        return [x, y, weights], loss, params

    inputs, loss, params = steps(synk.ops.all_reduce)
    step = train.make_train_step(inputs, loss, params, rules.sgd, 0.1, options={"mode": MODE})
    inputs, loss, own = steps(lambda mean: mean)
    serial = theano.function(inputs, loss, updates=rules.sgd(loss, own, 0.1), mode=MODE)
    for x, y in minibatches("float64", ranks.n):
        if len(x) >= ranks.n:
            weights = np.arange(len(x)) ** 2 + 1.0
            np.testing.assert_allclose(step(x, y, weights), serial(x, y, weights), rtol=1e-9)
    for param, other in zip(params, own):
        for replica in synk.gather(param):
            np.testing.assert_allclose(replica, other.get_value(), rtol=1e-9)


@pytest.mark.usefixtures("compiled_if_thorough")
def test_two_steps_accumulate_slices(ranks):
    x, y = minibatches("float64", ranks.n)[1]
    after = []
    for num_slices in (1, 2):
        inputs, params, loss = model("float64")
        step = train.make_train_function(loss, params, *inputs, updates.sgd, 0.1)
        step(x, y, num_slices=num_slices)
        after.append([param.get_value() for param in params])
    for value, other in zip(*after):
        np.testing.assert_allclose(value, other, rtol=1e-12)


@pytest.mark.slow("compiles all operations for half precision")
def test_half_precision_does_not_divide_by_zero():
    for rule in (rules.adam, rules.adamax, rules.rmsprop):
        w = theano.shared(np.ones(2, "float16"), "w")
        theano.function([], updates=rule([T.constant(np.zeros(2, "float16"))], [w]))()
        assert w.get_value().tolist() == [1, 1]


@pytest.mark.usefixtures("quickly_compiled")
def test_warm_up_counts_calls_not_slices(ranks):
    inputs, params, loss = model("float64")
    rate = train.warm_up(0.1, 2, 4)
    step = train.make_train_step(inputs, loss, params, rules.sgd, rate, outputs=[(rate, None)])
    x, y = minibatches("float64", ranks.n)[0]
    found = [float(step(x, y, num_slices=n)[1]) for n in (1, 2, 1, 2, 1, 1)]
    np.testing.assert_allclose(found, [0.1, 0.125, 0.15, 0.175, 0.2, 0.2], rtol=1e-6)


def test_params_may_be_an_iterator():
    w = theano.shared(1.0, "w")
    assert len(train.parallel_updates(w**2, iter([w]), rules.sgd, 0.1)) == 1
    assert len(updates.sgd(w**2, iter([w]), 0.1)[1]) == 1


def test_unknown_hyperparameter():
    w = theano.shared(1.0)
    for rule in (updates.adam, rules.adam):
        with pytest.raises(TypeError, match="moment"):
            rule(w, [w], moment=3)


def test_rules_have_their_former_module_too():
    assert rules.__all__ == update_rules.__all__
    for name in rules.__all__:
        assert getattr(rules, name) is getattr(update_rules, name)
