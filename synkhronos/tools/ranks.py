"""The ranks of a rule from their start to their end, as the launcher sees them through mpirun.

    launcher             mpirun                        guard               rank
    SIGUSR1     ───────▶ SIGUSR1 ────────────────────▶ SIGUSR1 ──────────▶ writes a snapshot, ends
    stdout      ◀─────── stdout, a tag before each line ◀──────────────── stdout
    stderr      ◀─────── stderr, a tag before each line ◀── start, status ── stderr
    rank_0.log  ◀── the lines with the tag of rank 0

A rank's log file has its lines of both streams, in the order in which they came.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import selectors
import signal
import subprocess
from pathlib import Path
from typing import Any, Mapping, Sequence

from synkhronos._machine.processes import end_with_parent
from synkhronos.comm.mpi import folders
from synkhronos.launch.watch import SIZE, Lines, Watch
from synkhronos.tools import mpirun

_AFTER_EARLY = 3.0  # seconds for what others still print: mpirun would not end them
_AFTER_ALL = 10.0  # seconds for mpirun to end after all ranks
_TAG = re.compile(rb"\[\d+,(\d+)\]<std(?:out|err)>: ?")
_EDGE = re.compile(rb"-{60,}\n?")


class Ranks(Watch):
    """All ranks of a run of mpirun.

    Parameters
    ----------
    line : list of str
        The command line of mpirun.
    environment : dict
    token : str
        Begins the marks of guards.
    names : list of str
    folder : Path or None
    **more
        See `Watch`.
    """

    def __init__(
        self,
        line: Sequence[str],
        environment: Mapping[str, str],
        token: str,
        names: Sequence[str],
        folder: Path | None,
        **more: Any,
    ) -> None:
        super().__init__(names, folder, token=token, **more)
        self._line, self._environment = line, environment
        self._lines = {1: Lines(), 2: Lines()}  # of mpirun's streams
        self._speaker: dict[int, int | None] = {1: None, 2: None}  # the rank of half a line
        self._edges: dict[int, bytes] = {}  # lines of dashes, by rank
        self._pages: set[int] = set()  # ranks in the midst of a page
        self._own = bytearray()  # what mpirun says by itself

    @property
    def own_words(self) -> str:
        """The lines that mpirun has printed by itself, but for those about ranks that failed."""
        text = mpirun.NOISE.sub(b"", bytes(self._own))
        return (mpirun.PAGE.sub(b"", text) if self.has_started else text).decode(errors="replace")

    @contextlib.contextmanager
    def _surroundings(self):
        with folders.of_mpirun(self._environment) as environment:
            yield environment

    def _begin(self, environment):
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
        self._streams = {self._mpirun.stdout.fileno(): 1, self._mpirun.stderr.fileno(): 2}
        for fd in self._streams:
            self._selector.register(fd, selectors.EVENT_READ, self._read)

    def _is_over(self):
        return self._mpirun.poll() is not None

    def _has_ended(self):
        if self._is_over():
            self._end_after(1)  # an agent of mpirun may keep the pipes open
        return self._is_over() and not self._streams

    def _ask_to_end(self):
        self._mpirun.send_signal(signal.SIGUSR1)

    def _end(self, number):
        if number == signal.SIGKILL:
            mpirun.kill_session(self._mpirun.pid)
        elif self._mpirun.poll() is None:
            self._mpirun.send_signal(number)

    def _end_all(self):
        for stream in self._lines:
            self._take(stream, b"", is_end=True)
        for rank, edge in self._edges.items():
            self._show(2, rank, edge)
        mpirun.kill_session(self._mpirun.pid)
        self._mpirun.wait()
        self._mpirun.stdout.close()
        self._mpirun.stderr.close()

    def _status(self):
        code = self._mpirun.returncode
        are_known = all(rank.status is not None for rank in self.ranks)
        if self.interrupted_by or self.cause is not None or not self.has_started:
            return super()._status()
        if not are_known:
            return code if code > 0 else 1
        if code:
            self._say(f"mpirun has ended with status {code}, after all ranks.")
        return super()._status()

    def _read(self, fd):
        data = os.read(fd, SIZE)
        if data:
            return self._take(self._streams[fd], data)
        del self._streams[fd]
        return self._selector.unregister(fd)

    def _take(self, stream, data, is_end=False):
        """Take a piece of mpirun's output apart into lines."""
        for line in self._lines[stream].take(data, is_end):
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
            text = self._without_marks(text)
            if not text:
                return
            text = self._without_page(rank, text)
            if not text:
                return
        # A rank may end without a newline.
        self._show(stream, rank, text if text.endswith(b"\n") else text + b"\n")

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
        self._note_end(rank, int(status))
        if early:
            self._end_after(_AFTER_EARLY)
        if all(each.status is not None for each in self.ranks):
            self._end_after(_AFTER_ALL)
