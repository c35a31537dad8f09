"""Train a ResNet with plain Theano, in one process, for comparison with train_resnet.py."""

import sys
import time
from pathlib import Path

import numpy as np
import theano
from threadpoolctl import threadpool_limits

from synkhronos.extensions import rules, train

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from demos._arguments import add_common_arguments, positive
from demos._reports import plot_runs
from demos._shared import Log, count, float_type, usable_threads
from demos.resnet import common

PROGRAM = Path(__file__).stem


def train_serial(arguments, images, threads, n_ranks=1, rule=rules.momentum):
    """Train with the minibatches of `n_ranks` ranks; return the graph, and a log for each run.

    The run with the first number of threads trains all epochs. Runs with the other numbers train
    one epoch, to measure its time.
    """
    print("Building model")
    graph = common.Graph(arguments, images.n_classes)
    batch = arguments.batch * n_ranks

    print("Building training functions")
    grads = theano.grad(graph.loss, graph.params)
    if arguments.max_norm:
        grads = train.clip_by_global_norm(grads, arguments.max_norm)
    rate = common.learning_rate(arguments, n_ranks, len(images.x))
    updates = rule(grads, graph.params, rate)
    updates.update(graph.statistics)
    step = theano.function([graph.x, graph.y], graph.loss, updates=updates)

    print("Building validation / test function")
    test = theano.function([graph.x, graph.y], graph.accuracy)

    def validate():
        n = len(images.y_valid)
        parts = [slice(start, start + batch) for start in range(0, n, batch)]
        found = [float(test(images.x_valid[p], images.y_valid[p])) for p in parts]
        return np.average(found, weights=[len(images.y_valid[p]) for p in parts])

    print("Starting training")
    variables = step.get_shared()
    first = [variable.get_value() for variable in variables]
    logs = []
    # The run with the first number of threads comes last, because its parameters stay.
    for number, n_threads in reversed(list(enumerate(threads))):
        for variable, value in zip(variables, first):
            variable.set_value(value)
        logs.insert(0, Log(f"serial Theano, {count(n_threads, 'thread')}", is_serial=True))
        with threadpool_limits(n_threads):
            common.train(
                logs[0],
                arguments,
                batch,
                len(images.x),
                lambda rows: step(images.x[rows], images.y[rows]),
                validate,
                n_epochs=1 if number > 0 else None,
            )
    return graph, logs


def parse(argv):
    """Read the command line."""
    parser = common.new_parser("Train a ResNet with plain Theano, in one process.")
    add = parser.add_argument
    add(
        "--ranks", type=positive, default=1, metavar="N", help="take the minibatches of N ranks (1)"
    )
    add("--threads", type=positive, metavar="N", help="of BLAS (one for each core)")
    add_common_arguments(parser, parallel=False)
    return parser.parse_args(argv)


def main(argv=None):
    """Run the demo; return its measurements."""
    arguments = parse(argv)
    began = time.perf_counter()
    with theano.change_flags(floatX=float_type()):
        try:
            images = common.load(arguments, np.empty)
        except common.NoImages as error:
            sys.exit(f"{PROGRAM}: {error}")
        threads = [arguments.threads or usable_threads()]
        graph, [log] = train_serial(arguments, images, threads, arguments.ranks)
    print(f"\n{common.summary([log])}")
    if arguments.plot:
        plot_runs(arguments.plot, [log])
    print(
        f"Total training time {sum(log.seconds):.1f} s, all in {time.perf_counter() - began:.0f} s"
    )
    return {
        "losses": log.losses,
        "accuracies": log.accuracies,
        "examples_per_second": log.rows_per_second,
        "parameters": sum(param.get_value(borrow=True).size for param in graph.params),
        "classes": images.n_classes,
    }


if __name__ == "__main__":
    main()
