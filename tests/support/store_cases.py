"""What users of stores reported, each case with the right numbers by NumPy: run as a script, too.

``case(store)`` makes its keys, pushes and pulls as a worker does, and returns arrays. ``right(n)``
returns what they must be, with n workers in dist_sync.
"""

import sys

import numpy as np
import theano
import theano.tensor as T

from synkhronos import parameter_server as ps
from synkhronos.extensions import train, update_rules
from synkhronos.rules.easgd import Center

CASES = {}
MANY = 20_011  # elements: divided over servers


class Case:
    """A case: the address of its report, what it does, and what is right."""

    def __init__(self, report, right):
        self.report, self.right = report, right

    def __call__(self, function):
        self.run = function
        CASES[function.__name__] = self
        return function


def grads(number, shape, rank=0):
    """Return the gradient of a worker in a round."""
    return np.random.RandomState([number, rank]).randn(*shape).astype("f4")


def summed(number, shape, n):
    return sum(grads(number, shape, rank) for rank in range(n))


def steps(store, key, shape, n_rounds, before=lambda number: None):
    """Push and pull in rounds; return the last weight."""
    out = np.empty(shape, "f4")
    for number in range(n_rounds):
        before(number)
        store.pushpull(key, grads(number, shape, store.rank), out).wait(60)
    return out


MXNET = "https://github.com/apache/mxnet/issues/"


@Case(MXNET + "15919", lambda n: [np.full(3, -1.1 * n)])
def a_rate_that_is_set(store):
    store.set_optimizer(update_rules.sgd, learning_rate=1.0)
    store.init("w", np.zeros(3, "f4"))
    for rate in (1.0, 0.1):
        store.set_hyper(learning_rate=rate)
        store.push("w", np.ones(3, "f4"))
    return [store.pull("w").wait(60)]


@Case(MXNET + "8907", lambda n: [np.full(3, -1.1 * n)])
def a_rate_in_a_shared_variable(store):
    rate = theano.shared(np.float32(1))
    store.set_optimizer(update_rules.sgd, learning_rate=rate)
    store.init("w", np.zeros(3, "f4"))
    for value in (1.0, 0.1):
        rate.set_value(np.float32(value))
        store.push("w", np.ones(3, "f4"))
    return [store.pull("w").wait(60)]


class Descends(ps.Updater):
    """Has its rate as an attribute."""

    is_elementwise = True

    def __init__(self):
        self.rate, self.numbers = 1.0, {}

    def update(self, key, gradient):
        self.numbers[key] = self.numbers.get(key, 0) + 1
        self.weights[key] -= np.float32(self.rate) * gradient


@Case(MXNET + "8907", lambda n: [np.full(MANY, -1.1 * n)])
def a_rate_in_an_attribute(store):
    updater = Descends()
    store.set_updater(updater)
    store.init("w", np.zeros(MANY, "f4"))
    for rate in (1.0, 0.1):
        updater.rate = rate
        store.push("w", np.ones(MANY, "f4"))
        if store.type == "local":  # where the updater is the script's own
            store.pull("w").wait(60)
    return [store.pull("w").wait(60)]


def descend(key, gradient, weight):
    weight -= np.float32(global_rate) * gradient


global_rate = 1.0


@Case(MXNET + "4091", lambda n: [np.full(3, -1.1 * n), np.full(3, -1.1 * n)])
def a_rate_outside_of_a_function(store):
    global global_rate
    global_rate = local_rate = 1.0

    def by_both(key, gradient, weight):
        if key == "a":
            descend(key, gradient, weight)
        else:
            weight -= np.float32(local_rate) * gradient

    store.set_updater(by_both)
    store.init(["a", "b"], [np.zeros(3, "f4")] * 2)
    for rate in (1.0, 0.1):
        global_rate = local_rate = rate
        store.push(["a", "b"], [np.ones(3, "f4")] * 2)
        if store.type == "local":
            store.pull(["a", "b"]).wait(60)
    return store.pull(["a", "b"]).wait(60)


