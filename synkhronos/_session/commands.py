"""Commands: frozen messages from the master to the ranks, each with a method `run`.

Commands carry references to memory, never data. The master keeps that memory until the command has
ended on all ranks. All ranks run each command, the master too. If `run` returns something but None
on a worker, it is sent to the master as the worker's answer.
"""

import gc
import hashlib
import pickle
import signal
import weakref
from dataclasses import dataclass
from typing import Hashable, Optional, Tuple

import numpy as np

from synkhronos import _host
from synkhronos._arithmetic import partition
from synkhronos._arithmetic.blocks import with_one_nan
from synkhronos._session.replica import Replica, Selection, unpack
from synkhronos.comm import Reference

_COMMANDS = 64  # so many commands of collectives are kept


@dataclass(frozen=True)
class Ready:
    """Open the devices: a rank that reaches the finish barrier has started."""

    def run(self, worker):
        return worker.bind()


@dataclass(frozen=True)
class Join:
    """Connect the devices of the ranks, by an id of their group; None if one could not join."""

    introduction: Optional[bytes]

    def run(self, worker):
        worker.comm.devices.join(self.introduction)


@dataclass(frozen=True)
class LoadFunctions:
    """Load new functions, and their shared variables that the workers lack."""

    pickled: Reference
    portable: Optional[Reference] = None  # for ranks on another kind of device than the master's

    def run(self, worker):
        if worker.is_master:  # it has them already
            return
        data = worker.fetch(self.pickled if worker.is_like_master else self.portable).tobytes()
        # `data` is a copy: the master frees the memory after this command.
        worker.comm.memory.forget([ref for ref in (self.pickled, self.portable) if ref])
        functions, new = _host.load(data, worker.variables)
        for key in new:
            _host.spread_random_state(worker.variables[key], worker.rank)
        for (key, variant), (function, description) in functions.items():
            replica = worker.replicas.setdefault(key, Replica(key, description))
            replica.variants[variant] = function


@dataclass(frozen=True)
class Lengths:
    """Ask each rank for the lengths, on axis 0, of a function's sliceable shared variables."""

    function: int

    def run(self, worker):
        sliceables = worker.replicas[self.function].description.sliceables
        return [len(_host.peek(variable)) for variable in sliceables]


@dataclass(frozen=True)
class _OfVariables:
    """A command on shared variables, by their keys."""

    keys: Tuple[int, ...]


class _Collective(_OfVariables):
    """A command on the values of shared variables on all ranks."""

    # For `Session.run_collective`: whether all ranks have the same values after it. (Reductions to
    # one rank, and commands that set nothing, don't go there.)
    leaves_equal = True
    ends_on_master = False  # whether the master calls its `end` after the finish barrier

    def run(self, worker):
        """Take part in the collective; return the answer for the master."""
        recorder = worker.recorder
        if recorder is None:
            return self._work(worker)
        with recorder.span("reduce") as span:
            answer = self._work(worker)
            if self._concerns(worker):
                span.moved(*[_host.peek(worker.variables[key]) for key in self.keys])
            return answer

    def _concerns(self, worker):
        return True


@dataclass(frozen=True)
class Broadcast(_Collective):
    """Replace shared variables, on all ranks, with the values of one rank."""

    root: int
    between_devices: bool = True  # else through the host's memory, also in the commands below

    def _work(self, worker):
        worker.comm.variables.broadcast(self.keys, self.root, self.between_devices)


@dataclass(frozen=True)
class Reduce(_Collective):
    """Reduce shared variables over the ranks, on all or to one; answer if shapes differ."""

    op: str
    root: Optional[int]  # None for all
    between_devices: bool = True

    def _work(self, worker):
        unequal = worker.comm.variables.reduce(self.keys, self.op, self.root, self.between_devices)
        return unequal if worker.is_master else None


@dataclass(frozen=True)
class AllReduceLittle(_Collective):
    """Reduce little variables on the master, when all ranks have exposed their values."""

    op: str
    ends_on_master = True

    def _work(self, worker):
        worker.comm.variables.expose(self.keys)

    def end(self, worker):
        """Write the reduction to all ranks; return the answer of `Reduce`."""
        variables, recorder = worker.comm.variables, worker.recorder
        if recorder is None:
            return variables.all_reduce_exposed(self.keys, self.op)
        with recorder.span("reduce"):
            return variables.all_reduce_exposed(self.keys, self.op)


@dataclass(frozen=True)
class AllGather(_Collective):
    """Join shared variables along axis 0, on all ranks; answer if shapes differ."""

    between_devices: bool = True

    def _work(self, worker):
        unequal = worker.comm.variables.all_gather(self.keys, self.between_devices)
        return unequal if worker.is_master else None


@dataclass(frozen=True)
class Expose(_Collective):
    """Let the master read the values of shared variables on all ranks, or on one."""

    rank: Optional[int] = None

    def _work(self, worker):
        if self._concerns(worker):
            worker.comm.variables.expose(self.keys)

    def _concerns(self, worker):
        return self.rank in (None, worker.rank)


@dataclass(frozen=True)
class Assign(_OfVariables):
    """Set shared variables of one rank, or scatter values over the ranks."""

    values: Tuple[Reference, ...]
    selections: Tuple[Optional[Selection], ...]  # the rows of each value; None for all
    rank: Optional[int]  # None scatters
    leaves_equal = False
    ends_on_master = False

    def run(self, worker):
        if self.rank not in (None, worker.rank):
            return
        rows_of_values = [self._rows(worker, *each) for each in zip(self.values, self.selections)]
        _make_room(worker, self.keys, self.values, rows_of_values)
        for key, ref, rows in zip(self.keys, self.values, rows_of_values):
            if worker.comm.memory.is_near:
                assign(worker, key, worker.fetch(ref), rows)
            else:
                assign(worker, key, worker.fetch(ref, rows))

    def _rows(self, worker, ref, selection):
        """Return the rows of a value that this rank takes; None for all."""
        rows = None if selection is None else unpack(worker, selection)
        if self.rank is not None:
            return rows
        n_rows = ref.shape[0] if rows is None else len(rows)
        begin, end = partition.share(n_rows, worker.n_ranks, worker.rank)
        return range(begin, end) if rows is None else rows[begin:end]


