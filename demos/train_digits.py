"""Train a network on handwritten digits with several ranks, and compare with serial Theano.

It runs on PyTensor too, and compares with serial PyTensor there.
The data are scikit-learn's 1797 digits of 8 x 8 pixels, the network has two hidden layers of tanh.
Each rank computes the gradients of its part of a minibatch. Inside of the same function they are
averaged over the ranks, so that all take the same step.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_limits
from tqdm import tqdm

import synkhronos as synk
from synkhronos.extensions import rules
from synkhronos.extensions.train import make_train_step
from synkhronos.host import T, theano

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from demos._arguments import above_zero, add_common_arguments, positive
from demos._reports import plot_runs, report_replicas, report_runs
from demos._shared import Log, count, fork, progress, replicas_equal, usable_threads

PROGRAM = Path(__file__).stem
HOST = {"theano": "Theano", "pytensor": "PyTensor"}[theano.__name__]


def load():
    """Return (pixels, labels) to train with, and to test with: every fifth digit."""
    digits = load_digits()
    pixels = (digits.data / 16).astype("float32")
    labels = digits.target.astype("int32")
    for_test = np.arange(len(labels)) % 5 == 4
    return (pixels[~for_test], labels[~for_test]), (pixels[for_test], labels[for_test])


def cross_entropy(scores, labels):
    """Return -log of the softmax of each row's score at its label; PyTensor has no T.nnet."""
    if HOST == "Theano":
        return T.nnet.categorical_crossentropy(T.nnet.softmax(scores), labels)
    return -T.special.log_softmax(scores, axis=1)[T.arange(labels.shape[0]), labels]


class Network:
    """The graph of a classifier; nothing in it knows about ranks."""

    def __init__(self, hidden, seed):
        self.x = T.fmatrix("x")
        self.y = T.ivector("y")
        self.params = []
        random = np.random.RandomState(seed)
        layer = self.x
        sizes = [64, *hidden, 10]
        for number, (n_in, n_out) in enumerate(zip(sizes[:-1], sizes[1:]), start=1):
            weights = random.normal(scale=n_in**-0.5, size=(n_in, n_out)).astype("float32")
            w = theano.shared(weights, f"w{number}")
            b = theano.shared(np.zeros(n_out, "float32"), f"b{number}")
            self.params += [w, b]
            layer = T.dot(layer, w) + b
            if number <= len(hidden):
                layer = T.tanh(layer)
        self.loss = cross_entropy(layer, self.y).mean()
        self.accuracy = T.eq(layer.argmax(axis=1), self.y).mean(dtype="float32")


def train(log, arguments, data, step, test):
    """Train with ``step(rows)``, which returns the loss of a minibatch: the same for all runs."""
    (_, labels), test_data = data
    n_train = len(labels)
    random = np.random.RandomState(arguments.seed)
    starts = range(0, n_train, arguments.batch)
    log.batch = min(arguments.batch, n_train)
    with progress(total=arguments.epochs * len(starts), desc=log.label) as bar:
        for epoch in range(1, arguments.epochs + 1):
            order = random.permutation(n_train)
            total = 0.0
            for start in starts:
                rows = order[start : start + arguments.batch]
                began = time.perf_counter()
                loss = step(rows)
                log.seconds.append(time.perf_counter() - began)
                total += float(loss) * len(rows)
                bar.update()
            log.losses.append(total / n_train)
            log.accuracies.append(float(test(*test_data)))
            bar.set_postfix(accuracy=log.accuracies[-1], refresh=False)
            yield epoch


def say_compiling(number, what):
    """Print which function is compiled now."""
    print(f"compiling function {number} of 4: {what}", flush=True)


def train_parallel(arguments, data, n_ranks):
    """Train on all ranks; return the log, and whether the ranks end with equal parameters."""
    began = time.perf_counter()
    network = Network(arguments.hidden, arguments.seed)
    say_compiling(1, "a step of training on ranks")

    # One function: x and y are scattered. Every rank computes the gradients of its rows, the
    # gradients are averaged over all rows, and every rank updates its copy of the parameters alike.
    function = make_train_step(
        [network.x, network.y], network.loss, network.params, rules.momentum, arguments.rate
    )
    synk.distribute()  # where PyTensor compiles
    say_compiling(2, "the test on ranks")
    test = synk.function([network.x, network.y], network.accuracy)
    compiled = time.perf_counter()
    synk.distribute()
    distributed = time.perf_counter()
    print(
        f"{count(n_ranks, 'rank')}; compiled in {compiled - began:.1f} s, "
        f"distributed in {distributed - compiled:.1f} s\n"
    )
    inputs = function.build_inputs(*data[0])  # once, in shared memory: each rank picks its rows

    def step(rows):
        return function(*inputs, batch=rows)

    log = Log(f"Synkhronos, {count(n_ranks, 'rank')}")
    for epoch in train(log, arguments, data, step, test):
        tqdm.write(
            f"epoch {epoch:3}   loss {log.losses[-1]:.4f}   "
            f"test accuracy {100 * log.accuracies[-1]:.1f} %"
        )

    log.values = [param.get_value() for param in network.params]
    return log, replicas_equal(network.params)


