"""Watches the ranks of a group: what they print, and how each ends.

    command            ranks
    SIGUSR1     ─────▶ write a snapshot, or end otherwise
    stdout      ◀───── stdout, line by line
    stderr      ◀───── stderr
    rank_0.log  ◀───── the lines of rank 0: of both streams, in the order in which they came

Derived classes start them: `children.Children`, `launching.MpirunRanks`.
"""

from __future__ import annotations

import io
import os
import selectors
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Mapping, Sequence

from synkhronos import _wording
from synkhronos._machine.processes import how_ended
from synkhronos.launch import INTERRUPTED
from synkhronos.launch.streams import SIZE, mark_pattern
from synkhronos.launch.watch import LaunchedProcess, Watch
from synkhronos.parameter_server.group.membership import FOLLOWS, FOR_LOG, ONCE

GRACE = 30.0  # seconds for the ranks to write a snapshot and end, after a Ctrl-C
AFTER_FAILURE = 10.0  # seconds for the other ranks to end
_LAST_LINES = 20
_LONGEST_LINE = 1 << 20  # bytes of an incomplete line that are kept


@dataclass
class Rank(LaunchedProcess):
    """A rank, as the launcher knows it."""

    device: str = ""
    last_lines: list[str] = field(default_factory=list)

    @property
    def has_failed(self) -> bool:
        """Whether it has ended with an error."""
        return self.status not in (None, 0, INTERRUPTED)

    @property
    def end(self) -> str:
        """How it has ended, in words."""
        lost = "is lost: its end was not reported"
        return lost if self.status is None else how_ended(self.status)


class Lines:
    """Splits a stream into lines, as its parts come."""

    def __init__(self):
        self._tail = bytearray()

    def take(self, data: bytes, is_end: bool = False) -> list[bytes]:
        """Return the lines that are complete now; pieces of a long one, and the last at the end."""
        tail = self._tail
        tail += data
        if is_end and tail and not tail.endswith(b"\n"):
            tail += b"\n"
        end = len(tail) if len(tail) > _LONGEST_LINE else tail.rfind(b"\n") + 1
        lines = io.BytesIO(tail[:end]).readlines()
        del tail[:end]
        return lines


