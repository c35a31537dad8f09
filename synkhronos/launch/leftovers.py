"""Processes that a run has left on a machine, found by what they have inherited, and killed.

As a script this file kills those of one run. It imports nothing of the package: a machine answers
soon then, and one without this file does not answer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import Callable

VARIABLE = "SYNKHRONOS_RUN"  # in the environment of all processes of a run, whatever the attempt
_KILLING = 2.0  # seconds in which killed processes end


def kill_session(number: int) -> bool:
    """Kill all processes of a session: mpirun, its agents, and the ranks of this machine."""
    return _kill(lambda pid: _session_of(pid) == number)


def kill_run(name: str) -> bool:
    """Kill all processes of this user that have inherited the name of a run."""
    wanted = f"{VARIABLE}={name}".encode()
    return _kill(lambda pid: wanted in _environment_of(pid))


def _kill(is_wanted: Callable[[str], bool]) -> bool:
    """Kill processes, and those that they start meanwhile; return whether all have ended."""
    end = time.monotonic() + _KILLING
    while left := [pid for pid in os.listdir("/proc") if pid.isdigit() and _is(is_wanted, pid)]:
        if time.monotonic() > end:
            return False
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.01)
    return True


def _is(is_wanted, pid):
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        return int(pid) != os.getpid() and _stat(pid)[0] not in "ZX" and is_wanted(pid)
    return False


def _session_of(pid):
    return int(_stat(pid)[3])


def _stat(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()


def _environment_of(pid):
    with open(f"/proc/{pid}/environ", "rb") as file:
        return file.read().split(b"\0")


if __name__ == "__main__":
    sys.exit(None if kill_run(sys.argv[1]) else "processes of this run don't end")
