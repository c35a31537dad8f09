"""The master's side of a profile: it tells all ranks to record, and records the calls.

    begin ──▶ Record(memory) ==> ranks     ... calls ...     end ──▶ Record(None) ==> ranks
                                                             or close() of the session

Between `begin` and `end` a session's `recording` is the Recording, and each call of the session
goes through `Recording.call`.
"""

import contextlib
import math
from logging import DEBUG

import numpy as np

from synkhronos._machine.interrupts import interrupts_held
from synkhronos._machine.log import log
from synkhronos._session.session import SessionState
from synkhronos._wording import one_line, without_folder
from synkhronos.errors import SessionError, SharedMemoryFull, WorkerDied
from synkhronos.profiling import span_recorder
from synkhronos.profiling.span_recorder import Record, TellTime, clock
from synkhronos.profiling.timeline import SPAN, Part

_COMPARISONS = 5  # calls
LONGEST_NAME = 200  # characters, in arrays with a name in each row
_CALL, _RAISED = int(Part.CALL), int(Part.RAISED)


class Recording:
    """The spans of all ranks of a session, `room` of each, recorded from `begin` until `end`.

    It owns the memory that ranks write to, and drops it when none writes any more: at the end, or,
    if a Ctrl-C came while it waited for the ranks, when the next recording begins or the session is
    closed. Until then it stays the session's `recording`.
    """

    def __init__(self, session, room, at_close=None):
        self.session, self._at_close = session, at_close
        self._numbers = {}  # function or collective -> the number of its name
        self.names = []
        self._write_span = None  # the `write` of the master's recorder, while it records
        self._room = room
        self._memory = None
        self._kept = None  # the result of `read` at the end
        self._elsewhere = [None] * session.n_ranks  # references to rows on other machines
        self._fetched = {}  # rank -> rows, of other machines
        self._ahead = [0] * session.n_ranks  # nanoseconds: each rank's clock less the master's
        self.is_on = False  # True from the end of `begin` to the begin of `end`

    def begin(self) -> None:
        """Make all ranks record; raise SessionError while another profile is recorded."""
        session = self.session
        session.require_open()
        with session.lock:
            session.refuse_nesting()
            with session.inside:
                session.drain()
                if session.recording is not None:
                    session.recording._end_interrupted()
                self._begin()

    def _begin(self):
        session = self.session
        shape = session.n_ranks, 1 + self._room, len(SPAN.names)
        try:
            segment = session.comm.memory.create(math.prod(shape) * 8)
        except SharedMemoryFull as error:
            raise SharedMemoryFull(f"A profile of room={self._room:,}: {error}") from error
        # Both or none: `end` and close() must find the memory that ranks may write to.
        with interrupts_held():
            self._memory = segment.array(np.int64, shape)
            session.recording = self
        self._elsewhere = session.ask(Record(segment.reference(np.int64, shape)))
        self._ahead = self._compare_clocks()
        with interrupts_held():
            session.require_open()  # a signal handler may have closed the session
            self._write_span = session.worker.recorder.write
            self.is_on = True

    def _compare_clocks(self):
        """Return by how many nanoseconds each rank's clock is ahead of the master's.

        Of a few calls that ask for the time, the shortest counts: the answer is that of its middle.
        """
        session = self.session
        if not any(self._elsewhere):
            return [0] * session.n_ranks
        calls = []
        for _ in range(_COMPARISONS):
            begin = clock()
            times = session.ask(TellTime())
            calls.append((clock() - begin, begin, times))
        duration, begin, times = min(calls)
        return [
            0 if reference is None else time - begin - duration // 2
            for reference, time in zip(self._elsewhere, times)
        ]

    def _end_interrupted(self):
        """End a recording whose begin or end a Ctrl-C interrupted; refuse to end any other one."""
        if self.is_on:
            raise SessionError(
                "A profile is being recorded already: only one can be. End its with block before; "
                "where SYNKHRONOS_PROFILE asked for it, it ends with close()."
            )
        self.session.run(Record(None))
        self._keep_and_free()

    def call(self, name, key=None) -> "_RecordedCall":
        """Return a context that is recorded as a call; functions of one name differ in their `key`.

        The caller holds the session's lock, so that its wait for another thread is no part of it.
        """
        return _RecordedCall(self._write, name, name if key is None else key)

    def _write(self, part, begin, name, key):
        """Record a call that ends now."""
        # None if the recording has ended: another thread may end it while this thread waits for the
        # lock, and close(), in another thread or in a signal handler, waits for no call.
        end, write = clock(), self._write_span
        if write is None:
            return
        number = self._numbers.get(key)
        if number is None:
            self.names.append(without_folder(name)[:LONGEST_NAME])
            number = self._numbers[key] = len(self.names) - 1
        write(part, begin, end, number, 0)
        if log.isEnabledFor(DEBUG):  # `one_line` would take time in each call
            log.debug("%s took %.3f ms", one_line(self.names[number]), 1e-6 * (end - begin))

    def end(self) -> None:
        """Stop recording on all ranks; the spans can still be read afterwards."""
        session = self.session
        if session.recording is not self:  # checked without the lock, as finalizers call this
            return
        with session.lock:
            if session.recording is not self or not self.is_on:
                return
            session.refuse_nesting()
            self.give_up()
            if session.state is SessionState.OPEN:
                # If a Ctrl-C comes here, workers still write to the memory, so it is kept.
                with session.inside, contextlib.suppress(WorkerDied):
                    session.drain()
                    session.run(Record(None))
            self._keep_and_free()

    def give_up(self) -> None:
        """Stop recording on the master; workers may still write to the memory."""
        with interrupts_held():
            if self.session.recording is self:
                self.is_on, self._write_span = False, None
                self.session.worker.record(None)

    def _keep_and_free(self):
        kept = self.read()  # outside of the block below, as it may wait for other machines
        with interrupts_held():
            self._kept = kept
            self._memory = self.session.recording = None

    def close(self) -> None:
        """End with the session, after its workers have ended."""
        self.leave()
        if self._at_close is not None:
            self._at_close()

    def leave(self) -> None:
        """End in this process alone: it was forked from the master, or there are no workers."""
        self.give_up()
        self._keep_and_free()

    @property
    def is_over(self) -> bool:
        """Whether all spans have been recorded."""
        return self._kept is not None

    def read(self):
        """Return the spans that each rank has written until now, and the number that it dropped."""
        memory = self._memory  # keeps it alive here, also if another thread ends the recording
        if memory is None:
            return self._kept
        of_ranks = [span_recorder.read(self._rows(memory, rank)) for rank in range(len(memory))]
        for (spans, _), ahead in zip(of_ranks, self._ahead):
            spans["begin"] -= ahead
            spans["end"] -= ahead
        return [spans for spans, _ in of_ranks], [dropped for _, dropped in of_ranks]

    def _rows(self, memory, rank):
        reference = self._elsewhere[rank]
        if reference is None:
            return memory[rank]
        session = self.session
        if session.state is SessionState.OPEN:
            with session.lock:  # a call, in another thread, uses the same connection
                # In a signal handler during a call, the rows that were fetched last must do.
                if session.state is SessionState.OPEN and not session.inside.locked():
                    self._fetched[rank] = session.comm.memory.fetch_from(rank, reference)
        return self._fetched.get(rank, np.zeros((1, len(SPAN.names)), np.int64))

    def fetch(self) -> None:
        """Fetch the rows of other machines, before the session is closed."""
        if self._memory is not None and any(self._elsewhere):
            with contextlib.suppress(WorkerDied):
                self.read()


class _RecordedCall:
    """The context manager of one call: record it at its end, also if it raises."""

    __slots__ = ("_begin", "_key", "_name", "_write")

    def __init__(self, write, name, key):
        self._write, self._name, self._key = write, name, key

    def __enter__(self):
        self._begin = clock()

    def __exit__(self, kind, error, trace):
        part = _CALL if kind is None else _RAISED
        self._write(part, self._begin, self._name, self._key)
