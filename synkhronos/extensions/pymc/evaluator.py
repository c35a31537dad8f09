"""Ranks that compute likelihoods, each from its own rows.

    evaluate(values)  ── values ──▶ shared memory ──▶ every rank: its rows
    logp, gradients   ◀── sum ───── shared memory ◀── log-likelihood and gradients of its rows

Each `Evaluator` has its own session. Its workers are forked after the functions have been compiled
and have run once: they inherit machine code and data, so nothing is sent. New data, or the first
evaluation of another kind, start new workers in place of the old ones. The kinds:

    value       the log-likelihood
    gradients   the log-likelihood, and its gradients for all parameters
    products    the gradients times a direction, and the Hessian times this direction

A process that the script forks, such as that of a chain, starts workers of its own at its first
evaluation. So does one that gets the evaluator in a pickle.

On several machines the leader of each has an evaluator, with the terms and its ranks' rows of the
data. The leaders are the ranks of a session. Each gives one vector, and these are added up in the
order of the machines:

    evaluate(values)  ── values ──▶ each leader: evaluate_here(values)
    logp, gradients   ◀── sum ───── a vector from each
"""

from __future__ import annotations

import atexit
import itertools
import os
import pickle
import secrets
import threading
import time
import weakref
from dataclasses import dataclass, replace
from typing import Any, Callable, Sequence

import cloudpickle
import numpy as np
import pymc as pm
import pytensor

from synkhronos._machine.deep_recursion import recurses_deep
from synkhronos._machine.interrupts import interrupts_held, raised_here
from synkhronos._machine.log import name_rank
from synkhronos._machine.processes import take_standard_streams
from synkhronos._machine.shared_memory import Segments, check_sharing
from synkhronos._session.commands import Forget
from synkhronos._session.current import Current
from synkhronos._session.session import Session
from synkhronos.comm import Reference
from synkhronos.comm.mpi.job import MachineLayout
from synkhronos.comm.reports import raised_by_rank
from synkhronos.comm.transports import make_gate
from synkhronos.errors import SessionError, WorkerDied, WorkerError
from synkhronos.extensions.pymc.pace import Pace
from synkhronos.extensions.pymc.parts import Parts, open_axes, rows_before
from synkhronos.extensions.pymc.row_sources import RowSources
from synkhronos.extensions.pymc.runs import along, along_direction, compiled
from synkhronos.extensions.pymc.terms import Term, first_line

_evaluators: weakref.WeakValueDictionary[int, Evaluator] = weakref.WeakValueDictionary()
_failed_threads: set[int] = set()  # of nutpie, in which an evaluation has failed


def evaluate(number: int, kind: str, values: np.ndarray, sources: tuple) -> np.ndarray:
    """Evaluate by the evaluator of this number, for compiled code: see `Evaluator.evaluate`."""
    evaluator = _evaluators[number]
    evaluator.callers.add(threading.get_native_id())
    return evaluator.evaluate(kind, values, sources)


def all_evaluators() -> list[Evaluator]:
    """Return those of this process."""
    return list(_evaluators.values())


def on_this_machine(n_ranks: int) -> MachineLayout:
    """Return the layout of `n_ranks` on one machine."""
    return MachineLayout((n_ranks,), ("",), 0)


@dataclass(frozen=True)
class Evaluate:
    """Compute the parts of all ranks."""

    number: int
    kind: str

    def run(self, worker):
        """Compute this rank's part."""
        _evaluators[self.number].compute(worker.rank, self.kind)


@dataclass(frozen=True)
class Read:
    """Read the data of all ranks."""

    number: int

    def run(self, worker):
        """Read this rank's data."""
        _evaluators[self.number].read_part(worker.rank)


@dataclass(frozen=True)
class Receive:
    """Give a machine the evaluator of that number, or new data for it."""

    number: int
    machine: int
    pickled: Reference
    version: str  # of PyMC, whose operations are pickled

    def run(self, worker):
        """Unpickle it, on that machine."""
        if worker.rank == self.machine:
            if self.version != pm.__version__:
                raise SessionError(
                    f"PyMC is {self.version} on the first machine, and {pm.__version__} on "
                    f"{worker.gate.host}. Install the same on all machines."
                )
            content, data = unpickled(worker.fetch(self.pickled))
            worker.comm.memory.forget([self.pickled])
            if self.number not in _evaluators:
                worker.at_end.callback(_restored(Evaluator, self.number, *content).close)
            _evaluators[self.number].take(data)


