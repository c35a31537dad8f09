"""A process of a run: ``python -u -m synkhronos.parameter_server.remote.node JSON``.

    rank below the number of servers  ──▶ a server
    each other rank                   ──▶ a mover, which starts the script of its worker

The launcher starts it, or the process of mpirun on its machine. The script gets an environment
without MPI: a library that starts MPI there must not take the place of that process.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import subprocess
import sys
import traceback
from dataclasses import asdict, dataclass
from typing import Sequence

from synkhronos._machine.devices import default_threads
from synkhronos._machine.processes import end_with_parent, shell_status
from synkhronos.launch.streams import mark
from synkhronos.parameter_server.group import membership

_LEAVE_SECONDS = 2.0  # for others to take what was sent last
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class ServerJob:
    """A run, as the launcher tells all its processes.

    >>> job = ServerJob(1, 2, ["python", "script.py"])
    >>> ServerJob(**json.loads(job.as_json())) == job
    True
    """

    n_servers: int
    n_workers: int
    command: Sequence[str]
    token: str = ""  # begins the marks that the launcher takes out of standard error

    def as_json(self) -> str:
        """Return the job as an argument of a command line."""
        return json.dumps(asdict(self))


def main(argv: Sequence[str]) -> int:
    """Run a server or a mover to its end; return the exit status, below 0 for a signal."""
    job = ServerJob(**json.loads(argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher answers a Ctrl-C
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # which the launcher sends to end the scripts
    _, n_here = membership.place_of(os.environ) or (0, job.n_servers + job.n_workers)
    for name in _THREADS:
        os.environ.setdefault(name, str(default_threads(n_here)))
    group = membership.join()
    if group.size != job.n_servers + job.n_workers:
        wanted = f"{job.n_servers} servers and {job.n_workers} workers"
        sys.stderr.write(f"{group.size} processes were started for {wanted}\n")
        return 1
    is_server = group.rank < job.n_servers
    group.introduce("server" if is_server else "mover")
    status = (_serve if is_server else _move)(group, job)
    group.close(_LEAVE_SECONDS)
    return status


def _serve(group, job):
    import logging

    from synkhronos.parameter_server.remote.server import ServerLoop

    logging.basicConfig(format=f"server {group.rank}: %(message)s")
    os.environ["THEANO_FLAGS"] = _on_host(os.environ.get("THEANO_FLAGS", ""))
    return ServerLoop(group, job.n_servers, group.hosts).run()


def _on_host(flags):
    """Return Theano's flags for a server, which computes on the host.

    >>> _on_host("device=cuda,floatX=float32")
    'floatX=float32,device=cpu'
    """
    kept = [each for each in flags.split(",") if each and not each.startswith("device=")]
    return ",".join([*kept, "device=cpu"])


def _move(group, job):
    from synkhronos.parameter_server.remote import link, mover

    told = {
        "rank": group.rank - job.n_servers,
        "server_hosts": group.hosts[: job.n_servers],
        "hosts": group.hosts[job.n_servers :],
        "pid": os.getpid(),
    }

    def start(connection):
        told["descriptor"] = connection.fileno()
        return subprocess.Popen(
            job.command,
            env={**membership.without_mpi(os.environ), link.VARIABLE: json.dumps(told)},
            stdin=subprocess.DEVNULL,
            pass_fds=[connection.fileno()],
            preexec_fn=functools.partial(_begin, os.getpid()),
        )

    def tell_that_it_follows():
        os.write(2, mark(job.token, group.rank, "follows"))

    return mover.Mover(group, job.n_servers, group.hosts, start, tell_that_it_follows).run()


def _begin(parent):
    """Prepare the process that becomes the script, which ends when its mover is killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    end_with_parent(parent, signal.SIGKILL)


def end(status: int) -> None:
    """End this process with an exit status, or by a signal, as its script has ended.

    MPI's own end is left out: it might wait for ever for a process that has died.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the script has dumped its core
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(shell_status(status))


if __name__ == "__main__":
    try:
        status = main(sys.argv)
    except BaseException:
        traceback.print_exc()
        status = 1
    end(status)
