"""How busy other programs keep the cores: the time of all programs, less our own and the kernel's.

/proc/stat          all programs, in other containers and other guests of the host, too
/proc/<pid>/stat    this process and its descendants, and the threads of the kernel
"""

import os
import time
from pathlib import Path
from typing import Dict, NamedTuple, Tuple

from synkhronos._machine.processes import number_in_proc, stat_of

BUSY_CORES = 0.1  # if others keep more cores busy, measured times are not reliable
_NAMED, _LEAST = 3, 0.01  # the most processes that are named, and the fewest cores of one
_KERNEL_THREAD = 0x00200000  # PF_KTHREAD in the flags of a process


class Load(NamedTuple):
    """The cores that other programs keep busy, and the busiest of these programs."""

    cores: float
    busiest: Tuple[Tuple[float, str, int], ...] = ()  # (cores, name, process id)
    own: float = 0.0  # cores that this process and its descendants keep busy

    @property
    def is_high(self) -> bool:
        """Whether this disturbs measurements."""
        # The two files count separately, so a hundredth of our time may look like that of others.
        return self.cores > max(BUSY_CORES, self.own / 100)

    def __str__(self) -> str:
        """Return an object for a sentence; it names processes if they disturb measurements."""
        text = f"{self.cores:.2f} of {os.cpu_count()} cores busy"
        named = [f"{name} (pid {pid}) {cores:.2f}" for cores, name, pid in self.busiest]
        if not self.is_high:
            return text
        return f"{text}: {', '.join(named) or 'none of them is in the /proc of this machine'}"


class LoadWatch:
    """Measures the load of other programs from now on."""

    def __init__(self):
        self._begin = time.monotonic(), _ticks_of_all(), _processes()

    def others(self) -> Load:
        """Return the average load since the beginning."""
        begin, ticks, before = self._begin
        end, now, after = time.monotonic(), _ticks_of_all(), _processes()
        per_core = os.sysconf("SC_CLK_TCK") * max(end - begin, 1e-9)
        ours = _tree(after)
        # `whole` includes processes that have ended, and that their parents have waited for.
        own = max(0, _whole(after, ours) - _whole(before, _tree(before)))
        kernel, users = 0, []
        for key in after.keys() - ours:
            process = after[key]
            spent = process.own - (before[key].own if key in before else 0)
            if process.is_kernel:
                kernel += spent
            elif spent / per_core > _LEAST:
                users.append((spent / per_core, process.name, key[0]))
        cores = max(0, now - ticks - own - kernel) / per_core
        return Load(cores, tuple(sorted(users, reverse=True)[:_NAMED]), own / per_core)


class _ProcessLoad(NamedTuple):
    name: str
    parent: int
    is_kernel: bool
    own: int  # clock ticks
    whole: int  # the same with those of children that it has waited for


def _ticks_of_all():
    """Return the clock ticks that all cores have spent on programs, and on other guests."""
    # The line "cpu" of proc(5). Interrupts are left out: those of networks may be our own.
    fields = Path("/proc/stat").read_text().split(maxsplit=9)
    user, nice, system, _, _, _, _, steal = map(int, fields[1:9])
    return user + nice + system + steal


def _processes() -> Dict[Tuple[int, str], _ProcessLoad]:
    """Return all processes by process id and start time, as ids are used again."""
    processes = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        fields = stat_of(entry)
        if not fields:  # it has ended
            continue
        name, parent, flags, started = fields[0], int(fields[2]), int(fields[7]), fields[20]
        ticks = list(map(int, fields[12:16]))  # user, system, and both of its children
        is_kernel = bool(flags & _KERNEL_THREAD)
        load = _ProcessLoad(name, parent, is_kernel, sum(ticks[:2]), sum(ticks))
        processes[int(entry), started] = load
    return processes


def _whole(processes, keys):
    return sum(processes[key].whole for key in keys)


def _tree(processes):
    """Return the keys of this process and of its descendants."""
    children = {}
    for key, process in processes.items():
        children.setdefault(process.parent, []).append(key)
    this = number_in_proc()
    keys = [key for key in processes if key[0] == this]
    for key in keys:  # the list grows meanwhile
        keys += children.get(key[0], [])
    return {*keys}
