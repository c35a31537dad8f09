"""The waits of ranks on one machine for one another, and the barriers of calls, in shared cells.

    rank                              shared cells                      another rank
    meet() ── MET[rank] = n ──▶ wakes those that sleep for this cell ──▶ meet() goes on

    master                            shared cells                      worker
    start(command) ── payload, slot, SEQUENCE = n ──▶  wakes            next_command()
    runs its part                                                       runs its part
    finish()       ◀── reply, DONE[rank] = n ─────────  wakes           worker_finish(reply, error)

A waiting rank first spins on a cell, for as long as `spinning` says. Then it sleeps in ``poll`` on
a pipe of its own, to which another rank writes when it stores the cell that the sleeper waits for,
and on descriptors that become readable when a process dies. So a wait ends with the answer or with
the death, and an idle rank uses no CPU.

The order of stores and loads:

- Data first, then the cell that announces it: arrays before MET, the command before SEQUENCE, the
  reply before DONE. A rank that loads the cell and then the data finds the data, because x86 keeps
  the order of stores, and that of loads.
- A rank that announces something stores the cell, crosses the fence, and loads ASLEEP. A rank that
  goes to sleep stores ASLEEP, crosses the fence, and loads the cell. So at least one of the two
  sees the store of the other, and no wake-up is lost.
- ASLEEP says which cell the sleeper waits for, and only a store of that cell wakes it: ranks that
  all others wait for would otherwise be woken by each of them. An abort wakes every sleeper.

SEQUENCE numbers the calls of a session; a group without calls leaves it as it is. The master
pickles a command into the mailbox once; for later calls of it the slot number is enough.

A rank that raises sets ABORT to the number of the call, and every wait inside of the call looks at
ABORT; all ranks still reach the finish barrier. If the master leaves the call early (Ctrl-C), the
call stays open, and the next start first waits until the workers have ended it. So master and
workers always agree on which call is the next.

`tests/gate/test_gate.py` stops a rank before each of its loads and stores.
"""

import contextlib
import fcntl
import json
import os
import pickle
import select
import signal

from synkhronos._machine.processes import make_pipe
from synkhronos.comm import Aborted, Gate, reports
from synkhronos.comm.shared import gate_memory as at
from synkhronos.comm.shared.gate_memory import GateMemory, make_fence, make_file, make_wake_pipes
from synkhronos.comm.shared.spinning import Spinning
from synkhronos.errors import SessionError

HEARTBEAT_MS = 1000  # a sleeper looks again this often, even if no rank wakes it
MAX_SLOTS = 1024  # commands that each worker keeps
PATIENCE_SECONDS = 10.0  # after this time the master logs which ranks it waits for


