"""Keras models on ranks: everything they return is compared with Keras in one process."""

import importlib.util
import itertools
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import theano
import theano.tensor as T
from support import compiling, gallery
from support.layouts import ON_DEVICES, Layout, forked

import synkhronos as synk
from synkhronos import PortingWarning, session

if importlib.util.find_spec("keras") is None or importlib.util.find_spec("h5py") is None:
    pytest.skip("needs Keras and h5py", allow_module_level=True)

from synkhronos.extensions import train
from synkhronos.extensions.keras import broadcast, parallelize, restore, resume

pytestmark = pytest.mark.skipif(ON_DEVICES, reason="Keras was tried on CPU ranks only")
RANDOM = np.random.RandomState(0)
ROWS = 23  # with minibatches of 8 the last has 7: uneven, also on two and three ranks
X = RANDOM.randn(ROWS, 5).astype("float32")
LABELS = RANDOM.randint(3, size=ROWS)
Y = np.eye(3, dtype="float32")[LABELS]
WEIGHTS = RANDOM.rand(ROWS).astype("float32")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("keras")


@pytest.fixture(scope="module", autouse=True)
def keras(home):
    """Import Keras; leave the user's settings as they are, and Theano's floatX."""
    before = theano.config.floatX
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "theano")
        patch.setenv("KERAS_HOME", str(home))
        import keras

        keras.backend.set_floatx("float32")
        theano.config.floatX = "float32"
        with compiling.quickly():
            yield keras
        theano.config.floatX = before


LAYOUTS = [Layout(2), Layout(3, master=1)]


@pytest.fixture
def ranks(layout):
    with forked(layout) as session:
        yield session


@pytest.fixture
def two_ranks():
    with forked(Layout(2)) as session:
        yield session


@pytest.fixture
def twins(keras):
    """Return a function that makes two equal models, the second one parallel."""

    def make(build, optimizer="sgd", loss="categorical_crossentropy", metrics=list, **kwargs):
        serial, parallel = build(keras.layers), build(keras.layers)
        parallel.set_weights(serial.get_weights())
        for model in (serial, parallel):
            own = optimizer() if callable(optimizer) else optimizer
            model.compile(own, loss, metrics=metrics(), mode="FAST_COMPILE", **kwargs)
        return serial, parallelize(parallel)

    return make


def network(layers):
    from keras.models import Sequential

    return Sequential(
        [
            layers.Dense(4, activation="tanh", kernel_regularizer="l2", input_shape=(5,)),
            layers.Dense(3, activation="softmax"),
        ]
    )


def linear(layers):
    from keras.models import Sequential

    return Sequential([layers.Dense(3, activation="softmax", input_shape=(5,))])


def two_outputs(layers):
    from keras.models import Model

    x, other = layers.Input((5,)), layers.Input((5,))
    hidden = layers.add([layers.Dense(4, activation="tanh")(x), layers.Dense(4)(other)])
    outputs = [layers.Dense(3, activation="softmax", name="a")(hidden)]
    return Model([x, other], [*outputs, layers.Dense(1, name="b")(hidden)])


def assert_same(serial, parallel, rtol=2e-5):
    for own, other in zip(parallel.get_weights(), serial.get_weights()):
        np.testing.assert_allclose(own, other, rtol=rtol, atol=2e-6)
    assert_in_step(parallel)


def assert_in_step(model):
    """All ranks have the same bits in weights, optimizer and settings."""
    n = len(synk.get_lengths(model.weights[0]))
    for variable in {*model.weights, *model.optimizer.weights, *settings(model.optimizer)}:
        values = np.asarray(synk.gather(variable)).reshape(n, -1)
        assert (values == values[0]).all(), variable


def settings(optimizer):
    return [v for v in vars(optimizer).values() if hasattr(v, "get_value")]


def assert_close(one, other, rtol=1e-5):
    np.testing.assert_allclose(
        np.asarray(one, "float64"), np.asarray(other, "float64"), rtol=rtol, atol=1e-6
    )


