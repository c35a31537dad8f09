"""How the ranks meet and exchange arrays: the interfaces, implemented once for each transport.

    start ══▶ every rank runs the command ══▶ finish          Gate
              ├─ fetch(reference, rows)                       Memory     inputs, and what is sent
              ├─ broadcast, reduce, all_reduce, all_gather    Variables  values of shared variables
              ├─ exchange(arrays)                             Arrays     inside of a function
              └─ deposit(parts) ──▶ collect                   Outputs    of a function

===========  =====================  ==========================================================
transport    ranks                  what it does
===========  =====================  ==========================================================
``single``   one                    everything, with no other process
``shared``   of one machine         everything, in shared memory; arrays on devices are copied there
``nccl``     each on its own GPU    arrays that all ranks hold alike stay on the devices; for all
                                    else it uses the transport that it is composed with
===========  =====================  ==========================================================

Every rank calls the same methods in the same order, unless a method says otherwise.
`synkhronos.comm.transports` chooses.
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

    Attributes
    ----------
    n_ranks : int
    master_rank : int
    rank : int
        The rank of this process.
    on_answer : callable
        Takes each answer of a worker: ``on_answer(rank, answer)``. Set by the master.
    recorder : Recorder or None
        Records how long barriers and meetings take, while a profile is on.
    """

    n_ranks: int
    master_rank: int
    rank: int
    on_answer: Callable[[int, Any], None]
    recorder: Any

    def __init__(self, n_ranks: int, master_rank: int):
        self.n_ranks, self.master_rank = n_ranks, master_rank
        self.rank = master_rank
        self.on_answer = lambda rank, answer: None
        self.recorder = None
        self._errors: Dict[int, Dict[str, str]] = {}  # rank -> report on what it raised

    # On the master.

    def call(self, command: Any) -> "Crossing":
        """Return a context in which all ranks run `command`: the only crossing.

        Leaving it is the finish barrier, also when the master raises. Errors of any rank come
        out of it as WorkerError.
        """
        return Crossing(self, command)

    def start(self, command: Any) -> None:
        """Send the workers into `command`.

        Raises
        ------
        WorkerDied
            When a worker is gone; then nothing has been launched.
        """
        recorder = self.recorder
        if recorder is None:
            self._start(command)
        else:
            with recorder.span("start"):
                self._start(command)

    @abstractmethod
    def _start(self, command: Any) -> None: ...

    def finish(self) -> None:
        """Wait until every worker has reached the finish barrier; collect answers and errors."""
        recorder = self.recorder
        if recorder is None:
            self._finish()
        else:
            with recorder.span("finish"):
                self._finish()

    @abstractmethod
    def _finish(self) -> None: ...

    def drain(self) -> None:
        """Wait until the workers are out of a call that the master left early."""
        self.abort()
        self.finish()

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether the workers may still be in a call."""

    @abstractmethod
    def check_alive(self, milliseconds: int = 0) -> None:
        """Raise WorkerDied if a worker is gone; on workers, do nothing."""

    @property
    def has_errors(self) -> bool:
        """Whether a rank raised in the last call, and nothing has been raised for it yet."""
        return bool(self._errors)

    def raise_errors(self, own: Optional[BaseException] = None) -> None:
        """Raise the errors of all ranks as one WorkerError; `own` is the master's."""
        errors, self._errors = self._errors, {}
        self.check_alive()  # the memory of a rank goes with it, so others may have failed by that
        if own is not None:
            errors[self.master_rank] = reports.report_on(own)
        if not errors:
            raise SessionError("A call was aborted, but no rank said why.")
        raise reports.worker_error(errors, self.n_ranks) from (
            own if min(errors) == self.master_rank else reports.remote_cause(errors)
        )

    # On every rank.

    @property
    @abstractmethod
    def sequence(self) -> int:
        """The number of the last call that was started."""

    @abstractmethod
    def abort(self) -> None:
        """Tell every rank to leave the call that is under way."""

    def meet(self) -> None:
        """Wait inside a call until every rank has come to its meeting of the same number.

        Raises
        ------
        Aborted
            When a rank has raised, or the master left.
        SessionError
            When a rank has left the call without coming.
        """
        recorder = self.recorder
        if recorder is None:
            self._meet()
        else:
            with recorder.span("meet"):
                self._meet()

    @abstractmethod
    def _meet(self) -> None: ...

    @abstractmethod
    def agree(self, ballot: int) -> bool:
        """Meet, and return whether the ballots of all ranks are the same."""

    @abstractmethod
    def report_rows(self, rows: int) -> None:
        """Tell from how many rows this rank computed; -1 says that it did not run."""

    @abstractmethod
    def rows_of(self, rank: int) -> int:
        """Return the number that a rank reported in the last call."""

    # On workers.

    @abstractmethod
    def become_worker(self, rank: int) -> None:
        """Take the place of `rank`, in its own process, before the first command."""

    @abstractmethod
    def next_command(self) -> Any:
        """Wait at the start barrier; return the next command.

        Its own errors are reported like those of a command.
        """

    @abstractmethod
    def worker_finish(self, reply: Any = None, error: Optional[BaseException] = None) -> None:
        """Arrive at the finish barrier, with an answer for the master or an exception."""

    # The end.

    @abstractmethod
    def close_in_child(self) -> None:
        """Let go of the gate in a process that the user forked from the master."""

    @abstractmethod
    def close(self) -> None:
        """Close every descriptor; workers that are left die of it."""


