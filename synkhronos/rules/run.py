"""One rank's run of a rule: the model, the options, the recorder, snapshots and interrupts."""

from __future__ import annotations

import numbers
import os
import random
import sys
from types import SimpleNamespace
from typing import Any, Sequence

import numpy as np

from synkhronos import _host
from synkhronos._machine.log import log
from synkhronos.parameter_server.group.interface import Group, SingleGroup
from synkhronos.rules import contract, snapshots
from synkhronos.rules.first_batch import FirstBatch
from synkhronos.rules.job import TELLS, Interrupt, Job
from synkhronos.rules.model_variables import variables_of
from synkhronos.rules.options import TUNED, check_folder
from synkhronos.rules.recorder import Recorder

_NONE = object()  # differs from all settings


class Run:
    """The parts that all rules use: a rank's model, its recorder, the job and the other ranks.

    `group` has the ranks that step together: all, or this one alone.
    """

    def __init__(
        self, job: Job, group: Group, model: Any, recorder: Any, interrupt: Interrupt
    ) -> None:
        self.job, self.group, self.model, self.recorder = job, group, model, recorder
        self.verbose = bool(recorder.verbose)
        self.statistics = contract.statistics_of(model)
        self.interrupt = interrupt
        self._history = snapshots.History(model)
        self.first_epoch = self.first_batch = 0
        self.count_before = 0  # batches of all ranks before the present epoch
        self._has_told = False  # whether it has warned that the error does not fall
        self._left_out: list[str] = []  # what snapshots lack, as the log has said
        self.own: dict[str, Any] = {}  # numbers of this rank that snapshots keep
        self.kept_arrays: list[np.ndarray] = []  # of the rule, from the run that is resumed

    @property
    def _kind(self) -> str:
        """The rule, and what its ranks exchange: runs of one kind have the same variables."""
        return f"{self.job.rule} {self.job.options.get('sync_type', '')}".strip()

    def snapshot_is_due(self, epoch: int, is_last: bool) -> bool:
        """Return whether a snapshot is to be written after an epoch."""
        every = self.job.options["snapshot_freq"]
        return is_last or bool(every and epoch % every == 0)

    def validate(self, count: int, shares: bool = False) -> bool:
        """Validate after `count` batches of all ranks; return whether the model asks to stop.

        `shares` says whether each rank validates a part of the data; else this one validates all.
        ``val_iter`` returns None to go on with the next sub-batch, a number to go on with that
        batch, or ``'stop'``.
        """
        model, recorder = self.model, self.recorder
        stop, batch = False, 0
        while batch < int(model.data.n_batch_val):
            following = batch + 1
            for _ in range(int(model.n_subb)):
                returned = model.val_iter(count, recorder)
                if isinstance(returned, str) and returned == "stop":
                    stop = True
                elif isinstance(returned, numbers.Real) and not isinstance(returned, bool):
                    following = int(returned)
                    break
            batch = following
        model.reset_iter("val")
        if shares:
            recorder.gather_val_info()
        recorder.print_val_info(count)
        model.current_info = recorder.get_latest_val_info()
        if self.verbose and not self._has_told and does_not_fall(recorder.val_info):
            self._has_told = True
            self._tell_that_it_does_not_fall()
        return stop

    def _tell_that_it_does_not_fall(self):
        errors = [row[2] for row in self.recorder.val_info]
        values = {**self.job.options, "learning_rate": contract.learning_rate(self.model)}
        named = ", ".join(f"{name} {values[name]:g}" for name in TUNED if name in values)
        log.warning(
            f"the validation error does not fall: {errors[0]:.3f} after the first epoch, "
            f"{errors[-1]:.3f} after {len(errors)}. Is the learning rate too large, or too small, "
            f"for {self.job.rule} on {len(self.job.devices)} ranks? ({named})"
        )

    def record(self, count: float) -> None:
        """Write the recorder's file, with the present learning rate."""
        if self.verbose:
            rate = contract.learning_rate(self.model)
            self.recorder.save(count, rate, self.job.options["inforec_path"])

    def save(self, epoch: int, batch: int, arrays: Sequence[np.ndarray] = (), **more: Any) -> None:
        """Write a snapshot, from which a run goes on with a batch of an epoch.

        `arrays` and `more` are what the rule itself keeps.
        """
        state = self._history.capture(self.recorder)
        state.plain["rule"] = dict(self.own)
        state.arrays.update({f"rule/{number}": array for number, array in enumerate(arrays)})
        self._tell_what_is_left_out(state.left_out)
        states = snapshots.collect(self.group, state)
        if states is None:
            return
        settings = self.job.settings
        path = snapshots.write(
            self.job.options["snapshot_path"],
            snapshots.Snapshot(
                self._kind, epoch, batch, self.count_before, {**more, "settings": settings}, states
            ),
        )
        save = getattr(self.model, "save", None)
        if callable(save):
            save(snapshots.folder_of(self.job.options["snapshot_path"]))
        self.say(f"snapshot {path}")

    def _tell_what_is_left_out(self, names):
        new = [name for name in names if name not in self._left_out]
        self._left_out += new
        if new and self.verbose:
            log.warning(
                f"snapshots don't store the position of {_and(new)}, so a resumed run starts over "
                "there. To keep a position, store it as a number, an array or a random state of "
                "NumPy, as an attribute of the model or of its data."
            )

    def resume(self) -> dict[str, Any]:
        """Go on from a snapshot, if the job says so; return the numbers that the rule has kept."""
        if not self.job.options["resume"]:
            return {}
        group, path = self.group, None
        if group.rank == 0:
            path = snapshots.find(self.job.options["resume"], self.job.options["snapshot_path"])
        snapshot = snapshots.distribute(group, path)
        same, n_states = False, len(snapshot.states)
        if snapshot.rule is None:
            snapshots.restore_old(self.model, snapshot)
        else:
            same = snapshot.rule == self._kind and (n_states > 1) == (group.size > 1)
            state = snapshot.state_of(group.rank)
            if snapshot.batch and (not same or n_states != group.size):
                raise ValueError(
                    f"{state.file} is from the middle of an epoch of {snapshot.rule} on {n_states} "
                    f"ranks: resume it in the same way, or from a snapshot of an epoch's end."
                )
            if same:
                before = snapshot.more.get("settings", {})
                new = {k: v for k, v in self.job.settings.items() if before.get(k, _NONE) != v}
                # One asynchronous worker has written the file: only that gets its random numbers.
                is_own = self.verbose if group.size == 1 else group.rank < n_states
                self._history.restore(state, self.recorder, new, is_own)
            else:
                self._history.restore_parameters(state)
            if not same or n_states != group.size:
                self.say(
                    f"{path} is of {snapshot.rule} on {n_states} ranks: this run goes on with its "
                    f"{'state' if same else 'parameters'}, and with other random numbers; the "
                    f"learning rate is {contract.learning_rate(self.model):g}"
                )
            self.own = dict(state.plain.get("rule", {}))
            names = [f"rule/{number}" for number in range(len(state.arrays))]
            self.kept_arrays = [state.arrays[name] for name in names if name in state.arrays]
        self.first_epoch, self.first_batch = snapshot.epoch, snapshot.batch
        self.count_before = snapshot.count
        self.say(f"resumed from {path}: epoch {self.first_epoch}, batch {self.first_batch}")
        if same and (names := [*snapshot.states[0].left_out, *self._history.lost]):
            self.say(f"but {_and(names)}: starts over, as the snapshot does not have its position")
        if self.first_epoch >= self.model.n_epochs:
            self.say(f"nothing is left to train: n_epochs is {self.model.n_epochs}")
        kept = {"n_ranks": n_states, **snapshot.more} if same else {}
        return {"total": snapshot.count, **kept}

    def report(self) -> None:
        """Print from now on, in place of a rank that is gone."""
        self.verbose = self.recorder.verbose = True

    def say(self, text: str) -> None:
        """Print a line, on the rank that reports."""
        if self.verbose:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()


