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

import contextlib
import sys
from typing import Any, Callable

import numpy as np

from synkhronos.comm.mpi.library import MPI
from synkhronos.comm.mpi.messages import dead_ranks, is_death, wait_until
from synkhronos.rules.arithmetic import epochs_entered, gossip_merge
from synkhronos.rules.asynchronous import Alone
from synkhronos.rules.job import Job
from synkhronos.rules.run import build
from synkhronos.rules.validation import validate
from synkhronos.rules.variables import Flat

_FIRST, _PUSH, _COUNTS, _LAST, _MERGE, _GONE = range(700, 706)
_NOTHING = np.zeros(1, np.uint8)
_MOST_UNDER_WAY = 2  # pushes to one worker: more would only fill memory
_TELL_EVERY = 10  # batches


def run(job: Job, comm: Any, interrupt: Callable[[], bool]) -> int:
    """Train the model of this rank; return the exit status."""
    config = {"verbose": comm.rank == 0, "rank": 0, "size": 1}
    try:
        made = build(job, comm, config, "avg", "ar", interrupt, shares_validation=False)
        worker = _Worker(job, comm, made)
        worker.train()
        made.model.cleanup()
    except BaseException:
        leave(comm)
        raise
    if made.is_interrupted:
        made.interrupted()
    return int(worker.has_lost_others)


def leave(comm: Any) -> None:
    """Tell all other workers that this one has failed, without waiting for any of them."""
    for rank in range(comm.size):
        if rank != comm.rank:
            with contextlib.suppress(MPI.Exception):
                comm.Isend(_NOTHING, rank, _GONE)


