"""Libraries and scripts that know nothing of ranks compute on all ranks what they compute serially.

The libraries are downhill and Lasagne from PyPI. Both call ``theano.function`` with graphs of their
own, set variables between calls, and keep what their rules need in shared variables.
"""

import collections
import collections.abc
import os
import subprocess
import sys

import numpy as np
import pytest
import theano
import theano.tensor as T
from support import compiling
from support.layouts import ON_DEVICES

import synkhronos as synk
from synkhronos.porting import ParallelFunction

pytestmark = [
    pytest.mark.skipif(ON_DEVICES, reason="forks with options of its own"),
    pytest.mark.filterwarnings("ignore::UserWarning:lasagne"),  # names that Theano 1.0 deprecates
]
INPUTS, CLASSES = 12, 3


def data(rows):
    rng = np.random.RandomState(1)
    return rng.randn(rows, INPUTS), rng.randint(0, CLASSES, rows).astype("int32")


def network():
    """Return an MLP's inputs, loss, error rate and parameters."""
    rng = np.random.RandomState(0)
    x, y = T.matrix("x"), T.ivector("y")
    w, v = (
        theano.shared(rng.randn(*shape) / 3, name)
        for name, shape in (("w", (INPUTS, 6)), ("v", (6, CLASSES)))
    )
    b, c = theano.shared(np.zeros(6), "b"), theano.shared(np.zeros(CLASSES), "c")
    p = T.nnet.softmax(T.tanh(x.dot(w) + b).dot(v) + c)
    loss = T.nnet.categorical_crossentropy(p, y).mean() + 0.01 * T.sqr(w).sum()
    return [x, y], loss, T.neq(p.argmax(axis=1), y).mean(), [w, b, v, c]


def with_downhill(algorithm, **options):
    """Return what downhill monitors, and the parameters that it has found."""
    import downhill

    inputs, loss, error, params = network()
    optimizer = downhill.build(algorithm, loss, params, inputs, monitors=[("error", error)])
    x, y = data(50)
    train = downhill.Dataset([x, y], name="train", batch_size=20, rng=3)
    valid = downhill.Dataset([x[:31], y[:31]], name="valid", batch_size=31, rng=3)
    results = []
    for monitors in optimizer.iterate(train, valid, max_updates=3, **options):
        results += [value for each in monitors for value in each.values()]
    return [*results, *(param.get_value() for param in params)], [optimizer.f_step]


def layers():
    import lasagne

    x, y = T.matrix("x"), T.ivector("y")
    layer = lasagne.layers.InputLayer((None, INPUTS), x)
    layer = lasagne.layers.DropoutLayer(lasagne.layers.DenseLayer(layer, 6), 0.5)
    layer = lasagne.layers.DenseLayer(layer, CLASSES, nonlinearity=lasagne.nonlinearities.softmax)
    return x, y, layer


def with_lasagne(rule, **options):
    """Return losses, predictions and parameters of a network of Lasagne."""
    import lasagne

    lasagne.random.set_rng(np.random.RandomState(5))
    x, y, layer = layers()
    p = lasagne.layers.get_output(layer, deterministic=True)
    penalty = lasagne.regularization.regularize_network_params(layer, lasagne.regularization.l2)
    loss = lasagne.objectives.categorical_crossentropy(p, y).mean() + 1e-3 * penalty
    params = lasagne.layers.get_all_params(layer, trainable=True)
    updates = getattr(lasagne.updates, rule)(loss, params, **options)
    step = theano.function([x, y], loss, updates=updates)
    accuracy = T.mean(T.eq(T.argmax(p, axis=1), y), dtype=theano.config.floatX)
    check, predict = theano.function([x, y], [loss, accuracy]), theano.function([x], p)
    rows, labels = data(50)
    results = [step(rows[i : i + 20], labels[i : i + 20]) for i in (0, 20, 40)]
    best = lasagne.layers.get_all_param_values(layer)
    results.append(step(rows, labels))
    lasagne.layers.set_all_param_values(layer, best)
    results += [*check(rows, labels), predict(rows)]
    return [*results, *lasagne.layers.get_all_param_values(layer)], [step, check, predict]


def assert_serial_results(train, ranks):
    expected, _ = train()
    for n in ranks:
        with synk.parallel(n):
            results, functions = train()
        assert all(type(each) is ParallelFunction for each in functions)
        assert len(results) == len(expected)
        for result, wanted in zip(results, expected):
            np.testing.assert_allclose(result, wanted, rtol=1e-7, atol=1e-10)


