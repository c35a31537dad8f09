"""Updaters: each changes the store's memory in place, as serial Theano changes a variable."""

import pickle
import threading
from functools import partial
from types import SimpleNamespace

import cloudpickle
import numpy as np
import pytest
import theano
import theano.tensor as T
from support.compiling import IN_PYTHON
from theano.tensor.raw_random import normal

from synkhronos import _host
from synkhronos import parameter_server as ps
from synkhronos.extensions import update_rules
from synkhronos.parameter_server.updaters import (
    Updater,
    as_updater,
    function_updater,
    rule_updater,
    theano_updater,
)

RULES = [
    (update_rules.sgd, {"learning_rate": 0.1}),
    (update_rules.momentum, {"learning_rate": 0.1}),
    (update_rules.nesterov_momentum, {"learning_rate": 0.1, "momentum": 0.5}),
    (update_rules.adagrad, {"learning_rate": 0.1}),
    (update_rules.rmsprop, {"learning_rate": 0.1}),
    (update_rules.adadelta, {}),
    (update_rules.adam, {}),
    (update_rules.adamax, {}),
]
NAMES = [rule.__name__ for rule, _ in RULES]

pytestmark = pytest.mark.usefixtures("quickly_compiled")


def gradients(shape, dtype="float32", rounds=3):
    random = np.random.RandomState(0)
    return [np.asarray(random.randn(*shape), dtype) for _ in range(rounds)]


def serially(rule, hyper, value, grads):
    """Return the weight after these gradients, as plain Theano computes it."""
    weight, gradient = theano.shared(value.copy()), T.TensorType(value.dtype, (False,) * value.ndim)
    gradient = gradient()
    step = theano.function([gradient], updates=rule([gradient], [weight], **hyper))
    for each in grads:
        step(each)
    return weight.get_value()


@pytest.mark.parametrize("rule, hyper", RULES, ids=NAMES)
def test_a_rule_does_what_serial_theano_does(rule, hyper):
    updater = rule_updater(rule, **hyper)
    updater.init_updater(0, {})
    for key, shape in ((0, (3, 2)), ("bias", (4,))):
        weight = np.ones(shape, "float32")
        updater.init_model(key, weight)
        grads = gradients(shape)
        for each in grads:
            updater.update(key, each)
        expected = serially(rule, hyper, np.ones(shape, "float32"), grads)
        np.testing.assert_array_equal(weight, expected)
        assert updater.weights[key] is weight


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0,), (1, 1)], ids=str)
def test_a_weight_of_any_shape_and_dtype(shape, dtype):
    updater = rule_updater(update_rules.adam, learning_rate=0.1)
    weight = np.ones(shape, dtype)
    updater.init_model(0, weight)
    for each in gradients(shape, dtype):
        updater.update(0, each)
    wide = "float32" if dtype == "float16" else dtype  # weights of float16 have a master copy
    grads = [each.astype(wide) for each in gradients(shape, dtype)]
    expected = serially(update_rules.adam, {"learning_rate": 0.1}, np.ones(shape, wide), grads)
    np.testing.assert_array_equal(weight, expected.astype(dtype))