def assign(worker, key, array, rows=None):
    """Copy an array, or some of its rows (a range or indices), into a shared variable."""
    recorder = worker.recorder
    if recorder is None:
        worker.comm.variables.assign(key, array, rows)
        return
    with recorder.span("reduce") as span:
        worker.comm.variables.assign(key, array, rows)
        if rows is None:
            span.moved(array)
        else:
            span.moved_rows(array, len(rows))


def assign_all(worker, keys, arrays, rows_of_arrays):
    """Copy an array, or some of its rows, into each of several shared variables."""
    arrays = list(arrays)
    _make_room(worker, keys, arrays, rows_of_arrays)
    for key, array, rows in zip(keys, arrays, rows_of_arrays):
        assign(worker, key, array, rows)


def _make_room(worker, keys, values, rows_of_values):
    if len(keys) > 1:
        shapes = [
            value.shape if rows is None else (len(rows), *value.shape[1:])
            for value, rows in zip(values, rows_of_values)
        ]
        worker.comm.variables.make_room(dict(zip(keys, shapes)))


class Shapes(_OfVariables):
    """Ask each rank for the shapes of shared variables."""

    def run(self, worker):
        return [_host.peek(worker.variables[key]).shape for key in self.keys]


class Hashes(_OfVariables):
    """Ask each rank for a hash of each array of shared variables, all NaNs being equal."""

    def run(self, worker):
        hashes = []
        for key in self.keys:
            value = _host.to_host(_host.peek(worker.variables[key]))
            digest = hashlib.blake2b(repr(value.shape).encode(), digest_size=16)
            digest.update(with_one_nan(np.ascontiguousarray(value)).data)
            hashes.append(digest.digest())
        return hashes


@dataclass(frozen=True)
class SetObject(_OfVariables):
    """Set shared variables that hold no arrays, on each rank to objects of its own."""

    pickled: Reference
    rank: Optional[int]  # None for all

    def run(self, worker):
        data = worker.fetch(self.pickled).tobytes()
        if self.rank in (None, worker.rank):
            for key, value in zip(self.keys, pickle.loads(data)):
                _host.replace_object(worker.variables[key], value)
        worker.comm.memory.forget([self.pickled])


class Spread(_OfVariables):
    """Move random states, which are the same on all ranks, to each rank's own stream."""

    def run(self, worker):
        for key in self.keys:
            _host.spread_random_state(worker.variables[key], worker.rank)


@dataclass(frozen=True)
class GetObject:
    """Ask one rank or all for the pickled value of a shared variable that holds no array."""

    key: int
    rank: Optional[int] = None

    def run(self, worker):
        if self.rank in (None, worker.rank):
            return pickle.dumps(_host.peek(worker.variables[self.key]))
        return None


@dataclass(frozen=True)
class SetSigterm:
    """Make workers ignore a SIGTERM, which the script handles, or end by it again."""

    handler: signal.Handlers

    def run(self, worker):
        if not worker.is_master:
            signal.signal(signal.SIGTERM, self.handler)


@dataclass(frozen=True)
class Forget:
    """Drop memory, functions and shared variables that the master has released."""

    references: Tuple[Hashable, ...]
    functions: Tuple[int, ...]
    variables: Tuple[int, ...]

    def run(self, worker):
        for key in self.functions:
            worker.replicas.pop(key, None)
        for replica in worker.replicas.values():
            replica.forget_arrays()
        worker.comm.memory.forget(self.references)
        for key in self.variables:
            worker.variables.pop(key, None)
        worker.comm.forget(self.functions, self.variables)
        if (self.functions or self.variables) and not worker.is_master:
            gc.collect()  # compiled functions are cycles; an idle worker seldom collects by itself


@dataclass(frozen=True)
class Quit:
    """End the workers, because the session is closing."""

    def run(self, worker):
        worker.running = False


class Repeated:
    """The commands of the last collectives: an equal call needs no checks."""

    def __init__(self, storage):
        self._storage = storage
        # (options, length of the list or False for one variable, id of the first variable) ->
        # (weak references to the variables, the storage's version, command)
        self._found = {}

    def find(self, options, shared_vars):
        """Return the command of an earlier equal call, or None.

        `options` has the name of the collective and its other arguments, but `shared_vars`; or it
        is None, for arguments that need checks. A command may be a choice by the size of values:
        other sizes change the version.
        """
        is_list = isinstance(shared_vars, (list, tuple))
        variables = shared_vars if is_list else (shared_vars,)
        if options is None or not variables:
            return None
        known = self._found.get((options, is_list and len(variables), id(variables[0])))
        if known is None:
            return None
        references, version, command = known
        if version != self._storage.version:
            return None
        # Compare each: another variable may have got the id of one that was freed.
        for reference, variable in zip(references, variables):
            if reference() is not variable:
                return None
        return command

    def keep(self, options, shared_vars, command):
        if options is None:
            return
        if len(self._found) >= _COMMANDS:
            self._found.clear()
        is_list = isinstance(shared_vars, (list, tuple))
        variables = shared_vars if is_list else (shared_vars,)
        references = [weakref.ref(variable) for variable in variables]
        name = options, is_list and len(variables), id(variables[0])
        self._found[name] = references, self._storage.version, command
