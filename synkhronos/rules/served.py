"""EASGD and ASGD: the server, rank 0, which is a parameter store with an updater, and its workers.

    worker                                      server
    register ─────────────────────────────────▶ first? so that one worker records and validates
    begin: shapes, batches of an epoch ───────▶ parameters wanted (of the first), or given
    exchange: batches done, arrays, statistics ▶ updates the weights, the center
                           ◀─────────────────── orders: epoch, stop, validate; weights
    center ───────────────────────────────────▶ weights, the workers' mean statistics, states of
                                                the updater
    finish (the first worker only) ───────────▶ answered when all other workers have left
    leave ────────────────────────────────────▶ ends when all workers have left

The server keeps the parameters on the host, trains nothing, and sleeps while no message comes.
Workers may begin at any time. If one dies, the server says so, and goes on without it. An exchange
is one message and its answer, and the updater reads the arrays where the message lies: a push and a
pull of `synkhronos.parameter_server` would copy all parameters twice.

References
----------
The design of one server with a message loop is that of Platoon and Theano-MPI.
"""

from __future__ import annotations

import sys
import time
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from synkhronos._arithmetic.operations import wide
from synkhronos.comm.handlers import Handlers
from synkhronos.launch import INTERRUPTED
from synkhronos.parameter_server.group.interface import Group, WaitedTooLong
from synkhronos.parameter_server.updaters import Updater
from synkhronos.rules import asynchronous
from synkhronos.rules.job import Interrupt, Job
from synkhronos.rules.model_variables import Flat, difference

SERVER = 0  # its rank
_REPORT_EVERY = 40  # batches of all workers
_DIED, _FAILED = "death", "error"  # why a worker is gone


@dataclass
class Orders:
    """Orders of the server, which a worker gets with each exchange."""

    epoch: int  # of all workers' batches together
    total: int  # batches that all workers have done
    stop: bool
    is_first: bool
    validate: bool = False


class Differs(NamedTuple):
    """Answer to a worker that does not fit the others."""

    alike: dict[str, Any]  # what must be equal, of the others


class Weights(NamedTuple):
    """Answer to a worker that has begun or exchanged."""

    orders: Orders
    weights: list[np.ndarray]


