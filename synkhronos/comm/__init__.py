"""Communication between ranks: the interfaces that each transport implements.

    start ══▶ every rank runs the command ══▶ finish          Gate
              ├─ fetch(reference, rows)                       Memory     arrays in a command
              ├─ broadcast, reduce, all_reduce, all_gather    Variables  values of shared variables
              ├─ exchange(arrays)                             Arrays     reductions in a function
              └─ deposit(parts) ──▶ collect                   Outputs    outputs of a function

===========  =====================  ==========================================================
transport    ranks                  what it does
===========  =====================  ==========================================================
``single``   one                    everything, with no other process
``shared``   of one machine         everything, in shared memory; arrays on devices are copied there
``nccl``     each on its own GPU    reduces arrays on the devices, if all ranks have them with the
                                    same shape and dtype; for all else it uses another transport
``mpi``      of several machines    everything: in shared memory within each machine, through MPI
                                    between them
===========  =====================  ==========================================================

Every rank calls the same methods in the same order, unless a method says otherwise.
`synkhronos.comm.transports` chooses the transport.
"""

from abc import ABC, abstractmethod
from typing import (
    Any,
    Callable,
    Dict,
    Hashable,
    Iterable,
    List,
    Literal,
    Optional,
    Protocol,
    Sequence,
    Tuple,
    Union,
)

import numpy as np

from synkhronos._arithmetic import reduction
from synkhronos._machine.interrupts import raised_by_handler
from synkhronos.comm import reports
from synkhronos.errors import SessionError, WorkerDied

Keys = Tuple[int, ...]  # of shared variables
Rows = Union[range, np.ndarray]
# The position of the first variable whose shapes differ between ranks, and its shape on each.
Mismatch = Tuple[int, List[Tuple[int, ...]]]


class Aborted(Exception):
    """Another rank raised: leave the call and go to the finish barrier."""


