"""Waits of ranks on one machine for one another, in shared cells.

    rank                              shared cells                      another rank
    meet() ── MET[rank] = n ──▶ wakes those that sleep for this cell ──▶ meet() goes on

A waiting rank first spins on a cell, for as long as `spinning` says. Then it sleeps in ``poll`` on
a pipe of its own, to which another rank writes when it stores the cell that the sleeper waits for,
and on descriptors that become readable when a process dies. So a wait ends with the answer or with
the death, and an idle rank uses no CPU.

The order of stores and loads:

- Data first, then the cell that announces it: arrays before MET. A rank that loads the cell and
  then the data finds the data, because x86 keeps the order of stores, and that of loads.
- A rank that announces something stores the cell, crosses the fence, and loads ASLEEP. A rank that
  goes to sleep stores ASLEEP, crosses the fence, and loads the cell. So at least one of the two
  sees the store of the other, and no wake-up is lost.
- ASLEEP says which cell the sleeper waits for, and only a store of that cell wakes it: ranks that
  all others wait for would otherwise be woken by each of them. An abort wakes every sleeper.

SEQUENCE numbers the calls of a session; a group without calls leaves it as it is. A rank that
raises sets ABORT to that number, and every wait inside of the call looks at ABORT.
"""

import contextlib
import json
import os
import select

from synkhronos.comm import Aborted
from synkhronos.comm.shared.gate_memory import (
    ABORT,
    ASLEEP,
    BEGIN,
    DONE,
    ELSEWHERE,
    END,
    LABEL,
    LINE,
    MET,
    NEWS,
    ROWS,
    SEQUENCE,
    VOTE,
    make_fence,
)
from synkhronos.comm.shared.spinning import Spinning

HEARTBEAT_MS = 1000  # a sleeper looks again this often, even if no rank wakes it


