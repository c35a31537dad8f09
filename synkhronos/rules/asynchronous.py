"""The loop of a worker that exchanges with a server whenever it has done some batches."""

from __future__ import annotations

from typing import Callable

from synkhronos.comm.group import Group
from synkhronos.comm.single_group import SingleGroup
from synkhronos.rules import serving
from synkhronos.rules.arithmetic import epochs_entered
from synkhronos.rules.job import Job
from synkhronos.rules.run import Interrupted, build
from synkhronos.rules.validation import validate
from synkhronos.rules.variables import Flat


class Worker:
    """A worker of EASGD or ASGD; `exchange` is the rule's own.

    Parameters
    ----------
    job : Job
    group : Group
    interrupt : callable
        Returns whether a signal has asked this process to end.
    """

    def __init__(self, job: Job, group: Group, interrupt: Callable[[], bool]) -> None:
        self.job, self._group, self._interrupt = job, group, interrupt
        self.client = serving.Client(group)

    def run(self) -> int:
        """Train until the server says stop; return the exit status."""
        try:
            is_first = self.client.register()
            # To the model each worker is alone: it sees all data, in an order of its own.
            config = {"verbose": is_first, "rank": 0, "size": 1}
            made = self.made = build(
                self.job, self._group, config, "avg", "ar", self._interrupt, shares_validation=False
            )
            kept = made.resume(SingleGroup())
            self.flat = Flat(made.model.params)
            model = made.model
            arrays = self.flat.read()
            self.orders = self.client.begin(
                arrays, made.n_batch_train(), model.n_epochs, kept, made.kept_arrays
            )
            self.flat.write()
            self.begun()
            # The last that adjust_hyperp knows.
            self._epoch = kept.get("adjusted", made.first_epoch - 1)
            self._enter_epochs()
            made.recorder.start_epoch()
            self._train()
            self._end()
            model.cleanup()
            if made.is_interrupted:
                made.interrupted()
        except Interrupted:
            raise
        except BaseException:
            serving.leave_after_error(self.client)
            raise
        return 0

    def begun(self) -> None:
        """Prepare for the first exchange; the parameters are the server's."""

    def exchange(self, done: int) -> None:
        """Exchange with the server, and set `orders`."""
        raise NotImplementedError

    def _train(self):
        made, model, recorder = self.made, self.made.model, self.made.recorder
        batch, done = 0, 0
        while not self.orders.stop:
            for _ in range(int(model.n_subb)):
                model.train_iter(batch, recorder)
            batch, done = batch + 1, done + 1
            recorder.print_train_info(self.orders.total + done)
            if batch >= made.n_batch_train():
                model.reset_iter("train")
                batch = 0
            if done >= self.job.options["tau"] or made.is_interrupted:
                recorder.start()
                self.exchange(done)
                recorder.end("comm")
                done = 0
                self._enter_epochs()
                if self.orders.validate:
                    self._validate(is_last=False)
                if made.is_interrupted:
                    return

    def _enter_epochs(self):
        """Adjust the learning rate once for each epoch, also for those before this worker came."""
        made = self.made
        if self.orders.is_first and not made.verbose:  # the first worker has died
            made.verbose = made.recorder.verbose = True
        last = int(made.model.n_epochs) - 1
        for epoch in epochs_entered(min(self.orders.epoch, last), 1, self._epoch):
            made.model.epoch = epoch
            made.model.adjust_hyperp(epoch)
            self._epoch = epoch

    def _validate(self, is_last):
        """Validate the center, record, write a snapshot; then go on with the own parameters."""
        made = self.made
        own = [array.copy() for array in self.flat.read()]
        state = self._take_center()
        count, epoch = self.orders.total, self.orders.epoch
        validate(made, count)
        made.recorder.end_epoch(count, epoch - 1)
        made.record(count)
        if made.snapshot_is_due(epoch - 1, is_last):
            self._save(count, state)
        made.recorder.start_epoch()
        for array, before in zip(self.flat.read(), own):
            array[...] = before
        self.flat.write()

    def _take_center(self):
        arrays = self.flat.read()
        state = self.client.center(arrays)
        self.flat.write()
        return state

    def _save(self, count, state):
        self.made.count_before = count
        kept = {"total": count, "adjusted": self._epoch}
        self.made.save(self.orders.epoch, 0, SingleGroup(), state, **kept)

    def _end(self):
        """Leave; the first worker waits for all others, validates the center and saves it."""
        made, total = self.made, None
        if self.orders.is_first or not made.is_interrupted:
            total = self.client.finish()
        if total is not None:
            self.orders.total, self.orders.is_first = total, True
            self._enter_epochs()
            if made.is_interrupted:
                self._save(self.orders.total, self._take_center())
            else:
                self._validate(is_last=True)
        self.client.leave("interrupted" if made.is_interrupted else "")
