"""Find the hosts and devices of a run, in the forms of options and of batch systems.

--hosts a,b:2             hosts, and the number of processes on one
--hosts a:cuda0,b:cpu     a process for each device; --devices takes such a list, too
--hostfile FILE           the same from a file: b slots=2, b:2 or b:cuda0 in a line for each host
SLURM_JOB_NODELIST        the hosts of an allocation, if none are named; PBS_NODEFILE
--devices a:cuda0,cuda1   a process for each device, of the host before it
--devices cpu,cpu         these on each host of --hosts or an allocation, or else on this one
OMPI_COMM_WORLD_SIZE      processes that mpiexec or srun has already started; PMI_SIZE, ...
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Mapping

from synkhronos import _wording
from synkhronos._machine.devices import DEVICE_NAME, HOST_NAME
from synkhronos.launch import CannotLaunch

_ADDRESS = re.compile(r"[0-9]+(\.[0-9]+){3}")
_OPENCL = re.compile(r"opencl\d+")  # before a colon: part of a device, not a host
_EXAMPLES = "such as cpu,cpu or node0:cuda0,cuda1"
NO_DEVICE_GIVEN = f"{{}} is empty: name a device for each rank, {_EXAMPLES}."
# Each holds the number of processes of a job: Open MPI, MPICH and Intel MPI, Slurm's steps.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
# Each names a file with a host in each line: PBS, LSF, Grid Engine (whose lines have more words).
_NODE_FILES = ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE")
_SCRIPTS = 0xFFFFFFF0  # Slurm's steps from this number on run a batch script or a shell


@dataclass(frozen=True)
class Host:
    """A host (None: this machine), and the number of its ranks and their devices if given."""

    name: str | None
    ranks: int | None = None
    devices: tuple[str, ...] = ()


def find_hosts(
    hosts: str | None = None,
    hostfile: str | None = None,
    devices: Any = None,
    source: str = "--devices",
    environment: Mapping[str, str] = os.environ,
    discovered: str | None = None,
) -> list[Host]:
    """Return the hosts that options or an allocation name, or else this one alone.

    `devices` are as in `parse_devices`; `source` names them in errors. If `discovered` is given, a
    text in the form of a hostfile, it replaces other names of hosts; it may name none.

    >>> find_hosts("a,b", devices="cpu")
    [Host(name='a', ranks=None, devices=('cpu',)), Host(name='b', ranks=None, devices=('cpu',))]
    """
    of_devices = [] if devices is None else parse_devices(devices, source)
    option = "--hosts" if hostfile is None else f"the hostfile {hostfile!r}"
    if discovered is None:
        named = _named(hosts, hostfile)
    else:
        option = "--discover"
        named = _parse_lines(discovered.splitlines(), option)
    if of_devices and of_devices[0].name is not None:
        if named or discovered is not None:
            raise ValueError(f"{source} names hosts, and so does {option}: give one of them.")
        return of_devices
    if not named and discovered is None:
        names = allocated(environment)
        named = [Host(None)] if names is None else [Host(name) for name in names]
    if not of_devices:
        return named
    [this] = of_devices
    for host in named:
        if host.devices:
            raise ValueError(f"{source} names devices, and so does {option}: give one of them.")
        if host.ranks not in (None, this.ranks):
            raise ValueError(
                f"{host.name} is to have {_wording.count(host.ranks, 'rank')}, but {source} "
                f"names {this.ranks}: give one of them, or the same number."
            )
    return [replace(host, devices=this.devices) for host in named]


def _named(hosts, hostfile):
    """Return the hosts of --hosts or --hostfile."""
    if hosts is not None and hostfile is not None:
        raise ValueError(f"hosts {hosts!r} and the hostfile {hostfile!r} are given: give one.")
    if hosts is not None:
        return _merged([_host(text.strip(), "--hosts") for text in hosts.split(",")], "--hosts")
    if hostfile is None:
        return []
    try:
        lines = Path(hostfile).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise CannotLaunch(f"can't read the hostfile {hostfile!r}: {reason}") from error
    named = _parse_lines(lines, hostfile)
    if not named:
        raise ValueError(f"the hostfile {hostfile!r} names no machine: write one in each line.")
    return named


def parse_devices(devices: Any, source: str = "devices") -> list[Host]:
    """Return the hosts of devices, in the order of the ranks.

    `devices` are names with commas between them; a host before a name holds for the next ones, too.
    Each item of a list, and each part after a semicolon, begins without a host. Devices without
    hosts are those of one. Anything else raises TypeError or ValueError.

    >>> parse_devices("cpu,cpu")
    [Host(name=None, ranks=2, devices=('cpu', 'cpu'))]
    >>> parse_devices(["node0:cuda0", "node1:cuda0,opencl0:1"])[1:]
    [Host(name='node1', ranks=2, devices=('cuda0', 'opencl0:1'))]
    """
    if not isinstance(devices, (str, list, tuple)):
        raise TypeError(
            f"{source} must be a list of names, {_EXAMPLES}, got {_wording.shown(devices)}."
        )
    items = [devices] if isinstance(devices, str) else devices
    for item in items:
        if not isinstance(item, str):
            raise TypeError(f"{source} must hold names, {_EXAMPLES}, got {_wording.shown(item)}.")
    parts = [part.strip() for item in items for part in item.split(";") if part.strip()]
    if not parts:
        raise ValueError(NO_DEVICE_GIVEN.format(source))
    hosts = []
    for part in parts:
        name = None
        for text in map(str.strip, part.split(",")):
            before, colon, device = map(str.strip, text.partition(":"))
            if colon and not _OPENCL.fullmatch(before):
                name = _host(f"{before}:{device}", source).name
            else:
                device = text
            if not DEVICE_NAME.fullmatch(device):
                raise ValueError(
                    f"{source}: {device!r} in {part!r} is not the name of a device: it must be one "
                    "such as cpu, cuda0 or opencl0:0, with its host before it, such as "
                    "node0:cuda0,cuda1."
                )
            hosts.append(Host(name, 1, (device,)))
    return _merged(hosts, source)


def _host(text, source):
    """Return the host of an item such as a, a:2 or a:cuda0."""
    name, colon, more = text.partition(":")
    if not HOST_NAME.fullmatch(name):
        raise ValueError(
            f"{source}: {text!r} is not a machine: write names or addresses, and behind a colon "
            "the number of ranks or a device, such as node0,node1:2 or node0:cuda0,node1:cpu."
        )
    if not colon:
        return Host(name)
    if DEVICE_NAME.fullmatch(more):
        return Host(name, 1, (more,))
    otherwise = f", or a device, behind the colon, such as {name}:2 or {name}:cuda0"
    return Host(name, _count(more, text, source, otherwise))


def _count(text, word, source, otherwise=""):
    """Return a number of ranks; errors quote the `word` that it is a part of."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ValueError(
            f"{source}: {word!r} must have a number of ranks of at least 1{otherwise}."
        )
    return int(text)


