"""BSP, bulk synchronous parallel: all ranks exchange after each batch.

    each batch     train_iter ──▶ rows, stop, interrupt of all ranks ──▶ exchange ──▶ step
    each epoch     statistics averaged ──▶ val_iter ... ──▶ record ──▶ adjust_hyperp ──▶ snapshot

`cdd` sums the velocities or gradients that a model leaves in `vels`; every rank then takes the same
step. `avg` averages the parameters after each rank's own step. `swap` exchanges the parameters of
random pairs of ranks, as in Im et al., "Generative Adversarial Parallelization", arXiv:1612.04021.

    shared variables ──▶ Flat, in memory of the group ──▶ Group.all_reduce   ar, asa32, asa16
    on CUDA devices of one machine ──▶ NCCL (device_sums)                    nccl32, nccl16

All strategies leave the same bits on all ranks. Sums of float16 are computed in float32, except by
NCCL, and rounded once. `ar` and `asa32` name the same exchange: each rank sums one share of the
elements, in the order of ranks, then all ranks gather all shares. `asa16` does the same with values
that are first rounded to 16 bits. `nccl32` and `nccl16` use NCCL if all ranks are on one machine,
each with its own CUDA device; otherwise they become `ar` and `asa16`.

References
----------
Valiant, "A bridging model for parallel computation", CACM 33 (1990).

Ma, Mao, Taylor, "Theano-MPI: a Theano-based Distributed Training Framework", arXiv:1605.08325
(`asa`: all-to-all, sum, all-gather).
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import Any, Mapping, Sequence

import numpy as np

from synkhronos import _host
from synkhronos.launch import INTERRUPTED
from synkhronos.parameter_server.group.interface import Group
from synkhronos.rules import contract
from synkhronos.rules.arithmetic import pairs_of, warmed_up
from synkhronos.rules.job import Interrupt, Job
from synkhronos.rules.model_variables import Flat, described, difference
from synkhronos.rules.run import Run, build
from synkhronos.rules.step_rows import StepRows


def run(job: Job, group: Group, interrupt: Interrupt) -> int:
    """Train the model of this rank together with all other ranks; return the exit status."""
    options = job.options
    warm_up_epochs = options["warm_up_epochs"] if options["scale_lr"] else 0
    exchange = EXCHANGES[options["sync_type"]]
    return train(job, group, interrupt, exchange, options["exchange_freq"], warm_up_epochs)


def train(
    job: Job,
    group: Group,
    interrupt: Interrupt,
    exchange: type[BatchExchange],
    every: int = 1,
    warm_up_epochs: int = 0,
) -> int:
    """Train with an exchange after each `every` batches; return the exit status.

    In `warm_up_epochs` the learning rate grows to that of the model times the number of ranks.
    """
    group.barrier()
    strategy, note = strategy_for(job.options["exch_strategy"], job.devices, group.hosts)
    rank_run = build(job, group, group.rank == 0, interrupt, sync_type=exchange.sync_type)
    if note and group.size > 1:
        rank_run.say(note)
    status = SynchronousWorker(rank_run, exchange, strategy, every, warm_up_epochs).train()
    # Not after an error: a cleanup may take long, and others wait until this process ends.
    rank_run.model.cleanup()
    return status


class BatchExchange(ABC):
    """An exchange of all ranks: each makes it, and all call it equally often."""

    sync_type = "avg"  # as which the model is compiled: with whole steps (avg), or not (cdd)
    ends_epochs = False  # whether ranks exchange at the end of each epoch, too
    needs_rows = False  # whether it needs rows also of models that don't count them

    def __init__(self, run: Run, strategy: str) -> None:
        self.run, self.model, self.group = run, run.model, run.group

    @abstractmethod
    def compute(self, weight: float, has_stepped: bool, at: tuple[int, int]) -> None:
        """Exchange: `weight` is that of `row_weight`, `at` the epoch and the batch."""


class SumVelocities(BatchExchange):
    """Sums of velocities: then all ranks take the same step."""

    sync_type = "cdd"

    def __init__(self, run: Run, strategy: str) -> None:
        super().__init__(run, strategy)
        contract.check_exchanged_velocities(self.model)
        self._sums = Sums(self.group, strategy, self.model.vels, self.model.vels2)

    def compute(self, weight: float, has_stepped: bool, at: tuple[int, int]) -> None:
        """Sum the velocities, and take the step."""
        if not has_stepped:  # else the velocities of its last batch would count twice
            for variable in self.model.vels:
                variable.set_value(np.zeros_like(variable.get_value()))
        self._sums.compute(weight)
        finish_step(self.model, has_stepped)


class AverageParameters(BatchExchange):
    """Averages of parameters, after steps of each rank's own."""

    ends_epochs = needs_rows = True

    def __init__(self, run: Run, strategy: str) -> None:
        super().__init__(run, strategy)
        self._sums = Sums(self.group, strategy, self.model.params, self.model.params)

    def compute(self, weight: float, has_stepped: bool, at: tuple[int, int]) -> None:
        """Average the parameters."""
        self._sums.compute(weight / self.group.size)


