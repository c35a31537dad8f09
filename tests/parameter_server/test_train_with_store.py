"""Steps of training that push and pull in their graph, compared with serial Theano."""

import concurrent.futures
import copy
import pickle

import numpy as np
import pytest
import theano
import theano.tensor as T
from support import host_library, nodes
from theano.sandbox.rng_mrg import MRG_RandomStreams

from synkhronos import parameter_server as ps
from synkhronos.extensions import train, update_rules

pytestmark = pytest.mark.usefixtures("quickly_compiled")

ROWS = np.random.RandomState(1)
X, Y = ROWS.normal(size=(4, 9, 4)), ROWS.randint(0, 3, (4, 9)).astype("int32")
CUTS = [0, 2, 9]  # rows of device 0 and of device 1: unequally many


class Network:
    """A classifier of two layers; nothing in it knows of a store."""

    def __init__(self, dtype="float64"):
        random = np.random.RandomState(3)
        self.x, self.y, self.params = T.matrix("x", dtype), T.ivector("y"), []
        layer = self.x
        for number, shape in enumerate([(4, 5), (5, 3)]):
            w = theano.shared(random.normal(size=shape).astype(dtype), f"w{number}")
            b = theano.shared(np.zeros(shape[1], dtype), f"b{number}")
            self.params += [w, b]
            self.hidden, layer = layer, T.dot(layer, w) + b
            layer = T.nnet.sigmoid(layer) if number == 0 else layer
        self.inputs = [self.x, self.y]
        self.loss = T.nnet.categorical_crossentropy(T.nnet.softmax(layer), self.y).mean()

    def values(self):
        return [param.get_value() for param in self.params]


def on_devices(store, work, devices=(0, 1)):
    """Call ``work(device)`` in a thread for each device; return the results, or raise."""
    with concurrent.futures.ThreadPoolExecutor(len(devices)) as pool:
        calls = [pool.submit(work, device) for device in devices]
        concurrent.futures.wait(calls, return_when=concurrent.futures.FIRST_EXCEPTION)
        failed = [call for call in calls if call.done() and call.exception()]
        if failed:
            store.close(drain=False)  # or the other threads wait for ever
            raise failed[0].exception()
        return [call.result() for call in calls]


def rows_of(device, number):
    part = slice(CUTS[device], CUTS[device + 1])
    return X[number][part], Y[number][part]


def assert_equal(found, expected, tolerance=1e-12):
    for device in found:
        for value, other in zip(device, expected):
            np.testing.assert_allclose(value, other, rtol=tolerance, atol=tolerance)


def train_both(rule, between=lambda number, rate: None, max_norm=None, dtype="float64"):
    """Return the parameters of two devices, and of serial Theano with all rows."""
    network, rate = Network(dtype), theano.shared(np.asarray(0.1, dtype))
    grads = T.grad(network.loss, network.params)
    if max_norm is not None:
        grads = train.clip_by_global_norm(grads, max_norm)
    updates = rule(grads, network.params, rate)
    serial = theano.function(network.inputs, network.loss, updates=updates)
    for number in range(len(X)):
        serial(X[number].astype(dtype), Y[number])
        between(number, rate)

    def work(device):
        own, rate = Network(dtype), theano.shared(np.asarray(0.1, dtype))
        step = train.make_train_step(
            own.inputs, own.loss, own.params, rule, rate, store=store, devid=device,
            max_norm=max_norm,
        )  # fmt: skip
        for number in range(len(X)):
            x, y = rows_of(device, number)
            step(x.astype(dtype), y)
            between(number, rate)
        return own.values()

    with ps.create("local", devices=[0, 1]) as store:
        return on_devices(store, work), network.values()


@pytest.mark.parametrize("rule", [update_rules.sgd, update_rules.momentum, update_rules.adam])
def test_devices_with_unequally_many_rows_train_as_serial_theano(rule):
    found, expected = train_both(rule)
    assert_equal(found, expected)
    assert all(np.array_equal(one, other) for one, other in zip(*found))