class Meetings:
    """One rank's end of the cells in `memory`, and of the pipes that wake sleepers.

    `spin` says whether each rank has a core of its own.
    """

    posts_bounds = True

    def __init__(self, memory, wake_pipes, rank, n_ranks, spin):
        self.rank, self.n_ranks = rank, n_ranks
        self._cells, self._labels = memory.cells, memory.labels
        # Each rank writes to its own board before a meeting; all others read it after the meeting.
        self.boards = memory.boards
        self._spinning = Spinning(self._cells, spin)
        self._wake_pipes = wake_pipes
        self._fence = make_fence()
        self._locate_cells()

    def _locate_cells(self):
        """Note where this rank's cells are, and those of the others."""
        line = self._line(self.rank)
        self._done, self._met, self._asleep = line + DONE, line + MET, line + ASLEEP
        self._own_rows = line + ROWS
        others = [rank for rank in range(self.n_ranks) if rank != self.rank]
        self._others = tuple((rank, self._line(rank)) for rank in others)
        self._meetings = tuple(line + MET for _, line in self._others)
        self._sleepers = tuple(
            (line + ASLEEP, self._wake_pipes[rank]) for rank, line in self._others
        )
        self._wake_pipe = self._wake_pipes[self.rank]
        self._poll = select.poll()
        self._poll.register(self._wake_pipe, select.POLLIN)

    def _line(self, rank):
        return LINE * (rank + 1)

    def label(self, **told) -> None:
        """Tell `synkhronos top` what this rank is; without arguments, that it has ended."""
        text = json.dumps(told).encode() if told else b""
        self._labels[self.rank][:] = text[:LABEL].ljust(LABEL, b"\0")

    def post_news(self, news: int) -> None:
        """Publish how far this rank's board is written: a larger number with every change."""
        # Stored after the board is written: a rank that loads the number finds the entries.
        self._cells[self._line(self.rank) + NEWS] = news

    def news(self) -> list:
        """Return the last number that each rank has posted, in rank order."""
        return self._cells[LINE + NEWS :: LINE].tolist()

    def post_bounds(self, begin: int, end: int) -> None:
        """Tell all ranks, on the master, which rows the next call selects."""
        # As the slot of the command, they are stored before SEQUENCE and loaded in the call only.
        cells = self._cells
        cells[BEGIN], cells[END] = begin, end

    def bounds(self) -> tuple:
        """Return the last bounds that the master has posted."""
        cells = self._cells
        return cells[BEGIN], cells[END]

    def report_rows(self, rows: int) -> None:
        """Publish the number of rows that this rank computed from; -1 if it did not run."""
        self._cells[self._own_rows] = rows

    def rows(self) -> list:
        """Return the numbers that the ranks reported in the last call, in rank order."""
        return self._cells[LINE + ROWS :: LINE].tolist()

    def agree(self, vote: int) -> bool:
        """Meet, and return whether the votes of all ranks are the same.

        The ranks must meet once more before the next vote: the first rank to leave this meeting
        would otherwise overwrite its vote before the others have read it.
        """
        self.vote(vote)
        self.meet()
        return len(set(self._cells[LINE + VOTE :: LINE].tolist())) == 1

    def vote(self, vote: int) -> None:
        """Publish a number; the other ranks read it after the next meeting."""
        self._cells[self._line(self.rank) + VOTE] = vote

    def vote_of(self, rank: int) -> int:
        """Return the number that a rank has published."""
        return self._cells[self._line(rank) + VOTE]

    def has_left(self, rank: int) -> bool:
        """Return whether a rank has finished the present call, or has left its group."""
        return self._cells[self._line(rank) + DONE] >= self._cells[SEQUENCE]

    def slowest(self, ranks, kind: int, value: int) -> list:
        """Return those of `ranks` that hold up a wait until their cells of a kind reach a value.

        The kind is DONE or MET.
        """
        cells, begin = self._cells, self._cells[SEQUENCE] << 20
        met = {
            rank: max(cells[self._line(rank) + MET], begin)
            for rank in ranks
            if cells[self._line(rank) + kind] < value
        }
        # A rank that has come to more meetings of the call waits for the ranks with fewer.
        fewest = min(met.values(), default=begin)
        return [rank for rank in met if met[rank] == fewest]

    def _wait(self, cell, value, abort=None):
        """Wait until the cell has reached `value`, or until the call `abort` is aborted."""
        if not self._spinning.wait(cell, value, abort):
            self._wait_asleep(cell, value, abort)
            self._spinning.learn(cell)

    def _wait_asleep(self, cell, value, abort):
        cells, asleep = self._cells, self._asleep
        patience = None
        try:
            while True:
                cells[asleep] = cell + 1
                with self._fence:  # ASLEEP is stored before the cell is loaded, see the top
                    has_come = cells[cell] >= value
                if has_come:
                    if patience:
                        patience.end()
                    return
                if cells[ABORT] == abort:
                    raise Aborted
                if abort is not None:
                    self._check_not_left(cell, value, abort)
                if not self._sleep():
                    patience = self._warn(patience, cell % LINE, value)
        finally:
            cells[asleep] = 0  # if a Ctrl-C comes before this, ranks wake this one needlessly

    def _sleep(self):
        """Sleep until a rank wakes this one or a process ends; return False after a heartbeat."""
        happened = self._poll.poll(HEARTBEAT_MS)
        for fd, _ in happened:
            if fd == self._wake_pipe:
                self._drain()
            else:
                self._on_end(fd)
        return bool(happened)

    @contextlib.contextmanager
    def elsewhere(self):
        """Show in the block, to `synkhronos top`, that this rank waits for another machine."""
        self._cells[self._asleep] = ELSEWHERE
        try:
            yield
        finally:
            self._cells[self._asleep] = 0

    def _drain(self):
        """Empty the pipe that wakes this rank."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_pipe, 4096)

    def _on_end(self, fd):
        """Answer the end of a process, which has made this descriptor readable."""
        raise NotImplementedError

    def _warn(self, patience, kind, value):
        """Warn, if it is time, that ranks keep this one waiting; return the wait's `Patience`."""
        return patience

    def _wake(self, stored):
        """Wake the ranks that sleep until the cell changes that this rank has just stored."""
        with self._fence:
            cells, stored = self._cells, stored + 1
        for asleep, pipe in self._sleepers:
            if cells[asleep] == stored:
                write(pipe)

    def _wake_all(self):
        with self._fence:
            cells = self._cells
        for asleep, pipe in self._sleepers:
            if cells[asleep]:
                write(pipe)

    def abort(self):
        """Tell every rank to leave the call that is under way."""
        # ABORT gets the number of the call, so that the next call need not clear it.
        self._cells[ABORT] = self._cells[SEQUENCE]
        self._wake_all()

    @property
    def is_aborted(self) -> bool:
        """Whether the present call has been aborted."""
        return self._cells[ABORT] == self._cells[SEQUENCE]

    @property
    def sequence(self) -> int:
        """The number of the last call that was started."""
        return self._cells[SEQUENCE]

    def _meet(self):
        cells, mine = self._cells, self._met
        sequence = cells[SEQUENCE]
        # The number begins anew with each call, beyond all numbers of calls before: if only some
        # ranks came to the meetings of an aborted call, their counts agree again in the next one.
        number = max(cells[mine], sequence << 20) + 1
        cells[mine] = number
        self._wake(mine)
        for cell in self._meetings:
            if cells[cell] < number:
                self._wait(cell, number, sequence)

    def _check_not_left(self, cell, value, sequence):
        """Raise if the rank of a cell has left the call without coming to the meeting."""
        done = cell - MET + DONE
        # A rank stores MET or ABORT before DONE. So DONE is loaded first: MET and ABORT, loaded
        # after it, are up to date if it says that the rank has left.
        if self._cells[done] >= sequence and self._cells[cell] < value:
            if self._cells[ABORT] == sequence:
                raise Aborted
            self._raise_left(done // LINE - 1)

    def _raise_left(self, rank):
        """Raise the exception for a rank that has left without coming to a meeting."""
        raise NotImplementedError


def write(pipe):
    """Wake the rank that reads from a pipe."""
    with contextlib.suppress(BlockingIOError):  # a full pipe wakes the rank, too
        os.write(pipe, b"\0")
