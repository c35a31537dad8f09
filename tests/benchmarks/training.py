"""The time of a step of training beside PyTorch's, in one process and in DistributedDataParallel.

See ``synkhronos bench training``. PyTorch trains the same network with the same rows, on CPUs.
"""

import contextlib
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks import groups
from synkhronos._machine import devices
from synkhronos._wording import count
from synkhronos.tools.bench import networks, training


def add_arguments(parser):
    """Add the options of this benchmark."""
    training.add_arguments(parser)
    groups.add_python(parser)


def measure(args, report):
    """Measure all, and show the tables."""
    python = None
    if args.devices and set(args.devices) != {"cpu"}:
        print("not compared with PyTorch: that is for CPU ranks", file=sys.stderr)
    else:
        with groups.telling("PyTorch", report):
            python = groups.find("torch", args.peer_python)
    training.measure_beside(
        lambda job, n_ranks: _systems(python, job, n_ranks) if python else {}, args, report
    )


plot = training.plot


def _systems(python, job, n_ranks):
    """Return one process with one thread, one with all, and a process for each rank."""
    cores = devices.usable_cores()
    found = {}
    for number, threads in ((1, 1), (1, cores), (n_ranks, max(1, cores // n_ranks))):
        label = count(number, "rank") if number > 1 else count(threads, "thread")
        program = trainers(python, job, number, threads)
        found[f"PyTorch, {label}"] = training.System("torch", number, program)
    return found


@contextlib.contextmanager
def trainers(python, job, n_ranks, threads):
    """Yield processes that train a network."""
    with tempfile.TemporaryDirectory(prefix="torch-") as folder:
        _write(job, Path(folder, "setup.npz"))
        with groups.Group(
            [
                groups.program(
                    "PyTorch", python, "torch_training", rank, n_ranks, threads, job.name, folder,
                    GLOO_SOCKET_IFNAME="lo",
                )
                for rank in range(n_ranks)
            ]
        ) as group:  # fmt: skip
            yield group


def _write(job, path):
    """Write what the processes train: weights, rows, and the settings of the update."""
    network = networks.NETWORKS[job.name]()
    weights = [param.get_value() for param in network.params]
    # Theano turns filters around.
    weights = [w[:, :, ::-1, ::-1] if w.ndim == 4 else w for w in weights]
    arrays = {f"p{number}": values for number, values in enumerate(weights)}
    x, y = network.rows(training.MINIBATCHES * job.batch)
    settings = {"batch": job.batch, "rate": training.RATE, "momentum": training.MOMENTUM[job.rule]}
    np.savez(path, x=x, y=y, **arrays, **settings)
