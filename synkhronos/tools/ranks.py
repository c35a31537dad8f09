"""The ranks of a rule from their start to their end, as the launcher sees them through mpirun.

    launcher             mpirun                        guard               rank
    SIGUSR1     ───────▶ SIGUSR1 ────────────────────▶ SIGUSR1 ──────────▶ writes a snapshot, ends
    stdout      ◀─────── stdout, a tag before each line ◀──────────────── stdout
    stderr      ◀─────── stderr, a tag before each line ◀── start, status ── stderr
    rank_0.log  ◀── the lines with the tag of rank 0

A rank's log file has its lines of both streams, in the order in which they came.
"""

from __future__ import annotations

import functools
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Mapping, Sequence

from synkhronos import _wording
from synkhronos._machine.processes import end_with_parent
from synkhronos.comm.mpi import folders
from synkhronos.tools import guard, mpirun, ports

PATIENCE = 30.0  # seconds for the ranks to write a snapshot and end, after a Ctrl-C
_AFTER_FAILURE = 10.0  # seconds for mpirun to end the others
_AFTER_EARLY = 3.0  # seconds for what others still print: mpirun would not end them
_AFTER_ALL = 10.0  # seconds for mpirun to end after all ranks
_LAST = 5.0  # seconds between SIGTERM and SIGKILL
_SIZE = 1 << 16
_MOST = 1 << 20  # bytes of a line that are kept until its end
_LAST_LINES = 20
_TAG = re.compile(rb"\[\d+,(\d+)\]<std(?:out|err)>: ?")
_LOST_PEER = 14  # Open MPI exits so when the connection to a rank of another host is closed
_EDGE = re.compile(rb"-{60,}\n?")
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
        return self.status not in (None, 0, guard.INTERRUPTED)

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


