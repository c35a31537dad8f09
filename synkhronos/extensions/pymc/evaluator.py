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
import math
import os
import pickle
import secrets
import threading
import time
import weakref
from dataclasses import dataclass, replace
from typing import Sequence

import cloudpickle
import numpy as np
import pymc as pm
import pytensor
from pytensor.graph.traversal import graph_inputs
from pytensor.tensor.sharedvar import TensorSharedVariable

from synkhronos._arithmetic.partition import share
from synkhronos._machine.deep_recursion import recurses_deep
from synkhronos._machine.interrupts import interrupts_held, raised_here
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
from synkhronos.extensions.pymc.runs import (
    TermEvaluation,
    along,
    along_direction,
    compiled,
    floats,
    number_of_blocks,
    own_value,
)
from synkhronos.extensions.pymc.terms import Term, first_line, is_float, values_of

_LINE = 8  # numbers in a cache line: no two ranks write to one

_evaluators: weakref.WeakValueDictionary[int, Evaluator] = weakref.WeakValueDictionary()
_failed_threads: set[int] = set()  # of nutpie, in which an evaluation has failed


def evaluate(number: int, kind: str, values: np.ndarray) -> np.ndarray:
    """Evaluate by the evaluator of this number: see `Evaluator.evaluate`."""
    return _evaluators[number].evaluate(kind, values)


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
            content, data = _unpickled(worker.fetch(self.pickled))
            worker.comm.memory.forget([self.pickled])
            if self.number not in _evaluators:
                worker.at_end.callback(_restored(self.number, *content).close)
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
        self.parameters = [each for term in self.terms for each in term.parameters]
        self.unknown = [
            (i, axis)
            for i, parameter in enumerate(self.parameters)
            for axis, length in enumerate(parameter.type.shape)
            if length is None
        ]
        self._functions: dict[str, list] = {}
        self._products: list | None = None  # derivatives of terms along directions, and these
        self._received: list | None = None  # the data, on other machines than the script's
        self._sent: list | None = None  # `_sources` whose data other machines have
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
        self._runs: dict[str, list] = {}  # kind -> for each rank a list of `TermEvaluation`
        self._prepared = None  # those of this process's rank whose functions have arguments
        self._sources: list = []  # the cells of shared variables, and the data that were in them
        self._values, self._parts = np.empty(0), []  # in shared memory; a part of each rank
        self._whole: list[slice] = []  # places of the parts that are summed; ranks share the rest
        self._lengths = b""

    def __reduce__(self):
        self._check_machines(None)
        self.is_used = True
        content = self.number, self.terms, self.layout, self.check_bounds, self.is_closed
        return _restored, content

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

    def evaluate(self, kind: str, values: np.ndarray) -> np.ndarray:
        """Return the result of all ranks for an evaluation of a kind, in one vector.

        Parameters
        ----------
        kind : str
            "value", "gradients" or "products".
        values : numpy.ndarray
            Float64, flat: the lengths that `unknown` lists, the values of all parameters, and for
            products a direction: a number for each number of those parameters that are floats.
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
        self._values[: values.size] = values
        self._session.run(command)
        total = self._parts[0].copy()
        for whole in self._whole:
            for part in self._parts[1:]:
                total[whole] += part[whole]
        return total

    def _command_for(self, kind, values):
        command = self._commands.get(kind)
        if command is None or not self._is_current(values):
            return self._start(kind, values)
        return command

    def _send(self, session):
        """Send each machine the data of its rows, unless it has them."""
        if self._sent is not None and all(cell[0] is data for cell, data in self._sent):
            return
        self._commands.clear()  # before `_sources` changes, by which `_is_current` knows old data
        self._sent = None  # some machines may have other data after an error
        found, layout = self._read_data(), self.layout
        # Leave out the model and all data: a machine gets its own rows only.
        terms = [
            replace(
                term,
                frontier=(),
                rows=tuple(replace(rows, data=rows.variable) for rows in term.rows),
            )
            for term in self.terms
        ]
        for machine in range(1, len(layout.counts)):
            data = []
            for term, (length, arrays) in zip(self.terms, found):
                there = slice(*(_rows_before(layout, m, length) for m in (machine, machine + 1)))
                cut = [along(array, rows.axis, there) for rows, array in zip(term.rows, arrays)]
                data.append((length, cut))
            content = terms, replace(layout, machine=machine), self.check_bounds
            pickled = _pickled((content, data))
            _block, reference = session.comm.memory.wrap(pickled)
            session.run(Receive(self.number, machine, reference, pm.__version__))
        self._sent = self._sources

    @property
    def values(self) -> np.ndarray:
        """The values of the last evaluation."""
        return self._values.copy()

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
        for cell, data in self._sources:
            if cell[0] is not data:
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
        self._of_machines = self._sent = None

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
        arguments, arranged = self._make_memory(values), {}
        for each in kinds:
            self._runs[each] = [
                list(self._runs_of(rank, each, functions[each], arguments, data, arranged))
                for rank in range(len(self.layout.ranks()))
            ]
            for run in self._runs[each][0]:
                run.prepare()  # numba compiles before the workers are forked, which inherit code
                run.run()
        self._start_session()
        self._commands = {each: Evaluate(self.number, each) for each in kinds}
        return self._commands[kind]

    def _read_data(self):
        """Return the number of rows of each term, on all machines, and its arrays."""
        if self._received is not None:
            return self._received
        variables = [rows.data for term in self.terms for rows in term.rows]
        leaves = graph_inputs(variables)
        shared = [each for each in leaves if isinstance(each, TensorSharedVariable)]
        cells = [each.container.storage for each in shared]
        self._sources = [(cell, cell[0]) for cell in cells]
        try:
            values = iter(values_of(variables))
        except raised_here(Exception) as error:
            raise ValueError(
                f"The data of the likelihood do not fit one another: {first_line(error)}. Give all "
                "of them as many rows, in one pm.set_data({...})."
            ) from error
        found = []
        for term in self.terms:
            arrays = [np.asarray(next(values)) for _ in term.rows]
            lengths = {array.shape[rows.axis] for rows, array in zip(term.rows, arrays)}
            if len(lengths) > 1:
                raise ValueError(
                    f"The data of {term.name!r} have {' and '.join(map(str, sorted(lengths)))} "
                    "rows. Give all of them as many, in one pm.set_data({...})."
                )
            found.append((lengths.pop(), arrays))
        return found

    def _make_memory(self, values):
        """Make the shared memory; return the parameters and directions in it, of each term."""
        n_unknown = len(self.unknown)
        self._lengths = values[:n_unknown].tobytes()
        shapes = [list(each.type.shape) for each in self.parameters]
        for (i, axis), length in zip(self.unknown, values):
            shapes[i][axis] = int(length)
        shapes_of = dict(zip(self.parameters, shapes))
        self._begins, width = [], 0
        for term in self.terms:
            self._begins.append(width)
            self._whole.append(slice(width, width := width + 1))
            for parameter, axis in zip(term.parameters, term.axes):
                size = math.prod(shapes_of[parameter]) * is_float(parameter)
                if axis is None:
                    self._whole[-1:] = _joined(self._whole[-1], slice(width, width + size))
                width += size
        # Each rank's part begins in a cache line of its own.
        stride = -(-width // _LINE) * _LINE
        n_directions = width - len(self.terms)
        size = n_unknown + sum(map(math.prod, shapes)) + n_directions
        n_ranks = len(self.layout.ranks())
        memory = Segments().create(8 * (n_ranks * stride + size))
        self._parts = list(memory.array("float64", (n_ranks, stride))[:, :width])
        self._values = memory.array("float64", (size,), 8 * n_ranks * stride)
        self._values[: values.size] = values
        begin = n_unknown

        def placed(parameter):
            nonlocal begin
            end = begin + math.prod(shapes_of[parameter])
            own = self._values[begin:end].reshape(shapes_of[parameter])
            begin = end
            return own

        parameters = [[placed(each) for each in term.parameters] for term in self.terms]
        directions = [[placed(each) for each in floats(term)] for term in self.terms]
        return list(zip(parameters, directions))

    def _runs_of(self, rank, kind, functions, given, data, arranged):
        """Yield the evaluations of a rank's rows; `arranged` keeps arrays for other kinds."""
        for term, function, (parameters, directions), (length, arrays), begin in zip(
            self.terms, functions, given, data, self._begins
        ):
            for parameter, value, axis in zip(term.parameters, parameters, term.axes):
                _check_rows(term, parameter, value, axis, length)
            axes_of = dict(zip(term.parameters, term.axes))
            width = sum(v.size for v, axis in zip(parameters, term.axes) if axis is None)
            inputs = [*zip(term.parameters, parameters)]
            if kind == "products":
                inputs += zip(floats(term), directions)
            first, last = share(length, self.layout.n_ranks, self.layout.first() + rank)
            before = _rows_before(self.layout, self.layout.machine, length)
            n_blocks = number_of_blocks(last - first, term.rows, arrays, width)
            for block in range(n_blocks):
                begins, ends = (first + each for each in share(last - first, n_blocks, block))
                chosen, there = slice(begins, ends), slice(begins - before, ends - before)
                arguments, copies = [], []
                for parameter, value in inputs:
                    own = along(value, axes_of[parameter], chosen)
                    arguments.append(own_value(own, parameter, copies))
                for rows, array in zip(term.rows, arrays):
                    key = rows, chosen.start, chosen.stop
                    if key not in arranged:
                        arranged[key] = rows.arranged(along(array, rows.axis, there))
                    arguments.append(arranged[key])
                sizes = [] if kind == "value" else [*zip(term.parameters, parameters)]
                outs = self._outs_of(rank, begin, sizes, axes_of, chosen, block > 0)
                yield TermEvaluation(function, arguments, copies, outs, n_blocks == 1)

    def _outs_of(self, rank, start, parameters, axes_of, chosen, adds):
        """Return the places for the result of a `TermEvaluation`, in as few pieces as possible."""
        outs, begin, at = [], start, start + 1
        for parameter, value in parameters:
            if not is_float(parameter):
                continue
            end, axis = at + value.size, axes_of[parameter]
            if axis is not None:
                outs.append((self._parts[rank][begin:at], adds))
                # These are gradients for this rank's rows, to which no other rank writes.
                of_all = self._parts[0][at:end].reshape(value.shape)
                outs.append((along(of_all, axis, chosen), False))
                begin = end
            at = end
        return [*outs, (self._parts[rank][begin:at], adds)]

    def _start_session(self):
        check_sharing()
        with interrupts_held():
            take_standard_streams()
            n_ranks = len(self.layout.ranks())
            gate = make_gate(n_ranks, 0)
            gate.first_rank, gate.host = self.layout.first(), self.layout.hosts[self.layout.machine]
            self._session = Session(["cpu"] * n_ranks, 1, 0, False, gate=gate)
        try:
            self._session.begin()
        except BaseException:
            self._stop()
            raise

    def _stop(self):
        session = self._session
        self._forget()
        if session is not None:
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


