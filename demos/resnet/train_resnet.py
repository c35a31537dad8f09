"""Train a ResNet on several ranks, and compare with serial Theano on the same minibatches.

    images in Data ──▶ rows of a minibatch ──▶ each rank: loss, gradients, statistics
                                                 │
                       parameters, running statistics ◀── averaged over the ranks, in one round

The images are synthetic, or those of a folder. By default a small network trains on small images
for a minute or two; ``--depth 50 --width 64 --size 224 --classes 1000`` is ResNet-50 at full size.
Serial Theano trains afterwards, to measure the speedup of the ranks; ``--no-compare`` leaves it
out, for training that takes long.
"""

import functools
import sys
import time
from pathlib import Path

import theano

import synkhronos as synk
from synkhronos.extensions import rules, train

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from demos._arguments import add_common_arguments
from demos._reports import plot_runs, report_replicas, report_speedup
from demos._shared import Log, count, float_type, fork, replicas_equal, usable_threads
from demos.resnet import common
from demos.resnet.train_resnet_theano import train_serial

PROGRAM = Path(__file__).stem


def train_resnet(
    batch_size=64,
    learning_rate=1e-3,
    n_epoch=3,
    do_valid=False,
    update_rule=rules.sgd,
    *,
    arguments=(),
    **rule_arguments,
):
    """Train ResNet-50 at full size on 4096 synthetic images, as the 2017 demo did.

    Parameters
    ----------
    batch_size : int
        Rows of each rank.
    learning_rate : float
        For the rows of one rank; the rate is this times the number of ranks.
    n_epoch : int
    do_valid : bool
        Compute the accuracy of 1024 other images after each epoch.
    update_rule : callable
        Such as ``lasagne.updates.adam``.
    arguments : list of str
        Arguments of the command line, which override the others.
    **rule_arguments
        For the rule.

    Returns
    -------
    dict
        As `main`.
    """
    like_2017 = "--depth 50 --width 64 --size 224 --classes 1000 --examples 4096 --warm-up 0"
    settings = [*like_2017.split(), "--no-compare", f"--batch={batch_size}", f"--epochs={n_epoch}"]
    settings += [f"--rate={learning_rate}"] + ["--no-validation"] * (not do_valid)
    return run(parse([*settings, *arguments]), functools.partial(update_rule, **rule_arguments))


def main(argv=None):
    """Run the demo; return its measurements."""
    return run(parse(argv), rules.momentum)


def parse(argv):
    """Read the command line."""
    parser = common.new_parser(
        "Train a ResNet on several ranks, and compare with serial Theano on the same minibatches."
    )
    add_common_arguments(parser)
    add = parser.add_argument
    add("--synchronized", action="store_true", help="normalize with the rows of all ranks")
    add("--no-compare", dest="compare", action="store_false", help="leave serial Theano out")
    return parser.parse_args(argv)


def run(arguments, rule):
    """Train on the ranks, then serially; report and return the measurements."""
    began = time.perf_counter()
    with theano.change_flags(floatX=float_type()):
        n_ranks = fork(arguments, PROGRAM)
        try:
            images = common.load(arguments, shared_memory)
            graph, log, equal = train_parallel(arguments, images, n_ranks, rule, began)
        except common.NoImages as error:
            sys.exit(f"{PROGRAM}: {error}")
        finally:
            synk.close()
        logs = [log]
        if arguments.compare:
            threads = sorted({1, usable_threads()})
            print(f"\nThe same with serial Theano, with minibatches of {log.batch}")
            serial, serial_logs = train_serial(
                arguments, images.as_arrays(), threads, n_ranks, rule
            )
            logs += serial_logs
    found = {
        "ranks": n_ranks,
        "classes": images.n_classes,
        "losses": log.losses,
        "accuracies": log.accuracies,
        "replicas_equal": equal,
        "examples_per_second": log.rows_per_second,
        "kept": [variable.get_value() for variable in graph.kept],
    }
    print(f"\n{common.summary(logs, n_ranks)}\n")
    if arguments.compare:
        found.update(compare(arguments, graph, serial, logs, n_ranks))
    report_replicas(equal, "parameters and running statistics")
    if arguments.plot:
        plot_runs(arguments.plot, logs)
    print(
        f"Total training time {sum(log.seconds):.1f} s, all in {time.perf_counter() - began:.0f} s"
    )
    return found


def shared_memory(shape, dtype):
    """Return Data without values."""
    return synk.data(shape=shape, dtype=dtype)


def train_parallel(arguments, images, n_ranks, rule, began):
    """Train on all ranks; return the graph, the log, and whether all ranks' values are equal."""
    n_slices = -(-len(images.x_valid) // (n_ranks * arguments.batch))
    if arguments.validate:
        print(f"Will compute validation using {n_slices} slices")

    print("Building model")
    graph = common.Graph(arguments, images.n_classes, arguments.synchronized)

    print("Building training functions")
    step = train.make_train_step(
        [graph.x, graph.y],
        graph.loss,
        graph.params,
        rule,
        common.learning_rate(arguments, n_ranks, len(images.x)),
        max_norm=arguments.max_norm,
        averages=graph.statistics,
        per_rank=None if arguments.synchronized else "normalization",
    )
    print("Building validation / test function")
    test = synk.function([graph.x, graph.y], graph.accuracy)
    synk.distribute()
    print(f"Total setup time {time.perf_counter() - began:.1f} s")

    print("Starting training")
    log = Log(f"Synkhronos, {count(n_ranks, 'rank')}")
    common.train(
        log,
        arguments,
        n_ranks * arguments.batch,
        len(images.x),
        lambda rows: step(images.x, images.y, batch=rows),
        lambda: test(images.x_valid, images.y_valid, num_slices=n_slices),
    )
    return graph, log, replicas_equal(graph.params + graph.kept)


def compare(arguments, graph, serial, logs, n_ranks):
    """Print and return the speedup of the ranks, and their differences from serial Theano."""
    parallel, *serial_logs = logs
    speedup = report_speedup(parallel, serial_logs, n_ranks)
    # The first serial run has one thread.
    efficiency = serial_logs[0].milliseconds / parallel.milliseconds / n_ranks
    print(f"{count(n_ranks, 'rank')}: {100 * efficiency:.0f} % of {n_ranks} times one thread.")
    pairs = zip(graph.params + graph.kept, serial.params + serial.kept)
    difference = max(abs(one.get_value() - two.get_value()).max() for one, two in pairs)
    losses = [abs(a - b) for a, b in zip(parallel.losses, serial_logs[0].losses)]
    print(
        f"Losses differ from serial Theano's by {losses[0]:.1e} in the first epoch and by "
        f"{losses[-1]:.1e} in the last:"
    )
    if arguments.synchronized:
        print(
            "single precision rounds, and where that takes the input of a rectifier across zero,\n"
            "its gradient comes or goes. With THEANO_FLAGS=floatX=float64 they stay together."
        )
    else:
        print("each rank normalizes with its own rows; with --synchronized it would be with all.")
    return {
        "speedup": speedup,
        "efficiency": efficiency,
        "difference": float(difference),
        "serial_losses": serial_logs[0].losses,
        "serial_accuracies": serial_logs[0].accuracies,
        "serial_kept": [variable.get_value() for variable in serial.kept],
    }


if __name__ == "__main__":
    main()
