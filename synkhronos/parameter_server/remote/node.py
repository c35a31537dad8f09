"""The process that mpirun starts: ``python -u -m synkhronos.parameter_server.remote.node JSON``.

    rank below the number of servers  ──▶ a server
    each other rank                   ──▶ a mover, which starts the script of its worker

The script gets an environment without MPI: a library that starts MPI there must not take the
mover's place.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import traceback
from dataclasses import asdict, dataclass
from typing import Sequence

from synkhronos._machine.devices import default_threads
from synkhronos._machine.processes import end_with_parent, tell_guard_of_mpi
from synkhronos.comm.mpi import folders, secret

_OF_MPI = ("OMPI_", "PMIX_", "PMI_", "PRTE_")
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Job:
    """A run, as the launcher tells all its processes.

    >>> job = Job(1, 2, ["python", "script.py"])
    >>> Job(**json.loads(job.as_json())) == job
    True
    """

    n_servers: int
    n_workers: int
    command: Sequence[str]
    token: str = ""  # begins the marks that the launcher takes out of standard error

    def as_json(self) -> str:
        """Return the text that says it on a command line."""
        return json.dumps(asdict(self))


def main(argv: Sequence[str]) -> int:
    """Run a server or a mover to its end; return the exit status, below 0 for a signal."""
    job = Job(**json.loads(argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher answers a Ctrl-C
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # and asks so for the end of scripts
    here = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1"))
    for name in _THREADS:
        os.environ.setdefault(name, str(default_threads(here)))
    from synkhronos.parameter_server.remote import protocol

    given = secret.take()  # not for the script
    protocol.prepare()
    from synkhronos.comm.mpi.library import MPI

    with folders.of_segment():
        MPI.Init_thread(MPI.THREAD_SERIALIZED)  # heartbeats have a thread in servers
    tell_guard_of_mpi()
    comm = secret.checked(MPI.COMM_WORLD, given)
    if comm.size != job.n_servers + job.n_workers:
        wanted = f"{job.n_servers} servers and {job.n_workers} workers"
        sys.stderr.write(f"mpirun has started {comm.size} processes for {wanted}\n")
        return 1
    hosts = comm.allgather(socket.gethostname())
    if comm.rank < job.n_servers:
        return _serve(comm, job, hosts)
    return _move(comm, job, hosts)


def _serve(comm, job, hosts):
    import logging

    from synkhronos.parameter_server.remote.server import Server

    logging.basicConfig(format=f"server {comm.rank}: %(message)s")
    os.environ["THEANO_FLAGS"] = _on_host(os.environ.get("THEANO_FLAGS", ""))
    return Server(comm, job.n_servers, hosts, functools.partial(_mark, job, comm.rank)).run()


def _mark(job, own, name, rank):
    """Tell the launcher what mpirun does not.

    "lost" is a process that is silent, "follows" one that fails because another one has died.
    """
    os.write(2, f"\0{job.token} {own} {name} {rank}\0\n".encode())


def _on_host(flags):
    """Return Theano's flags for a server, which computes on the host.

    >>> _on_host("device=cuda,floatX=float32")
    'floatX=float32,device=cpu'
    """
    kept = [each for each in flags.split(",") if each and not each.startswith("device=")]
    return ",".join([*kept, "device=cpu"])


def _move(comm, job, hosts):
    from synkhronos.parameter_server.remote import link, mover

    told = {
        "rank": comm.rank - job.n_servers,
        "server_hosts": hosts[: job.n_servers],
        "hosts": hosts[job.n_servers :],
        "pid": os.getpid(),
    }

    def start(connection):
        told["descriptor"] = connection.fileno()
        kept = {name: os.environ[name] for name in os.environ if not name.startswith(_OF_MPI)}
        return subprocess.Popen(
            job.command,
            env={**kept, link.VARIABLE: json.dumps(told)},
            stdin=subprocess.DEVNULL,
            pass_fds=[connection.fileno()],
            preexec_fn=functools.partial(_begin, os.getpid()),
        )

    mark = functools.partial(_mark, job, comm.rank)
    return mover.Mover(comm, job.n_servers, hosts, start, mark).run()


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
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the script has left one
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    try:
        status = main(sys.argv)
    except secret.NoSecret as error:
        sys.stderr.write(f"{socket.gethostname()}: {error}\n")
        status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    end(status)
