"""Run a script on several machines, one process of mpirun on each, which forks the ranks there.

Without --hosts and --hostfile it takes the machines of a batch job, or else this one.

With --restarts the script starts again after a machine or a process was lost, on the hosts that
answer then; --discover names a program that prints them. A script that fails by itself is not
started again. If the machine of this command is lost, all ends.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import shlex
import sys
from dataclasses import replace
from typing import Callable, Mapping, Sequence

from synkhronos import _systems, _wording
from synkhronos._machine import heartbeats
from synkhronos._machine.devices import RANKS_VARIABLE, VARIABLE, module_command
from synkhronos.comm.mpi.secret import TRUST
from synkhronos.launch import CannotLaunch, attempts, mpirun, through, watch, where
from synkhronos.tools import run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command to a parser."""
    add_hosts_arguments(parser)
    add_mpirun_arguments(parser)
    add_lost_after(parser)
    parser.add_argument(
        "--trust-network", action="store_true",
        help="let MPI sum arrays, which knows fast fabrics, but does not check what comes",
    )  # fmt: skip
    add_attempts_arguments(parser)
    parser.add_argument(
        "--grace", metavar="SECONDS", type=seconds, default=through.GRACE,
        help="seconds that a script has to end, after a Ctrl-C (default: 10)",
    )  # fmt: skip
    for added in _systems.launch_options():
        group = parser.add_argument_group(added.title, added.description)
        for name, words in added.options.items():
            group.add_argument(name, **words)
    parser.add_argument(
        "--dry-run", action="store_true", help="print the command line, and don't run it"
    )
    run.add_arguments(parser)


_HOSTS = (
    "the machines: node0,node1:2 (with 2 ranks) or node0:cuda0,node0:cuda1,node1:cpu; without it "
    "those of a job of Slurm, PBS, LSF or Grid Engine"
)


def add_hosts_arguments(parser: argparse.ArgumentParser, help: str = _HOSTS) -> None:
    """Add the options that name machines, as `where.find_hosts` takes them."""
    machines = parser.add_mutually_exclusive_group()
    machines.add_argument("--hosts", metavar="LIST", help=help)
    machines.add_argument(
        "--hostfile", metavar="FILE",
        help="a file with a machine in each line: node1 slots=2, node1:2 or node1:cuda0",
    )  # fmt: skip


def add_mpirun_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how mpirun reaches other machines."""
    parser.add_argument("--agent", metavar="CMD", help="what stands in for ssh")
    parser.add_argument(
        "--mpirun-args", metavar="ARGS", default="", help='more arguments of mpirun, "--mca a b"'
    )
    for name, what in {
        "wait_answer": "a machine has to answer a login",
        "wait_start": "mpirun and MPI have to begin on all machines",
    }.items():
        default = getattr(mpirun.Options, name)
        parser.add_argument(
            f"--{name.replace('_', '-')}", metavar="SECONDS", type=seconds, default=default,
            help=f"how long {what} (default: {default:g})",
        )  # fmt: skip


def add_lost_after(parser: argparse.ArgumentParser) -> None:
    """Add the option for the time after which a machine is lost."""
    parser.add_argument(
        "--lost-after", metavar="SECONDS",
        help="seconds after which a silent machine counts as lost, and a stopped process on it is "
        "killed (default: 8); 0 is never",
    )  # fmt: skip


def seconds(text: str, least=0.0, most=math.inf, limits="at least 0") -> float:
    """Return an argument in seconds; raise ArgumentTypeError if it is not within the limits."""
    with contextlib.suppress(ValueError):
        if least <= (number := float(text)) <= most:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds, {limits}")


def add_attempts_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for machines that go and come."""
    group = parser.add_argument_group("machines that go and come")
    group.add_argument(
        "--restarts", metavar="N", type=int,
        help="start again up to N times after a machine or a process was lost, on the hosts that "
        "answer then (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--min-hosts", metavar="N", type=int,
        help="wait while fewer hosts answer (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--max-hosts", metavar="N", type=int, help="take the first N of those that answer"
    )
    group.add_argument(
        "--discover", metavar="CMD",
        help="a program that prints the hosts that there are now, as lines of a hostfile, in place "
        "of --hosts; it runs before each start",
    )  # fmt: skip
    group.add_argument(
        "--wait-hosts", metavar="SECONDS", type=seconds,
        help=f"how long to wait for hosts (default: {attempts.WAIT_SECONDS:g})",
    )  # fmt: skip


def limits(options: argparse.Namespace) -> attempts.Limits | None:
    """Return what the options say about attempts; None if they say nothing."""
    values = {
        "least": options.min_hosts,
        "most": options.max_hosts,
        "restarts": options.restarts,
        "wait_seconds": options.wait_hosts,
    }
    limits = {name: value for name, value in values.items() if value is not None}
    return attempts.Limits(**limits) if limits or options.discover is not None else None


