"""Processes that a command has started, from their start to their end.

    command            ranks
    SIGUSR1     ─────▶ write a snapshot, or end otherwise
    stdout      ◀───── stdout, line by line
    stderr      ◀───── stderr
    rank_0.log  ◀───── the lines of rank 0: of both streams, in the order in which they came

`Children` are processes of this machine that the command starts itself, without mpirun.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Mapping, Sequence

from synkhronos import _wording
from synkhronos._machine.processes import end_with_parent, life_of
from synkhronos.comm import membership
from synkhronos.comm.shared import group
from synkhronos.launch import FOLLOWS, INTERRUPTED
from synkhronos.launch.signals import signals_of

PATIENCE = 30.0  # seconds for the ranks to write a snapshot and end, after a Ctrl-C
_AFTER_FAILURE = 10.0  # seconds for the others to end
LAST = 5.0  # seconds between SIGTERM and SIGKILL
SIZE = 1 << 16
_MOST = 1 << 20  # bytes of a line that are kept until its end
_LAST_LINES = 20
_HEARD = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD}


@dataclass
class Rank:
    """A rank, as the launcher knows it."""

    device: str
    host: str = ""
    pid: int = 0
    status: int | None = None  # as subprocess has it: below 0 for a signal
    last_lines: list[str] = field(default_factory=list)

    @property
    def has_failed(self) -> bool:
        """Whether it has ended, and not as it should."""
        return self.status not in (None, 0, INTERRUPTED)

    @property
    def end(self) -> str:
        """The way in which it has ended, in words."""
        if self.status is None:
            return "is lost: its end was not reported"
        if self.status >= 0:
            return f"has ended with exit status {self.status}"
        try:
            name = signal.Signals(-self.status).name
        except ValueError:
            name = f"signal {-self.status}"
        return f"was killed by {name} (signal {-self.status})"


class Watch:
    """All ranks of a run.

    Derived classes start them, in `_begin`, and replace `title`, `request` and `name` for other
    processes than ranks of a rule.

    Parameters
    ----------
    names : list of str
        The device of each rank.
    folder : Path, optional
        Of the log files, one for each rank; None for no log files.
    is_served : bool, optional
        Whether rank 0 is a server.
    outlives : bool, optional
        Whether others go on after a rank has died.
    ends_with_stdin : bool, optional
        Whether an end of standard input ends the run, as a Ctrl-C does.
    patience : float, optional
        Seconds between a first Ctrl-C and the end of ranks that don't end.
    token : str, optional
        Begins the marks that processes write.
    """

    title = "synkhronos rule"
    request = "the ranks have {:g} s to write a snapshot"
    own_words = ""  # what the program that starts them says by itself

    def __init__(
        self,
        names: Sequence[str],
        folder: Path | None = None,
        is_served: bool = False,
        outlives: bool = False,
        ends_with_stdin: bool = False,
        patience: float = PATIENCE,
        token: str = "",
    ) -> None:
        # What processes tell of themselves in their standard errors; see `_take_mark`.
        self._mark = re.compile(
            rb"\x00" + token.encode() + rb" (\d+) (start|status|lost|follows) ([^\x00]*)\x00\n?"
        )
        self.ranks = [Rank(name) for name in names]
        self.failed: list[int] = []  # in the order in which they ended
        self.interrupted_by = 0
        self.interrupted_at = 0.0  # seconds since the epoch
        self._folder = folder
        self._is_served, self._outlives = is_served, outlives
        self._ends_with_stdin, self._patience = ends_with_stdin, patience
        self._deadline, self._ending = float("inf"), [signal.SIGTERM, signal.SIGKILL]

    @property
    def has_started(self) -> bool:
        """Whether a rank has been started."""
        return any(rank.pid for rank in self.ranks)

    @property
    def cause(self) -> int | None:
        """The rank of which the end has ended the run; None if none has failed."""
        after_others = (-signal.SIGTERM, FOLLOWS)
        by_itself = [at for at in self.failed if self.ranks[at].status not in after_others]
        return next(iter(by_itself or self.failed), None)

    def run(self) -> int:
        """Run all to their end, with all that they have started; return an exit status."""
        self._selector = selectors.PollSelector()
        for rank in range(len(self.ranks)):
            self._log(rank, b"")
        with signals_of(_HEARD) as signals, self._surroundings() as environment:
            self._selector.register(signals, selectors.EVENT_READ, lambda _: self._hear(signals))
            if self._ends_with_stdin:
                self._selector.register(0, selectors.EVENT_READ, self._read_stdin)
            try:
                self._begin(environment)
                self._serve()
            finally:
                self._end_all()
                self._selector.close()
        return self._status()

    def _surroundings(self) -> contextlib.AbstractContextManager[Mapping[str, str]]:
        """Give the environment in which the processes start, for as long as they run."""
        raise NotImplementedError

    def _begin(self, environment: Mapping[str, str]) -> None:
        """Start all, and register their streams."""
        raise NotImplementedError

    def _has_ended(self) -> bool:
        """Return whether nothing is left to wait for."""
        raise NotImplementedError

    def _ask_to_end(self) -> None:
        """Ask the ranks to end soon."""
        raise NotImplementedError

    def _end(self, number: int) -> None:
        """End what runs, by SIGTERM or SIGKILL."""
        raise NotImplementedError

    def _end_all(self) -> None:
        """Kill what is left."""
        raise NotImplementedError

    def _serve(self):
        while not self._has_ended():
            left = self._deadline - time.monotonic()
            if left <= 0:
                if self._is_over():
                    break
                self._end_next()
                continue
            for key, _ in self._selector.select(min(left, 1.0)):
                key.data(key.fd)

    def _is_over(self):
        """Return whether only streams are open: a child of a rank may keep them so."""
        return False

    def _end_next(self):
        """Take the next step in ending what runs."""
        number = self._ending.pop(0) if len(self._ending) > 1 else self._ending[0]
        self._deadline = time.monotonic() + LAST
        self._end(number)

    def _status(self):
        if self.interrupted_by:
            return 128 + self.interrupted_by
        if self.cause is not None:
            status = self.ranks[self.cause].status
            return status if status > 0 else 128 - status
        if not self.has_started or any(rank.status is None for rank in self.ranks):
            return 1
        statuses = [rank.status for rank in self.ranks]
        return INTERRUPTED if INTERRUPTED in statuses else 0

    def _hear(self, signals):
        for number in os.read(signals, 256):
            if number != signal.SIGCHLD:
                self._interrupt(number)

    def _read_stdin(self, fd):
        if not os.read(fd, SIZE):
            self._selector.unregister(fd)
            self._interrupt(signal.SIGTERM)

    def _interrupt(self, number):
        """Ask the ranks to end; the second time, end them."""
        self.interrupted_at = self.interrupted_at or time.time()
        is_first, self.interrupted_by = not self.interrupted_by, self.interrupted_by or number
        if is_first and self.has_started:
            asked = self.request.format(self._patience)
            self._say(f"stopping; {asked}. A second Ctrl-C ends them at once.")
            self._ask_to_end()
            self._end_after(self._patience)
        else:
            self._end_next()

    def _end_after(self, seconds):
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def _note_end(self, rank, status):
        """Take note of the exit status of a rank."""
        known = self.ranks[rank]
        known.status = status
        if known.has_failed:
            self.failed.append(rank)
            if not self._outlives:
                self._end_after(_AFTER_FAILURE)
            elif not self.interrupted_by:
                self._say(self.end_of(rank))

    def _without_marks(self, text):
        """Take the marks in a line of errors; return what is left of it."""
        for mark in self._mark.finditer(text):
            self._take_mark(int(mark[1]), mark[2], mark[3].decode())
        without = self._mark.sub(b"", text)
        if without == text:
            return text
        return without.rstrip(b"\n") + b"\n" if without.strip(b"\0\n") else b""

    def _take_mark(self, rank: int, kind: bytes, text: str) -> None:
        """Take what a process tells of a rank."""

    def _show(self, stream, rank, text):
        """Print what a rank has written, and put it into its log file."""
        self._write(stream, text)
        self._log(rank, text)
        kept = self.ranks[rank].last_lines
        kept.append(text.decode(errors="replace").rstrip("\n"))
        del kept[:-_LAST_LINES]

    def name(self, rank: int) -> str:
        """Return a rank with its device and its host, in words.

        >>> Watch(["cpu"]).name(0)
        'rank 0 (cpu)'
        """
        known = self.ranks[rank]
        what = "the server, " if self._is_served and rank == 0 else ""
        device = "no device" if known.device == "none" else known.device
        return f"rank {rank} ({what}{device}{f' on {known.host}' if known.host else ''})"

    def end_of(self, rank: int) -> str:
        """Return the sentence about a rank that has failed, while the others go on."""
        what = "" if self._is_served and rank == 0 else "; the others go on without it"
        return f"{self.name(rank)} {self.ranks[rank].end}{what}."

    def _log(self, rank, text):
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        with open(self._folder / f"rank_{rank}.log", "ab") as log:
            log.write(text)

    def _say(self, sentence):
        self._write(2, f"{self.title}: {sentence}\n".encode())

    def _write(self, fd, data):
        stream = sys.stdout if fd == 1 else sys.stderr
        if stream is None:  # it was closed before the start
            return
        try:
            stream.flush()
            while data:
                try:
                    data = data[os.write(stream.fileno(), data) :]
                except BlockingIOError:  # the other end has set it so
                    time.sleep(0.01)
        except (OSError, ValueError):  # nothing reads there any more, as with `| head`
            if not self.interrupted_by:
                self._interrupt(signal.SIGTERM)


class Lines:
    """Lines of a stream, of which the end may not have come."""

    def __init__(self):
        self._tail = bytearray()

    def take(self, data: bytes, is_end: bool = False) -> list[bytes]:
        """Return the lines that are complete now, and pieces of a very long one.

        At the end the last one gets a newline, if it has none.
        """
        tail = self._tail
        tail += data
        if is_end and tail and not tail.endswith(b"\n"):
            tail += b"\n"
        end = len(tail) if len(tail) > _MOST else tail.rfind(b"\n") + 1
        lines = io.BytesIO(tail[:end]).readlines()
        del tail[:end]
        return lines


class Children(Watch):
    """Ranks of a group on this machine, which this process starts.

    Parameters
    ----------
    commands : list of list of str
        The command of each rank, which finds its group with `synkhronos.comm.membership.join`.
    names : list of str
    environment : dict
    **more
        See `Watch`.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        names: Sequence[str],
        environment: Mapping[str, str],
        **more: Any,
    ) -> None:
        super().__init__(names, **more)
        self._limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        group.allow_descriptors(len(commands))
        self._commands, self._environment = commands, environment
        self._processes: list[subprocess.Popen] = []
        self._streams: dict[int, tuple[int, int, Lines]] = {}  # fd -> rank, stream, lines

    @contextlib.contextmanager
    def _surroundings(self):
        yield self._environment

    def _begin(self, environment):
        founding = group.Founding(len(self._commands))
        try:
            for rank, command in enumerate(self._commands):
                value, descriptors = founding.place(rank)
                process = subprocess.Popen(
                    command,
                    env={**environment, membership.VARIABLE: value},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=descriptors,
                    preexec_fn=functools.partial(_prepare_child, os.getpid(), self._limits),
                )
                self._processes.append(process)
                known = self.ranks[rank]
                known.pid, known.host = process.pid, socket.gethostname()
                for number, stream in ((1, process.stdout), (2, process.stderr)):
                    self._streams[stream.fileno()] = rank, number, Lines()
                    self._selector.register(stream, selectors.EVENT_READ, self._read)
        finally:
            founding.close()

    def _read(self, fd):
        rank, number, lines = self._streams[fd]
        data = os.read(fd, SIZE)
        for line in lines.take(data, is_end=not data):
            text = self._without_marks(line) if number == 2 else line
            if text:
                self._show(number, rank, text)
        if not data:
            self._selector.unregister(fd)
            del self._streams[fd]

    def _look(self):
        """Note the ranks that have ended. They are reaped at the end, with their groups."""
        left = []
        for rank, process in enumerate(self._processes):
            if self.ranks[rank].status is None:
                found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if found is None:
                    left.append(process)
                else:
                    is_exit = found.si_code == os.CLD_EXITED
                    self._note_end(rank, found.si_status if is_exit else -found.si_status)
        if self.failed and left and all(life_of(each.pid) == "stopped" for each in left):
            self._end_after(_AFTER_FAILURE)  # nobody may continue them

    def _is_over(self):
        self._look()
        return all(rank.status is not None for rank in self.ranks)

    def _has_ended(self):
        if not self._is_over():
            return False
        if self._streams:  # a process that a rank has started may keep them open
            self._end_after(1.0)
        return not self._streams

    def _ask_to_end(self):
        self._send(signal.SIGUSR1)

    def _end(self, number):
        self._send(number)

    def _send(self, number):
        for rank, process in enumerate(self._processes):
            if self.ranks[rank].status is None:  # so it was not reaped
                os.kill(process.pid, number)

    def _end_all(self):
        for fd in list(self._streams):
            rank, number, lines = self._streams[fd]
            for line in lines.take(b"", is_end=True):
                self._show(number, rank, line)
        self._look()
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # with what it has started
        for rank, process in enumerate(self._processes):
            process.wait()
            if self.ranks[rank].status is None:
                self._note_end(rank, process.returncode)
            process.stdout.close()
            process.stderr.close()


def _prepare_child(parent, limits):
    """Prepare the process that becomes a rank, which ends when this command is killed."""
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    os.setpgid(0, 0)  # a Ctrl-C in the terminal is for the command
    end_with_parent(parent, signal.SIGKILL)


def story(ranks: Watch, folder: Path) -> list[str]:
    """Return sentences about a run that has not ended well."""
    if ranks.interrupted_by:
        return []
    if not ranks.failed:
        lost = [at for at, rank in enumerate(ranks.ranks) if rank.status is None]
        return [f"{ranks.name(at)} {ranks.ranks[at].end}." for at in lost]
    cause = ranks.cause
    assert cause is not None
    said = [f"{ranks.name(cause)} {ranks.ranks[cause].end}, which has ended the run."]
    ended = [at for at, rank in enumerate(ranks.ranks) if rank.status == 0]
    if ended:
        others = _wording.count(len(ended), "other rank")
        said = [f"{ranks.name(cause)} {ranks.ranks[cause].end}; {others} ended as they should."]
    log = folder / f"rank_{cause}.log"
    if ranks.ranks[cause].last_lines:
        said.append(f"Its output is in {log}.")
    return said