def _merged(hosts, source):
    """Join neighbours of one name, each with devices; raise if hosts contradict one another."""
    merged: list[Host] = []
    for host in hosts:
        if merged and merged[-1].name == host.name and host.devices and merged[-1].devices:
            devices = merged.pop().devices + host.devices
            host = Host(host.name, len(devices), devices)
        merged.append(host)
    bare = next((host for host in merged if not host.devices), None)
    named = next((host for host in merged if host.name and host.devices), None)
    if bare and named:
        raise ValueError(
            f"{source}: {named.name}:{named.devices[0]} has a device, but {bare.name} has none: "
            "name a device for each rank, or for none."
        )
    here = next((host for host in merged if host.name is None), None)
    if here and named:
        raise ValueError(
            f"{source}: {named.name}:{named.devices[0]} has a host, but {here.devices[0]} has "
            "none: name the host of each list."
        )
    names = [host.name for host in merged]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"{source} names {name} twice: put its ranks together, because they are numbered "
                f"host by host, such as {name}:2 or {name}:cuda0,{name}:cuda1."
            )
    return merged


def _parse_lines(lines, file):
    """Return the hosts that lines name, in the format of Open MPI's or MPICH's hostfiles."""
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        source = f"{file}, line {number}"
        host = _host(words[0], source)
        for word in words[1:]:
            name, _, value = word.partition("=")
            if name == "slots":
                slots = _count(value, word, source)
                if host.ranks not in (None, slots):
                    raise ValueError(f"{source}: {words[0]} and {word} contradict: give one.")
                host = replace(host, ranks=slots)
            elif name not in ("max_slots", "max-slots"):
                raise ValueError(f"{source}: {word!r} is not known; there is slots=2.")
        hosts.append(host)
    return _merged(hosts, file)


def allocated(environment: Mapping[str, str] = os.environ) -> list[str] | None:
    """Return the hosts that a batch system has allocated; None for this one alone, or for none.

    >>> allocated({"SLURM_JOB_NODELIST": "node[1-2]"})
    ['node1', 'node2']
    """
    variable = next((name for name in _NODE_FILES if environment.get(name)), None)
    if environment.get("SLURM_JOB_NODELIST"):
        names = expand_nodes(environment["SLURM_JOB_NODELIST"])
    elif variable is not None:
        try:
            text = Path(environment[variable]).read_text()
        except OSError as error:
            raise CannotLaunch(
                f"{variable}={environment[variable]} can't be read ({error.strerror}): "
                "name the machines with --hosts."
            ) from error
        first_words = (line.split()[0] for line in text.splitlines() if line.strip())
        names = list(dict.fromkeys(first_words))  # a host may have a line for each core
    else:
        return None
    return None if len(names) == 1 and is_here(names[0]) else names


def expand_nodes(text: str) -> list[str]:
    """Return the names in a list of nodes in Slurm's format.

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
    for part in inside.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            return [""]
        span = range(int(first), int(last or first) + 1)
        numbers += [str(number).zfill(len(first)) for number in span]
    return [f"{before}{number}{tail}" for number in numbers for tail in _expand(after)]


def is_here(name: str | None) -> bool:
    """Return whether a name or an address is that of this machine; so is None.

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


def n_processes(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of processes that mpirun or srun has started; 1 without them.

    >>> n_processes({"OMPI_COMM_WORLD_SIZE": "2"}), n_processes({})
    (2, 1)
    """
    step = environment.get("SLURM_STEP_ID", "")
    is_of_srun = step.isdigit() and int(step) < _SCRIPTS  # else Slurm's are of the batch script
    for name in _SIZES:
        is_known = is_of_srun or not name.startswith("SLURM")
        if is_known and environment.get(name, "").isdigit():
            return int(environment[name])
    return 1


def refusal(script: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the sentence for several processes that MPI takes for separate jobs."""
    line = f"synkhronos run {shlex.quote(script)}"
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