def with_momentum(n, shape, rates):
    weight, velocity = np.zeros(shape, "f4"), np.zeros(shape, "f4")
    for number, rate in enumerate(rates):
        velocity = np.float32(0.9) * velocity - np.float32(rate) * summed(number, shape, n)
        weight = weight + velocity
    return weight


RATES = [0.1 * (1 - number / 20) ** 2 for number in range(20)]


@Case(
    "https://github.com/dmlc/gluon-cv/issues/540",
    lambda n: [with_momentum(n, (40, 60), RATES)],
)
def a_schedule_of_each_step(store):
    store.set_optimizer(update_rules.momentum, learning_rate=RATES[0], momentum=0.9)
    store.init("w", np.zeros((40, 60), "f4"))
    found = steps(store, "w", (40, 60), 20, lambda n: store.set_hyper(learning_rate=RATES[n]))
    return [found]


@Case(MXNET + "625", lambda n: [np.array([-1.0 * n * 4]), np.array([-(1 + 0.5) * n])])
def a_rate_counts_from_its_round_on_for_each_key(store):
    """Key b has fewer rounds than a, and none is late by one."""
    store.set_optimizer(update_rules.sgd, learning_rate=1.0)
    store.init(["a", "b"], [np.zeros(1, "f4")] * 2)
    one = np.ones(1, "f4")
    for _ in range(4):
        store.push("a", one)
    store.push("b", one)
    store.set_hyper(learning_rate=0.5)
    store.push("b", one)
    return store.pull(["a", "b"]).wait(60)


@Case(MXNET + "12713", lambda n: [np.full(3, -2.0 * n * (1 + 1 / 2 + 1 / 3))])
def a_schedule_in_the_updater_counts_rounds_and_not_devices(store):
    class Counts(ps.Updater):
        def __init__(self):
            self.n_updates = {}

        def update(self, key, gradient):
            self.n_updates[key] = self.n_updates.get(key, 0) + 1
            self.weights[key] -= gradient / np.float32(self.n_updates[key])

    store.set_updater(Counts())
    store.init("w", np.zeros(3, "f4"))
    for _ in range(3):
        store.push("w", [np.ones(3, "f4"), np.ones(3, "f4")])
    return [store.pull("w").wait(60)]


def constrained(grads, params, learning_rate):
    """Return SGD with columns of matrices scaled to a norm of at most 1."""
    [(param, new)] = update_rules.sgd(grads, params, learning_rate).items()
    if param.ndim > 1:
        norms = T.sqrt(T.sqr(new).sum(axis=0, keepdims=True))
        new = new / T.maximum(norms, 1)
    return {param: new}


def constrained_right(n, shape):
    weight = np.zeros(shape)
    for number in range(3):
        weight = weight - 0.5 * summed(number, shape, n)
        weight = weight / np.maximum(np.sqrt((weight**2).sum(axis=0, keepdims=True)), 1)
    return weight


@Case(
    "https://github.com/Lasagne/Lasagne/pull/135",
    lambda n: [constrained_right(n, (2, 3)), constrained_right(n, (50, 60))],
)
def a_norm_of_columns(store):
    store.set_optimizer(constrained, learning_rate=0.5)
    store.init([0, "large"], [np.zeros((2, 3), "f4"), np.zeros((50, 60), "f4")])
    return [steps(store, 0, (2, 3), 3), steps(store, "large", (50, 60), 3)]


def trusted(grads, params, learning_rate):
    """Return LARS without momentum: You, Gitman and Ginsburg, arXiv:1708.03888."""
    [grad], [param] = grads, params
    ratio = param.norm(2) / T.maximum(grad.norm(2), 1e-9)
    return {param: param - T.cast(learning_rate * ratio, param.dtype) * grad}


def trusted_right(n, shape):
    weight = np.ones(shape)
    for number in range(4):
        grad = summed(number, shape, n).astype("f8")
        ratio = np.sqrt((weight**2).sum() / (grad**2).sum())
        weight = weight - 0.1 * ratio * grad
    return weight