@pytest.fixture
def computed_in_python():
    """Compute the graph of FAST_RUN without a C compiler."""
    with compiling.in_python():
        yield


@pytest.mark.slow("compiles networks")
@pytest.mark.parametrize(
    "algorithm, options",
    [
        ("rmsprop", {"max_gradient_norm": 1}),
        ("adam", {}),
        ("sgd", {"momentum": 0.9, "nesterov": True}),
        ("rprop", {}),
        ("adadelta", {"max_gradient_elem": 1.0}),
    ],
)
@pytest.mark.usefixtures("computed_in_python")
def test_downhill(no_session, monkeypatch, algorithm, options):
    downhill = pytest.importorskip("downhill")
    # As the import support does where it was installed since it knows downhill.
    monkeypatch.setattr(collections, "Callable", collections.abc.Callable, raising=False)
    monkeypatch.setattr(downhill.util, "log", lambda *args, **kwargs: None)
    options = {"learning_rate": 0.05, **options}
    assert_serial_results(lambda: with_downhill(algorithm, **options), [3])


@pytest.mark.parametrize(
    "rule, options",
    [
        ("nesterov_momentum", {"learning_rate": 0.1}),
        pytest.param("adam", {}, marks=pytest.mark.slow("compiles a network")),
    ],
)
@pytest.mark.usefixtures("computed_in_python")
def test_lasagne(no_session, rule, options):
    pytest.importorskip("lasagne")
    assert_serial_results(lambda: with_lasagne(rule, **options), (1, 2, 3))


@pytest.mark.slow("compiles C code for a network")
def test_dropout_of_lasagne_learns_on_ranks(no_session):
    lasagne = pytest.importorskip("lasagne")
    lasagne.random.set_rng(np.random.RandomState(5))
    x, y, layer = layers()
    p = lasagne.layers.get_output(layer)
    loss = lasagne.objectives.categorical_crossentropy(p, y).mean()
    params = lasagne.layers.get_all_params(layer, trainable=True)
    rows, labels = data(60)
    rows[:, :CLASSES] = np.eye(CLASSES)[labels] * 3
    with synk.parallel(2):
        step = theano.function([x, y], loss, updates=lasagne.updates.adam(loss, params, 0.02))
        losses = [float(step(rows, labels)) for _ in range(60)]
        assert type(step) is ParallelFunction and np.mean(losses[-5:]) < 0.6 * losses[0]
        for param in params:
            np.testing.assert_array_equal(synk.get_value(1, param), param.get_value())


SCRIPT = """
import sys
import numpy as np, theano, theano.tensor as T
from theano import function

rng = np.random.RandomState(0)
data, labels = theano.shared(rng.randn(30, 4)), theano.shared(rng.randint(0, 3, 30))
labels = T.cast(labels, "int32")
x, y, index, rate = T.dmatrix(), T.ivector(), T.lscalar(), theano.shared(0.5)
w = theano.shared(np.zeros((4, 3)))
p = T.nnet.softmax(x.dot(w))
loss = -T.mean(T.log(p)[T.arange(y.shape[0]), y])
rows = slice(index * 8, (index + 1) * 8)
train = function([index], loss, updates=[(w, w - rate * T.grad(loss, w))],
                 givens={x: data[rows], y: labels[rows]})
test = function([x, y], T.mean(T.neq(p.argmax(axis=1), y)))
for epoch in range(2):
    print("%.9f" % np.mean([train(i) for i in range(4)]))
    rate.set_value(rate.get_value() / 2)
print("%.9f" % test(rng.randn(9, 4), np.arange(9, dtype="int32") % 3), sys.argv[1:])
print(type(train).__name__, type(test).__name__, file=sys.stderr)
"""


@pytest.mark.slow("starts Python with a library, twice")
@pytest.mark.parametrize("n", [3])
def test_a_script_prints_the_same_numbers_on_ranks(tmp_path, n):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = [sys.executable, "-m", "synkhronos", "run", "--parallel", "-n", str(n)]
    environment = {**os.environ, "THEANO_FLAGS": "mode=FAST_COMPILE"}
    outputs = [
        subprocess.run(
            [*command, script, "--an", "option"], capture_output=True, text=True, env=environment
        )
        for command in ([sys.executable], run)
    ]
    assert [each.returncode for each in outputs] == [0, 0], outputs[1].stderr
    assert outputs[0].stdout == outputs[1].stdout != ""
    types, _, report = outputs[1].stderr.partition("\n\n")
    assert types.split() == ["ParallelFunction"] * 2
    assert "2 of 2 functions ran on all 3 ranks" in report
