"""Starts processes on several machines through mpirun, and passes on their output.

    launcher                     mpirun           guard of the first machine       script
    stdin, signals ── frames ──▶ stdin ── frames ──▶ takes them apart ── stdin, signals ──▶
    stdout         ◀──────────────────────────────────────────────────────────────── stdout
    stderr         ◀── without marks ── stderr with marks ◀── start, more, status ── stderr

A `Script` runs in the first of its processes, and its streams are those of the command::

    read from mpirun's stderr                written to stderr   and what follows
    a warning of mpirun                      later               why nothing starts, if nothing does
    mark: machine 0, start, 77 node1         the warning         the script has this process id
    mark: machine 1, begun                                       MPI has begun there
    an error of the script                   at once
    page: PRTE has lost ... on node b-2                          `loss` is "mpirun has lost b-2"
    mark: machine 0, status, 1                                   the exit status; mpirun is killed
    page: prterun has noticed ...                                nothing: it repeats the loss

`Marks` and `PagesOfLosses` take marks and pages apart.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import signal
import subprocess
from typing import Any, Sequence

from synkhronos._machine import heartbeats
from synkhronos._machine.processes import StopWatch, end_with_parent, how_ended
from synkhronos.comm.mpi import folders, secret
from synkhronos.launch import INTERRUPTED, guard, mpirun
from synkhronos.launch.leftovers import kill_session
from synkhronos.launch.pages import NOISE, PAGE, PagesOfLosses
from synkhronos.launch.streams import Marks, Writer
from synkhronos.launch.watch import LaunchedProcess, Watch
from synkhronos.launch.where import Host

_AFTER_LOST = 1.0  # seconds for mpirun after all ranks that can be reached have ended
GRACE = 10.0  # seconds for a script to end after a Ctrl-C
_NO_END = "mpirun has ended before the script."
# Marks about the start of a machine: its guard runs; MPI has begun.
_STAGES = {b"here": 1, b"start": 1, b"begun": 2}
_FRAME = 2048  # bytes of input in a message; PRRTE drops input beyond 4096 bytes


class Mpirun(Watch):
    """A run of mpirun with the command line `line`; mpirun ends with the launcher.

    `options` say how to reach the `hosts`: see `mpirun.Options`. If not all ranks have begun in
    time, or mpirun is stopped for long, the launcher ends all. The rest is as in `Watch`.
    """

    after_all = 10.0  # seconds for mpirun to end after all ranks
    _stdin = subprocess.DEVNULL

    def __init__(
        self, line: Sequence[str], hosts: Sequence[Host], options: Any, **watched: Any
    ) -> None:
        super().__init__(**watched)
        self._line, self._hosts, self._options = line, hosts, options
        self._losses: list[str] = []  # sentences about lost machines and processes
        self._left = options.wait_start  # seconds for all ranks to begin
        lost_after = options.lost_after or os.environ.get(heartbeats.VARIABLE)
        self._stops, self._lost_seconds = StopWatch(), heartbeats.limit(lost_after)

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

    def _tick(self, seconds):
        if self._deadline < float("inf"):  # they end already
            return
        self._left -= min(seconds, 2.0)  # after a longer pause the launcher itself was stopped
        if self._stops.seconds(self._mpirun.pid) > self._lost_seconds:
            self.hit = f"mpirun was stopped for {self._lost_seconds:g} s"
            self._lose(self.hit)
        elif self._left < 0 and (late := self._late()):
            waited = mpirun.within(self._options.wait_start, "--wait-start")
            self._lose(f"{' and '.join(late)} did not begin {waited}")

    def _late(self):
        """Return the hosts with a rank that has not begun."""
        pids = iter([rank.pid for rank in self.ranks])
        of_hosts = [(host.name, [next(pids) for _ in range(host.ranks)]) for host in self._hosts]
        return [name for name, own in of_hosts if not all(own)]

    def _lose(self, what):
        """Note a loss that this launcher has found, and end all."""
        self._losses.append(what)
        self._end_mpirun_soon()

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
        status = self._mpirun.poll()
        if status is not None and status < 0 and not self._losses:
            self.hit = f"mpirun {how_ended(status)}"
        kill_session(self._mpirun.pid)
        self._mpirun.wait()
        self._mpirun.stdout.close()
        self._mpirun.stderr.close()

    def _take_mark(self, rank, kind, text):
        if kind == b"start":
            pid, self.ranks[rank].host = text.split(" ", 1)
            self.ranks[rank].pid = int(pid)
        elif kind == b"status":
            self._note_end(rank, int(text))
            if all(known.status is not None for known in self.ranks):
                self._end_after(self.after_all)

    def _why_not_started(self):
        printed = "\n".join([self.own_words, *self._losses])
        why = mpirun.why_not_started(printed, self._hosts, self._options)
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
        self, line: Sequence[str], hosts: Sequence[Host], options: Any, grace: float = GRACE
    ) -> None:
        token = mpirun.new_token()
        environment = {**os.environ, guard.VARIABLE: token}
        ranks = [LaunchedProcess()]
        super().__init__(line, hosts, options, ranks=ranks, environment=environment, grace=grace)
        self._marks, self._pages = Marks(token), {1: PagesOfLosses(), 2: PagesOfLosses()}
        # Output before the script has started; then stderr after it has ended.
        self._kept = {1: bytearray(), 2: bytearray()}
        self._stages: dict[int, int] = {}  # machine -> how far its start is: see `_STAGES`
        self._was_asked = self._ended_itself = False

    @property
    def own_words(self) -> str:
        """The output before the script has started, which is mpirun's."""
        return NOISE.sub(b"", bytes(self._kept[2] + self._kept[1])).decode(errors="replace")

    @contextlib.contextmanager
    def _begun(self):
        with super()._begun():
            self._input = Writer(os.dup(self._mpirun.stdin.fileno()), self._selector)
            self._mpirun.stdin.close()
            yield

    def _tick(self, seconds):
        super()._tick(seconds)
        for stream, pages in self._pages.items():
            # What looked like the beginning of a page, and does not grow, is the script's own.
            self._pass(stream, b"", is_end=pages.has_rested())

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

    def _late(self):
        """Return the hosts that are behind the others, which wait for them."""
        wanted = 2 if len(self._hosts) > 1 else 1  # a machine alone has no MPI
        stages = [self._stages.get(machine, 0) for machine in range(len(self._hosts))]
        if min(stages) >= wanted or self.ranks[0].status is not None:
            return []
        return [host.name for host, stage in zip(self._hosts, stages) if stage == min(stages)]

    def _take(self, stream, data, is_end=False):
        """Pass output on, without marks and without mpirun's pages."""
        for part in self._marks.take(data) if stream == 2 else [data]:
            if isinstance(part, tuple):
                self._take_mark(*part)
            else:
                self._pass(stream, part)
        if is_end:
            self._pass(stream, b"", is_end)
        if is_end and stream == 2 and self.has_started and not self._losses:
            self._write(2, PAGE.sub(b"", bytes(self._kept[2])))  # else it only repeats the loss

    def _pass(self, stream, data, is_end=False):
        if not self.has_started:
            self._kept[stream] += data
            return
        pages = self._pages[stream]
        data = pages.take(data, is_end)
        self._losses[:0] = [f"The guard on {host} {how_ended(-by)}" for host, by in pages.guards]
        self._losses += [f"mpirun has lost {host}" for host in pages.lost]
        pages.guards.clear()
        pages.lost.clear()
        if stream == 2 and self.ranks[0].status is not None:
            self._kept[2] += data
        else:
            self._write(stream, data)

    def _take_mark(self, rank, kind, text):
        if kind in _STAGES:
            self._stages[rank] = _STAGES[kind]
        if kind == b"start":
            super()._take_mark(rank, kind, text)
            for stream, kept in self._kept.items():
                self._write(stream, NOISE.sub(b"", bytes(kept)))
                kept.clear()
            self._wait_for_stdin()
        elif kind == b"more":
            self._wait_for_stdin()
        elif kind == b"lost":
            self._losses.append(text.partition(". ")[0].rstrip("."))
            if rank:  # told by another machine: that of the script may only be slow to end
                self._end_after(self._grace)
        elif kind == b"stopped":
            self._lose(text)
        elif kind == b"own":
            self._ended_itself = True
        elif kind == b"status":
            super()._take_mark(rank, kind, text)
            if self._losses:
                self._end_mpirun_soon()

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
        """Return a sentence if the script has not started, or mpirun has ended it after a loss.

        Nothing tells the script why, if its end was not reported, or is that of a SIGTERM.
        """
        status = self.ranks[0].status
        is_ended = status is None or (status == -signal.SIGTERM and self._losses)
        if self.interrupted_by or not is_ended:
            return []
        if not self.has_started and not self._stages:
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