@Case("https://github.com/intel/ipex-llm/pull/2810", lambda n: [trusted_right(n, (3000,))])
def layer_wise_rates(store):
    store.set_optimizer(trusted, learning_rate=0.1)
    store.init("w", np.ones(3000, "f4"))
    return [steps(store, "w", (3000,), 4)]


def decaying(grads, params, learning_rate):
    """Return SGD that decays matrices only, as theanompi.lib.opt does."""
    [grad], [param] = grads, params
    decay = 0.5 if param.ndim > 1 else 0.0
    return {param: T.cast(param - learning_rate * (grad + decay * param), param.dtype)}


def decaying_right(n, shape, decay):
    weight = np.ones(shape)
    for number in range(3):
        weight = weight - 0.1 * (summed(number, shape, n) + decay * weight)
    return weight


@Case(
    MXNET + "9511",
    lambda n: [decaying_right(n, (50, 60), 0.5), decaying_right(n, (3000,), 0.0)],
)
def decay_of_matrices_only(store):
    store.set_optimizer(decaying, learning_rate=0.1)
    store.init(["W", "b"], [np.ones((50, 60), "f4"), np.ones(3000, "f4")])
    return [steps(store, "W", (50, 60), 3), steps(store, "b", (3000,), 3)]


@Case("https://github.com/bytedance/byteps/issues/247", lambda n: [[n * 10.0] * 2] * 6)
def memory_that_is_used_again(store):
    store.init("w", np.zeros(MANY, "f4"))
    memory, found = np.empty(MANY, "f4"), []
    for _ in range(6):
        memory[:] = 10
        store.push("w", [memory])
        memory[:] = -1
        pulled = store.pull("w").wait(60)
        found.append([pulled.min(), pulled.max()])
    return found


@Case("https://github.com/apache/mxnet/pull/8116", lambda n: [np.full(MANY, 55.0 * n)])
def pushes_one_after_another(store):
    memory = np.empty(MANY, "f4")
    store.set_updater(add)
    store.init("w", np.zeros(MANY, "f4"))
    for number in range(1, 11):
        memory[:] = number
        store.push("w", memory)
    return [store.pull("w").wait(60)]


def add(key, gradient, weight):
    weight += gradient


@Case(
    MXNET + "365",
    lambda n: [
        np.full((2, 3), 2),
        np.full((2, 3), 1.0 * n),
        np.full((2, 3), 4.0 * n),
        np.full((2, 3), 3.0 * n),
    ],
)
def the_tutorial_of_kvstore(store):
    ones, found = np.ones((2, 3), "f4"), []
    store.init(3, 2 * ones)
    found.append(store.pull(3).wait(60))
    for pushed in (ones, [ones] * 4):
        store.push(3, pushed)
        found.append(store.pull(3).wait(60))
    outs = [np.zeros((2, 3), "f4") for _ in range(2)]
    store.pushpull(3, [ones, 2 * ones], outs).wait(60)
    assert (outs[0] == outs[1]).all()
    return [*found, outs[1]]


def half_steps(n):
    weight = np.ones(4, "f4")
    for _ in range(50):
        weight = weight - np.float32(1e-4) * np.float32(np.float16(n))
    return [weight.astype("f2")]


@Case("https://github.com/apache/mxnet/pull/10183", half_steps)
def steps_of_float16_that_are_small(store):
    store.set_optimizer(update_rules.sgd, learning_rate=1e-4)
    store.init("w", np.ones(4, "f2"))
    for _ in range(50):
        store.push("w", np.ones(4, "f2"))
    return [store.pull("w").wait(60)]


@Case("https://github.com/horovod/horovod/issues/278", lambda n: [np.full(3, 40_000.0)])
def a_mean_of_float16_does_not_overflow(store):
    store.set_param("push_op[w]", "mean")
    store.init("w", np.zeros(3, "f2"))
    store.push("w", np.full(3, 40_000, "f2"))
    return [store.pull("w").wait(60)]


