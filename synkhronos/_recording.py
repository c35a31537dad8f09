"""The master's side of a profile: has all ranks record, and times what only the master does.

    begin ──▶ StartRecording ==> ranks     ... calls ...     end, or close() of the session

Everything that is replaced is put back at the end.
"""

import contextlib
import functools
import math
from logging import DEBUG

import numpy as np

from synkhronos import _moved, _recorder, collectives
from synkhronos._log import log
from synkhronos._master import State
from synkhronos._names import shown, without_folder
from synkhronos._process import interrupts_held
from synkhronos._recorder import StartRecording, StopRecording, clock
from synkhronos._staging import StagedInput
from synkhronos._timeline import SPAN, Part
from synkhronos.errors import SessionError, SharedMemoryFull, WorkerDied
from synkhronos.functions import Function

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
        self._until_closed = contextlib.ExitStack()
        self._kept = None  # what was read at the end
        self._is_wanted = False  # from the end of `begin` to the begin of `end`

    # The begin. As long as the session's `recording` is this one, there is something to put back. A
    # Ctrl-C that comes in a wait for the ranks leaves that to the next recording, or to close().

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
            segment = session.segments.create(math.prod(shape) * 8)
        except SharedMemoryFull as error:
            raise SharedMemoryFull(f"A profile of room={self._room:,}: {error}") from error
        with interrupts_held():
            self._memory = segment.array(np.int64, shape)
            session.recording = self
            _recorder.replace(self._until_closed, session, "end", self._and_end)
            _recorder.replace(self._until_closed, session, "leave_in_child", self._and_leave)
        session.run(StartRecording(segment.array_ref(np.int64, shape)))
        with interrupts_held():
            session.require_open()  # a signal handler may have closed it
            self._time_master(session.worker.recorder)
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

    def _time_master(self, recorder):
        self._write_span = recorder.write
        recorder.time(Function, "_combine", Part.REDUCE, _moved.combined)
        recorder.time(StagedInput, "put", Part.STAGE, _moved.staged)
        recorder.replace(Function, "__call__", self._timed_function)
        recorder.replace(collectives, "_call", self._timed_collective)
        recorder.replace(self.session.registry, "_ship", self._timed_shipping)

    # Calls. One that another thread began may come to the lock when this recording has ended; and
    # close(), in another thread or in a signal handler, waits for no call.

    def _write(self, part, begin, what, name):
        """Record a call of a function or collective that ends now."""
        end, write = clock(), self._write_span
        if write is None:
            return
        number = self._numbers.get(what)
        if number is None:
            self.names.append(without_folder(name)[:LONGEST_NAME])
            number = self._numbers[what] = len(self.names) - 1
        write(part, begin, end, number, 0)
        if log.isEnabledFor(DEBUG):  # or names would be looked through in each call
            log.debug("%s took %.3f ms", shown(self.names[number]), 1e-6 * (end - begin))

    @contextlib.contextmanager
    def _call(self, name):
        """Record what runs inside as a call."""
        with self.session.lock:  # what this thread waits for another's call is not part of it
            part, begin = _RAISED, clock()
            try:
                yield
                part = _CALL
            finally:
                self._write(part, begin, name, name)

    def _timed_function(self, call):
        session, write = self.session, self._write

        @functools.wraps(call)
        def timed(function, /, *args, **kwargs):  # as `_call`, in half the time
            if function._session is not session:  # of one that was closed
                return call(function, *args, **kwargs)
            with session.lock:
                part, begin = _RAISED, clock()
                try:
                    result = call(function, *args, **kwargs)
                    part = _CALL
                    return result
                finally:
                    write(part, begin, function._key, function.name)

        return timed

    def _timed_collective(self, call):
        @contextlib.contextmanager
        def timed(name):
            with self._call(f"{name}()"), call(name) as session:
                yield session

        return timed

    def _timed_shipping(self, ship):
        def timed(*args):
            with self._call("distribute()"):
                return ship(*args)

        return timed

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
                _recorder.stop(self.session.worker)

    def _let_go(self):
        """Keep what was recorded, and give the memory back, which no rank writes to any more."""
        with interrupts_held():
            self._until_closed.close()
            self._kept = self.read()
            self._memory = self.session.recording = None

    def _and_end(self, end):
        def end_both():
            self.give_up()
            try:
                end()
            finally:
                self._let_go()
                if self._at_close is not None:
                    self._at_close()

        return end_both

    def _and_leave(self, leave):
        def leave_and_let_go():
            self.give_up()
            self._let_go()
            leave()

        return leave_and_let_go

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
        found = [_recorder.read(memory, rank) for rank in range(len(memory))]
        return [spans for spans, _ in found], [dropped for _, dropped in found]
