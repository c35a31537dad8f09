"""The start and finish barriers, and what crosses them.

    master                          shared cells                    worker
    start(command) ── payload, slot, SEQUENCE = n ──▶  wakes        next_command()
    runs its part                                                   runs its part
    finish()       ◀── reply, DONE[rank] = n ─────────  wakes       finish(reply | error)

A wait first spins on a cell (for about 100 microseconds; with more ranks than cores a few times,
leaving the core to others in between) and then sleeps in ``poll``: on a pipe of its own that a
signaller writes to when it sees the sleeper's flag, and on what tells of a death: the sentinels of
the workers, or the master's end of a pipe. So a wait ends with the answer or with the death, and an
idle rank uses no CPU.

A command is pickled into the mailbox the first time; after that its slot number is enough.

A rank that raises sets ABORT, which every wait inside a call looks at; all ranks still reach the
finish barrier. If the master leaves early (Ctrl-C), the call stays open and the next start waits
for the workers to come out of it: nothing is torn down, and nothing can get out of step.
"""

import contextlib
import fcntl
import os
import pickle
import select
import signal

from synkhronos.comm import Aborted, Gate, reports
from synkhronos.comm.shared.gate_memory import (
    ABORT,
    ANSWER,
    ASLEEP,
    DONE,
    ERROR,
    LENGTH,
    LINE,
    MAILBOX,
    MET,
    NO_REPLY,
    REPLY,
    REPLY_KIND,
    REPLY_LENGTH,
    SEQUENCE,
    SLOT,
    Fence,
    Memory,
    Notices,
    make_pipes,
)
from synkhronos.errors import SessionError

SPINS = 2000  # looks at a cell, 50 ns each: about 100 microseconds
YIELDS = 20  # looks with more ranks than cores, between which another rank gets the core
MAX_SLOTS = 1024
_HEARTBEAT_MS = 1000  # a sleeper looks again this often, whatever happens
PATIENCE_SECONDS = 10.0  # after which the master says whom it waits for


