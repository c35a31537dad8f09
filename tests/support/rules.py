"""Runs of rules in processes of mpirun, with the model of ``support.rule_model``."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
import theano
import theano.tensor as T

from support.compatible import restored
from support.launching import FOR_ROOT, MPIRUN, needs_mpirun  # noqa: F401
from support.leaks import processes_with
from support.waiting import LONG, wait_until
from synkhronos.parameter_server.group import membership
from synkhronos.rules import compatible

MODEL = str(Path(__file__).with_name("rule_model.py"))
README = """\
# launch_session.cfg
RULE=BSP
MODELFILE=models.modelfile
MODELCLASS=ModelClass
DEVICES=cuda0,cuda1
"""  # of Theano-MPI
QUICKLY = "cxx=,mode=FAST_COMPILE,floatX=float32"


class Launched:
    """``synkhronos rule`` with a CPU rank for each device; its output is read while it runs."""

    before: tuple = ()  # of its command line

    def __init__(self, rule, n, folder, modelclass="Model", settings=(), file=MODEL, **given):
        self.n = n
        line = [*self.before, sys.executable, "-m", "synkhronos", "rule", rule, file, modelclass]
        line += ["--devices", ",".join(["cpu"] * n)]
        for name, value in {"print_freq": 1000, "snapshot_freq": 0, **given}.items():
            line += [f"--{name.replace('_', '-')}"] + [str(value)] * (value is not True)
        for name, value in dict(settings).items():
            line += ["--set", f"{name}={value}"]
        self._start(line, folder)

    def _start(self, line, folder):
        self.folder, self._mark = folder, secrets.token_hex(8)
        # Compiling takes longer than all else here, and these networks are small.
        flags = {"THEANO_FLAGS": QUICKLY, "SYNKHRONOS_TEST_RUN": self._mark}
        self.process = subprocess.Popen(
            line,
            cwd=folder,
            env={**os.environ, **FOR_ROOT, **flags},
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
    def variable(self):
        """A variable that all processes of the run have."""
        return f"SYNKHRONOS_TEST_RUN={self._mark}"

    @property
    def output(self):
        return "".join(self.lines)

    def wait_for(self, text):
        """Wait until the output has a text."""
        wait_until(lambda: text in self.output or self.process.poll() is not None)
        assert text in self.output, self.output

    def wait(self, seconds=300):
        """Wait for the end; return the exit status."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"no end after {seconds} s:\n{self.output}") from None
        self._reader.join(LONG)
        self.process.stdout.close()
        return self.process.returncode

    module = "synkhronos.rules.worker"

    def pid_of(self, rank):
        """Return the number of a rank's process, which its launcher has started."""
        for process in processes_with(self.variable):
            with contextlib.suppress(psutil.Error, OSError):
                is_one = self.module in process.cmdline()
                if is_one and membership.place_of(process.environ())[0] == rank:
                    return process.pid
        raise AssertionError(f"rank {rank} has no process:\n{self.output}")

    def send(self, rank, number=signal.SIGKILL):
        """Send a signal to a rank."""
        os.kill(self.pid_of(rank), number)

    def interrupt(self):
        """Press Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

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


class Serial:
    """Momentum SGD of plain Theano on rows of a model; the rates of biases are twice as large."""

    def __init__(self, model, rate, mu=0.0, decay=0.0):
        x, y = T.fmatrix(), T.ivector()
        self.params = [theano.shared(each) for each in model.first_parameters()]
        cost, _ = model.expressions(x, y, self.params)
        self.rate = theano.shared(np.float32(rate))
        updates = []
        for p, g in zip(self.params, T.grad(cost, self.params)):
            is_matrix = p.ndim > 1
            v = theano.shared(np.zeros_like(p.get_value()))
            moved = np.float32(mu) * v + g + (np.float32(decay) * p if is_matrix else 0)
            updates += [(v, moved), (p, p - (1 if is_matrix else 2) * self.rate * moved)]
        self.step = theano.function([x, y], cost, updates=updates)

    @property
    def values(self):
        """All parameters in one vector."""
        return np.concatenate([p.get_value().ravel() for p in self.params])

    @values.setter
    def values(self, values):
        at = 0
        for p in self.params:
            shape = p.get_value().shape
            p.set_value(values[at : at + np.prod(shape)].reshape(shape).astype("float32"))
            at += np.prod(shape)


def untrained_cost():
    """Return the validation cost before the first step."""
    with restored():
        model = compatible.import_model(MODEL)
    x, y = (each[:8] for each in model.rows(96))
    symbols = T.fmatrix(), T.ivector()
    cost, _ = model.expressions(*symbols, [T.constant(p) for p in model.first_parameters()])
    return float(cost.eval(dict(zip(symbols, (x, y)))))