class Gate(ABC):
    """The start and finish barriers of calls, and meetings of all ranks inside of a call.

    The master uses `call`, or `start` and `finish`; a worker uses `become_worker` once, and then
    `next_command` and `worker_finish` in turns. All ranks use `abort`, `meet`, `agree` and
    `report_rows` in a call.

    Attributes
    ----------
    n_ranks : int
    master_rank : int
    rank : int
        The rank of this process.
    on_answer : callable
        Takes each answer of a worker: ``on_answer(rank, answer)``. Set by the master.
    errors : dict
        Rank -> report on the error that it raised in the last call, until it is raised here.
    recorder : Recorder or None
        Records how long barriers and meetings take, while a profile is on.
    """

    n_ranks: int
    master_rank: int
    rank: int
    on_answer: Callable[[int, Any], None]
    errors: Dict[int, Dict[str, str]]
    recorder: Any

    def __init__(self, n_ranks: int, master_rank: int):
        self.n_ranks, self.master_rank = n_ranks, master_rank
        self.rank = master_rank
        self.on_answer = lambda rank, answer: None
        self.recorder = None
        self.errors = {}

    def call(self, command: Any) -> "Crossing":
        """Return a context for one call: on entry the workers begin to run `command`.

        The master runs its part inside of the context. The exit is the finish barrier, also if
        the master raises; it raises the errors of all ranks as one WorkerError.
        """
        return Crossing(self, command)

    @abstractmethod
    def start(self, command: Any) -> None:
        """Pass the start barrier: the workers begin to run `command`.

        Raises
        ------
        WorkerDied
            If a worker is gone; then no rank has begun.
        """

    @abstractmethod
    def finish(self) -> None:
        """Wait until every worker has reached the finish barrier; collect answers and errors."""

    def drain(self) -> None:
        """Abort a call that the master left early, and wait until the workers have ended it."""
        self.abort()
        _finish_recorded(self)

    @property
    def ranks_here(self) -> range:
        """The ranks of this machine, whose processes the master starts."""
        return range(self.n_ranks)

    def host_of(self, rank: int) -> Optional[str]:
        """Return the name of the machine that a rank is on; None if that is this process's."""
        return None

    def dismiss(self) -> None:  # noqa: B027 - on one machine there is nothing to do
        """Tell the other machines, if there are any, that the session is over."""

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether the workers may still be in a call."""

    @abstractmethod
    def check_alive(self, milliseconds: int = 0) -> None:
        """Raise WorkerDied if a worker is gone; on workers, do nothing."""

    def raise_errors(self, own: Optional[BaseException] = None) -> None:
        """Raise the errors of all ranks as one WorkerError; `own` is the master's error."""
        errors, self.errors = self.errors, {}
        # A death comes first: other ranks may have failed because a dead rank's memory has gone.
        self.check_alive()
        if own is not None:
            errors[self.master_rank] = reports.report_on(own)
        if not errors:
            raise SessionError("A call was aborted, but no rank said why.")
        raise reports.worker_error(errors, self.n_ranks) from (
            own if min(errors) == self.master_rank else reports.remote_cause(errors)
        )

    @property
    @abstractmethod
    def sequence(self) -> int:
        """The number of the last call that was started."""

    @abstractmethod
    def abort(self) -> None:
        """Tell every rank to leave the call that is under way."""

    @abstractmethod
    def meet(self) -> None:
        """Wait inside a call until every rank has come to this meeting: its n-th of the call.

        Raises
        ------
        Aborted
            If a rank has raised, or the master has left the call.
        SessionError
            If a rank has ended its part of the call without coming to this meeting.
        """

    @abstractmethod
    def agree(self, ballot: int) -> bool:
        """Meet, and return whether the ballots of all ranks are the same."""

    # Whether the master can post the bounds of a call's rows, so that commands need not have them.
    posts_bounds = False

    def post_bounds(self, begin: int, end: int) -> None:
        """Tell all ranks, before the next call, which rows it selects: the master does."""
        raise NotImplementedError

    def bounds(self) -> Tuple[int, int]:
        """Return, in a call, the bounds that the master has posted."""
        raise NotImplementedError

    @abstractmethod
    def report_rows(self, rows: int) -> None:
        """Publish the number of rows that this rank computed from; -1 if it did not run."""

    @abstractmethod
    def rows(self) -> List[int]:
        """Return the numbers that the ranks reported in the last call, in rank order."""

    @abstractmethod
    def watch(self, rank: int, process: Any) -> None:
        """End every wait of the master when this worker's process ends.

        The process must keep its sentinel open until the gate is used no more.
        """

    @property
    @abstractmethod
    def descriptors(self) -> List[int]:
        """The descriptors that a worker needs, of those that its master had open at the fork."""

    @abstractmethod
    def become_worker(self, rank: int) -> None:
        """Take the place of `rank`, in its own process, before the first command."""

    @abstractmethod
    def next_command(self) -> Any:
        """Wait at the start barrier; return the next command.

        The worker reports an error of this method like one of a command.
        """

    @abstractmethod
    def worker_finish(self, reply: Any = None, error: Optional[BaseException] = None) -> None:
        """Arrive at the finish barrier, with an answer for the master or an exception."""

    @abstractmethod
    def close_in_child(self) -> None:
        """Close what keeps workers alive, in a process that the user forked from the master."""

    @abstractmethod
    def close(self) -> None:
        """Close every descriptor; it ends the workers that are left."""


class Crossing:
    """One call from the start barrier to the finish barrier, as a context manager."""

    __slots__ = ("_command", "_gate")

    def __init__(self, gate: Gate, command: Any):
        self._gate, self._command = gate, command

    def __enter__(self) -> None:
        gate = self._gate
        recorder = gate.recorder
        if recorder is None:
            gate.start(self._command)
        else:
            with recorder.span("start"):
                gate.start(self._command)

    def __exit__(self, kind: Any, error: Optional[BaseException], trace: Any) -> Literal[False]:
        gate = self._gate
        if error is None:
            if gate.recorder is None:
                gate.finish()
            else:
                _finish_recorded(gate)
            if gate.errors:
                gate.raise_errors()
            return False
        gate.abort()
        if not isinstance(error, Exception):
            return False  # Ctrl-C: leave at once; the next start waits for the workers
        if isinstance(error, WorkerDied):
            return False  # a dead worker never reaches the finish barrier
        own = raised_by_handler(error)
        if own is not None:  # as after a Ctrl-C
            raise own from own.__cause__
        _finish_recorded(gate)
        gate.raise_errors(None if isinstance(error, Aborted) else error)
        return False


