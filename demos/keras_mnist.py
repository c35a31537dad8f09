"""Train a Keras model on MNIST with several ranks, and compare with Keras in one process.

All of it is ordinary Keras but one line: ``parallelize(model)``. Then ``fit`` trains on all ranks,
with the progress bar, the validation and the metrics of Keras. Both runs begin with the same
weights and take the same minibatches, so their curves coincide; with --dropout they do not, because
each rank draws random numbers of its own.
"""

import argparse
import os
import sys
import time
from pathlib import Path

os.environ["KERAS_BACKEND"] = "theano"  # Keras reads it when it is imported

import keras
import numpy as np
import theano
from threadpoolctl import threadpool_limits

import synkhronos as synk
from synkhronos.extensions.keras import parallelize

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from demos._arguments import above_zero, add_common_arguments, number_type, positive
from demos._reports import plot_runs, report_runs
from demos._shared import Log, count, float_type, fork, usable_threads
from demos.lasagne_mnist import runs

PROGRAM = Path(__file__).stem


def build_model(arguments):
    """Return a compiled model of Keras; nothing in it knows about ranks."""
    np.random.seed(arguments.seed)  # for the weights, and for the order of the rows
    layers, first = keras.layers, {"data_format": "channels_first"}
    stack = [layers.Flatten(input_shape=(1, 28, 28))]
    if arguments.model == "cnn":
        # Tanh and averages, as in LeNet. With max pooling, rounding would decide between equal
        # pixels, and runs that differ by rounding would drift apart.
        stack = [
            layers.Conv2D(16, 5, activation="tanh", input_shape=(1, 28, 28), **first),
            layers.AveragePooling2D(2, **first),
            layers.Conv2D(32, 5, activation="tanh", **first),
            layers.AveragePooling2D(2, **first),
            layers.Flatten(),
        ]
    for units in {"mlp": [512, 512], "cnn": [128]}[arguments.model]:
        stack.append(layers.Dense(units, activation="relu"))
        if arguments.dropout:
            stack.append(layers.Dropout(arguments.dropout))
    stack.append(layers.Dense(10, activation="softmax"))
    model = keras.models.Sequential(stack)
    model.compile(
        keras.optimizers.SGD(arguments.rate, momentum=0.9),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


class Clock(keras.callbacks.Callback):
    """Measures the seconds of each minibatch."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def on_train_batch_begin(self, batch, logs=None):
        self.began = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.seconds.append(time.perf_counter() - self.began)


def train(model, log, arguments, data):
    """Train like any script that uses Keras."""
    x_train, y_train, x_val, y_val, x_test, y_test = data
    print(f"\n{log.label}")
    clock = Clock()
    history = model.fit(
        x_train,
        y_train,
        batch_size=arguments.batch,
        epochs=arguments.epochs,
        validation_data=(x_val, y_val),
        callbacks=[clock],
        # Progress bars in a terminal, a line for each epoch in a file.
        verbose=1 if sys.stdout.isatty() else 2,
    ).history
    _, accuracy = model.evaluate(x_test, y_test, arguments.batch, verbose=0)
    log.losses, log.accuracies = (
        list(map(float, history[name])) for name in ("loss", "val_accuracy")
    )
    log.batch = min(arguments.batch, len(x_train))
    log.seconds = clock.seconds
    log.test_accuracy = float(accuracy)
    log.values = model.get_weights()


def train_parallel(arguments, data, n_ranks):
    """Train on all ranks; return the log, and whether all ranks end with equal weights."""
    log = Log(f"Keras, {count(n_ranks, 'rank')}")
    model = parallelize(build_model(arguments))
    train(model, log, arguments, data)
    return log, runs.compare_replicas(model.weights)


def train_serial(arguments, data, n_threads):
    """Train in one process with `n_threads` threads of BLAS; return the log."""
    log = Log(f"serial Keras, {count(n_threads, 'thread')}", is_serial=True)
    with threadpool_limits(n_threads):
        train(build_model(arguments), log, arguments, data)
    return log


def compare(parallel, serial, has_dropout):
    """Print and return the largest differences of weights and of losses between the runs."""
    pairs = zip(parallel.values, serial.values)
    difference = max(float(abs(one - other).max()) for one, other in pairs)
    apart = float(np.abs(np.subtract(parallel.losses, serial.losses)).max())
    if has_dropout:
        print("With dropout the runs differ: the ranks draw numbers of their own.")
    else:
        agree = difference < 1e-3 * max(float(abs(value).max()) for value in parallel.values)
        print(
            f"Results {'agree' if agree else 'DIFFER'}: training losses differ by at most "
            f"{apart:.1e}, and weights by {difference:.1e}\nafter training: ranks add in another "
            "order, and so round otherwise."
        )
    return difference, apart


probability = number_type(float, lambda value: 0 <= value < 1, "a number from 0 to less than 1")


def parse(argv):
    """Read the command line."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", choices=["mlp", "cnn"], default="mlp", help="(mlp)")
    add("--epochs", type=positive, default=10, metavar="N", help="passes over the rows (10)")
    add("--batch", type=positive, default=512, metavar="N", help="rows in a minibatch (512)")
    add("--rate", type=above_zero, default=0.05, metavar="R", help="learning rate (0.05)")
    add("--dropout", type=probability, default=0.0, metavar="P", help="after each dense layer (0)")
    add_common_arguments(parser)
    runs.add_data_arguments(parser)
    return parser.parse_args(argv)


def main(argv=None):
    """Run the demo; return its measurements."""
    arguments = parse(argv)
    # The import of Keras has overwritten Theano's setting with its own.
    theano.config.floatX = float_type()
    keras.backend.set_floatx(theano.config.floatX)
    data = runs.load(arguments, PROGRAM)
    n_ranks = fork(arguments, PROGRAM)
    try:
        parallel, equal = train_parallel(arguments, data, n_ranks)
    finally:
        synk.close()
    serials = [train_serial(arguments, data, n) for n in sorted({1, usable_threads()})]
    speedup = report_runs(parallel, serials, n_ranks, runs.scores([parallel, *serials]))
    difference, apart = compare(parallel, serials[0], arguments.dropout > 0)
    if arguments.plot:
        plot_runs(arguments.plot, [parallel, *serials])
    return {
        "ranks": n_ranks,
        "losses": parallel.losses,
        "accuracies": parallel.accuracies,
        "serial_losses": serials[0].losses,
        "serial_accuracies": serials[0].accuracies,
        "test_accuracy": parallel.test_accuracy,
        "difference": difference,
        "losses_apart": apart,
        "replicas_equal": equal,
        "speedup": speedup,
    }


if __name__ == "__main__":
    main()