def test_a_flat_gradient_is_that_of_the_weight():
    """Servers keep flat parts; a store of one process reduces into memory of any shape."""
    updater, weight = rule_updater(update_rules.sgd, learning_rate=1), np.zeros((2, 3))
    updater.init_model(0, weight)
    updater.update(0, np.arange(6.0))
    np.testing.assert_array_equal(weight, -np.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize("mode", ["FAST_RUN", "FAST_COMPILE"])
def test_the_memory_of_the_store_is_the_value_of_the_variable(mode, monkeypatch):
    """Optimized functions change it in place; what others return is copied there."""
    kept, compile_function = [], _host.compile_function
    chosen = IN_PYTHON if mode == "FAST_RUN" else mode

    def compiled(*args, **kwargs):
        kept.append(compile_function(*args, mode=chosen, **kwargs))
        return kept[-1]

    monkeypatch.setattr(_host, "compile_function", compiled)
    memory = np.zeros(8)
    weight = memory[2:6]
    updater = rule_updater(update_rules.sgd, learning_rate=1.0)
    updater.init_model(0, weight)
    for _ in range(2):
        updater.update(0, np.ones(4))
    np.testing.assert_array_equal(memory, [0, 0, -2, -2, -2, -2, 0, 0])
    [variable] = _host.updated_variables(kept[0])
    assert np.shares_memory(_host.peek(variable), memory)
    kept[0](np.ones(4))  # without the updater, which would copy
    assert memory[2] == (-3 if mode == "FAST_RUN" else -2)


def count_of_compiled(monkeypatch):
    compiled, compile_function = [], _host.compile_function

    def counted(*args, **kwargs):
        compiled.append(compile_function(*args, **kwargs))
        return compiled[-1]

    monkeypatch.setattr(_host, "compile_function", counted)
    return compiled


@pytest.mark.parametrize("mode", ["FAST_RUN", "FAST_COMPILE"])
@pytest.mark.parametrize("rule, hyper", RULES, ids=NAMES)
def test_keys_share_a_function_and_no_state(rule, hyper, mode, monkeypatch):
    if mode == "FAST_RUN":
        monkeypatch.setattr(
            _host, "compile_function", partial(_host.compile_function, mode=IN_PYTHON)
        )
    compiled = count_of_compiled(monkeypatch)
    updater, size = rule_updater(rule, **hyper), 3
    weights = {key: np.full(size, 1.0 + number) for number, key in enumerate("abc")}
    weights["longer"] = np.ones(5)
    weights["single"] = np.ones(3, "float32")
    for key, weight in weights.items():
        updater.init_model(key, weight)
    assert len(compiled) == 2  # one for each dtype
    rounds = [("a", 0), ("b", 0), ("a", 1), ("longer", 0), ("c", 0), ("c", 1), ("single", 0)]
    rounds += [("b", 1), ("longer", 1), ("a", 2), ("single", 1)]
    grads = {key: gradients(w.shape, w.dtype, rounds=3) for key, w in weights.items()}
    for key, number in rounds:
        updater.update(key, grads[key][number])
    for number, (key, weight) in enumerate(weights.items()):
        begun = np.full(weight.shape, 1.0 + number if key in "abc" else 1, weight.dtype)
        used = [grads[each][at] for each, at in rounds if each == key]
        np.testing.assert_allclose(weight, serially(rule, hyper, begun, used), rtol=1e-6)
    states = updater.states()
    other = pickle.loads(updater.pickled())
    for key, weight in weights.items():
        other.init_model(key, weight.copy())
    other.set_states(states)
    for key, state in other.states().items():
        for name, value in state.items():
            np.testing.assert_array_equal(value, states[key][name])


def test_a_state_may_be_a_random_state():
    def rule(grads, params):
        updates = []
        for param, grad in zip(params, grads):
            state = theano.shared(np.random.RandomState(3), "state")
            new, noise = normal(state, (2,), 0.0, 1.0)
            updates += [(state, new), (param, param + T.cast(noise, param.dtype) - 0 * grad)]
        return updates

    updater, weights = rule_updater(rule), [np.zeros(2), np.zeros(2)]
    for key, weight in enumerate(weights):
        updater.init_model(key, weight)
    for key in (0, 1, 1, 0):
        updater.update(key, np.zeros(2))
    expected = np.random.RandomState(3).normal(size=(2, 2)).sum(0)
    np.testing.assert_allclose(weights, [expected] * 2)
    with pytest.raises(TypeError, match=r"the state state of type .* can't be saved"):
        updater.states()


def test_rules_that_look_at_the_parameter_get_functions_of_their_own(monkeypatch):
    compiled = count_of_compiled(monkeypatch)

    def rule(grads, params):
        return [(p, p - g / p.get_value(borrow=True).size) for p, g in zip(params, grads)]

    updater, weights = rule_updater(rule), [np.zeros(2), np.zeros(4), np.zeros(4)]
    for key, weight in enumerate(weights):
        updater.init_model(key, weight)
    for key, weight in enumerate(weights):
        updater.update(key, np.ones_like(weight))
    assert [weight[0] for weight in weights] == [-0.5, -0.25, -0.25]
    assert len(compiled) == 2


def test_functions_that_keep_their_memory_are_not_shared(monkeypatch):
    compiled = count_of_compiled(monkeypatch)
    linker = theano.gof.vm.VM_Linker(allow_gc=False, use_cloop=False, c_thunks=False)
    mode = theano.Mode(linker, "fast_compile")
    monkeypatch.setattr(_host, "compile_function", partial(_host.compile_function, mode=mode))
    updater = rule_updater(update_rules.momentum, learning_rate=1.0)
    weights = [np.zeros(2), np.zeros(2)]
    for key, weight in enumerate(weights):
        updater.init_model(key, weight)
    for key in (0, 1, 0):
        updater.update(key, np.ones(2))
    np.testing.assert_allclose(weights, [[-2.9] * 2, [-1.0] * 2])
    assert len(compiled) == 2


def test_the_gradient_is_left_as_it_is():
    updater, gradient = rule_updater(update_rules.adam), np.ones(3)
    updater.init_model(0, np.zeros(3))
    gradient.flags.writeable = False
    updater.update(0, gradient)
    np.testing.assert_array_equal(gradient, 1)


def test_a_hyperparameter_may_be_a_shared_variable():
    rate = theano.shared(1.0, "rate")
    updater, weight = rule_updater(update_rules.sgd, learning_rate=rate), np.zeros(1)
    updater.init_model(0, weight)
    updater.update(0, np.ones(1))
    rate.set_value(0.5)
    assert updater.hyper_values() == {"learning_rate": 0.5}
    updater.update(0, np.ones(1))  # a store assigns it from a round on
    updater.assign_hyper(updater.hyper_values())
    updater.update(0, np.ones(1))
    assert weight[0] == -2.5


def own_rule(grads, params, decay):
    return [(p, p * decay - g) for p, g in zip(params, grads)]


def test_a_rule_of_ones_own():
    updater, weight = rule_updater(own_rule, decay=0.5), np.ones(2)
    updater.init_model(0, weight)
    updater.update(0, np.ones(2))
    np.testing.assert_array_equal(weight, -0.5)
    assert updater.states() == {0: {}}


def test_a_rule_of_lasagne():
    lasagne = pytest.importorskip("lasagne")
    hyper = {"learning_rate": 0.1, "momentum": 0.5}
    updater, weight = rule_updater(lasagne.updates.nesterov_momentum, **hyper), np.ones((2, 3))
    updater.init_model(0, weight)
    grads = gradients((2, 3), "float64")
    for each in grads:
        updater.update(0, each)
    expected = serially(lasagne.updates.nesterov_momentum, hyper, np.ones((2, 3)), grads)
    np.testing.assert_array_equal(weight, expected)


@pytest.mark.parametrize(
    "rule, hyper, error, said",
    [
        ("sgd", {}, TypeError, "update_rules.sgd, .* got 'sgd'"),
        (update_rules.sgd, {}, TypeError, "sgd can't be used as a rule: .*learning_rate"),
        (update_rules.adam, {"rate": 1}, TypeError, "adam can't be used as a rule: .*'rate'"),
        (update_rules.sgd, {"learning_rate": "big"}, TypeError, "numbers or scalar"),
        (lambda grads, params: None, {}, TypeError, "must be pairs"),
        (lambda grads, params: [], {}, ValueError, "do not have the parameter"),
    ],
    ids=range(6),
)
def test_what_is_no_rule_is_refused_before_it_is_sent(rule, hyper, error, said):
    with pytest.raises(error, match=said):
        rule_updater(rule, **hyper)


def descend(key, gradient, weight):
    weight -= 0.1 * gradient


def test_a_function_changes_the_weight():
    seen = []

    def step(key, gradient, weight):
        seen.append(key)
        descend(key, gradient, weight)

    updater, weights = function_updater(step), {0: np.ones(2), "b": np.zeros(1)}
    for key, weight in weights.items():
        updater.init_model(key, weight)
    updater.update("b", np.ones(1))
    updater.update(0, np.ones(2))
    assert seen == ["b", 0]
    np.testing.assert_array_equal(weights[0], 0.9)
    np.testing.assert_array_equal(weights["b"], -0.1)


def test_a_function_that_returns_the_weight_is_told_to_change_it():
    updater = function_updater(lambda key, gradient, weight: weight - gradient)
    updater.init_model("w", np.ones(2))
    with pytest.raises(TypeError, match=r"in place and return None, .* for key 'w'"):
        updater.update("w", np.ones(2))
    with pytest.raises(TypeError, match="must be a callable"):
        function_updater(3)


def theano_step(shape=(2, 3), dtype="float64"):
    gradient = T.TensorType(dtype, (False,) * len(shape))("gradient")
    weight = theano.shared(np.ones(shape, dtype), "weight")
    velocity = theano.shared(np.zeros(shape, dtype), "velocity")
    new = 0.5 * velocity - gradient
    updates = [(velocity, new), (weight, weight + new)]
    return theano.function([gradient], updates=updates), weight


def test_a_theano_function_updates_the_memory_of_the_store():
    step, variable = theano_step()
    updater, weight = theano_updater({"w": step}, {"w": variable}), np.zeros(6)
    updater.init_model("w", weight)
    np.testing.assert_array_equal(weight, 1)
    look = theano.function([], variable.sum())
    for each in (0, -1.5):
        updater.update("w", np.ones(6))
        np.testing.assert_array_equal(weight, each)
        assert look() == 6 * each
    assert updater.states()["w"]["0 velocity"].tolist() == [[-1.5] * 3] * 2


def test_a_value_that_the_script_sets_is_kept():
    step, variable = theano_step((2,))
    updater, weight = theano_updater({0: step}, {0: variable}), np.zeros(2)
    updater.init_model(0, weight)
    variable.set_value(np.array([5.0, 6.0]))
    updater.update(0, np.ones(2))
    np.testing.assert_array_equal(weight, [4, 5])
    np.testing.assert_array_equal(variable.get_value(), [4, 5])


def test_theano_functions_that_do_not_fit_are_refused():
    step, weight = theano_step()
    other, x = theano.shared(np.ones(2), "other"), T.dvector()
    for functions, weights, error, said in [
        (step, {0: weight}, TypeError, "functions must be a dict"),
        ({0: step}, [weight], TypeError, "weights must be a dict"),
        ({0: step}, {1: weight}, ValueError, "keys of functions, 0, got 1"),
        ({0: len}, {0: weight}, TypeError, r"functions\[0\] must be a compiled Theano function"),
        ({0: step}, {0: np.ones(2)}, TypeError, r"weights\[0\] must be a shared variable"),
        ({0: step}, {0: theano.shared([1])}, TypeError, "must hold an array on the host"),
        ({0: step}, {0: other}, ValueError, r"must update weights\[0\], other, but updates"),
        (
            {0: theano.function([], updates=[(other, other + 1)])},
            {0: other},
            ValueError,
            "must have one input, the gradient, but has 0",
        ),
        (
            {0: theano.function([x, x.type()], updates=[(other, x)], on_unused_input="ignore")},
            {0: other},
            ValueError,
            "has 2",
        ),
    ]:
        with pytest.raises(error, match=said):
            theano_updater(functions, weights)
    updater = theano_updater({0: step}, {0: weight})
    with pytest.raises(ValueError, match="no function for key 1, only for 0"):
        updater.init_model(1, np.zeros(6))
    with pytest.raises(ValueError, match="has 3 items of float64 here, but weight has 6"):
        updater.init_model(0, np.zeros(3))
    with pytest.raises(ValueError, match="of float32 here"):
        updater.init_model(0, np.zeros(6, "float32"))


def test_a_value_that_the_key_was_given_is_that_of_the_variable_too():
    step, variable = theano_step((2,))
    updater, weight = theano_updater({0: step}, {0: variable}), np.array([5.0, 6.0])
    updater.adopt(0, weight)
    np.testing.assert_array_equal(variable.get_value(), [5, 6])
    updater.update(0, np.ones(2))
    np.testing.assert_array_equal(weight, [4, 5])


class Counter(Updater):
    """An updater of a user, without a call of the base class's constructor."""

    def __init__(self, step):
        self.step, self.calls = step, 0

    def update(self, key, gradient):
        self.calls += 1
        self.weights[key] += self.step * gradient


def test_an_updater_of_ones_own():
    updater, weight = Counter(2), np.zeros(3)
    updater.init_updater(1, {"update_on_server": "1"})
    updater.init_model("w", weight)
    updater.update("w", np.ones(3))
    np.testing.assert_array_equal(weight, 2)
    assert (updater.rank, updater.parameters) == (1, {"update_on_server": "1"})
    assert updater.calls == 1 and updater.kind == "Counter"
    with pytest.raises(NotImplementedError, match="Updater must define update"):
        Updater().update(0, np.ones(1))


def test_what_an_updater_may_be():
    updater = Counter(1)
    assert as_updater(updater) is updater
    assert as_updater(descend).kind == "function descend"
    for wrong, said in [
        (Counter, r"got the class: write Counter\(\)"),
        (theano_step()[0], r"write theano_updater\({key: function}"),
        ("sgd", "a function .key, gradient, weight., got 'sgd'"),
    ]:
        with pytest.raises(TypeError, match=said):
            as_updater(wrong)


def test_an_updater_that_can_not_be_sent_says_so():
    updater = Counter(threading.Lock())
    with ps.create("local") as store:
        store._link = SimpleNamespace(set_updater=None)  # of a store of several processes
        with pytest.raises(TypeError, match=r"Counter can't be sent to .*: .*lock.*init_updater"):
            store.set_updater(updater)
        store._link = None
    assert isinstance(pickle.loads(rule_updater(update_rules.adam).pickled()), Updater)


def test_initial_weights():
    updater, weight = Counter(1), np.zeros(4)
    assert updater.starting_from(lambda key, weight: weight.fill(3)) is updater
    updater.init_model("w", weight)
    np.testing.assert_array_equal(weight, 3)
    given = np.ones(2)
    updater.adopt("b", given)
    np.testing.assert_array_equal(given, 1)
    assert updater.weights["b"] is given
    with pytest.raises(TypeError, match="fill must be a function"):
        updater.starting_from(3)


def test_random_weights_are_the_same_for_all_and_differ_between_parts():
    """Each device of mshadow-ps filled the weight anew, so they could start from different ones."""

    def drawn(key, rank, seed=0):
        updater = Updater()
        updater.init_updater(rank, {})
        return updater.random_state(key, seed).normal(size=4).tolist()

    assert drawn("w", 0) == drawn("w", 0)
    different = [drawn("w", 0), drawn("b", 0), drawn("w", 1), drawn("w", 0, 1), drawn(0, 0)]
    assert len({tuple(each) for each in different}) == 5


def made():
    step, weight = theano_step((3,))
    return {
        "rule": rule_updater(update_rules.momentum, learning_rate=0.5),
        "own rule": rule_updater(lambda grads, params: own_rule(grads, params, 0.5)),
        "function": function_updater(lambda key, gradient, weight: descend(key, gradient, weight)),
        "theano": theano_updater({0: step}, {0: weight}),
        "own": Counter(2).starting_from(lambda key, weight: weight.fill(1)),
    }


@pytest.mark.parametrize("name", ["rule", "own rule", "function", "theano", "own"])
def test_an_updater_travels_by_what_made_it(name):
    updater = made()[name]
    copies = [updater, pickle.loads(cloudpickle.dumps(updater))]
    used = cloudpickle.loads(cloudpickle.dumps(copies[1]))
    # In a process of its own it begins anew, whatever this one has seen.
    used.init_updater(3, {"a": "b"})
    used.init_model(0, np.zeros(3))
    used.update(0, np.ones(3))
    if name != "theano":  # its variable goes with it
        copies.append(cloudpickle.loads(cloudpickle.dumps(used)))
        assert (copies[2].weights, copies[2].parameters, copies[2].rank) == ({}, {}, 0)
    results = []
    for each in copies:
        weight = np.zeros(3)
        each.init_updater(0, {})
        each.init_model(0, weight)
        for gradient in gradients((3,), "float64"):
            each.update(0, gradient)
        results.append(weight.tolist())
    assert results[1:] == results[:1] * (len(copies) - 1)


@pytest.mark.parametrize("rule, hyper", RULES, ids=NAMES)
def test_training_goes_on_with_the_states(rule, hyper):
    grads = gradients((3, 2), rounds=4)
    whole, half = rule_updater(rule, **hyper), rule_updater(rule, **hyper)
    weights = np.ones((2, 3, 2), "float32")
    for updater, weight in zip((whole, half), weights):
        updater.init_model("w", weight)
        for each in grads[:2]:
            updater.update("w", each)
    resumed, weight = rule_updater(rule, **hyper), np.zeros((3, 2), "float32")
    resumed.init_model("w", weight)
    resumed.update("w", grads[3])  # to be forgotten
    weight[...] = weights[1]
    resumed.set_states(half.states())
    half.update("w", grads[0])  # what was returned is a copy
    for updater in (whole, resumed):
        updater.update("w", grads[2])
        updater.update("w", grads[3])
    np.testing.assert_array_equal(weight, weights[0])


def test_states_that_do_not_fit_are_refused_and_change_nothing():
    updater, weight = rule_updater(update_rules.momentum, learning_rate=1), np.zeros(2)
    updater.init_model("w", weight)
    updater.update("w", np.ones(2))
    name = "0 w_velocity"
    before = updater.states()["w"][name].tolist()
    for states, said in [
        ({}, "of the keys none, but this updater has 'w'"),
        ({"v": {}}, "of the keys 'v'"),
        ({"w": {}}, f"the state of key 'w' has none, but this updater keeps '{name}'"),
        ({"w": {name: np.zeros(3)}}, r"has shape \(3,\) and dtype float64, but must have \(2,\)"),
        ({"w": {name: np.zeros(2, "float32")}}, "float32, but must have .* float64"),
    ]:
        with pytest.raises(ValueError, match=said):
            updater.set_states(states)
        assert updater.states()["w"][name].tolist() == before
    with pytest.raises(ValueError, match="Counter keeps no states, but got those of the keys 'w'"):
        Counter(1).set_states(updater.states())
    Counter(1).set_states({})
