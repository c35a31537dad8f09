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
from demos._shared import (
    Log,
    add_common_arguments,
    count,
    fork,
    plot_curves,
    positive,
    report_speedup,
    table,
    usable_threads,
)
from demos.lasagne_mnist import runs

PROGRAM = Path(__file__).stem


def build_model(arguments):
    """Return a model of Keras that is compiled; nothing in it knows about ranks."""
    np.random.seed(arguments.seed)  # Keras draws the weights from it, and the order of the rows
    layers, first = keras.layers, {"data_format": "channels_first"}
    stack = [layers.Flatten(input_shape=(1, 28, 28))]
    if arguments.model == "cnn":
        # Smooth, as LeNet was: where pixels are equal, rounding decides which of them is the
        # maximum, and runs that differ by rounding would drift apart.
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


def train(model, label, arguments, data):
    """Train as any script with Keras would; return the log, and the accuracy on the test rows."""
    x_train, y_train, x_val, y_val, x_test, y_test = data
    print(f"\n{label}")
    clock = Clock()
    history = model.fit(
        x_train,
        y_train,
        batch_size=arguments.batch,
        epochs=arguments.epochs,
        validation_data=(x_val, y_val),
        callbacks=[clock],
        # Progress bars, or a line for each epoch where they would fill a file.
        verbose=1 if sys.stdout.isatty() else 2,
    ).history
    _, accuracy = model.evaluate(x_test, y_test, arguments.batch, verbose=0)
    losses, accuracies = (list(map(float, history[name])) for name in ("loss", "val_accuracy"))
    return Log(label, losses, accuracies, clock.seconds), float(accuracy)


def train_parallel(arguments, data, n_ranks):
    """Train on all ranks; also return the weights, and whether all ranks have the same."""
    model = parallelize(build_model(arguments))
    log, accuracy = train(model, f"Keras, {count(n_ranks, 'rank')}", arguments, data)
    return log, accuracy, model.get_weights(), runs.replicas_equal(model.weights, n_ranks)


def report(parallel, serials, accuracies, n_ranks):
    """Print the comparison; return the speedup against serial Keras at its best."""
    rows = []
    for log, accuracy in zip([parallel, *serials], accuracies):
        speedup = f"{log.milliseconds / parallel.milliseconds:.2f}" if log is not parallel else ""
        cells = [f"{log.milliseconds:.2f}", f"{sum(log.seconds):.2f}", f"{log.losses[-1]:.6f}"]
        percent = [f"{100 * number:.2f} %" for number in (log.accuracies[-1], accuracy)]
        rows.append([log.label, *cells, *percent, speedup])
    titles = ["", "ms/minibatch", "training s", "training loss", "validation", "test accuracy"]
    print("\n" + table([*titles, f"speedup of {count(n_ranks, 'rank')}"], rows) + "\n")
    return report_speedup(parallel, serials, n_ranks)


def compare(parallel, serial, weights, serial_weights, has_dropout):
    """Print how far the two runs are apart; return the differences of weights and of losses."""
    difference = max(float(abs(w - s).max()) for w, s in zip(weights, serial_weights))
    apart = float(np.abs(np.subtract(parallel.losses, serial.losses)).max())
    if has_dropout:
        print("With dropout the runs differ: the ranks draw numbers of their own.")
    else:
        agree = difference < 1e-3 * max(float(abs(w).max()) for w in weights)
        print(
            f"Results {'agree' if agree else 'DIFFER'}: training losses differ by at most "
            f"{apart:.1e}, and weights by {difference:.1e}\nafter training; single precision "
            "rounds, and ranks add in another order."
        )
    return difference, apart


def parse(argv):
    """Read the command line."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", choices=["mlp", "cnn"], default="mlp", help="(mlp)")
    add("--epochs", type=positive, default=10, metavar="N", help="passes over the rows (10)")
    add("--batch", type=positive, default=512, metavar="N", help="rows in a minibatch (512)")
    add("--rate", type=float, default=0.05, metavar="R", help="learning rate (0.05)")
    add("--dropout", type=float, default=0.0, metavar="P", help="after each dense layer (0)")
    add_common_arguments(parser)
    runs.add_data_arguments(parser)
    arguments = parser.parse_args(argv)
    if not 0 <= arguments.dropout < 1:
        parser.error(f"--dropout must be from 0 to less than 1, got {arguments.dropout}")
    return arguments


def main(argv=None):
    """Run the demo; return what it measured."""
    arguments = parse(argv)
    # Keras has a setting of its own, and gave it to Theano.
    keras.backend.set_floatx("float32")
    theano.config.floatX = "float32"
    data = runs.load(arguments, PROGRAM)
    n_ranks = fork(arguments, PROGRAM)
    try:
        parallel, accuracy, weights, equal = train_parallel(arguments, data, n_ranks)
    finally:
        synk.close()
    serials, accuracies, serial_weights = [], [accuracy], []
    for threads in sorted({1, usable_threads()}):
        model = build_model(arguments)
        with threadpool_limits(threads):
            log, accuracy = train(
                model, f"serial Keras, {count(threads, 'thread')}", arguments, data
            )
        serials.append(log)
        accuracies.append(accuracy)
        serial_weights.append(model.get_weights())
    speedup = report(parallel, serials, accuracies, n_ranks)
    difference, apart = compare(
        parallel, serials[0], weights, serial_weights[0], arguments.dropout > 0
    )
    if arguments.plot:
        plot_curves(arguments.plot, [parallel, serials[0]])
    return {
        "ranks": n_ranks,
        "losses": parallel.losses,
        "accuracies": parallel.accuracies,
        "serial_losses": serials[0].losses,
        "serial_accuracies": serials[0].accuracies,
        "test_accuracy": accuracies[0],
        "difference": difference,
        "losses_apart": apart,
        "replicas_equal": equal,
        "speedup": speedup,
    }


if __name__ == "__main__":
    main()