def train_serial(arguments, data, threads):
    """Train with the host alone, like a serial script, once for each number of threads."""
    logs = []
    network = Network(arguments.hidden, arguments.seed)
    pixels, labels = data[0]
    updates = rules.momentum(network.loss, network.params, arguments.rate)
    first = [(variable, variable.get_value()) for variable in updates]
    say_compiling(3, f"a step in serial {HOST}")
    function = theano.function([network.x, network.y], network.loss, updates=updates)
    say_compiling(4, f"the test in serial {HOST}")
    test = theano.function([network.x, network.y], network.accuracy)

    def step(rows):
        return function(pixels[rows], labels[rows])

    for n_threads in threads:
        for variable, value in first:
            variable.set_value(value)
        log = Log(f"serial {HOST}, {count(n_threads, 'thread')}", is_serial=True)
        with threadpool_limits(n_threads):
            for _ in train(log, arguments, data, step, test):
                pass
        log.values = [param.get_value() for param in network.params]
        logs.append(log)
    return logs


def largest_difference(log, other):
    """Return the largest difference between the parameters that two runs ended with."""
    return max(float(abs(one - two).max()) for one, two in zip(log.values, other.values))


def report(parallel, serial, n_ranks, equal):
    """Print the comparison; return the speedup over the fastest serial run."""
    accuracies = [f"{100 * log.accuracies[-1]:.1f} %" for log in [parallel, *serial]]
    speedup = report_runs(parallel, serial, n_ranks, {"test accuracy": accuracies})
    scale = max(float(abs(value).max()) for value in parallel.values)
    difference = largest_difference(parallel, serial[0])
    print(
        f"Results {'agree' if difference < 1e-3 * scale else 'DIFFER'}: parameters of up to "
        f"{scale:.2f} differ by at most {difference:.1e} from serial {HOST}'s\n"
        "after training; single precision rounds, and ranks add in another order."
    )
    report_replicas(equal)
    return speedup


def parse(argv):
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Train a network on handwritten digits with several ranks, and compare with "
        f"serial {HOST}.",
    )
    add = parser.add_argument
    add("--epochs", type=positive, default=30, metavar="N", help="passes over the digits (30)")
    add("--batch", type=positive, default=512, metavar="N", help="rows in a minibatch (512)")
    add("--hidden", type=positive, nargs=2, default=[512, 512], metavar="N", help="units (512 512)")
    add("--rate", type=above_zero, default=0.2, metavar="R", help="learning rate (0.2)")
    add_common_arguments(parser)
    return parser.parse_args(argv)


def main(argv=None):
    """Run the demo; return its measurements."""
    arguments = parse(argv)
    began = time.perf_counter()
    data = load()
    print(
        f"{len(data[0][1])} digits to train, {len(data[1][1])} to test; network "
        f"64-{arguments.hidden[0]}-{arguments.hidden[1]}-10; minibatches of {arguments.batch}\n"
        f"{HOST} compiles four functions, which takes up to a minute the first time.",
        flush=True,
    )
    n_ranks = fork(arguments, PROGRAM)
    try:
        parallel, equal = train_parallel(arguments, data, n_ranks)
    finally:
        synk.close()
    serial = train_serial(arguments, data, sorted({1, usable_threads()}))
    speedup = report(parallel, serial, n_ranks, equal)
    if arguments.plot:
        plot_runs(arguments.plot, [parallel, *serial], "test accuracy")
    print(f"All in {time.perf_counter() - began:.0f} s")
    return {
        "ranks": n_ranks,
        "losses": parallel.losses,
        "accuracies": parallel.accuracies,
        "serial_accuracies": serial[0].accuracies,
        "difference": largest_difference(parallel, serial[0]),
        "replicas_equal": equal,
        "speedup": speedup,
    }


if __name__ == "__main__":
    main()
