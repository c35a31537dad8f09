"""Train on MNIST with Lasagne and several ranks, each with its part of the images on its device.

The images are scattered once, into shared variables. During training only row numbers are sent:
with `batch_s=` each rank picks from its own rows.
"""

import sys
from pathlib import Path

import lasagne
import numpy as np
import theano

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
        if arguments.parts not in (None, n_ranks):
            sys.exit(f"{PROGRAM}: --parts must be the number of ranks here, {n_ranks}")
        if len(dataset[0]) < n_ranks:
            sys.exit(f"{PROGRAM}: {n_ranks} ranks need as many rows, got {len(dataset[0])}")
        log, result = train_on_ranks(arguments, dataset, n_ranks)
    finally:
        synk.close()
    runs.finish(arguments, log, result)
    return result


def train_on_ranks(arguments, dataset, n_ranks):
    """Train on all ranks; return the log and the measurements."""
    X_train, y_train, X_val, y_val, X_test, y_test = dataset
    graph = build_graph(arguments.model, arguments.seed)
    s_train, s_val = empty_rows("train"), empty_rows("val")
    # Shared variables stand in for the graph's inputs, and each call uses selected rows of them.
    train_fn = train.make_train_step(
        [],
        graph.loss,
        graph.params,
        lasagne.updates.nesterov_momentum,
        runs.RATE,
        runs.MOMENTUM,
        options={"givens": dict(zip([graph.x, graph.y], s_train)), "sliceable_shareds": s_train},
    )
    val_fn = synk.function(
        [],
        [graph.val_loss, graph.val_accuracy],
        givens=dict(zip([graph.x, graph.y], s_val)),
        sliceable_shareds=s_val,
    )
    synk.distribute()

    print("Scattering data to GPUs.")
    synk.scatter([*s_train, *s_val], [X_train, as_targets(y_train), X_val, as_targets(y_val)])
    lengths = synk.get_lengths(s_train[1])
    print(f"  rows on each rank:\t\t{', '.join(map(str, lengths))} (CPU ranks: in their memory)")
    starts = np.cumsum([0, *lengths[:-1]])

    def test():
        # A shared variable can hold any number of rows, so the function is used again.
        synk.scatter(s_val, [X_test, as_targets(y_test)])
        return val_fn(num_slices=4)

    log = Log(f"{count(n_ranks, 'rank')}, rows scattered ahead")
    result = runs.run(
        arguments,
        log,
        graph,
        n_train=len(y_train),
        # On each rank the row numbers start at 0.
        step=lambda parts: train_fn(batch_s=[rows - at for rows, at in zip(parts, starts)]),
        validate=lambda: val_fn(num_slices=4),
        test=test,
        parts=n_ranks,
    )
    result["ranks"] = n_ranks
    result["replicas_equal"] = runs.compare_replicas(graph.params)
    return log, result


def empty_rows(name):
    """Return shared variables for images and labels, to be filled by `synk.scatter`."""
    images = np.zeros((0, 1, 28, 28), theano.config.floatX)
    return [theano.shared(images, f"X_{name}"), theano.shared(np.zeros(0, "int32"), f"y_{name}")]


def as_targets(labels):
    return labels.astype("int32")


if __name__ == "__main__":
    main()