def test_a_learning_rate_counts_from_the_call_after_it_was_set():
    def lower(number, rate):
        rate.set_value(0.1 / (number + 2))

    assert_equal(*train_both(update_rules.momentum, lower))


def test_a_rate_that_counts_calls_and_noise_are_those_of_the_call():
    def rule(grads, params, rate):
        rate = rate * train.warm_up(0.1, 4, 3)
        noise = MRG_RandomStreams(5)
        grads = [grad + 0.1 * noise.normal(grad.shape, nstreams=2) for grad in grads]
        return update_rules.momentum(grads, params, rate)

    assert_equal(*train_both(rule))


def test_the_norm_that_is_clipped_is_that_of_the_sum_over_devices():
    assert_equal(*train_both(update_rules.sgd, max_norm=0.05))


class Optimizer:
    """An object with settings of its own, as those of Keras."""

    def get_updates(self, loss, params):
        return [(param, param - 0.1 * T.grad(loss, param)) for param in params]


def test_an_object_that_makes_updates_from_a_loss(store):
    network = Network()
    step = train.make_train_step(
        network.inputs, network.loss, network.params, Optimizer(), store=store
    )
    expected = Network()
    updates = Optimizer().get_updates(expected.loss, expected.params)
    serial = theano.function(expected.inputs, expected.loss, updates=updates)
    for number in range(3):
        assert step(X[number], Y[number]) == pytest.approx(float(serial(X[number], Y[number])))
    assert_equal([network.values()], expected.values())


def test_half_precision_is_summed_in_single_precision():
    found, expected = train_both(update_rules.sgd, dtype="float16")
    assert_equal(found, expected, 2e-3)


def test_running_averages_are_weighted_by_rows():
    network = Network()

    def averages(network, mean):
        return [(mean, 0.5 * mean + 0.5 * network.hidden.mean(axis=0))]

    mean = theano.shared(np.zeros(5), "mean")
    updates = update_rules.sgd(network.loss + mean.sum() * 0, network.params, 0.1)
    serial = theano.function(
        network.inputs, network.loss, updates=[*updates.items(), *averages(network, mean)]
    )
    for number in range(len(X)):
        serial(X[number], Y[number])

    def work(device):
        own, mean = Network(), theano.shared(np.zeros(5), "mean")
        step = train.make_train_step(
            own.inputs, own.loss + mean.sum() * 0, own.params, update_rules.sgd, 0.1, store=store,
            devid=device, averages=averages(own, mean),
        )  # fmt: skip
        for number in range(len(X)):
            step(*rows_of(device, number))
        return [*own.values(), mean.get_value()]

    with ps.create("local", devices=[0, 1]) as store:
        found = on_devices(store, work)
    assert_equal(found, [*network.values(), mean.get_value()])


def test_a_store_with_an_updater_has_the_weights():
    network = Network()
    updates = update_rules.momentum(network.loss, network.params, 0.1)
    serial = theano.function(network.inputs, network.loss, updates=updates)
    losses = [serial(X[n], Y[n]) for n in range(len(X))]

    def work(device):
        own = Network()
        step = train.make_train_step(
            own.inputs, own.loss, own.params, None, store=store, devid=device, batch_rows=9
        )
        losses = [step(*rows_of(device, number)) for number in range(len(X))]
        values = own.values()
        with pytest.raises(RuntimeError, match="the store's updater has the weights"):
            own.params[0].set_value(values[0])
        return values, losses

    with ps.create("local") as store:
        store.set_optimizer(update_rules.momentum, learning_rate=0.1)
        store.init([0, 1])
        found = on_devices(store, work)
        assert store.keys == ["w0", "b0", "w1", "b1"]
    assert_equal([values for values, _ in found], network.values())
    (_, one), (_, other) = found
    weighted = [(2 * a + 7 * b) / 9 for a, b in zip(one, other)]
    assert weighted == pytest.approx([float(loss) for loss in losses], rel=1e-12)