def assert_agree(serial, parallel, method, *args, rtol=1e-5, **kwargs):
    """Both models return the same."""
    expected, found = (getattr(each, method)(*args, **kwargs) for each in (serial, parallel))
    assert_close(found, expected, rtol)


def assert_same_history(one, other):
    for (name, values), (_, expected) in zip(one.history.items(), other.history.items()):
        np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6, err_msg=name)


def fit_both(serial, parallel, *args, **kwargs):
    """Train both models; check that their histories are the same, and return it."""
    models = serial, parallel
    expected, found = (each.fit(*args, shuffle=False, verbose=0, **kwargs) for each in models)
    assert_same_history(found, expected)
    return found.history


# Training.


def test_fit_is_that_of_one_process(ranks, twins, keras):
    serial, parallel = twins(
        network,
        lambda: keras.optimizers.Adam(0.05, clipnorm=0.5),
        metrics=lambda: ["accuracy", "mae", keras.metrics.AUC(num_thresholds=20)],
        weighted_metrics=["mse"],
    )
    some = X[::2], Y[::2]
    options = {"batch_size": 8, "epochs": 3, "sample_weight": WEIGHTS, "validation_data": some}
    losses = fit_both(serial, parallel, X, Y, **options)["loss"]
    assert losses[-1] < losses[0]
    assert_same(serial, parallel)
    for rows in (slice(None), slice(1), slice(2)):  # also fewer rows than there are ranks
        assert_agree(serial, parallel, "evaluate", X[rows], Y[rows], batch_size=9, verbose=0)
        assert_close(parallel.predict(X[rows], batch_size=9), serial.predict(X[rows]))


def test_rows_are_shuffled_as_in_one_process(two_ranks, twins):
    serial, parallel = twins(network)
    for model in (serial, parallel):
        np.random.seed(3)
        model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    assert_same(serial, parallel)


def test_a_model_of_several_inputs_and_outputs(two_ranks, twins):
    serial, parallel = twins(
        two_outputs,
        "rmsprop",
        ["sparse_categorical_crossentropy", "mse"],
        loss_weights=[1.0, 0.3],
        metrics=lambda: {"b": "mae"},
    )
    x, y = [X, X[::-1]], [LABELS, X[:, :1]]
    fit_both(serial, parallel, x, y, batch_size=8, epochs=2)
    assert_same(serial, parallel)
    for own, other in zip(parallel.predict(x), serial.predict(x)):
        assert_close(own, other)


def test_metrics_of_minibatches_are_averaged(ranks, twins, keras):
    backend = keras.backend

    def largest_is_sure(y_true, y_pred):  # the mean of a minibatch, as older scripts have them
        return backend.mean(backend.max(y_pred, axis=-1))

    def build(layers):
        model = linear(layers)
        model.add_metric(backend.mean(model.output, axis=-1), "each")
        model.add_metric(backend.mean(model.output**2), "all")
        return model

    serial, parallel = twins(build, metrics=lambda: [largest_is_sure])
    history = fit_both(serial, parallel, X, Y, batch_size=8, epochs=2)
    assert {"each", "all", "largest_is_sure"} < set(history)


def test_minibatches_one_by_one_and_from_a_generator(ranks, twins):
    serial, parallel = twins(linear, metrics=lambda: ["accuracy"])
    for n in (7, 2, 1):  # 2 is less than 3 ranks, 1 less than 2
        assert_agree(
            serial, parallel, "train_on_batch", X[:n], Y[:n], class_weight={0: 2.0, 1: 1.0, 2: 0.5}
        )
        assert_agree(serial, parallel, "test_on_batch", X[:n], Y[:n])
        assert_agree(serial, parallel, "predict_on_batch", X[:n])
    assert_same(serial, parallel)

    def minibatches():
        return ((X[:n], Y[:n]) for n in itertools.cycle((8, 5, 1)))

    options = {"epochs": 2, "verbose": 0, "workers": 0, "validation_steps": 3}
    histories = [
        model.fit_generator(minibatches(), 3, validation_data=minibatches(), **options)
        for model in (serial, parallel)
    ]
    assert_same_history(*histories)
    assert_same(serial, parallel)


