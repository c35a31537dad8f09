"""Programs that benchmarks measure, each in processes of its own.

    benchmark ── a line of JSON: what to do ──▶ program ──▶ a method of the object that it serves
              ◀── a line of JSON: the answer ──

The lines go through the standard streams of the program, or of the mpirun that starts it. All
programs are there all the time, and one of them works at a time: the others wait for a line.
"""

import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from synkhronos._machine.devices import python_command
from synkhronos._machine.processes import end_with_parent
from synkhronos.tools.bench.frame import Failed

MARK = "synkhronos-bench "  # before the JSON of an answer; other lines are noise
ANSWER_SECONDS = 900  # the first step of a large network is compiled
_END_SECONDS = 15
_SIZE = 1 << 16


def interpreter(code, *arguments):
    """Return the command that runs code that imports Synkhronos in a fresh interpreter."""
    # Last on the path: a checkout that is not installed may hold a theano.py.
    checkout = str(Path(__file__).parents[3])
    return python_command(f"sys.path.append({checkout!r})\n{code}", *arguments)


class Program:
    """A program that answers, from ``__enter__`` to ``__exit__``.

    Parameters
    ----------
    name : str
        In messages.
    line : list of str
        The command line that starts it.
    environment : mapping, optional
    """

    def __init__(self, name, line, environment=None):
        self.name, self._line, self._environment = name, line, environment

    def __enter__(self):
        self._log = tempfile.TemporaryFile()
        self._received = b""
        try:
            self._process = subprocess.Popen(
                self._line,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                start_new_session=True,  # Ctrl-C is for the benchmark, which ends the programs
                preexec_fn=functools.partial(end_with_parent, os.getpid()),
            )
        except OSError as error:
            self._log.close()
            raise Failed(f"{self.name} can't be started: {error}") from None
        return self

    def __exit__(self, kind, error, trace):
        with contextlib.suppress(OSError):
            if kind is None:
                self.send("stop")
            self._process.stdin.close()
        if kind is not None:
            self._process.terminate()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._end()
        self._process.stdout.close()
        self._log.close()

    def ask(self, do, seconds=ANSWER_SECONDS, **message):
        """Let the program do something; return its answer."""
        self.send(do, **message)
        return self.hear(do, seconds)

    def send(self, do, **message):
        """Let the program do something; `hear` returns its answer."""
        with contextlib.suppress(BrokenPipeError):  # the end of its output tells why
            self._process.stdin.write(json.dumps({"do": do, **message}).encode() + b"\n")
            self._process.stdin.flush()

    def hear(self, do="start", seconds=ANSWER_SECONDS):
        """Return the next answer; print nothing of what else the program writes."""
        end = time.monotonic() + seconds
        while True:
            line, newline, rest = self._received.partition(b"\n")
            if newline:
                self._received = rest
                if line.startswith(MARK.encode()):
                    return json.loads(line[len(MARK) :])
                continue
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise Failed(f"{self.name} took too long ({do}). {self._said()}")
            data = os.read(self._process.stdout.fileno(), _SIZE)
            if not data:
                raise Failed(f"{self.name} ended ({do}). {self._said()}")
            self._received += data

    def _said(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2)  # for what it says at its end
        self._log.seek(0)
        text = self._log.read().decode(errors="replace").strip()
        return f"It said:\n{text[-3000:]}" if text else "It said nothing."

    def _end(self):
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self._process.pid, number)
                self._process.wait(_END_SECONDS)


def serve(answers):
    """Answer the benchmark by methods of `answers`, until it says that this is all."""
    for line in sys.stdin:
        message = json.loads(line)
        do = message.pop("do")
        if do == "stop":
            break
        answer(getattr(answers, do)(**message))


def answer(value):
    """Print an answer, in a program."""
    # In one write, because the output of several machines may come together.
    sys.stdout.flush()
    os.write(1, f"\n{MARK}{json.dumps(value)}\n".encode())
