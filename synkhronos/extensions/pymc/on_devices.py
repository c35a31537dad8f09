"""Ranks that compute likelihoods on devices of JAX, such as GPUs.

    evaluate(values)  ── values ──▶ shared memory ──▶ a worker for each device: JAX, its own rows
    logp, gradients   ◀── sum ───── shared memory ◀── log-likelihood and gradients of its rows

This process computes no rows and starts no JAX, so that it may fork: chains in processes of their
own start workers of their own. A worker keeps its rows on its device, and what JAX has compiled,
until the block ends; new data of the same shape compile nothing. If the script has computed with
JAX meanwhile, the workers wait for later blocks, as no others could be forked.
"""

from __future__ import annotations

import atexit
import itertools
import math
import multiprocessing
import os
import threading
from dataclasses import dataclass
from typing import ClassVar, Sequence

import numpy as np
import pymc as pm

from synkhronos._arithmetic.partition import share
from synkhronos._host.pytensor import jax_devices
from synkhronos._machine.devices import VARIABLE
from synkhronos._machine.interrupts import interrupts_held, raised_here
from synkhronos._machine.log import log, name_rank
from synkhronos._machine.shared_memory import check_sharing
from synkhronos._session.current import Current
from synkhronos._session.session import Session, SessionState
from synkhronos.comm import Reference
from synkhronos.comm.mpi.job import MachineLayout
from synkhronos.comm.reports import raised_by_rank
from synkhronos.errors import SessionError, WorkerDied, WorkerError
from synkhronos.extensions.pymc.evaluator import (
    Evaluator,
    all_evaluators,
    forked,
    pickled,
    released,
    unpickled,
)
from synkhronos.extensions.pymc.parts import Parts
from synkhronos.extensions.pymc.runs import Evaluation, along, along_direction, compiled
from synkhronos.extensions.pymc.terms import NotByRows, Term, first_line

_rows: dict[int, DeviceRows] = {}  # of this worker, by the number of the evaluator
_FULL = "RESOURCE_EXHAUSTED"  # in the messages of JAX


class NotOnDevice(NotByRows):
    """JAX can't compute a term. The arguments are the name of the term, and the reason."""

    def __str__(self):
        return f"JAX can't compute it: {self.args[1]}"


@dataclass(frozen=True)
class LayoutOfDevices(MachineLayout):
    """The ranks of one machine, with the name of each one's device."""

    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class OpenDevices:
    """Start JAX in each worker, for its device."""

    devices: tuple[str, ...]

    def run(self, worker):
        """Start JAX."""
        if not worker.is_master:
            _Own.name = self.devices[worker.rank - 1]
            _Own.device = jax_devices.start(_Own.name, worker.threads)


@dataclass(frozen=True)
class LoadRows:
    """Give each worker its rows of the data of an evaluator."""

    number: int
    content: Reference  # to a pickle of what makes a `DeviceRows`, and the first values
    data: tuple[tuple[int, tuple[Reference, ...]], ...]  # of each term: number of rows, arrays
    memory: Reference  # of the `Parts`

    def run(self, worker):
        """Put this worker's rows on its device."""
        if worker.is_master:
            return
        content, values = unpickled(worker.fetch(self.content))
        rows = _rows.setdefault(self.number, DeviceRows(worker.rank - 1, *content))
        memory = worker.comm.memory.attach(self.memory.segment)
        data = [(length, [*map(worker.fetch, arrays)]) for length, arrays in self.data]
        rows.load(data, memory, values)
        del data
        arrays = [each for _, references in self.data for each in references]
        worker.comm.memory.forget([self.content, *arrays])


@dataclass(frozen=True)
class ComputeOnDevices:
    """Compute the parts of all workers."""

    number: int
    kind: str

    def run(self, worker):
        """Compute this worker's part."""
        if not worker.is_master:
            _rows[self.number].compute(self.kind)


@dataclass(frozen=True)
class DropRows:
    """Free what the workers keep for an evaluator: rows, and what JAX has compiled."""

    number: int

    def run(self, worker):
        """Free this worker's."""
        _rows.pop(self.number, None)


class _Open:
    """The open sessions, by the devices of their workers, and the lock of who opens or ends one."""

    sessions: ClassVar[dict[tuple[str, ...], Session]] = {}
    lock = threading.Lock()


class _Own:
    """The device of this worker: its name, and JAX's object."""

    name, device = "", None


