"""Places of ranks: lists of devices with hosts, and the cores that each rank is bound to."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Sequence

from synkhronos import _wording
from synkhronos._machine.devices import DEVICE_NAME, HOST_NAME, kind

NO_DEVICE = "none"  # of a server with a process of its own
_EXAMPLES = "such as cpu,cpu or node0:cuda0,cuda1"
_NVIDIA = Path("/proc/driver/nvidia/gpus")
_NODES = Path("/sys/devices/system/node")
_CPUS = Path("/sys/devices/system/cpu")
_PCI = Path("/sys/bus/pci/devices")


@dataclass(frozen=True)
class Place:
    """The device of one rank, and its host: None for this one."""

    host: str | None
    device: str


def parse(devices: Any, source: str = "devices") -> list[Place]:
    """Return the place of each rank, in the order of the ranks.

    Parameters
    ----------
    devices : str or list of str
        Names with commas, a host before the first one; of several hosts as a list, or with a
        semicolon between them. A list of names without hosts is of this host.
    source : str, optional
        Names the argument in errors.

    Raises
    ------
    TypeError, ValueError
        For anything but names of devices.

    Examples
    --------
    >>> parse("cpu,cpu")
    [Place(host=None, device='cpu'), Place(host=None, device='cpu')]
    >>> parse(["node0:cuda0", "node1:cuda0,opencl0:1"])[1:]
    [Place(host='node1', device='cuda0'), Place(host='node1', device='opencl0:1')]
    """
    if isinstance(devices, str):
        parts = devices.split(";")
    elif isinstance(devices, (list, tuple)):
        parts = list(devices)
    else:
        raise TypeError(
            f"{source} must be a list of names, {_EXAMPLES}, got {_wording.shown(devices)}."
        )
    for part in parts:
        if not isinstance(part, str):
            raise TypeError(f"{source} must hold names, {_EXAMPLES}, got {_wording.shown(part)}.")
    parts = [part for part in (part.strip() for part in parts) if part]
    if not parts:
        raise ValueError(f"{source} is empty: name a device for each rank, {_EXAMPLES}.")
    places = [place for part in parts for place in _parse_part(part, source)]
    _check_hosts(places, source)
    return places


def _parse_part(text, source):
    names = [name.strip() for name in text.split(",")]
    host, colon, first = names[0].partition(":")
    if not colon or re.fullmatch(r"opencl\d+", host):
        host = None
    else:
        names[0] = first.strip()
        if not HOST_NAME.fullmatch(host):
            raise ValueError(f"{source}: {host!r} is not the name of a host, as in {_EXAMPLES}.")
    for name in names:
        if not DEVICE_NAME.fullmatch(name):
            raise ValueError(
                f"{source}: {name!r} in {text!r} is not the name of a device: it must be one such "
                "as cpu, cuda0 or opencl0:0, with the host before the first of a list, such as "
                "node0:cuda0,cuda1."
            )
    return [Place(host, name) for name in names]


def _check_hosts(places, source):
    hosts = [place.host for place in places]
    if None in hosts and len({*hosts}) > 1:
        named = next(place for place in places if place.host)
        bare = next(place for place in places if not place.host)
        raise ValueError(
            f"{source}: {named.host}:{named.device} has a host, but {bare.device} has none: name "
            "the host of each list."
        )
    runs = [host for at, host in enumerate(hosts) if at == 0 or hosts[at - 1] != host]
    for host in runs:
        if runs.count(host) > 1:
            raise ValueError(
                f"{source} names {host} again after another host: put the devices of a host "
                "together, because ranks are numbered host by host."
            )


def by_host(places: Sequence[Place]) -> dict[str | None, list[str]]:
    """Return the devices of each host, in the order of the ranks.

    >>> by_host(parse("node0:cpu,cpu;node1:cpu"))
    {'node0': ['cpu', 'cpu'], 'node1': ['cpu']}
    """
    found: dict[str | None, list[str]] = {}
    for place in places:
        found.setdefault(place.host, []).append(place.device)
    return found


def parse_range(text: str) -> list[int]:
    """Return the numbers in a list of the kernel's.

    >>> parse_range("0-3,8-9"), parse_range("5")
    ([0, 1, 2, 3, 8, 9], [5])
    """
    numbers = []
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        numbers += range(int(first), int(last if dash else first) + 1)
    return numbers


def share(nodes: Sequence[Sequence[Sequence[int]]], near: Sequence[int | None]) -> list[list[int]]:
    """Return the CPUs of each rank.

    The ranks of a NUMA node share its cores evenly, and a rank gets all threads of a core. Where
    there are more ranks than cores, ranks take turns on a core.

    Parameters
    ----------
    nodes : list
        For each NUMA node its cores, each a list of the numbers of its threads.
    near : list
        For each rank the node of its device; None if it has none, as a CPU has.

    Examples
    --------
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
    found: list[list[int]] = [[] for _ in homes]
    for number, cores in enumerate(nodes):
        ranks = [rank for rank, home in enumerate(homes) if home == number]
        for place, rank in enumerate(ranks):
            begin, end = (len(cores) * i // len(ranks) for i in (place, place + 1))
            own = cores[begin:end] or [cores[place % len(cores)]]
            found[rank] = sorted(thread for core in own for thread in core)
    return found


def cores_here(devices: Sequence[str]) -> list[list[int]]:
    """Return the CPUs for each rank of this machine, of those that this process may use."""
    nodes, numbers = _topology(os.sched_getaffinity(0))
    near = [numbers.get(_node_of(device)) for device in devices]
    return share(nodes, near)


def _topology(allowed):
    """Return the cores of each NUMA node, and its place in that list by its number."""
    nodes, numbers = [], {}
    for folder in sorted(_NODES.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        cores = _cores(sorted(allowed.intersection(parse_range(_read(folder / "cpulist")))))
        if cores:
            numbers[int(folder.name[4:])] = len(nodes)
            nodes.append(cores)
    rest = sorted(allowed.difference(t for cores in nodes for core in cores for t in core))
    return nodes + ([_cores(rest)] if rest else []), numbers


def _cores(threads):
    """Return the threads of each core."""
    cores: dict[Any, list[int]] = {}
    for thread in threads:
        siblings = _read(_CPUS / f"cpu{thread}" / "topology" / "thread_siblings_list")
        cores.setdefault(siblings or str(thread), []).append(thread)
    return list(cores.values())


def _node_of(device):
    """Return the NUMA node of a CUDA device, in the order of the PCI bus; None if not known."""
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
    text = _read(_PCI / buses[number].lower() / "numa_node")
    return int(text) if text.isdigit() else None  # -1 for none


def _read(path):
    try:
        return path.read_text().strip()
    except OSError:
        return ""


if __name__ == "__main__":
    # On another host, for the launcher.
    sys.stdout.write(json.dumps(cores_here(sys.argv[1].split(","))) + "\n")