class SwapParameters(BatchExchange):
    """Parameters of random pairs of ranks."""

    def __init__(self, run: Run, strategy: str) -> None:
        super().__init__(run, strategy)
        self._flat = Flat(self.model.params)

    def compute(self, weight: float, has_stepped: bool, at: tuple[int, int]) -> None:
        """Swap the parameters with another rank."""
        # All ranks draw the same pairs, also in a resumed run.
        draw = np.random.RandomState([self.run.job.options["seed"], *at])
        partners = pairs_of(draw.permutation(self.group.size).tolist())
        swap(self.group, self._flat, partners.get(self.group.rank))


EXCHANGES = {"cdd": SumVelocities, "avg": AverageParameters, "swap": SwapParameters}


class SynchronousWorker:
    """The training loop of one rank."""

    def __init__(
        self, run: Run, exchange: type[BatchExchange], strategy: str, every: int, warm_up: int
    ) -> None:
        self._run, self._model, self._group, self._size = run, run.model, run.group, run.group.size
        self._every, self._ends_epochs, self._warm_up = every, exchange.ends_epochs, warm_up
        needs_rows = self._size > 1 and bool(exchange.needs_rows or run.statistics)
        self._rows = StepRows(self._model, run.verbose and needs_rows, looks=needs_rows)
        agree(self._group, {**contract.lengths_of(self._model), **run.job.options})
        broadcast(self._group, self._model.params)
        kept = run.resume()
        self._steps = kept.get("steps", 0)
        n_before = kept.get("n_ranks", 1)
        # Older snapshots don't store the factor, but their rate includes that of their last epoch.
        last_epoch = run.first_epoch - (0 if run.first_batch else 1)
        factor = kept.get("factor", self._factor(last_epoch, n_before))
        self._rate: Any = None
        if factor != 1 or (self._warm_up and self._size > 1):
            self._rate = contract.ScaledRate(self._model, factor)
            self._rate.set_factor(self._factor(run.first_epoch, self._size))
            if kept and n_before != self._size:
                rate = contract.learning_rate(self._model)
                run.say(f"the learning rate is {rate:g}, for {self._size} ranks")
        self._exchange = exchange(run, strategy) if self._size > 1 else None
        if self._size > 1:
            agree(self._group, {"statistics": described(run.statistics)})
            if run.statistics:
                self._statistics = Sums(self._group, "ar", run.statistics, run.statistics)

    def _factor(self, epoch, n_ranks):
        return warmed_up(epoch, n_ranks, self._warm_up) if self._warm_up else 1.0

    def train(self) -> int:
        """Train all remaining epochs, or until a model asks to stop; return the exit status."""
        run, model = self._run, self._model
        for epoch in range(run.first_epoch, int(model.n_epochs)):
            model.epoch = epoch
            run.recorder.start_epoch()
            if self._rate is not None:
                self._rate.set_factor(self._factor(epoch, self._size))
            n_batches = self._train_epoch(epoch)
            if n_batches is None:
                return INTERRUPTED
            model.reset_iter("train")
            self._average_statistics()
            count = run.count_before + n_batches * self._size
            stop = run.validate(count, shares=True)
            with contextlib.nullcontext() if self._rate is None else self._rate.taken_out():
                model.adjust_hyperp(epoch)
            contract.print_info(model, run.recorder, run.verbose)
            run.recorder.end_epoch(count, epoch)
            run.count_before = count
            run.first_batch = 0
            run.record(count)
            stop = any(self._group.all_gather(bool(stop)))
            last = stop or epoch + 1 == int(model.n_epochs)
            if run.snapshot_is_due(epoch, last):
                self._save(epoch + 1, 0)
            if stop:
                break
        return 0

    def _train_epoch(self, epoch):
        """Train one epoch; return the most batches of a rank, or None after an interrupt."""
        run, model, recorder = self._run, self._model, self._run.recorder
        batch = run.first_batch
        self._rows.begin()
        while True:
            has_batch = batch < int(model.data.n_batch_train)
            for _ in range(int(model.n_subb)):
                if has_batch:
                    model.train_iter(batch, recorder)
                    n_rows = self._rows.of_last_step()
                    for name in ("rows", "rows_of_epoch"):
                        run.own[name] = run.own.get(name, 0) + n_rows
                rows, have_batches, are_interrupted = self._agree(has_batch)
                if not have_batches.any():
                    if self._steps % self._every and self._ends_epochs:
                        self._exchange_now(rows, has_batch, (epoch, batch))
                        self._steps = 0
                    return batch
                self._steps += 1
                if self._steps % self._every == 0:
                    self._exchange_now(rows, has_batch, (epoch, batch))
            batch += 1
            recorder.print_train_info(run.count_before + batch * self._size)
            if are_interrupted.any():
                self._save(epoch, batch)
                return None

    def _save(self, epoch, batch):
        factor = 1.0 if self._rate is None else self._rate.factor
        self._run.save(epoch, batch, steps=self._steps, factor=factor)

    def _exchange_now(self, rows, has_batch, at):
        self._run.own["rows"] = 0
        if self._exchange is not None:
            self._run.recorder.start()
            self._exchange.compute(row_weight(rows, self._group.rank), has_batch, at)
            self._run.recorder.end("comm")

    def _agree(self, has_batch):
        """Return each rank's rows since the last exchange, and whether it has a batch, or a Ctrl-C.

        All ranks meet here, so this time, "sync", is spent waiting for the slowest.
        """
        run = self._run
        own = np.array([run.own.get("rows", 0), has_batch, run.interrupt.is_set], float)
        everyone = own[np.newaxis]
        if self._size > 1:
            run.recorder.start()
            everyone = np.array(self._group.all_gather(own))
            run.recorder.end("sync")
        return everyone.T

    def _average_statistics(self):
        """Average the running statistics over all ranks: each has computed them from its rows."""
        rows = self._run.own.pop("rows_of_epoch", 0)
        if self._size > 1 and self._run.statistics:
            everyone = self._group.all_gather(rows)
            if any(everyone):
                self._statistics.compute(row_weight(everyone, self._group.rank) / self._size)


