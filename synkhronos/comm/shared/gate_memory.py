"""What the processes of a gate share from before the fork: cells, buffers and pipes.

    cells     the master's, then one cache line for each rank: numbers, written by one rank each
    mailbox   the master's new command
    replies   one buffer for each rank: its answer or its error
    boards    one for each rank, of what it tells all others

Anonymous memory, which pages that nobody writes to take nothing of.
"""

import mmap
import os
import threading

from synkhronos._machine.processes import make_pipe

MAILBOX = 1 << 20
REPLY = 1 << 16
BOARD = 1 << 21

# Cells of the master, then those of a rank in its line.
SEQUENCE, SLOT, LENGTH, ABORT = range(4)
DONE, ASLEEP, REPLY_KIND, REPLY_LENGTH, ROWS, MET, NEWS, BALLOT = range(8)
LINE = 8
NO_REPLY, ANSWER, ERROR = range(3)


class Memory:
    """The shared cells and buffers of one gate."""

    def __init__(self, n_ranks: int):
        size = 8 * LINE * (n_ranks + 1)
        self._all = memoryview(mmap.mmap(-1, size + MAILBOX + (REPLY + BOARD) * n_ranks))
        self.cells = self._all[:size].cast("q")
        self.mailbox = self._all[size : size + MAILBOX]
        self.replies = self._split(size + MAILBOX, REPLY, n_ranks)
        self.boards = self._split(size + MAILBOX + REPLY * n_ranks, BOARD, n_ranks)

    def _split(self, begin, length, count):
        return [self._all[begin + length * i : begin + length * (i + 1)] for i in range(count)]


class Notices:
    """What each rank says of itself in a cell, for others to read when they have met it."""

    def _line(self, rank):
        return LINE * (rank + 1)

    def post_news(self, news: int) -> None:
        """Say how far this rank's board is written; every change is one to a larger number."""
        self._cells[self._line(self.rank) + NEWS] = news

    def news(self, rank: int) -> int:
        """Return what that rank has posted."""
        return self._cells[self._line(rank) + NEWS]

    def report_rows(self, rows: int) -> None:
        """Tell from how many rows this rank computed; -1 says that it did not run."""
        self._cells[self._line(self.rank) + ROWS] = rows

    def rows_of(self, rank: int) -> int:
        """Return what that rank reported in the last call."""
        return self._cells[self._line(rank) + ROWS]

    def agree(self, ballot: int) -> bool:
        """Meet, and return whether the ballots of all ranks are the same.

        The ranks must meet once more before the next ballot.
        """
        self._cells[self._line(self.rank) + BALLOT] = ballot
        self.meet()
        ballots = {self._cells[self._line(rank) + BALLOT] for rank in range(self.n_ranks)}
        return len(ballots) == 1

    def hindmost(self, ranks, kind: int, value: int) -> list:
        """Return those ranks whose cells of a kind are below a value, and who hold up the rest."""
        cells, begin = self._cells, self._cells[SEQUENCE] << 20
        met = {
            rank: max(cells[self._line(rank) + MET], begin)
            for rank in ranks
            if cells[self._line(rank) + kind] < value
        }
        # Who has come to more meetings of the call waits for those who have come to fewer.
        fewest = min(met.values(), default=begin)
        return [rank for rank in met if met[rank] == fewest]


class Fence:
    """Orders a rank's write of one cell before its next read of another, for all ranks.

    Taking a lock is an atomic read-modify-write, a full memory barrier on x86.
    """

    def __init__(self):
        self._lock = threading.Lock()

    def __call__(self):
        """Take the lock and give it back."""
        # "with", because between two calls a Ctrl-C could leave the lock taken for ever.
        with self._lock:
            pass


def make_pipes(count):
    """Return so many pipes, or none."""
    pipes = []
    try:
        while len(pipes) < count:
            pipes.append(make_pipe())
    except OSError:
        for end in (end for pipe in pipes for end in pipe):
            os.close(end)
        raise
    return pipes
