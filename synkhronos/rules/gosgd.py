r"""GOSGD, gossip SGD: workers train on their own, and push their parameters to random others.

After each batch a worker pushes with probability `p`: it halves its weight, and sends the other
half with its parameters to a random worker, which merges them into its own:

.. math:: x \leftarrow (\alpha x + \alpha_s x_s) / (\alpha + \alpha_s), \quad
          \alpha \leftarrow \alpha + \alpha_s

The sum of all weights stays 1. No send waits for its receiver, so no circle of pushes can block. At
the end all workers take what is still on its way, and the first one merges the parameters of all.

References
----------
Blot, Picard, Cord, Thome, "Gossip training for deep learning", arXiv:1611.09726.
"""

from __future__ import annotations

import sys
import time
from typing import Callable

import numpy as np

from synkhronos.comm.group import Group, WaitedTooLong
from synkhronos.comm.single_group import SingleGroup
from synkhronos.rules.arithmetic import epochs_entered, gossip_merge
from synkhronos.rules.job import Job
from synkhronos.rules.run import build
from synkhronos.rules.validation import validate
from synkhronos.rules.variables import Flat

_MOST_UNDER_WAY = 2  # pushes to one worker: more would only fill memory
_TELL_EVERY = 10  # batches


def run(job: Job, group: Group, interrupt: Callable[[], bool]) -> int:
    """Train the model of this rank; return the exit status."""
    config = {"verbose": group.rank == 0, "rank": 0, "size": 1}
    try:
        made = build(job, group, config, "avg", "ar", interrupt, shares_validation=False)
        worker = _Worker(job, group, made)
        worker.train()
        made.model.cleanup()
    except BaseException:
        leave(group)
        raise
    if made.is_interrupted:
        made.interrupted()
    return int(worker.has_lost_others)


def leave(group: Group) -> None:
    """Tell all other workers that this one has failed, without waiting for any of them."""
    for rank in range(group.size):
        if rank != group.rank:
            group.send(rank, "failed")


class Gossip:
    """One worker's parameters and weight, and the messages between workers.

    Parameters
    ----------
    group : Group
    arrays : list of ndarray
        The parameters, which pushes of others change in place.
    on_death : callable
        Called with the rank of a worker that has died or failed.
    """

    def __init__(
        self,
        group: Group,
        arrays: list[np.ndarray],
        on_death: Callable[[int], None] = lambda rank: None,
    ) -> None:
        self._group, self._arrays, self._on_death = group, arrays, on_death
        self.weight = 1.0 / group.size
        self.counts = np.zeros(group.size)  # batches of each worker, as far as this one knows
        self.dead: set[int] = set()
        self.lost: set[int] = set()  # those of them that had not ended as they should
        self._ended: set[int] = set()  # workers that push no more
        self._merged: set[int] = set()  # workers of which this one has the last parameters
        self._is_ending = self._has_begun = self._has_spread = False

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
        """Send the first parameters, if this worker is the first one, and has not sent them."""
        if self._has_begun and self._is_first and not self._has_spread:
            self._has_spread = True
            for rank in self.others:
                self._group.send(rank, "first", self.counts, self._arrays)

    def push(self, receiver: int) -> bool:
        """Send half of the weight and the parameters; return False if too much is under way."""
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
        """Merge all that has come; wait for the first message at most so long."""
        came = self._group.receive(seconds)
        while came is not None:
            rank, message = came
            if message is None:
                self._leave_out(rank)
            elif rank not in self.dead:
                name, *rest = message
                getattr(self, f"_on_{name}")(rank, *rest)
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

    def _on_failed(self, rank):
        self._leave_out(rank)

    def _on_first(self, rank, counts, arrays):
        self._on_counts(rank, counts)
        if not self._has_begun:  # a second one comes after the death of a first worker
            self._has_begun = True
            for array, other in zip(self._arrays, arrays):
                array[...] = other

    def _on_push(self, rank, counts, arrays, weight):
        self._on_counts(rank, counts)
        total = self.weight
        for array, other in zip(self._arrays, arrays):
            total = gossip_merge(array, self.weight, other, weight)
        self.weight = total

    def _on_last(self, rank):
        self._ended.add(rank)

    def _on_merge(self, rank, *pushed):
        self._on_push(rank, *pushed)
        self._merged.add(rank)

    def end(self) -> int:
        """Take all that is under way to this worker; return the worker with the merged parameters.

        Every worker that is alive must call it.
        """
        for rank in self.others:
            self._group.send(rank, "last")  # after all pushes, as messages come in order
        self._take_until(
            lambda: self._ended.issuperset(self.others), "the last pushes of other workers"
        )
        # From now on a worker ends as soon as the first one has its parameters.
        self._is_ending = True
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
            # One that pushes no more may leave as soon as the first one has its parameters.
            has_left = rank in self._ended and rank not in self._group.losses
            if not self._is_ending and not has_left:
                self._lose(rank)
                self._spread()

    def _lose(self, rank):
        self.lost.add(rank)
        self._on_death(rank)


