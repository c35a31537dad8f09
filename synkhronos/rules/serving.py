"""The server of EASGD and ASGD, rank 0, and a worker's end of it.

    worker                                      server
    register ─────────────────────────────────▶ first? so that one worker records and validates
    begin: shapes, batches of an epoch ───────▶ parameters wanted (of the first), or given
    exchange: batches done ── arrays ─────────▶ merges them into the center
                           ◀── arrays ───────── orders: epoch, stop, validate
    center ───────────────────────────────────▶ arrays, and those that the rule keeps beside them
    finish (the first worker only) ───────────▶ answered when all other workers have left
    leave ────────────────────────────────────▶ ends when all workers have left

The server keeps the parameters on the host, trains nothing, and sleeps while no message comes.
Workers may begin at any time. One that dies is left out: the server tells, and goes on.

References
----------
Zhang, Choromanska, LeCun, arXiv:1412.6651; Dean et al., NIPS 2012; the design of one server with a
message loop is that of Platoon and Theano-MPI.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np

from synkhronos._machine.log import log
from synkhronos.comm.mpi.library import MPI
from synkhronos.comm.mpi.messages import (
    ProcessLost,
    complete,
    dead_ranks,
    is_death,
    lost,
    receive,
    receive_arrays,
    send_arrays,
    wait_until,
)
from synkhronos.rules.job import Job

_REQUEST, _REPLY, _ARRAYS = 199, 200, 201
_REPORT_EVERY = 40  # batches of all workers
_LEAVE_SECONDS = 60.0

Merge = Callable[[list, list, list], None]


@dataclass
class _Worker:
    """A worker, as the server knows it."""

    host: str
    done: int = 0  # batches
    is_training: bool = False
    has_left: bool = False
    reason: str = ""  # why it has left, if not because training has ended
    waits_for_end: bool = False


@dataclass
class Orders:
    """Orders of the server, which a worker gets with each exchange."""

    epoch: int  # of all workers' batches together
    total: int  # batches that all workers have done
    stop: bool
    is_first: bool
    validate: bool = False


class Server:
    """Keeps the center, and merges what workers send into it.

    Parameters
    ----------
    job : Job
    comm : MPI.Comm
    merge : callable
        ``merge(center, received, state)`` changes the arrays of `center` in place. `state` is a
        list for what the rule keeps beside them.
    interrupt : callable
        Returns whether a signal has asked this process to end.
    """

    def __init__(self, job: Job, comm: Any, merge: Merge, interrupt: Callable[[], bool]) -> None:
        self._job, self._comm, self._merge, self._interrupt = job, comm, merge, interrupt
        self._patience = job.options["patience"]
        self._workers: dict[int, _Worker] = {}
        self._dead: set[int] = set()
        self._center: list[np.ndarray] | None = None
        self._described: Any = None
        self._state: list = []
        self._n_batches = self._n_epochs = 0.0
        self._done = 0  # batches of all workers, dead ones too
        self._epoch = 0
        self._first: int | None = None
        self._validated = 0  # the last epoch that the first worker was told to validate
        self._is_saved = False  # by the first worker, at the end
        self._reported, self._begun, self._report_begun = 0, time.monotonic(), time.monotonic()

    def serve(self) -> int:
        """Answer workers until all have left; return the exit status."""
        comm, n_workers = self._comm, self._comm.size - 1
        status = MPI.Status()

        def patience():
            # Before workers train they compile, which may take long.
            trains = any(worker.is_training for worker in self._workers.values())
            return self._patience if trains else 10 * self._patience

        def is_ready():
            try:
                # Not of any source: what a dead worker has sent can be seen, but not received.
                there = set(range(1, comm.size)) - self._away
                return any(comm.Iprobe(rank, _REQUEST, status) for rank in there) or self._is_over(
                    n_workers
                )
            except MPI.Exception as error:
                if not is_death(error):
                    raise
                self._bury()
                return self._is_over(n_workers)

        while not self._is_over(n_workers):
            wait_until(is_ready, "a message of a worker", patience())
            if self._is_over(n_workers):
                break
            try:
                self._answer(status.source)
            except ProcessLost:
                self._bury()
        self._say(f"total time {(time.monotonic() - self._begun) / 3600:.4f} h")
        if not self._is_saved:
            self._say("no worker was left to validate the last parameters, and to write a snapshot")
        failed = bool(self._dead) or any(w.reason == "error" for w in self._workers.values())
        if self._interrupt():
            return 130
        return int(failed)

    def _is_over(self, n_workers):
        return len(self._away) >= n_workers

    @property
    def _away(self):
        """The workers that have left or died."""
        return self._dead.union(rank for rank, each in self._workers.items() if each.has_left)

    def _answer(self, rank):
        with lost(rank):
            name, content = self._comm.recv(source=rank, tag=_REQUEST)
        getattr(self, f"_on_{name}")(rank, content)

    def _reply(self, rank, content):
        with lost(rank):
            self._comm.send(content, rank, _REPLY)

    def _on_register(self, rank, host):
        self._workers[rank] = _Worker(host)
        if self._first is None:
            self._first = rank
        self._reply(rank, self._first == rank)

    def _on_begin(self, rank, content):
        worker = self._workers[rank]
        described, self._n_batches, self._n_epochs, kept, n_state = content
        if self._described not in (None, described):
            self._reply(rank, "differs")
            return
        wants = self._center is None
        self._reply(rank, "send" if wants else "take")
        if wants:
            center = [np.empty(size, dtype) for dtype, size in described]
            state = [np.empty(size, dtype) for dtype, size in described[:n_state]]
            receive_arrays(self._comm, [*center, *state], rank, _ARRAYS)
            # Only now: if the worker has died in between, the next one sends its parameters.
            self._center, self._described, self._state = center, described, state
            self._done = int(kept.get("total", 0))
            self._epoch = int(self._done // self._n_batches)
            self._validated = self._epoch
        else:
            send_arrays(self._comm, self._center, rank, _ARRAYS)
        worker.is_training = True
        self._reply(rank, self._orders(rank))

    def _on_exchange(self, rank, content):
        done, self._n_batches = content
        received = [np.empty_like(array) for array in self._center]
        receive_arrays(self._comm, received, rank, _ARRAYS)
        before = [array.copy() for array in self._center]
        self._merge(self._center, received, self._state)
        self._workers[rank].done += done
        self._done += done
        # Workers that do not know yet that it is over may do some batches more.
        self._epoch = int(min(self._done // self._n_batches, self._n_epochs))
        self._reply(rank, self._orders(rank))
        # EASGD moves both ends by the old values of the other.
        sent = before if self._job.rule == "EASGD" else self._center
        send_arrays(self._comm, sent, rank, _ARRAYS)
        self._report()

    def _orders(self, rank):
        stop = self._done >= self._n_batches * self._n_epochs or self._interrupt()
        is_first = rank == self._first
        validate = is_first and self._epoch > self._validated and not stop
        if validate:
            self._validated = self._epoch
        return Orders(self._epoch, self._done, stop, is_first, validate)

    def _on_center(self, rank, content):
        self._reply(rank, len(self._state))
        send_arrays(self._comm, [*self._center, *self._state], rank, _ARRAYS)

    def _on_finish(self, rank, content):
        self._workers[rank].waits_for_end = True
        self._release()

    def _on_leave(self, rank, reason):
        worker = self._workers.setdefault(rank, _Worker("?"))
        worker.has_left, worker.reason = True, reason
        if reason == "error":
            self._say(f"rank {rank} has failed: training goes on without it")
        self._is_saved |= rank == self._first and reason != "error"
        if rank == self._first:
            self._choose_first()
        self._release()

    def _release(self):
        """Answer the first worker when all others wait or are away: the center is complete.

        The others leave when it has saved the center: until then one of them may take its place.
        """
        waiting = [
            rank
            for rank, worker in self._workers.items()
            if worker.waits_for_end and rank not in self._away
        ]
        answered = []
        if self._is_saved:
            answered = waiting
        elif len(self._away.union(waiting)) == self._comm.size - 1:
            answered = [rank for rank in waiting if rank == self._first]
        for rank in answered:
            self._workers[rank].waits_for_end = False
            with contextlib.suppress(ProcessLost):  # the next look at messages finds it dead
                self._reply(rank, None if self._is_saved else self._done)

    def _bury(self):
        """Leave workers out that have died."""
        # A worker that has left has ended without MPI's end, which counts as a death too.
        left = {rank for rank, worker in self._workers.items() if worker.has_left}
        for rank in sorted(dead_ranks(self._comm) - self._dead - left):
            self._dead.add(rank)
            host = f" on {self._workers[rank].host}" if rank in self._workers else ""
            self._say(
                f"rank {rank} ({self._job.devices[rank]}){host} has died: training goes on "
                f"without it, with {self._comm.size - 1 - len(self._dead)} workers"
            )
            if rank == self._first:
                self._choose_first()
        self._release()

    def _choose_first(self):
        """Let another worker record, validate and write snapshots."""
        alive = [
            rank
            for rank, worker in sorted(self._workers.items())
            if rank not in self._dead and not worker.has_left
        ]
        self._first = alive[0] if alive else None
        if alive and not self._is_saved:
            self._say(f"rank {self._first} validates and writes snapshots from now on")

    def _report(self):
        if self._done // _REPORT_EVERY > self._reported:
            self._reported = self._done // _REPORT_EVERY
            now = time.monotonic()
            took, self._report_begun = now - self._report_begun, now
            self._say(f"{self._done} batches, {took:.2f} s since the last report")

    @staticmethod
    def _say(text):
        sys.stdout.write(f"server: {text}\n")
        sys.stdout.flush()


class Client:
    """A worker's end.

    Parameters
    ----------
    comm : MPI.Comm
    patience : float
        Seconds to wait for the server.
    """

    def __init__(self, comm: Any, patience: float) -> None:
        self._comm, self._patience = comm, patience
        self.has_left = False

    def register(self) -> bool:
        """Say that this worker is there; return whether it is the first one."""
        return self._ask("register", socket.gethostname())

    def begin(
        self,
        arrays: list[np.ndarray],
        n_batches: float,
        n_epochs: float,
        kept: dict,
        state: list[np.ndarray],
    ) -> Orders:
        """Send the parameters if the server has none yet, else take the server's.

        `state` are the arrays that the server of an earlier run has kept beside them.

        Raises
        ------
        ValueError
            If the server's parameters are of other sizes.
        """
        described = [(str(array.dtype), array.size) for array in arrays]
        if [(str(array.dtype), array.size) for array in state] != described[: len(state)]:
            raise ValueError(
                "the snapshot is damaged: its arrays of the server are of other sizes."
            )
        answer = self._ask("begin", (described, n_batches, n_epochs, kept, len(state)))
        if answer == "differs":
            raise ValueError(
                "the parameters of this worker differ from those of the server in number, size or "
                "dtype: all workers must build the same model."
            )
        if answer == "send":
            send_arrays(self._comm, [*arrays, *state], 0, _ARRAYS)
        else:
            receive_arrays(self._comm, arrays, 0, _ARRAYS)
        return self._wait_for_reply()

    def exchange(
        self, sent: list[np.ndarray], received: list[np.ndarray], done: int, n_batches: float
    ) -> Orders:
        """Send arrays to the server, which merges them; receive its arrays and its orders."""
        self._send("exchange", (done, n_batches))
        send_arrays(self._comm, sent, 0, _ARRAYS)
        orders = self._wait_for_reply()
        receive_arrays(self._comm, received, 0, _ARRAYS)
        return orders

    def center(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Receive the server's parameters; return the arrays that it keeps beside them."""
        n_state = self._ask("center", None)
        state = [np.empty_like(array) for array in arrays[:n_state]]
        receive_arrays(self._comm, [*arrays, *state], 0, _ARRAYS)
        return state

    def finish(self) -> int | None:
        """Wait until training is over.

        Returns
        -------
        int or None
            The batches of all workers, if this one is to save the center; None if another has.
        """
        return self._ask("finish", None)

    def leave(self, reason: str = "") -> None:
        """Say that this worker ends."""
        if not self.has_left:
            self.has_left = True
            # Synchronous: this process may end as soon as the server has it.
            request = self._comm.issend(("leave", reason), 0, _REQUEST)
            complete(request, "the server", min(self._patience, _LEAVE_SECONDS))

    def _ask(self, name, content):
        self._send(name, content)
        return self._wait_for_reply()

    def _send(self, name, content):
        with lost(0):
            self._comm.send((name, content), 0, _REQUEST)

    def _wait_for_reply(self):
        return receive(self._comm, 0, _REPLY, "the server", self._patience)


def leave_after_error(client: Client) -> None:
    """Tell the server of a failure, if it is there."""
    try:
        client.leave("error")
    except Exception as error:
        log.warning("can't tell the server: %s", error)
