"""Processes that a command starts through mpirun, on several machines.

    launcher      mpirun                              machine                 ranks there
    SIGUSR1  ───▶ SIGUSR1 ──────────────────────────▶ SIGUSR1 ──────────────▶ write a snapshot, end
    stdout   ◀─── stdout, a tag before each line ◀─── lines with marks ◀────── stdout
    stderr   ◀─── stderr, a tag before each line ◀─── lines, start, status ◀── stderr

                                                  guard of the first machine       script
    stdin, signals ── frames ──▶ stdin ── frames ──▶ takes them apart ── stdin, signals ──▶
    stdout         ◀──────────────────────────────────────────────────────────────── stdout
    stderr         ◀── without marks ── stderr with marks ◀── start, more, status ── stderr

`MpirunRanks` are all alike, and their output is taken apart into lines. A `Script` runs once, as
the first of its processes, and its streams are those of the command.
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

from synkhronos._machine.processes import end_with_parent
from synkhronos.comm.mpi import folders, secret
from synkhronos.launch import guard, mpirun
from synkhronos.launch.leftovers import kill_session
from synkhronos.launch.streams import Lines, Writer, mark_pattern
from synkhronos.launch.watch import Watch
from synkhronos.launch.where import Host

# A race in PRRTE, of no consequence.
_NOISE = re.compile(rb"^\[[^\]\n]*\] plm:ssh: Warning: setpgid[^\n]*\n", re.MULTILINE)
# Open MPI prints it for each foreign connection after the first, of which a page tells.
_IGNORED = re.compile(
    rb"^\[[^\n]*btl_tcp_proc\.c:\d+[^\n]*\] opal_modex_recv: [^\n]*\n", re.MULTILINE
)
# Pages about a process that was killed or has failed: exit statuses say it, or what it has printed.
_PAGE = re.compile(rb"-{60,}\n(?:(?!-{60,}\n).)*prterun.*?-{60,}\n", re.DOTALL)
_PAGE_OF_EXIT = re.compile(rb"-{60,}\nprterun (?:detected that|has exited).*?-{60,}\n", re.DOTALL)
_BEGUN = rb"(?<!-)-{60,}\n(?:A daemon failed|PRTE has lost)(?:(?!-{60,}\n).){0,4000}"
_PAGE_OF_LOSS = re.compile(
    _BEGUN + rb"Remote (?:host:|daemon:[^\n]* on node) *(\S+)\n.*?-{60,}\n\n?", re.DOTALL
)
_BEGUN_PAGE = re.compile(_BEGUN + rb"\Z", re.DOTALL)
_TAG = re.compile(rb"\[\d+,\d+\]<std(?:out|err)>: ?")
_AFTER_LOST = 1.0  # seconds for mpirun after all ranks that can be reached have ended
GRACE = 10.0  # seconds for a script to end after a Ctrl-C
_NO_END = "mpirun has ended before the script."
_FRAME = 2048  # bytes of input; PRRTE drops input above 4096 bytes a message


class Mpirun(Watch):
    """A run of mpirun's command `line`, which ends with its launcher.

    If nothing starts, `hosts` are asked why, by `agent` or ssh. The rest is as in `Watch`.
    """

    after_all = 10.0  # seconds for mpirun to end after all ranks
    _stdin = subprocess.DEVNULL

    def __init__(
        self,
        line: Sequence[str],
        hosts: Sequence[Host] = (),
        agent: str | None = None,
        **more: Any,
    ) -> None:
        super().__init__(**more)
        self._line, self._hosts, self._agent = line, hosts, agent

    @contextlib.contextmanager
    def _begun(self):
        with folders.of_mpirun(self._environment) as environment:
            line = list(self._line)
            if secret.VARIABLE not in environment:  # else the user's: the line exports it
                # The line has its name alone, because all users of a machine can read it.
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

    def _ask_to_end(self):
        self._mpirun.send_signal(signal.SIGUSR1)

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
            if all(each.status is not None for each in self.ranks):
                self._end_after(self.after_all)

    def _status(self):
        if self.interrupted_by or self.cause is not None or not self.has_started:
            return super()._status()
        code = self._mpirun.returncode
        if any(rank.status is None for rank in self.ranks):
            return max(code, 1)
        if code:
            self.say(f"mpirun has ended with status {code}, after all ranks.")
        return super()._status()

    def failure_summary(self) -> list[str]:
        """Return sentences about a run that has not ended well."""
        if not self.has_started and not self.interrupted_by:
            why = mpirun.why_not_started(self.own_words, self._hosts, self._agent)
            return [f"can't launch: {why}"]
        said = super().failure_summary()
        if self.own_words.strip("\n \0") and self.cause is None and not self.interrupted_by:
            said.append(f"mpirun says:\n{self.own_words.strip()}")
        return said


class MpirunRanks(Mpirun):
    """All ranks of a run, of which mpirun tags each line of output."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._line_mark = mark_pattern(more["token"], "line")
        self._lines = {1: Lines(), 2: Lines()}  # of mpirun's streams
        self._is_tagged = {1: False, 2: False}  # whether half a line is of a machine
        self._own = bytearray()  # what mpirun says by itself
        self._of_machines = bytearray()  # what machines say, and was not shown
        self.lost: list[int] = []  # ranks of machines of which nothing is heard

    @property
    def own_words(self) -> str:
        """The lines that mpirun has printed by itself, but for those about ranks that failed."""
        text = _NOISE.sub(b"", bytes(self._own + self._of_machines))
        if self.has_started or self._of_machines:
            text = (_PAGE if self.has_started else _PAGE_OF_EXIT).sub(b"", text)
        return text.decode(errors="replace")

    def _take_mark(self, rank, kind, text):
        if kind != b"lost":
            super()._take_mark(rank, kind, text)
            self._show_machines()
        elif rank not in self.lost and self.ranks[rank].status is None:
            self.lost.append(rank)
            self.say(f"{self.name(rank)} {text}.")
        if self.lost and all(
            known.status is not None or at in self.lost for at, known in enumerate(self.ranks)
        ):
            self._ending = [signal.SIGKILL]  # mpirun would wait for its daemon there
            self._end_after(_AFTER_LOST)

    def _status(self):
        status = super()._status()
        return 1 if self.lost and not self.interrupted_by else status

    def failure_summary(self) -> list[str]:
        """Return sentences about a run that has not ended well."""
        if not self.lost or self.interrupted_by:
            return super().failure_summary()
        return [f"{self._names_of_lost()}, which has ended the run."]

    @property
    def loss(self) -> str | None:
        """What was lost, in words, if that has ended the run."""
        fails_itself = self.cause is not None and not self._follows(self.cause)
        if not self.lost or fails_itself or self.interrupted_by or self._has_result():
            return super().loss
        return self._names_of_lost()

    def _names_of_lost(self):
        return f"{' and '.join(map(self.name, self.lost))} can't be reached any more"

    def _take(self, stream, data, is_end=False):
        for line in self._lines[stream].take(data, is_end):
            self._take_line(stream, line)

    def _take_line(self, stream, line):
        """Pass a line on: the parts with the tag of a machine, and what mpirun says by itself."""
        at, is_tagged = 0, self._is_tagged[stream]
        for tag in [*_TAG.finditer(line), None]:
            text = line[at : tag.start() if tag else len(line)]
            if text:
                self._take_text(stream, is_tagged, text)
            if tag:
                at, is_tagged = tag.end(), True
        self._is_tagged[stream] = is_tagged and not line.endswith(b"\n")

    def _take_text(self, stream, is_tagged, text):
        if not is_tagged:
            self._own += text
        elif line := self._line_mark.match(text):
            text = text[line.end() :]
            rank = int(line[1])
            if stream == 2:
                text = self._without_marks(text)
            if text:
                self._show(stream, rank, text if text.endswith(b"\n") else text + b"\n")
        else:
            self._of_machines += self._without_marks(text)
            self._show_machines()

    def _show_machines(self):
        """Show what machines say beside their ranks, if it is not why these don't start."""
        if self.has_started and self._of_machines:
            self._write(2, bytes(self._of_machines))
            self._of_machines.clear()


