"""The master's side of a profile: has all ranks record, and records the calls themselves.

    begin ──▶ StartRecording ==> ranks     ... calls ...     end, or close() of the session

As long as the session's `recording` is this one, its calls come here: see `Recording.call`.
"""

import contextlib
import math
from logging import DEBUG

import numpy as np

from synkhronos._machine.interrupts import interrupts_held
from synkhronos._machine.log import log
from synkhronos._master.session import State
from synkhronos._wording import one_line, without_folder
from synkhronos.errors import SessionError, SharedMemoryFull, WorkerDied
from synkhronos.profiling import recorder
from synkhronos.profiling.recorder import StartRecording, StopRecording, clock
from synkhronos.profiling.timeline import SPAN, Part

LONGEST_NAME = 200  # characters, in arrays with a name in each row
_CALL, _RAISED = int(Part.CALL), int(Part.RAISED)


class Recording:
    """What the ranks of a session record, from `begin` until `end`.

    Parameters
    ----------
    session : Session
    room : int
        How many spans each rank may write.
    at_close : callable, optional
        Called when the session has been closed.
    """

    def __init__(self, session, room, at_close=None):
        self.session, self._at_close = session, at_close
        self._numbers = {}  # function or collective -> the number of its name
        self.names = []
        self._write_span = None  # on the master, as long as it records
        self._room = room
        self._memory = None
        self._kept = None  # what was read at the end
        self._is_wanted = False  # from the end of `begin` to the begin of `end`

    # The begin. As long as the session's `recording` is this one, workers may write to its memory.
    # After a Ctrl-C in a wait for the ranks the next recording, or close(), takes it back.

    def begin(self) -> None:
        """Have all ranks record."""
        session = self.session
        session.require_open()
        with session.lock:
            session.refuse_nesting()
            with session.inside:
                session.settle()
                if session.recording is not None:
                    session.recording._give_way()
                self._begin()

    def _begin(self):
        session = self.session
        shape = session.n_ranks, 1 + self._room, len(SPAN.names)
        try:
            segment = session.comm.memory.create(math.prod(shape) * 8)
        except SharedMemoryFull as error:
            raise SharedMemoryFull(f"A profile of room={self._room:,}: {error}") from error
        with interrupts_held():
            self._memory = segment.array(np.int64, shape)
            session.recording = self
        session.run(StartRecording(segment.reference(np.int64, shape)))
        with interrupts_held():
            session.require_open()  # a signal handler may have closed it
            self._write_span = session.worker.recorder.write
            self._is_wanted = True

    def _give_way(self):
        """Make room for the next recording, if the end of this one was interrupted; or refuse."""
        if self._is_wanted:
            raise SessionError(
                "A profile is being recorded already: only one can be. End its with block before; "
                "where SYNKHRONOS_PROFILE asked for it, it ends with close()."
            )
        self.session.run(StopRecording())
        self._let_go()

    # Calls. One that another thread began may come to the lock when this recording has ended; and
    # close(), in another thread or in a signal handler, waits for no call.

    def call(self, name, key=None) -> "_Call":
        """Return a context that is recorded as a call of a function or collective.

        To be entered with the session's lock held: what this thread waits for another's call is not
        part of it. Functions of the same name are told apart by their `key`.
        """
        return _Call(self._write, name, name if key is None else key)

    def _write(self, part, begin, name, key):
        """Record a call that ends now."""
        end, write = clock(), self._write_span
        if write is None:
            return
        number = self._numbers.get(key)
        if number is None:
            self.names.append(without_folder(name)[:LONGEST_NAME])
            number = self._numbers[key] = len(self.names) - 1
        write(part, begin, end, number, 0)
        if log.isEnabledFor(DEBUG):  # or names would be looked through in each call
            log.debug("%s took %.3f ms", one_line(self.names[number]), 1e-6 * (end - begin))

    # The end.

    def end(self) -> None:
        """Record no more, on any rank; what was recorded can be read ever after."""
        session = self.session
        if session.recording is not self:  # without the lock: finalizers come here
            return
        with session.lock:
            if session.recording is not self or not self._is_wanted:
                return
            session.refuse_nesting()
            self.give_up()
            if session.state is State.OPEN:
                # If a Ctrl-C comes, the workers go on to write into memory that stays.
                with session.inside, contextlib.suppress(WorkerDied):
                    session.settle()
                    session.run(StopRecording())
            self._let_go()

    def give_up(self) -> None:
        """Record no more on the master."""
        with interrupts_held():
            if self.session.recording is self:
                self._is_wanted, self._write_span = False, None
                self.session.worker.record(None)

    def _let_go(self):
        """Keep what was recorded, and give the memory back, which no rank writes to any more."""
        with interrupts_held():
            self._kept = self.read()
            self._memory = self.session.recording = None

    def close(self) -> None:
        """End with the session, whose workers are gone."""
        self.leave()
        if self._at_close is not None:
            self._at_close()

    def leave(self) -> None:
        """End in this process alone: it was forked from the master, or there are no workers."""
        self.give_up()
        self._let_go()

    # What was recorded.

    @property
    def is_on(self) -> bool:
        """Whether it records."""
        return self._is_wanted

    @property
    def is_over(self) -> bool:
        """Whether nothing can be added any more."""
        return self._kept is not None

    def read(self):
        """Return the spans of each rank until now, and how many each had no room for."""
        memory = self._memory  # is kept as long as it is read, though another thread ends it
        if memory is None:
            return self._kept
        found = [recorder.read(memory, rank) for rank in range(len(memory))]
        return [spans for spans, _ in found], [dropped for _, dropped in found]


class _Call:
    """A call, from its begin to its end."""

    __slots__ = ("_begin", "_key", "_name", "_write")

    def __init__(self, write, name, key):
        self._write, self._name, self._key = write, name, key

    def __enter__(self):
        self._begin = clock()

    def __exit__(self, kind, error, trace):
        part = _CALL if kind is None else _RAISED
        self._write(part, self._begin, self._name, self._key)
