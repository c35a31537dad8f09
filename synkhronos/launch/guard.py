"""The process of mpirun beside each other one: it passes signals on, and says how that one ended.

    launcher ◀── start, status ── guard ── SIGUSR1, SIGTERM ──▶ rank
    launcher ◀── more ─────────── guard ── stdin, signals ────▶ script
             ─── frames of stdin and signals ──▶

mpirun tells of the first process that failed, and of none if it is to tolerate faults. It ends a
run in which a process ends with a status but 0, also while others still write a snapshot, and does
not count an exit with a status as a fault that other ranks are told of. So the guard passes each
status to the launcher as a mark in standard error, ends with 0 after a Ctrl-C, and kills itself
after a failure that others are to survive. A rank that fails before MPI has started leaves the
others waiting in MPI_Init for ever, even if mpirun hears of it. The mark then says "early", and the
launcher ends the run.

mpirun does not pass the end of its standard input on, stalls if much waits there, ends a script at
a Ctrl-C, and prints a page about every exit status but 0. So the guard of a script asks the
launcher for each piece of input, and ends with status 0. It is forked from the script's process:
the line of mpirun runs the script without a launcher, too.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from typing import Sequence

from synkhronos._machine.devices import module_command
from synkhronos._machine.processes import STARTED, end_with_parent
from synkhronos.launch import FOLLOWS, INTERRUPTED
from synkhronos.launch.signals import signals_of
from synkhronos.launch.streams import SIZE, Writer

VARIABLE = "SYNKHRONOS_LAUNCH"  # tells a process of mpirun that it needs a guard: the token
DATA, SIGNAL = 0, 1
HEADER = struct.Struct(">BI")  # kind, number of bytes or of the signal
FORWARDED = {signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_HEARD = {*FORWARDED, signal.SIGCHLD}
_SECONDS = 2.0  # between two looks; what the first failure has to be told of


def command(token: str, is_tolerant: bool, line: Sequence[str]) -> list[str]:
    """Return the command that runs a rank's command under a guard."""
    tolerance = "tolerant" if is_tolerant else "strict"
    return module_command("synkhronos.launch.guard", token, tolerance, *line, unbuffered=True)


def main(arguments: Sequence[str]) -> int:
    """Run a rank to its end; return the exit status of this process, or kill it."""
    token, tolerance, *line = arguments
    guard = _Guard(token)
    started, told = os.pipe()
    child = subprocess.Popen(
        line,
        env={**os.environ, STARTED: str(told)},
        pass_fds=[told],
        preexec_fn=functools.partial(_begin, os.getpid()),
    )
    os.close(told)
    status = guard.watch(child.pid)
    has_failed, is_tolerant = status not in (0, INTERRUPTED), tolerance == "tolerant"
    is_early = has_failed and is_tolerant and not _has_told(started)
    guard.mark("status", f"{status} early" if is_early else status)
    if not has_failed:
        return 0
    if is_tolerant:
        os.kill(os.getpid(), signal.SIGKILL)
    if status == FOLLOWS:  # mpirun would end the one that has failed before this could tell of it
        time.sleep(_SECONDS)
    return status if status > 0 else 128 - status


def _begin(parent):
    """Prepare the process that becomes the rank, which ends when the guard is killed."""
    os.setpgid(0, 0)  # PRRTE signals the guard's group; a rank's own children are to hear nothing
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
    end_with_parent(parent, signal.SIGKILL)


def _has_told(started):
    os.set_blocking(started, False)  # a child of the rank may hold the other end
    with contextlib.suppress(BlockingIOError):
        return bool(os.read(started, 1))
    return False


def goes_on() -> bool:
    """Fork the process that goes on, if a launcher has started this job by mpirun.

    Return True in it, and False in this one after it has ended, and its status has been told.
    """
    token = os.environ.pop(VARIABLE, None)
    if token is None:
        return True
    guard = _Guard(token, only_of_first=True)
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
        os.dup2(source, 0)
        os.close(source)
        os.close(sink)
        return True
    os.close(source)
    guard.mark("status", guard.watch(child, sink))
    return False


class _Guard:
    """A guard, which begins and ends with signals blocked: one that comes early waits."""

    def __init__(self, token, only_of_first=False):
        signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
        self._token, self._rank = token, os.environ.get("OMPI_COMM_WORLD_RANK", "0")
        self._tells = self._rank == "0" or not only_of_first
        self._owes_mark = False
        self._received = bytearray()
        self._selector = selectors.PollSelector()

    def mark(self, kind, text=""):
        """Tell the launcher something, with newlines: PRRTE keeps the rest of a line."""
        if self._tells:
            with contextlib.suppress(OSError):
                os.write(2, f"\0{self._token} {self._rank} {kind} {text}\0\n".encode())

    def watch(self, pid, sink=None):
        """Pass on what comes until a child has ended; return its status, below 0 for a signal."""
        self._pid, daemon = pid, os.getppid()
        with signals_of(_HEARD) as signals:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
            self._selector.register(signals, selectors.EVENT_READ, self._hear)
            self.mark("start", f"{pid} {socket.gethostname()}")
            if sink is not None:
                self._stdin = Writer(sink, self._selector)
                self._selector.register(0, selectors.EVENT_READ, self._receive)
            while (status := self._status()) is None:
                for key, _ in self._selector.select(_SECONDS):
                    key.data(key.fd)
                if self._owes_mark and not self._stdin.is_behind:
                    self._owes_mark = False
                    self.mark("more")
                # The system could tell, but only of the end of the thread that has started this.
                if os.getppid() != daemon:
                    os.kill(pid, signal.SIGKILL)
            signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
        return status

    def _status(self):
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if not pid:
            return None
        return os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)

    def _hear(self, signals):
        for number in os.read(signals, 256):
            if number != signal.SIGCHLD:
                os.kill(self._pid, number)

    def _receive(self, fd):
        data = os.read(fd, SIZE)
        if not data:
            self._selector.unregister(fd)
            return self._stdin.end()
        self._received += data
        while len(self._received) >= HEADER.size:
            kind, number = HEADER.unpack_from(self._received)
            end = HEADER.size + (number if kind == DATA else 0)
            if len(self._received) < end:
                return None
            data = bytes(self._received[HEADER.size : end])
            del self._received[:end]
            if kind == SIGNAL:
                os.kill(self._pid, number)
            elif data:
                self._stdin.write(data)
                self._owes_mark = True
            else:
                self._stdin.end()
        return None


if __name__ == "__main__":
    # At once: while Python shuts down it has no handlers, and a signal would kill it.
    os._exit(main(sys.argv[1:]))