def strategy_for(name: str, devices: Sequence[str], hosts: Sequence[str]) -> tuple[str, str]:
    """Return the strategy for a name, and a note if another one takes its place.

    >>> strategy_for("asa32", ["cpu", "cpu"], ["a", "a"])
    ('asa32', '')
    >>> strategy_for("nccl32", ["cpu", "cpu"], ["a", "a"])
    ('ar', 'nccl32 needs CUDA devices: ranks exchange in host memory, with the same sums')
    >>> strategy_for("nccl16", ["cuda0", "cuda0"], ["a", "b"])[0]
    'asa16'
    """
    if not name.startswith("nccl"):
        return name, ""
    if not all(device.startswith("cuda") for device in devices):
        why = "needs CUDA devices"
    elif len(set(hosts)) > 1:
        why = "needs ranks on one machine"
    elif len(set(devices)) < len(devices):
        why = "needs a device for each rank"
    else:
        return name, ""
    if name == "nccl16":
        return "asa16", f"nccl16 {why}: ranks exchange in host memory, in 16 bits"
    return "ar", f"nccl32 {why}: ranks exchange in host memory, with the same sums"


def row_weight(rows: Sequence[float], rank: int) -> float:
    r"""Return a rank's weight in a sum that is divided by the number of ranks later.

    .. math:: w_r = k \, n_r / \sum_s n_s

    With as many rows on each of `k` ranks the weights are exactly 1; without rows they are 0.

    >>> row_weight([32, 32], 0), row_weight([30, 10], 1), row_weight([0, 0], 1)
    (1.0, 0.5, 0.0)
    """
    total = float(sum(rows))
    return len(rows) * float(rows[rank]) / total if total else 0.0