def one_device(store, network=None, rule=update_rules.sgd, rate=0.1, **options):
    network = network or Network()
    step = train.make_train_step(
        network.inputs, network.loss, network.params, rule, rate, store=store, **options
    )
    return network, step


@pytest.fixture
def store():
    with ps.create("local", devices=[0]) as store:
        yield store


def test_a_function_that_reads_a_parameter_one_step_behind_is_refused(store):
    network, step = one_device(store)
    validate = theano.function(network.inputs, network.loss)
    step(X[0], Y[0])
    assert step.is_pending and "pending" in repr(step)
    with pytest.raises(
        (RuntimeError, TypeError, AttributeError),
        match=r"(?s)[wb]\d is one step behind: call finish\(\)",
    ):
        validate(X[0], Y[0])
    with pytest.raises(RuntimeError, match="w0 is one step behind"):
        np.asarray(network.params[0].container.storage[0])
    step.finish()
    assert not step.is_pending and "finished" in repr(step)
    loss = validate(X[0], Y[0])
    step.finish()  # nothing is left to do
    assert loss == validate(X[0], Y[0])


@pytest.mark.slow("compiles C code")
def test_compiled_code_that_reads_a_parameter_one_step_behind_is_refused(store):
    network, step = one_device(store)
    doubled = theano.function([], 2 * network.params[0], mode=theano.Mode("cvm", "fast_compile"))
    step(X[0], Y[0])
    # C code of PyTensor does not show the value that it was given.
    late = "w0 is one step behind: call finish"
    error = "expected an ndarray" if host_library.ON_PYTENSOR else late
    with pytest.raises((ValueError, TypeError), match=error):
        doubled()
    step.finish()
    assert np.array_equal(doubled(), 2 * network.values()[0])


@pytest.mark.parametrize("borrow", [False, True])
def test_reading_a_parameter_finishes_the_step(store, borrow):
    network, step = one_device(store)
    expected = Network()
    updates = update_rules.sgd(expected.loss, expected.params, 0.1)
    theano.function(expected.inputs, [], updates=updates, on_unused_input="ignore")(X[0], Y[0])
    step(X[0], Y[0])
    value = network.params[2].get_value(borrow=borrow)
    assert not step.is_pending
    np.testing.assert_allclose(value, expected.params[2].get_value(), rtol=1e-12)


def test_a_parameter_that_is_set_between_calls_counts_in_the_next_one(store):
    network, step = one_device(store, rule=update_rules.momentum)
    expected = Network()
    updates = update_rules.momentum(expected.loss, expected.params, 0.1)
    serial = theano.function(expected.inputs, expected.loss, updates=updates)
    for each, run in ((network, step), (expected, serial)):
        for number in range(3):
            run(X[number], Y[number])
            each.params[0].set_value(np.full((4, 5), 0.1 * number))
    assert_equal([network.values()], expected.values())


@pytest.mark.parametrize("look", [None, "finish", "read", "set another"])
def test_a_parameter_that_a_compiled_function_writes_counts_after_the_pending_update(store, look):
    """Functions of Theano tell nobody: the written value was lost without a word."""
    network, step = one_device(store, rule=update_rules.momentum)
    expected = Network()
    updates = update_rules.momentum(expected.loss, expected.params, 0.1)
    serial = theano.function(expected.inputs, expected.loss, updates=updates)
    best = np.full((4, 5), 0.25)
    for each, run in ((network, step), (expected, serial)):
        restore = theano.function([], updates=[(each.params[0], theano.shared(best))])
        for number in range(3):
            run(X[number], Y[number])
            restore()
            if each is network and look == "finish":
                step.finish()
            if look == "read":
                assert np.array_equal(each.params[0].get_value(), best)
            if look == "set another":
                each.params[1].set_value(np.zeros(5))
    assert np.array_equal(network.values()[0], best)
    assert_equal([network.values()], expected.values())


