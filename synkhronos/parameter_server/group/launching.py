"""Starts the ranks of a group: as child processes, or by mpirun, whose output is taken apart.

    launcher      mpirun                              machine                 ranks there
    SIGUSR1  ───▶ SIGUSR1 ──────────────────────────▶ SIGUSR1 ──────────────▶ write a snapshot, end
    stdout   ◀─── stdout, a tag before each line ◀─── lines with marks ◀────── stdout
    stderr   ◀─── stderr, a tag before each line ◀─── lines, start, status ◀── stderr

If all ranks are on this machine, and the user has no arguments for mpirun, mpirun starts nothing.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
from typing import Any, Callable, Mapping, Sequence

from synkhronos.launch import mpirun
from synkhronos.launch.pages import NOISE, PAGE
from synkhronos.launch.streams import mark_pattern
from synkhronos.launch.through import Mpirun
from synkhronos.launch.where import Host, is_here
from synkhronos.parameter_server.group import machine
from synkhronos.parameter_server.group.children import Children
from synkhronos.parameter_server.group.watched import Lines, WatchedRanks

# Also exported for the ranks of a group: compilers and CUDA on other hosts need them.
_OF_COMPILERS = ("PATH", "LIBRARY_PATH", "LD_LIBRARY_PATH", "CPATH")
_PAGE_OF_EXIT = re.compile(rb"-{60,}\nprterun (?:detected that|has exited).*?-{60,}\n", re.DOTALL)
_TAG = re.compile(rb"\[\d+,\d+\]<std(?:out|err)>: ?")


class MpirunRanks(WatchedRanks, Mpirun):
    """All ranks of a run. mpirun puts a tag before each line of their output."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._line_mark = mark_pattern(more["token"], "line")
        self._lines = {1: Lines(), 2: Lines()}  # of mpirun's streams
        self._is_tagged = {1: False, 2: False}  # whether an incomplete line is of a machine
        self._own = bytearray()  # mpirun's own output
        self._of_machines = bytearray()  # output of machines that was not shown yet
        self.lost: list[int] = []  # ranks of silent machines

    @property
    def own_words(self) -> str:
        """The lines that mpirun has printed by itself, except those about ranks that failed."""
        text = NOISE.sub(b"", bytes(self._own + self._of_machines))
        if self.has_started or self._of_machines:
            text = (PAGE if self.has_started else _PAGE_OF_EXIT).sub(b"", text)
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
            self._end_mpirun_soon()

    def _status(self):
        if self.interrupted_by or self.cause is not None or not self.has_started:
            return 1 if self.lost and not self.interrupted_by else super()._status()
        code = self._mpirun.returncode
        if any(rank.status is None for rank in self.ranks):
            return max(code, 1)
        if code:
            self.say(f"mpirun has ended with status {code}, after all ranks.")
        return super()._status()

    def _ask_to_end(self):
        self._mpirun.send_signal(signal.SIGUSR1)

    def failure_summary(self) -> list[str]:
        """Return sentences about a run that has not ended well."""
        if self.interrupted_by:
            return []
        if self.lost:
            return [f"{self._names_of_lost()}, which has ended the run."]
        if not self.has_started:
            return self._why_not_started()
        if self._losses:
            return [f"{self._losses[0]}, which has ended the run."]
        said = super().failure_summary()
        if self.own_words.strip("\n \0") and self.cause is None:
            said.append(f"mpirun says:\n{self.own_words.strip()}")
        return said

    @property
    def loss(self) -> str | None:
        """The lost ranks, in words, if their loss has ended the run."""
        if self._losses and not self.interrupted_by:
            return self._losses[0]
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
        """Pass a line on in parts: those with the tag of a machine, and mpirun's own text."""
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
        """Show the machines' own output once a rank runs; before, it tells why none starts."""
        if self.has_started and self._of_machines:
            self._write(2, bytes(self._of_machines))
            self._of_machines.clear()


def run_of_group(
    hosts: Sequence[Host],
    options: Any,
    command: Sequence[str],
    variables: Mapping[str, str],
    token: str,
    dry_run: bool,
    here: Callable[..., Any] = Children,
    away: Callable[..., Any] = MpirunRanks,
    **more: Any,
) -> WatchedRanks | None:
    """Return a run that has not begun; for a dry run print its command line, and return None.

    Each rank runs `command`. `here` makes the run if all ranks are on this machine and the user has
    no arguments for mpirun; else `away` makes it, by mpirun.
    """
    are_here = not options.mpirun_args and all(is_here(host.name) for host in hosts)
    line = command if are_here else _line_of_machines(hosts, options, command, variables, token)
    if dry_run:
        print(shlex.join(line))
        return None
    if are_here:
        commands = [command] * sum(host.ranks or 0 for host in hosts)
        return here(commands, environment={**os.environ, **variables}, token=token, **more)
    mpirun.check()
    return away(line, hosts, options, environment=os.environ, token=token, **more)


def _line_of_machines(
    hosts: Sequence[Host],
    options: Any,
    command: Sequence[str],
    variables: Mapping[str, str],
    token: str,
) -> list[str]:
    """Return the command line that runs the ranks of a group: ``host.ranks`` on each machine.

    `token` begins the marks of machines. The rest is as in `mpirun.line`.
    """
    if [host.name for host in hosts] != ["localhost"]:
        of_compilers = {name: os.environ[name] for name in _OF_COMPILERS if name in os.environ}
        variables = {**of_compilers, **variables}
    counts = [host.ranks or 0 for host in hosts]
    of_machine = ["--output", "tag", *machine.command(token, counts, command)]
    return mpirun.line(hosts, options, of_machine, variables)
