"""Train on MNIST with Lasagne and plain Theano, for comparison with the demos with ranks."""

import sys
from pathlib import Path

import lasagne
import numpy as np
import theano

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from demos._shared import Log
from demos.lasagne_mnist import runs
from demos.lasagne_mnist.networks import build_graph

PROGRAM = Path(__file__).stem


def main(argv=None):
    """Run the demo; return its measurements."""
    arguments = runs.parse(argv, PROGRAM, __doc__, parallel=False)
    X_train, y_train, X_val, y_val, X_test, y_test = runs.load(arguments, PROGRAM)

    graph = build_graph(arguments.model, arguments.seed)
    updates = lasagne.updates.nesterov_momentum(graph.loss, graph.params, runs.RATE, runs.MOMENTUM)
    train_fn = theano.function([graph.x, graph.y], graph.loss, updates=updates)
    val_fn = theano.function([graph.x, graph.y], [graph.val_loss, graph.val_accuracy])

    def step(parts):
        rows = np.concatenate(parts)
        return train_fn(X_train[rows], y_train[rows])

    def evaluate(x, y):
        """Return loss and accuracy, from 500 rows at a time, as all would fill the memory."""
        slices = [slice(start, start + 500) for start in range(0, len(y), 500)]
        values = [val_fn(x[rows], y[rows]) for rows in slices]
        return np.average(values, axis=0, weights=[len(y[rows]) for rows in slices])

    log = Log("serial Theano", is_serial=True)
    result = runs.run(
        arguments,
        log,
        graph,
        n_train=len(y_train),
        step=step,
        validate=lambda: evaluate(X_val, y_val),
        test=lambda: evaluate(X_test, y_test),
        parts=arguments.parts or 1,
    )
    runs.finish(arguments, log, result)
    return result


if __name__ == "__main__":
    main()
