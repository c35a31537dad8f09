"""Choose the cores for each rank of a host: near its device, or an even share."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Sequence

from synkhronos._machine.cores import by_node, read
from synkhronos._machine.devices import kind, module_command
from synkhronos.launch import mpirun
from synkhronos.launch.where import Host, is_here
from synkhronos.rules.places import NO_DEVICE, RankPlace, by_host

_NVIDIA = Path("/proc/driver/nvidia/gpus")
_PCI = Path("/sys/bus/pci/devices")


def of_ranks(places: Sequence[RankPlace], options: Any) -> list[list[int] | None]:
    """Return the CPUs for each rank of all hosts; None for a server without a device.

    `options` say how to reach other hosts, as for `mpirun.line`.
    """
    devices = [place for place in places if place.device != NO_DEVICE]
    cpus: list[list[int] | None] = [None] * (len(places) - len(devices))
    for host, names in by_host(devices).items():
        if is_here(host):
            cpus += cores_here(names)
        else:
            command = module_command("synkhronos.rules.cores", ",".join(names))
            line = mpirun.line([Host(host)], options, command, {})
            cpus += mpirun.answer(line, Host(host), options)
    return cpus


def share(nodes: Sequence[Sequence[Sequence[int]]], near: Sequence[int | None]) -> list[list[int]]:
    """Return the CPUs of each rank.

    `nodes` has the cores of each NUMA node; a core is a list of the numbers of its threads. `near`
    has the node of each rank's device, or None, as for a CPU.

    The ranks of a node share its cores evenly, and a rank gets all threads of a core. If there are
    more ranks than cores, several ranks get the same core.

    >>> share([[[0, 4], [1, 5]], [[2, 6], [3, 7]]], [None, None])
    [[0, 1, 4, 5], [2, 3, 6, 7]]
    >>> share([[[0], [1]], [[2], [3]]], [1, 1, None])
    [[2], [3], [0, 1]]
    """
    homes = list(near)
    for rank, home in enumerate(homes):
        if home is None:  # to the node with the most cores for each of its ranks
            homes[rank] = max(
                range(len(nodes)), key=lambda n: (len(nodes[n]) / (homes.count(n) + 1), -n)
            )
    cpus: list[list[int]] = [[] for _ in homes]
    for number, cores in enumerate(nodes):
        ranks = [rank for rank, home in enumerate(homes) if home == number]
        for place, rank in enumerate(ranks):
            begin, end = (len(cores) * i // len(ranks) for i in (place, place + 1))
            of_rank = cores[begin:end] or [cores[place % len(cores)]]
            cpus[rank] = sorted(thread for core in of_rank for thread in core)
    return cpus


def cores_here(devices: Sequence[str]) -> list[list[int]]:
    """Return the CPUs for each rank of this machine, among those that this process may use."""
    nodes = by_node()
    places = {number: place for place, number in enumerate(nodes)}
    near = [places.get(_node_of(device)) for device in devices]
    return share([*nodes.values()], near)


def _node_of(device):
    """Return the NUMA node of a CUDA device, by the order on the PCI bus; None if not known."""
    if kind(device) != "cuda" or not _NVIDIA.is_dir():
        return None
    number = int(device[4:] or 0)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        if number >= len(names) or not names[number].isdigit():
            return None
        number = int(names[number])
    buses = sorted(os.listdir(_NVIDIA))
    if number >= len(buses):
        return None
    text = read(_PCI / buses[number].lower() / "numa_node")
    return int(text) if text.isdigit() else None  # "-1" stands for no node


if __name__ == "__main__":
    mpirun.tell(cores_here(sys.argv[1].split(",")))
