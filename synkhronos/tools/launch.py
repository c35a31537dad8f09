"""Run a script on several machines, one process of mpirun on each, which forks the ranks there.

Without --hosts and --hostfile it takes the machines of a Slurm or PBS allocation, or else this one.

With --workers it starts servers and workers of a parameter server instead: each worker is a process
that runs the script. Servers and then workers fill the machines in order, as many on each as its
number says, or evenly: --servers 1 --workers 3 --hosts a:2,b:2.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping, Sequence

from synkhronos import _wording
from synkhronos._host import pythons
from synkhronos._machine import devices as _devices
from synkhronos._machine.devices import module_command, python_command
from synkhronos.comm.mpi import folders
from synkhronos.tools import relay, run

_ADDRESS = re.compile(r"[0-9]+(\.[0-9]+){3}")
_EXPORTED = {"THEANO_FLAGS", "PYTENSOR_FLAGS", "PYTHONPATH", "OMP_NUM_THREADS"}
_ROOT = "ALLOW_RUN_AS_ROOT"
# Of runs that mpirun is to end, in 6 to 14 seconds, when a machine is cut off.
_KEEPALIVE = {"time": 8, "intvl": 2, "probes": 3}
_PROBE_SECONDS = 10
_INSTALL = pythons.install("mpi")


class CannotLaunch(Exception):
    """The script can't be started; the message is for the user."""


@dataclass(frozen=True)
class Host:
    """A machine, and the number of its ranks if it was given."""

    name: str
    ranks: int | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command to a parser."""
    machines = parser.add_mutually_exclusive_group()
    machines.add_argument(
        "--hosts", metavar="LIST", help="the machines, such as node0,node1:2 (with 2 ranks)"
    )
    machines.add_argument(
        "--hostfile", metavar="FILE", help="a file with a machine in each line: node1 slots=2"
    )
    add_mpirun_arguments(parser)
    parser.add_argument(
        "--servers", metavar="S", type=int, help="servers of a parameter server (default: 1)"
    )
    parser.add_argument(
        "--workers", metavar="W", type=int, help="its workers, each of which runs the script"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the command line, and don't run it"
    )
    run.add_arguments(parser)


def add_mpirun_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how mpirun reaches other machines."""
    parser.add_argument("--agent", metavar="CMD", help="what stands in for ssh")
    parser.add_argument(
        "--mpirun-args", metavar="ARGS", default="", help='more arguments of mpirun, "--mca a b"'
    )


def main(options: argparse.Namespace) -> int:
    """Start the script on all machines; return its exit status."""
    try:
        hosts = find_hosts(options)
        variables = _variables(options, hosts)
        if options.script != "-":
            check_script(options.script)
        if hosts is None or (len(hosts) == 1 and is_here(hosts[0].name)):
            return _run_here(options, variables)
        # The script hears of a lost machine by its carrier; mpirun would end it without a word.
        line = mpirun_line(hosts, options, [*_run_line(options)], variables, keepalive=None)
        if options.dry_run:
            print(shlex.join(line))
            return 0
        check_mpirun()
    except (CannotLaunch, ValueError) as error:
        print(f"can't launch: {error}", file=sys.stderr)
        return 2
    launched = relay.Launch(
        line, os.environ, lambda printed: why_not_started(printed, hosts, options.agent)
    )
    return launched.run()


def check_script(name: str) -> None:
    """Raise if a script can't be opened."""
    try:
        with open(name, "rb"):
            pass
    except OSError as error:
        raise CannotLaunch(f"can't open {name!r}: {error.strerror}") from error


def _run_line(options):
    """Return the command of one machine's process."""
    line = module_command("synkhronos", "run")
    line += ["--parallel"] * options.parallel
    line += ["--follow"] * options.follow
    line += ["--check"] * options.check
    if options.ranks is not None:
        line += ["-n", str(options.ranks)]
    if options.threads_per_rank is not None:
        line += ["--threads-per-rank", str(options.threads_per_rank)]
    return [*line, options.script, *options.arguments]


def _variables(options, hosts):
    """Return the environment variables that tell each machine's process of its ranks."""
    variables = {}
    if options.devices:
        variables[_devices.VARIABLE] = options.devices
        n_devices = len(options.devices.split(","))
        for host in hosts or ():
            if host.ranks not in (None, n_devices):
                raise ValueError(
                    f"{host.name} is to have {_wording.count(host.ranks, 'rank')}, but --devices "
                    f"names {n_devices}: give one of them, or the same number."
                )
    if any(host.ranks is not None for host in hosts or ()):
        if options.ranks is not None:
            raise ValueError(
                f"-n {options.ranks} is the number of ranks of each machine, but "
                f"{next(f'{h.name}:{h.ranks}' for h in hosts if h.ranks)} says it too: give one."
            )
        ranks = ["" if host.ranks is None else str(host.ranks) for host in hosts]
        variables[_devices.RANKS_VARIABLE] = ",".join(ranks)
    return variables