def test_a_compiled_function_that_writes_weights_of_the_servers_is_told():
    network = Network()
    with ps.create("local") as store:
        store.set_optimizer(update_rules.sgd, learning_rate=0.1)
        store.init([0])
        step = train.make_train_step(
            network.inputs, network.loss, network.params, None, store=store, batch_rows=9
        )
        zero = theano.function([], updates=[(network.params[1], theano.shared(np.zeros(5)))])
        for again in (step.finish, network.values, lambda: step(X[1], Y[1])):
            step(X[0], Y[0])
            with pytest.raises(RuntimeError, match="b0 has been set, but the store's updater has"):
                zero()  # where parallel() was used in this process, it tells itself
                again()
            assert step.is_pending
        step(X[0], Y[0])
        with pytest.raises(RuntimeError, match="b0 has been set, but the store's updater has"):
            network.params[1].set_value(np.zeros(5))
        assert step.is_pending and network.values()[1].any()


@pytest.mark.parametrize("way", ["pickle", "deepcopy", "copy", "function"])
def test_copies_and_pickles_of_a_pending_parameter_finish_the_step(store, way):
    network, step = one_device(store)
    doubled = theano.function([], 2 * network.params[0])
    step(X[0], Y[0])
    if way == "pickle":
        found = pickle.loads(pickle.dumps(network.params[0])).get_value()
    elif way == "deepcopy":
        found = copy.deepcopy(network.params[0]).get_value()
    elif way == "copy":
        found = copy.copy(network.params[0].container.storage[0])
    else:
        found = pickle.loads(pickle.dumps(doubled))() / 2
    assert not step.is_pending
    assert type(found) is np.ndarray and np.array_equal(found, network.values()[0])


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_step_is_not_pickled(store, duplicate):
    _, step = one_device(store)
    with pytest.raises(TypeError, match="can't be pickled or copied: it belongs to its store"):
        duplicate(step)


def test_another_step_that_reads_the_parameters_finishes_this_one(store):
    network, step = one_device(store)
    scale = theano.shared(2.0, "scale")
    other = train.make_train_step(
        network.inputs, (network.loss - scale) ** 2, [scale], update_rules.sgd, 0.1, store=store
    )
    step(X[0], Y[0])
    loss = other(X[1], Y[1])
    assert not step.is_pending and other.is_pending
    check = theano.function(network.inputs, (network.loss - 2.0) ** 2)
    assert loss == check(X[1], Y[1])
    step(X[2], Y[2])
    assert step.is_pending and other.is_pending
    scale.get_value()
    assert step.is_pending and not other.is_pending


def test_two_steps_with_the_same_keys_are_refused(store):
    one_device(store)
    with pytest.raises(ValueError, match=r"device 0 has \['w0', .* already: give each .* keys of"):
        one_device(store)
    network, step = one_device(store, keys=["a", "b", "c", "d"])
    assert step.keys == ["a", "b", "c", "d"]
    step(X[0], Y[0])
    assert len(network.values()) == 4


def test_outputs_a_selection_of_rows_and_inputs_without_rows(store):
    network, factor = Network(), T.dscalar("factor")
    step = train.make_train_step(
        [*network.inputs, factor], network.loss * factor, network.params, update_rules.sgd, 0.0,
        store=store, outputs=[network.hidden], options={"bcast_inputs": [factor]},
    )  # fmt: skip
    loss, hidden = step(X[0], Y[0], 1.0, batch=[2, 0, 5])
    expected, same = step(X[0][[2, 0, 5]], Y[0][[2, 0, 5]], 1.0)
    assert (loss, hidden.shape) == (expected, (3, 5)) and np.array_equal(hidden, same)
    assert step(X[0], Y[0], 2.0, batch=3)[1].shape == (3, 5)
    assert step(X[0].tolist(), Y[0], 2.0, batch=slice(4, 9))[1].shape == (5, 5)


