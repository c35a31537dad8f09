"""The recorder of each rank: while a profile is on, it writes down when each part of a call ran.

    Record(memory) ──▶ every rank's worker and gate have a Recorder
    a part of a call   with recorder.span("reduce") as span:   around the work itself
                           ...; span.moved(array)
                   ──▶ each rank's own rows of one shared array, which the master may read at any
                       time, also after the rank's death
    Record(None)   ──▶ every rank's worker and gate have None

Without a profile the recorder is None, and a part of a call only checks that. It reads the recorder
once, into a local variable, because close() in another thread may replace it with None at any time.
A rank with no room left only counts the spans that it drops.
"""

import functools
import math
import struct
import time
from dataclasses import dataclass
from typing import Optional

import numpy as np

from synkhronos.comm import Reference
from synkhronos.profiling.timeline import NUMBERS, SPAN

_ROW = struct.Struct(f"{len(SPAN.names)}q")
clock = time.monotonic_ns


class SpanRecorder:
    """Writes the spans of one rank; `span(part)` returns a context for a part of a call.

    `memory` has this rank's rows, shape (1 + spans, 5), int64, all zero; the first counts what was
    dropped. A span's command is the gate's `sequence` at its end.
    """

    def __init__(self, gate, memory):
        self._gate = gate
        self.write = _writer(memory)  # takes the fields of SPAN
        self.span = functools.partial(RunningSpan, self.write, gate)

    def mark(self, part: str) -> None:
        """Record that a part of a call begins and ends now."""
        now = clock()
        self.write(NUMBERS[part], now, now, 0, self._gate.sequence)


class RunningSpan:
    """The context of a part of a call; its span is recorded also if the part raises."""

    __slots__ = ("_begin", "_gate", "_nbytes", "_part", "_write")

    def __init__(self, write, gate, part):
        self._write, self._gate, self._part, self._nbytes = write, gate, part, 0
        self._begin = clock()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        end, part = clock(), NUMBERS[self._part]
        # The command's number is read at the end: a span that sends or receives a command begins
        # with the number of the command before.
        self._write(part, self._begin, end, self._nbytes, self._gate.sequence)

    def moved(self, *arrays) -> None:
        """Add the size of arrays that were copied or reduced."""
        for array in arrays:
            try:
                self._nbytes += array.size * array.dtype.itemsize
            except AttributeError:
                continue  # a random state, or a Data that is read in place: not an array

    def moved_rows(self, array, n_rows: int) -> None:
        """Add the size of some rows of an array."""
        self._nbytes += array.size * array.dtype.itemsize // max(len(array), 1) * n_rows


def _writer(memory):
    """Return a function that writes spans, and keeps the memory alive."""
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


def read(rows):
    """Return the spans in a rank's rows, dtype SPAN, and the number that it dropped."""
    spans = rows[1:].view(SPAN)[:, 0]
    # A rank may be writing now: its unused rows are zero.
    return spans[spans["part"] > 0], int(rows[0, 0])


@dataclass(frozen=True)
class Record:
    """Start to record, on every rank; without memory, stop."""

    memory: Optional[Reference]

    def run(self, worker):
        """Give this rank a recorder, which keeps the memory alive until recording stops."""
        if self.memory is None:
            worker.record(None)
            return None
        memory = worker.comm.memory
        if memory.is_near:
            worker.record(SpanRecorder(worker.gate, memory.fetch(self.memory)[worker.rank]))
            return None
        # On another machine than the master's: memory of this rank, from which the master fetches.
        shape = self.memory.shape[1:]
        # It is kept until the next profile, because the master reads it after the end of this one.
        block = memory.lent = memory.create(math.prod(shape) * 8)
        worker.record(SpanRecorder(worker.gate, block.array(np.int64, shape)))
        return block.reference(np.int64, shape)


@dataclass(frozen=True)
class TellTime:
    """Compare the clocks of the ranks."""

    def run(self, worker):
        """Return the time of this rank's clock."""
        return clock()
