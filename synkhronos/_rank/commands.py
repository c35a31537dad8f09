"""What the master tells the ranks: frozen messages, each of which knows how to run itself.

They carry references to shared memory, never data. Every rank runs the same message, the master
too. What `run` returns on a worker is sent to the master as its answer.
"""

import gc
import pickle
from dataclasses import dataclass
from typing import Hashable, Optional, Tuple, Union

from synkhronos import _host
from synkhronos._arithmetic import partition
from synkhronos._rank.replica import Replica, unpack
from synkhronos.comm import Reference

Selection = Union[range, Reference]  # of rows; a reference is to their indices


@dataclass(frozen=True)
class Ready:
    """Take the device: whoever reaches the finish barrier has started up."""

    def run(self, worker):
        """Bind this rank to its device."""
        worker.bind()


@dataclass(frozen=True)
class Join:
    """Begin to use a transport that the ranks must be introduced to."""

    introduction: bytes

    def run(self, worker):
        """Join the other ranks."""
        worker.comm.join(self.introduction)


@dataclass(frozen=True)
class Leave:
    """Use the transport underneath, because a rank could not join."""

    def run(self, worker):
        """Leave the other ranks."""
        worker.comm.leave()


@dataclass(frozen=True)
class LoadFunctions:
    """Take new functions, and the shared variables among theirs that are new."""

    pickled: Reference
    portable: Optional[Reference] = None  # for ranks on another kind of device than the master's

    def run(self, worker):
        """Unpickle them; the master has them already."""
        if worker.is_master:
            return
        data = worker.fetch(self.pickled if worker.is_like_master else self.portable).tobytes()
        worker.comm.memory.forget([ref for ref in (self.pickled, self.portable) if ref])
        functions, new = _host.load(data, worker.variables)
        for key in new:
            _host.spread_random_state(worker.variables[key], worker.rank)
        for (key, variant), (function, description) in functions.items():
            replica = worker.replicas.setdefault(key, Replica(key, description))
            replica.variants[variant] = function


@dataclass(frozen=True)
class RunFunction:
    """Run one function on this rank's rows, and hand over its parts of the outputs."""

    function: int
    inputs: Tuple[Reference, ...]
    kinds: Tuple[int, ...]  # what a rank takes of each input, see `_replica`
    rows: Optional[int]  # None where nothing is scattered
    selection: Optional[Selection]  # the rows of scattered inputs; None for all
    picked: Optional[Tuple[Selection, ...]]  # the rows of sliceable shareds, for each rank
    num_slices: int
    combined: Tuple[int, ...]  # the positions of the outputs that the master combines
    source: int  # the rank whose own result stands where nothing is reduced
    source_of_nothing: int  # the rank that runs though it has no rows; -1 for none
    output_subset: Optional[Tuple[int, ...]] = None
    counts: Optional[Tuple[int, ...]] = None  # rows of each rank, where ranks reduce as they run

    def run(self, worker):
        """Return the new layout of this rank's outputs, where it has changed."""
        return worker.replicas[self.function].run(worker, self)


@dataclass(frozen=True)
class Lengths:
    """Tell how long the sliceable shared variables of a function are on this rank."""

    function: int

    def run(self, worker):
        """Return their lengths along axis 0."""
        sliceables = worker.replicas[self.function].description.sliceables
        return [len(_host.peek(variable)) for variable in sliceables]


def _variables(worker, command):
    comm = worker.comm if command.between_devices else worker.comm.base
    return comm.variables


class _Collective:
    """A command that works on the values of shared variables, `keys`, of all ranks."""

    def run(self, worker):
        """Take part, and return what `_work` does."""
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
    """Give shared variables the value that one rank has, everywhere."""

    keys: Tuple[int, ...]
    root: int
    between_devices: bool = True  # else through the memory of hosts, here and below

    def _work(self, worker):
        """Copy from the root."""
        _variables(worker, self).broadcast(self.keys, self.root)


