"""Find the cores that this process may use, with their threads and NUMA nodes, and choose some.

A CPU here is what the kernel calls so: a core, or one of its threads.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from synkhronos._wording import count

_NODES = Path("/sys/devices/system/node")
_CPUS = Path("/sys/devices/system/cpu")
NO_NODE = -1  # of CPUs that the kernel lists in no node


def parse_range(text: str) -> list[int]:
    """Return the numbers in a list in the kernel's format.

    >>> parse_range("0-3,8-9"), parse_range("5")
    ([0, 1, 2, 3, 8, 9], [5])
    """
    numbers = []
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        numbers += range(int(first), int(last if dash else first) + 1)
    return numbers


def by_node() -> dict[int, list[list[int]]]:
    """Return the cores of each NUMA node; a core is a list of its CPUs, the threads.

    Where the kernel does not tell the threads of a core, each CPU is a core.
    """
    rest, found = os.sched_getaffinity(0), {}
    for folder in sorted(_NODES.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        cpus = rest.intersection(parse_range(read(folder / "cpulist")))
        if cpus:
            found[int(folder.name[4:])] = _cores(cpus)
            rest = rest - cpus
    return {**found, NO_NODE: _cores(rest)} if rest else found


def _cores(cpus):
    cores: dict[Any, list[int]] = {}
    for cpu in sorted(cpus):
        cores.setdefault(_siblings(cpu) or cpu, []).append(cpu)
    return list(cores.values())


def _siblings(cpu):
    return read(_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list")


def read(path: Path) -> str:
    """Return what a file of the kernel says, or "" where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def spread(n: int) -> list[int]:
    """Return `n` CPUs: a thread of each core first, then the second threads.

    They are spread evenly over the nodes and over each node's cores, because ranks compute most of
    the time, each with its own part of the caches and of the memory's bandwidth. Neighbors would
    share a cache, which only makes the reductions faster.
    """
    cores = [core for node in by_node().values() for core in node]
    found: list[int] = []
    for thread in range(max(map(len, cores))):
        cpus = [core[thread] for core in cores if len(core) > thread]
        more = min(n - len(found), len(cpus))
        found += [cpus[len(cpus) * place // more] for place in range(more)]
    return found


def described() -> str:
    """Return how many cores this process may use, and what they have, such as 2 threads each."""
    nodes = by_node()
    cores = [core for node in nodes.values() for core in node]
    if _siblings(cores[0][0]):
        numbers = sorted({len(core) for core in cores})
        threads = " or ".join(map(str, numbers)) + f" thread{'s' * (numbers[-1] > 1)} each"
    else:
        threads = "threads that the kernel does not tell"
    return f"{count(len(cores), 'core')} with {threads}, {count(len(nodes), 'NUMA node')}"