@dataclass(frozen=True)
class EvaluateOnMachines:
    """Compute the parts of all machines."""

    number: int
    kind: str

    def run(self, worker):
        """Return the sum of this machine's parts."""
        evaluator = _evaluators[self.number]
        if worker.is_master:
            values = evaluator.given
            worker.gate.tell_all(values)
        else:
            values = worker.gate.told_by(0)
        try:
            return evaluator.evaluate_here(self.kind, values)
        except WorkerError as error:
            own = raised_by_rank(error)
            if own is None:
                raise
            raise own from error


class Evaluator:
    """Terms, and the ranks that compute them.

    On several machines of the `layout` the session has one rank on each. `check_bounds` is the
    model's: whether parameters out of bounds give minus infinity. `functions`, if given, are the
    compiled functions of the terms with gradients, which nothing else calls.
    """

    def __init__(
        self,
        terms: Sequence[Term],
        layout: MachineLayout,
        check_bounds: bool,
        functions: list | None = None,
    ):
        self.terms, self.layout, self.check_bounds = tuple(terms), layout, check_bounds
        self._of_machines = Current.session if len(layout.counts) > 1 else None
        self._open(secrets.randbits(62))  # a pickle of it may come from any process
        if functions is not None:
            self._functions["gradients"] = functions

    def _open(self, number):
        self.number = number
        # nutpie finds shared variables by their names.
        self.number_in_graphs = pytensor.shared(np.array(number), f"likelihood {number}")
        self.is_closed = False
        self.is_used = False  # whether this process has evaluated it, or another one may have
        self.unheard: BaseException | None = None  # an error that no code in Python could catch
        self.callers: set[int] = set()  # native ids of the threads that have evaluated
        self.parameters = [each for term in self.terms for each in term.parameters]
        self.unknown = open_axes(self.terms)
        self.sources = RowSources(self.terms)
        self._functions: dict[str, list] = {}
        self._products: list | None = None  # derivatives of terms along directions, and these
        self._received: list | None = None  # the data, on other machines than the script's
        self._sent = 0  # the version of the values that other machines have rows of
        self.given = np.empty(0)  # the values of an evaluation on several machines
        self._make_locks()
        self._forget()
        _evaluators[number] = self

    def _make_locks(self):
        self._lock = threading.RLock()  # nutpie evaluates in several threads
        self._inside = threading.Lock()  # held in an evaluation: a flag could stay after a Ctrl-C

    def _forget(self):
        self._session = None
        self._commands: dict[str, Evaluate] = {}
        self._runs: dict[str, list] = {}  # kind -> for each rank a list of `Evaluation`
        self._prepared = None  # those of this process's rank whose functions have arguments
        self._paces: dict[str, Pace] = {}
        self._memory: Parts | None = None
        self._version = 0  # of the values of `sources` that ranks have rows of
        self._lengths = b""

    def __reduce__(self):
        self._check_machines(None)
        self.is_used = True
        content = self.number, self.terms, self.layout, self.check_bounds, self.is_closed
        return _restored, (type(self), *content)

    def _check_machines(self, link):
        """Refuse to evaluate in another process than the script's on several machines."""
        if link is None and len(self.layout.counts) > 1:
            raise SessionError(
                "Chains in processes of their own can't use the ranks of several machines. Write "
                "pm.sample(cores=1): the chains follow one another, each on all ranks."
            )

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of the workers; none before the first evaluation."""
        return [] if self._session is None else self._session.worker_pids

    def flat(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Return values of all parameters, and perhaps a direction, as `evaluate` takes them."""
        lengths = [values[i].shape[axis] for i, axis in self.unknown]
        return np.concatenate([lengths, *(np.ravel(each) for each in values)]).astype("float64")

    def evaluate(
        self, kind: str, values: np.ndarray, sources: Sequence[np.ndarray] | None = None
    ) -> np.ndarray:
        """Return the result of all ranks for an evaluation of a kind, in one vector.

        Parameters
        ----------
        kind : str
            "value", "gradients" or "products".
        values : numpy.ndarray
            Float64, flat: the lengths that `unknown` lists, the values of all parameters, and for
            products a direction: a number for each number of those parameters that are floats.
        sources : sequence of numpy.ndarray, optional
            The values of `RowSources.variables`, by default those that they have now.
        """
        with self._lock:
            if self._inside.locked():
                raise SessionError(
                    "The likelihood was evaluated in the middle of another evaluation, from a "
                    "signal handler or a finalizer. Evaluate it after that one has returned."
                )
            if self.is_closed:
                raise SessionError(
                    "A function that was compiled in `with likelihood(...):` was called after the "
                    "end of the block, which has ended its ranks. Call it in the block, or compile "
                    "it again."
                )
            try:
                with self._inside:
                    self._take_sources(sources)
                    if self._of_machines is None:
                        total = self.evaluate_here(kind, values)
                    else:
                        total = self._evaluate_on_machines(kind, values)
            except WorkerDied as death:
                death = _advised(death)
                # nutpie takes any error of an evaluation for a point out of bounds, and goes on.
                if isinstance(threading.current_thread(), threading._DummyThread):
                    self.unheard = death
                    _failed_threads.add(threading.get_native_id())
                raise death from None
            finally:
                if self.is_closed:  # by `close` in the middle of this evaluation
                    self._end()
        if len(self._begins) == 1:
            return total[:1] if kind == "value" else total
        first = total[self._begins].sum(keepdims=True)
        if kind == "value":
            return first
        return np.concatenate([first, np.delete(total, self._begins)])

    def _take_sources(self, values):
        """Let the next evaluation give ranks new rows, if these values are others than theirs."""
        values = self.sources.present() if values is None else values
        if not self.sources.are_held(values):
            self.sources.hold(values)

    def _evaluate_on_machines(self, kind, values):
        self._check_machines(Current.link)
        with self._of_machines.call("likelihood") as session:
            self._send(session)
            self._command_for(kind, values)  # its errors come before other machines are asked
            self.given = values
            total, *others = session.ask(EvaluateOnMachines(self.number, kind))
        for each in others:
            total += each
        return total

    def evaluate_here(self, kind: str, values: np.ndarray) -> np.ndarray:
        """Return the sum of the parts of this machine's ranks."""
        command = self._command_for(kind, values)
        self._memory.values[: values.size] = values
        pace = self._paces.get(kind)
        if pace is None:  # of one rank, or of devices
            self._session.run(command)
            return self._memory.total()
        begin = time.perf_counter()
        if not (pace.is_alone and self._ranks_are_idle() and self._compute_alone(kind)):
            self._session.run(command)
        pace.note(time.perf_counter() - begin)
        return self._memory.total()

    @property
    def ways(self) -> tuple[Callable[[str], object], Callable[[str], object]]:
        """Functions that repeat the last evaluation of a kind: by ranks, and by this process."""
        return lambda kind: self._session.run(self._commands[kind]), self._compute_alone

    def _ranks_are_idle(self):
        """Return whether all workers wait for a command.

        If one has ended, a command raises. After a Ctrl-C they may still compute their parts.
        """
        gate = self._session.gate
        try:
            self._session.require_open()
            gate.check_alive()
        except WorkerDied:
            return False
        return not gate.is_in_call

    def _compute_alone(self, kind):
        """Compute the parts of all ranks; return False after an error, which ranks will report."""
        self._prepared = None
        try:
            for run in itertools.chain(*self._runs[kind]):
                run.prepare()
                run.run()
        except raised_here(Exception):
            return False
        return True

    def _command_for(self, kind, values):
        command = self._commands.get(kind)
        if command is None or not self._is_current(values):
            return self._start(kind, values)
        return command

    def _send(self, session):
        """Send each machine the data of its rows, unless it has them."""
        version = self.sources.version
        if self._sent == version:
            return
        self._sent = 0  # some machines may have other data after an error
        found, layout = self._read_data(), self.layout
        terms = self._without_data()  # a machine gets its own rows only
        for machine in range(1, len(layout.counts)):
            data = []
            for term, (length, arrays) in zip(self.terms, found):
                there = slice(*(rows_before(layout, m, length) for m in (machine, machine + 1)))
                cut = [along(array, rows.axis, there) for rows, array in zip(term.rows, arrays)]
                data.append((length, cut))
            content = terms, replace(layout, machine=machine), self.check_bounds
            _block, reference = session.comm.memory.wrap(pickled((content, data)))
            session.run(Receive(self.number, machine, reference, pm.__version__))
        self._sent = version

    def _without_data(self):
        """Return the terms without the model and all data."""
        return [
            replace(
                term,
                frontier=(),
                rows=tuple(replace(rows, data=rows.variable) for rows in term.rows),
            )
            for term in self.terms
        ]

    @property
    def values(self) -> np.ndarray:
        """The values of the last evaluation."""
        return self._memory.values.copy()

    def round(self) -> None:
        """Run the start and the finish of an evaluation, in which no rank computes anything."""
        self._session.run(Forget((), (), ()))

    def read(self) -> None:
        """Let each rank read its data, after an evaluation with gradients."""
        self._session.run(Read(self.number))

    def read_part(self, rank: int) -> None:
        """Read the data of a rank."""
        for run in self._runs["gradients"][rank]:
            run.read()

    def take(self, data: list) -> None:
        """Take the data of this machine's rows: as `_read_data` returns them."""
        self._received = data
        self._commands.clear()

    def _is_current(self, values):
        if self._version != self.sources.version:
            return False
        return not self.unknown or values[: len(self.unknown)].tobytes() == self._lengths

    def compute(self, rank: int, kind: str) -> None:
        """Compute the part of a rank, into shared memory."""
        runs = self._runs[kind][rank]
        if self._prepared is not runs:  # by the first evaluation of this kind, in this process
            for run in runs:
                run.prepare()
            self._prepared = runs
        for run in runs:
            run.run()

    def close(self) -> None:
        """End the workers; refuse evaluations from now on.

        A signal handler or finalizer may close it in the middle of an evaluation, which ends the
        workers then.
        """
        with self._lock:
            self.is_closed = True
            if not self._inside.locked():
                self._end()

    def _end(self):
        self._stop()
        # Functions are in cycles of references: their arrays would stay until the next collection.
        for function in itertools.chain(*self._functions.values()):
            for each in function.input_storage:
                each.storage[0] = None
        self._functions.clear()
        # PyTensor keeps the graphs that numba has compiled, and these hold this evaluator.
        self.terms, self._products, self._received = (), None, None
        self._of_machines = None
        self.sources = RowSources(())

    def leave_in_child(self) -> None:
        """Leave the workers to the process that has forked this one."""
        session = self._session
        self._make_locks()  # another thread of that process may have held them
        if session is not None:  # else this child is a worker that is just starting
            self._forget()
            session.leave_in_child(os.getppid())

    def _compile(self, kind):
        """Return the functions of all terms, which are compiled once."""
        if kind not in self._functions:
            # PyMC asks the present model whether bounds are checked.
            with pm.Model(model=None, check_bounds=self.check_bounds):
                self._functions[kind] = [
                    compiled(term, kind != "value", directions)
                    for term, directions in self._terms_of(kind)
                ]
        return self._functions[kind]

    def _terms_of(self, kind):
        if kind != "products":
            return [(term, ()) for term in self.terms]
        if self._products is None:
            self._products = [along_direction(term) for term in self.terms]
        return self._products

    def check_second_derivatives(self) -> None:
        """Raise NotImplementedError if PyTensor derives no second derivatives of a term."""
        try:
            self._terms_of("products")
        except raised_here(Exception) as error:
            raise NotImplementedError(
                f"PyTensor has no second derivatives of this likelihood: {first_line(error)}"
            ) from error

    def _start(self, kind, values):
        """Start workers for the present data, and for values of these shapes."""
        if self._session is not None:
            self._session.require_open()
        self.is_used = True
        kinds = {*self._commands, kind}
        functions = {each: self._compile(each) for each in kinds}
        self._stop()
        data = self._read_data()
        self._make_memory(values, Segments().create)
        arranged = {}
        for each in kinds:
            self._runs[each] = [
                list(self._memory.evaluations(rank, each, functions[each], data, arranged))
                for rank in range(len(self.layout.ranks()))
            ]
            for run in self._runs[each][0]:
                run.prepare()  # numba compiles before the workers are forked, which inherit code
                run.run()
            if len(self._runs[each]) > 1:
                begin = time.thread_time()
                self._compute_alone(each)
                self._paces[each] = Pace(time.thread_time() - begin)
        self._start_session()
        self._commands = {each: Evaluate(self.number, each) for each in kinds}
        return self._commands[kind]

    def _read_data(self):
        """Return the number of rows of each term, on all machines, and its arrays."""
        if self._received is not None:
            return self._received
        try:
            values = iter(self.sources.rows())
        except raised_here(Exception) as error:
            raise ValueError(
                f"The data of the likelihood do not fit one another: {first_line(error)}. Give all "
                "of them as many rows, in one pm.set_data({...})."
            ) from error
        found = []
        for term in self.terms:
            arrays = [next(values) for _ in term.rows]
            lengths = {array.shape[rows.axis] for rows, array in zip(term.rows, arrays)}
            if len(lengths) > 1:
                raise ValueError(
                    f"The data of {term.name!r} have {' and '.join(map(str, sorted(lengths)))} "
                    "rows. Give all of them as many, in one pm.set_data({...})."
                )
            found.append((lengths.pop(), arrays))
        return found

    def _make_memory(self, values, make):
        self._version = self.sources.version
        self._lengths = values[: len(self.unknown)].tobytes()
        self._memory = Parts(self.terms, self.layout, values, make)
        self._begins = self._memory.begins

    def _start_session(self):
        check_sharing()
        with interrupts_held():
            host = self.layout.hosts[self.layout.machine]
            self._session = forked(len(self.layout.ranks()), self.layout.first(), host)
            if len(self.layout.counts) == 1:
                name_rank(None)  # to the user this process is that of the script, or of a chain
        try:
            self._session.begin()
        except BaseException:
            self._stop()
            raise

    def _stop(self):
        session = self._session
        self._forget()
        if session is not None:
            released(session)


