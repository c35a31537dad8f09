"""The process of mpirun beside a script: it passes input and signals on, and says how it ended.

    launcher ◀── start, more, status ── guard ── stdin, signals ────▶ script
             ─── frames of stdin and signals ──▶
             ◀── lost, own ────────────────────────────────────────── script

mpirun does not pass the end of its standard input on, stalls if much waits there, ends a script at
a Ctrl-C, and prints a page about every exit status but 0. So the guard of a script asks the
launcher for each piece of input, and ends with status 0. It is forked from the script's process:
the line of mpirun runs the script without a launcher, too.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import struct
import sys
from typing import Callable

from synkhronos._machine.processes import status_of
from synkhronos.launch.signals import signals_of
from synkhronos.launch.streams import SIZE, Writer, mark

VARIABLE = "SYNKHRONOS_LAUNCH"  # tells a process of mpirun that it needs a guard: the token
DATA, SIGNAL = 0, 1
HEADER = struct.Struct(">BI")  # kind, number of bytes or of the signal
FORWARDED = {signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_HEARD = {*FORWARDED, signal.SIGCHLD}
_SECONDS = 2.0  # between two looks
_MOST = 500  # characters about a loss, so that one write has all of a mark


def begin() -> Callable[[str, str], None]:
    """Fork the process that goes on, if a launcher has started this job by mpirun.

    Return in it what tells the launcher of a loss (``"lost"``), or that the script's end is its own
    (``"own"``). This one ends after the other has ended, and its status has been told.
    """
    token = os.environ.pop(VARIABLE, None)
    if token is None:
        return tell_nobody
    guard = _Guard(token)
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
        os.dup2(source, 0)
        os.close(source)
        os.close(sink)
        return guard.tell
    os.close(source)
    guard.mark("status", guard.watch(child, sink))
    guard.wait_for_others()
    sys.exit()


def tell_nobody(kind: str, text: str = "") -> None:
    """Tell no launcher, as there is none."""


class _Guard:
    """A guard, which begins and ends with signals blocked: one that comes early waits."""

    def __init__(self, token):
        signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
        self._token, self._rank = token, os.environ.get("OMPI_COMM_WORLD_RANK", "0")
        self._tells = self._rank == "0"
        self._stderr = os.dup(2)  # a script may have another one
        self._owes_mark = self._is_killed = False
        self._daemon = os.getppid()
        self._received = bytearray()
        self._selector = selectors.PollSelector()

    def mark(self, kind, text=""):
        """Tell the launcher something of the script."""
        if self._tells:
            self._write(kind, text)

    def tell(self, kind, text=""):
        """Tell the launcher, on any machine: each tells that the first one is lost."""
        self._write(kind, text.replace("\0", " ")[:_MOST])

    def _write(self, kind, text):
        with contextlib.suppress(OSError):
            os.write(self._stderr, mark(self._token, self._rank, kind, text))

    def watch(self, pid, sink=None):
        """Pass on what comes until a child has ended; return its status, below 0 for a signal."""
        self._pid = pid
        with signals_of(_HEARD) as signals:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
            self._selector.register(signals, selectors.EVENT_READ, self._hear)
            self.mark("start", f"{pid} {socket.gethostname()}")
            if sink is not None:
                self._stdin = Writer(sink, self._selector)
                self._selector.register(0, selectors.EVENT_READ, self._receive)
            while (status := status_of(pid)) is None:
                for key, _ in self._selector.select(_SECONDS):
                    key.data(key.fd)
                if self._owes_mark and not self._stdin.is_behind:
                    self._owes_mark = False
                    self.mark("more")
                # The system could tell, but only of the end of the thread that has started this.
                if os.getppid() != self._daemon:
                    os.kill(pid, signal.SIGKILL)
            signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
        self._is_killed = status < 0
        return status

    def wait_for_others(self):
        """Wait for mpirun to end this process, if the leader of another machine was killed.

        mpirun would end the script now, which may still save something.
        """
        while self._is_killed and not self._tells and os.getppid() == self._daemon:
            if signal.sigtimedwait(_HEARD - {signal.SIGCHLD}, _SECONDS):
                break

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