def _run_here(options, variables):
    if options.dry_run:
        settings = [f"{name}={value}" for name, value in variables.items()]
        print(shlex.join([*(["env", *settings] if settings else []), *_run_line(options)]))
        return 0
    os.environ.update(variables)
    options.devices = None
    return run.main(options)


def find_hosts(options: argparse.Namespace, environment: Mapping[str, str] = os.environ):
    """Return the machines to run on, or None for this one alone."""
    if options.hosts is not None:
        return parse_hosts(options.hosts)
    if options.hostfile is not None:
        return _read_hostfile(options.hostfile)
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
    if len(names) == 1 and is_here(names[0]):
        return None
    return [Host(name) for name in names]


def parse_hosts(text: str) -> list[Host]:
    """Return the machines that --hosts names.

    >>> parse_hosts("node0,node1:2")
    [Host(name='node0', ranks=None), Host(name='node1', ranks=2)]
    """
    return _checked([_parse_host(each.strip(), "--hosts") for each in text.split(",")], "--hosts")


def _parse_host(text, source):
    name, colon, number = text.partition(":")
    if not _devices.HOST_NAME.fullmatch(name):
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


def expand_nodes(text: str) -> list[str]:
    """Return the names in a list of Slurm.

    >>> expand_nodes("node[01-03,7],gpu")
    ['node01', 'node02', 'node03', 'node7', 'gpu']
    """
    parts = re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text)
    names = [name for part in parts for name in _expand(part)]
    if ",".join(parts) != text or not all(_devices.HOST_NAME.fullmatch(name) for name in names):
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


def find_mpirun() -> str:
    """Return the path of mpirun: the one of this environment, or else the first on the PATH."""
    own = Path(sys.executable).parent / "mpirun"
    found = str(own) if os.access(own, os.X_OK) else shutil.which("mpirun")
    if found is None:
        raise CannotLaunch(f"there is no mpirun: {_INSTALL}, or load the MPI of this cluster.")
    return found


def mpirun_line(
    hosts: Sequence[Host],
    options: argparse.Namespace,
    command: Sequence[str],
    variables: Mapping[str, str],
    counts: Sequence[int] | None = None,
    keepalive: int | None = _KEEPALIVE["time"],
) -> list[str]:
    """Return the command line that runs a command on each machine: once, or `counts` times.

    After `keepalive` seconds of silence mpirun and its daemons ask whether the other side is there,
    and end all if not. With None they do as PRRTE does by default, 3 to 8 minutes after a cut.
    """
    each = [1] * len(hosts) if counts is None else counts
    arguments = _split_arguments(options.mpirun_args)
    _check_root(arguments)
    line = [find_mpirun()]
    line += ["--host", ",".join(f"{host.name}:{count}" for host, count in zip(hosts, each))]
    mapping = "ppr:1:node" if counts is None else "slot"
    line += ["-n", str(sum(each)), "--map-by", mapping, "--bind-to", "none"]
    if options.agent:
        line += ["--mca", "plm", "ssh", "--mca", "plm_rsh_agent", options.agent]
    for name, value in {**_KEEPALIVE, "time": keepalive}.items() if keepalive else ():
        line += ["--prtemca", f"oob_tcp_keepalive_{name}", str(value)]
    line += folders.daemon_arguments(Path(line[0]).with_name("prted"))
    for name in sorted(os.environ):
        is_own = name.startswith("SYNKHRONOS_") and name != relay.VARIABLE
        if (name in _EXPORTED or is_own) and name not in variables:
            line += ["-x", name]
    for name, value in variables.items():
        line += ["-x", f"{name}={value}"]
    return [*line, *arguments, *command]


def _split_arguments(text):
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"--mpirun-args {text!r} can't be taken apart: {error}.") from None


def _check_root(arguments):
    if os.geteuid() or "--allow-run-as-root" in arguments:
        return
    for name in ("OMPI", "PRTE"):
        if f"{name}_{_ROOT}" in os.environ and f"{name}_{_ROOT}_CONFIRM" in os.environ:
            return
    raise CannotLaunch(
        "Open MPI refuses to run as root: run as another user, or set "
        f"OMPI_{_ROOT}=1 and OMPI_{_ROOT}_CONFIRM=1."
    )


