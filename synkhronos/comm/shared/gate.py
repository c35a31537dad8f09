"""The start and finish barriers of ranks on one machine, in shared cells.

    master                          shared cells                    worker
    start(command) ── payload, slot, SEQUENCE = n ──▶  wakes        next_command()
    runs its part                                                   runs its part
    finish()       ◀── reply, DONE[rank] = n ─────────  wakes       worker_finish(reply, error)

`meetings` has how ranks wait, spin, sleep and wake one another. Data are stored before the cell
that announces them: the command before SEQUENCE, the reply before DONE.

The master pickles a command into the mailbox once; for later calls of it the slot number is enough.

A rank that raises sets ABORT, and every wait inside of the call checks ABORT; all ranks still reach
the finish barrier. If the master leaves the call early (Ctrl-C), the call stays open, and the next
start first waits until the workers have ended it. So master and workers always agree on which call
is the next.

`tests/gate/test_gate.py` stops a rank before each of its loads and stores.
"""

import contextlib
import fcntl
import os
import pickle
import select
import signal

from synkhronos._machine.processes import make_pipe
from synkhronos.comm import Gate, reports
from synkhronos.comm.shared.gate_memory import (
    ANSWER,
    ASLEEP,
    DONE,
    ERROR,
    LENGTH,
    MAILBOX,
    MET,
    NO_REPLY,
    REPLY,
    REPLY_KIND,
    REPLY_LENGTH,
    SEQUENCE,
    SLOT,
    GateMemory,
    make_file,
    make_wake_pipes,
)
from synkhronos.comm.shared.meetings import HEARTBEAT_MS, Meetings, write
from synkhronos.errors import SessionError

MAX_SLOTS = 1024  # commands that each worker keeps
PATIENCE_SECONDS = 10.0  # after this time the master logs which ranks it waits for


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
        self.is_open = False
        self._last = None, 0  # the last command and its slot, to save hashing the command again

    def _locate_cells(self):
        super()._locate_cells()
        self._master_sleeps = self._line(self.master_rank) + ASLEEP

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
        patience.wait_for(pids, in_a_meeting=kind == MET)
        return patience

    def meet(self) -> None:
        """Wait inside a call until every rank has come to its meeting of the same number."""
        recorder = self.recorder
        if recorder is None:
            self._meet()
        else:
            with recorder.span("meet"):
                self._meet()

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
        self._wait(SEQUENCE, self._sequence + 1)
        self._sequence = cells[SEQUENCE]
        # The master stores these before SEQUENCE, and again only after this rank's DONE.
        slot, length = cells[SLOT], cells[LENGTH]
        if length:
            self._commands[slot] = pickle.loads(self._mailbox[:length])
        return self._commands[slot]

    def worker_finish(self, reply=None, error=None) -> None:
        """Arrive at the finish barrier, with an answer for the master or an exception."""
        cells, done = self._cells, self._done
        if error is not None:
            self._put_reply(ERROR, reports.describe(error, REPLY))
            self.abort()
        elif reply is not None:
            self._put_reply(ANSWER, pickle.dumps(reply, pickle.HIGHEST_PROTOCOL))
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
        if len(data) > REPLY:
            raise SessionError(f"An answer of {len(data)} bytes is too long for a worker to send.")
        # The master has read the previous reply before it started this call.
        self._replies[self.rank][: len(data)] = data
        self._cells[line + REPLY_LENGTH] = len(data)
        self._cells[line + REPLY_KIND] = kind

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
        if self.is_open:
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
        # start stores them again. It finds the call open, and ends it first: if no worker has begun
        # it, all have finished it already.
        self.is_open = True
        cells[SLOT], cells[LENGTH] = slot, length
        cells[SEQUENCE] += 1
        # Only now do the workers have the command. If it were in `_slots` before, a Ctrl-C could
        # leave it there, and a later call would send a slot number that the workers don't know.
        if command is not known:
            self._slots[command] = slot
            self._last = command, slot
        self._wake(SEQUENCE)

    def _post(self, command):
        """Put a new command into the mailbox, which no worker reads now; return slot and length."""
        payload = pickle.dumps(command, pickle.HIGHEST_PROTOCOL)
        if len(payload) > MAILBOX:
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
        sequence = cells[SEQUENCE]
        cells[self._done] = sequence
        for rank, line in self._others:
            if cells[line + DONE] < sequence:
                self._wait(line + DONE, sequence)
            if cells[line + REPLY_KIND]:
                self._take_reply(rank, line)
        # Set after all replies: the next start repeats a finish that a Ctrl-C has interrupted.
        self.is_open = False

    def _take_reply(self, rank, line):
        cells = self._cells
        data = pickle.loads(self._replies[rank][: cells[line + REPLY_LENGTH]])
        if cells[line + REPLY_KIND] == ERROR:
            self._forget_slots()  # the worker may not have been able to unpickle the command
            self.errors[rank] = data
        else:
            self.on_answer(rank, data)
        cells[line + REPLY_KIND] = NO_REPLY  # after the rest: a Ctrl-C then loses no reply

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