class DeviceEvaluator(Evaluator):
    """Terms whose rows are on devices."""

    def evaluate_here(self, kind, values):
        """Return the sum of the parts of all devices."""
        self.is_used = True
        if self._session is None:
            self._session = _session_of(self.layout.devices)
        with self._session.call("likelihood", broadcasts=False):
            try:
                return super().evaluate_here(kind, values)
            except WorkerError as error:
                own = raised_by_rank(error)
                if isinstance(own, NotOnDevice | MemoryError):
                    raise own from None
                raise

    def _start(self, kind, values):
        """Load the data, unless only the kind is new."""
        if not (self._commands and self._is_current(values)):
            self._load(values)
        return self._commands.setdefault(kind, ComputeOnDevices(self.number, kind))

    def _load(self, values):
        self._commands.clear()
        memory = self._session.comm.memory
        blocks, data = [], []
        for length, arrays in self._read_data():
            references = []
            for array in arrays:
                block = memory.create(array.nbytes)
                block.array(array.dtype, array.shape)[...] = array
                references.append(block.reference(array.dtype, array.shape))
                blocks.append(block)
            data.append((length, tuple(references)))
        self._make_memory(values, memory.create)
        content = self._without_data(), self.layout, self.check_bounds
        block, reference = memory.wrap(pickled((content, values)))
        blocks.append(block)
        shared = self._memory.memory.reference("uint8", ())
        self._session.run(LoadRows(self.number, reference, tuple(data), shared))

    def _stop(self):
        session = self._session
        self._forget()
        if session is not None and session.state is SessionState.OPEN:
            try:
                with session.call("likelihood", broadcasts=False):
                    session.run(DropRows(self.number))
            except (WorkerDied, SessionError) as error:
                log.debug("the rows of a likelihood stay on their devices: %s", error)
            _release_unused()

    def leave_in_child(self):
        """Leave the workers to the process that has forked this one."""
        self._make_locks()
        self._forget()


class DeviceRows:
    """The rows of a rank on its device, and the functions that JAX has compiled for them."""

    def __init__(self, rank: int, terms: Sequence[Term], layout: MachineLayout, check_bounds: bool):
        self._rank, self._terms, self._layout = rank, terms, layout
        self._check_bounds = check_bounds
        self._functions: dict[str, list] = {}
        self._evaluations: dict[str, list] = {}
        self._rows: dict = {}
        self._lengths: list = []
        self._terms_here: list[Term] = []  # those of which this rank has rows

    def load(self, data, memory, values) -> None:
        """Take rows of the data onto the device, in place of former ones."""
        import jax

        self._evaluations.clear()
        self._rows.clear()
        self._terms_here, chosen = [], []
        for term, (length, arrays) in zip(self._terms, data):
            first, last = share(length, self._layout.n_ranks, self._rank)
            self._terms_here += [term] * (first < last)
            for rows, array in zip(term.rows, arrays):
                chosen.append(((rows, first, last), along(array, rows.axis, slice(first, last))))
        self._check_room(sum(array.nbytes for _, array in chosen))
        for key, array in chosen:
            # Of a copy: on JAX's CPU device the array may stay where it is.
            self._rows[key] = jax.device_put(np.array(array, order="C"), _Own.device)
        lengths = [(length, [None] * len(arrays)) for length, arrays in data]
        if lengths != self._lengths:  # else what JAX compiles for each length would stay
            for function in itertools.chain(*self._functions.values()):
                function.clear_cache()
        self._lengths = lengths
        self._parts = _DeviceParts(self._terms, self._layout, values, lambda nbytes: memory)

    def _check_room(self, nbytes):
        stats = _Own.device.memory_stats() or {}  # JAX's CPU device has none
        free = stats.get("bytes_limit", nbytes) - stats.get("bytes_in_use", 0)
        if nbytes > free:
            names = ", ".join(repr(term.name) for term in self._terms)
            raise MemoryError(
                f"The rows of {names} that go to {_Own.name} take {nbytes / 1e9:.3g} GB, "
                f"but {free / 1e9:.3g} GB are free there. Divide them over more devices, give the "
                "data as float32, or compute on CPU ranks: likelihood(model) without devices."
            )

    def compute(self, kind: str) -> None:
        """Compute this rank's part, into shared memory."""
        evaluations = self._evaluations.get(kind)
        if evaluations is None:
            evaluations = self._begin(kind)
        for each in evaluations:
            each.run()

    def _begin(self, kind):
        given = self._rank, kind, self._compile(kind), self._lengths, self._rows
        evaluations = list(self._parts.evaluations(*given))
        for each, term in zip(evaluations, self._terms_here):
            try:
                each.run()
            except raised_here(Exception) as error:
                if _FULL in str(error):
                    raise MemoryError(
                        f"The rows of {term.name!r} are on {_Own.name}, but what is computed from "
                        f"them does not fit there: {first_line(error)}. Divide them over more "
                        "devices, or give the data as float32."
                    ) from error
                raise NotOnDevice(term.name, first_line(error)) from error
        self._evaluations[kind] = evaluations
        return evaluations

    def _compile(self, kind):
        if kind not in self._functions:
            # PyMC asks the present model whether bounds are checked.
            with pm.Model(model=None, check_bounds=self._check_bounds):
                self._functions[kind] = [_compiled(term, kind) for term in self._terms]
        return self._functions[kind]


