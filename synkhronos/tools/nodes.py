"""``synkhronos launch --servers S --workers W SCRIPT``: servers and workers of a parameter server.

    launcher ──▶ a server                  ranks 0 to S - 1
             ──▶ a mover ──▶ the script    ranks S to S + W - 1

Where some are on other machines, mpirun starts a guard for each, and the guard the process.

With hosts, servers and then workers fill them in order: ``--hosts a:2,b:2`` has the first two
processes on a. Without numbers the processes are divided evenly.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import signal
import sys
from typing import Mapping, Sequence

from synkhronos import _wording
from synkhronos._machine.devices import module_command, usable_cores
from synkhronos.comm.heartbeats import SILENT
from synkhronos.launch import INTERRUPTED, watch
from synkhronos.parameter_server.remote.node import Job
from synkhronos.tools import guard, launch, ranks

PATIENCE = 10.0  # seconds for the scripts to end, after a Ctrl-C
_KEEPALIVE = 8 * 3600  # seconds until mpirun ends all because a host is cut off: others may go on
_AFTER_LOST = 1.0  # seconds for mpirun after all processes that can be reached have ended
_AFTER_HOST = 10.0  # if others on the host of a lost one have not been missed
_EXPORTED = ("PATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH")


class _Nodes(watch.Watch):
    """The servers and the workers of a run, however they are started."""

    title = "synkhronos launch"
    request = "the workers have {:g} s to end"
    _job: Job

    def _take_job(self, job):
        """Note what runs; return the names of the processes."""
        self._job = job
        self.lost: list[int] = []  # processes of which nothing is heard
        self._following: set[int] = set()  # those that fail because others have died
        return [*["server"] * job.n_servers, *["worker"] * job.n_workers]

    @property
    def cause(self) -> int | None:
        """The first process that has failed, if one has, and not because another one had died."""
        own = [at for at in self.failed if at not in self._following]
        return own[0] if own else super().cause

    def name(self, rank: int) -> str:
        """Return a server or a worker with its host, in words."""
        known = self.ranks[rank]
        is_worker = rank >= self._job.n_servers
        number = rank - self._job.n_servers * is_worker
        return f"{known.device} {number}{f' on {known.host}' if known.host else ''}"

    def end_of(self, rank: int) -> str:
        """Return the sentence about a process that has failed, while the others go on."""
        return f"{self.name(rank)} {self.ranks[rank].end}."

    def _take_mark(self, rank, kind, text):
        if kind == b"follows":
            self._following.add(rank)
        elif kind != b"lost":
            super()._take_mark(rank, kind, text)
        elif int(text) not in self.lost and self.ranks[int(text)].status is None:
            self.lost.append(int(text))
            self._say(f"{self.name(int(text))} {SILENT}.")
        if self.lost:
            self._end_without_lost()

    def _end_without_lost(self):
        """End mpirun when all processes have ended but those that are lost, and their hosts'."""
        hosts = {self.ranks[at].host for at in self.lost}
        left = [at for at, rank in enumerate(self.ranks) if rank.status is None]
        if all(self.ranks[at].host in hosts for at in left):
            self._ending = [signal.SIGKILL]  # it would wait for its daemon there
            self._end_after(_AFTER_LOST if set(left) <= set(self.lost) else _AFTER_HOST)

    def _status(self):
        status = super()._status()
        return 1 if self.lost and not self.interrupted_by else status

    def story(self) -> list[str]:
        """Return sentences about a run that has not ended well."""
        if self.interrupted_by:
            return []
        if self.lost:
            lost = " and ".join(self.name(at) for at in self.lost)
            return [f"{lost} can't be reached any more, which has ended the run."]
        if self.cause is None or self.cause in self._following:
            # A killed guard reports no end, and no other process has failed by itself.
            lost = [at for at, rank in enumerate(self.ranks) if rank.status is None]
            if lost or self.cause is None:
                return [f"{self.name(at)} {self.ranks[at].end}." for at in lost]
        cause = self.ranks[self.cause]
        said = [f"{self.name(self.cause)} {cause.end}, as the first that has failed."]
        if cause.last_lines:
            shown = "".join(f"\n    {line}" for line in cause.last_lines[-5:])
            said.append(f"Its last lines:{shown}")
        return said