OPTIMIZERS = [
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "decay": 0.1}),
    ("SGD", {"lr": 0.1, "clipvalue": 0.01}),
    ("RMSprop", {"lr": 0.01, "clipnorm": 0.1}),
    ("Adagrad", {"lr": 0.1}),
    ("Adadelta", {}),
    ("Adam", {"lr": 0.01, "decay": 0.1}),
    ("Adam", {"lr": 0.01, "amsgrad": True, "clipnorm": 0.1}),
    ("Adamax", {"lr": 0.01}),
    ("Nadam", {"lr": 0.01}),
]


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS, ids=lambda value: str(value))
@pytest.mark.sample(3)
def test_optimizers_step_as_in_one_process(two_ranks, twins, keras, name, options):
    def optimizer():
        return getattr(keras.optimizers, name)(**options)

    serial, parallel = twins(linear, optimizer)
    for n in (9, 5, 1, 8):
        assert_agree(serial, parallel, "train_on_batch", X[:n], Y[:n])
    assert_same(serial, parallel)

    # The same for a loss and variables that were not made with Keras.
    x, y = T.fmatrix(), T.fvector()
    w, b = (theano.shared(value) for value in serial.get_weights())
    loss = ((T.tanh(T.dot(x, w) + b).sum(axis=1) - y) ** 2).mean()
    step = train.make_train_step(
        [x, y], loss, [w, b], optimizer(), options={"mode": "FAST_COMPILE"}
    )
    first = w.get_value(), b.get_value()
    found = [step(X[:n], WEIGHTS[:n]) for n in (9, 5, 1, 8)]
    trained = w.get_value(), b.get_value()
    w.set_value(first[0])
    b.set_value(first[1])
    updates = optimizer().get_updates(loss=loss, params=[w, b])
    alone = theano.function([x, y], loss, updates=updates, mode="FAST_COMPILE")
    assert_close(found, [alone(X[:n], WEIGHTS[:n]) for n in (9, 5, 1, 8)])
    assert_close(trained[0], w.get_value(), rtol=2e-5)


# What is random, or of a rank's own rows.


def normalizing(layers):
    """Return a model with two batch normalizations, one over rows and pixels, one without gamma."""
    from keras.models import Sequential

    return Sequential(
        [
            layers.Dense(6, activation="tanh", input_shape=(5,)),
            layers.Reshape((3, 1, 2)),
            layers.BatchNormalization(momentum=0.5),
            layers.Activation("tanh"),
            layers.Flatten(),
            layers.Dense(4),
            layers.BatchNormalization(momentum=0.7, scale=False),
            layers.Dense(3, activation="softmax"),
        ]
    )


@pytest.mark.slow("compiles networks")
def test_batch_normalization_is_over_the_rows_of_all_ranks(ranks, twins, keras):
    # Not Adam: the gradients of biases before a normalization are 0, and Adam amplifies rounding.
    serial, parallel = twins(
        normalizing, lambda: keras.optimizers.SGD(0.1, momentum=0.9), metrics=lambda: ["accuracy"]
    )
    for n in (9, 23, 5, 2):  # with 2 rows, a rank of three has none
        assert_agree(serial, parallel, "train_on_batch", X[:n], Y[:n])
    assert_same(serial, parallel, rtol=1e-4)
    for model in (serial, parallel):
        history = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        assert len(history.history["loss"]) == 2
    assert_same(serial, parallel, rtol=1e-3)
    assert_agree(serial, parallel, "evaluate", X, Y, verbose=0, rtol=1e-3)
    assert_agree(serial, parallel, "predict", X, rtol=1e-3)


