"""The parent of a script under mpirun: passes input and signals on, and reports the script's end.

    launcher ◀── start, more, status ── guard ── stdin, signals ────▶ script
             ─── frames of stdin and signals ──▶
             ◀── lost, own, begun ─────────────────────────────────── script
             ◀── stopped ── watcher of the guard

mpirun does not pass on the end of its standard input, stalls if much input waits, ends a script at
a Ctrl-C, and prints a page about each exit status other than 0. So the guard asks the launcher for
each piece of input, and ends with status 0 itself. The guard forks the script, so that mpirun's
command line is the same with a launcher and without. Guards of other machines report only that they
are here.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import struct
import sys
import time
from typing import Callable

from synkhronos._machine.heartbeats import lost_seconds
from synkhronos._machine.processes import StopWatch, end_with_parent, life_of, stat_of, status_of
from synkhronos.launch.streams import SIZE, Writer, mark, signals_of

VARIABLE = "SYNKHRONOS_LAUNCH"  # the token of the run; its processes need a guard if it is set
DATA, SIGNAL = 0, 1
HEADER = struct.Struct(">BI")  # kind; number of bytes, or of the signal
FORWARDED = {signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_HEARD = {*FORWARDED, signal.SIGCHLD}
_SECONDS = 2.0  # between two checks of the parent
_MOST = 500  # characters about a loss: a short mark is written in one piece


def begin() -> Callable[[str, str], None]:
    """Fork the script's process, if a launcher has started this job; the parent becomes its guard.

    In the child return a function that tells the launcher of a loss (``"lost"``), that MPI has
    begun (``"begun"``), or that the script ends by itself (``"own"``).
    """
    token = os.environ.pop(VARIABLE, None)
    if token is None:
        return tell_nobody
    guard = _Guard(token)
    guard.begin_watcher()  # before there are pipes, which it would keep open
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
    """Do nothing, in place of `_Guard.tell`: there is no launcher."""


class _Guard:
    """A guard. At its beginning and end signals are blocked, so that an early one waits."""

    def __init__(self, token):
        signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
        self._token, self._rank = token, os.environ.get("OMPI_COMM_WORLD_RANK", "0")
        self._tells = self._rank == "0"
        self._stderr = os.dup(2)  # the script may replace 2
        self._owes_mark = self._is_killed = False
        self._daemon = os.getppid()
        self._received = bytearray()
        self._selector = selectors.PollSelector()

    def mark(self, kind, text=""):
        """Tell the launcher about the script; on the first machine only."""
        if self._tells:
            self.tell(kind, text)

    def tell(self, kind, text=""):
        """Tell the launcher about a loss, from any machine: the first one may be lost."""
        text = str(text).replace("\0", " ")[:_MOST]
        with contextlib.suppress(OSError):
            os.write(self._stderr, mark(self._token, self._rank, kind, text))

    def begin_watcher(self):
        """Fork a process that tells if this one is stopped for long, and kills a stopped daemon.

        The script would go on, but nobody would tell the launcher of its end.
        """
        guard, stops, limit = os.getpid(), StopWatch(), lost_seconds()
        [name, *_] = stat_of(self._daemon) or [""]
        is_remote = name == "prted"  # else it is mpirun, which the launcher watches
        if not self._tells or os.fork():
            return
        end_with_parent(guard, signal.SIGKILL)
        while stops.seconds(guard) <= limit:
            if is_remote and stops.seconds(self._daemon) > limit:
                os.kill(self._daemon, signal.SIGKILL)  # it passes nothing on; mpirun notices
            time.sleep(1.0)
        how = f"was stopped for {limit:g} s"
        self.tell("stopped", f"The script's guard on {socket.gethostname()} {how}")
        os._exit(0)

    def watch(self, pid, sink=None):
        """Pass signals and input on until a child ends; return its status, below 0 for a signal."""
        self._pid = pid
        with signals_of(_HEARD) as signals:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
            self._selector.register(signals, selectors.EVENT_READ, self._hear)
            self.mark("start", f"{pid} {socket.gethostname()}")
            if not self._tells:
                self.tell("here")
            if sink is not None:
                self._stdin = Writer(sink, self._selector)
                self._selector.register(0, selectors.EVENT_READ, self._receive)
            while (status := status_of(pid)) is None:
                for key, _ in self._selector.select(_SECONDS):
                    key.data(key.fd)
                if self._owes_mark and not self._stdin.is_behind:
                    self._owes_mark = False
                    self.mark("more")
                # PR_SET_PDEATHSIG would tell only the end of the thread that has started this.
                if os.getppid() != self._daemon:
                    os.kill(pid, signal.SIGKILL)
            signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
        self._is_killed = status < 0
        return status

    def wait_for_others(self):
        """Wait for mpirun's SIGTERM if another machine's was killed: the script may still save.

        Before, wait while the daemon is stopped: it may not have passed on the status, and the
        watcher, which ends with this process, is to kill it.
        """
        while life_of(self._daemon) == "stopped":
            time.sleep(1.0)
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
            self._stdin.end()
        self._received += data
        while len(self._received) >= HEADER.size:
            kind, number = HEADER.unpack_from(self._received)
            end = HEADER.size + (number if kind == DATA else 0)
            if len(self._received) < end:
                break
            data = bytes(self._received[HEADER.size : end])
            del self._received[:end]
            if kind == SIGNAL:
                os.kill(self._pid, number)
            elif data:
                self._stdin.write(data)
                self._owes_mark = True
            else:
                self._stdin.end()