class Crossing:
    """One call from the start barrier to the finish barrier, as a context manager."""

    __slots__ = ("_command", "_gate")

    def __init__(self, gate: Gate, command: Any):
        self._gate, self._command = gate, command

    def __enter__(self) -> None:
        self._gate.start(self._command)

    def __exit__(self, kind: Any, error: Optional[BaseException], trace: Any) -> Literal[False]:
        gate = self._gate
        if error is None:
            gate.finish()
            if gate._errors:  # not by its property: this is in every call
                gate.raise_errors()
            return False
        gate.abort()
        if not isinstance(error, Exception):
            return False  # Ctrl-C: out at once; the next start waits for the workers
        if isinstance(error, WorkerDied):
            return False
        gate.finish()
        gate.raise_errors(None if isinstance(error, Aborted) else error)
        return False


class Reference(Protocol):
    """Stands for an array in messages: any rank can fetch the array with it, or some rows.

    Two references are equal only if they stand for the same memory, dtype and shape.
    """

    @property
    def shape(self) -> Tuple[int, ...]:
        """The shape of the array."""

    @property
    def dtype(self) -> Any:
        """The dtype of the array, or its name."""


class Block(Protocol):
    """A piece of memory that this rank has made, and that all ranks can read and write."""

    def array(self, dtype: Any, shape: Sequence[int], offset: int = 0) -> np.ndarray:
        """Return a view. It keeps the memory alive for as long as it lives."""

    def reference(self, dtype: Any, shape: Sequence[int]) -> Reference:
        """Return what stands for ``array(dtype, shape)`` in messages."""


class Memory(ABC):
    """The memory that commands refer to: arrays of the master's, for all ranks to fetch."""

    @abstractmethod
    def create(self, nbytes: int) -> Block:
        """Make a zero-filled block.

        Raises
        ------
        SharedMemoryFull
            When the machine has no room for it.
        """

    def wrap(self, data: bytes) -> Tuple[Block, Reference]:
        """Make a block that holds these bytes; return it, and a reference to the bytes.

        The block must be kept until all ranks have fetched them.
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
    ) -> np.ndarray:
        """Return the array that a reference stands for, or some of its rows.

        It is a view where ranks share memory, but for rows in the order of indices: those are
        copied, into `buffer` if there is one.
        """

    @abstractmethod
    def forget(self, references: Iterable[Hashable]) -> None:
        """Drop what belongs to references that the master has released."""

    @abstractmethod
    def holds(self, array: np.ndarray) -> bool:
        """Return whether an array is a view of memory that other ranks can have, too."""

    @abstractmethod
    def mapped_by(self, pid: int) -> Optional[Dict[Hashable, int]]:
        """Return the bytes of each block that a process on this machine has in use.

        None where the system does not tell.
        """


class Variables(ABC):
    """The values of shared variables, which are named by their keys.

    Verbs that need equal shapes return None, or, with nothing changed, a Mismatch.
    """

    @abstractmethod
    def expose(self, keys: Keys) -> None:
        """Show the master these variables' values of this rank, after the finish barrier."""

    @abstractmethod
    def values(self, key: int) -> List[np.ndarray]:
        """Return, on the master, a variable's exposed value on each rank: views.

        They are valid until the next command.
        """

    @abstractmethod
    def value_of(self, rank: int, key: int) -> np.ndarray:
        """Return, on the master, a variable's value on one rank that has exposed it: a view."""

    @abstractmethod
    def assign(self, key: int, array: np.ndarray, rows: Optional[Rows] = None) -> None:
        """Give this rank's variable a value, or some of its rows."""

    @abstractmethod
    def broadcast(self, keys: Keys, root: int) -> None:
        """Replace each variable, on all ranks, with the value on rank `root`."""

    @abstractmethod
    def reduce(self, keys: Keys, op: str, root: int) -> Optional[Mismatch]:
        """Replace each variable of rank `root` with the reduction over all ranks."""

    @abstractmethod
    def all_reduce(self, keys: Keys, op: str) -> Optional[Mismatch]:
        """Replace each variable, on all ranks, with the reduction over all ranks."""

    @abstractmethod
    def reduce_to_new(self, key: int, op: str) -> Union[np.ndarray, Mismatch]:
        """Return, on the master, the reduction of the values that all ranks have exposed."""

    @abstractmethod
    def all_gather(self, keys: Keys) -> Optional[Mismatch]:
        """Replace each variable, on all ranks, with the values of all joined along axis 0."""

    @abstractmethod
    def forget(self, keys: Keys) -> None:
        """Drop what belongs to these variables."""

    @abstractmethod
    def close(self) -> None:
        """Drop everything; the variables that are left keep their values."""