class Ranks:
    """All ranks of a run.

    Classes for other processes of mpirun replace `title`, `request` and `name`.

    Parameters
    ----------
    line : list of str
        The command line of mpirun.
    environment : dict
    token : str
        Begins the marks of guards.
    names : list of str
        The device of each rank.
    folder : Path or None
        Of the log files, one for each rank; None for no log files.
    is_served : bool
        Whether rank 0 is a server.
    outlives : bool
        Whether others go on after a rank has died.
    ends_with_stdin : bool
        Whether an end of standard input ends the run, as a Ctrl-C does.
    is_here : bool, optional
        Whether all of them are on this machine.
    patience : float, optional
        Seconds between a first Ctrl-C and the end of ranks that don't end.
    """

    title = "synkhronos rule"
    request = "the ranks have {:g} s to write a snapshot"

    def __init__(
        self,
        line: Sequence[str],
        environment: Mapping[str, str],
        token: str,
        names: Sequence[str],
        folder: Path | None,
        is_served: bool = False,
        outlives: bool = False,
        ends_with_stdin: bool = False,
        is_here: bool = False,
        patience: float = PATIENCE,
    ) -> None:
        self._line, self._environment = line, environment
        self._mark = re.compile(
            rb"\x00" + token.encode() + rb" (\d+) (start|status|lost|follows) ([^\x00]*)\x00\n?"
        )
        self.ranks = [Rank(name) for name in names]
        self.failed: list[int] = []  # in the order in which they ended
        self.interrupted_by = 0
        self._folder = folder
        self._is_served, self._outlives = is_served, outlives
        self._is_here = is_here
        self._ends_with_stdin, self._patience = ends_with_stdin, patience
        self.interrupted_at = 0.0  # seconds since the epoch
        self._tails = {1: bytearray(), 2: bytearray()}  # lines of which the end has not come
        self._speaker: dict[int, int | None] = {1: None, 2: None}  # the rank of half a line
        self._edges: dict[int, bytes] = {}  # lines of dashes, by rank
        self._pages: set[int] = set()  # ranks in the midst of a page
        self._own = bytearray()  # what mpirun says by itself
        self._deadline, self._ending = float("inf"), [signal.SIGTERM, signal.SIGKILL]

    @property
    def has_started(self) -> bool:
        """Whether a rank has been started."""
        return any(rank.pid for rank in self.ranks)

    @property
    def cause(self) -> int | None:
        """The rank of which the end has ended the run; None if none has failed."""
        after_others = (-signal.SIGTERM, _LOST_PEER)
        by_itself = [at for at in self.failed if self.ranks[at].status not in after_others]
        return next(iter(by_itself or self.failed), None)

    @property
    def own_words(self) -> str:
        """The lines that mpirun has printed by itself, but for those about ranks that failed."""
        text = mpirun.NOISE.sub(b"", bytes(self._own))
        return (mpirun.PAGE.sub(b"", text) if self.has_started else text).decode(errors="replace")

    def run(self) -> int:
        """Run mpirun to its end, with all that it has started; return an exit status."""
        self._selector = selectors.PollSelector()
        for rank in range(len(self.ranks)):
            self._log(rank, b"")
        folder = folders.of_mpirun(self._environment)
        with mpirun.signals_of(_HEARD) as signals, folder as environment:
            line, environment = mpirun.with_secret(self._line, environment)
            self._mpirun = subprocess.Popen(
                line,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a Ctrl-C in the terminal is for the launcher
                preexec_fn=functools.partial(end_with_parent, os.getpid()),
            )
            if self._is_here:
                ports.close(self._mpirun, len(self.ranks))
            try:
                self._serve(signals)
            finally:
                mpirun.kill_session(self._mpirun.pid)
                self._mpirun.wait()
                self._selector.close()
                self._mpirun.stdout.close()
                self._mpirun.stderr.close()
        return self._status()

    def _status(self):
        if self.interrupted_by:
            return 128 + self.interrupted_by
        if self.cause is not None:
            status = self.ranks[self.cause].status
            return status if status > 0 else 128 - status
        code = self._mpirun.returncode
        if not self.has_started:
            return 1
        if any(rank.status is None for rank in self.ranks):
            return code if code > 0 else 1
        if code:
            self._say(f"mpirun has ended with status {code}, after all ranks.")
        statuses = [rank.status for rank in self.ranks]
        return guard.INTERRUPTED if guard.INTERRUPTED in statuses else 0

    def _serve(self, signals):
        streams = {self._mpirun.stdout.fileno(): 1, self._mpirun.stderr.fileno(): 2}
        read = selectors.EVENT_READ
        self._selector.register(signals, read, lambda _: self._hear(signals))
        for fd in streams:
            self._selector.register(fd, read, lambda fd: self._read(fd, streams))
        if self._ends_with_stdin:
            self._selector.register(0, read, self._read_stdin)
        while self._mpirun.poll() is None or streams:
            if self._mpirun.poll() is not None:
                self._end_after(1)  # an agent of mpirun may keep the pipes open
            left = self._deadline - time.monotonic()
            if left <= 0:
                if self._mpirun.poll() is not None:
                    break
                self._end_mpirun()
                continue
            for key, _ in self._selector.select(min(left, 1.0)):
                key.data(key.fd)
        for stream in self._tails:
            self._take(stream, b"", is_end=True)
        for rank, edge in self._edges.items():
            self._show(2, rank, edge)

    def _hear(self, signals):
        for number in os.read(signals, 256):
            if number != signal.SIGCHLD:
                self._interrupt(number)

    def _read_stdin(self, fd):
        if not os.read(fd, _SIZE):
            self._selector.unregister(fd)
            self._interrupt(signal.SIGTERM)

    def _interrupt(self, number):
        """Ask the ranks to end; the second time, end them."""
        self.interrupted_at = self.interrupted_at or time.time()
        is_first, self.interrupted_by = not self.interrupted_by, self.interrupted_by or number
        if is_first and self.has_started:
            asked = self.request.format(self._patience)
            self._say(f"stopping; {asked}. A second Ctrl-C ends them at once.")
            self._mpirun.send_signal(signal.SIGUSR1)
            self._end_after(self._patience)
        else:
            self._end_mpirun()

    def _end_after(self, seconds):
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def _end_mpirun(self):
        """Take the next step in ending mpirun."""
        number = self._ending.pop(0) if len(self._ending) > 1 else self._ending[0]
        self._deadline = time.monotonic() + _LAST
        if number == signal.SIGKILL:
            mpirun.kill_session(self._mpirun.pid)
        elif self._mpirun.poll() is None:
            self._mpirun.send_signal(number)

    def _read(self, fd, streams):
        data = os.read(fd, _SIZE)
        if data:
            return self._take(streams[fd], data)
        del streams[fd]
        return self._selector.unregister(fd)

    def _take(self, stream, data, is_end=False):
        """Take a piece of mpirun's output apart into lines."""
        tail = self._tails[stream]
        tail += data
        end = len(tail) if is_end or len(tail) > _MOST else tail.rfind(b"\n") + 1
        lines = bytes(tail[:end])
        del tail[:end]
        for line in lines.splitlines(keepends=True):
            self._take_line(stream, line)

    def _take_line(self, stream, line):
        """Pass a line on: the parts with the tag of a rank, and what mpirun says by itself."""
        at, rank = 0, self._speaker[stream]
        for tag in [*_TAG.finditer(line), None]:
            text = line[at : tag.start() if tag else len(line)]
            if text:
                self._take_text(stream, rank, text)
            if tag:
                at, rank = tag.end(), int(tag[1])
        self._speaker[stream] = None if line.endswith(b"\n") else rank

    def _take_text(self, stream, rank, text):
        if rank is None or rank >= len(self.ranks):
            self._own += text
            return
        if stream == 2:
            for mark in self._mark.finditer(text):
                self._take_mark(int(mark[1]), mark[2], mark[3].decode())
            without = self._mark.sub(b"", text)
            if without == text:
                pass
            elif not without.strip(b"\0\n"):
                return
            else:
                text = without.rstrip(b"\n") + b"\n"
            text = self._without_page(rank, text)
            if not text:
                return
        self._show(stream, rank, text)

    def _show(self, stream, rank, text):
        """Print what a rank has written, and put it into its log file."""
        if not text.endswith(b"\n"):  # the rank has ended without a newline
            text += b"\n"
        self._write(stream, text)
        self._log(rank, text)
        kept = self.ranks[rank].last_lines
        kept.append(text.decode(errors="replace").rstrip("\n"))
        del kept[:-_LAST_LINES]

    def _without_page(self, rank, line):
        """Return a line of errors, or nothing if it is of the page that MPI_Abort prints."""
        is_edge = _EDGE.fullmatch(line)
        if rank in self._pages:
            if is_edge:
                self._pages.discard(rank)
            return b""
        edge = self._edges.pop(rank, b"")
        if edge and line.startswith(b"MPI_ABORT was invoked"):
            self._pages.add(rank)
            return b""
        if is_edge:
            self._edges[rank] = line  # until the next line says whether it begins the page
            return edge
        return edge + line

    def _take_mark(self, rank, kind, text):
        known = self.ranks[rank]
        if kind == b"start":
            pid, known.host = text.split(" ", 1)
            known.pid = int(pid)
            return
        status, _, early = text.partition(" ")
        known.status = int(status)
        if known.has_failed:
            self.failed.append(rank)
            if early or not self._outlives:
                self._end_after(_AFTER_EARLY if early else _AFTER_FAILURE)
            elif not self.interrupted_by:
                self._say(self.end_of(rank))
        if all(each.status is not None for each in self.ranks):
            self._end_after(_AFTER_ALL)

    def name(self, rank: int) -> str:
        """Return a rank with its device and its host, in words.

        >>> Ranks([], {}, "", ["cpu"], Path(".")).name(0)
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


def story(ranks: Ranks, folder: Path) -> list[str]:
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
