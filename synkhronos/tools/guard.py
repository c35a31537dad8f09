"""The process of mpirun that starts a rank of a rule, and says how the rank ended.

    launcher ◀── start, status ── guard ── SIGUSR1, SIGTERM ──▶ rank

mpirun tells of the first process that failed, and of none if it is to tolerate faults. It ends a
run in which a process ends with a status but 0, also while others still write a snapshot, and does
not count an exit with a status as a fault that other ranks are told of. So the guard passes each
status to the launcher as a mark in standard error, ends with 0 after a Ctrl-C, and kills itself
after a failure that others are to survive. A rank that fails before MPI has started leaves the
others waiting in MPI_Init for ever, even if mpirun hears of it. The mark then says "early", and the
launcher ends the run.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Sequence

from synkhronos._machine.devices import module_command
from synkhronos._machine.processes import STARTED, end_with_parent
from synkhronos.launch import FOLLOWS, INTERRUPTED

_SECONDS = 2.0  # between two looks; what the first failure has to be told of
_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def command(token: str, is_tolerant: bool, line: Sequence[str]) -> list[str]:
    """Return the command that runs a rank's command under a guard."""
    tolerance = "tolerant" if is_tolerant else "strict"
    return module_command("synkhronos.tools.guard", token, tolerance, *line, unbuffered=True)


def main(arguments: Sequence[str]) -> int:
    """Run a rank to its end; return the exit status of this process, or kill it."""
    token, tolerance, *line = arguments
    rank = os.environ.get("OMPI_COMM_WORLD_RANK", "0")

    def mark(text):
        # With newlines: PRRTE keeps the rest of a line until its end.
        os.write(2, f"\0{token} {rank} {text}\0\n".encode())

    # A signal that comes before the rank is there waits, and a rank begins with no signal blocked.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    started, told = os.pipe()
    child = subprocess.Popen(
        line,
        env={**os.environ, STARTED: str(told)},
        pass_fds=[told],
        preexec_fn=functools.partial(_begin, os.getpid()),
    )
    os.close(told)
    for number in _FORWARDED:
        signal.signal(number, lambda received, _: child.send_signal(received))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    _end_with(os.getppid(), child)
    mark(f"start {child.pid} {socket.gethostname()}")
    status = child.wait()
    has_failed, is_tolerant = status not in (0, INTERRUPTED), tolerance == "tolerant"
    is_early = has_failed and is_tolerant and not _has_told(started)
    mark(f"status {status} early" if is_early else f"status {status}")
    if not has_failed:
        return 0
    if is_tolerant:
        os.kill(os.getpid(), signal.SIGKILL)
    if status == FOLLOWS:  # mpirun would end the one that has failed before this could tell of it
        time.sleep(_SECONDS)
    return status if status > 0 else 128 - status


def _has_told(started):
    os.set_blocking(started, False)  # a child of the rank may hold the other end
    with contextlib.suppress(BlockingIOError):
        return bool(os.read(started, 1))
    return False


def _end_with(daemon, child):
    """Look now and then whether the daemon of mpirun is there; without it, end the rank.

    The system could tell, but only of the end of the thread that has started this process.
    """

    def look(*_):
        if os.getppid() != daemon:
            child.kill()

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _SECONDS, _SECONDS)


def _begin(parent):
    """Prepare the process that becomes the rank, which ends when the guard is killed."""
    os.setpgid(0, 0)  # PRRTE signals the guard's group; a rank's own children are to hear nothing
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    end_with_parent(parent, signal.SIGKILL)


if __name__ == "__main__":
    # At once: while Python shuts down it has no handlers, and the timer or a signal would kill it.
    os._exit(main(sys.argv[1:]))