def test_givens_may_use_the_parameters(store):
    """A penalty that comes through givens sees the parameters of this call, not of the last."""
    values = []
    for with_store in (True, False):
        network, penalty = Network(), T.dscalar("penalty")
        loss, givens = network.loss + penalty, {penalty: (network.params[0] ** 2).sum()}
        if with_store:
            step = train.make_train_step(
                network.inputs, loss, network.params, update_rules.sgd, 0.1, store=store,
                options={"givens": givens},
            )  # fmt: skip
        else:
            updates = update_rules.sgd(loss, network.params, 0.1)
            step = theano.function(network.inputs, loss, updates=updates, givens=givens)
        values.append([float(step(X[n], Y[n])) for n in range(3)])
    assert values[0] == pytest.approx(values[1], rel=1e-12)


@pytest.mark.parametrize(
    ("inputs", "error", "said"),
    [
        ((X[0],), TypeError, "takes 2 inputs, got 1"),
        ((X[0], Y[0][:3]), ValueError, "equally many rows, got {'x': 9, 'y': 3}"),
        ((X[0][:0], Y[0][:0]), ValueError, "at least one row"),
        ((X[0], 3), ValueError, "Input y must have rows, got 3"),
        ((X[0][:, :, None], Y[0]), TypeError, "Wrong number of dimensions"),
        ((None, Y[0]), TypeError, "Input x must be an array of numbers with rows, got None"),
        (("a", "b"), TypeError, "Input x must be an array of numbers with rows, got 'a'"),
        ((X[0], Y[0].astype(object)), TypeError, "Input y must be .* got an array of dtype object"),
    ],
)
def test_wrong_inputs_leave_the_step_as_it_was(store, inputs, error, said):
    network, step = one_device(store)
    for pending in (False, True):
        with pytest.raises(error, match=said):
            step(*inputs)
        assert step.is_pending is pending
        step(X[0], Y[0])
    assert np.isfinite(network.values()[0]).all()


def test_a_call_that_fails_in_the_middle_is_told_again_by_the_next_one():
    with ps.create("local", devices=[0, 1]) as store:
        results = on_devices(store, lambda device: one_device(store, devid=device))
        network, step = results[0]
        values = network.values()
        step(X[0], Y[0])
        store.close(drain=False)
        with pytest.raises(ps.StoreClosed) as raised:
            step.finish()
        assert "Apply node" not in str(raised.value)
        with pytest.raises(RuntimeError, match="raised in the middle of a call") as again:
            step(X[1], Y[1])
        assert isinstance(again.value.__cause__, ps.StoreClosed)
        # What was learned before can still be saved.
        assert all(np.array_equal(*pair) for pair in zip(values, network.values()))


class Wait:
    """Fails at a wait, as that for a worker that has died does."""

    def __init__(self, monkeypatch, number):
        from synkhronos.extensions._exchange import Port

        self.left, self.wait = number, Port.complete
        monkeypatch.setattr(Port, "complete", lambda port: self(port))

    def __call__(self, port):
        self.left -= 1
        if self.left == 0:
            raise ps.StoreClosed("cut")
        self.wait(port)


def test_a_finish_that_fails_changes_no_parameter(store, monkeypatch):
    """Those whose gradients had come were changed, the others not."""
    network, step = one_device(store)
    step(X[0], Y[0])
    before = network.values()
    step(X[1], Y[1])
    Wait(monkeypatch, 3)
    with pytest.raises(ps.StoreClosed, match="cut"):
        step.finish()
    assert "failed: StoreClosed" in repr(step) and not step.is_pending
    assert all(np.array_equal(*pair) for pair in zip(before, network.values()))


