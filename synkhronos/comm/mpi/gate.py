"""The start and finish barriers of several machines: each has a gate of its own, in shared memory.

    master                          carriers                       leaders of other machines
    start(command) ──▶ own gate
                   ── ("command", number, slot, command) ──────▶   next_command() ──▶ their gates
    runs its part                                                  run their parts
    finish()       ◀── own gate                                    worker_finish() ◀── their gates
                   ◀── ("done", number, rows, errors, answers, outputs) ──

A leader is its machine's first process. It acts as the master for the workers of its machine, and
as a worker for the master. Each command passes each machine's gate once, so all gates number the
commands alike.

A rank that raises aborts the call on its machine, and its leader tells the other leaders. The
carriers then decide which all-reduces of the call go on: see `synkhronos.comm.mpi.reductions`. A
leader ends the call when none is under way.
"""

import os
import select

from synkhronos._machine.interrupts import interrupts_held
from synkhronos.comm import Aborted, Gate, reports
from synkhronos.comm.channel import poll_awake
from synkhronos.comm.handlers import Handlers
from synkhronos.comm.mpi.transfers import GIVEN_UP

HEARTBEAT_SECONDS = 1.0
# Messages between leaders that only some of them take, or take only while a session begins.
_OF_OTHERS = "command", "done", "died", "lost", "offer", "over", "plan", "wish"
_LOOK_SECONDS = 0.05  # between looks for an abort here, or a delayed Ctrl-C, which send nothing