@Case("https://github.com/bytedance/byteps/pull/324", lambda n: [np.full(3, (n - 1) / 2)])
def a_mean_over_workers(store):
    store.set_param("push_op[w]", "mean")
    store.init("w", np.zeros(3))
    store.push("w", np.full(3, float(store.rank)))
    return [store.pull("w").wait(60)]


def by_name(grads, params, learning_rate):
    """Return SGD with a tenth of the rate for biases, which are known by their names."""
    [grad], [param] = grads, params
    rate = learning_rate * (0.1 if param.name.endswith("bias") else 1.0)
    return {param: T.cast(param - rate * grad, param.dtype)}


@Case(MXNET + "9511", lambda n: [np.full(2, -1.0 * n), np.full(2, -0.1 * n)])
def a_rate_by_the_name_of_a_key(store):
    store.set_optimizer(by_name, learning_rate=1.0)
    store.init(["fc_weight", "fc_bias"], [np.zeros(2, "f4")] * 2)
    store.push(["fc_weight", "fc_bias"], [np.ones(2, "f4")] * 2)
    return store.pull(["fc_weight", "fc_bias"]).wait(60)


@Case(MXNET + "6005", lambda n: [np.full(2, 5.0)])
def a_value_for_a_key_that_is_there(store):
    store.init("w", np.full(2, 5.0))
    try:
        store.init("w", np.zeros(2))
    except ValueError as error:
        assert "key 'w' is there already: push to it, or take another key" in str(error)
        return [store.pull("w").wait(60)]
    raise AssertionError("not refused")


def elastic(n):
    """Return the center and a worker's parameters; a round of dist_sync has the sum of workers."""
    center, own = np.zeros(2), np.full(2, 4.0)
    for _ in range(3):
        center, own = center + 0.25 * (n * own - center), own - 0.25 * (own - center)
    return [center, own]


@Case(MXNET + "1657", elastic)
def elastic_averaging(store):
    store.set_updater(Center(0.25))
    store.init("w", np.zeros(2))
    own = np.full(2, 4.0)
    for _ in range(3):
        center = store.pull("w").wait(60)
        store.push("w", own).wait(60)
        own = own - 0.25 * (own - center)
    return [store.pull("w").wait(60), own]


def adam_right(n, size):
    weight, m, v = np.ones(size), np.zeros(size), np.zeros(size)
    for t in range(1, 6):
        grad = summed(t - 1, (size,), n).astype("f8")
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
        rate = 0.01 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        weight = weight - rate * m / (np.sqrt(v) + 1e-8)
    return weight


@Case(MXNET + "13752", lambda n: [adam_right(n, 3), adam_right(n, MANY)])
def adam_counts_the_steps_of_each_key(store):
    store.set_optimizer(update_rules.adam, learning_rate=0.01)
    store.init(["small", "large"], [np.ones(3, "f4"), np.ones(MANY, "f4")])
    return [steps(store, "small", (3,), 5), steps(store, "large", (MANY,), 5)]


@Case(
    "https://github.com/horovod/horovod/issues/1271",
    lambda n: [np.full(5, n * (k + 1.0)) for k in range(4)],
)
def keys_in_another_order_on_each_worker(store):
    keys = ["a", "b", "c", "d"]
    order = keys[store.rank % 4 :] + keys[: store.rank % 4]
    for key in order:
        store.init(key, np.zeros(5))
    for key in reversed(order):
        store.push(key, np.full(5, keys.index(key) + 1.0))
    return [store.pull(key).wait(60) for key in keys]


@Case("https://github.com/bytedance/byteps/pull/285", lambda n: [np.full(MANY, 7.0)])
def the_value_of_worker_0(store):
    store.init("w", np.full(MANY, 7.0 + store.rank))
    return [store.pull("w").wait(60)]