def _finish_recorded(gate: Gate) -> None:
    recorder = gate.recorder  # which close() in another thread may take away
    if recorder is None:
        gate.finish()
    else:
        with recorder.span("finish"):
            gate.finish()


class Reference(Protocol):
    """Stands for an array in messages: any rank can fetch the array with it, or some rows.

    It need not keep the memory alive: the rank that has made the block does. Two references are
    equal only if they stand for the same memory, dtype and shape.
    """

    @property
    def shape(self) -> Tuple[int, ...]:
        """The shape of the array."""

    @property
    def dtype(self) -> Any:
        """The dtype of the array, or its name."""


class Block(Protocol):
    """A piece of memory that this rank has made, and that all ranks can read and write.

    The memory is freed when the block and its views have gone on the rank that has made it. Other
    ranks must not use their views from then on: see `Memory.forget`.
    """

    def array(self, dtype: Any, shape: Sequence[int], offset: int = 0) -> np.ndarray:
        """Return a view, which keeps the memory alive for as long as it exists."""

    def reference(self, dtype: Any, shape: Sequence[int], offset: int = 0) -> Reference:
        """Return the reference that stands for ``array(dtype, shape, offset)`` in messages."""


class Memory(ABC):
    """The memory of arrays that commands refer to: the master makes them, all ranks fetch them."""

    # Whether `fetch` returns views, so that it costs nothing to fetch more than is needed.
    is_near = True
    lent: Optional[Block] = None  # a block of this rank that the master may fetch from

    @abstractmethod
    def create(self, nbytes: int) -> Block:
        """Make a zero-filled block.

        Raises
        ------
        SharedMemoryFull
            If the machine has no room for it.
        """

    def wrap(self, data: bytes) -> Tuple[Block, Reference]:
        """Make a block that holds these bytes; return it, and a reference to the bytes.

        The caller keeps the block until all ranks have fetched the bytes.
        """
        block = self.create(len(data))
        block.array(np.uint8, (len(data),))[...] = np.frombuffer(data, np.uint8)
        return block, block.reference(np.uint8, (len(data),))

    @abstractmethod
    def fetch(
        self,
        reference: Reference,
        rows: Optional[Rows] = None,
        buffer: Optional[np.ndarray] = None,
        axis: int = 0,
    ) -> np.ndarray:
        """Return the array that a reference stands for, or some of its rows, along an axis.

        It is a view where ranks share memory, except for rows in the order of indices: these are
        copied, into `buffer` if there is one. A view is valid until the end of the command, or
        for as long as the master keeps the array.
        """

    def fetch_from(self, rank: int, reference: Reference) -> np.ndarray:
        """Return, on the master, a copy of an array that a rank has made, as it is now."""
        return self.fetch(reference).copy()

    @abstractmethod
    def forget(self, references: Iterable[Hashable]) -> None:
        """Drop this rank's access to arrays that the master has released, so that they can go."""

    @abstractmethod
    def holds(self, array: np.ndarray) -> bool:
        """Return whether an array is a view of memory that other ranks can access, too."""

    @abstractmethod
    def mapped_by(self, pid: int) -> Optional[Dict[Hashable, int]]:
        """Return the bytes of each block that a process on this machine has mapped.

        None if the system does not show them.
        """


