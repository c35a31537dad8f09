"""One run of training, the same for all MNIST demos: its arguments, epochs and reports."""

import argparse
import json
import sys
import time

import numpy as np

from demos._arguments import add_common_arguments, output_file, positive
from demos._reports import plot_runs, report_replicas, times_table
from demos._shared import progress, replicas_equal
from demos.lasagne_mnist.data import load_dataset
from demos.lasagne_mnist.networks import builder

RATE, MOMENTUM = 0.01, 0.9


def parse(argv, program, description, parallel=True):
    """Read the command line of one demo."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    add = parser.add_argument
    add("model", nargs="?", type=model, default="mlp", metavar="MODEL", help=MODEL_HELP)
    add("batch", nargs="?", type=positive, default=500, metavar="BATCH_SIZE", help="rows (500)")
    add("epochs", nargs="?", type=positive, default=10, metavar="EPOCHS", help="over the rows (10)")
    add_common_arguments(parser, parallel)
    add_data_arguments(parser)
    add(
        "--parts",
        type=positive,
        metavar="N",
        help="take each minibatch in equal shares from N parts of the rows, as it is with rows "
        "that N ranks have (train_mnist_gpu_data: always the number of ranks; else 1)",
    )
    add("--json", type=output_file, metavar="FILE", help="write what was measured")
    return parser.parse_args(argv)


def add_data_arguments(parser):
    """Add --data and --rows."""
    parser.add_argument(
        "--data",
        metavar="FOLDER",
        help="with MNIST's four .gz files, or `digits` for scikit-learn's digits (default: the "
        "current folder, else a download, else the digits)",
    )
    parser.add_argument(
        "--rows", type=positive, metavar="N", help="train with the first N rows only"
    )


MODEL_HELP = "mlp, cnn or custom_mlp:DEPTH,WIDTH,DROP_IN,DROP_HID (mlp)"


def model(text):
    """Return the name of a model from the command line."""
    try:
        builder(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def load(arguments, program):
    """Return the six arrays of the data set, or exit with a message."""
    print("Loading data...")
    try:
        x_train, y_train, *others = load_dataset(arguments.data)
    except (OSError, ValueError) as error:
        sys.exit(f"{program}: {error}")
    if arguments.rows:
        x_train, y_train = x_train[: arguments.rows], y_train[: arguments.rows]
        print(f"Training with the first {len(y_train)} rows only")
    return x_train, y_train, *others


def minibatches(n_rows, batch_size, random, parts=1):
    """Yield the row numbers of minibatches: for each a list of arrays, one from each part.

    `n_rows` rows are divided into parts as `scatter` divides them over ranks. Each part has a
    random order of its own. The sizes of minibatches differ as little as possible, and each has a
    row from every part that is not empty.

    >>> [len(part) for part in next(minibatches(1078, 500, np.random.RandomState(0), parts=2))]
    [179, 179]
    """
    edges = part_edges(n_rows, parts)
    orders = [
        start + random.permutation(stop - start) for start, stop in zip(edges[:-1], edges[1:])
    ]
    n = count_minibatches(n_rows, batch_size, parts)
    for number in range(n):
        yield [order[len(order) * number // n : len(order) * (number + 1) // n] for order in orders]


def count_minibatches(n_rows, batch_size, parts=1):
    """Return the number of `minibatches`."""
    return max(1, min(-(-n_rows // batch_size), n_rows // parts))


def part_edges(n_rows, parts):
    """Return the first row of each part, and the end of the last part."""
    return [n_rows * part // parts for part in range(parts + 1)]


def run(arguments, log, graph, n_train, step, validate, test, parts):
    """Train, print after each epoch, and return the measurements.

    Parameters
    ----------
    step : callable
        Trains with one of the `minibatches`, and returns its loss.
    validate, test : callable
        Return the loss and the accuracy on the rows for validation, and for the test.
    """
    random = np.random.RandomState(arguments.seed)
    n_batches = count_minibatches(n_train, arguments.batch, parts)
    log.batch = n_train / n_batches
    print("Starting training...")
    for epoch in range(1, arguments.epochs + 1):
        began = time.perf_counter()
        total = 0.0
        batches = minibatches(n_train, arguments.batch, random, parts)
        for rows in progress(batches, desc=f"epoch {epoch}", total=n_batches):
            step_began = time.perf_counter()
            loss = float(step(rows))
            log.seconds.append(time.perf_counter() - step_began)
            total += loss * sum(map(len, rows))
        val_loss, val_accuracy = map(float, validate())
        log.losses.append(total / n_train)
        log.accuracies.append(val_accuracy)
        print(f"Epoch {epoch} of {arguments.epochs} took {time.perf_counter() - began:.3f}s")
        print(f"  training loss:\t\t{log.losses[-1]:.6f}")
        print(f"  validation loss:\t\t{val_loss:.6f}")
        print(f"  validation accuracy:\t\t{100 * val_accuracy:.2f} %", flush=True)

    test_loss, log.test_accuracy = map(float, test())
    print("Final results:")
    print(f"  test loss:\t\t\t{test_loss:.6f}")
    print(f"  test accuracy:\t\t{100 * log.test_accuracy:.2f} %\n")
    print(times_table([log], scores([log])))
    return {
        "model": arguments.model,
        "has_dropout": graph.has_dropout,
        "milliseconds": log.milliseconds,
        "test_loss": test_loss,
        **{name: getattr(log, name) for name in LOGGED},
    }


# The fields of a result that `run_lasagne_demos` makes a Log from.
LOGGED = ("label", "batch", "is_serial", "losses", "accuracies", "seconds", "test_accuracy")


def finish(arguments, log, result):
    """Draw the picture and write the JSON file, if the arguments name them."""
    if arguments.plot:
        plot_runs(arguments.plot, [log])
    if arguments.json:
        arguments.json.write_text(json.dumps(result))


def scores(logs):
    """Return columns of a table: the losses and accuracies at the end of the runs."""
    return {
        "training loss": [f"{log.losses[-1]:.6f}" for log in logs],
        "validation": [f"{100 * log.accuracies[-1]:.2f} %" for log in logs],
        "test accuracy": [f"{100 * log.test_accuracy:.2f} %" for log in logs],
    }


def compare_replicas(params):
    """Print and return whether all ranks end with the same parameters."""
    equal = replicas_equal(params)
    print()
    report_replicas(equal)
    return equal