def forked(n_ranks: int, first_rank: int = 0, host: str | None = None) -> Session:
    """Return a new session whose workers have been forked, with this process as its first rank."""
    take_standard_streams()
    gate = make_gate(n_ranks, 0)
    gate.first_rank, gate.host = first_rank, host
    return Session(["cpu"] * n_ranks, 1, 0, False, follow=False, check=0, adopts=False, gate=gate)


def released(session: Session) -> None:
    """End a session, in any state."""
    try:
        session.quit()
    finally:
        with interrupts_held():
            session.end()
            session.release()


def _advised(death):
    """Return the error of a worker's death with advice for the user."""
    cause, separator, _ = str(death).partition(" The session has ended: ")
    if not separator:  # on several machines the whole job ends
        return death
    advice = "Leave the likelihood() block, and enter it again."
    return WorkerDied(f"{cause} {advice}", death.rank, death.exitcode)


def _restored(kind, number, terms, layout, check_bounds, is_closed=False):
    """Return the evaluator of that number, made anew in a process that lacks it."""
    evaluator = _evaluators.get(number)
    if evaluator is None:
        evaluator = kind.__new__(kind)
        evaluator.terms, evaluator.layout, evaluator.check_bounds = terms, layout, check_bounds
        evaluator._of_machines = None
        evaluator._open(number)
        evaluator.is_closed = is_closed
    return evaluator


@recurses_deep
def pickled(content: object) -> bytes:
    """Return a pickle of anything that has graphs."""
    return cloudpickle.dumps(content, pickle.HIGHEST_PROTOCOL)


@recurses_deep
def unpickled(data: bytes) -> Any:
    """Return what was pickled."""
    return pickle.loads(data)


def _leave_in_child():
    for each in all_evaluators():
        each.leave_in_child()


def _mark_as_used():
    for each in all_evaluators():
        each.is_used = True


def _close_all():
    for each in all_evaluators():
        each.close()
    have_ended(_failed_threads)  # nutpie's threads crash if Python ends before


def have_ended(threads: set[int]) -> bool:
    """Wait for threads of other libraries; return whether they have ended within a second.

    Those of nutpie end some milliseconds after their sampler.
    """
    end = time.monotonic() + 1
    while any(os.path.exists(f"/proc/self/task/{each}") for each in threads):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


os.register_at_fork(after_in_child=_leave_in_child, after_in_parent=_mark_as_used)
atexit.register(_close_all)  # of blocks that are never left
