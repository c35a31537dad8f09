"""Starts processes on several machines through mpirun, and passes on their output.

    launcher                     mpirun           guard of the first machine       script
    stdin, signals ── frames ──▶ stdin ── frames ──▶ takes them apart ── stdin, signals ──▶
    stdout         ◀──────────────────────────────────────────────────────────────── stdout
    stderr         ◀── without marks ── stderr with marks ◀── start, more, status ── stderr

A `Script` runs in the first of its processes, and its streams are those of the command.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import selectors
import signal
import subprocess
from typing import Any, Sequence

from synkhronos._machine.processes import end_with_parent, how_ended
from synkhronos.comm.mpi import folders, secret
from synkhronos.launch import INTERRUPTED, guard, mpirun
from synkhronos.launch.leftovers import kill_session
from synkhronos.launch.streams import Writer, mark_pattern
from synkhronos.launch.watch import LaunchedProcess, Watch
from synkhronos.launch.where import Host

# A warning of a race in PRRTE, without consequences.
NOISE = re.compile(rb"^\[[^\]\n]*\] plm:ssh: Warning: setpgid[^\n]*\n", re.MULTILINE)
# Open MPI prints this for each foreign connection after the first; for that it prints a page.
_IGNORED = re.compile(
    rb"^\[[^\n]*btl_tcp_proc\.c:\d+[^\n]*\] opal_modex_recv: [^\n]*\n", re.MULTILINE
)
# Pages about a process that was killed or has failed: its exit status and its output say enough.
PAGE = re.compile(rb"-{60,}\n(?:(?!-{60,}\n).)*prterun.*?-{60,}\n", re.DOTALL)
_BEGUN = rb"(?<!-)-{60,}\n(?:A daemon failed|PRTE has lost)(?:(?!-{60,}\n).){0,4000}"
_PAGE_OF_LOSS = re.compile(
    _BEGUN + rb"Remote (?:host:|daemon:[^\n]* on node) *(\S+)\n.*?-{60,}\n\n?", re.DOTALL
)
_BEGUN_PAGE = re.compile(_BEGUN + rb"\Z", re.DOTALL)
_AFTER_LOST = 1.0  # seconds for mpirun after all ranks that can be reached have ended
GRACE = 10.0  # seconds for a script to end after a Ctrl-C
_NO_END = "mpirun has ended before the script."
_FRAME = 2048  # bytes of input in a message; PRRTE drops input beyond 4096 bytes


class Mpirun(Watch):
    """A run of mpirun with the command line `line`; mpirun ends with the launcher.

    If nothing starts, the launcher asks `hosts` why, by `agent` or ssh. The rest is as in `Watch`.
    """

    after_all = 10.0  # seconds for mpirun to end after all ranks
    _stdin = subprocess.DEVNULL

    def __init__(
        self, line: Sequence[str], hosts: Sequence[Host], agent: str | None, **watched: Any
    ) -> None:
        super().__init__(**watched)
        self._line, self._hosts, self._agent = line, hosts, agent

    @contextlib.contextmanager
    def _begun(self):
        with folders.of_mpirun(self._environment) as environment:
            line = list(self._line)
            if secret.VARIABLE not in environment:  # a user's own is exported by the line already
                # The line has the name only, because all users of a machine can read the line.
                line[1:1] = secret.EXPORTED
                environment = {**environment, secret.VARIABLE: secret.new()}
            self._mpirun = subprocess.Popen(
                line,
                env=environment,
                stdin=self._stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a Ctrl-C in the terminal is for the launcher
                preexec_fn=functools.partial(end_with_parent, os.getpid()),
            )
            self._listen(self._mpirun.stdout.fileno(), 1)
            self._listen(self._mpirun.stderr.fileno(), 2)
            yield

    def _is_over(self):
        return self._mpirun.poll() is not None

    def _end_mpirun_soon(self):
        """Kill mpirun soon: it would wait for its daemon on a lost machine."""
        self._ending = [signal.SIGKILL]
        self._end_after(_AFTER_LOST)

    def _end(self, number):
        if number == signal.SIGKILL:
            kill_session(self._mpirun.pid)
        else:
            self._mpirun.send_signal(number)

    def _end_all(self):
        kill_session(self._mpirun.pid)
        self._mpirun.wait()
        self._mpirun.stdout.close()
        self._mpirun.stderr.close()

    def _take_mark(self, rank, kind, text):
        known = self.ranks[rank]
        if kind == b"start":
            pid, known.host = text.split(" ", 1)
            known.pid = int(pid)
        elif kind == b"status":
            self._note_end(rank, int(text))
            if all(known.status is not None for known in self.ranks):
                self._end_after(self.after_all)

    def _why_not_started(self):
        why = mpirun.why_not_started(self.own_words, self._hosts, self._agent)
        return [f"can't launch: {why}"]


class Script(Mpirun):
    """A script on several machines: its streams and signals are those of this command.

    Output before the guard's first mark is mpirun's own.
    """

    heard = guard.FORWARDED
    before_kill = 2.0
    after_all = 3.0
    _stdin = subprocess.PIPE

    def __init__(
        self, line: Sequence[str], hosts: Sequence[Host], agent: str | None, grace: float = GRACE
    ) -> None:
        token = mpirun.new_token()
        environment = {**os.environ, guard.VARIABLE: token}
        ranks = [LaunchedProcess()]
        super().__init__(line, hosts, agent, ranks=ranks, environment=environment, grace=grace)
        self._losses: list[str] = []  # sentences about lost machines and workers
        self._mark = mark_pattern(token, end="\n")  # with its newline, which may come later
        self._beginning = f"\0{token} ".encode()  # of every mark
        self._tail = bytearray()  # end of stderr that may be the beginning of a mark
        self._pages = {1: b"", 2: b""}  # incomplete page of mpirun about a lost daemon
        self._held = {1: bytearray(), 2: bytearray()}  # output before the script has started
        self._late = bytearray()  # stderr after the script has ended
        self._was_asked = self._ended_itself = False

    @property
    def own_words(self) -> str:
        """The output before the script has started, which is mpirun's."""
        return NOISE.sub(b"", bytes(self._held[2] + self._held[1])).decode(errors="replace")

    @contextlib.contextmanager
    def _begun(self):
        with super()._begun():
            self._input = Writer(os.dup(self._mpirun.stdin.fileno()), self._selector)
            self._mpirun.stdin.close()
            yield

    def _interrupt(self, number):
        """Pass a signal on to the script; after a second Ctrl-C end it."""
        is_end = number in (signal.SIGINT, signal.SIGTERM)
        if is_end and (self._was_asked or not self.has_started):
            if self.ranks[0].status is None:
                self.interrupted_by = self.interrupted_by or number
            self._end_next()
            return
        self._input.write(guard.HEADER.pack(guard.SIGNAL, number))
        if is_end:
            self._was_asked = True
            self._end_after(self._grace)

    def _take_lost_reader(self):
        self._was_asked = True
        self._end_after(self.after_all)

    def _take(self, stream, data, is_end=False):
        """Pass output on, without marks; keep back a mark that is not complete yet."""
        if stream == 1:
            self._pass(1, data, is_end)
            return
        self._tail += data
        while mark := self._mark.search(self._tail):
            rank, kind, text = mark.groups()
            before = self._tail[: mark.start()]
            del self._tail[: mark.end()]
            self._pass(2, before)
            self._take_mark(int(rank), bytes(kind), text.decode(errors="replace"))
        at = self._tail.find(b"\0")
        while at >= 0 and not self._begins_mark(self._tail[at:]):
            at = self._tail.find(b"\0", at + 1)
        end = len(self._tail) if at < 0 else at
        self._pass(2, self._tail[:end], is_end)
        del self._tail[:end]
        if is_end and not self._losses:  # after a loss MPI and mpirun only repeat it
            self._write(2, PAGE.sub(b"", bytes(self._late)))

    def _note_page(self, page):
        """Note the loss that a page of mpirun reports, and drop the page."""
        if not self.has_started:
            return page[0]
        self._losses.append(f"mpirun has lost {page[1].decode()}")
        return b""

    def _begins_mark(self, text):
        return text.startswith(self._beginning) or self._beginning.startswith(text)

    def _pass(self, stream, data, is_end=False):
        if stream == 2:
            data = _IGNORED.sub(b"", data)
        data = _PAGE_OF_LOSS.sub(self._note_page, self._pages[stream] + data)
        begun = None if is_end else _BEGUN_PAGE.search(data)
        at = begun.start() if begun else len(data)
        data, self._pages[stream] = data[:at], data[at:]
        if not self.has_started:
            self._held[stream] += data
        elif stream == 2 and self.ranks[0].status is not None:
            self._late += data
        else:
            self._write(stream, bytes(data))

    def _take_mark(self, rank, kind, text):
        if kind == b"lost":
            self._losses.append(text.partition(". ")[0].rstrip("."))
            if rank:  # told by another machine: that of the script may only be slow to end
                self._end_after(self._grace)
            return
        if kind == b"own":
            self._ended_itself = True
            return
        super()._take_mark(rank, kind, text)
        if kind == b"status" and self._losses:
            self._end_mpirun_soon()
        if kind == b"start":
            self._write(2, NOISE.sub(b"", bytes(self._held[2])))
            self._write(1, bytes(self._held[1]))
        if kind in (b"start", b"more"):
            self._wait_for_stdin()

    def _wait_for_stdin(self):
        """Read the next piece of input, unless a terminal would stop this process for it."""
        try:
            if not os.isatty(0) or os.tcgetpgrp(0) == os.getpgrp():
                os.fstat(0)
                self._selector.register(0, selectors.EVENT_READ, self._read_stdin)
        except OSError:  # standard input is closed
            self._input.write(guard.HEADER.pack(guard.DATA, 0))

    def _read_stdin(self, fd):
        self._selector.unregister(fd)
        data = os.read(fd, _FRAME)
        self._input.write(guard.HEADER.pack(guard.DATA, len(data)) + data)

    def _status(self):
        if self.interrupted_by:
            return 128 + self.interrupted_by
        if self.ranks[0].status is None:
            return max(self._mpirun.returncode, 1) if self.has_started else 1
        return self.ranks[0].exit_status

    def failure_summary(self) -> list[str]:
        """Return a sentence if the script has not started, or its end was not reported."""
        if self.interrupted_by or self.ranks[0].status is not None:
            return []
        if not self.has_started:
            return self._why_not_started()
        return [f"{self._losses[0]}, which has ended the run."] if self._losses else [_NO_END]

    @property
    def loss(self) -> str | None:
        """The loss that has ended the script, in words; None if the script was asked to end."""
        is_own, status = self._was_asked or self._ended_itself, self.ranks[0].status
        if is_own or not self.has_started or status == 0:
            return None
        if self._losses or self.interrupted_by:
            return next(iter(self._losses), None)
        if status in (None, INTERRUPTED, -signal.SIGTERM):
            return _NO_END.rstrip(".")
        return f"{self.name(0)} {how_ended(status)}" if status < 0 else None

    def name(self, rank: int) -> str:
        """Return the script with its host, in words."""
        return f"the script on {self.ranks[rank].host}"