class Outputs(ABC):
    """The outputs of functions, from the workers to the master."""

    def reduces(self, dtype: str, ndim: int, mode: Optional[str]) -> bool:
        """Return whether outputs of this kind are worth keeping on the device, for `reduce`."""
        return False

    def reduce(
        self, outputs: Optional[List[Any]], modes: Sequence[Optional[str]]
    ) -> Dict[int, Optional[np.ndarray]]:
        """Reduce those outputs over the ranks that can be reduced where they are.

        Parameters
        ----------
        outputs : list of arrays, or None on a rank that has not run
        modes : list of str or None

        Returns
        -------
        dict
            Position -> the reduced array on the master, None on workers. The other outputs are
            left for the master to combine.
        """
        return {}

    @abstractmethod
    def deposit(self, key: int, parts: Sequence[np.ndarray]) -> Any:
        """Hand over a worker's parts of the outputs of function `key`.

        Returns what the master must `hear` before it can `collect` them, or None.
        """

    @abstractmethod
    def hear(self, rank: int, answer: Any) -> bool:
        """Take a worker's answer, on the master; return whether it came from `deposit`."""

    @abstractmethod
    def collect(self, key: int, rank: int) -> Sequence[np.ndarray]:
        """Return the parts that `rank` deposited in the last call: views, valid until the next."""

    @abstractmethod
    def forget(self, key: int) -> None:
        """Drop what belongs to function `key`."""

    @abstractmethod
    def close(self) -> None:
        """Drop everything."""


class Arrays(ABC):
    """Arrays that every rank computes inside of a function, and that the ranks reduce there."""

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
            The number of rows that each rank computed from. A rank without rows only takes part.
        targets : list of numpy.ndarray, pygpu.gpuarray.GpuArray or None
            A target may be its array. None asks for any array, valid until the next exchange.

        Returns
        -------
        list of numpy.ndarray or pygpu.gpuarray.GpuArray
            The targets. In place of None arrays that are valid until the next exchange.

        Raises
        ------
        ValueError
            On every rank, when shapes differ.
        """

    def landing_place(
        self, position: int, shape: Tuple[int, ...], dtype: np.dtype
    ) -> Optional[np.ndarray]:
        """Return an array to compute the one at a position of the next exchange in, or None."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Drop everything."""


class Communicator:
    """One rank's end of a transport.

    Attributes
    ----------
    memory : Memory
    variables : Variables
    outputs : Outputs
    arrays : Arrays
    base : Communicator
        The transport that this one is composed with, which can do everything; itself for a
        transport that stands alone.
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
        """Return, on the master, what the ranks must be told to `join`; None if nothing is."""
        return None

    def join(self, introduction: bytes) -> None:
        """Begin to use this transport; returns when all ranks have joined."""

    def leave(self) -> None:
        """Use the transport underneath from now on, because a rank could not join."""

    def forget(self, functions: Keys, variables: Keys) -> None:
        """Drop what belongs to functions and shared variables that are no more."""
        for key in functions:
            self.outputs.forget(key)
        if variables:
            self.variables.forget(variables)

    def close(self) -> None:
        """Drop everything; the variables that are left keep their values."""
        self.outputs.close()
        self.arrays.close()
        self.variables.close()
