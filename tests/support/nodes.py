"""Runs of scripts on servers and workers: ``synkhronos launch --servers S --workers W``."""

import contextlib
import sys

import psutil

from support import rules
from support.leaks import processes_with

needs_mpirun = rules.needs_mpirun

# What a script begins with that prints its log and ends some rounds after a warning.
COUNT_WARNINGS = """
import logging

class Handler(logging.StreamHandler):
    n_warnings = 0

    def emit(self, record):
        super().emit(record)
        Handler.n_warnings += 1

logging.basicConfig(format="log: %(message)s", handlers=[Handler()])
"""

# Worker 1 ends somehow after three rounds, or "goes on". The others go on until there is an error,
# or in dist_async 50 rounds after a warning, if it does not go on.
ROUNDS = (
    COUNT_WARNINGS
    + """
import os, signal, sys, time
import numpy as np
from synkhronos import parameter_server as ps

left = 50  # rounds after a warning
kind, end = sys.argv[1:]

def add(key, gradient, weight):
    weight += gradient

store = ps.create(kind)
if kind == "dist_async" or end == "updates":
    store.set_updater(add)
store.init("w", np.zeros(2000, np.float32))
try:
    for version in range(1, 10_000):
        array = np.ones(2000, np.float32)
        store.pushpull("w", array).wait(60)
        if version == 3:
            print("begun", store.rank, os.getpid(), os.getppid(), flush=True)
            if store.rank == 1:
                if end == "is killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if end == "exits":
                    sys.exit(3)
                if end == "raises":
                    raise ValueError("a reason")
                if end == "leaves":
                    break
        left -= Handler.n_warnings
        is_last = version == 50 if end == "leaves" else end != "goes on" and left <= 0
        if is_last and kind == "dist_async":
            break
        time.sleep(0.01)
except ps.ProcessLost as error:
    print("told", store.rank, type(error).__name__, error.rank, error.host, error, flush=True)
    sys.exit(7)
store.close()
print("closed", store.rank, flush=True)
"""
)


class Launched(rules.Launched):
    """A run of a script, given as text; its output is read while it runs."""

    module = "synkhronos.parameter_server.remote.node"

    def __init__(self, folder, script, *arguments, servers=1, workers=2, options=()):
        path = folder / "script.py"
        path.write_text(script)
        line = [sys.executable, "-m", "synkhronos", "launch", *options]
        line += ["--servers", str(servers), "--workers", str(workers), str(path)]
        self._start([*line, *map(str, arguments)], folder)

    def said(self, text):
        """Return the lines of the output that begin with a text, sorted."""
        return sorted(line.rstrip("\n") for line in self.lines if line.startswith(text))

    def left_over(self):
        """Return the processes of this run that have not ended."""
        found = []
        for process in processes_with(self.variable):
            with contextlib.suppress(psutil.Error, OSError):
                found.append((process.pid, process.cmdline()))
        return found


def run(folder, script, *arguments, status=0, **given):
    """Run a script to its end; check the exit status, and that no process is left."""
    launched = Launched(folder, script, *arguments, **given)
    assert launched.wait() == status, launched.output
    assert not launched.left_over()
    return launched