@pytest.mark.slow("compiles two models")
def test_a_batch_normalization_on_inputs_and_one_that_two_inputs_share(ranks, twins, keras):
    def build(layers):
        inputs = [layers.Input((5,)), layers.Input((5,))]
        shared = layers.BatchNormalization(momentum=0.5)
        hidden = layers.concatenate([shared(each) for each in inputs])
        again = layers.BatchNormalization(center=False)(hidden)
        return keras.models.Model(inputs, layers.Dense(3, activation="softmax")(again))

    serial, parallel = twins(build)
    for n in (23, 8):
        given = [X[:n], 3 * X[:n] ** 2]
        assert_agree(serial, parallel, "train_on_batch", given, Y[:n])
    assert_same(serial, parallel, rtol=1e-4)


def test_batch_normalization_of_each_ranks_rows(ranks, twins, keras):
    def build(layers):
        model = linear(layers)
        normalize = layers.BatchNormalization(momentum=0.5, input_shape=(5,))
        return keras.models.Sequential([normalize, *model.layers])

    serial, parallel = twins(build)
    parallelize(parallel, sync_batch_norm=False)
    for model in (serial, parallel):
        model.fit(X, Y, batch_size=ROWS, shuffle=False, verbose=0)
    assert_in_step(parallel)
    _, _, mean, variance = parallel.layers[0].get_weights()
    assert_close(mean, serial.layers[0].get_weights()[2])
    edges = np.floor(np.linspace(0, ROWS, ranks.n + 1)).astype(int)
    parts = [X[a:b] for a, b in zip(edges[:-1], edges[1:])]
    of_ranks = [(part.var(axis=0) + 1e-3) * len(part) / (len(part) - 1.001) for part in parts]
    average = np.average(of_ranks, axis=0, weights=[len(part) for part in parts])
    assert_close(variance, 0.5 + 0.5 * average, rtol=1e-4)
    serial.set_weights(parallel.get_weights())
    assert_agree(serial, parallel, "evaluate", X, Y, verbose=0)
    assert_agree(serial, parallel, "predict", X)


def test_dropout_is_of_each_rank_and_in_training_only(two_ranks, twins, keras):
    def build(layers):
        drop = layers.Dropout(0.5, input_shape=(5,))
        return keras.models.Sequential([drop, *linear(layers).layers])

    serial, parallel = twins(build)
    parallel.fit(X, Y, batch_size=8, verbose=0)
    assert_in_step(parallel)
    serial.set_weights(parallel.get_weights())
    assert_agree(serial, parallel, "evaluate", X, Y, verbose=0)
    state = [v for v in parallel.train_function.compiled.get_shared() if v.dtype == "int32"]
    assert len(state) == 1 and not np.array_equal(*synk.gather(state[0]))


def test_dropout_masks_can_be_those_of_one_process(ranks, twins, keras):
    def build(layers):
        parts = [
            layers.Dropout(0.3, input_shape=(5,), seed=1),
            layers.Dense(6, activation="relu"),
            layers.Reshape((3, 2)),
            layers.SpatialDropout1D(0.4, seed=2),
            layers.Flatten(),
            layers.GaussianDropout(0.0),
            layers.Dense(3, activation="softmax"),
        ]
        np.random.seed(5)
        return keras.models.Sequential(parts)

    serial, parallel = twins(build)
    parallelize(parallel, serial_random=True)
    fit_both(serial, parallel, X, Y, batch_size=8, epochs=2)
    assert_same(serial, parallel, rtol=1e-4)
    for n in (2, 9):
        assert_agree(serial, parallel, "train_on_batch", X[:n], Y[:n])
        assert_agree(serial, parallel, "predict", X[:n])
    assert_same(serial, parallel, rtol=1e-4)


# Variables that the script sets.


def test_a_callback_sets_the_learning_rate_of_all_ranks(two_ranks, twins, keras):
    serial, parallel = twins(linear)
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.5 / (1 + epoch))
    fit_both(serial, parallel, X, Y, batch_size=8, epochs=3, callbacks=[schedule])
    assert_same(serial, parallel)
    assert synk.get_value(1, parallel.optimizer.lr) == np.float32(0.5 / 3)