class Sums:
    """Sums over all ranks of the values of shared variables, by one of the strategies.

    Values of `sources` are summed into `targets`; both may be the same variables.
    """

    def __init__(
        self, group: Group, strategy: str, sources: Sequence[Any], targets: Sequence[Any]
    ) -> None:
        self._group, self._sources, self._targets = group, list(sources), list(targets)
        self._sixteen_bits, self._nccl = strategy.endswith("16"), None
        if strategy.startswith("nccl"):
            from synkhronos.rules.device_sums import GroupSums

            self._nccl = GroupSums(group, self._sixteen_bits)
        else:
            self._flat = Flat(targets, sources, group.allocate, sums=True)

    def compute(self, weight: float) -> None:
        """Set the targets to the sum over ranks of each rank's sources, times its weight."""
        if self._nccl is not None:
            for source, target in zip(self._sources, self._targets):
                _host.replace(target, self._nccl(_host.peek(source), weight))
            return
        for array in self._flat.read():
            if weight != 1:
                array *= array.dtype.type(weight)
            self._group.all_reduce(array, "sum", self._sixteen_bits)
        self._flat.write()


def finish_step(model: Any, has_stepped: bool) -> None:
    """Take the step with the summed velocities, also on a rank that had no batch."""
    iteration = getattr(model, "train_iter_fn", None)
    finish = getattr(iteration, "finish", None)
    if has_stepped and finish is not None:
        finish()
    elif not has_stepped and callable(getattr(model, "descent_vel", None)):
        model.descent_vel()


def agree(group: Group, has: Mapping[str, Any]) -> None:
    """Raise ValueError on all ranks if a value of one rank differs from that of rank 0."""
    first, *others = group.all_gather(dict(has))
    for rank, other in enumerate(others, 1):
        if said := difference(first, other, f"rank {rank}", "rank 0"):
            raise ValueError(said)


def broadcast(group: Group, variables: Sequence[Any], root: int = 0) -> None:
    """Give all ranks the values of one rank.

    All ranks raise ValueError if the variables differ in number, name, shape, dtype or order.
    """
    agree(group, {"params": described(variables)})
    if variables:
        flat = Flat(variables)
        arrays = flat.read()
        for array, value in zip(arrays, group.broadcast(arrays, root)):
            array[...] = value
        flat.write()
        flat.detach()


def swap(group: Group, flat: Flat, partner: int | None) -> None:
    """Exchange all values with another rank; without a partner do nothing."""
    if partner is not None:
        arrays = flat.read()
        group.send(partner, arrays)
        [others] = group.receive_from(partner)
        for array, other in zip(arrays, others):
            array[...] = other
        flat.write()