class Variables(ABC):
    """The values of shared variables, which are named by their keys.

    A method that needs equal shapes on all ranks returns None; if shapes differ, it changes no
    value and returns a Mismatch.
    """

    @abstractmethod
    def expose(self, keys: Keys) -> None:
        """Put this rank's values where the master can read them after the finish barrier."""

    @abstractmethod
    def values(self, key: int) -> List[np.ndarray]:
        """Return, on the master, the values of a variable that all ranks have exposed: views.

        They are valid until the next command, which may replace or move the values.
        """

    def values_of(self, keys: Keys) -> List[List[np.ndarray]]:
        """Return what `values` returns, for each variable."""
        return [self.values(key) for key in keys]

    @abstractmethod
    def value_of(self, rank: int, key: int) -> np.ndarray:
        """Return, on the master, the value that one rank has exposed: a view, see `values`."""

    @abstractmethod
    def make_room(self, shapes: Dict[int, Tuple[int, ...]]) -> None:
        """Make memory, in few blocks, for values of these shapes, which are assigned next."""

    @abstractmethod
    def assign(self, key: int, array: np.ndarray, rows: Optional[Rows] = None) -> None:
        """Copy an array, or some of its rows, into this rank's variable."""

    @abstractmethod
    def broadcast(self, keys: Keys, root: int) -> None:
        """Replace each variable, on all ranks, with the value on rank `root`."""

    @abstractmethod
    def reduce(self, keys: Keys, op: str, root: int) -> Optional[Mismatch]:
        """Replace each variable of rank `root` with the reduction over all ranks."""

    @abstractmethod
    def all_reduce(self, keys: Keys, op: str) -> Optional[Mismatch]:
        """Replace each variable, on all ranks, with the reduction over all ranks."""

    def are_little(self, keys: Keys) -> bool:
        """Return, on the master, whether `all_reduce_exposed` is faster for these variables."""
        return False

    def all_reduce_exposed(self, keys: Keys, op: str) -> Optional[Mismatch]:
        """Do on the master what `all_reduce` does, after all ranks have exposed the values."""
        raise NotImplementedError

    @abstractmethod
    def reduce_to_new(self, key: int, op: str) -> Union[np.ndarray, Mismatch]:
        """Return, on the master, the reduction of the values that all ranks have exposed."""

    @abstractmethod
    def all_gather(self, keys: Keys) -> Optional[Mismatch]:
        """Replace each variable, on all ranks, with the values of all ranks joined on axis 0."""

    @abstractmethod
    def forget(self, keys: Keys) -> None:
        """Drop the memory and the views that belong to these variables."""

    @abstractmethod
    def close(self) -> None:
        """Drop all memory and views; the variables that are left keep their values."""


class Outputs(ABC):
    """The way of functions' outputs from the workers to the master.

    Attributes
    ----------
    combine : callable
        Combines what `collect` returns for one output of all ranks, as `reduction.combine` does.
    """

    combine = staticmethod(reduction.combine)

    def reduces(self, dtype: str, ndim: int, mode: Optional[str]) -> bool:
        """Return whether `reduce` can take outputs of this kind, so that they stay on devices."""
        return False

    def reduce(
        self, outputs: Optional[List[Any]], modes: Sequence[Optional[str]]
    ) -> Dict[int, Optional[np.ndarray]]:
        """Reduce over the ranks those outputs that can stay on their devices for it.

        Parameters
        ----------
        outputs : list of arrays, or None on a rank that has not run
        modes : list of str or None

        Returns
        -------
        dict
            Position -> the reduced array on the master, None on workers. The master combines
            the outputs that are not in it.
        """
        return {}

    @abstractmethod
    def deposit(self, key: int, parts: Sequence[np.ndarray]) -> Any:
        """Copy a worker's parts of the outputs of function `key` to where the master reads them.

        Returns the answer that the master must `hear` before it can `collect` them, or None.
        """

    @abstractmethod
    def hear(self, rank: int, answer: Any) -> bool:
        """Take a worker's answer, on the master; return whether it came from `deposit`."""

    @abstractmethod
    def collect(self, key: int, rank: int) -> Sequence[np.ndarray]:
        """Return the parts that `rank` deposited in the last call of function `key`.

        They are views, valid until the next call: that overwrites them.
        """

    @abstractmethod
    def forget(self, key: int) -> None:
        """Drop the memory and the views that belong to function `key`."""

    @abstractmethod
    def close(self) -> None:
        """Drop all memory and views."""