class _Worker:
    """One rank's part of a run."""

    def __init__(self, job, group, run):
        self._job, self._group, self._run = job, group, run
        kept = run.resume(SingleGroup())
        self._adjusted = kept.get("adjusted", run.first_epoch - 1)
        self._flat = Flat(run.model.params)
        arrays = self._flat.read()
        self._gossip = Gossip(group, arrays, self._tell_death)
        self._gossip.begin()
        self._flat.write()
        self._gossip.counts[:] = run.count_before / group.size
        self._draws = np.random.RandomState([job.options["seed"], group.rank])

    @property
    def has_lost_others(self) -> bool:
        """Whether other workers have died or failed."""
        return bool(self._gossip.lost)

    def _tell_death(self, rank):
        gossip, own = self._gossip, self._group.rank
        if own == min([own, *gossip.others]):
            self._run.verbose = self._run.recorder.verbose = True
            device = self._job.devices[rank]
            sys.stdout.write(
                f"rank {rank} ({device}) has died or failed: training goes on without it, with "
                f"{1 + len(gossip.others)} workers\n"
            )
            sys.stdout.flush()

    def train(self):
        """Train until all workers together have done the batches of all epochs."""
        run, model, gossip = self._run, self._run.model, self._gossip
        recorder, rank = run.recorder, self._group.rank
        probability = self._job.options["p"]
        epoch, batch, own = self._adjusted, 0, 0
        recorder.start_epoch()
        while True:
            n_batches = run.n_batch_train()
            epoch = self._enter_epochs(epoch, n_batches)
            if gossip.counts.sum() >= n_batches * model.n_epochs or run.is_interrupted:
                break
            for _ in range(int(model.n_subb)):
                model.train_iter(batch, recorder)
            batch, own = batch + 1, own + 1
            gossip.counts[rank] += 1
            recorder.print_train_info(int(gossip.counts.sum()))
            if batch >= n_batches:
                model.reset_iter("train")
                batch = 0
            recorder.start()
            self._flat.read()
            gossip.take()
            if gossip.others and self._draws.random_sample() < probability:
                gossip.push(int(self._draws.choice(gossip.others)))
            if own % _TELL_EVERY == 0:
                gossip.tell_counts()
            self._flat.write()
            recorder.end("comm")
        self._flat.read()
        root = gossip.end()
        self._flat.write()
        if rank == root:
            self._finish(epoch)

    def _enter_epochs(self, epoch, n_batches):
        """Adjust the learning rate for each epoch that has begun; validate the one before it."""
        run = self._run
        count = int(self._gossip.counts.sum())
        for entered in epochs_entered(count, n_batches, epoch):
            if entered >= run.model.n_epochs:
                break
            if entered > run.first_epoch and run.verbose:
                self._validate(count, entered - 1, is_last=False)
            run.model.epoch = epoch = entered
            run.model.adjust_hyperp(entered)
        return epoch

    def _validate(self, count, epoch, is_last):
        run = self._run
        validate(run, count)
        run.recorder.end_epoch(count, epoch)
        run.record(count)
        run.count_before = count
        if run.snapshot_is_due(epoch, is_last):
            run.save(epoch + 1, 0, SingleGroup(), adjusted=epoch)
        run.recorder.start_epoch()

    def _finish(self, epoch):
        """Validate the merged parameters, and write a snapshot of them."""
        run, count = self._run, int(self._gossip.counts.sum())
        run.say(f"sum of the weights: {self._gossip.weight:.15f}")
        if run.is_interrupted:
            run.count_before = count
            run.save(epoch, 0, SingleGroup(), adjusted=epoch)
        else:
            self._validate(count, epoch, is_last=True)
