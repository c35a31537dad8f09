"""The server of EASGD and ASGD, rank 0, and a worker's end of it.

    worker                                      server
    register ─────────────────────────────────▶ first? so that one worker records and validates
    begin: shapes, batches of an epoch ───────▶ parameters wanted (of the first), or given
    exchange: batches done, arrays ───────────▶ merges them into the center
                           ◀─────────────────── orders: epoch, stop, validate; arrays
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

import sys
import time
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np

from synkhronos._machine.log import log
from synkhronos.comm.group import Group, RankLost, WaitedTooLong
from synkhronos.rules.job import Job

_REPORT_EVERY = 40  # batches of all workers

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
    group : Group
    merge : callable
        ``merge(center, received, state)`` changes the arrays of `center` in place. `state` is a
        list for what the rule keeps beside them.
    interrupt : callable
        Returns whether a signal has asked this process to end.
    """

    def __init__(self, job: Job, group: Group, merge: Merge, interrupt: Callable[[], bool]) -> None:
        self._job, self._group, self._merge, self._interrupt = job, group, merge, interrupt
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
        n_workers = self._group.size - 1
        while len(self._away) < n_workers:
            rank, message = self._next_message()
            if message is None:
                self._bury(rank)
            elif rank not in self._away:
                name, *content = message
                getattr(self, f"_on_{name}")(rank, *content)
        self._say(f"total time {(time.monotonic() - self._begun) / 3600:.4f} h")
        if not self._is_saved:
            self._say("no worker was left to validate the last parameters, and to write a snapshot")
        failed = bool(self._dead) or any(w.reason == "error" for w in self._workers.values())
        if self._interrupt():
            return 130
        return int(failed)

    def _next_message(self):
        # Before workers train they compile, which may take long.
        trains = any(worker.is_training for worker in self._workers.values())
        patience = self._group.patience * (1 if trains else 10)
        came = self._group.receive(patience)
        if came is None:
            raise WaitedTooLong(patience, "a message of a worker")
        return came

    @property
    def _away(self):
        """The workers that have left or died."""
        return self._dead.union(rank for rank, each in self._workers.items() if each.has_left)

    def _on_register(self, rank, host):
        self._workers[rank] = _Worker(host)
        if self._first is None:
            self._first = rank
        self._group.send(rank, self._first == rank)

    def _on_begin(self, rank, described, n_batches, n_epochs):
        self._n_batches, self._n_epochs = n_batches, n_epochs
        if self._described not in (None, described):
            self._group.send(rank, "differs")
        elif self._center is None:
            self._group.send(rank, "send")
        else:
            self._send_center(rank)

    def _on_first(self, rank, described, arrays, state, kept):
        """Take the first parameters, unless those of another worker were faster."""
        if self._center is None:
            self._center = [array.copy() for array in arrays]
            self._state = [array.copy() for array in state]
            self._described = described
            self._done = int(kept.get("total", 0))
            self._epoch = int(self._done // self._n_batches)
            self._validated = self._epoch
        self._send_center(rank)

    def _send_center(self, rank):
        self._workers[rank].is_training = True
        self._group.send(rank, self._orders(rank), self._center)

    def _on_exchange(self, rank, done, n_batches, arrays):
        self._n_batches = n_batches
        self._workers[rank].done += done
        self._done += done
        # Workers that do not know yet that it is over may do some batches more.
        self._epoch = int(min(self._done // self._n_batches, self._n_epochs))
        # EASGD moves both ends by the old values of the other. What is sent is copied at once.
        if self._job.rule == "EASGD":
            self._group.send(rank, self._orders(rank), self._center)
            self._merge(self._center, arrays, self._state)
        else:
            self._merge(self._center, arrays, self._state)
            self._group.send(rank, self._orders(rank), self._center)
        self._report()

    def _orders(self, rank):
        stop = self._done >= self._n_batches * self._n_epochs or self._interrupt()
        is_first = rank == self._first
        validate = is_first and self._epoch > self._validated and not stop
        if validate:
            self._validated = self._epoch
        return Orders(self._epoch, self._done, stop, is_first, validate)

    def _on_center(self, rank):
        self._group.send(rank, self._center, self._state)

    def _on_finish(self, rank):
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
        elif len(self._away.union(waiting)) == self._group.size - 1:
            answered = [rank for rank in waiting if rank == self._first]
        for rank in answered:
            self._workers[rank].waits_for_end = False
            self._group.send(rank, None if self._is_saved else self._done)

    def _bury(self, rank):
        """Leave a worker out that has ended, and has not said that it leaves."""
        if rank not in self._away:
            self._dead.add(rank)
            host = f" on {self._workers[rank].host}" if rank in self._workers else ""
            self._say(
                f"rank {rank} ({self._job.devices[rank]}){host} has died: training goes on "
                f"without it, with {self._group.size - 1 - len(self._dead)} workers"
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
    group : Group
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.has_left = False

    def register(self) -> bool:
        """Say that this worker is there; return whether it is the first one."""
        return self._ask("register", self._group.hosts[self._group.rank])[0]

    def begin(
        self,
        arrays: list[np.ndarray],
        n_batches: float,
        n_epochs: float,
        kept: dict,
        state: list[np.ndarray],
    ) -> Orders:
        """Send the parameters if the server has none yet; take the server's.

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
        answer = self._ask("begin", described, n_batches, n_epochs)
        if answer == ("differs",):
            raise ValueError(
                "the parameters of this worker differ from those of the server in number, size or "
                "dtype: all workers must build the same model."
            )
        if answer == ("send",):
            answer = self._ask("first", described, arrays, state, kept)
        orders, center = answer
        _copy(center, arrays)
        return orders

    def exchange(
        self, sent: list[np.ndarray], received: list[np.ndarray], done: int, n_batches: float
    ) -> Orders:
        """Send arrays to the server, which merges them; receive its arrays and its orders."""
        orders, center = self._ask("exchange", done, n_batches, sent)
        _copy(center, received)
        return orders

    def center(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Receive the server's parameters; return the arrays that it keeps beside them."""
        center, state = self._ask("center")
        _copy(center, arrays)
        return [array.copy() for array in state]

    def finish(self) -> int | None:
        """Wait until training is over.

        Returns
        -------
        int or None
            The batches of all workers, if this one is to save the center; None if another has.
        """
        return self._ask("finish")[0]

    def leave(self, reason: str = "") -> None:
        """Say that this worker ends."""
        if not self.has_left:
            self.has_left = True
            self._group.send(0, "leave", reason)

    def _ask(self, *message) -> Any:
        """Send a message to the server; return its answer, of which arrays are views for now."""
        self._group.send(0, *message)
        end = time.monotonic() + self._group.patience
        while True:
            came = self._group.receive(max(0.0, end - time.monotonic()))
            if came is None:
                raise WaitedTooLong(self._group.patience, "the server")
            rank, answer = came
            if rank == 0 and answer is None:
                raise RankLost("rank 0 has died", 0)
            if rank == 0:  # else another worker has left
                return answer


def leave_after_error(client: Client) -> None:
    """Tell the server of a failure, if it is there."""
    try:
        client.leave("error")
    except Exception as error:
        log.warning("can't tell the server: %s", error)


def _copy(arrays, targets):
    for array, target in zip(arrays, targets):
        target[...] = array
