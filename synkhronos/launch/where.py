"""Where the processes of a run are: hosts and devices, as options and batch systems name them.

--hosts a,b:2             hosts, and the number of processes on one
--hostfile FILE           the same from a file, with a line such as b slots=2 for each host
SLURM_JOB_NODELIST        the hosts of an allocation, if none are named; PBS_NODEFILE
--devices a:cuda0,cuda1   a process for each device of a host, once for each host
--devices cpu,cpu         the same on each host of an allocation, or else on this one
OMPI_COMM_WORLD_SIZE      processes that mpiexec or srun has already started; PMI_SIZE, ...
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, Sequence

from synkhronos import _wording
from synkhronos._machine.devices import DEVICE_NAME, HOST_NAME
from synkhronos.launch import CannotLaunch

NO_DEVICE = "none"  # of a server with a process of its own
_ADDRESS = re.compile(r"[0-9]+(\.[0-9]+){3}")
_EXAMPLES = "such as cpu,cpu or node0:cuda0,cuda1"
# Each names the number of processes of a job: Open MPI, MPICH and Intel MPI, Slurm's steps.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_SCRIPTS = 0xFFFFFFF0  # Slurm's steps from this one on run a batch script, or a shell


@dataclass(frozen=True)
class Host:
    """A machine, and the number of its ranks if it was given."""

    name: str
    ranks: int | None = None


@dataclass(frozen=True)
class Place:
    """The device of one rank, and its host: None for this one."""

    host: str | None
    device: str


def find_hosts(
    options: argparse.Namespace, environment: Mapping[str, str] = os.environ
) -> list[Host] | None:
    """Return the machines that options or an allocation name, or None for this one alone."""
    if options.hosts is not None:
        return parse_hosts(options.hosts)
    if options.hostfile is not None:
        return _read_hostfile(options.hostfile)
    names = allocated(environment)
    return None if names is None else [Host(name) for name in names]


def parse_hosts(text: str) -> list[Host]:
    """Return the machines that --hosts names.

    >>> parse_hosts("node0,node1:2")
    [Host(name='node0', ranks=None), Host(name='node1', ranks=2)]
    """
    return _checked([_parse_host(each.strip(), "--hosts") for each in text.split(",")], "--hosts")


def _parse_host(text, source):
    name, colon, number = text.partition(":")
    if not HOST_NAME.fullmatch(name):
        raise ValueError(
            f"{source}: {text!r} is not a machine: write names or addresses, and the number of "
            "ranks behind a colon, such as node0,node1:2."
        )
    if not colon:
        return Host(name)
    if not (number.isascii() and number.isdigit() and int(number)):
        raise ValueError(
            f"{source}: {text!r} must have a number of ranks of at least 1 behind the colon, such "
            f"as {name}:2."
        )
    return Host(name, int(number))


def _checked(hosts, source):
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{source} names {name} twice: {name}:2 gives it two ranks.")
    return hosts


def _read_hostfile(path):
    """Return the machines of a file in the format of Open MPI's hostfiles."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise CannotLaunch(f"can't read the hostfile {path!r}: {reason}") from error
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        source = f"{path}, line {number}"
        host = _parse_host(words[0], source)
        for word in words[1:]:
            name, _, value = word.partition("=")
            if name == "slots":
                host = _parse_host(f"{host.name}:{value}", source)
            elif name not in ("max_slots", "max-slots"):
                raise ValueError(f"{source}: {word!r} is not known; there is slots=2.")
        hosts.append(host)
    if not hosts:
        raise ValueError(f"the hostfile {path!r} names no machine: write one in each line.")
    return _checked(hosts, path)


def allocated(environment: Mapping[str, str] = os.environ) -> list[str] | None:
    """Return the hosts of a Slurm or PBS allocation; None if it has this one alone, or is none.

    >>> allocated({"SLURM_JOB_NODELIST": "node[1-2]"})
    ['node1', 'node2']
    """
    if environment.get("SLURM_JOB_NODELIST"):
        names = expand_nodes(environment["SLURM_JOB_NODELIST"])
    elif environment.get("PBS_NODEFILE"):
        try:
            text = Path(environment["PBS_NODEFILE"]).read_text()
        except OSError as error:
            raise CannotLaunch(
                f"PBS_NODEFILE={environment['PBS_NODEFILE']} can't be read ({error.strerror}): "
                "name the machines with --hosts."
            ) from error
        names = list(dict.fromkeys(text.split()))  # a line for each core
    else:
        return None
    return None if len(names) == 1 and is_here(names[0]) else names


