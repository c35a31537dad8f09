"""Find processes that a run has left on a machine by what they have inherited, and kill them.

As a script this file kills those of one run. It imports nothing of the package, so that a machine
answers soon. A machine without this file gives no answer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import Callable

VARIABLE = "SYNKHRONOS_RUN"  # in the environment of all processes of a run, in every attempt
_KILLING = 2.0  # seconds for killed processes to end


def kill_session(number: int) -> bool:
    """Kill all processes of a session: mpirun, its agents, and the ranks of this machine."""
    return _kill(lambda pid: int(_stat(pid)[3]) == number)


def kill_run(name: str) -> bool:
    """Kill all processes of this user that have inherited the name of a run."""
    wanted = f"{VARIABLE}={name}".encode()
    return _kill(lambda pid: wanted in _read(pid, "environ").split(b"\0"))


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
    with contextlib.suppress(OSError):  # the process has ended, or is another user's
        return int(pid) != os.getpid() and _stat(pid)[0] not in (b"Z", b"X") and is_wanted(pid)
    return False


def _stat(pid):
    return _read(pid, "stat").rpartition(b")")[2].split()


def _read(pid, name):
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()


if __name__ == "__main__":
    sys.exit(None if kill_run(sys.argv[1]) else "processes of this run don't end")