class GateOfMachines(Gate):
    """The parts that the gates of the master, of leaders and of workers have in common.

    `local` is the SharedGate of this machine, `link` a leader's connection with the carrier.
    """

    def __init__(self, local, layout, plan, link):
        self.local, self.layout = local, layout
        super().__init__(layout.n_ranks, plan.master_rank)
        self.first = layout.first()
        self.rank = self.first + local.rank
        self.link, self.session = link, plan.session  # the number of the session in this job
        self.compress = plan.compress  # whether floats cross the network in half precision
        # A process has workers and descriptors on its own machine only.
        self.check_alive, self.close = local.check_alive, local.close
        self.descriptors = local.descriptors
        local.on_answer = lambda rank, answer: self.on_answer(self.first + rank, answer)
        local.first_rank, local.host = self.first, layout.hosts[layout.machine]
        self._poll = select.poll()
        self._poll.register(link.poll, select.POLLIN)
        self.given = {}  # arrays that have come with the present command, by their references
        self.is_leader = True  # whether this process speaks for its machine
        self._name = f"{plan.hosts[0]}:{plan.pid}:{plan.session}"  # of the session
        # Whether this leader waits for a decision of the carriers: the ranks here then stay.
        self._is_deciding = False
        self._held = ()  # not empty when a Ctrl-C has come and is delayed
        self._exchanged = {}  # id -> machine -> object
        self._finished = 0  # the last call that all ranks have finished
        self._aborted = 0  # the last call that another machine has aborted
        self._count = 0, 0  # a call, and the number of exchanges and reductions in it
        self._left = {}  # machines that have ended the present call -> the same number of theirs
        self._handlers = Handlers.fromkeys(_OF_OTHERS, lambda machine, *rest: None)  # drop them
        self._handlers.update(
            abort=self._on_abort, left=self._on_left, exchanged=self._on_exchanged
        )
        self.on_over = lambda: None  # leaves this process's memory to the carrier

    @property
    def recorder(self):
        """The recorder of this rank."""
        return self.local.recorder

    @recorder.setter
    def recorder(self, recorder):
        self.local.recorder = recorder

    def host_of(self, rank):
        """Return the name of the machine that a rank is on, unless it is this one."""
        machine = self.layout.machine_of(rank)
        return None if machine == self.layout.machine else self.layout.hosts[machine]

    @property
    def is_in_call(self):
        """Whether the workers may still be in a call."""
        return self.local.is_in_call or self.sequence != self._finished

    @property
    def sequence(self):
        """The number of the last call that was started."""
        return self.local.sequence

    @property
    def call_number(self):
        """The numbers of the session and of the last call that was started."""
        return self.session, self.local.sequence

    def report_rows(self, rows):
        """Publish the number of rows that this rank computed from."""
        self.local.report_rows(rows)

    def watch(self, rank, process):
        """End every wait of this process when a worker of this machine ends."""
        self.local.watch(rank - self.first, process)
        self._poll.register(process.sentinel, select.POLLIN)

    def introduce(self, device):
        """Tell `synkhronos top` which rank this process is, on which device, in which session."""
        role = "master" if self.rank == self.master_rank else "worker"
        told = {"rank": self.rank, "of": self.n_ranks, "role": role, "session": self._name}
        self.local.label(**told, device=device, pid=os.getpid())

    def become_worker(self, rank):
        """Make this gate that of `rank`, in its process, right after the fork."""
        self.is_leader = False
        self.rank = rank
        self.link = self.link.of_worker()
        self.local.become_worker(rank - self.first)

    def next_command(self):
        """Wait at the start barrier; return the next command."""
        self.link.answers.clear()  # of a call that was left early
        return self.local.next_command()

    def worker_finish(self, reply=None, error=None):
        """Arrive at the finish barrier."""
        self.local.worker_finish(reply, error)

    def close_in_child(self):
        """Close what keeps workers alive, in a process that the user forked."""
        self.link.close()
        self.local.close_in_child()

    def abort(self):
        """Tell every rank, on all machines, to leave the call that is under way."""
        self.local.abort()
        if self.is_leader:
            self.link.send("give_up", self.session, self.sequence)
            self.link.tell(None, ("abort", self.session, self.sequence))

    def next_id(self):
        """Return the id of the call's next exchange or reduction, the same on all machines."""
        for id in [id for id in self._exchanged if id[1] < self.sequence]:
            del self._exchanged[id]  # of a call that was left early
        sequence, count = self._count
        count = count + 1 if sequence == self.sequence else 1
        self._count = self.sequence, count
        return self.session, self.sequence, count

    def exchange(self, value):
        """Return the values that the leaders of all machines give, in order."""
        id, machines = self.next_id(), range(len(self.layout.counts))
        self.link.tell(None, ("exchanged", id, value))
        self.wait(lambda: len(self._exchanged.get(id, ())) == len(machines) - 1)
        values = {**self._exchanged.pop(id, {}), self.layout.machine: value}  # {}: one machine
        return [values[machine] for machine in machines]

    def tell_all(self, value):
        """Give a value to the leaders of all other machines, which call `told_by`."""
        self.link.tell(None, ("exchanged", self.next_id(), value))

    def told_by(self, machine):
        """Wait for the value that the leader of a machine gives to all others; return it."""
        id = self.next_id()
        self.wait(lambda: machine in self._exchanged.get(id, ()))
        return self._exchanged.pop(id)[machine]

    def wait_for_answer(self, id, in_call=True):
        """Wait for the carrier's answer; return it."""
        self.wait(lambda: id in self.link.answers, in_call)
        return self.link.take_answer(id)

    def begin_bucket(self, number, *part):
        """Tell the carrier that this rank has begun a bucket, the `number`-th of this call."""
        if self.is_leader:
            self._count = self.sequence, number
        self.link.send("bucket", *part)

    def wait_for_reduction(self, id):
        """Wait for the end of a reduction between the machines; return the carrier's answer.

        The answer is None, or the layouts of all machines if they differ; for a bucket also the
        places of the results.

        If the call is aborted meanwhile, or a Ctrl-C is delayed, the carriers decide. A reduction
        that all machines have begun goes on to its end, because some ranks may use its result
        already: then all ranks use it, and the Ctrl-C is raised when the call ends. If a machine
        has not begun it, no rank has a result, and Aborted is raised.
        """
        if not self.is_leader:  # its leader asks the carriers to decide
            answer = self.link.wait_for(id)
            if answer == GIVEN_UP:
                raise Aborted
            return answer
        asked = False

        def has_come():
            nonlocal asked
            there = id in self.link.answers
            is_aborted = self._aborted == self.sequence or self.local.is_aborted
            if not there and not asked and (is_aborted or self._held):
                asked = True
                self.link.send("give_up", self.session, self.sequence)
            return there

        self._is_deciding = True
        try:
            self.wait(has_come, may_leave=False, look_seconds=_LOOK_SECONDS)
        finally:
            self._is_deciding = False
        answer = self.link.take_answer(id)
        if answer == GIVEN_UP:
            self.local.abort()
            raise Aborted
        return answer

    def hold_interrupts(self):
        """Delay a Ctrl-C of the master until `release_interrupts`, or the end of the call.

        Meanwhile the carriers decide whether all ranks get a result, or none.
        """

    def release_interrupts(self):
        """Raise a Ctrl-C of the master that was delayed."""

    def meet(self):
        """Wait inside a call until every rank of all machines has called `meet` as often."""
        self.local.meet()
        if self.is_leader:
            self.exchange(None)
        self.local.meet()

    def agree(self, vote):
        """Meet, and return whether the votes of all ranks are the same."""
        equal = self.local.agree(vote)
        if self.is_leader:
            values = self.exchange((equal, vote))
            equal = all(value == (True, vote) for value in values)
        return bool(self.leader_decision(int(equal)))

    def leader_decision(self, value=None):
        """Meet with the ranks of this machine; return the number that the leader gives."""
        leader = self.local.master_rank
        if self.is_leader:
            self.local.vote(value)
        self.local.meet()
        return self.local.vote_of(leader)

    def wait(self, has_come, in_call=True, may_leave=True, look_seconds=HEARTBEAT_SECONDS):
        """Take messages until `has_come` returns true; ask it every `look_seconds` at least.

        Raises Aborted in a call that another machine has aborted, if `may_leave`, and WorkerDied if
        a worker has died, or a machine is lost.
        """
        patience = None
        while True:
            self._take_messages()
            if in_call and may_leave and self._aborted == self.sequence:
                self.local.abort()
                raise Aborted
            if has_come():
                if patience:
                    patience.end()
                return
            for machine, begun in self._left.items() if in_call else ():
                if begun < self.begun:  # it has left without the reduction that this one waits for
                    raise reports.left_early(self.layout.first(machine), self.rank)
            with self.local.elsewhere():
                ready = poll_awake(self._poll, look_seconds)
            if any(fd != self.link.poll.fileno() for fd, _ in ready):
                self.check_alive()
            if not ready:
                self.link.look_after_carrier()
            if not ready and not in_call:
                patience = self._warn(patience)

    @property
    def begun(self):
        """The number of exchanges and reductions of the present call that were begun here."""
        sequence, count = self._count
        return count if sequence == self.sequence else 0

    def _warn(self, patience):
        """Warn, if it is time, that machines keep this one waiting; return its `Patience`."""
        return patience

    def _take_messages(self):
        self.link.receive(seconds=0)
        while self.link.told:
            with interrupts_held():
                machine, (name, *rest) = self.link.told.popleft()
                if self._handlers[name](machine, *rest):
                    return self.link.told.appendleft((machine, (name, *rest)))

    def _on_abort(self, machine, session, sequence):
        if session == self.session:
            self._aborted = max(self._aborted, sequence)
            if sequence == self.sequence and not self._is_deciding:
                self.local.abort()

    def _on_left(self, machine, session, sequence, left):
        if (session, sequence) == (self.session, self.sequence):
            self._left = left

    def _on_exchanged(self, machine, id, value):
        if id[:2] >= (self.session, self.sequence):
            self._exchanged.setdefault(id, {})[machine] = value

    def drop_reductions(self):
        """Wait until the carriers have ended or dropped the reductions of an aborted call."""
        id = "settled", self.session, self.sequence
        self.link.answers.pop(id, None)  # of a wait that a Ctrl-C has ended
        self.link.send("settle", id, self.session, self.sequence)
        self.wait_for_answer(id, in_call=False)
