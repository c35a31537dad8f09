"""How busy other programs keep the cores: the time of all, less that of this process and its tree.

/proc/stat          all programs, those of other containers too, and other guests of the host
/proc/<pid>/stat    less: this process and its descendants, and the threads of the kernel
"""

import os
import time
from pathlib import Path
from typing import Dict, NamedTuple, Tuple

from synkhronos._machine.processes import number_in_proc, stat_of

BUSY_CORES = 0.1  # kept busy by others: from here on times tell little
LOOK_SECONDS = 6
_NAMED, _LEAST = 3, 0.01  # of the busiest processes, and cores that one of them keeps busy
_KERNEL_THREAD = 0x00200000  # PF_KTHREAD in the flags of a process


class Load(NamedTuple):
    """The cores that other programs keep busy, and the busiest of these programs."""

    cores: float
    busiest: Tuple[Tuple[float, str, int], ...] = ()  # (cores, name, process id)
    own: float = 0.0  # cores that this process and its tree keep busy

    @property
    def is_high(self) -> bool:
        """Whether this disturbs measurements."""
        # The system counts both times apart: a hundredth of ours may look like others'.
        return self.cores > max(BUSY_CORES, self.own / 100)

    def __str__(self) -> str:
        """Say it, after a subject and a verb; name processes if they disturb."""
        text = f"{self.cores:.2f} of {os.cpu_count()} cores busy"
        named = [f"{name} (pid {pid}) {cores:.2f}" for cores, name, pid in self.busiest]
        if not self.is_high:
            return text
        return f"{text}: {', '.join(named) or 'none of them is in the /proc of this machine'}"


class LoadWatch:
    """Adds up what other programs use from now on."""

    def __init__(self):
        self._begin = time.monotonic(), _ticks_of_all(), _processes()

    def others(self) -> Load:
        """Return how many cores others have kept busy, on average."""
        begin, ticks, before = self._begin
        end, now, after = time.monotonic(), _ticks_of_all(), _processes()
        per_core = os.sysconf("SC_CLK_TCK") * max(end - begin, 1e-9)
        ours = _tree(after)
        # Those that have ended, and were waited for, are in the times of the children.
        own = sum(after[key].whole for key in ours) - sum(
            before[key].whole for key in _tree(before)
        )
        spent = {
            key: process.own - (before[key].own if key in before else 0)
            for key, process in after.items()
            if key not in ours
        }
        kernel = sum(ticks for key, ticks in spent.items() if after[key].is_kernel)
        users = [
            (ticks / per_core, after[key].name, key[0])
            for key, ticks in spent.items()
            if not after[key].is_kernel and ticks / per_core > _LEAST
        ]
        cores = max(0, now - ticks - max(0, own) - kernel) / per_core
        return Load(cores, tuple(sorted(users, reverse=True)[:_NAMED]), max(0, own) / per_core)


def look(seconds: int = LOOK_SECONDS) -> Load:
    """Return the load of a quiet second, or, if there is none for so many, of the last one."""
    for _ in range(seconds):
        watch = LoadWatch()
        time.sleep(1)
        load = watch.others()
        if not load.is_high:
            break
    return load


class _ProcessLoad(NamedTuple):
    name: str
    parent: int
    is_kernel: bool
    own: int  # clock ticks
    whole: int  # with those of children that it has waited for


def _ticks_of_all():
    """Return the clock ticks that all cores have spent on programs, and on other guests."""
    # The line "cpu" of proc(5). Interrupts are left out: those of networks may be our own.
    user, nice, system, _, _, _, _, steal = map(
        int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    )
    return user + nice + system + steal


def _processes() -> Dict[Tuple[int, str], _ProcessLoad]:
    """Return all processes by their number and start: numbers are used again."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        fields = stat_of(entry)
        if not fields:  # it has ended
            continue
        user, system, children_user, children_system = map(int, fields[12:16])
        found[int(entry), fields[20]] = _ProcessLoad(
            fields[0],
            int(fields[2]),
            bool(int(fields[7]) & _KERNEL_THREAD),
            user + system,
            user + system + children_user + children_system,
        )
    return found


def _tree(processes):
    """Return the keys of this process and of all below it."""
    below = {}
    for key, process in processes.items():
        below.setdefault(process.parent, []).append(key)
    own = number_in_proc()
    found = [key for key in processes if key[0] == own]
    for key in found:  # which grows
        found += below.get(key[0], [])
    return {*found}