class WatchedRanks(Watch):
    """All ranks of a run; `names` are their devices.

    Derived classes start them, and replace `title`, `request` and `name` if the processes are no
    ranks of a rule. `folder` gets a log file for each rank. If `is_served`, rank 0 is a server; if
    `outlives`, other ranks go on after one has died. After a first Ctrl-C, or the end of standard
    input if `ends_with_stdin`, ranks have `grace` seconds to end. `token` begins the marks that
    processes write to standard error.
    """

    title = "synkhronos rule"
    request = "the ranks have {:g} s to write a snapshot"

    def __init__(
        self,
        *args: Any,
        names: Sequence[str],
        environment: Mapping[str, str],
        folder: Path | None = None,
        is_served: bool = False,
        outlives: bool = False,
        ends_with_stdin: bool = False,
        grace: float = GRACE,
        token: str = "",
    ) -> None:
        ranks = [Rank(device=name) for name in names]
        super().__init__(*args, ranks=ranks, environment=environment, grace=grace)
        self._mark = mark_pattern(token, end="\n?")  # in standard error; see `_take_mark`
        self.failed: list[int] = []  # in the order in which they ended
        self.interrupted_at = 0.0  # seconds since the epoch
        self.folder, self._ends_with_stdin = folder, ends_with_stdin
        self._is_served, self._outlives = is_served, outlives
        self._said: set[bytes] = set()  # lines of ranks that are said once

    @property
    def own_words(self) -> str:
        """The output of the program that starts the ranks, without that of the ranks."""
        return ""

    @property
    def cause(self) -> int | None:
        """The rank whose failure has ended the run; None if none has failed."""
        by_itself = [at for at in self.failed if not self._follows(at)]
        return next(iter(by_itself or self.failed), None)

    def _follows(self, rank: int) -> bool:
        """Return whether a rank that has failed has ended because another one had."""
        return self.ranks[rank].status in (-signal.SIGTERM, FOLLOWS)

    def _serves(self, rank: int) -> bool:
        return self._is_served and rank == 0

    def run(self) -> int:
        """Run all ranks to their end, with all that they have started; return an exit status."""
        for rank in range(len(self.ranks)):
            self._log(rank, b"")
        return super().run()

    def _serve(self):
        if self._ends_with_stdin:
            self._selector.register(0, selectors.EVENT_READ, self._read_stdin)
        super()._serve()

    def _status(self):
        if self.interrupted_by:
            return 128 + self.interrupted_by
        if self.cause is not None:
            return self.ranks[self.cause].exit_status
        if not self.has_started or any(rank.status is None for rank in self.ranks):
            return 1
        statuses = [rank.status for rank in self.ranks]
        return INTERRUPTED if INTERRUPTED in statuses else 0

    def _ask_to_end(self) -> None:
        """Ask the ranks to end soon."""
        raise NotImplementedError

    def _read_stdin(self, fd):
        if not os.read(fd, SIZE):
            self._selector.unregister(fd)
            self._interrupt(signal.SIGTERM)

    def _interrupt(self, number):
        """Ask the ranks to end; the second time, end them."""
        self.interrupted_at = self.interrupted_at or time.time()
        is_first, self.interrupted_by = not self.interrupted_by, self.interrupted_by or number
        if is_first and self.has_started:
            asked = self.request.format(self._grace)
            self.say(f"stopping; {asked}. A second Ctrl-C ends them at once.")
            self._ask_to_end()
            self._end_after(self._grace)
        else:
            self._end_next()

    def _take_lost_reader(self):
        if not self.interrupted_by:
            self._interrupt(signal.SIGTERM)

    def _note_end(self, rank, status):
        super()._note_end(rank, status)
        if self.ranks[rank].has_failed:
            self.failed.append(rank)
            if not self._outlives:
                self._end_after(AFTER_FAILURE)
            elif not self.interrupted_by:
                self.say(self.end_of(rank))

    def _without_marks(self, text):
        """Take the marks in a line of standard error; return the rest of the line."""
        for mark in self._mark.finditer(text):
            self._take_mark(int(mark[1]), mark[2], mark[3].decode(errors="replace"))
        without = self._mark.sub(b"", text)
        if without == text:
            return text
        return without.rstrip(b"\n") + b"\n" if without.strip(b"\0\n") else b""

    def _show(self, stream, rank, text):
        """Print the output of a rank, and append it to its log file."""
        if text.startswith(ONCE.encode()):
            text = text[len(ONCE) :]
            if text not in self._said:
                self._said.add(text)
                self.say(text.decode(errors="replace").rstrip("\n"))
        elif text.startswith(FOR_LOG.encode()):
            text = text[len(FOR_LOG) :]
        else:
            self._write(stream, text)
        self._log(rank, text)
        kept = self.ranks[rank].last_lines
        kept.append(text.decode(errors="replace").rstrip("\n"))
        del kept[:-_LAST_LINES]

    def name(self, rank: int) -> str:
        """Return a rank with its device and its host, in words.

        >>> WatchedRanks(names=["cpu"], environment={}).name(0)
        'rank 0 (cpu)'
        """
        known = self.ranks[rank]
        role = "the server, " if self._serves(rank) else ""
        device = "no device" if known.device == "none" else known.device
        return f"rank {rank} ({role}{device}{f' on {known.host}' if known.host else ''})"

    def end_of(self, rank: int) -> str:
        """Return the sentence about a rank that has failed, while the others go on."""
        others = "" if self._serves(rank) else "; the others go on without it"
        return f"{self.name(rank)} {self.ranks[rank].end}{others}."

    def _log(self, rank, text):
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / f"rank_{rank}.log", "ab") as log:
            log.write(text)

    @property
    def loss(self) -> str | None:
        """The killed or silent process whose loss has ended the run, in words.

        None if no process was lost, if one has ended by itself with an error, if the user has ended
        the run, or if the other ranks have reached their end without the lost one.
        """
        if self.interrupted_by or not self.has_started or self._has_result():
            return None
        lost = [sentence.rstrip(".") for sentence in self._about_lost()]
        if lost and (self.cause is None or self._follows(self.cause)):
            return lost[0]
        status = None if self.cause is None else self.ranks[self.cause].status
        return f"{self.name(self.cause)} {how_ended(status)}" if status and status < 0 else None

    def _has_result(self):
        workers = [known for at, known in enumerate(self.ranks) if not self._serves(at)]
        return self._outlives and any(known.status == 0 for known in workers)

    def failure_summary(self) -> list[str]:
        """Return sentences about a run that has not ended well."""
        if self.interrupted_by:
            return []
        return self._about_lost() if self.cause is None else self._about_cause(self.cause)

    def _about_lost(self):
        """Return sentences about the ranks whose end was not reported."""
        lost = [at for at, rank in enumerate(self.ranks) if rank.status is None]
        return [f"{self.name(at)} {self.ranks[at].end}." for at in lost]

    def _about_cause(self, rank):
        """Return sentences about the rank whose failure has ended the run."""
        known = self.ranks[rank]
        said = [f"{self.name(rank)} {known.end}, which has ended the run."]
        n_ended = sum(other.status == 0 for other in self.ranks)
        if n_ended:
            others = _wording.count(n_ended, "other rank")
            said = [f"{self.name(rank)} {known.end}; {others} ended as they should."]
        if known.last_lines:
            said.append(f"Its output is in {self.folder}/rank_{rank}.log.")
        return said

    def say(self, sentence: str) -> None:
        """Print a sentence of this command."""
        self._write(2, f"{_wording.printable(f'{self.title}: {sentence}')}\n".encode())
