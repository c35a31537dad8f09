"""What each rank records of itself while a profile is on: when each part of a call was.

    StartRecording ──▶ every rank replaces the methods named below by ones that take the time
    spans          ──▶ each rank's own part of one segment, which the master reads when it likes,
                       also when the rank is dead
    StopRecording  ──▶ every rank puts its methods back

Without a profile nothing of this is there. A rank that has no room left only counts.
"""

import contextlib
import struct
import time
from dataclasses import dataclass

from synkhronos import _commands, _moved
from synkhronos._process import interrupts_held
from synkhronos._replica import Replica
from synkhronos._shm import ArrayRef
from synkhronos._timeline import SPAN, Part

_ROW = struct.Struct(f"{len(SPAN.names)}q")
clock = time.monotonic_ns

COLLECTIVES = (
    _commands.Broadcast,
    _commands.Reduce,
    _commands.AllGather,
    _commands.Expose,
)


class Recorder:
    """One rank's end.

    Parameters
    ----------
    worker : Worker
    memory : numpy.ndarray
        Shape (n_ranks, 1 + spans of a rank, 5), int64, zero: the first row counts what was dropped.

    Attributes
    ----------
    write : callable
        Puts a span into the memory; takes what `SPAN` has.
    """

    def __init__(self, worker, memory):
        self._worker = worker
        self.write = _writer(memory[worker.rank])
        self._restore = contextlib.ExitStack()

    def start(self):
        """Replace what the time of is taken."""
        gate, comm = self._worker.gate, self._worker.comm
        for owner, name, part, nbytes in (
            (gate, "meet", Part.MEET, None),
            (comm, "exchange", Part.REDUCE, _moved.exchanged),
            (comm, "reduce_outputs", Part.REDUCE, None),
            (comm, "deposit", Part.REDUCE, _moved.deposited),
            (comm, "reduce_to_new", Part.REDUCE, None),
            (comm, "assign", Part.REDUCE, _moved.assigned),
            (Replica, "_run_rows", Part.COMPUTE, None),
            (Replica, "_arguments", Part.ROWS, None),
            (Replica, "_take", Part.ROWS, _moved.taken),
            *((command, "run", Part.REDUCE, _moved.held) for command in COLLECTIVES),
        ):
            self.time(owner, name, part, nbytes)
        if self._worker.is_master:
            self.replace(gate, "start", self._start)
            self.time(gate, "finish", Part.FINISH)
        else:
            self.replace(gate, "next_command", self._start)
            self.replace(gate, "worker_finish", self._worker_finish)

    def stop(self):
        """Put everything back; what was recorded stays in the memory."""
        self._restore.close()

    def replace(self, owner, name, make):
        """Put ``make(function)`` in the place of a function, until the end."""
        replace(self._restore, owner, name, make)

    def time(self, owner, name, part, nbytes=None):
        """Have a function record a span; ``nbytes(arguments, result)`` tells what it has moved."""
        write, gate, part = self.write, self._worker.gate, int(part)

        def make(function):
            def timed(*arguments):
                begin, moved = clock(), 0
                try:
                    result = function(*arguments)
                    if nbytes is not None:
                        moved = nbytes(arguments, result)
                    return result
                finally:
                    write(part, begin, clock(), moved, gate.sequence)

            return timed

        self.replace(owner, name, make)

    def _start(self, function):
        write, gate, part = self.write, self._worker.gate, int(Part.START)

        def timed(*arguments):
            begin = clock()
            try:
                return function(*arguments)
            finally:
                write(part, begin, clock(), 0, gate.sequence)  # that of the new command

        return timed

    def _worker_finish(self, function):
        write, gate, part = self.write, self._worker.gate, int(Part.FINISH)

        def timed(reply=None, error=None):
            # Before it arrives: after that the master may have begun the next call.
            now = clock()
            write(part, now, now, 0, gate.sequence)
            return function(reply, error)

        return timed


def replace(stack, owner, name, make):
    """Put ``make(function)`` in the place of a function of a class, object or module.

    It is put back when the stack, a `contextlib.ExitStack`, is closed. Ctrl-C must be held.
    """
    function = getattr(owner, name)
    if name in vars(owner):
        stack.callback(setattr, owner, name, function)
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, make(function))


def _writer(memory):
    spans = memoryview(memory).cast("B")
    pack, row, end = _ROW.pack_into, 0, len(spans) - _ROW.size

    def write(*span):
        nonlocal row
        if row < end:
            row += _ROW.size
            pack(spans, row, *span)
        else:
            memory[0, 0] += 1

    return write


def read(memory, rank):
    """Return what a rank has written, dtype SPAN, and how many spans it had no room for."""
    spans = memory[rank, 1:].view(SPAN)[:, 0]
    return spans[spans["part"] > 0], int(memory[rank, 0, 0])


@dataclass(frozen=True)
class StartRecording:
    """Record what each rank does from now on."""

    memory: ArrayRef

    def run(self, worker):
        """Begin, on this rank."""
        stop(worker)  # of a profile whose end was interrupted
        memory = worker.segments.array(self.memory)
        with interrupts_held():  # or what is replaced could not be put back
            worker.recorder = Recorder(worker, memory)
            worker.recorder.start()


@dataclass(frozen=True)
class StopRecording:
    """Record no more."""

    def run(self, worker):
        """End, on this rank."""
        stop(worker)


def stop(worker) -> None:
    """End the recording of one rank, if there is one."""
    with interrupts_held():
        recorder, worker.recorder = worker.recorder, None
        if recorder is not None:
            recorder.stop()
