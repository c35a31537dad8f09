"""The device of each rank of a rule, and its host."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Mapping, Sequence

from synkhronos.launch.where import NO_DEVICE_GIVEN, find_hosts

NO_DEVICE = "none"  # the device of a server that has a process of its own


@dataclass(frozen=True)
class RankPlace:
    """The device of one rank, and its host (None: this machine)."""

    host: str | None
    device: str


def find_places(
    devices: Any,
    source: str = "devices",
    environment: Mapping[str, str] = os.environ,
    hosts: str | None = None,
    hostfile: str | None = None,
) -> list[RankPlace]:
    """Return the place of each rank, for the arguments of `find_hosts`; each host needs devices.

    >>> find_places("cpu", environment={"SLURM_JOB_NODELIST": "node[1-2]"})
    [RankPlace(host='node1', device='cpu'), RankPlace(host='node2', device='cpu')]
    """
    named = find_hosts(hosts, hostfile, devices, source, environment)
    places = [RankPlace(host.name, device) for host in named for device in host.devices]
    if not places:
        raise ValueError(NO_DEVICE_GIVEN.format(source))
    return places


def by_host(places: Sequence[RankPlace]) -> dict[str | None, list[str]]:
    """Return the devices of each host, in the order of the ranks.

    >>> by_host(find_places("node0:cpu,cpu;node1:cpu"))
    {'node0': ['cpu', 'cpu'], 'node1': ['cpu']}
    """
    devices: dict[str | None, list[str]] = {}
    for place in places:
        devices.setdefault(place.host, []).append(place.device)
    return devices
