"""Communication between ranks.

    start ══▶ every rank runs the command ══▶ finish          Gate
              ├─ fetch(reference, rows)                       Memory     arrays in a command
              ├─ broadcast, reduce, all_gather                Variables  values of shared variables
              ├─ exchange(arrays)                             Arrays     reductions in a function
              └─ deposit(parts) ──▶ collect                   Outputs    outputs of a function

A transport has a `Gate` and a `Memory`. `variable_collectives`, `arrays` and `outputs` are
written once, on these two; `variable_memory` says where the values of shared variables are.

===========  =====================  ==========================================================
transport    ranks                  what it is
===========  =====================  ==========================================================
``single``   one                    memory of this process, and nobody to wait for
``shared``   of one machine         memory that all ranks map
``mpi``      of several machines    ``shared`` on each machine, and messages between machines: what
                                    the ranks of a machine share crosses the network once
``nccl``     each on its own GPU    an addition: reduces arrays on the devices, if all ranks have
                                    them with the same shape and dtype
===========  =====================  ==========================================================

Every rank calls the same methods in the same order, unless a method says otherwise.
`synkhronos.comm.transports` chooses the transport.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Callable, Hashable, Iterable, Protocol, Sequence, Union

import numpy as np

from synkhronos._machine.interrupts import raised_by_handler
from synkhronos.comm import reports
from synkhronos.errors import RemoteTraceback, SessionError, WorkerDied

Rows = Union[range, np.ndarray]


class Aborted(Exception):
    """Another rank raised: leave the call and go to the finish barrier."""


class Gate(ABC):
    """The start and finish barriers of calls, and meetings of all ranks inside of a call.

    The master uses `start` and `finish`. All ranks use `abort`, `meet`, `agree` and
    `report_rows` in a call. `shared.gate.SharedGate` shows what a gate of several processes has
    in addition, for workers and their start.
    """

    n_ranks: int
    master_rank: int
    rank: int  # of this process
    sequence: int  # the number of the last call that was started
    on_answer: Callable[[int, Any], None]  # on the master: takes (rank, answer) of workers
    is_in_call: bool  # whether the workers may still be in a call
    errors: dict[int, dict[str, str]]  # rank -> report on its error, until `raise_errors`
    recorder: Any  # a SpanRecorder, which times barriers and meetings for a profile, or None
    # Whether the master can post which rows a call selects, so that the command, without them,
    # stays the same from call to call.
    posts_bounds = False

    def __init__(self, n_ranks: int, master_rank: int):
        self.n_ranks, self.master_rank = n_ranks, master_rank
        self.rank = master_rank
        self.on_answer = lambda rank, answer: None
        self.recorder = None
        self.errors = {}

    def leave(self, error: BaseException) -> None:
        """Leave a call in which the master has raised; raise the errors of all ranks."""
        self.abort()
        if not isinstance(error, Exception):
            return  # Ctrl-C: leave at once; the next start waits for the workers
        if isinstance(error, WorkerDied):
            return  # a dead worker never reaches the finish barrier
        interrupt = raised_by_handler(error)
        if interrupt is not None:
            raise interrupt from interrupt.__cause__
        self.finish_recorded()
        self.raise_errors(None if isinstance(error, Aborted) else error)

    @abstractmethod
    def start(self, command: Any) -> None:
        """Pass the start barrier: the workers begin to run `command`.

        Raises WorkerDied if a worker is gone; then no rank has begun.
        """

    @abstractmethod
    def finish(self) -> None:
        """Wait until every worker has reached the finish barrier; collect answers and errors."""

    def finish_recorded(self) -> None:
        """Wait at the finish barrier; a profile, if one is on, gets the time."""
        recorder = self.recorder  # read once: close() in another thread may set it to None
        if recorder is None:
            self.finish()
        else:
            with recorder.span("finish"):
                self.finish()

    def drain(self) -> None:
        """Abort a call that the master left early, and wait until the workers have ended it."""
        self.abort()
        self.finish_recorded()

    @property
    def ranks_here(self) -> range:
        """The ranks of this machine, whose processes the master starts."""
        return range(self.n_ranks)

    def host_of(self, rank: int) -> str | None:
        """Return the name of the machine that a rank is on; None if that is this process's."""
        return None

    # The empty methods here are for a single rank, which needs none of them.
    def introduce(self, device: str) -> None:  # noqa: B027
        """Tell `synkhronos top` which rank this process is, and on which device."""

    def check_alive(self, milliseconds: int = 0) -> None:  # noqa: B027
        """Raise WorkerDied if a worker has ended, or ends within this time; workers do nothing."""

    def raise_errors(self, own: BaseException | None = None) -> None:
        """Raise the errors of all ranks as one WorkerError; `own` is the master's error."""
        errors, self.errors = self.errors, {}
        # A death comes first: other ranks may have failed because a dead rank's memory has gone.
        self.check_alive()
        if own is not None:
            errors[self.master_rank] = reports.report_on(own)
        if not errors:
            raise SessionError("A call was aborted, but no rank said why.")
        rank = reports.first(errors)
        cause = own if rank == self.master_rank else RemoteTraceback(errors[rank]["traceback"])
        raise reports.worker_error(errors, self.n_ranks) from cause

    @abstractmethod
    def abort(self) -> None:
        """Tell every rank to leave the call that is under way."""

    @abstractmethod
    def meet(self) -> Any:
        """Wait inside a call until all ranks have called `meet` as often in this call.

        Ranks on one machine get the numbers that all have posted: see `Meetings.news`. Raises
        Aborted if a rank has raised, or the master has left the call, and SessionError if a rank
        has ended its part of the call without coming to this meeting.
        """

    @abstractmethod
    def agree(self, vote: int) -> bool:
        """Meet, and return whether the votes of all ranks are the same."""

    def post_bounds(self, begin: int, end: int) -> None:
        """Tell all ranks, on the master, which rows the next call selects."""
        raise NotImplementedError

    def bounds(self) -> tuple[int, int]:
        """Return the first row that the present call selects, and the one after the last."""
        raise NotImplementedError

    @abstractmethod
    def report_rows(self, rows: int) -> None:
        """Publish the number of rows that this rank computed from; -1 if it did not run."""

    @abstractmethod
    def rows(self) -> list[int]:
        """Return the numbers that the ranks reported in the last call, in rank order."""

    def dismiss(self) -> None:  # noqa: B027
        """Tell the other machines, if there are any, that the session is over."""

    def close_in_child(self) -> None:  # noqa: B027
        """Close what keeps workers alive, in a process that the user forked from the master."""

    def close(self) -> None:  # noqa: B027
        """Close every descriptor; it ends the workers that are left."""


