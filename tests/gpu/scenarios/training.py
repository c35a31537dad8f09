"""Networks trained on all ranks, against serial Theano on the CPU, in a process of its own.

As a program it is the reference: ``python -m scenarios.training cnn 20 48 result.npz``.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import theano

import synkhronos as synk
from scenarios import Skip, scenario
from scenarios.compare import close, equal, relative, same, true
from synkhronos.extensions import update_rules
from synkhronos.tools.bench.networks import NETWORKS

FORKS = True

TOLERANCE = 1e-4  # of the largest loss, and of the largest number in a parameter
STEPS = 20
RATES = {"learning_rate": np.float32(0.01), "momentum": np.float32(0.9)}


@scenario(limit=400)
def mlp(run):
    """Gradients averaged inside of the function, with minibatches of uneven rows."""
    return train(run, "mlp", in_the_graph)


@scenario(limit=400)
def mlp_by_collectives(run):
    """Gradients stored in shared variables, averaged by a collective, and applied."""
    return train(run, "mlp", by_collectives, rows_per_rank=max(48 // run.n, 8))


@scenario(limit=600)
def cnn(run):
    """As mlp, with convolutions and max pooling."""
    return train(run, "cnn", in_the_graph)


@scenario(limit=600)
def cnn_by_collectives(run):
    """As mlp_by_collectives, with convolutions and max pooling."""
    return train(run, "cnn", by_collectives, rows_per_rank=max(48 // run.n, 8))


def in_the_graph(network):
    """Return a step whose function reduces the gradients itself."""
    grads = map(synk.ops.all_reduce, theano.grad(network.loss, network.params))
    updates = update_rules.momentum(list(grads), network.params, **RATES)
    return synk.function([network.x, network.y], network.loss, updates=updates)


def by_collectives(network):
    """Return a step of two functions, with an all_reduce between them."""
    stored = [theano.shared(np.zeros_like(param.get_value())) for param in network.params]
    grads = theano.grad(network.loss, network.params)
    compute = synk.function([network.x, network.y], network.loss, updates=list(zip(stored, grads)))
    apply = synk.function([], updates=update_rules.momentum(stored, network.params, **RATES))

    def step(x, y):
        loss = compute(x, y)
        synk.all_reduce(stored)
        apply()
        return loss

    return step


def minibatches(network, steps, n_rows):
    """Yield images and labels of each step; their rows vary unless a number is given."""
    most = n_rows or 48
    x, y = network.rows(steps * most)
    for step in range(steps):
        rows = slice(step * most, step * most + (n_rows or (48, 47, 33, 5, 1)[step % 5]))
        yield x[rows], y[rows]


def train(run, kind, form, rows_per_rank=0):
    """Train, compare with the reference, and compare the ranks with each other.

    `rows_per_rank` is for a form that weighs all ranks the same; without it the rows vary.
    """
    if run.quick and kind == "cnn":
        raise Skip("--quick")
    steps = 5 if run.quick else STEPS
    network = NETWORKS[kind]()
    step = form(network)
    n_rows = run.n * rows_per_rank
    losses = [float(step(x, y)) for x, y in minibatches(network, steps, n_rows)]
    expected_losses, expected = reference(kind, steps, n_rows)

    same(len(expected), len(network.params), "the number of parameters of the reference")
    of_losses = relative(losses, expected_losses)
    of_params = max(relative(p.get_value(), e) for p, e in zip(network.params, expected))
    for param in network.params:
        for rank in range(1, run.n):
            value, what = synk.get_value(rank, param), f"{param} of rank {rank}"
            if run.is_mixed:
                close(value, param.get_value(), what, TOLERANCE)
            else:
                equal(value, param.get_value(), what)
    replicas = "equal but for rounding" if run.is_mixed else "equal"
    summary = (
        f"{steps} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}; largest relative difference of "
        f"losses {of_losses:.1e}, of parameters {of_params:.1e}; replicas {replicas}"
    )
    # So written, NaN is not less.
    true(of_losses < TOLERANCE and of_params < TOLERANCE, summary)
    return summary


def reference(kind, steps, n_rows):
    """Return the losses and the parameters of serial Theano on the CPU."""
    flags = os.environ.get("THEANO_FLAGS", "") + ",device=cpu"
    with tempfile.TemporaryDirectory(prefix="synkhronos-check-") as folder:
        file = os.path.join(folder, "result.npz")
        subprocess.run(
            [sys.executable, "-m", __name__, kind, str(steps), str(n_rows), file],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "THEANO_FLAGS": flags},
            check=True,
        )
        with np.load(file) as arrays:
            losses, *params = [arrays[name] for name in arrays.files]
    return losses, params


def serial(kind, steps, n_rows, file):
    """Train with plain Theano; write the losses and the parameters."""
    network = NETWORKS[kind]()
    updates = update_rules.momentum(network.loss, network.params, **RATES)
    step = theano.function([network.x, network.y], network.loss, updates=updates)
    losses = [float(step(x, y)) for x, y in minibatches(network, int(steps), int(n_rows))]
    np.savez(file, losses, *[param.get_value() for param in network.params])


if __name__ == "__main__":
    serial(*sys.argv[1:])
