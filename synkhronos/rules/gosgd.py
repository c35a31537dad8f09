"""GOSGD, gossip SGD: workers train on their own, and push their parameters to random others.

After each batch a worker pushes with probability `p`: it halves its weight, and sends the other
half with its parameters to a random worker, which merges them into its own. The sum of all weights
stays 1. A send never waits for its receiver, so workers can't block one another. At the end all
workers receive the pushes that are still on their way, and the first one merges all parameters.
`synkhronos.rules.GOSGD` has the formula.
"""

from __future__ import annotations

import time
from typing import Any, Callable, Mapping

import numpy as np

from synkhronos.comm.handlers import Handlers
from synkhronos.parameter_server.group.interface import Group, WaitedTooLong
from synkhronos.rules import asynchronous
from synkhronos.rules.arithmetic import gossip_merge
from synkhronos.rules.job import Interrupt, Job
from synkhronos.rules.model_variables import difference

_MOST_UNDER_WAY = 2  # pushes to one worker: more would only fill memory
_TELL_EVERY = 10  # batches


def run(job: Job, group: Group, interrupt: Interrupt) -> int:
    """Train the model of this rank; return the exit status."""
    return _GOSGDWorker(job, group, interrupt).work()


class Gossip:
    """One worker's parameters and weight, and the messages between workers.

    Pushes of others change `arrays`, the parameters, in place. `alike` has values that must be
    equal on all workers. ``on_death(rank)`` is called for a worker that has died or failed.
    """

    def __init__(
        self,
        group: Group,
        arrays: list[np.ndarray],
        alike: Mapping[str, Any],
        on_death: Callable[[int], None] = lambda rank: None,
    ) -> None:
        self._group, self._arrays, self._alike, self._on_death = group, arrays, alike, on_death
        self.weight = 1.0 / group.size
        self.counts = np.zeros(group.size)  # batches of each worker, as far as this one knows
        self.dead: set[int] = set()
        self.lost: set[int] = set()  # dead workers whose last parameters are missing
        self._ended: set[int] = set()  # workers that push no more
        self._merged: set[int] = set()  # workers whose last parameters are merged here
        self._is_ending = self._has_begun = self._has_spread = False
        self._handlers = Handlers(
            counts=self._on_counts,
            failed=self._leave_out,
            first=self._on_first,
            push=self._on_push,
            last=self._ended.add,
            merge=self._on_merge,
        )

    @property
    def others(self) -> list[int]:
        """The other workers that are alive."""
        gone = {self._group.rank, *self.dead}
        return [rank for rank in range(self._group.size) if rank not in gone]

    def begin(self) -> None:
        """Take the parameters of the first worker, the lowest rank that has not died or failed."""
        self._take_until(
            lambda: self._has_begun or self._is_first, "the first parameters of another worker"
        )
        self._has_begun = True
        self._spread()

    @property
    def _is_first(self):
        return self._group.rank == min([self._group.rank, *self.others])

    def _spread(self):
        """Send the first parameters, once, if this worker is the first one."""
        if self._has_begun and self._is_first and not self._has_spread:
            self._has_spread = True
            for rank in self.others:
                self._group.send(rank, "first", self.counts, self._alike, self._arrays)

    def push(self, receiver: int) -> bool:
        """Send half of the weight and the parameters; return False if too many are under way."""
        if self._group.under_way(receiver) >= _MOST_UNDER_WAY:
            return False
        self.weight /= 2
        self._group.send(receiver, "push", self.counts, self._arrays, self.weight)
        return True

    def tell_counts(self) -> None:
        """Send the counts to all others."""
        for rank in self.others:
            self._group.send(rank, "counts", self.counts)

    def take(self, seconds: float = 0.0) -> None:
        """Handle all messages that have come; wait at most `seconds` for the first one."""
        came = self._group.receive(seconds)
        while came is not None:
            rank, message = came
            if message is None:
                self._leave_out(rank)
            elif rank not in self.dead:
                name, *rest = message
                self._handlers[name](rank, *rest)
            came = self._group.receive(0.0)

    def _take_until(self, is_ready, what):
        end = time.monotonic() + self._group.patience
        while not is_ready():
            left = end - time.monotonic()
            if left <= 0:
                raise WaitedTooLong(self._group.patience, what)
            self.take(min(left, 1.0))

    def _on_counts(self, rank, counts):
        np.maximum(self.counts, counts, out=self.counts)

    def _on_first(self, rank, counts, alike, arrays):
        if said := difference(self._alike, alike, f"rank {rank}", f"rank {self._group.rank}"):
            raise ValueError(said)
        self._on_counts(rank, counts)
        if not self._has_begun:  # after a death the next first worker sends its parameters, too
            self._has_begun = True
            for array, other in zip(self._arrays, arrays):
                array[...] = other

    def _on_push(self, rank, counts, arrays, weight):
        self._on_counts(rank, counts)
        total = self.weight
        for array, other in zip(self._arrays, arrays):
            total = gossip_merge(array, self.weight, other, weight)
        self.weight = total

    def _on_merge(self, rank, *pushed):
        self._on_push(rank, *pushed)
        self._merged.add(rank)

    def end(self) -> int:
        """Handle all messages to this worker; return the rank that has merged all parameters.

        Every worker that is alive must call it.
        """
        for rank in self.others:
            self._group.send(rank, "last")  # after all pushes, as messages come in order
        self._take_until(
            lambda: self._ended.issuperset(self.others), "the last pushes of other workers"
        )
        self._is_ending = True  # others end as soon as the first one has their parameters
        others = self.others
        root = min([self._group.rank, *others])
        if self._is_first:
            self._take_until(
                lambda: self._merged.issuperset(self.others), "the parameters of other workers"
            )
            for rank in sorted(set(others) - self._merged):
                self._lose(rank)
        else:
            self._group.send(root, "merge", self.counts, self._arrays, self.weight)
            self.weight = 0.0
            self._take_until(lambda: not self._group.under_way(root), f"rank {root}")
            if root in self.dead and root in self._group.losses:
                self._lose(root)
        return root

    def _leave_out(self, rank):
        if rank not in self.dead:
            self.dead.add(rank)
            # Others end as soon as the first worker has their parameters.
            has_left = rank in self._ended and rank not in self._group.losses
            if not self._is_ending and not has_left:
                self._lose(rank)
                self._spread()

    def _lose(self, rank):
        self.lost.add(rank)
        self._on_death(rank)


