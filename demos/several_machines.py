"""Train on the ranks of one machine or of several, and compare with serial Theano.

It runs by itself, and on several machines without a change:

    python demos/several_machines.py
    synkhronos launch --hosts node0,node1 demos/several_machines.py

The rows lie in scattered shared variables, so that they cross the network once.
"""

import argparse
import socket
import sys
from pathlib import Path

import numpy as np
import theano
import theano.tensor as T

import synkhronos as synk
from synkhronos.extensions import train, update_rules

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from demos._arguments import add_rank_arguments, positive, seed
from demos._shared import count, fork, replicas_equal

PROGRAM = Path(__file__).stem
ROWS_OF_A_RANK = 512


def make_rows(n_rows, seed):
    """Return inputs and targets: a curve of three variables, with noise."""
    random = np.random.RandomState(seed)
    x = random.normal(size=(n_rows, 3))
    y = np.sin(x[:, 0]) + x[:, 1] * x[:, 2] + 0.01 * random.normal(size=n_rows)
    return x, y


class Network:
    """A graph with one hidden layer; it knows nothing of ranks."""

    def __init__(self, hidden, seed):
        random = np.random.RandomState(seed)
        self.x, self.y = T.dmatrix("x"), T.dvector("y")
        values = [random.normal(size=(3, hidden)), np.zeros(hidden), random.normal(size=hidden) / 9]
        self.params = [theano.shared(value, name) for value, name in zip(values, ["w", "b", "v"])]
        w, b, v = self.params
        self.loss = T.sqr(T.dot(T.tanh(T.dot(self.x, w) + b), v) - self.y).mean()


def train_on_ranks(arguments, x, y):
    """Train with the rows of all ranks in each step; return losses, and the parameters."""
    network = Network(arguments.hidden, arguments.seed)
    rows = theano.shared(np.zeros((1, 3)), "rows")
    targets = theano.shared(np.zeros(1), "targets")
    step = train.make_train_step(
        [],
        theano.clone(network.loss, {network.x: rows, network.y: targets}),
        network.params,
        update_rules.sgd,
        learning_rate=0.1,
    )
    synk.scatter([rows, targets], [x, y])  # once: no step sends a row
    losses = [float(step()) for _ in range(arguments.steps)]
    return losses, [param.get_value() for param in network.params], replicas_equal(network.params)


def train_serially(arguments, x, y):
    """Train with plain Theano."""
    network = Network(arguments.hidden, arguments.seed)
    updates = update_rules.sgd(network.loss, network.params, learning_rate=0.1)
    step = theano.function([network.x, network.y], network.loss, updates=updates)
    losses = [float(step(x, y)) for _ in range(arguments.steps)]
    return losses, [param.get_value() for param in network.params]


def main(argv=None):
    """Run the demo; return its results."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Train on one machine or several.")
    parser.add_argument("--steps", type=positive, default=100, help="steps of training (100)")
    parser.add_argument("--hidden", type=positive, default=64, help="units (64)")
    add_rank_arguments(parser)
    parser.add_argument("--seed", type=seed, default=1, help="of all random numbers (1)")
    arguments = parser.parse_args(argv)

    n_ranks = fork(arguments, PROGRAM)
    try:
        hosts = [rank.host or socket.gethostname() for rank in synk.status().ranks]
        for host in dict.fromkeys(hosts):
            ranks = [str(rank) for rank, its in enumerate(hosts) if its == host]
            print(f"{host}: rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}")
        # As many on each rank: the average over ranks is then the average over rows.
        x, y = make_rows(ROWS_OF_A_RANK * n_ranks, arguments.seed)
        losses, values, equal = train_on_ranks(arguments, x, y)
    finally:
        synk.close()
    serial_losses, serial_values = train_serially(arguments, x, y)
    difference = max(float(abs(a - b).max()) for a, b in zip(values, serial_values))
    print(f"{count(n_ranks, 'rank')}: loss {losses[0]:.4f} to {losses[-1]:.4f}")
    print(f"serial:  loss {serial_losses[0]:.4f} to {serial_losses[-1]:.4f}")
    print(f"Parameters differ by at most {difference:.1e}; equal on all ranks: {equal}")
    return {
        "ranks": n_ranks,
        "hosts": hosts,
        "losses": losses,
        "serial_losses": serial_losses,
        "difference": difference,
        "replicas_equal": equal,
    }


if __name__ == "__main__":
    main()