class Arrays(ABC):
    """Reductions over the ranks inside of a function, of arrays that every rank computes there."""

    @abstractmethod
    def exchange(
        self,
        arrays: List[Any],
        ops: Tuple[str, ...],
        weights: Tuple[int, ...],
        targets: List[Any],
    ) -> List[Any]:
        """Reduce arrays that every rank has computed, into arrays of its own.

        Parameters
        ----------
        arrays : list of numpy.ndarray or pygpu.gpuarray.GpuArray
            Contiguous or not.
        ops : tuple of str
        weights : tuple of int
            The number of rows that each rank computed from. The arrays of a rank without rows
            don't count.
        targets : list of numpy.ndarray, pygpu.gpuarray.GpuArray or None
            Where the results go. A target may be the array itself; None stands for any array.

        Returns
        -------
        list of numpy.ndarray or pygpu.gpuarray.GpuArray
            The targets; in place of None, arrays that are valid until the next exchange, which
            may use their memory again.

        Raises
        ------
        ValueError
            On every rank, if shapes differ.
        """

    def begin(  # noqa: B027 - a transport need not begin before the end
        self, bucket: int, arrays: List[Any], ops: Tuple[str, ...], weights: Tuple[int, ...]
    ) -> None:
        """Begin to reduce a bucket: arrays that the function needs reduced later, at `end`.

        The arrays may not be written to until then.

        Parameters
        ----------
        bucket : int
            Buckets of a function are numbered from 0, in the order in which all ranks begin them.
        arrays, ops, weights
            See `exchange`.
        """

    def end(
        self,
        bucket: int,
        arrays: List[Any],
        ops: Tuple[str, ...],
        weights: Tuple[int, ...],
        targets: List[Any],
    ) -> List[Any]:
        """Return the reduced arrays of a bucket that was begun with the same ones; see `exchange`.

        In place of a target None, an array is valid until the next `begin` of the bucket. Other
        ranks may have the same array, so the function must not write to it.
        """
        results = self.exchange(arrays, ops, weights, targets)
        return [
            result.copy() if target is None else result for result, target in zip(results, targets)
        ]

    def end_all(self) -> None:  # noqa: B027 - as for `begin`
        """Wait, when the function has run, for the buckets that it has begun and not ended."""

    def landing_place(
        self,
        position: int,
        shape: Tuple[int, ...],
        dtype: np.dtype,
        bucket: Optional[int] = None,
    ) -> Optional[np.ndarray]:
        """Return memory for the array at a position of the next exchange, or bucket, or None.

        A function that computes the array there saves a copy. The memory is valid until that
        exchange has ended.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Drop all views."""


class Communicator:
    """One rank's end of a transport.

    Attributes
    ----------
    memory : Memory
    variables : Variables
    outputs : Outputs
    arrays : Arrays
    base : Communicator
        The transport that this one uses for what it does not do itself; a transport that does
        everything is its own base.
    """

    memory: Memory
    variables: Variables
    outputs: Outputs
    arrays: Arrays
    base: "Communicator"

    def __init__(
        self,
        memory: Memory,
        variables: Variables,
        outputs: Outputs,
        arrays: Arrays,
        base: Optional["Communicator"] = None,
    ):
        self.memory, self.variables = memory, variables
        self.outputs, self.arrays = outputs, arrays
        self.base = self if base is None else base

    def introduction(self) -> Optional[bytes]:
        """Return, on the master, the bytes that all ranks need to `join`, or None."""
        return None

    def join(self, introduction: bytes) -> None:
        """Begin to use this transport; return when all ranks have joined."""

    def leave(self) -> None:
        """Use the base from now on, because a rank could not join."""

    def abort(self) -> None:
        """End, on the master, what its device still waits for from ranks that are gone."""

    def forget(self, functions: Keys, variables: Keys) -> None:
        """Drop the memory and the views of functions and shared variables that are no more."""
        for key in functions:
            self.outputs.forget(key)
        if variables:
            self.variables.forget(variables)

    def close(self) -> None:
        """Drop all memory and views; the variables that are left keep their values."""
        self.outputs.close()
        self.arrays.close()
        self.variables.close()
