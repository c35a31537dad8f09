"""mpirun as a child process: its signals, its end with its parent, and what it prints by itself."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from typing import Mapping, Sequence

from synkhronos.comm.mpi import folders, secret

# A race in PRRTE, of no consequence.
NOISE = re.compile(rb"^\[[^\]\n]*\] plm:ssh: Warning: setpgid[^\n]*\n", re.MULTILINE)
# The page about a process that was killed or has failed: exit statuses say it.
PAGE = re.compile(rb"-{60,}\n(?:(?!-{60,}\n).)*prterun.*?-{60,}\n", re.DOTALL)
_LAST = 2.0  # seconds in which killed processes end


def ask(line: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a command line of mpirun to its end; raise TimeoutExpired if that does not come."""
    with folders.of_mpirun(os.environ) as environment:
        return subprocess.run(
            line,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            start_new_session=True,
        )


def with_secret(
    line: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return mpirun's command line and environment, with a secret for the processes of the job.

    The line has the name of the variable alone, because all users of a machine can read it.

    >>> line, environment = with_secret(["mpirun", "program"], {})
    >>> line, len(environment["SYNKHRONOS_SECRET"])
    (['mpirun', '-x', 'SYNKHRONOS_SECRET', 'program'], 64)
    """
    if secret.VARIABLE in environment:  # of the user: `launch` has exported it
        return list(line), dict(environment)
    return [line[0], *secret.EXPORTED, *line[1:]], {**environment, secret.VARIABLE: secret.new()}


def kill_session(number: int) -> None:
    """Kill all processes of a session: mpirun, its agents, and the ranks of this machine."""
    end = time.monotonic() + _LAST
    while (left := _alive_in_session(number)) and time.monotonic() < end:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _alive_in_session(number):
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as stat:
            state, _, _, session, *_ = stat.read().rpartition(")")[2].split()
            if int(session) == number and state not in "ZX":
                found.append(int(name))
    return found