class Script(Mpirun):
    """A script on several machines: its streams and signals are those of this command.

    What mpirun prints before the guard's first mark is about mpirun.
    """

    heard = guard.FORWARDED
    before_kill = 2.0
    after_all = 3.0
    _stdin = subprocess.PIPE

    def __init__(
        self,
        line: Sequence[str],
        hosts: Sequence[Host],
        agent: str | None,
        grace: float = GRACE,
    ) -> None:
        token = mpirun.new_token()
        environment = {**os.environ, guard.VARIABLE: token}
        more = {"names": ["the script"], "environment": environment, "token": token}
        super().__init__(line, hosts, agent, grace=grace, **more)
        self._losses: list[str] = []  # what processes have told of machines and workers
        self._mark = mark_pattern(token, end="\n")  # with its newline, which may come later
        self._beginning = f"\0{token} ".encode()  # of a mark
        self._tail = bytearray()  # of stderr: may be the beginning of a mark
        self._pages = {1: b"", 2: b""}  # the beginning of a page about a daemon
        self._held = {1: bytearray(), 2: bytearray()}  # before the script has started
        self._late = bytearray()  # stderr after the script has ended
        self._was_asked = self._ended_itself = False

    @property
    def own_words(self) -> str:
        """What mpirun has printed before the script has started."""
        return _NOISE.sub(b"", bytes(self._held[2] + self._held[1])).decode(errors="replace")

    @contextlib.contextmanager
    def _begun(self):
        with super()._begun():
            self._input = Writer(os.dup(self._mpirun.stdin.fileno()), self._selector)
            self._mpirun.stdin.close()
            yield

    def _interrupt(self, number):
        """Pass a signal on to the script; the second Ctrl-C ends it."""
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
        """Pass output on, but for marks, of which the end may not have come yet."""
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
        if is_end and not self._losses:  # else MPI and mpirun complain, of what was told
            self._write(2, _PAGE.sub(b"", bytes(self._late)))

    def _note_page(self, page):
        """Take note of the page about a daemon that has gone, which is the last that is printed."""
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
            if rank:  # for this machine the script's is lost, which may only be slow to end
                self._end_after(self._grace)
            return
        if kind == b"own":
            self._ended_itself = True
            return
        super()._take_mark(rank, kind, text)
        if kind == b"status" and self._losses:  # mpirun would wait for its daemon there
            self._ending = [signal.SIGKILL]
            self._end_after(_AFTER_LOST)
        if kind == b"start":
            self._write(2, _NOISE.sub(b"", bytes(self._held[2])))
            self._write(1, bytes(self._held[1]))
        if kind in (b"start", b"more"):
            self._wait_for_stdin()

    def _wait_for_stdin(self):
        """Take the next piece of input, unless a terminal would stop this process for it."""
        try:
            if not os.isatty(0) or os.tcgetpgrp(0) == os.getpgrp():
                os.fstat(0)
                self._selector.register(0, selectors.EVENT_READ, self._read_stdin)
        except OSError:  # closed
            self._input.write(guard.HEADER.pack(guard.DATA, 0))

    def _read_stdin(self, fd):
        self._selector.unregister(fd)
        data = os.read(fd, _FRAME)
        self._input.write(guard.HEADER.pack(guard.DATA, len(data)) + data)

    def _status(self):
        is_known = self.ranks[0].status is not None and not self.interrupted_by
        return self.ranks[0].exit_status if is_known else super()._status()

    def failure_summary(self) -> list[str]:
        """Return a sentence if the script has not started, or its end was not told."""
        if not self.has_started or self.interrupted_by:
            return super().failure_summary()
        if self.ranks[0].status is not None:
            return []
        return [f"{self._losses[0]}, which has ended the run."] if self._losses else [_NO_END]

    @property
    def loss(self) -> str | None:
        """What was lost, in words, if that has ended the script and nobody has asked it to end."""
        is_own = self._was_asked or self._ended_itself
        if is_own or not self.has_started or self.ranks[0].status == 0:
            return None
        return next(iter(self._losses), super().loss)

    def _about_lost(self):
        return [_NO_END]

    def name(self, rank: int) -> str:
        """Return the script with its host, in words."""
        return f"the script on {self.ranks[rank].host}"