@dataclass(frozen=True)
class Reduce(_Collective):
    """Reduce shared variables over the ranks: on all of them, or to one."""

    keys: Tuple[int, ...]
    op: str
    root: Optional[int]  # None for all
    between_devices: bool = True

    def _work(self, worker):
        """Return, on the master, what did not fit."""
        variables = _variables(worker, self)
        if self.root is None:
            unequal = variables.all_reduce(self.keys, self.op)
        else:
            unequal = variables.reduce(self.keys, self.op, self.root)
        return unequal if worker.is_master else None


@dataclass(frozen=True)
class AllGather(_Collective):
    """Join the values of shared variables along axis 0, on all ranks."""

    keys: Tuple[int, ...]
    between_devices: bool = True

    def _work(self, worker):
        """Return, on the master, what did not fit."""
        unequal = _variables(worker, self).all_gather(self.keys)
        return unequal if worker.is_master else None


@dataclass(frozen=True)
class Expose(_Collective):
    """Have the master see the values of shared variables, of all ranks or one."""

    keys: Tuple[int, ...]
    rank: Optional[int] = None

    def _work(self, worker):
        """Bring them to where the master can read them."""
        if self._concerns(worker):
            worker.comm.variables.expose(self.keys)

    def _concerns(self, worker):
        return self.rank in (None, worker.rank)


@dataclass(frozen=True)
class Assign:
    """Give shared variables of one rank a value, or those of each rank its share."""

    keys: Tuple[int, ...]
    values: Tuple[Reference, ...]
    selections: Tuple[Optional[Selection], ...]  # the rows of each value; None for all
    rank: Optional[int]  # None scatters

    def run(self, worker):
        """Copy this rank's rows."""
        if self.rank not in (None, worker.rank):
            return
        for key, ref, selection in zip(self.keys, self.values, self.selections):
            array = worker.fetch(ref)
            if selection is not None:
                rows = unpack(worker, selection)
            elif self.rank is None:
                rows = range(len(array))
            else:
                rows = None
            if self.rank is None:
                rows = rows[slice(*partition.share(len(rows), worker.n_ranks, worker.rank))]
            assign(worker, key, array, rows)


def assign(worker, key, array, rows=None):
    """Give a shared variable of this rank a value, or some of its rows: a range or indices."""
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


@dataclass(frozen=True)
class Shapes:
    """Tell the shapes of shared variables on this rank."""

    keys: Tuple[int, ...]

    def run(self, worker):
        """Return them."""
        return [_host.peek(worker.variables[key]).shape for key in self.keys]


@dataclass(frozen=True)
class SetObject:
    """Give shared variables that hold no arrays, such as random states, a value."""

    keys: Tuple[int, ...]
    pickled: Reference
    rank: Optional[int]  # None for all

    def run(self, worker):
        """Unpickle it, for each rank an object of its own."""
        data = worker.fetch(self.pickled).tobytes()
        if self.rank in (None, worker.rank):
            for key, value in zip(self.keys, pickle.loads(data)):
                _host.replace_object(worker.variables[key], value)
        worker.comm.memory.forget([self.pickled])


@dataclass(frozen=True)
class GetObject:
    """Tell what a shared variable that holds no array has, on one rank or all."""

    key: int
    rank: Optional[int] = None

    def run(self, worker):
        """Return it pickled."""
        if self.rank in (None, worker.rank):
            return pickle.dumps(_host.peek(worker.variables[self.key]))
        return None


@dataclass(frozen=True)
class Forget:
    """Let go of what the master has released."""

    references: Tuple[Hashable, ...]
    functions: Tuple[int, ...]
    variables: Tuple[int, ...]

    def run(self, worker):
        """Drop all that is named, and what belongs to it."""
        worker.comm.memory.forget(self.references)
        for key in self.functions:
            worker.replicas.pop(key, None)
        for key in self.variables:
            worker.variables.pop(key, None)
        worker.comm.forget(self.functions, self.variables)
        if (self.functions or self.variables) and not worker.is_master:
            gc.collect()  # compiled functions are cycles, and an idle worker seldom collects


@dataclass(frozen=True)
class Quit:
    """Leave the loop: the session is closing."""

    def run(self, worker):
        """Make this the last command."""
        worker.running = False
