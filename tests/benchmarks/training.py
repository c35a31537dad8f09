"""The time of a step of training beside PyTorch's, in one process and in DistributedDataParallel.

See ``synkhronos bench training``. PyTorch trains the same network with the same rows: on CPUs, or
beside ranks on CUDA devices in one process on the first of these, without TF32.
"""

import contextlib
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks import groups
from synkhronos._machine import cores, devices
from synkhronos._wording import count
from synkhronos.tools.bench import networks, training


def add_arguments(parser):
    """Add the options of this benchmark."""
    training.add_arguments(parser)
    groups.add_python(parser)


def measure(args, report):
    """Measure all, and show the tables."""
    python, names = None, args.devices or ["cpu"]
    if {*map(devices.kind, names)} in ({"cpu"}, {"cuda"}):
        with groups.telling("PyTorch", report):
            python = groups.find("torch", args.peer_python)
    else:
        print("not compared with PyTorch: that is for ranks on CPUs or CUDA", file=sys.stderr)
    training.measure_beside(
        lambda job, n_ranks: _systems(python, job, n_ranks, names[0]) if python else {},
        args,
        report,
    )


plot = training.plot


def _systems(python, job, n_ranks, device):
    """Return one process with one thread, one with all, and a process for each rank.

    On CUDA it is one process.
    """
    cores = devices.usable_cores()
    layouts = [(1, 1), (1, cores), (n_ranks, 1 if job.one_core else max(1, cores // n_ranks))]
    found = {}
    for number, threads in [(1, cores)] if device != "cpu" else layouts:
        label = count(number, "rank") if number > 1 else count(threads, "thread")
        program = trainers(python, job, number, threads, device)
        label = label if device == "cpu" else device
        found[f"PyTorch, {label}"] = training.System("torch", number, program)
    return found


@contextlib.contextmanager
def trainers(python, job, n_ranks, threads, device="cpu", network=None):
    """Yield processes that train a network: one of `networks`, or the one that is given."""
    with tempfile.TemporaryDirectory(prefix="torch-") as folder:
        _write(job, network or networks.NETWORKS[job.name](), Path(folder, "setup.npz"))
        # As our ranks.
        bound = cores.spread(n_ranks) if job.one_core and n_ranks > 1 else []
        with groups.Group(
            [
                groups.program(
                    "PyTorch", python, "torch_training", rank, n_ranks, threads, *bound,
                    device.replace("cuda", "cuda:").rstrip(":"), job.name, folder,
                    GLOO_SOCKET_IFNAME="lo",
                )
                for rank in range(n_ranks)
            ]
        ) as group:  # fmt: skip
            yield group


def _write(job, network, path):
    """Write what the processes train: weights, rows, and the settings of the update."""
    weights = [param.get_value() for param in network.params]
    # Theano turns filters around.
    weights = [w[:, :, ::-1, ::-1] if w.ndim == 4 else w for w in weights]
    arrays = {f"p{number}": values for number, values in enumerate(weights)}
    x, y = network.rows(training.MINIBATCHES * job.batch)
    settings = {"batch": job.batch, "rate": training.RATE, "momentum": training.MOMENTUM[job.rule]}
    np.savez(path, x=x, y=y, **arrays, **settings)
