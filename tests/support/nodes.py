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
