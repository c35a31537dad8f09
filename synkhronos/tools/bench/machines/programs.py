"""The two programs that ``synkhronos bench machines`` measures, as the benchmark sees them.

    benchmark ── a line of JSON ──▶ mpirun ──▶ session.py, on the ranks of Synkhronos
              ◀── a line of JSON ──
              ── a line of JSON ──▶ mpirun ──▶ processes.py, in each process of MPI
              ◀── a line of JSON ──

Both are there all the time, and one of them works at a time. The lines go through the standard
streams of mpirun.
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
from synkhronos.comm.mpi import folders
from synkhronos.tools import launch

MARK = "synkhronos-bench "
ANSWER_SECONDS = 900  # the first step of a large network is compiled
_END_SECONDS = 15
_SIZE = 1 << 16


class ProgramError(Exception):
    """A program did not start, failed, or gave no answer; the message is for the user."""


class Program:
    """A program on all machines, from ``__enter__`` to ``__exit__``.

    Parameters
    ----------
    name : str
    line : list of str
        The command line that starts it.
    """

    def __init__(self, name, line):
        self.name = name
        self._line = line

    def __enter__(self):
        self._log = tempfile.TemporaryFile()
        self._received = b""
        self._folder = folders.of_mpirun(os.environ)
        self._process = subprocess.Popen(
            self._line,
            env=self._folder.__enter__(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C is for the benchmark, which ends the programs
            preexec_fn=functools.partial(end_with_parent, os.getpid()),
        )
        return self

    def __exit__(self, *exception):
        with contextlib.suppress(OSError):
            if exception[0] is None:
                self._send({"do": "stop"})
            self._process.stdin.close()
        if exception[0] is not None:
            self._process.terminate()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._end()
        self._process.stdout.close()
        self._log.close()
        self._folder.__exit__(None, None, None)

    def ask(self, do, seconds=ANSWER_SECONDS, **message):
        """Let the program do something; return its answer."""
        with contextlib.suppress(BrokenPipeError):  # the end of its output tells why
            self._send({"do": do, **message})
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
                raise ProgramError(f"{self.name} took too long ({do}). {self._said()}")
            data = os.read(self._process.stdout.fileno(), _SIZE)
            if not data:
                raise ProgramError(f"{self.name} ended ({do}). {self._said()}")
            self._received += data

    def _send(self, message):
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

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


def session(hosts, args):
    """Return the program that measures Synkhronos."""
    line = python_command("from synkhronos.__main__ import main; sys.exit(main())", "launch")
    names = [host.name if host.ranks is None else f"{host.name}:{host.ranks}" for host in hosts]
    line += ["--hosts", ",".join(names), "--mpirun-args", args.mpirun_args]
    line += ["--agent", args.agent] if args.agent else []
    return Program("Synkhronos", [*line, str(Path(__file__).with_name("session.py"))])


def processes(hosts, counts, args):
    """Return the program that measures MPI, with so many processes on each machine."""
    code = "from synkhronos.tools.bench.machines.processes import main; main()"
    line = launch.mpirun_line(hosts, args, python_command(code), {}, counts)
    return Program("MPI", line)


def answer(value):
    """Print an answer, in a program."""
    # In one write, because the output of several machines may come together.
    sys.stdout.flush()
    os.write(1, f"\n{MARK}{json.dumps(value)}\n".encode())