class Gossip:
    """One worker's parameters and weight, and the messages under way.

    Parameters
    ----------
    comm : MPI.Comm
    arrays : list of ndarray
        The parameters, which pushes of others change in place.
    patience : float
        Seconds to wait for other workers at the end.
    on_death : callable
        Called with the rank of a worker that has died.
    """

    def __init__(
        self,
        comm: Any,
        arrays: list[np.ndarray],
        patience: float,
        on_death: Callable[[int], None] = lambda rank: None,
    ) -> None:
        self._comm, self._arrays, self._patience = comm, arrays, patience
        self._on_death = on_death
        self.weight = 1.0 / comm.size
        self.counts = np.zeros(comm.size)  # batches of each worker, as far as this one knows
        self.dead: set[int] = set()
        self.lost: set[int] = set()  # those of them that had not ended as they should
        self._is_ending = False
        self._n_sent, self._n_received = [0] * comm.size, [0] * comm.size
        self._n_announced: dict[int, int] = {}
        self._has_begun = self._has_spread = False
        self._under_way: list[tuple[Any, int, Any]] = []  # request, receiver, its memory
        self._n_bytes = 8 * (1 + comm.size) + sum(array.nbytes for array in arrays)

    @property
    def others(self) -> list[int]:
        """The other workers that are alive."""
        ranks = range(self._comm.size)
        return [rank for rank in ranks if rank != self._comm.rank and rank not in self.dead]

    def begin(self) -> None:
        """Take the parameters of the first worker, the lowest rank that has not died or failed."""

        def has_begun():
            self.take()
            return self._has_begun or self._is_first

        if not self._is_first:
            wait_until(has_begun, "the first parameters of another worker", self._patience)
        self._has_begun = True
        self._spread()

    @property
    def _is_first(self):
        return self._comm.rank == min([self._comm.rank, *self.others])

    def _spread(self):
        """Send the first parameters, if this worker is the first one, and has not sent them."""
        if self._has_begun and self._is_first and not self._has_spread:
            self._has_spread = True
            for rank in self.others:
                self._send(self._packed(0.0), rank, _FIRST)

    def push(self, receiver: int) -> bool:
        """Send half of the weight and the parameters; return False if too much is under way."""
        self._reap()
        if sum(to == receiver for _, to, _ in self._under_way) >= _MOST_UNDER_WAY:
            return False
        self.weight /= 2
        self._n_sent[receiver] += 1
        self._send(self._packed(self.weight), receiver, _PUSH)
        return True

    def tell_counts(self) -> None:
        """Send the counts to all others."""
        for rank in self.others:
            self._send(self.counts.copy(), rank, _COUNTS)

    def take(self) -> None:
        """Merge all that has come, without waiting."""
        with self._deaths_taken():
            self._reap()
            self._take()

    def _take(self):
        status = MPI.Status()
        while self._is_there(_COUNTS, status):
            counts = np.empty_like(self.counts)
            self._comm.Recv(counts, status.source, _COUNTS)
            np.maximum(self.counts, counts, out=self.counts)
        while self._is_there(_GONE, status):
            self._comm.Recv(np.empty_like(_NOTHING), status.source, _GONE)
            self._leave_out(status.source)
        while self._is_there(_FIRST, status):
            _, others = self._received(status.source, _FIRST)
            if not self._has_begun:  # a second one comes after the death of a first worker
                self._has_begun = True
                for array, other in zip(self._arrays, others):
                    array[...] = other
        while self._is_there(_PUSH, status):
            self._merge_from(status.source, _PUSH)
            self._n_received[status.source] += 1
        while self._is_there(_LAST, status):
            number = np.empty(1, np.int64)
            self._comm.Recv(number, status.source, _LAST)
            self._n_announced[status.source] = int(number[0])

    def end(self) -> int:
        """Take all that is under way to this worker; return the worker with the merged parameters.

        Every worker that is alive must call it.
        """
        for rank in self.others:
            self._send(np.array([self._n_sent[rank]], np.int64), rank, _LAST)

        def is_complete():
            self.take()
            return not self._under_way and all(
                self._n_received[rank] == self._n_announced.get(rank) for rank in self.others
            )

        wait_until(is_complete, "the last pushes of other workers", self._patience)
        # From now on a worker ends as soon as the first one has its parameters.
        self._is_ending = True
        others = self.others
        root = min([self._comm.rank, *others])
        if self._is_first:
            status, merged = MPI.Status(), set()

            def all_merged():
                self.take()
                with self._deaths_taken():
                    while self._is_there(_MERGE, status):
                        self._merge_from(status.source, _MERGE)
                        merged.add(status.source)
                return merged.issuperset(self.others)

            wait_until(all_merged, "the parameters of other workers", self._patience)
            for rank in sorted(set(others) - merged):
                self._lose(rank)
        else:
            packed = self._packed(self.weight)
            request = self._comm.Issend(packed, root, _MERGE)
            self.weight, self._is_sent = 0.0, False

            def is_sent():
                self.take()
                with contextlib.suppress(MPI.Exception):
                    self._is_sent = self._is_sent or request.Test()
                return self._is_sent or root in self.dead

            wait_until(is_sent, f"rank {root}", self._patience)
            if not self._is_sent:
                self._lose(root)
        return root

    def _packed(self, weight):
        """Return the memory of a message: the weight, the counts, the parameters."""
        packed = np.empty(self._n_bytes, np.uint8)
        head = np.concatenate([[weight], self.counts])
        at = head.nbytes
        packed[:at] = head.view(np.uint8)
        for array in self._arrays:
            packed[at : at + array.nbytes] = array.view(np.uint8)
            at += array.nbytes
        return packed

    def _received(self, source, tag):
        """Return the weight and the parameters of a message; take its counts."""
        packed = np.empty(self._n_bytes, np.uint8)
        self._comm.Recv(packed, source, tag)
        at = 8 * (1 + self._comm.size)
        weight, *counts = packed[:at].view(np.float64)
        np.maximum(self.counts, counts, out=self.counts)
        arrays = []
        for array in self._arrays:
            arrays.append(packed[at : at + array.nbytes].view(array.dtype))
            at += array.nbytes
        return weight, arrays

    def _merge_from(self, source, tag):
        weight, others = self._received(source, tag)
        total = self.weight
        for array, other in zip(self._arrays, others):
            total = gossip_merge(array, self.weight, other, weight)
        self.weight = total

    def _send(self, memory, receiver, tag):
        try:
            request = self._comm.Issend(memory, receiver, tag)  # complete when it has come
        except MPI.Exception as error:
            self._take_death(error)
            return
        self._under_way.append((request, receiver, memory))

    def _reap(self):
        """Forget the messages that have been sent, and those to the dead."""
        left = []
        for request, receiver, memory in self._under_way:
            try:
                if receiver not in self.dead and not request.Test():
                    left.append((request, receiver, memory))
            except MPI.Exception as error:
                self._take_death(error)
        self._under_way = left

    def _is_there(self, tag, status):
        # Not of any source: what a dead worker has sent can be seen for ever, but not received.
        return any(self._comm.Iprobe(rank, tag, status) for rank in self.others)

    @contextlib.contextmanager
    def _deaths_taken(self):
        try:
            yield
        except MPI.Exception as error:
            self._take_death(error)

    def _take_death(self, error):
        if not is_death(error):
            raise error
        for rank in sorted(dead_ranks(self._comm)):
            self._leave_out(rank)

    def _leave_out(self, rank):
        if rank not in self.dead:
            self.dead.add(rank)
            if not self._is_ending:
                self._lose(rank)
                self._spread()

    def _lose(self, rank):
        self.lost.add(rank)
        self._on_death(rank)


class _Worker:
    """One rank's part of a run."""

    def __init__(self, job, comm, run):
        self._job, self._comm, self._run = job, comm, run
        kept = run.resume(Alone(comm))
        self._adjusted = kept.get("adjusted", run.first_epoch - 1)
        self._flat = Flat(run.model.params)
        arrays = self._flat.read()
        self._gossip = Gossip(comm, arrays, job.options["patience"], self._tell_death)
        self._gossip.begin()
        self._flat.write()
        self._gossip.counts[:] = run.count_before / comm.size
        self._draws = np.random.RandomState([job.options["seed"], comm.rank])

    @property
    def has_lost_others(self) -> bool:
        """Whether other workers have died or failed."""
        return bool(self._gossip.lost)

    def _tell_death(self, rank):
        gossip, comm = self._gossip, self._comm
        if comm.rank == min([comm.rank, *gossip.others]):
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
        recorder, rank = run.recorder, self._comm.rank
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
            run.save(epoch + 1, 0, Alone(self._comm), adjusted=epoch)
        run.recorder.start_epoch()

    def _finish(self, epoch):
        """Validate the merged parameters, and write a snapshot of them."""
        run, count = self._run, int(self._gossip.counts.sum())
        run.say(f"sum of the weights: {self._gossip.weight:.15f}")
        if run.is_interrupted:
            run.count_before = count
            run.save(epoch, 0, Alone(self._comm), adjusted=epoch)
        else:
            self._validate(count, epoch, is_last=True)