class Server:
    """Keeps the weights, which an updater changes by what workers send.

    The updater's keys are 0, 1, ...: the parameters lie in one flat array for each dtype. If it
    `answers_first`, a worker gets the weights as they were before its own update. If it
    `divides_stale`, an update is divided by 1 + its staleness, the number of updates of others
    since its worker took the weights.
    """

    def __init__(
        self,
        job: Job,
        group: Group,
        updater: Updater,
        interrupt: Interrupt,
        answers_first: bool = False,
        divides_stale: bool = False,
    ) -> None:
        self._job, self._group, self._interrupt = job, group, interrupt
        self._updater, self._answers_first = updater, answers_first
        self._divides_stale = divides_stale
        self._n_updates, self._taken = 0, {}  # now, and when each worker took the weights
        self._weights: list[np.ndarray] = []  # none before a worker has sent them
        self._alike: Any = None  # values that must be equal on all workers
        self._registered: set[int] = set()
        self._waiting: set[int] = set()  # workers that wait for the end of all others
        self._statistics: dict[int, list[np.ndarray]] = {}  # running ones, of each worker
        self._gone: dict[int, str] = {}  # workers that have left or died, and why
        self._n_batches = self._n_epochs = 0.0
        self._done = 0  # batches of all workers, dead ones too
        self._epoch = 0
        self._first: int | None = None
        self._validated = 0  # the last epoch that the first worker was told to validate
        self._is_saved = False  # whether the first worker has saved the weights, at the end
        self._handlers = Handlers(
            register=self._on_register,
            begin=self._on_begin,
            first=self._on_first,
            exchange=self._on_exchange,
            center=self._on_center,
            finish=self._on_finish,
            leave=self._on_leave,
        )
        self._reported, self._begun, self._report_begun = 0, time.monotonic(), time.monotonic()

    def serve(self) -> int:
        """Answer workers until all have left; return the exit status."""
        while len(self._gone) < self._group.size - 1:
            rank, message = self._next_message()
            if rank not in self._gone:
                name, *content = message or ("leave", _DIED)
                self._handlers[name](rank, *content)
        self._say(f"total time {(time.monotonic() - self._begun) / 3600:.4f} h")
        if not self._is_saved:
            self._say("no worker was left to validate the last parameters, and to write a snapshot")
        if self._interrupt.is_set:
            return INTERRUPTED
        return int(not {_DIED, _FAILED}.isdisjoint(self._gone.values()))

    def _next_message(self):
        # Before workers train they compile, which may take long.
        patience = self._group.patience * (1 if self._weights else 10)
        message = self._group.receive(patience)
        if message is None:
            raise WaitedTooLong(patience, "a message of a worker")
        return message

    def _on_register(self, rank):
        self._registered.add(rank)
        if self._first is None:
            self._first = rank
        self._group.send(rank, self._first == rank)

    def _on_begin(self, rank, alike, n_batches):
        self._n_batches, self._n_epochs = n_batches, alike["n_epochs"]
        if not self._weights:
            self._group.send(rank, None)
        else:
            self._answer_alike(rank, alike)

    def _answer_alike(self, rank, alike):
        if alike == self._alike:
            self._answer(rank)
        else:
            self._group.send(rank, Differs(self._alike))

    def _on_first(self, rank, alike, arrays, states, total):
        """Take the first parameters, unless another worker's have come before."""
        if not self._weights:
            self._weights = [array.copy() for array in arrays]
            self._alike = alike
            self._updater.init_updater(0, {})
            for key, weight in enumerate(self._weights):
                self._updater.init_model(key, weight)
            own_states = self._updater.states()
            for array, sent in zip(_in_order(own_states), states):
                array[...] = sent
            self._updater.set_states(own_states)
            self._done = int(total)
            self._epoch = self._validated = int(self._done // self._n_batches)
        self._answer_alike(rank, alike)

    def _on_exchange(self, rank, done, n_batches, arrays, statistics):
        self._n_batches = n_batches
        self._statistics[rank] = [each.copy() for each in statistics]
        self._done += done
        # Workers may do more batches before they hear that the training is over.
        self._epoch = int(min(self._done // self._n_batches, self._n_epochs))
        if self._answers_first:  # a send copies the weights, so the update can't change them
            self._answer(rank)
        if self._divides_stale:
            staleness = self._n_updates - self._taken[rank]
            arrays = [array / array.dtype.type(1 + staleness) for array in arrays]
        for key, array in enumerate(arrays):
            self._updater.update(key, array)
        self._n_updates += 1
        if not self._answers_first:
            self._answer(rank)
        self._report()

    def _answer(self, rank):
        stop = self._done >= self._n_batches * self._n_epochs or self._interrupt.is_set
        is_first = rank == self._first
        validate = is_first and self._epoch > self._validated and not stop
        if validate:
            self._validated = self._epoch
        orders = Orders(self._epoch, self._done, stop, is_first, validate)
        self._taken[rank] = self._n_updates
        self._group.send(rank, Weights(orders, self._weights))

    def _on_center(self, rank):
        everyone = zip(*self._statistics.values())
        means = [np.mean(each, axis=0, dtype=wide(each[0].dtype)) for each in everyone]
        self._group.send(rank, (self._weights, means, _in_order(self._updater.states())))

    def _on_finish(self, rank):
        self._waiting.add(rank)
        self._release()

    def _on_leave(self, rank, why):
        """Leave out a worker that has ended, failed or died."""
        self._gone[rank] = why
        if why == _DIED:
            host = f" on {self._group.hosts[rank]}" if rank in self._registered else ""
            n_left = self._group.size - 1 - [*self._gone.values()].count(_DIED)
            self._say(
                f"rank {rank} ({self._job.devices[rank]}){host} has died: training goes on "
                f"without it, with {n_left} workers"
            )
        elif why == _FAILED:
            self._say(f"rank {rank} has failed: training goes on without it")
        if rank == self._first:
            self._is_saved |= why not in (_DIED, _FAILED)
            self._choose_first()
        self._release()

    def _release(self):
        """Answer the first worker once all others wait or are gone: the center is complete.

        Others are answered once it has saved the center: until then one may have to replace it.
        """
        waiting = self._waiting.difference(self._gone)
        answered: set[int] = set()
        if self._is_saved:
            answered = waiting
        elif len(waiting) + len(self._gone) == self._group.size - 1:
            answered = waiting & {self._first}
        for rank in sorted(answered):
            self._waiting.remove(rank)
            self._group.send(rank, None if self._is_saved else self._done)

    def _choose_first(self):
        """Let another worker record, validate and write snapshots."""
        self._first = min(self._registered.difference(self._gone), default=None)
        if self._first is not None and not self._is_saved:
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


def _in_order(states):
    """Return the arrays of an updater's states."""
    return [array for of_key in states.values() for array in of_key.values()]


class ServedWorker(asynchronous.AsynchronousWorker):
    """A worker that exchanges with the server after each `tau` batches, in the rule's `meet`."""

    orders: Orders
    _done = 0  # batches since the last exchange
    _has_left = False

    @abstractmethod
    def meet(self) -> None:
        """Exchange with the server, by `push`."""

    def push(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Send arrays to the updater; return the weights, valid until the next message."""
        n_batches, statistics = int(self.run.model.data.n_batch_train), self._statistics.read()
        self.orders, weights = self._ask("exchange", self._done, n_batches, arrays, statistics)
        return weights

    def _ask(self, *message) -> Any:
        """Send a message to the server; return its answer."""
        self.group.send(SERVER, *message)
        [answer] = self.group.receive_from(SERVER, "the server")
        return answer

    def register(self) -> bool:
        """Return whether this is the first worker."""
        return self._ask("register")

    def begin(self, kept: dict[str, Any]) -> None:
        """Send the parameters if the server has none yet; take the server's."""
        self._statistics = Flat(self.run.statistics)
        arrays, states = self.flat.read(), self.run.kept_arrays
        if _described(states) != _described(arrays)[: len(states)]:
            raise ValueError(
                "the snapshot is damaged: its arrays of the server are of other sizes."
            )
        alike = self._alike()
        answer = self._ask("begin", alike, int(self.run.model.data.n_batch_train))
        if answer is None:  # the server has no parameters yet
            answer = self._ask("first", alike, arrays, states, kept.get("total", 0))
        if isinstance(answer, Differs):
            own_rank = f"rank {self.group.rank}"
            raise ValueError(difference(alike, answer.alike, "the others", own_rank))
        self.orders = answer.orders
        self.flat.set(answer.weights)
        self._enter_epochs()

    def is_over(self) -> bool:
        """Return whether the server ends the training; after a Ctrl-C, if no batch is unsent."""
        return self.orders.stop or (self.run.interrupt.is_set and not self._done)

    def count_batch(self) -> int:
        """Count a batch of this worker; return the batches of all workers, as far as it knows."""
        self._done += 1
        return self.orders.total + self._done

    def exchange(self) -> None:
        """Meet the server after `tau` batches."""
        if self._done < self.job.options["tau"] and not self.run.interrupt.is_set:
            return
        self.run.recorder.start()
        self.meet()
        self.run.recorder.end("comm")
        self._done = 0
        self._enter_epochs()
        if self.orders.validate:
            self._validate(is_last=False)

    def _enter_epochs(self):
        if self.orders.is_first:
            self.run.report()  # this worker may have taken the place of a dead one
        self.enter_epochs(self.orders.epoch)

    def _validate(self, is_last):
        """Validate the center; then restore this worker's parameters and statistics."""
        kept = [(flat, [each.copy() for each in flat.read()]) for flat in self._both]
        states = self._take_center()
        self.validate(self.orders.total, self.orders.epoch - 1, is_last, states)
        for flat, own in kept:
            flat.set(own)

    @property
    def _both(self):
        return self.flat, self._statistics

    def _take_center(self):
        """Take the center, with the mean statistics; return copies of the updater's states."""
        weights, statistics, states = self._ask("center")
        for flat, arrays in zip(self._both, (weights, statistics)):
            flat.set(arrays)
        return [array.copy() for array in states]

    def end(self) -> None:
        """Leave; the first worker waits for all others, validates the center and saves it."""
        is_interrupted, total = self.run.interrupt.is_set, None
        if self.orders.is_first or not is_interrupted:
            total = self._ask("finish")
        if total is not None:  # else another worker has saved the center
            self.orders.total, self.orders.is_first = total, True
            self._enter_epochs()
            if self.run.interrupt.is_set:
                self.save(total, self.orders.epoch, self._take_center())
            else:
                self._validate(is_last=True)
        self._leave("interrupted" if self.run.interrupt.is_set else "")

    def fail(self) -> None:
        """Tell the server."""
        self._leave(_FAILED)

    def _leave(self, why):
        if not self._has_left:
            self._has_left = True
            self.group.send(SERVER, "leave", why)


def _described(arrays):
    return [(str(array.dtype), array.size) for array in arrays]
