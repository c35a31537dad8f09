"""Train on MNIST with Lasagne and several ranks, which pick their rows from one shared array.

The images stay in memory that all ranks see. Each minibatch is an array of row numbers, which
`batch=` divides over the ranks.
"""

import sys
from pathlib import Path

import lasagne
import numpy as np

import synkhronos as synk
from synkhronos.extensions import train

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from demos._shared import Log, count, fork
from demos.lasagne_mnist import runs
from demos.lasagne_mnist.networks import build_graph

PROGRAM = Path(__file__).stem


def main(argv=None):
    """Run the demo; return its measurements."""
    arguments = runs.parse(argv, PROGRAM, __doc__)
    dataset = runs.load(arguments, PROGRAM)
    n_ranks = fork(arguments, PROGRAM)
    try:
        log, result = train_on_ranks(arguments, dataset, n_ranks)
    finally:
        synk.close()
    runs.finish(arguments, log, result)
    return result


def train_on_ranks(arguments, dataset, n_ranks):
    """Train on all ranks; return the log and the measurements."""
    graph = build_graph(arguments.model, arguments.seed)
    # Any rule of Lasagne works: it gets gradients that are averaged over all ranks.
    train_fn = train.make_train_step(
        [graph.x, graph.y],
        graph.loss,
        graph.params,
        lasagne.updates.nesterov_momentum,
        runs.RATE,
        runs.MOMENTUM,
    )
    val_fn = synk.function([graph.x, graph.y], [graph.val_loss, graph.val_accuracy])
    synk.distribute()

    # Data: arrays that all ranks see. Labels of uint8 become the int32 of the function's input.
    X_train, y_train = train_fn.build_inputs(*dataset[0:2])
    X_val, y_val = val_fn.build_inputs(*dataset[2:4])
    X_test, y_test = val_fn.build_inputs(*dataset[4:6])

    log = Log(f"{count(n_ranks, 'rank')}, rows picked from Data")
    result = runs.run(
        arguments,
        log,
        graph,
        n_train=len(y_train),
        step=lambda parts: train_fn(X_train, y_train, batch=np.concatenate(parts)),
        # In slices, because the activations of all rows at once would fill the memory.
        validate=lambda: val_fn(X_val, y_val, num_slices=4),
        test=lambda: val_fn(X_test, y_test, num_slices=4),
        parts=arguments.parts or 1,
    )
    result["ranks"] = n_ranks
    result["replicas_equal"] = runs.compare_replicas(graph.params)
    return log, result


if __name__ == "__main__":
    main()