class Reference(Protocol):
    """Stands for an array in messages: with it any rank can fetch the array, or some rows.

    It need not keep the memory alive: the rank that made the block does. Two references are equal
    only if they stand for the same memory, dtype and shape.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""

    @property
    def dtype(self) -> Any:
        """The dtype of the array, or its name."""


class Block(Protocol):
    """A piece of memory that this rank has made, and that all ranks can read and write.

    The memory is freed when the rank that made it has no reference to the block or its views any
    more. Other ranks must not use their views after that: see `Memory.forget`.
    """

    def array(self, dtype: Any, shape: Sequence[int], offset: int = 0) -> np.ndarray:
        """Return a view, which keeps the memory alive."""

    def reference(self, dtype: Any, shape: Sequence[int], offset: int = 0) -> Reference:
        """Return the reference that stands for ``array(dtype, shape, offset)`` in messages."""


class Memory(ABC):
    """The memory of arrays that commands refer to: the master makes them, all ranks fetch them."""

    is_near = True  # whether `fetch` returns views: then it costs nothing to fetch whole arrays
    lent: Block | None = None  # a block of this rank that the master may fetch from
    # Returns whether the script has Data that it could free: errors then advise to do so.
    has_data: Callable[[], bool] = staticmethod(lambda: False)

    @abstractmethod
    def create(self, nbytes: int) -> Block:
        """Make a zero-filled block; raise SharedMemoryFull if the machine has no room for it."""

    def wrap(self, data: bytes) -> tuple[Block, Reference]:
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
        rows: Rows | None = None,
        buffer: np.ndarray | None = None,
        axis: int = 0,
    ) -> np.ndarray:
        """Return the array that a reference stands for, or some of its rows, along an axis.

        Where ranks share memory it is a view, unless `rows` are indices: these rows are copied,
        into `buffer` if there is one. A view is valid until the end of the command, or for as
        long as the master keeps the array.
        """

    def fetch_from(self, rank: int, reference: Reference) -> np.ndarray:
        """Return, on the master, a copy of an array that a rank has made, as it is now."""
        return self.fetch(reference).copy()

    def forget(self, references: Iterable[Hashable]) -> None:  # noqa: B027 - there may be none
        """Unmap arrays that the master has released, so that their memory can be freed."""

    def holds(self, array: np.ndarray) -> bool:
        """Return whether an array is a view of memory that other ranks can access, too."""
        return False

    def mapped_by(self, pid: int) -> dict[Hashable, int] | None:
        """Return the bytes of each block that a process here has mapped; None if it is unknown."""
        return {}
