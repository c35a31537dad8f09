"""What each rank records of itself while a profile is on: when each part of a call was.

    StartRecording ──▶ every rank's worker and gate have a Recorder
    a part of a call   with recorder.span("reduce") as span:   where the work is done
                           ...; span.moved(array)
                   ──▶ each rank's own part of one segment, which the master reads when it likes,
                       also when the rank is dead
    StopRecording  ──▶ they have none

Without a profile the recorder is None, and each place asks for no more than that: it keeps the
recorder in a local variable, because close() in another thread may take it away at any time. A rank
that has no room left only counts.
"""

import functools
import struct
import time
from dataclasses import dataclass

from synkhronos.comm import Reference
from synkhronos.profiling.timeline import NUMBERS, SPAN

_ROW = struct.Struct(f"{len(SPAN.names)}q")
clock = time.monotonic_ns


class Recorder:
    """One rank's end.

    Parameters
    ----------
    gate : Gate
        Tells the number of the command, which is written with each span.
    memory : numpy.ndarray
        This rank's rows, shape (1 + spans of a rank, 5), int64, zero: the first counts what was
        dropped.

    Attributes
    ----------
    span : callable
        Takes the name of a part of a call; returns the `Span` to do it in.
    write : callable
        Puts a span into the memory; takes what `SPAN` has.
    """

    def __init__(self, gate, memory):
        self._gate = gate
        self.write = _writer(memory)
        self.span = functools.partial(Span, self.write, gate)

    def mark(self, part: str) -> None:
        """Record that a part of a call begins and ends now."""
        now = clock()
        self.write(NUMBERS[part], now, now, 0, self._gate.sequence)


class Span:
    """A part of a call, from its begin to its end: a context, recorded also when it raises."""

    __slots__ = ("_begin", "_gate", "_nbytes", "_part", "_write")

    def __init__(self, write, gate, part):
        self._write, self._gate, self._part, self._nbytes = write, gate, part, 0
        self._begin = clock()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        end, part = clock(), NUMBERS[self._part]
        # The number at the end: sending a command begins with that of the one before.
        self._write(part, self._begin, end, self._nbytes, self._gate.sequence)

    def moved(self, *arrays) -> None:
        """Add the size of arrays that were copied or reduced."""
        for array in arrays:
            try:
                self._nbytes += array.size * array.dtype.itemsize
            except AttributeError:
                continue  # it is no array, but a random state, or a Data that is read in place

    def moved_rows(self, array, n_rows: int) -> None:
        """Add the size of some rows of an array."""
        self._nbytes += array.size * array.dtype.itemsize // max(len(array), 1) * n_rows


def _writer(memory):
    spans = memoryview(memory).cast("B")
    pack, size_of_row, row = _ROW.pack_into, _ROW.size, 0
    last = len(spans) - size_of_row

    def write(part, begin, end, value, command):
        nonlocal row
        if row < last:
            row += size_of_row
            pack(spans, row, part, begin, end, value, command)
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

    memory: Reference

    def run(self, worker):
        """Begin, on this rank."""
        memory = worker.fetch(self.memory)
        worker.record(Recorder(worker.gate, memory[worker.rank]))


@dataclass(frozen=True)
class StopRecording:
    """Record no more."""

    def run(self, worker):
        """End, on this rank."""
        worker.record(None)