def _compiled(term, kind):
    """Return JAX's function of shapes and dtypes, of values of these, in one array, and of rows."""
    import jax

    try:
        directions: Sequence = ()
        if kind == "products":
            term, directions = along_direction(term)
        function = compiled(term, kind != "value", directions, mode="JAX")
    except raised_here(Exception) as error:  # such as for an operation that JAX lacks
        raise NotOnDevice(term.name, first_line(error)) from error
    of_values = function.vm.jit_fn

    def vector(types, flat, *rows):
        values, begin = [], 0
        for shape, dtype in types:
            end = begin + math.prod(shape)
            values.append(flat[begin:end].reshape(shape).astype(dtype))
            begin = end
        return of_values(*values, *rows)[0]

    return jax.jit(vector, static_argnums=0)


class _DeviceParts(Parts):
    """The memory of evaluations on a device, which takes all its rows at once."""

    def number_of_blocks(self, n_rows, *others):
        """Return 1 if there are rows."""
        return int(n_rows > 0)

    def evaluation(self, *arguments):
        """Return the evaluation of a term."""
        return _DeviceEvaluation(*arguments)


class _DeviceEvaluation(Evaluation):
    """An evaluation on this rank's device. All parameters go there in one array."""

    def __init__(self, function, arguments, copies, outs, is_alone):
        super().__init__(copies, outs)
        self._values = [each for each in arguments if isinstance(each, np.ndarray)]
        self._call, self._rows = function, arguments[len(self._values) :]
        self._types = tuple((each.shape, each.dtype) for each in self._values)

    def vector(self):
        """Return the log-likelihood and the gradients, in one flat vector."""
        flat = np.concatenate([[], *(each.ravel() for each in self._values)], dtype="float64")
        return np.asarray(self._call(self._types, flat, *self._rows))


def _session_of(devices):
    """Return the open session whose workers have these devices; open it if there is none."""
    with _Open.lock:
        session = _Open.sessions.get(devices)
        if session is not None:
            if session.state is SessionState.OPEN:
                return session
            del _Open.sessions[devices]
            released(session)
        if Current.session is not None and {*Current.session.devices} != {"cpu"}:
            raise SessionError(
                "A session of fork() or `synkhronos run` has started JAX in this process, so "
                "likelihood() can fork no workers. Start the script by python, with the devices in "
                f"{VARIABLE} or likelihood(devices=...), and enter the block before fork()."
            )
        if multiprocessing.parent_process() is not None and jax_devices.has_started():
            raise SessionError(
                "No workers for devices can be forked: JAX has started here, or in the process "
                "that it comes from. For chains in a block in which JAX has sampled before, write "
                "pm.sample(cores=1): they follow one another on the workers of the block."
            )
        jax_devices.refuse_started("likelihood(devices=...)")
        check_sharing()
        with interrupts_held():
            # Messages name the ranks of the devices, from 0 on: this process has none.
            _Open.sessions[devices] = session = forked(1 + len(devices), first_rank=-1)
            name_rank(None)
        try:
            session.begin()
            session.run(OpenDevices(devices))
        except BaseException as error:
            del _Open.sessions[devices]
            released(session)
            own = raised_by_rank(error) if isinstance(error, WorkerError) else None
            if own is None:
                raise
            raise own from None
        return session


def _release_unused():
    """End the workers that no evaluator uses, if others can be forked in place of them."""
    used = {evaluator._session for evaluator in all_evaluators()}
    with _Open.lock:
        for devices, session in list(_Open.sessions.items()):
            if session not in used and not jax_devices.has_started():
                del _Open.sessions[devices]
                released(session)


def _close_all():
    for session in list(_Open.sessions.values()):
        released(session)
    _Open.sessions.clear()


def _leave_in_child():
    _Open.lock = threading.Lock()
    for session in _Open.sessions.values():
        session.leave_in_child(os.getppid())
    _Open.sessions.clear()


os.register_at_fork(after_in_child=_leave_in_child)
atexit.register(_close_all)