@Case(
    "https://github.com/bytedance/byteps/issues/190",
    lambda n: [np.full(2, 1.0 * n), np.full(3, 2.0 * n)],
)
def a_number_and_a_text_as_keys(store):
    store.init([3, "3"], [np.zeros(2), np.zeros(3)])
    store.push([3, "3"], [np.ones(2), np.full(3, 2.0)])
    return [store.pull(3).wait(60), store.pull("3").wait(60)]


@Case(MXNET + "8290", lambda n: [np.arange(1001.0) * n, np.arange(999.0) * n])
def keys_at_the_bound_of_division(store):
    store.init(["over", "under"], [np.zeros(1001), np.zeros(999)])
    store.push(["over", "under"], [np.arange(1001.0), np.arange(999.0)], priority=3)
    return store.pull(["over", "under"]).wait(60)


@Case(MXNET + "7163", lambda n: [-0.5 * sum(summed(number, (4,), n) for number in range(4))])
def gradients_that_are_accumulated(store):
    store.set_optimizer(update_rules.sgd, learning_rate=0.5)
    store.init("w", np.zeros(4, "f4"))
    total = np.zeros(4, "f4")
    for number in range(4):
        total += grads(number, (4,), store.rank)
        if number % 2:
            store.push("w", total)
            total[:] = 0
    return [store.pull("w").wait(60)]


@Case("https://github.com/horovod/horovod/issues/832", lambda n: [np.full(3, -6.0)])
def workers_that_have_no_rows_left_push_zeros(store):
    store.set_optimizer(update_rules.sgd, learning_rate=1.0)
    store.init("w", np.zeros(3, "f4"))
    for number in range(3):
        has_rows = store.rank == 0
        store.push("w", np.full(3, (number + 1.0) * has_rows, "f4"))
    return [store.pull("w").wait(60)]


@Case(
    "https://github.com/apache/mxnet/pull/17007",
    lambda n: [np.full(2, 2.0 * n), np.full(2, 2.0 * n)],
)
def shared_variables_are_pushed_and_pulled(store):
    variable, value = theano.shared(np.full(2, 2.0), "w"), np.zeros(2)
    store.init("w", value)
    store.pushpull("w", variable).wait(60)
    store.pull("w", value).wait(60)
    return [variable.get_value(), value]


class Momentum(ps.Updater):
    """Keeps a velocity for each key, as updaters of MXNet's users do."""

    is_elementwise = True

    def __init__(self, rate):
        self.rate, self._velocities = rate, {}

    def init_model(self, key, weight):
        super().init_model(key, weight)
        self._velocities[key] = np.zeros_like(weight)

    def update(self, key, gradient):
        velocity = self._velocities[key]
        velocity *= np.float32(0.9)
        velocity -= np.float32(self.rate) * gradient
        self.weights[key] += velocity


@Case(MXNET + "4090", lambda n: [with_momentum(n, (30, 50), [0.1] * 3 + [0.01] * 3)])
def an_updater_with_velocities_and_a_rate_that_is_set(store):
    store.set_updater(Momentum(0.1))
    store.init("w", np.zeros((30, 50), "f4"))
    set_rate = lambda number: store.set_hyper(rate=0.01) if number == 3 else None  # noqa: E731
    return [steps(store, "w", (30, 50), 6, set_rate)]


@Case(MXNET + "10699", lambda n: [np.full(2, 1.0 * n)])
def what_is_not_there_says_what_to_write(store):
    store.init("w", np.zeros(2))
    said = {
        "set_gradient_compression": "push arrays of float16",
        "row_sparse_pull": "no sparse arrays",
        "_set_updater": "set_updater",
    }
    for name, words in said.items():
        try:
            getattr(store, name)
        except AttributeError as error:
            assert words in str(error), error
        else:
            raise AssertionError(name)
    store.push("w", np.ones(2))
    return [store.pull("w").wait(60)]