def _rows_before(layout, machine, length):
    """Return how many of `length` rows the machines before one have."""
    return share(length, layout.n_ranks, layout.first(machine))[0]


def _joined(one, other):
    return [slice(one.start, other.stop)] if one.stop == other.start else [one, other]


def _check_rows(term, parameter, value, axis, length):
    if axis is not None and value.shape[axis] != length:
        raise ValueError(
            f"The data of {term.name!r} have {length} rows, but {parameter.name!r} has "
            f"{value.shape[axis]}: one for each row of the data that the model was made with."
        )


def _restored(number, terms, layout, check_bounds, is_closed=False):
    """Return the evaluator of that number, made anew in a process that lacks it."""
    evaluator = _evaluators.get(number)
    if evaluator is None:
        evaluator = Evaluator.__new__(Evaluator)
        evaluator.terms, evaluator.layout, evaluator.check_bounds = terms, layout, check_bounds
        evaluator._of_machines = None
        evaluator._open(number)
        evaluator.is_closed = is_closed
    return evaluator


@recurses_deep
def _pickled(content):
    return cloudpickle.dumps(content, pickle.HIGHEST_PROTOCOL)


@recurses_deep
def _unpickled(data):
    return pickle.loads(data)


def _leave_in_child():
    for each in list(_evaluators.values()):
        each.leave_in_child()


def _mark_as_used():
    for each in list(_evaluators.values()):
        each.is_used = True


def _close_all():
    for each in list(_evaluators.values()):
        each.close()
    # nutpie's threads end some milliseconds after their sampler, and crash if Python ends before.
    end = time.monotonic() + 1
    while any(os.path.exists(f"/proc/self/task/{each}") for each in _failed_threads):
        if time.monotonic() > end:
            break
        time.sleep(0.01)


os.register_at_fork(after_in_child=_leave_in_child, after_in_parent=_mark_as_used)
atexit.register(_close_all)  # of blocks that are never left