def find_hosts(options: argparse.Namespace) -> list[where.Host]:
    """Return the hosts that the options name, or that the program of --discover names now."""
    named = options.hosts, options.hostfile
    if options.discover is None:
        return where.find_hosts(*named, options.devices)
    if named != (None, None):
        raise ValueError("--discover prints the hosts, so --hosts and --hostfile can't: give one.")
    discovered = attempts.discover(options.discover)
    hosts = where.find_hosts(devices=options.devices, discovered=discovered)
    if options.dry_run and not hosts:
        raise ValueError(f"--discover {options.discover!r} names no host now.")
    return hosts


def lost_after(seconds: str | None) -> dict[str, str]:
    """Return the environment variable that --lost-after sets."""
    if seconds is None:
        heartbeats.lost_seconds()  # raises if the environment has no number of seconds
        return {}
    heartbeats.limit(seconds, "--lost-after")
    return {heartbeats.VARIABLE: seconds}


def main(options: argparse.Namespace) -> int:
    """Start the script on all machines; return its exit status."""
    try:
        asked = limits(options)
        hosts = find_hosts(options)
        variables = _variables(options, hosts)
        if options.script != "-":
            check_script(options.script)
        if asked is None and len(hosts) == 1 and where.is_here(hosts[0].name):
            return _run_here(options, variables)
        if options.dry_run:
            print(shlex.join(_line(options, hosts, variables)))
            return 0
        mpirun.check()

        def begin(hosts, more):
            line = _line(options, hosts, {**_variables(options, hosts), **more})
            return through.Script(line, hosts, options, options.grace)

        if asked is None:
            script = begin(hosts, {})
            status = script.run()
        elif options.script == "-":
            raise ValueError("a script from standard input can't start again: name a file.")
        else:
            status, script = run_attempts(options, asked, begin, say)
    except ValueError as error:
        print(_wording.printable(f"can't launch: {error}"), file=sys.stderr)
        return 2
    for sentence in script.failure_summary() if script else ():
        print(_wording.printable(sentence), file=sys.stderr)
    return status


def _line(options, hosts, variables):
    hosts = [replace(host, name=host.name or "localhost") for host in hosts]
    return mpirun.line(hosts, options, run_line(options), variables)


def run_attempts(
    options: argparse.Namespace,
    limits: attempts.Limits,
    begin: Callable[[Sequence[where.Host], Mapping[str, str]], watch.Watch],
    say: Callable[[str], None],
) -> tuple[int, watch.Watch | None]:
    """Run attempts on the hosts of the options; return as `attempts.Attempts.run` does."""
    if options.discover is None and options.hostfile is None:
        named = len(find_hosts(options))
        if named < limits.least:
            hosts = _wording.count(named, "host")
            raise ValueError(f"--min-hosts {limits.least} is more than there are: {hosts}.")
    find = functools.partial(find_hosts, options)
    return attempts.Attempts(limits, find, begin, say, options).run()


def say(sentence: str) -> None:
    """Print a sentence of this command."""
    print(_wording.printable(f"synkhronos launch: {sentence}"), file=sys.stderr, flush=True)


def check_script(name: str) -> None:
    """Raise if a script can't be opened."""
    try:
        with open(name, "rb"):
            pass
    except OSError as error:
        raise CannotLaunch(f"can't open {name!r}: {error.strerror}") from error


def run_line(options: argparse.Namespace) -> list[str]:
    """Return the command of one machine's process."""
    line = module_command("synkhronos", "run")
    for flag in ("parallel", "follow", "check", "verbose", "no_report"):
        line += [f"--{flag.replace('_', '-')}"] * getattr(options, flag)
    threads = options.threads_per_rank
    values = {"--report": options.report, "-n": options.ranks, "--threads-per-rank": threads}
    for name, value in values.items():
        if value is not None:
            line += [name, str(value)]
    return [*line, options.script, *options.arguments]


def _variables(options, hosts):
    """Return the environment variables with the number and the devices of each machine's ranks."""
    variables = lost_after(options.lost_after)
    if options.trust_network:
        variables[TRUST] = "1"
    lists = [",".join(host.devices) for host in hosts]
    if any(lists):
        variables[VARIABLE] = lists[0] if len({*lists}) == 1 else ";".join(lists)
    if any(host.ranks is not None for host in hosts):
        if options.ranks is not None:
            raise ValueError(
                f"-n {options.ranks} is the number of ranks of each machine, but "
                f"{next(f'{h.name}:{h.ranks}' for h in hosts if h.ranks)} says it too: give one."
            )
        ranks = ["" if host.ranks is None else str(host.ranks) for host in hosts]
        variables[RANKS_VARIABLE] = ",".join(ranks)
    return variables


def _run_here(options, variables):
    if options.dry_run:
        settings = [f"{name}={value}" for name, value in variables.items()]
        print(shlex.join([*(["env", *settings] if settings else []), *run_line(options)]))
        return 0
    os.environ.update(variables)
    options.devices = None
    return run.main(options)
