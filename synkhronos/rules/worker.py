"""The process of one device: ``python -u -m synkhronos.rules.worker JSON``.

    the job ──▶ the device's flags ──▶ the group ──▶ the model's file ──▶ the rule's loop ──▶ status

The launcher starts it, on one machine, or mpirun on several. The order counts: Theano reads its
flags when it is imported, and a process that fails must be in the group, so that others hear of it.
"""

from __future__ import annotations

import configparser
import importlib
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Sequence

from synkhronos.parameter_server.group import membership
from synkhronos.rules.job import Interrupt, Job
from synkhronos.rules.options import SERVED, TOGETHER

_FLAGS = "THEANO_FLAGS"
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def main(argv: Sequence[str]) -> int:
    """Run the process of one device to its end; return the exit status."""
    job = Job.from_json(argv[1])
    interrupt = Interrupt()
    signal.signal(signal.SIGUSR1, interrupt.set)
    rank, n_here = membership.place_of(os.environ) or (0, 1)  # ranks of this machine
    _set_environment(job, rank, n_here)
    group = membership.join()
    if group.size != len(job.devices):
        sys.stderr.write(f"{group.size} processes were started for {len(job.devices)} ranks\n")
        return 1
    group.introduce(job.devices[group.rank])
    group.patience = job.options["patience"]
    _prepare(job, rank)
    from synkhronos import _host

    try:
        device = _device_of(job, rank)
        if device != "cpu":
            _host.require_open_device(device)
        status = _train(job, group, interrupt)
    except BaseException as error:
        status = membership.FOLLOWS if _report(error, job, group) else 1
        if job.rule in TOGETHER:  # the others wait for this rank in the next exchange
            group.abort()
    group.close()
    return status


def _set_environment(job, rank, n_here):
    """Set what must be set before NumPy and Theano are imported."""
    os.environ["SYNKHRONOS_RANK"], os.environ["SYNKHRONOS_SIZE"] = str(rank), str(len(job.devices))
    cores = job.cores[rank] if job.cores else None
    if cores:
        os.sched_setaffinity(0, cores)
    os.environ[_FLAGS] = flags(os.environ.get(_FLAGS, ""), _device_of(job, rank))
    os.environ.setdefault("KERAS_BACKEND", "theano")  # parameters are Theano's shared variables
    usable = len(os.sched_getaffinity(0))
    threads = usable if cores else max(1, usable // max(1, n_here))
    for name in _THREADS:
        os.environ.setdefault(name, str(threads))
    batches = job.options.get("made_batches")
    if batches is not None:
        os.environ["SYNKHRONOS_MADE_BATCHES"] = str(batches)
    os.environ["SYNKHRONOS_SEED"] = str(job.options["seed"])
    # What a data class adds to seeds that all ranks share.
    os.environ["SYNKHRONOS_STREAM"] = "0" if job.rule in TOGETHER else str(rank)


def _device_of(job, rank):
    device = job.devices[rank] if rank < len(job.devices) else "cpu"
    is_server = rank == 0 and job.rule in SERVED  # which computes on the host
    return "cpu" if device == "none" or is_server else device


def flags(given: str, device: str) -> str:
    """Return Theano's flags for a device; model files of Theano-MPI compute in float32.

    >>> flags("device=cuda,optimizer=fast_compile,floatX=float64", "cpu")
    'optimizer=fast_compile,floatX=float64,device=cpu'
    """
    kept = [each for each in given.split(",") if each and not each.startswith("device=")]
    if not any(each.startswith("floatX=") for each in kept) and not _has_floatx_in_files():
        kept.append("floatX=float32")
    return ",".join([*kept, f"device={device}"])


def _has_floatx_in_files():
    parser = configparser.ConfigParser(interpolation=None)
    names = os.environ.get("THEANORC", str(Path.home() / ".theanorc")).split(os.pathsep)
    try:
        parser.read([os.path.expanduser(name) for name in names])
    except configparser.Error:
        return False  # Theano's own error is better
    return parser.has_option("global", "floatX")


def _prepare(job, rank):
    import random

    import numpy as np

    from synkhronos._machine.devices import limit_threads
    from synkhronos._machine.log import name_rank
    from synkhronos.rules import compatible

    name_rank(rank)
    compatible.install()
    limit_threads(int(os.environ["OMP_NUM_THREADS"]))
    seed = job.options["seed"]
    own = seed if job.rule in TOGETHER else (seed + rank) % 2**32
    np.random.seed(own)
    random.seed(own)


def _train(job, group, interrupt):
    module = importlib.import_module(f"synkhronos.rules.{job.rule.lower()}")
    return module.run(job, group, interrupt)


def _report(error, job, group):
    """Write the traceback of an error, in one piece, with the rank, its device and its host.

    It goes to the log alone if a package or a file is missing, which one rank says for all. Return
    whether the error is that of another rank.
    """
    from synkhronos.comm import Aborted
    from synkhronos.parameter_server.group.interface import RankLost

    rank, follows = group.rank, isinstance(error, (RankLost, Aborted))
    if isinstance(error, RankLost):  # the lost rank writes its own traceback
        text = f"{error}, so this rank ends too\n"
    elif isinstance(error, Aborted):
        text = "another rank has failed, so this rank ends too\n"
    else:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    text = f"rank {rank} ({job.devices[rank]}) on {group.hosts[rank]} failed:\n{text}"
    if isinstance(error, (ImportError, FileNotFoundError)):
        lines = [membership.FOR_LOG + line for line in text.splitlines(keepends=True)]
        text = "".join([*lines, membership.ONCE, _sentence(error), "\n"])
    sys.stdout.flush()
    sys.stderr.write(text)
    sys.stderr.flush()
    return follows


def _sentence(error):
    """Return what is missing, on one line, with the user's line that needs it."""
    from synkhronos import _wording
    from synkhronos._host import pythons
    from synkhronos._tracebacks import is_of_library
    from synkhronos.rules.modelfile import EXTRAS

    said = " ".join(str(error).split())
    package = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    if isinstance(error, ModuleNotFoundError) and package in EXTRAS:
        said += f": {pythons.install(EXTRAS[package])}"
    frames = [(at.filename, at.lineno) for at in traceback.extract_tb(error.__traceback__)]
    own = [at for at in frames if not is_of_library(at[0])]
    return _wording.printable(said + " ({}, line {})".format(*own[-1]) if own else said)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
