"""``theanompi.lib.hwloc_utils``: bind a process to cores, without hwloc.

Linux gives a process memory near the cores it runs on, so no memory is bound.
"""

from __future__ import annotations

import os
import sys

from synkhronos._machine.cores import parse_range

policy = "bind"
flag_mem = 0
flag_cpu = "process"


def range_to_list(_range: str) -> str:
    """Return the numbers of ranges, with commas.

    >>> range_to_list("0-2,5")
    '0,1,2,5'
    """
    return ",".join(map(str, parse_range(_range)))


def bind_to_socket_mem(cpulist: str, label: str | None = None) -> None:
    """Bind this process to cores such as ``"0-3"``; tell its children in CPULIST_<label>."""
    if not isinstance(cpulist, str):
        raise TypeError(f"cpulist must be a text with numbers of cores, got {cpulist!r}.")
    os.sched_setaffinity(0, parse_range(cpulist))
    os.environ[f"CPULIST_{label}"] = range_to_list(cpulist)


def detect_socket_num(debug: bool = True, label: str | None = None) -> tuple[set[int], int]:
    """Return the cores of this process, and the number of the package that has the first one.

    With `debug` they are printed.
    """
    cores = os.sched_getaffinity(0)
    file = f"/sys/devices/system/cpu/cpu{min(cores)}/topology/physical_package_id"
    try:
        with open(file) as stream:
            package = int(stream.read())
    except (OSError, ValueError):
        package = 0
    if debug:
        sys.stdout.write(f"{label}: process {os.getpid()} on cores {sorted(cores)}\n")
    return cores, package