def test_values_after_an_error_in_the_middle_of_a_call_are_not_used_quietly(store, monkeypatch):
    network, step = one_device(store)
    loss = theano.function(network.inputs, network.loss)
    step(X[0], Y[0])
    Wait(monkeypatch, 3)
    with pytest.raises(ps.StoreClosed):
        step(X[1], Y[1])
    assert "failed" in repr(step)
    for use in (network.values, lambda: pickle.dumps(network.params), lambda: copy.deepcopy(
        network.params[1]
    )):  # fmt: skip
        with pytest.raises(RuntimeError, match=r"partly that of .* raised StoreClosed .*\(cut\)"):
            use()
    errors = RuntimeError, TypeError, AttributeError
    with pytest.raises(errors, match="raised StoreClosed in the middle"):
        loss(X[0], Y[0])
    for param, value in zip(network.params, Network().values()):
        param.set_value(value)
    assert np.isfinite(loss(X[0], Y[0])) and len(network.values()) == 4
    with pytest.raises(RuntimeError, match="raised in the middle of a call"):
        step(X[1], Y[1])


def test_values_can_be_read_after_the_store_was_closed():
    expected, used = Network(), Network()
    updates = update_rules.sgd(expected.loss, expected.params, 0.1)
    theano.function(expected.inputs, expected.loss, updates=updates)(X[0], Y[0])
    with ps.create("local", devices=[0]) as store:
        _, step = one_device(store, used)
        step(X[0], Y[0])
    assert_equal([used.values()], expected.values())


def rule_of_two_steps():
    from synkhronos.extensions import updates

    return updates.sgd


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"rule": None}, TypeError, "update_rule=None, but the store has no updater: give an"),
        ({"rule": 3}, TypeError, "update_rule must be a function"),
        ({"rule": rule_of_two_steps()}, TypeError, "use synkhronos.extensions.update_rules.sgd"),
        ({"devid": 7}, ValueError, "devid 7 is none of this store's devices"),
        ({"devid": "0"}, TypeError, "devid must be an integer"),
        ({"keys": ["a"]}, ValueError, r"one for each of the 4 parameters, got \['a'\]"),
        ({"keys": "abcd"}, TypeError, "keys must be a list"),
        ({"keys": ["a", "b", "a", "c"]}, ValueError, "keys must differ"),
        ({"batch_rows": 0}, ValueError, "batch_rows must be at least 1"),
        ({"outputs": [(T.dscalar(), "avg")]}, TypeError, "without modes"),
        ({"per_rank": "loss"}, TypeError, "per_rank='loss': only without a store"),
        ({"per_rank": "layers"}, ValueError, "per_rank must be one of"),
        ({"options": {"updates": []}}, TypeError, "options can't have"),
        ({"options": {"no_default_updates": True}}, TypeError, "no_default_updates"),
        ({"averages": {"no": "variable"}}, TypeError, "averages must update shared variables"),
    ],
)
def test_arguments_that_are_refused(store, change, error, said):
    with pytest.raises(error, match=said):
        one_device(store, **change)


def test_a_step_without_rows_and_a_store_of_two_devices_without_devid_are_refused():
    w, factor = theano.shared(1.0, "w"), T.dscalar("factor")
    with ps.create("local", devices=[0, 1]) as store:
        with pytest.raises(TypeError, match=r"devid must name one .* \[0, 1\]"):
            one_device(store)
        with pytest.raises(ValueError, match="inputs must have one with rows"):
            train.make_train_step(
                [factor], factor * w, [w], update_rules.sgd, 0.1, store=store, devid=0
            )


def test_another_reduction_than_a_sum_is_refused():
    with ps.create("local", devices=[0]) as store:
        store.set_param("push_op[w1]", "mean")
        with pytest.raises(ValueError, match=r"push_op\[w1\] must be sum .* got mean"):
            one_device(store)


def test_asynchronous_servers_without_an_updater_are_refused(store, monkeypatch):
    monkeypatch.setattr(store, "type", "dist_async")
    with pytest.raises(ValueError, match=r"call set_optimizer\(\)"):
        one_device(store)


