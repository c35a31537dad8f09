"""mpirun as a child process: its signals, its end with its parent, and what it prints by itself."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import tempfile
from typing import Collection, Iterator, Mapping

# A race in PRRTE, of no consequence.
NOISE = re.compile(rb"^\[[^\]\n]*\] plm:ssh: Warning: setpgid[^\n]*\n", re.MULTILINE)
# The page about a process that was killed or has failed: exit statuses say it.
PAGE = re.compile(rb"-{60,}\n(?:(?!-{60,}\n).)*prterun.*?-{60,}\n", re.DOTALL)
# Where PRRTE keeps its files: for all its processes, and for mpirun alone.
_BASES = "PRTE_MCA_prte_tmpdir_base", "PRTE_MCA_prte_local_tmpdir_base"


@contextlib.contextmanager
def folder_of_its_own(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield an environment in which mpirun keeps its files in a new folder, removed afterwards.

    By default the folder is named after the process. One that a killed mpirun has left keeps each
    later mpirun that gets the same number from starting ("The PMIx server's listener thread ...").
    """
    if any(name in environment for name in _BASES):
        yield dict(environment)
        return
    folder = tempfile.mkdtemp(prefix="synkhronos-mpirun-")
    try:
        yield {**environment, _BASES[1]: folder}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def signals_of(wanted: Collection[int]) -> Iterator[int]:
    """Yield a descriptor from which the numbers of signals that come can be read."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    before = {number: signal.signal(number, lambda *_: None) for number in wanted}
    old = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(old)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


def kill_session(number: int) -> None:
    """Kill all processes of a session: mpirun, its agents, and the ranks of this machine."""
    for pid in processes_of_session(number):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def processes_of_session(number: int) -> list[int]:
    """Return the numbers of the processes of a session."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as stat:
            if int(stat.read().rpartition(")")[2].split()[3]) == number:
                found.append(int(name))
    return found