def check_mpirun() -> None:
    """Raise unless mpirun belongs to the MPI that mpi4py loads."""
    path = find_mpirun()
    code = (
        "import os, mpi4py; mpi4py.rc.initialize = False; os.chdir('/')\n"  # as settings.away()
        "from mpi4py import MPI; print(MPI.Get_library_version())"
    )
    own, loaded = (
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in ([path, "--version"], python_command(code))
    )
    own_text, own_error = own.communicate()
    loaded_text, problem = loaded.communicate()
    if loaded.returncode:
        lines = problem.strip().splitlines() or [f"exit status {loaded.returncode}"]
        raise CannotLaunch(f"mpi4py can't be imported ({lines[-1]}): {_INSTALL}.")
    one, other = _kind(own_text + own_error), _kind(loaded_text)
    if one != other:
        raise CannotLaunch(
            f"{path} belongs to {_shown(one)}, but mpi4py loads {_shown(other)}: put the mpirun of "
            f"that MPI first on the PATH, or {_INSTALL}."
        )
    if one[0] != "Open MPI":
        raise CannotLaunch(
            f"{path} belongs to {_shown(one)}, of which the options are not known here. Write the "
            "line by hand: one process of `python -m synkhronos run SCRIPT` on each machine."
        )


def _kind(text) -> tuple[str, str]:
    r"""Return the name of an MPI and its first number.

    >>> _kind("mpirun (Open MPI) 5.0.11"), _kind("HYDRA build details:\\nVersion: 4.1")
    (('Open MPI', '5'), ('MPICH', '4'))
    """
    names = ("Open MPI", "Open MPI"), ("Intel", "Intel MPI"), ("MPICH", "MPICH"), ("HYDRA", "MPICH")
    for mark, name in names:
        if mark.lower() in text.lower():
            number = re.search(r"(\d+)\.\d", text)
            return name, number[1] if number else ""
    return text.strip().split("\n")[0][:60] or "an unknown MPI", ""


def _shown(kind):
    return " ".join(filter(None, kind))


def why_not_started(printed: str, hosts: Sequence[Host], agent: str | None) -> str:
    """Return a sentence about an mpirun that has ended before the script began."""
    details = "\n".join(f"    {line}" for line in printed.strip().splitlines()[-25:])
    if re.search(r"daemon|unable to reliably start|ORTE was unable|ssh:", printed, re.IGNORECASE):
        lost = _probe_all(hosts, agent, "true")
        if lost:
            return (
                f"can't launch: {_listed(lost)} can't be reached. Try: "
                f"{agent or 'ssh'} {next(iter(lost))} true"
            )
        # PRRTE may name another machine than the one without its daemon.
        without = _probe_all(hosts, agent, f"ls -d {shlex.join(_needed_there())}")
        if without:
            return (
                f"can't launch: {_listed(without)} can be reached, but mpirun's daemon can't start "
                "there: is this environment at the same path there?"
            )
        return (
            "can't launch: all machines can be reached, but mpirun's daemon does not answer from "
            "one: is this environment at the same path there, and do the machines reach this one?\n"
            + details
        )
    return f"can't launch: mpirun has ended before the script began. It printed:\n{details}"


def is_here(name: str) -> bool:
    """Return whether a name or an address is one of this machine.

    >>> is_here("localhost"), is_here("127.0.0.1"), is_here("192.0.2.99")
    (True, True, False)
    """
    if _ADDRESS.fullmatch(name):
        with contextlib.suppress(OSError), socket.socket() as end:
            end.bind((name, 0))
            return True
        return False
    return name.partition(".")[0] in ("localhost", socket.gethostname().partition(".")[0])


def _listed(problems):
    return " and ".join(f"{name} ({problem})" for name, problem in problems.items())


def _needed_there():
    """Return the paths of the programs that must be on each machine."""
    daemon = Path(find_mpirun()).parent / "prted"
    return [sys.executable, *([str(daemon)] if daemon.exists() else [])]


def _probe_all(hosts, agent, command):
    """Run a command on each machine; return what is in the way: the machine's name -> why."""
    with ThreadPoolExecutor(16) as pool:
        problems = pool.map(lambda host: _probe(host.name, agent, command), hosts)
        return {host.name: each for host, each in zip(hosts, problems) if each}


def _probe(name, agent, command):
    """Return why a command fails on a machine, or an empty string."""
    if is_here(name):
        return ""
    options = [] if agent else ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_PROBE_SECONDS}"]
    try:
        done = subprocess.run(
            [*shlex.split(agent or "ssh"), *options, name, command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=2 * _PROBE_SECONDS,
        )
    except FileNotFoundError as error:
        return f"there is no {error.filename}"
    except OSError as error:
        return str(error)
    except subprocess.TimeoutExpired:
        return f"no answer within {2 * _PROBE_SECONDS} s"
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return lines[-1] if done.returncode else ""