def test_what_only_a_store_has_is_refused_without_one():
    network = Network()
    arguments = network.inputs, network.loss, network.params
    with pytest.raises(TypeError, match="keys, batch_rows: only with a store"):
        train.make_train_step(*arguments, update_rules.sgd, 0.1, keys=["a"], batch_rows=3)
    with pytest.raises(TypeError, match="only a store has an updater"):
        train.make_train_step(*arguments, None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"update_rule": update_rules.sgd, "batch_rows": 9}, "the store has updater: give"),
        ({"update_rule": None}, "batch_rows must be given"),
        ({"update_rule": None, "batch_rows": 9, "max_norm": 1}, r"can't be given \['max_norm'\]"),
        ({"update_rule": None, "batch_rows": 9, "rate": 1}, r"can't be given \['rate'\]"),
    ],
)
def test_arguments_that_a_store_with_an_updater_refuses(options, said):
    network = Network()
    with ps.create("local") as store:
        store.set_optimizer(update_rules.sgd, learning_rate=0.1)
        store.init([0])
        with pytest.raises(TypeError, match=said):
            train.make_train_step(
                network.inputs, network.loss, network.params, store=store, **options
            )


def test_more_rows_than_all_devices_are_said_to_have_are_refused(store):
    _, step = one_device(store, batch_rows=8)
    with pytest.raises(ValueError, match=r"batch_rows=8 are the rows of all workers .* has 9"):
        step(X[0], Y[0])


SCRIPT = """
import sys
import numpy as np, theano, theano.tensor as T
from synkhronos import parameter_server as ps
from synkhronos.extensions import train, update_rules

kind, with_updater = sys.argv[1], sys.argv[2] == "updater"
rule = update_rules.sgd if kind == "dist_async" else update_rules.momentum
random = np.random.RandomState(1)
xs = random.normal(size=(12, 8, 3))
ys = xs.dot([1.0, -1.0, 2.0])

def network(start):
    x, y = T.dmatrix("x"), T.dvector("y")
    w, b = theano.shared(np.full(3, start), "w"), theano.shared(np.zeros(()), "b")
    return [x, y], ((T.dot(x, w) + b - y) ** 2).mean(), [w, b]

with ps.create(kind) as store:
    if with_updater:
        store.set_optimizer(rule, learning_rate=0.05)
    store.init([0])
    inputs, loss, params = network(1.0 + store.rank)  # those of worker 0 count
    rows = slice(0, 3) if store.rank == 0 else slice(3, 8)
    if with_updater:
        size = 8 if kind == "dist_sync" else rows.stop - rows.start
        step = train.make_train_step(inputs, loss, params, None, store=store, batch_rows=size)
    else:
        step = train.make_train_step(inputs, loss, params, rule, 0.05, store=store)
    losses = [float(step(x[rows], y[rows])) for x, y in zip(xs, ys)]
    values = [param.get_value() for param in params]
inputs, loss, params = network(1.0)
serial = theano.function(inputs, loss, updates=rule(loss, params, 0.05))
for x, y in zip(xs, ys):
    serial(x, y)
difference = max(abs(one - two.get_value()).max() for one, two in zip(values, params))
print("found", store.rank, difference, losses[0], losses[-1], flush=True)
"""


@pytest.mark.slow("starts several processes")
@pytest.mark.parametrize(
    ("kind", "way"), [("dist_sync", "rule"), ("dist_sync", "updater"), ("dist_async", "updater")]
)
def test_processes_with_unequally_many_rows_train_as_serial_theano(tmp_path, kind, way):
    launched = nodes.run(tmp_path, SCRIPT, kind, way, servers=2)
    found = [line.split()[1:] for line in launched.said("found ")]
    assert [rank for rank, *_ in found] == ["0", "1"]
    for _, difference, first, last in found:
        if kind == "dist_sync":
            assert float(difference) < 1e-12
        assert float(last) < float(first) / 2