def expand_nodes(text: str) -> list[str]:
    """Return the names in a list of Slurm.

    >>> expand_nodes("node[01-03,7],gpu")
    ['node01', 'node02', 'node03', 'node7', 'gpu']
    """
    parts = re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text)
    names = [name for part in parts for name in _expand(part)]
    if ",".join(parts) != text or not all(HOST_NAME.fullmatch(name) for name in names):
        raise ValueError(f"the list of nodes {text!r} can't be read: name them with --hosts.")
    return names


def _expand(pattern):
    before, bracket, rest = pattern.partition("[")
    if not bracket:
        return [pattern]
    inside, _, after = rest.partition("]")
    numbers = []
    for each in inside.split(","):
        first, dash, last = each.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            return [""]
        span = range(int(first), int(last or first) + 1)
        numbers += [str(number).zfill(len(first)) for number in span]
    return [f"{before}{number}{tail}" for number in numbers for tail in _expand(after)]


def is_here(name: str | None) -> bool:
    """Return whether a name or an address is one of this machine, as None is.

    >>> is_here("localhost"), is_here("127.0.0.1"), is_here("192.0.2.99")
    (True, True, False)
    """
    if name is None:
        return True
    if _ADDRESS.fullmatch(name):
        with contextlib.suppress(OSError), socket.socket() as end:
            end.bind((name, 0))
            return True
        return False
    return name.partition(".")[0] in ("localhost", socket.gethostname().partition(".")[0])


def find_places(
    devices: Any, source: str = "devices", environment: Mapping[str, str] = os.environ
) -> list[Place]:
    """Return the place of each rank: devices without a host are those of each allocated host.

    >>> find_places("cpu", environment={"SLURM_JOB_NODELIST": "node[1-2]"})
    [Place(host='node1', device='cpu'), Place(host='node2', device='cpu')]
    """
    places = parse_devices(devices, source)
    hosts = None if places[0].host else allocated(environment)
    return [Place(host, place.device) for host in hosts for place in places] if hosts else places


def parse_devices(devices: Any, source: str = "devices") -> list[Place]:
    """Return the place of each rank, in the order of the ranks.

    `devices` are names with commas, a host before the first one; of several hosts a list, or with a
    semicolon between them. A list of names without hosts is of one host. Anything else raises
    TypeError or ValueError; `source` names the argument there.

    >>> parse_devices("cpu,cpu")
    [Place(host=None, device='cpu'), Place(host=None, device='cpu')]
    >>> parse_devices(["node0:cuda0", "node1:cuda0,opencl0:1"])[1:]
    [Place(host='node1', device='cuda0'), Place(host='node1', device='opencl0:1')]
    """
    if not isinstance(devices, (str, list, tuple)):
        raise TypeError(
            f"{source} must be a list of names, {_EXAMPLES}, got {_wording.shown(devices)}."
        )
    parts = devices.split(";") if isinstance(devices, str) else list(devices)
    for part in parts:
        if not isinstance(part, str):
            raise TypeError(f"{source} must hold names, {_EXAMPLES}, got {_wording.shown(part)}.")
    parts = [part.strip() for part in parts if part.strip()]
    if not parts:
        raise ValueError(f"{source} is empty: name a device for each rank, {_EXAMPLES}.")
    places = [place for part in parts for place in _parse_part(part, source)]
    _check_order(places, source)
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


def _check_order(places, source):
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

    >>> by_host(parse_devices("node0:cpu,cpu;node1:cpu"))
    {'node0': ['cpu', 'cpu'], 'node1': ['cpu']}
    """
    found: dict[str | None, list[str]] = {}
    for place in places:
        found.setdefault(place.host, []).append(place.device)
    return found


def n_processes(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of processes that mpirun or srun has started; 1 without them.

    >>> n_processes({"OMPI_COMM_WORLD_SIZE": "2"}), n_processes({})
    (2, 1)
    """
    for name in _SIZES:
        if environment.get(name, "").isdigit() and not _is_of_script(name, environment):
            return int(environment[name])
    return 1


def _is_of_script(name, environment):
    """Return whether a variable is that of Slurm's step for a batch script, not of srun."""
    step = environment.get("SLURM_STEP_ID", "")
    return name.startswith("SLURM") and not (step.isdigit() and int(step) < _SCRIPTS)


def refusal(script: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the sentence for processes that MPI does not know to be one job."""
    line = f"python -m synkhronos run {shlex.quote(script)}"
    launch = f"`synkhronos launch {shlex.quote(script)}`"
    if "SLURM_STEP_ID" in environment:
        advice = (
            f"write {launch} in the batch script, or `srun --mpi=pmix {line}`, for an MPI with PMIx"
        )
    else:
        advice = f"start them with the mpiexec of that MPI, or write {launch} with --hosts"
    return (
        f"{n_processes(environment)} processes were started, but for the MPI that mpi4py loads "
        f"each is alone, and would run the whole script: {advice}."
    )
