"""The training loop of asynchronous workers, which exchange at times: EASGD, ASGD and GOSGD.

register ──▶ build ──▶ begin ──▶ batch, exchange; batch, exchange; ... ──▶ end
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Callable, Sequence

import numpy as np

from synkhronos._machine.log import log
from synkhronos.launch import INTERRUPTED
from synkhronos.parameter_server.group.interface import Group
from synkhronos.rules import contract
from synkhronos.rules.job import Interrupt, Job
from synkhronos.rules.model_variables import Flat, described
from synkhronos.rules.run import Run, build


class AsynchronousWorker(ABC):
    """One worker of a run; the subclass of each rule says what it exchanges, and with whom."""

    run: Run
    flat: Flat  # the values of the variables that `exchanged` returns
    epoch: int  # the last one for which the model has adjusted its hyper-parameters
    has_lost_others = False  # by death or failure: then the exit status is 1

    def __init__(self, job: Job, group: Group, interrupt: Interrupt) -> None:
        self.job, self.group, self._interrupt = job, group, interrupt

    def work(self) -> int:
        """Train to the end; return the exit status."""
        try:
            verbose = self.register()
            run = self.run = build(self.job, self.group, verbose, self._interrupt, is_alone=True)
            kept = run.resume()
            self.epoch = kept.get("adjusted", run.first_epoch - 1)
            self.flat = Flat(self.exchanged())
            self.begin(kept)
            self._train()
            self.end()
            run.model.cleanup()
        except BaseException:
            try:
                self.fail()
            except Exception as error:
                log.warning("can't tell the others of a failure: %s", error)
            raise
        if run.interrupt.is_set:
            return INTERRUPTED
        return int(self.has_lost_others)

    @abstractmethod
    def register(self) -> bool:
        """Return whether this is the first worker, which records, validates and prints."""

    @abstractmethod
    def begin(self, kept: dict[str, Any]) -> None:
        """Set the first parameters; `kept` has the rule's numbers, if the run was resumed."""

    @abstractmethod
    def is_over(self) -> bool:
        """Return whether the training is over."""

    @abstractmethod
    def count_batch(self) -> int:
        """Count a batch of this worker; return how many all workers have done together."""

    @abstractmethod
    def exchange(self) -> None:
        """Exchange with others after a batch, if it is time to."""

    @abstractmethod
    def end(self) -> None:
        """Leave the others; one worker validates and saves what they have learned together."""

    @abstractmethod
    def fail(self) -> None:
        """Tell the others that this worker fails."""

    def exchanged(self) -> list[Any]:
        """Return the shared variables of `flat`."""
        return list(self.run.model.params)

    def _alike(self):
        """Return what must be equal on all workers; each counts epochs by its number of batches."""
        model = self.run.model
        n_batches = int(model.data.n_batch_train)
        if n_batches < 1:
            raise ValueError(
                f"{type(model.data).__name__}.n_batch_train is {n_batches} on rank "
                f"{self.group.rank}: each worker of this rule needs batches."
            )
        variables = {"params": model.params, "statistics": self.run.statistics}
        lengths = {**contract.lengths_of(model), "n_batch_train": n_batches}
        return {**{name: described(each) for name, each in variables.items()}, **lengths}

    def _train(self):
        model, recorder, batch = self.run.model, self.run.recorder, 0
        recorder.start_epoch()
        while not self.is_over():
            for _ in range(int(model.n_subb)):
                model.train_iter(batch, recorder)
            batch += 1
            recorder.print_train_info(self.count_batch())
            if batch >= int(model.data.n_batch_train):
                model.reset_iter("train")
                batch = 0
            self.exchange()

    def enter_epochs(self, now: int, before: Callable[[int], None] = lambda epoch: None) -> None:
        """Adjust the learning rate once for each epoch up to `now`, also for missed ones.

        ``before(epoch)`` is called first.
        """
        model = self.run.model
        for epoch in range(self.epoch + 1, now + 1):
            if epoch >= model.n_epochs:
                break
            before(epoch)
            model.epoch = self.epoch = epoch
            model.adjust_hyperp(epoch)

    def validate(
        self, count: int, epoch: int, is_last: bool = False, arrays: Sequence[np.ndarray] = ()
    ) -> None:
        """Validate after an epoch, record it, and write a snapshot if one is due."""
        run = self.run
        run.validate(count)
        run.recorder.end_epoch(count, epoch)
        run.record(count)
        if run.snapshot_is_due(epoch, is_last):
            self.save(count, epoch + 1, arrays)
        run.recorder.start_epoch()

    def save(self, count: int, epoch: int, arrays: Sequence[np.ndarray] = ()) -> None:
        """Write a snapshot of the present parameters, with arrays that the rule keeps."""
        self.run.count_before = count
        self.run.save(epoch, 0, arrays, adjusted=self.epoch)
