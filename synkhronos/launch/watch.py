"""Watches the processes that a command has started, from their start to their end.

    command            processes
    signals     ─────▶ end
    stdout      ◀───── stdout
    stderr      ◀───── stderr

Derived classes start the processes, as `through.Script` does.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from dataclasses import dataclass
from typing import AbstractSet, Any, Mapping, Sequence

from synkhronos._machine.processes import shell_status
from synkhronos.launch.streams import SIZE, signals_of

_AT_ONCE = 1.0  # seconds in which a second SIGTERM counts as the same


@dataclass
class LaunchedProcess:
    """A process, as the launcher knows it."""

    host: str = ""
    pid: int = 0
    status: int | None = None  # as in subprocess: below 0 for a signal

    @property
    def exit_status(self) -> int:
        """Its exit status as shells show it."""
        assert self.status is not None
        return shell_status(self.status)


class Watch:
    """The processes of a run, their streams, and the signals that end them.

    `ranks` has a `LaunchedProcess` for each. They have `environment`, and `grace` seconds to end
    when they are asked to. A derived class has::

        _begun()                       start all, and listen to their streams, in a with block
        _take(stream, data, is_end)    take a piece of a stream
        _is_over()                     whether all processes have ended
        _tick(seconds)                 look at the processes, some seconds after the last time
        _end(number), _end_all()       send SIGTERM or SIGKILL to all that run; kill what is left
        _interrupt(number)             answer a signal
        _take_lost_reader()            answer the end of what reads the output of this command
        _status()                      the exit status of the run
        failure_summary()              sentences about a run that has not ended well
        loss                           the process whose loss has ended the run, in words, or None
    """

    heard: AbstractSet[int] = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before_kill = 5.0  # seconds between SIGTERM and SIGKILL
    hit = ""  # how mpirun was kept from starting anything by a signal, in words

    def __init__(self, ranks: Sequence[Any], environment: Mapping[str, str], grace: float) -> None:
        self.ranks, self._environment, self._grace = ranks, environment, grace
        self.interrupted_by = 0
        self._streams: dict[int, Any] = {}  # open descriptor -> the stream for `_take`
        self._terminated_at = float("-inf")  # when the last SIGTERM came
        self._deadline, self._ending = float("inf"), [signal.SIGTERM, signal.SIGKILL]

    @property
    def has_started(self) -> bool:
        """Whether a process has been started."""
        return any(rank.pid for rank in self.ranks)

    def run(self) -> int:
        """Run all to their end, with all that they have started; return an exit status."""
        heard = {*self.heard, signal.SIGCHLD}
        with signals_of(heard) as signals, selectors.PollSelector() as self._selector:
            self._selector.register(signals, selectors.EVENT_READ, self._hear)
            with self._begun():
                try:
                    self._serve()
                finally:
                    for stream in self._streams.values():
                        self._take(stream, b"", is_end=True)
                    self._end_all()
        return self._status()

    def _note_end(self, rank: int, status: int) -> None:
        """Note the status of a process that has ended."""
        self.ranks[rank].status = status

    def _tick(self, seconds):
        pass

    def _serve(self):
        looked = time.monotonic()
        while not self._has_ended():
            now = time.monotonic()
            if now - looked >= 1.0:
                self._tick(now - looked)
                looked = now
            left = self._deadline - now
            if left <= 0:
                if self._is_over():
                    break
                self._end_next()
                continue
            for key, _ in self._selector.select(min(left, 1.0)):
                key.data(key.fd)

    def _has_ended(self):
        """Return whether all processes have ended, and all streams are read to the end."""
        if not self._is_over():
            return False
        if self._streams:  # processes that a rank has started may keep them open
            self._end_after(1.0)
        return not self._streams

    def _listen(self, fd, stream):
        self._streams[fd] = stream
        self._selector.register(fd, selectors.EVENT_READ, self._read)

    def _read(self, fd):
        data = os.read(fd, SIZE)
        self._take(self._streams[fd], data, is_end=not data)
        if not data:
            self._selector.unregister(fd)
            del self._streams[fd]

    def _end_next(self):
        """Send the next of the signals that end the processes."""
        number = self._ending.pop(0) if len(self._ending) > 1 else self._ending[0]
        self._deadline = time.monotonic() + self.before_kill
        self._end(number)

    def _hear(self, signals):
        for number in os.read(signals, 256):
            now = time.monotonic()
            # Slurm sends SIGTERM to the launcher and to the job script, which may pass it on.
            is_repeated = number == signal.SIGTERM and now - self._terminated_at < _AT_ONCE
            if number == signal.SIGTERM and not is_repeated:
                self._terminated_at = now
            if number != signal.SIGCHLD and not is_repeated:
                self._interrupt(number)

    def _end_after(self, seconds):
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def _write(self, fd, data):
        stream = sys.stdout if fd == 1 else sys.stderr
        if stream is None:  # it was closed before Python started
            return
        try:
            stream.flush()
            while data:
                try:
                    data = data[os.write(stream.fileno(), data) :]
                except BlockingIOError:  # another process has made the stream non-blocking
                    time.sleep(0.01)
        except (OSError, ValueError):  # nothing reads there any more, as with `| head`
            self._take_lost_reader()