def test_weights_that_the_script_sets_reach_all_ranks(two_ranks, twins):
    serial, parallel = twins(linear, "adam")
    parallel.train_on_batch(X, Y)
    weights = [value + 1 for value in serial.get_weights()]
    for model in (serial, parallel):
        model.set_weights(weights)
    assert_agree(serial, parallel, "predict", X)
    assert_agree(serial, parallel, "evaluate", X, Y, verbose=0)
    # The state of the optimizer as well.
    serial.train_on_batch(X[::-1], Y)
    parallel.set_weights(serial.get_weights())
    parallel.optimizer.set_weights(serial.optimizer.get_weights())
    for model in (serial, parallel):
        model.train_on_batch(X, Y)
    assert_same(serial, parallel)


def test_nothing_is_sent_when_nothing_was_set(two_ranks, twins, monkeypatch):
    from synkhronos import collectives

    _, parallel = twins(network, "adam", metrics=lambda: ["accuracy"])
    sent = []
    real = collectives.broadcast
    monkeypatch.setattr(collectives, "broadcast", lambda v: (sent.append(len(v)), real(v)))
    parallel.fit(X, Y, batch_size=8, epochs=1, verbose=0)
    assert len(sent) == 1  # everything, with the first minibatch
    parallel.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    assert sent[1:] == [2, 2]  # the sum and the count of the accuracy, which Keras resets
    parallel.predict(X)
    assert len(sent) == 3


def test_broadcast_puts_the_ranks_in_step_again(two_ranks, twins):
    _, parallel = twins(linear)
    parallel.train_on_batch(X, Y)
    synk.set_value(1, parallel.weights[0], np.zeros((5, 3), "float32"))
    with pytest.raises(AssertionError):
        assert_in_step(parallel)
    broadcast(parallel)
    assert_in_step(parallel)


def test_a_call_that_fails_leaves_the_ranks_in_step_in_the_next(two_ranks, twins):
    serial, parallel = twins(linear)
    parallel.train_on_batch(X, Y)
    serial.set_weights(parallel.get_weights())
    synk.set_value(1, parallel.weights[0], np.zeros((5, 2), "float32"))
    with pytest.raises(synk.WorkerError):
        parallel.train_on_batch(X, Y)
    serial.set_weights(parallel.get_weights())
    for model in (serial, parallel):
        model.train_on_batch(X, Y)
    assert_same(serial, parallel)


# The life of a model.


@pytest.mark.slow("compiles several models")
def test_a_saved_model_goes_on_with_its_optimizer(two_ranks, twins):
    serial, _ = twins(linear, "adam")
    serial.train_on_batch(X, Y)
    # As load_model() does, which can't read the files of h5py 3: Keras trains once more, serially.
    parallel = parallelize(pickle.loads(pickle.dumps(serial)))
    for _ in range(2):
        assert_agree(serial, parallel, "train_on_batch", X, Y)
    assert_same(serial, parallel)
    assert parallel.optimizer.get_weights()[0] == 3  # iterations
    again = pickle.loads(pickle.dumps(parallel))
    assert_close(again.train_on_batch(X, Y), serial.train_on_batch(X, Y))


@pytest.mark.slow("compiles two models twice")
def test_compiled_again_it_stays_parallel(two_ranks, twins):
    serial, parallel = twins(network)
    for model in (serial, parallel):
        model.train_on_batch(X, Y)
        model.layers[0].trainable = False
        model.compile("adam", "mse", mode="FAST_COMPILE")
        model.train_on_batch(X, Y)
    assert_same(serial, parallel)
    assert type(parallel.train_function) is not type(serial.train_function)


def test_restored_it_is_serial_again(two_ranks, twins):
    serial, parallel = twins(linear)
    assert restore(parallel) is parallel
    for model in (serial, parallel):
        model.train_on_batch(X, Y)
    assert type(parallel.train_function) is type(serial.train_function)
    for own, other in zip(parallel.get_weights(), serial.get_weights()):
        np.testing.assert_array_equal(own, other)
    with pytest.raises(ValueError, match="parallelize"):
        restore(parallel)
    with pytest.raises(ValueError, match="parallelize"):
        broadcast(parallel)