class Meetings:
    """One rank's end of the cells in `memory`, and of the pipes that wake sleepers.

    `spin` says whether each rank has a core of its own. A derived class has::

        _on_end(fd)          answer the end of a process, which has made this descriptor readable
        _raise_left(rank)    raise the exception for a rank that has not come to a meeting
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
        self._done, self._met, self._asleep = line + at.DONE, line + at.MET, line + at.ASLEEP
        self._own_rows = line + at.ROWS
        others = [rank for rank in range(self.n_ranks) if rank != self.rank]
        self._others = tuple((rank, self._line(rank)) for rank in others)
        self._meetings = tuple(line + at.MET for _, line in self._others)
        self._sleepers = tuple(
            (line + at.ASLEEP, self._wake_pipes[rank]) for rank, line in self._others
        )
        self._wake_pipe = self._wake_pipes[self.rank]
        self._poll = select.poll()
        self._poll.register(self._wake_pipe, select.POLLIN)

    def _line(self, rank):
        return at.LINE * (rank + 1)

    def label(self, **told) -> None:
        """Tell `synkhronos top` what this rank is; without arguments, that it has ended."""
        text = json.dumps(told).encode() if told else b""
        self._labels[self.rank][:] = text[: at.LABEL].ljust(at.LABEL, b"\0")

    def post_news(self, news: int) -> None:
        """Publish how far this rank's board is written: a larger number with every change."""
        # Stored after the board is written: a rank that loads the number finds the entries.
        self._cells[self._line(self.rank) + at.NEWS] = news

    def news(self) -> list:
        """Return the last number that each rank has posted, in rank order."""
        return self._cells[at.LINE + at.NEWS :: at.LINE].tolist()

    def post_bounds(self, begin: int, end: int) -> None:
        """Tell all ranks, on the master, which rows the next call selects."""
        # As the slot of the command, they are stored before SEQUENCE and loaded in the call only.
        self._cells[at.BEGIN], self._cells[at.END] = begin, end

    def bounds(self) -> tuple:
        """Return the last bounds that the master has posted."""
        return self._cells[at.BEGIN], self._cells[at.END]

    def report_rows(self, rows: int) -> None:
        """Publish the number of rows that this rank computed from; -1 if it did not run."""
        self._cells[self._own_rows] = rows

    def rows(self) -> list:
        """Return the numbers that the ranks reported in the last call, in rank order."""
        return self._cells[at.LINE + at.ROWS :: at.LINE].tolist()

    def agree(self, vote: int) -> bool:
        """Meet, and return whether the votes of all ranks are the same.

        The ranks must meet once more before the next vote: the first rank to leave this meeting
        would otherwise overwrite its vote before the others have read it.
        """
        self.vote(vote)
        self.meet()
        return len(set(self._cells[at.LINE + at.VOTE :: at.LINE].tolist())) == 1

    def vote(self, vote: int) -> None:
        """Publish a number; the other ranks read it after the next meeting."""
        self._cells[self._line(self.rank) + at.VOTE] = vote

    def vote_of(self, rank: int) -> int:
        """Return the number that a rank has published."""
        return self._cells[self._line(rank) + at.VOTE]

    def has_left(self, rank: int) -> bool:
        """Return whether a rank has finished the present call, or has left its group."""
        return self._cells[self._line(rank) + at.DONE] >= self._cells[at.SEQUENCE]

    def slowest(self, ranks, kind: int, value: int) -> list:
        """Return those of `ranks` that hold up a wait until their DONE or MET reaches a value."""
        cells, begin = self._cells, self._cells[at.SEQUENCE] << at.MEETINGS
        met = {
            rank: max(cells[self._line(rank) + at.MET], begin)
            for rank in ranks
            if cells[self._line(rank) + kind] < value
        }
        # A rank that has come to more meetings of the call waits for the ranks with fewer.
        fewest = min(met.values(), default=begin)
        return [rank for rank in met if met[rank] == fewest]

    def _wait(self, cell, value, call=None):
        """Wait until the cell has reached `value`, or until the call of this number is aborted."""
        if not self._spinning.wait(cell, value, call):
            self._wait_asleep(cell, value, call)
            self._spinning.learn(cell)

    def _wait_asleep(self, cell, value, call):
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
                if cells[at.ABORT] == call:
                    raise Aborted
                if call is not None:
                    self._check_not_left(cell, value, call)
                if not self._sleep():
                    patience = self._warn(patience, cell % at.LINE, value)
        finally:
            cells[asleep] = 0  # if a Ctrl-C comes before this, ranks wake this one needlessly

    def _sleep(self):
        """Sleep until a rank wakes this one or a process ends; return False after a heartbeat."""
        happened = self._poll.poll(HEARTBEAT_MS)
        for fd, _ in happened:
            if fd == self._wake_pipe:
                self._empty_wake_pipe()
            else:
                self._on_end(fd)
        return bool(happened)

    @contextlib.contextmanager
    def elsewhere(self):
        """Show in the block, to `synkhronos top`, that this rank waits for another machine."""
        self._cells[self._asleep] = at.ELSEWHERE
        try:
            yield
        finally:
            self._cells[self._asleep] = 0

    def _empty_wake_pipe(self):
        """Empty the pipe that wakes this rank."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_pipe, 4096)

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
        self._cells[at.ABORT] = self._cells[at.SEQUENCE]
        self._wake_all()

    @property
    def is_aborted(self) -> bool:
        """Whether the present call has been aborted."""
        return self._cells[at.ABORT] == self._cells[at.SEQUENCE]

    @property
    def sequence(self) -> int:
        """The number of the last call that was started."""
        return self._cells[at.SEQUENCE]

    def _meet(self):
        """Wait until all ranks have come; return the news that they have posted."""
        cells, mine = self._cells, self._met
        sequence = cells[at.SEQUENCE]
        # The number begins anew with each call, beyond all numbers of calls before: if only some
        # ranks came to the meetings of an aborted call, their counts agree again in the next one.
        number = max(cells[mine], sequence << at.MEETINGS) + 1
        cells[mine] = number
        self._wake(mine)
        for cell in self._meetings:
            if cells[cell] < number:
                self._wait(cell, number, sequence)
        return cells[at.LINE + at.NEWS :: at.LINE].tolist()

    def _check_not_left(self, cell, value, sequence):
        """Raise if the rank of a cell has left the call without coming to the meeting."""
        done = cell - at.MET + at.DONE
        # A rank stores MET or ABORT before DONE. So DONE is loaded first: MET and ABORT, loaded
        # after it, are up to date if it says that the rank has left.
        if self._cells[done] >= sequence and self._cells[cell] < value:
            if self._cells[at.ABORT] == sequence:
                raise Aborted
            self._raise_left(done // at.LINE - 1)


class SharedGate(Meetings, Gate):
    """The gate of the ranks of one machine: the master makes it before it forks the workers.

    All ranks inherit its memory and its pipes. The memory is freed when the last process that has
    it has ended.
    """

    # For messages, with several machines: the number of this machine's first rank, and its name.
    first_rank, host = 0, ""

    def __init__(self, n_ranks: int, master_rank: int, spin: bool):
        Gate.__init__(self, n_ranks, master_rank)
        self._files = []  # empty where Python or the system has no memfd_create
        with contextlib.suppress(AttributeError, OSError):
            self._files.append(make_file(n_ranks))
        # No rank writes to this pipe. Only the master has the write end: the pipe ends with it.
        self._life_pipe, self._life = (), None  # `_life`: a worker's descriptor of the read end
        try:
            memory = GateMemory(n_ranks, *self._files)
            self._life_pipe = make_pipe()
            wake_pipes = make_wake_pipes(n_ranks)
        except OSError:
            self._close_all([*self._life_pipe, *self._files])
            raise
        self._mailbox, self._replies = memory.mailbox, memory.replies
        Meetings.__init__(self, memory, wake_pipes, master_rank, n_ranks, spin)
        self._deaths = select.poll()
        self._processes = {}  # rank -> process, on the master
        self._slots = {}  # command -> its slot number, for commands that all workers have
        self.is_in_call = False
        self._last = None, 0  # the last command and its slot, to save hashing the command again

    def _locate_cells(self):
        super()._locate_cells()
        self._master_sleeps = self._line(self.master_rank) + at.ASLEEP

    def _on_end(self, fd):
        if fd == self._life:
            os._exit(1)  # the master has ended: no process is left to report to
        self.check_alive()

    def _raise_left(self, rank):
        raise reports.left_early(self.first_rank + rank, self.first_rank + self.rank)

    def _warn(self, patience, kind, value):
        if self.rank != self.master_rank:
            return None
        patience = patience or reports.Patience(PATIENCE_SECONDS, HEARTBEAT_MS / 1000)
        late = self.slowest(self._processes, kind, value)
        pids = {self.first_rank + rank: self._processes[rank].pid for rank in late}
        patience.wait_for(pids, in_a_meeting=kind == at.MET)
        return patience

    def meet(self) -> list:
        """Wait inside a call until every rank has come to its meeting; return the `news` of all."""
        recorder = self.recorder
        if recorder is None:
            return self._meet()
        with recorder.span("meet"):
            return self._meet()

    def introduce(self, device: str) -> None:
        """Tell `synkhronos top` which rank this process is, and on which device."""
        role = "master" if self.rank == self.master_rank else "worker"
        self.label(rank=self.rank, of=self.n_ranks, device=device, pid=os.getpid(), role=role)

    def become_worker(self, rank: int) -> None:
        """Make this gate that of `rank`, in its process, right after the fork."""
        self.rank = rank
        self._locate_cells()
        self._sequence = 0
        self._commands = {}
        self.close_in_child()
        self._close_all(process.sentinel for process in self._processes.values())  # of other ranks
        self._processes, self._deaths = {}, select.poll()
        # The kernel itself ends a worker whose master is gone, even in the middle of a computation:
        # end of file of the pipe raises SIGIO, whose default action is to terminate. All write ends
        # but the master's must be closed for that: see close_in_child. The process to signal
        # (F_SETOWN) is a property of the open pipe, so each worker opens it anew.
        life = self._life = os.open(
            f"/proc/self/fd/{self._life_pipe[0]}", os.O_RDONLY | os.O_CLOEXEC
        )
        os.close(self._life_pipe[0])
        signal.signal(signal.SIGIO, signal.SIG_DFL)
        fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
        self._poll.register(life, select.POLLIN)
        if self._poll.poll(0):  # the master may have died before SIGIO was set up
            self._sleep()

    def next_command(self):
        """Wait at the start barrier; return the next command.

        An error here, from a command that can't be unpickled, is reported like one of the command.
        """
        cells = self._cells
        self._wait(at.SEQUENCE, self._sequence + 1)
        self._sequence = cells[at.SEQUENCE]
        # The master stores these before SEQUENCE, and again only after this rank's DONE.
        slot, length = cells[at.SLOT], cells[at.LENGTH]
        if length:
            self._commands[slot] = pickle.loads(self._mailbox[:length])
        return self._commands[slot]

    def worker_finish(self, reply=None, error=None) -> None:
        """Arrive at the finish barrier, with an answer for the master or an exception."""
        cells, done = self._cells, self._done
        if error is not None:
            self._put_reply(at.ERROR, reports.describe(error, at.REPLY))
            self.abort()
        elif reply is not None:
            self._put_reply(at.ANSWER, pickle.dumps(reply, pickle.HIGHEST_PROTOCOL))
        # After this store the master may read the reply, return, and start the next call.
        cells[done] = self._sequence
        with self._fence:
            waits_for = cells[self._master_sleeps]
        # The master may also wait for this rank at a meeting, to which it will not come: the master
        # is woken now, and other ranks look a heartbeat later.
        if waits_for in (done + 1, self._met + 1):
            write(self._wake_pipes[self.master_rank])

    def _put_reply(self, kind, data):
        line = self._line(self.rank)
        if len(data) > at.REPLY:
            raise SessionError(f"An answer of {len(data)} bytes is too long for a worker to send.")
        # The master has read the previous reply before it started this call.
        self._replies[self.rank][: len(data)] = data
        self._cells[line + at.REPLY_LENGTH] = len(data)
        self._cells[line + at.REPLY_KIND] = kind

    def watch(self, rank: int, process) -> None:
        """End every wait of the master when this worker's process ends.

        The process must keep its sentinel open until the gate is used no more.
        """
        self._processes[rank] = process
        for poll in (self._poll, self._deaths):
            poll.register(process.sentinel, select.POLLIN)

    def start(self, command) -> None:
        """Pass the start barrier: wake the workers, which begin to run `command`."""
        if self._processes and self._deaths.poll(0):
            self.check_alive()
        if self.is_in_call:
            self.drain()
        if self.errors:
            self.errors.clear()  # a Ctrl-C may have come before the last call raised them
        cells = self._cells
        known, slot = self._last
        length = 0
        if command is not known:
            slot = self._slots.get(command)
            if slot is None:
                slot, length = self._post(command)
        # After a Ctrl-C before SEQUENCE is stored, no worker looks at the other cells, and the next
        # start stores them again. It finds the gate in a call, and ends that first: if no worker
        # has begun it, all have finished it already.
        self.is_in_call = True
        cells[at.SLOT], cells[at.LENGTH] = slot, length
        cells[at.SEQUENCE] += 1
        # Only now do the workers have the command. If it were in `_slots` before, a Ctrl-C could
        # leave it there, and a later call would send a slot number that the workers don't know.
        if command is not known:
            self._slots[command] = slot
            self._last = command, slot
        self._wake(at.SEQUENCE)

    def _post(self, command):
        """Put a new command into the mailbox, which no worker reads now; return slot and length."""
        payload = pickle.dumps(command, pickle.HIGHEST_PROTOCOL)
        if len(payload) > at.MAILBOX:
            raise SessionError(f"A command of {len(payload)} bytes is too long to send.")
        self._mailbox[: len(payload)] = payload
        if len(self._slots) >= MAX_SLOTS:
            self._forget_slots()
        return len(self._slots), len(payload)

    def _forget_slots(self):
        # The workers keep a command until a new one comes for its slot. `_last` is cleared first,
        # because `start` looks there first, and a Ctrl-C may come in between.
        self._last = None, 0
        self._slots.clear()

    def finish(self) -> None:
        """Wait until every worker has reached the finish barrier; collect answers and errors."""
        cells = self._cells
        sequence = cells[at.SEQUENCE]
        cells[self._done] = sequence
        for rank, line in self._others:
            if cells[line + at.DONE] < sequence:
                self._wait(line + at.DONE, sequence)
            if cells[line + at.REPLY_KIND]:
                self._take_reply(rank, line)
        # Set after all replies: the next start repeats a finish that a Ctrl-C has interrupted.
        self.is_in_call = False

    def _take_reply(self, rank, line):
        cells = self._cells
        data = pickle.loads(self._replies[rank][: cells[line + at.REPLY_LENGTH]])
        if cells[line + at.REPLY_KIND] == at.ERROR:
            self._forget_slots()  # the worker may not have been able to unpickle the command
            self.errors[rank] = data
        else:
            self.on_answer(rank, data)
        cells[line + at.REPLY_KIND] = at.NO_REPLY  # after the rest: a Ctrl-C then loses no reply

    def check_alive(self, milliseconds: int = 0) -> None:
        """Raise WorkerDied if a worker has ended, or ends within this time; workers do nothing."""
        ended = {fd for fd, _ in self._deaths.poll(milliseconds)}
        for rank, process in self._processes.items():
            if process.sentinel in ended:
                process.join(1)  # the exit status arrives a moment after the sentinel has closed
                raise reports.worker_died(self.first_rank + rank, process, self.host)

    @property
    def descriptors(self) -> list:
        """The descriptors of the memory and of the pipes that all ranks inherit."""
        return [*self._files, *self._life_pipe, *self._wake_pipes]

    def close_in_child(self) -> None:
        """Close the write end of the life pipe, in a process that is not the master."""
        os.close(self._life_pipe[1])

    def close(self) -> None:
        """Close every descriptor; it ends the workers that are left.

        The memory stays mapped for as long as this object exists.
        """
        self.label()
        self._close_all(self.descriptors)

    @staticmethod
    def _close_all(descriptors):
        for each in descriptors:
            os.close(each)


def write(pipe):
    """Wake the rank that reads from a pipe."""
    with contextlib.suppress(BlockingIOError):  # a full pipe wakes the rank, too
        os.write(pipe, b"\0")
