"""``synkhronos launch --servers S --workers W SCRIPT``: servers and workers of a parameter server.

    launcher ──▶ a server                  ranks 0 to S - 1
             ──▶ a mover ──▶ the script    ranks S to S + W - 1

If some are on other machines, mpirun starts a process on each machine, which starts those there.

The hosts are filled in order, with servers and then workers: ``--hosts a:2,b:2`` has the first two
processes on a. Without numbers the processes are divided evenly.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from typing import Any

from synkhronos import _wording
from synkhronos._machine.devices import module_command
from synkhronos.launch import mpirun, where
from synkhronos.parameter_server.group.children import Children
from synkhronos.parameter_server.group.launching import MpirunRanks, run_of_group
from synkhronos.parameter_server.group.watched import WatchedRanks
from synkhronos.parameter_server.remote.node import ServerJob
from synkhronos.tools import launch


class _Nodes(WatchedRanks):
    """The servers and the workers of a run, however they are started."""

    title = "synkhronos launch"
    request = "the workers have {:g} s to end"

    def __init__(self, job: ServerJob, *args: Any, **more: Any) -> None:
        names = [*["server"] * job.n_servers, *["worker"] * job.n_workers]
        given = {"token": job.token, "outlives": True}
        super().__init__(*args, names=names, **{**given, **more})
        self._job = job
        self._following: set[int] = set()  # those that fail because others have died

    def _follows(self, rank):
        return rank in self._following

    def _serves(self, rank):
        return rank < self._job.n_servers

    def name(self, rank: int) -> str:
        """Return a server or a worker with its host, in words."""
        known = self.ranks[rank]
        number = rank if self._serves(rank) else rank - self._job.n_servers
        return f"{known.device} {number}{f' on {known.host}' if known.host else ''}"

    def end_of(self, rank: int) -> str:
        """Return the sentence about a process that has failed, while the others go on."""
        return f"{self.name(rank)} {self.ranks[rank].end}."

    def _take_mark(self, rank, kind, text):
        if kind == b"follows":
            self._following.add(rank)
        else:
            super()._take_mark(rank, kind, text)

    def _about_cause(self, rank):
        # A killed guard reports no end, and no other process has failed by itself.
        lost = self._about_lost()
        if lost and rank in self._following:
            return lost
        known = self.ranks[rank]
        said = [f"{self.name(rank)} {known.end}, as the first that has failed."]
        if known.last_lines:
            shown = "".join(f"\n    {line}" for line in known.last_lines[-5:])
            said.append(f"Its last lines:{shown}")
        return said


class NodesOfMpirun(_Nodes, MpirunRanks):
    """Servers and workers that mpirun starts."""


class NodesHere(_Nodes, Children):
    """Servers and workers that the launcher starts itself, without MPI."""


def main(options: argparse.Namespace) -> int:
    """Run servers and workers to their end; return the exit status.

    It is 0 if all workers have ended with 0, else that of the first process that has failed.
    """
    try:
        limits = launch.limits(options)
        begin = functools.partial(_begin, options)
        if limits is not None and not options.dry_run:
            status, nodes = launch.run_attempts(options, limits, begin, launch.say)
        else:
            nodes = begin(launch.find_hosts(options))
            if nodes is None:
                return 0
            status = nodes.run()
    except ValueError as error:
        print(_wording.printable(f"can't launch: {error}"), file=sys.stderr)
        return 2
    for sentence in nodes.failure_summary() if status and nodes else ():
        nodes.say(sentence)
    return status


def _begin(options, hosts, variables=None):
    """Return a run on these hosts, not yet started; None for a dry run."""
    job = _job(options, any(host.devices for host in hosts))
    kinds = [functools.partial(kind, job) for kind in (NodesHere, NodesOfMpirun)]
    given = {**_variables(options), **(variables or {})}
    hosts = _filled(hosts, job)
    return run_of_group(
        hosts, options, _node(job), given, job.token, options.dry_run, *kinds, grace=options.grace
    )


def _job(options, has_devices):
    """Return the run that the options describe; raise ValueError for options that don't fit."""
    if options.workers is None:
        raise ValueError(
            f"--servers {options.servers} needs workers too: give --workers, the number of "
            "processes that run the script."
        )
    n_servers = 1 if options.servers is None else options.servers
    for name, number in ("--servers", n_servers), ("--workers", options.workers):
        if number < 1:
            raise ValueError(f"{name} {number} must be a number of processes, at least 1.")
    refused = {
        "--parallel": options.parallel,
        "--follow": options.follow,
        "--check": options.check,
        "-n": options.ranks,
        "--devices": options.devices,
        "a device": has_devices,
    }
    given = [name for name, value in refused.items() if value not in (None, False)]
    if given:
        raise ValueError(
            f"{given[0]} is for the ranks of a session, but --workers starts processes without "
            "one: leave it out. A worker names its devices in parameter_server.create."
        )
    if options.script == "-":
        raise ValueError("--workers can't read the script from standard input: name a file.")
    launch.check_script(options.script)
    script = [sys.executable, "-u", os.path.abspath(options.script), *options.arguments]
    return ServerJob(n_servers, options.workers, script, mpirun.new_token())


def _filled(hosts, job):
    """Return the hosts, each with its number of processes."""
    n = job.n_servers + job.n_workers
    wanted = (
        f"{_wording.count(job.n_servers, 'server')} and {_wording.count(job.n_workers, 'worker')}"
    )
    if hosts[0].name is None:
        return [where.Host("localhost", n)]
    given = [host.ranks for host in hosts]
    if None not in given:
        if sum(given) != n:
            listed = ",".join(f"{host.name}:{host.ranks}" for host in hosts)
            raise ValueError(
                f"{wanted} are {n} processes, but the hosts {listed} have {sum(given)}: change "
                "the numbers behind the colons, or leave them out."
            )
        return hosts
    if set(given) != {None}:
        bare = next(host.name for host in hosts if host.ranks is None)
        raise ValueError(f"{bare} has no number of processes, but others have: give all or none.")
    hosts = hosts[:n]
    bounds = [-(-n * i // len(hosts)) for i in range(len(hosts) + 1)]
    spans = zip(hosts, bounds, bounds[1:])
    return [where.Host(host.name, end - begin) for host, begin, end in spans]


def _node(job):
    """Return the command of each process."""
    name = "synkhronos.parameter_server.remote.node"
    return module_command(name, job.as_json(), unbuffered=True)


def _variables(options):
    variables = launch.lost_after(options.lost_after)
    if options.threads_per_rank is not None:
        variables["OMP_NUM_THREADS"] = str(options.threads_per_rank)
    return variables