def test_it_goes_on_in_the_next_session(no_session, twins):
    synk.fork(2)
    serial, parallel = twins(linear, "adam")
    for n_ranks in (3, None):
        for model in (serial, parallel):
            model.train_on_batch(X, Y)
        assert_same(serial, parallel)
        synk.close()
        with pytest.raises(synk.SessionError, match=r"restore\(\) ends; it needs workers"):
            parallel.predict(X)
        if n_ranks:
            synk.fork(n_ranks)
    restore(parallel)
    assert_agree(serial, parallel, "predict", X)


def test_a_model_whose_inputs_are_not_known_yet(two_ranks, keras):
    layers = [keras.layers.Dense(3, activation="softmax")]
    model = keras.models.Sequential(layers)
    model.compile("sgd", "mse", mode="FAST_COMPILE")
    parallelize(model)
    model.fit(X, Y, batch_size=8, verbose=0)
    assert_in_step(model)


def test_a_model_with_nothing_to_train_is_evaluated(two_ranks, twins, keras):
    def build(layers):
        model = linear(layers)
        model.trainable = False
        return model

    serial, parallel = twins(build)
    assert_agree(serial, parallel, "train_on_batch", X, Y)
    assert_same(serial, parallel)


# Refusals.


def test_it_needs_a_session_and_a_compiled_model(no_session, keras, monkeypatch):
    model = linear(keras.layers)
    with pytest.raises(synk.SessionError, match=r"call synkhronos.fork\(\) first"):
        parallelize(model)
    synk.fork(2)
    with pytest.raises(RuntimeError, match=r"call model.compile\(\) before"):
        parallelize(model)
    with pytest.raises(TypeError, match="takes a model of Keras, got 3"):
        parallelize(3)
    monkeypatch.setattr(keras.backend, "backend", lambda: "tensorflow")
    with pytest.raises(RuntimeError, match="KERAS_BACKEND=theano"):
        parallelize(model)


def test_what_ranks_would_compute_otherwise_is_refused(two_ranks, keras):
    layers = keras.layers

    def refused(stack, said, **kwargs):
        model = keras.models.Sequential(stack)
        model.compile("sgd", "mse", **kwargs)
        with pytest.raises(ValueError, match=said):
            parallelize(model)

    dense = {"units": 3, "input_shape": (5,)}
    refused([layers.SimpleRNN(2, stateful=True, batch_input_shape=(4, 2, 1))], "stateful=True")
    tensor = keras.backend.variable(Y)
    refused([layers.Dense(**dense)], "targets that are tensors", target_tensors=[tensor])
    own = layers.Input(tensor=keras.backend.variable(X))
    model = keras.models.Model(own, layers.Dense(3)(own))
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="inputs that are tensors"):
        parallelize(model)


def class_means(y_true, y_pred):
    """The mean over classes of the mean loss of each class's rows."""
    backend = pytest.importorskip("keras").backend
    errors = backend.categorical_crossentropy(y_true, y_pred)[:, None] * y_true
    counts = backend.maximum(backend.sum(y_true, axis=0), 1.0)
    return backend.mean(backend.sum(errors, axis=0) / counts) + 0 * errors[:, 0]


def covariance(y_true, y_pred):
    backend = pytest.importorskip("keras").backend
    centred = y_pred - backend.mean(y_pred, axis=0)
    return backend.mean(backend.square(backend.dot(backend.transpose(centred), y_true)))


def f1(y_true, y_pred):
    """One number for a minibatch: neither a sum nor a mean over its rows."""
    backend = pytest.importorskip("keras").backend
    hits = backend.sum(backend.round(y_pred) * y_true)
    found, wanted = backend.sum(backend.round(y_pred)), backend.sum(y_true)
    return 2 * hits / (found + wanted + backend.epsilon())


