"""The beginning of a session on several machines: all offer their devices, the master decides."""

import bisect
import functools
import hashlib
import itertools
import os
import platform
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import List, Optional, Tuple

import numpy as np

from synkhronos._host import choice, pythons
from synkhronos.errors import SessionError

_LIBRARY = "library"
COLUMNS = ("host", "Synkhronos", "files", _LIBRARY, "NumPy", "Python")  # of the facts


@dataclass(frozen=True)
class MachineLayout:
    """The ranks of each machine: they follow one another."""

    counts: Tuple[int, ...]  # the number of ranks of each machine
    hosts: Tuple[str, ...]
    machine: int  # this process's

    @property
    def n_ranks(self):
        """The number of ranks of all machines."""
        return sum(self.counts)

    def first(self, machine=None):
        """Return the first rank of a machine; of this one by default."""
        return sum(self.counts[: self.machine if machine is None else machine])

    def machine_of(self, rank):
        """Return the machine of a rank."""
        return bisect.bisect(list(itertools.accumulate(self.counts)), rank)

    def ranks(self, machine=None):
        """Return the ranks of a machine; of this one by default."""
        machine = self.machine if machine is None else machine
        return range(self.first(machine), self.first(machine + 1))


@dataclass(frozen=True)
class Wish:
    """The arguments of the master's ``fork()``, which hold on every machine."""

    session: int
    n_parallel: Optional[int]
    use_gpu: Optional[bool]
    devices: Optional[Tuple[str, ...]]
    facts: Tuple[str, ...]


@dataclass(frozen=True)
class SessionPlan:
    """A session: the number of ranks on each machine, and their devices."""

    session: int
    counts: Tuple[int, ...]
    hosts: Tuple[str, ...]
    devices: Tuple[str, ...]
    master_rank: int
    threads: Optional[int]
    profile: bool
    compress: bool
    pid: int  # of the master

    def layout(self, machine):
        """Return the layout as one machine sees it."""
        return MachineLayout(self.counts, self.hosts, machine)


def facts() -> Tuple[str, ...]:
    """Return the name of this machine, and the versions that must agree: see `COLUMNS`."""
    try:
        host = choice.choose()
    except (ImportError, ValueError):  # `synkhronos info` says so
        host = "theano" if pythons.is_for_theano() else "pytensor"
    own_version = pythons.installed_version("synkhronos") or "(a source tree)"
    library = f"{choice.TITLES[host]} {pythons.installed_version(host) or '(not installed)'}"
    python = platform.python_version()
    return (socket.gethostname(), own_version, digest(), library, np.__version__, python)


@functools.lru_cache(maxsize=None)
def digest(folder: Path = Path(__file__).parents[2]) -> str:
    """Return a digest of the source files in a folder; of this package by default."""
    hashed = hashlib.sha256()
    for path in sorted(each for each in folder.rglob("*") if each.suffix in (".py", ".h")):
        hashed.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
        hashed.update(path.read_bytes())
    return hashed.hexdigest()[:8]


def with_titles(titles, rows) -> List[Tuple[str, ...]]:
    """Return titles and rows of facts; a host library that all rows have becomes a title.

    >>> with_titles(("host", "library"), [("a", "Theano 1.0.5"), ("b", "Theano 1.0.4")])
    [('host', 'Theano'), ('a', '1.0.5'), ('b', '1.0.4')]
    >>> with_titles(("host", "library"), [("a", "Theano 1.0.5"), ("b", "PyTensor 3.3.7")])
    [('host', 'library'), ('a', 'Theano 1.0.5'), ('b', 'PyTensor 3.3.7')]
    """
    at = titles.index(_LIBRARY)
    names = {row[at].partition(" ")[0] for row in rows}
    if len(names) == 1:
        titles = (*titles[:at], *names, *titles[at + 1 :])
        rows = [(*row[:at], row[at].partition(" ")[2], *row[at + 1 :]) for row in rows]
    return [tuple(each) for each in (titles, *rows)]


def plan(link, wish, own_devices, master_rank, threads, profile, compress) -> SessionPlan:
    """Ask all machines for their devices in a session; return the plan.

    Raises SessionError if machines have different versions, or one can't do what was asked for.
    """
    link.tell(None, ("wish", wish))
    answers = {0: (wish.facts, own_devices, None)}
    while len(answers) < link.n_machines:
        machine, message = link.wait_for_message()
        if message[0] == "offer" and message[1] == wish.session:
            answers[machine] = message[2:]
        elif message[0] == "lost":
            _, host, why = message
            raise SessionError(f"fork() has lost machine {host}: {why}.")
    table = [answers[machine] for machine in range(link.n_machines)]
    if len({facts[1:] for facts, _, _ in table}) > 1:
        raise SessionError(_disagreement([facts for facts, _, _ in table]))
    for facts, _, problem in table:
        if problem is not None:
            raise SessionError(f"fork() can't start ranks on {facts[0]}: {problem}")
    counts = tuple(len(devices) for _, devices, _ in table)
    hosts = tuple(facts[0] for facts, _, _ in table)
    devices = tuple(device for _, devices, _ in table for device in devices)
    how = master_rank, threads, profile, compress, os.getpid()
    return SessionPlan(wish.session, counts, hosts, devices, *how)


def _disagreement(rows):
    """Return the message for machines with different versions: a table."""
    rows = with_titles(COLUMNS, rows)
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return (
        "fork() needs the same versions on all machines, because functions travel between them:\n"
        + "\n".join(lines)
    )