@Case(MXNET + "11855", lambda n: [np.full(2, -0.25 * n)])
def hyperparameters_that_are_not_there(store):
    try:
        store.set_hyper(learning_rate=1.0)
    except ps.OutOfTurn as error:
        assert "call set_optimizer() first" in str(error)
    store.set_optimizer(update_rules.sgd, learning_rate=0.25)
    store.init("w", np.zeros(2, "f4"))
    for wrong, error in [({"lr": 0.1}, ValueError), ({"learning_rate": "fast"}, TypeError)]:
        try:
            store.set_hyper(**wrong)
        except error as caught:
            assert "learning_rate" in str(caught)
        else:
            raise AssertionError(wrong)
    store.push("w", np.ones(2, "f4"))
    return [store.pull("w").wait(60)]


def stepped(n):
    weight = 0.0
    for rate in (1.0, 1.0, 0.1, 0.1):
        weight = weight - rate * (weight - 4.0) * 2
    return [np.array(weight)]


@Case("https://github.com/horovod/horovod/issues/1921", stepped)
def a_training_step_with_an_updater_follows_its_rate(store):
    """Two calls at 1.0 and two at 0.1."""
    x, w = T.dvector("x"), theano.shared(0.0, "w")
    rate = theano.shared(1.0)
    store.set_optimizer(update_rules.sgd, learning_rate=rate)
    if store.type == "local":
        store.init([0])
    rows = 2 * store.num_workers
    step = train.make_train_step(
        [x], ((w - x) ** 2).mean(), [w], None, store=store, batch_rows=rows
    )
    for value in (1.0, 1.0, 0.1, 0.1):
        rate.set_value(value)
        step([3.0, 5.0])
    step.finish()
    return [w.get_value()]


@Case(
    "https://github.com/horovod/horovod/issues/936",
    lambda n: [with_momentum(n, (30, 50), [0.1] * 6)],
)
def states_that_are_saved_and_read_again(store):
    store.set_optimizer(update_rules.momentum, learning_rate=0.1, momentum=0.9)
    store.init("w", np.zeros((30, 50), "f4"))
    steps(store, "w", (30, 50), 3)
    path = f"states_{store.rank}.npz"
    store.save_optimizer_states(path)
    store.barrier(60)
    store.load_optimizer_states(path)
    store.barrier(60)
    out = np.empty((30, 50), "f4")
    for number in range(3, 6):
        store.pushpull("w", grads(number, (30, 50), store.rank), out).wait(60)
    return [out]


def named(grads, params, learning_rate):
    """Return SGD; what is called a weight has a norm of at most 1."""
    [(param, new)] = update_rules.sgd(grads, params, learning_rate).items()
    return {param: new / T.maximum(new.norm(2), 1) if param.name.endswith("W") else new}


def of_norm_1(n, size):
    total = -summed(0, (size,), n)
    return total / np.sqrt((total**2).sum())


@Case(
    "https://github.com/Lasagne/Lasagne/pull/135",
    lambda n: [of_norm_1(n, 3000), -summed(0, (3000,), n)],
)
def a_norm_by_the_name_of_a_key(store):
    store.set_optimizer(named, learning_rate=1.0)
    store.init(["fc_W", "fc_b"], [np.zeros(3000, "f4")] * 2)
    return [steps(store, "fc_W", (3000,), 1), steps(store, "fc_b", (3000,), 1)]


@Case(MXNET + "9511", lambda n: [np.full((2, 2), 0.5), np.full(2, 1.0)])
def a_decay_of_matrices_in_a_shared_variable(store):
    decay = theano.shared(np.float32(0))

    def rule(grads, params, learning_rate):
        [grad], [param] = grads, params
        shrunk = decay * param if param.ndim > 1 else 0
        return {param: T.cast(param - learning_rate * (grad + shrunk), param.dtype)}

    store.set_optimizer(rule, learning_rate=1.0)
    store.init(["W", "b"], [np.ones((2, 2), "f4"), np.ones(2, "f4")])
    decay.set_value(np.float32(0.5))
    store.push(["W", "b"], [np.zeros((2, 2), "f4"), np.zeros(2, "f4")])
    return store.pull(["W", "b"]).wait(60)