class SharedGate(Notices, Gate):
    """The gate of the ranks of one machine: made by the master before it forks."""

    def __init__(self, n_ranks: int, master_rank: int, spin: bool):
        super().__init__(n_ranks, master_rank)
        self._spins, self._yields = (SPINS, False) if spin else (YIELDS, True)
        self._worker_ranks = tuple(r for r in range(n_ranks) if r != master_rank)
        memory = Memory(n_ranks)
        self._cells, self._mailbox, self._replies = memory.cells, memory.mailbox, memory.replies
        # Where each rank writes what all others may read between two meetings of a call.
        self.boards = memory.boards
        pipes = make_pipes(2 * n_ranks)
        self._wake_pipes = pipes[:n_ranks]
        for end in (end for pipe in self._wake_pipes for end in pipe):
            os.set_blocking(end, False)
        # Nobody writes to these; end of file is the master's death. One for each rank, because
        # the process to signal is a property of the open pipe.
        self._life_pipes = pipes[n_ranks:]
        self._fence = Fence()
        self._poll = select.poll()
        self._poll.register(self._wake_pipes[master_rank][0], select.POLLIN)
        self._deaths = select.poll()
        self._processes = {}
        self._slots = {}
        self._finished = 0  # the last call that all workers are known to be out of
        self._last = None, 0

    def _wait(self, cell, value, abort=None):
        """Wait until the cell has reached `value`, or until the call `abort` is aborted."""
        cells = self._cells
        for _ in range(self._spins):
            if cells[cell] >= value:
                return
            if cells[ABORT] == abort:
                raise Aborted
            if self._yields:
                os.sched_yield()
        asleep = self._line(self.rank) + ASLEEP
        patience = None
        try:
            while True:
                cells[asleep] = 1
                self._fence()  # the signaller writes first and reads the flag after: so must we
                if cells[cell] >= value:
                    if patience:
                        patience.end()
                    return
                if cells[ABORT] == abort:
                    raise Aborted
                if abort is not None:
                    self._check_not_left(cell, value, abort)
                if not self._sleep() and self.rank == self.master_rank:
                    patience = patience or reports.Patience(PATIENCE_SECONDS, _HEARTBEAT_MS / 1000)
                    kind = cell % LINE
                    late = self.hindmost(self._processes, kind, value)
                    pids = {rank: self._processes[rank].pid for rank in late}
                    patience.wait_for(pids, in_a_meeting=kind == MET)
        finally:
            cells[asleep] = 0

    def _sleep(self):
        """Sleep until something happens or for a heartbeat; return whether something did."""
        happened = self._poll.poll(_HEARTBEAT_MS)
        for fd, _ in happened:
            if fd == self._wake_pipes[self.rank][0]:
                with contextlib.suppress(BlockingIOError):
                    os.read(fd, 4096)
            elif fd == self._life_pipes[self.rank][0]:
                os._exit(1)  # the master is gone: nobody is left to report to
            else:
                self.check_alive()
        return bool(happened)

    def _wake(self, rank):
        if self._cells[self._line(rank) + ASLEEP]:
            with contextlib.suppress(BlockingIOError):  # full: it has been woken many times
                os.write(self._wake_pipes[rank][1], b"\0")

    def _wake_all(self):
        self._fence()
        for rank in range(self.n_ranks):
            self._wake(rank)

    def abort(self):
        """Tell every rank to leave the call that is under way."""
        self._cells[ABORT] = self._cells[SEQUENCE]
        self._wake_all()

    def _meet(self):
        cells, sequence = self._cells, self._cells[SEQUENCE]
        mine = self._line(self.rank) + MET
        # Numbered within the call, so that nothing is left of one in which only some met.
        number = max(cells[mine], sequence << 20) + 1
        cells[mine] = number
        self._wake_all()
        for rank in range(self.n_ranks):
            if rank != self.rank:
                self._wait(self._line(rank) + MET, number, sequence)

    def _check_not_left(self, cell, value, sequence):
        done = cell - MET + DONE
        # Looked at in this order: a rank meets, or raises, before it leaves.
        if self._cells[done] >= sequence and self._cells[cell] < value:
            if self._cells[ABORT] == sequence:
                raise Aborted
            raise SessionError(
                f"Rank {done // LINE - 1} has left a call in which rank {self.rank} still waits "
                "to reduce with it. All ranks must compute the same all_reduces, so they can't be "
                "in a branch that only some of them take."
            )

    def become_worker(self, rank: int) -> None:
        """Take the place of `rank`, in its own process, right after the fork."""
        self.rank = rank
        self._sequence = 0
        self._commands = {}
        self.close_in_child()
        # The kernel itself ends a worker whose master is gone, in the middle of a computation
        # too: end of file raises SIGIO, whose default is to terminate. A child that the user
        # forks from the master must not keep the pipe open: see close_in_child.
        life = self._life_pipes[rank][0]
        signal.signal(signal.SIGIO, signal.SIG_DFL)
        fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
        self._poll = select.poll()
        self._poll.register(self._wake_pipes[rank][0], select.POLLIN)
        self._poll.register(life, select.POLLIN)
        if self._poll.poll(0):
            self._sleep()

    def next_command(self):
        """Wait at the start barrier; return the next command.

        What it raises is reported like an error of the command, which could not be read.
        """
        cells = self._cells
        self._wait(SEQUENCE, self._sequence + 1)
        self._sequence = cells[SEQUENCE]
        slot, length = cells[SLOT], cells[LENGTH]
        if length:
            self._commands[slot] = pickle.loads(self._mailbox[:length])
        return self._commands[slot]

    def worker_finish(self, reply=None, error=None) -> None:
        """Arrive at the finish barrier, with an answer for the master or an exception."""
        cells, line = self._cells, self._line(self.rank)
        if error is not None:
            self._put_reply(ERROR, reports.describe(error, REPLY))
            self.abort()
        elif reply is not None:
            self._put_reply(ANSWER, pickle.dumps(reply, pickle.HIGHEST_PROTOCOL))
        cells[line + DONE] = self._sequence
        self._fence()
        self._wake(self.master_rank)

    def _put_reply(self, kind, data):
        line = self._line(self.rank)
        if len(data) > REPLY:
            raise SessionError(f"An answer of {len(data)} bytes is too long for a worker to send.")
        self._replies[self.rank][: len(data)] = data
        self._cells[line + REPLY_LENGTH] = len(data)
        self._cells[line + REPLY_KIND] = kind

    def watch(self, rank: int, process) -> None:
        """Have every wait of the master end when this worker's process does."""
        self._processes[rank] = process
        for poll in (self._poll, self._deaths):
            poll.register(process.sentinel, select.POLLIN)

    def _start(self, command):
        if self._processes and self._deaths.poll(0):
            self.check_alive()
        if self.is_open:
            self.drain()
        if self._errors:
            self._errors.clear()  # of a call that was interrupted before they were raised
        cells = self._cells
        known, slot = self._last
        length = 0
        if command is not known:
            slot = self._slots.get(command)
            if slot is None:
                slot, length = self._post(command)
        cells[SLOT], cells[LENGTH] = slot, length
        cells[SEQUENCE] += 1
        # Only now: had we been interrupted earlier, the slot would stand for nothing.
        if command is not known:
            self._slots[command] = slot
            self._last = command, slot
        self._wake_all()

    def _post(self, command):
        """Put a new command into the mailbox; return its slot and length."""
        payload = pickle.dumps(command, pickle.HIGHEST_PROTOCOL)
        if len(payload) > MAILBOX:
            raise SessionError(f"A command of {len(payload)} bytes is too long to send.")
        self._mailbox[: len(payload)] = payload
        if len(self._slots) >= MAX_SLOTS:
            self._forget_slots()
        return len(self._slots), len(payload)

    def _forget_slots(self):
        self._last = None, 0
        self._slots.clear()

    def _finish(self):
        cells = self._cells
        sequence = cells[SEQUENCE]
        cells[self._line(self.rank) + DONE] = sequence
        for rank in self._worker_ranks:
            line = self._line(rank)
            self._wait(line + DONE, sequence)
            if cells[line + REPLY_KIND]:
                self._take_reply(rank, line)
        self._finished = sequence

    def _take_reply(self, rank, line):
        cells = self._cells
        data = pickle.loads(self._replies[rank][: cells[line + REPLY_LENGTH]])
        if cells[line + REPLY_KIND] == ERROR:
            self._forget_slots()  # a command that could not be read must be sent again
            self._errors[rank] = data
        else:
            self.on_answer(rank, data)
        cells[line + REPLY_KIND] = NO_REPLY

    @property
    def is_open(self) -> bool:
        """Whether the workers may still be in a call."""
        return self._cells[SEQUENCE] != self._finished

    @property
    def sequence(self) -> int:
        """The number of the last call that was started."""
        return self._cells[SEQUENCE]

    def check_alive(self, milliseconds: int = 0) -> None:
        """Raise WorkerDied if a worker is gone; on the master, others have no workers."""
        ended = {fd for fd, _ in self._deaths.poll(milliseconds)}
        for rank, process in self._processes.items():
            if process.sentinel in ended:
                process.join(1)  # the sentinel closes a moment before the exit status is there
                raise reports.worker_died(rank, process)

    def close_in_child(self) -> None:
        """Let go of the master's end of the life pipes, in a process that is not the master."""
        for _, write_end in self._life_pipes:
            os.close(write_end)

    def close(self) -> None:
        """Close every descriptor; workers that are left die of it."""
        for pipe in (*self._life_pipes, *self._wake_pipes):
            for end in pipe:
                os.close(end)