def _and(names):
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def does_not_fall(val_info: Sequence[Sequence[float]]) -> bool:
    """Return whether the error of the last three epochs is about that of the first, or larger.

    False if the first error was low, or if the errors are no fractions.

    >>> rows = [[0, 2.3, error] for error in (0.9, 0.5, 0.9, 0.91)]
    >>> does_not_fall(rows), does_not_fall([*rows, [0, 2.3, 0.88]])
    (False, True)
    """
    errors = [row[2] for row in val_info]
    if len(errors) < 4 or not all(0 <= error <= 1 for error in errors) or errors[0] < 0.2:
        return False
    return min(errors[-3:]) > 0.95 * errors[0]


def build(
    job: Job,
    group: Group,
    verbose: bool,
    interrupt: Interrupt,
    is_alone: bool = False,
    sync_type: str = "avg",
) -> Run:
    """Import the model, construct, check and compile it for a `sync_type`; return the run.

    A model that `is_alone` takes itself for the only rank: it sees all data, in its own order.
    """
    own = SingleGroup() if is_alone else group
    for name in ("snapshot_path", "inforec_path"):
        check_folder(name, job.options[name])
        folder = snapshots.folder_of(job.options[name])
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{name}: can't write into {folder!r}.")
    look = FirstBatch()
    modelclass = contract.load_class(job.modelfile, job.modelclass)
    layers2 = sys.modules.get("theanompi.models.layers2")
    if layers2 is not None:
        layers2.set_seed(job.options["seed"])
        layers2.set_verbose(verbose)
    config = {"verbose": verbose, "rank": own.rank, "size": own.size, "mname": job.modelclass}
    model, _ = contract.make_model(modelclass, config, job.settings)
    contract.check(model)
    look.check(model)
    contract.compile_functions(model, sync_type, tells=verbose and TELLS in os.environ)
    contract.check(model, is_compiled=True)
    for variable in variables_of(model):
        if _host.is_random_state(variable):
            _host.spread_random_state(variable, group.rank)
    np.random.seed((job.options["seed"] + 1 + group.rank) % 2**32)
    random.seed(job.options["seed"] + 1 + group.rank)
    # Named as in mpi4py, whose communicators model files know.
    comm = SimpleNamespace(rank=group.rank, size=group.size, allgather=group.all_gather)
    print_freq = job.options["print_freq"]
    recorder = Recorder(None if is_alone else comm, print_freq, job.modelclass, verbose)
    recorder.batch_size = getattr(model, "file_batch_size", getattr(model, "batch_size", None))
    return Run(job, own, model, recorder, interrupt)