@Case("https://github.com/apache/mxnet/pull/4124", lambda n: [np.full(3, -1.1 * n)])
def a_whole_number_and_then_a_fraction(store):
    store.set_optimizer(update_rules.sgd, learning_rate=2)
    store.init("w", np.zeros(3, "f4"))
    for rate in (1, np.array(0.1, "f4")):
        store.set_hyper(learning_rate=rate)
        store.push("w", np.ones(3, "f4"))
    return [store.pull("w").wait(60)]


def may_speed_up(grads, params, learning_rate, momentum=0.0):
    """Return a rule that has velocities only with momentum, as many have."""
    updates = update_rules.sgd(grads, params, learning_rate)
    return update_rules.apply_momentum(updates, params, momentum) if momentum else updates


@Case(MXNET + "13752", lambda n: [np.full(2, -3.5 * n), np.full(2, -35.0 * n)])
def momentum_that_begins_later(store):
    store.set_optimizer(may_speed_up, learning_rate=1.0)
    store.init(["a", "b"], [np.zeros(2, "f4")] * 2)
    pushed = [np.ones(2, "f4"), np.full(2, 10, "f4")]
    store.push(["a", "b"], pushed)
    store.set_hyper(momentum=0.5)
    for _ in range(2):
        store.push(["a", "b"], pushed)
    return store.pull(["a", "b"]).wait(60)


@Case(
    "https://github.com/apache/mxnet/pull/7494", lambda n: [with_momentum(n, (3,), [1, 0.1, 0.1])]
)
def states_that_are_saved_after_the_rate_was_set(store):
    store.set_optimizer(update_rules.momentum, learning_rate=1.0, momentum=0.9)
    store.init("w", np.zeros(3, "f4"))
    set_rate = lambda number: store.set_hyper(learning_rate=0.1) if number else None  # noqa: E731
    steps(store, "w", (3,), 2, set_rate)
    path = f"states_{store.rank}.npz"
    store.save_optimizer_states(path)
    store.barrier(60)
    store.load_optimizer_states(path)
    store.barrier(60)
    out = np.empty(3, "f4")
    store.pushpull("w", grads(2, (3,), store.rank), out).wait(60)
    return [out]


deep_rate = 1.0


def scaled(gradient):
    return np.float32(deep_rate) * gradient


@Case(MXNET + "4091", lambda n: [np.full(3, -1.1 * n)])
def a_rate_in_a_function_that_the_function_calls(store):
    global deep_rate
    deep_rate = 1.0

    def by_another(key, gradient, weight):
        weight -= scaled(gradient)

    store.set_updater(by_another)
    store.init("w", np.zeros(3, "f4"))
    for deep_rate in (1.0, 0.1):  # noqa: B007
        store.push("w", np.ones(3, "f4"))
        if store.type == "local":
            store.pull("w").wait(60)
    return [store.pull("w").wait(60)]


@Case("https://github.com/apache/mxnet/pull/10183", lambda n: [np.full(3, 5.0)])
def states_of_float16_leave_the_weights_alone(store):
    store.set_optimizer(update_rules.momentum, learning_rate=1.0, momentum=0.0)
    store.init("w", np.ones(3, "f2"))
    store.pull("w").wait(60)
    path = f"states_{store.rank}.npz"
    store.save_optimizer_states(path)
    store.barrier(60)
    store.push("w", np.full(3, -4 if store.rank == 0 else 0, "f2"))
    store.pull("w").wait(60)
    store.barrier(60)
    store.load_optimizer_states(path)
    store.barrier(60)
    store.push("w", np.zeros(3, "f2"))
    return [store.pull("w").wait(60)]


def main(name, kind):
    """Run a case as a worker; leave its arrays in a file."""
    with ps.create(kind) as store:
        found = CASES[name].run(store)
        np.savez(f"found_{store.rank}.npz", **{f"{i:02}": each for i, each in enumerate(found)})


if __name__ == "__main__":
    main(*sys.argv[1:])