class NodesOfMpirun(_Nodes, ranks.Ranks):
    """Servers and workers that mpirun starts."""

    def __init__(self, line: Sequence[str], job: Job) -> None:
        super().__init__(
            line, os.environ, job.token, self._take_job(job), None, outlives=True, patience=PATIENCE
        )


class NodesHere(_Nodes, watch.Children):
    """Servers and workers that the launcher starts itself, without MPI."""

    def __init__(self, job: Job, environment: Mapping[str, str]) -> None:
        names = self._take_job(job)
        commands = [_node(job)] * len(names)
        super().__init__(
            commands, names, environment, outlives=True, patience=PATIENCE, token=job.token
        )


def main(options: argparse.Namespace) -> int:
    """Run servers and workers to their end; return the exit status.

    It is 0 if all workers have ended with 0, else that of the first process that has failed.
    """
    try:
        token = secrets.token_hex(16)
        job = _job(options, token)
        hosts, counts = _places(launch.find_hosts(options), job)
        is_here = not options.mpirun_args and all(launch.is_here(host.name) for host in hosts)
        line = _node(job) if is_here else _mpirun_line(hosts, counts, options, job, token)
        if options.dry_run:
            print(shlex.join(line))
            return 0
        nodes: _Nodes
        if is_here:
            nodes = NodesHere(job, {**os.environ, **_threads(options)})
        else:
            launch.check_mpirun()
            nodes = NodesOfMpirun(line, job)
    except (launch.CannotLaunch, ValueError) as error:
        print(f"can't launch: {error}", file=sys.stderr)
        return 2
    status = nodes.run()
    if not status:
        return 0
    said = nodes.story()
    if not nodes.has_started and not nodes.interrupted_by:
        said = [launch.why_not_started(nodes.own_words, hosts, options.agent)]
    elif nodes.own_words.strip("\n \0") and not nodes.interrupted_by and nodes.cause is None:
        said.append(f"mpirun says:\n{nodes.own_words.strip()}")
    for sentence in said:
        print(f"synkhronos launch: {sentence}", file=sys.stderr)
    if status == 128 + signal.SIGINT and nodes.interrupted_by == signal.SIGINT:
        return INTERRUPTED
    return status


def _job(options, token):
    """Return what is asked for, checked."""
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
    return Job(n_servers, options.workers, script, token)


def _places(hosts, job):
    """Return the hosts, and the number of processes on each."""
    n = job.n_servers + job.n_workers
    wanted = (
        f"{_wording.count(job.n_servers, 'server')} and {_wording.count(job.n_workers, 'worker')}"
    )
    if hosts is None:
        return [launch.Host("localhost")], [n]
    given = [host.ranks for host in hosts]
    if None not in given:
        if sum(given) != n:
            listed = ",".join(f"{host.name}:{host.ranks}" for host in hosts)
            raise ValueError(
                f"{wanted} are {n} processes, but the hosts {listed} have {sum(given)}: change "
                "the numbers behind the colons, or leave them out."
            )
        return hosts, given
    if set(given) != {None}:
        bare = next(host.name for host in hosts if host.ranks is None)
        raise ValueError(f"{bare} has no number of processes, but others have: give all or none.")
    hosts = hosts[:n]
    bounds = [-(-n * i // len(hosts)) for i in range(len(hosts) + 1)]
    return hosts, [end - begin for begin, end in zip(bounds, bounds[1:])]


def _node(job):
    """Return the command of each process."""
    name = "synkhronos.parameter_server.remote.node"
    return module_command(name, job.as_json(), unbuffered=True)


def _threads(options):
    if options.threads_per_rank is None:
        return {}
    return {"OMP_NUM_THREADS": str(options.threads_per_rank)}


def _mpirun_line(hosts, counts, options, job: Job, token) -> Sequence[str]:
    own = ["--output", "tag", "--with-ft", "ulfm"]
    if max(counts) > usable_cores():
        own += ["--mca", "mpi_yield_when_idle", "1"]
    variables = _threads(options)
    if [host.name for host in hosts] != ["localhost"]:
        variables.update({name: os.environ[name] for name in _EXPORTED if name in os.environ})
    command = [*own, *guard.command(token, True, _node(job))]
    return launch.mpirun_line(hosts, options, command, variables, counts, _KEEPALIVE)