class _GOSGDWorker(asynchronous.AsynchronousWorker):
    """One worker of GOSGD."""

    _own = 0  # batches of this worker

    def register(self) -> bool:
        """Return whether this is the first rank."""
        return self.group.rank == 0

    def exchanged(self) -> list[Any]:
        """Return the parameters and the running statistics, which are merged like them."""
        return [*self.run.model.params, *self.run.statistics]

    def begin(self, kept: dict[str, Any]) -> None:
        """Take the parameters of the first worker."""
        self._gossip = Gossip(self.group, self.flat.read(), self._alike(), self._tell_death)
        self._gossip.begin()
        self.flat.write()
        self._gossip.counts[:] = self.run.count_before / self.group.size
        self._draws = np.random.RandomState([self.job.options["seed"], self.group.rank])

    def _tell_death(self, rank):
        self.has_lost_others = True
        own, others = self.group.rank, self._gossip.others
        if own == min([own, *others]):
            self.run.report()
            self.run.say(
                f"rank {rank} ({self.job.devices[rank]}) has died or failed: training goes on "
                f"without it, with {1 + len(others)} workers"
            )

    @property
    def _count(self):
        """The batches of all workers, as far as this one knows."""
        return int(self._gossip.counts.sum())

    def is_over(self) -> bool:
        """Return whether all workers together have done the batches of all epochs."""
        n_batches = int(self.run.model.data.n_batch_train)
        self.enter_epochs(self._count // n_batches, self._validate_before)
        is_done = self._gossip.counts.sum() >= n_batches * self.run.model.n_epochs
        return bool(is_done) or self.run.interrupt.is_set

    def _validate_before(self, epoch):
        if epoch > self.run.first_epoch and self.run.verbose:
            self.validate(self._count, epoch - 1)

    def count_batch(self) -> int:
        """Count a batch of this worker."""
        self._own += 1
        self._gossip.counts[self.group.rank] += 1
        return self._count

    def exchange(self) -> None:
        """Merge what has come, and perhaps push to another worker."""
        gossip = self._gossip
        self.run.recorder.start()
        self.flat.read()
        gossip.take()
        if gossip.others and self._draws.random_sample() < self.job.options["p"]:
            gossip.push(int(self._draws.choice(gossip.others)))
        if self._own % _TELL_EVERY == 0:
            gossip.tell_counts()
        self.flat.write()
        self.run.recorder.end("comm")

    def end(self) -> None:
        """Merge the parameters of all workers; the first one validates and saves them."""
        self.flat.read()
        root = self._gossip.end()
        self.flat.write()
        if self.group.rank != root:
            return
        self.run.say(f"sum of the weights: {self._gossip.weight:.15f}")
        if self.run.interrupt.is_set:
            self.save(self._count, self.epoch)
        else:
            self.validate(self._count, self.epoch, is_last=True)

    def fail(self) -> None:
        """Tell all other workers, without waiting for any of them."""
        for rank in range(self.group.size):
            if rank != self.group.rank:
                self.group.send(rank, "failed")