LOSSES = {
    "class means": class_means,
    "covariance": covariance,
    "sum": lambda keras: keras.losses.MeanSquaredError(reduction="sum"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_are_no_means_over_rows(ranks, twins, keras, name):
    loss = LOSSES[name](keras) if name == "sum" else LOSSES[name]
    serial, parallel = twins(network, "adam", loss, metrics=lambda: [f1])
    rows = np.argsort(LABELS, kind="stable")  # minibatches with other classes
    assert fit_both(serial, parallel, X[rows], Y[rows], batch_size=8, epochs=2)["f1"][0] > 0
    assert_same(serial, parallel)
    assert_agree(serial, parallel, "evaluate", X, Y, batch_size=8, verbose=0)


def test_an_activity_regularizer_adds_up_all_rows(ranks, twins):
    def build(layers):
        model = linear(layers)
        return type(model)(
            [layers.Dense(5, activity_regularizer="l2", input_shape=(5,)), *model.layers]
        )

    serial, parallel = twins(build)
    fit_both(serial, parallel, X, Y, batch_size=8)
    assert_same(serial, parallel)


def largest(keras):
    """Return a metric that adds nothing to its state."""

    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="largest")
            self.state = self.add_weight("state", initializer="zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            largest = keras.backend.maximum(self.state, keras.backend.max(y_pred))
            return [keras.backend.update(self.state, largest)]

        def result(self):
            return self.state

    return Largest()


def test_a_metric_that_does_not_add_up(ranks, twins, keras):
    serial, parallel = twins(linear, metrics=lambda: [largest(keras)])
    fit_both(serial, parallel, X, Y, batch_size=8)


def first_of_batch(y_true, y_pred):
    return y_pred[0, 0] + 0 * y_pred[:, 0]


def test_what_has_no_rule_is_told_in_words_of_keras_and_right(ranks, twins):
    said = r"its metric 'first_of_batch' .* selected by their number .*model.predict\(\)\?"
    serial, parallel = twins(linear, metrics=lambda: [first_of_batch])
    with pytest.warns(PortingWarning, match=said) as caught:
        fit_both(serial, parallel, X, Y, batch_size=8)
    assert "all_reduce" not in str(caught[0].message)
    assert_same(serial, parallel)
    with pytest.warns(PortingWarning, match=said):
        assert_agree(serial, parallel, "evaluate", X, Y, batch_size=8, verbose=0)
    serial, parallel = twins(linear, loss=first_of_batch)
    with pytest.warns(PortingWarning, match="its loss computes .* take as long as in one process"):
        fit_both(serial, parallel, X, Y, batch_size=8)
    assert_same(serial, parallel)


def test_ranks_normalize_alone_only_for_a_mean_over_rows(two_ranks, keras):
    model = linear(keras.layers)
    model.compile("sgd", covariance)
    parallelize(model, sync_batch_norm=False)
    with pytest.raises(ValueError, match="can't be trained with sync_batch_norm=False"):
        model.train_on_batch(X, Y)


@pytest.mark.slow("starts an interpreter")
def test_keras_is_imported_only_when_a_model_comes(script):
    script(
        """
        import sys
        import synkhronos
        import synkhronos.extensions.keras
        assert "keras" not in sys.modules
        del sys.modules["synkhronos.extensions.keras"]
        sys.modules["keras"] = None  # as if it were not installed
        try:
            import synkhronos.extensions.keras
        except ImportError as error:
            assert "pip install 'synkhronos[demos]'" in str(error)
        else:
            raise AssertionError
        """.replace("\n        ", "\n")
    )


# What is shown to users.


@pytest.mark.slow("imports Keras in an interpreter of its own")
def test_the_example_of_the_documentation(script, home):
    page = Path(__file__).parents[2] / "docs" / "keras.rst"
    [example, *_] = re.findall(r"code-block:: python\n\n(.*?)\n\S", page.read_text(), re.DOTALL)
    code = re.sub("^    ", "", example, flags=re.MULTILINE)
    env = {"KERAS_HOME": str(home), "THEANO_FLAGS": "mode=FAST_COMPILE"}
    done = script(code, env=env)
    assert "2 ranks" in done.stdout and "accuracy" in done.stdout


@pytest.fixture
def demo(keras):
    """Import the demo; undo what it sets."""
    path = Path(__file__).parents[2] / "demos" / "keras_mnist.py"
    spec = importlib.util.spec_from_file_location("demos_keras_mnist", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    theano.config.floatX = "float32"
    keras.backend.set_floatx("float32")


@pytest.mark.slow("compiles the functions of two models")
def test_the_demo_trains_as_serial_keras_does(demo, capsys, tmp_path, monkeypatch):
    from theano.sandbox.rng_mrg import mrg_uniform  # imported here, because PyTensor has none

    # It draws two million initial weights, which take a minute in Python.
    compiling.always(monkeypatch, mrg_uniform)
    found = demo.main(
        ["--data", "digits", "--rows", "250", "--batch", "100", "--epochs", "3", "--ranks", "3"]
        + ["--plot", str(tmp_path / "curves.png")]
    )
    assert found["ranks"] == 3 and found["replicas_equal"]
    assert len(found["losses"]) == len(found["accuracies"]) == 3
    assert found["losses"] == pytest.approx(found["serial_losses"], rel=1e-4)
    assert found["accuracies"] == pytest.approx(found["serial_accuracies"], abs=0.01)
    assert found["losses"][-1] < found["losses"][0] and found["difference"] < 1e-3
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "Epoch 3/3" in out and gallery.unsaid("keras_mnist", out) == []


def test_the_demo_says_what_is_wrong_with_its_arguments(demo, capsys):
    for arguments, said in {
        ("--data", "nowhere"): "nowhere",
        ("--rate", "-1"): "--rate: must be a number above zero, got '-1'",
        ("--dropout", "1"): "--dropout: must be a number from 0 to less than 1, got '1'",
    }.items():
        with pytest.raises(SystemExit) as end:
            demo.main(arguments)
        assert said in f"{end.value.code} {capsys.readouterr().err}"
        assert session._Current.session is None


def test_the_demo_computes_in_the_precision_that_the_user_chose(keras, demo, monkeypatch):
    monkeypatch.setattr(theano.configparser, "THEANO_FLAGS", "floatX=float64")
    with pytest.raises(SystemExit, match="nowhere"):  # stops before the training
        demo.main(["--data", "nowhere"])
    assert (theano.config.floatX, keras.backend.floatx()) == ("float64", "float64")


@pytest.mark.layouts(LAYOUTS[0])
def test_a_fit_that_is_interrupted_goes_on_with_the_same_bits(tmp_path, ranks, keras):
    def fit(folder, epochs=4, dies=None):
        keras.backend.reset_uids()  # as in a new process
        np.random.seed(1)
        theano.config.floatX = "float32"
        given = [keras.layers.Dense(4, input_shape=(5,)), keras.layers.Dropout(0.5)]
        model = keras.models.Sequential([*given, keras.layers.Dense(3, activation="softmax")])
        model.compile("adam", "categorical_crossentropy", metrics=["accuracy"], mode="FAST_COMPILE")
        parallelize(model)

        def end_batch(batch, logs):
            if (state.epoch, batch) == dies:
                raise InterruptedError

        slower = keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1, min_delta=9)
        with resume(model, folder / "run.npz", every=0) as state:
            ends = keras.callbacks.LambdaCallback(on_batch_end=end_batch)
            model.fit(
                X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0,
                initial_epoch=state.epoch, callbacks=[ends, slower, state.callback],
            )  # fmt: skip
        return [*model.get_weights(), *model.optimizer.get_weights(), np.random.rand(2)]

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    expected = fit(whole, epochs=2)
    with pytest.raises(InterruptedError):
        fit(killed, dies=(1, 1))
    found = fit(killed, epochs=2)
    assert len(found) > 10 and all(map(np.array_equal, found, expected))
