"""BSP, bulk synchronous parallel: all ranks exchange after each batch.

    each batch     train_iter ──▶ rows, stop, interrupt of all ranks ──▶ exchange ──▶ step
    each epoch     statistics averaged ──▶ val_iter ... ──▶ record ──▶ adjust_hyperp ──▶ snapshot

`cdd` sums the velocities or gradients that a model leaves in `vels`; every rank then takes the same
step. `avg` averages the parameters after each rank's own step. `swap` exchanges the parameters of
random pairs of ranks.

References
----------
Valiant, "A bridging model for parallel computation", CACM 33 (1990).

Ma, Mao, Taylor, "Theano-MPI", arXiv:1605.08325.

Im et al., "Generative Adversarial Parallelization", arXiv:1612.04021 (`swap`).
"""

from __future__ import annotations

from typing import Callable

import numpy as np

from synkhronos.comm.group import Group
from synkhronos.rules import contract
from synkhronos.rules.arithmetic import pairs_of, row_weights, warm_up_factor
from synkhronos.rules.exchange import Exchanger, broadcast, strategy_for, swap
from synkhronos.rules.job import Job
from synkhronos.rules.run import Interrupted, Run, build
from synkhronos.rules.validation import validate
from synkhronos.rules.variables import Flat


def run(job: Job, group: Group, interrupt: Callable[[], bool]) -> int:
    """Train the model of this rank together with all other ranks; return the exit status."""
    group.barrier()
    strategy, note = strategy_for(job.options["exch_strategy"], job.devices, group.hosts)
    is_first = group.rank == 0
    if job.options["sync_type"] == "cdd" and job.options["exchange_freq"] != 1:
        raise ValueError(
            "exchange_freq must be 1 with sync_type 'cdd', which sums the velocities of each step; "
            f"got {job.options['exchange_freq']}. With 'avg' ranks take steps of their own."
        )
    if job.options["sync_type"] == "avg" and strategy == "asa16":
        raise ValueError(
            f"exch_strategy {job.options['exch_strategy']!r} sends 16 bits, which is too few for "
            "the parameters that sync_type 'avg' sends: small steps would be lost. Take 'ar' or "
            "'asa32'."
        )
    config = {"verbose": is_first, "rank": group.rank, "size": group.size}
    made = build(job, group, config, job.options["sync_type"], strategy, interrupt)
    if note and group.size > 1:
        made.say(note)
    try:
        BSP(made).train()
    except Interrupted:
        made.model.cleanup()
        raise
    made.model.cleanup()
    return 0


class BSP:
    """One rank's part of a run.

    Parameters
    ----------
    run : Run
        The model, the options, the other ranks.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._model, self._group = run, run.model, run.group
        self._options = run.job.options
        self._size = run.group.size
        self._next = 0, 0  # epoch and batch
        broadcast(self._group, self._model.params)
        self._steps = run.resume().get("steps", 0)
        self._scales = bool(
            self._options["scale_lr"] and self._options["warm_up_epochs"] and self._size > 1
        )
        if self._scales:
            contract.scale_learning_rate(self._model, 1.0)  # refuse a model without a rate now
        self._exchange = self._make_exchange() if self._size > 1 else None
        if self._size > 1 and run.statistics:
            self._statistics = Exchanger(self._group, "ar", run.statistics, run.statistics)

    def _make_exchange(self):
        sync_type, strategy = self._options["sync_type"], self._run.strategy
        model, group = self._model, self._group
        if sync_type == "cdd":
            contract.check_exchanged_velocities(model)
            exchanger = Exchanger(group, strategy, model.vels, model.vels2)

            def exchange(weight, stepped):
                if not stepped:  # what the last batch has left would count a second time
                    for variable in model.vels:
                        variable.set_value(np.zeros_like(variable.get_value()))
                exchanger.sum(weight)
                contract.finish_step(model, stepped)

        elif sync_type == "avg":
            exchanger = Exchanger(group, strategy, model.params, model.params)

            def exchange(weight, stepped):
                exchanger.sum(weight / group.size)

        else:
            flat = Flat(model.params)

            def exchange(weight, stepped):
                # The same pairs on all ranks, and in a run that was resumed.
                draw = np.random.RandomState([self._options["seed"], *self._next])
                partners = pairs_of(draw.permutation(group.size).tolist())
                swap(group, flat, partners.get(group.rank))

        return exchange

    def train(self) -> None:
        """Train all epochs that are left, or until a rank asks to stop."""
        run, model = self._run, self._model
        for epoch in range(run.first_epoch, int(model.n_epochs)):
            model.epoch = epoch
            run.recorder.start_epoch()
            if self._scales and run.first_batch == 0:
                factor = warm_up_factor(epoch, self._size, self._options["warm_up_epochs"])
                if factor != 1:
                    contract.scale_learning_rate(model, factor)
            n_batches = self._train_epoch(epoch)
            model.reset_iter("train")
            self._average_statistics()
            count = run.count_before + n_batches * self._size
            stop = validate(run, count, shares=True)
            model.adjust_hyperp(epoch)
            contract.print_info(model, run.recorder, run.verbose)
            run.recorder.end_epoch(count, epoch)
            run.count_before = count
            run.first_batch = 0
            run.record(count)
            stop = any(self._group.all_gather(bool(stop)))
            last = stop or epoch + 1 == int(model.n_epochs)
            if run.snapshot_is_due(epoch, last):
                run.save(epoch + 1, 0, steps=self._steps)
            if stop:
                break

    def _train_epoch(self, epoch):
        """Train one epoch; return the largest number of batches that a rank had."""
        run, model, recorder = self._run, self._model, self._run.recorder
        batch, every = run.first_batch, self._options["exchange_freq"]
        while True:
            has_batch = batch < run.n_batch_train()
            self._next = epoch, batch
            for _ in range(int(model.n_subb)):
                if has_batch:
                    model.train_iter(batch, recorder)
                    run.own["rows"] = run.own.get("rows", 0) + contract.rows_of(model)
                weights, any_batch, any_interrupted = self._agree(has_batch)
                if not any_batch:
                    if self._steps % every and self._options["sync_type"] == "avg":
                        self._exchange_now(weights, has_batch)
                        self._steps = 0
                    return batch
                self._steps += 1
                if self._steps % every == 0:
                    self._exchange_now(weights, has_batch)
            batch += 1
            recorder.print_train_info(run.count_before + batch * self._size)
            if any_interrupted:
                run.save(epoch, batch, steps=self._steps)
                run.interrupted()

    def _exchange_now(self, weights, has_batch):
        self._run.own["rows"] = 0
        if self._exchange is not None:
            self._run.recorder.start()
            self._exchange(weights[self._group.rank], has_batch)
            self._run.recorder.end("comm")

    def _agree(self, has_batch):
        """Return the ranks' weights, and whether any has a batch, and any was interrupted.

        The weights are those of the rows since the last exchange. All ranks meet here, so the time
        is that of waiting for the slowest.
        """
        own = np.array([self._run.own.get("rows", 0), has_batch, self._run.is_interrupted], float)
        everyone = own[np.newaxis]
        if self._size > 1:
            recorder = self._run.recorder
            recorder.start()
            everyone = np.array(self._group.all_gather(own))
            recorder.end("sync")
        return row_weights(everyone[:, 0]), everyone[:, 1].any(), everyone[:, 2].any()

    def _average_statistics(self):
        """Average the running statistics of all ranks, which each rank has of its own rows."""
        if self._size > 1 and self._run.statistics:
            self._statistics.sum(1.0 / self._size)
