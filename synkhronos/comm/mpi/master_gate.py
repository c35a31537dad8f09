"""The gate of the master: it passes commands on to the leaders of all other machines."""

import contextlib
import pickle

from synkhronos._machine.interrupts import interrupts_held, interrupts_raised_later
from synkhronos._machine.shared_memory import nbytes_of
from synkhronos.comm.mpi.gate import HEARTBEAT_SECONDS, GateOfMachines
from synkhronos.comm.mpi.transfers import small_for_all
from synkhronos.comm.reports import Patience
from synkhronos.comm.shared.gate import MAX_SLOTS, PATIENCE_SECONDS
from synkhronos.errors import WorkerDied


class MasterGate(GateOfMachines):
    """The gate of the master, and of the workers of its machine."""

    def __init__(self, *args):
        super().__init__(*args)
        self.link.first_rank_of = self.layout.first
        self._slots, self._small = {}, {}
        self._holding = None  # the context in which exceptions of signals are delayed
        self._is_dismissed = False
        self._death = None  # arguments of WorkerDied, for a machine or another machine's worker
        self._done = {}  # machine -> what its leader has sent for the present call
        self._rows = {}
        self.on_parts = lambda parts: None  # takes a machine's outputs
        self._handlers.update(done=self._on_done, died=self._on_died, lost=self._on_lost)

    def start(self, command):
        """Pass the start barriers of all machines."""
        self._take_messages()
        if self.is_in_call:
            self.drain()
        if self.link.fetching:  # after a Ctrl-C: ranks must keep their memory until it ends
            self.wait(lambda: not self.link.fetching, in_call=False)
        self.errors.clear()
        slot, payload = self._slots.get(command), None
        if slot is None:
            payload = pickle.dumps(command, pickle.HIGHEST_PROTOCOL)
            if len(self._slots) >= MAX_SLOTS:
                self._slots.clear()
            slot = len(self._slots)
            self._small[slot] = self._small_inputs(command)
        self.check_alive()
        with interrupts_held():  # all machines start the command, or none
            self._done.clear()
            self._left = {}
            self.link.answers.clear()  # of a call that was left early
            small = [self.read(ref).tobytes() for ref in self._small[slot]]
            message = "command", self.session, self.sequence + 1, slot, payload, small
            if payload is None:  # leaders know it, and wait for no other message before it
                self.link.tell_directly(range(1, len(self.layout.counts)), message)
            else:
                self.link.tell(None, message)
            self.local.start(command)
        self._slots[command] = slot

    def _small_inputs(self, command):
        """Return references to the inputs of a function, if leaders need not fetch them."""
        refs = getattr(command, "inputs", ())
        nbytes = sum(nbytes_of(ref.dtype, ref.shape) for ref in refs)
        return refs if nbytes <= small_for_all(len(self.layout.counts)) else ()

    def hold_interrupts(self):
        """Delay exceptions of signals, such as Ctrl-C, until the end of the call."""
        if self._holding is None:
            holding = contextlib.ExitStack()
            held = holding.enter_context(interrupts_raised_later())
            self._held, self._holding = held, holding

    def release_interrupts(self):
        """Raise the exception that was delayed, if there is one."""
        holding, self._holding, self._held = self._holding, None, ()
        if holding is not None:
            holding.close()

    def abort(self):
        """Tell every rank, on all machines, to leave the call that is under way."""
        try:
            super().abort()
        finally:
            self.release_interrupts()

    def finish(self):
        """Wait until every rank of all machines has reached the finish barrier."""
        self.release_interrupts()
        self.local.finish()
        for rank, error in self.local.errors.items():
            self.errors[self.first + rank] = error
        self.local.errors.clear()
        if self.errors and self._aborted < self.sequence:
            self.link.tell(None, ("abort", self.session, self.sequence))
            self._aborted = self.sequence
        if self._aborted == self.sequence or self.local.is_aborted:
            self.drop_reductions()
        n_others = len(self.layout.counts) - 1
        self.wait(lambda: len(self._done) == n_others, in_call=False)
        for machine, (rows, errors, answers, parts) in sorted(self._done.items()):
            self._rows[machine] = rows
            self.errors.update(errors)
            if parts is not None:
                self.on_parts(parts)
            for rank, answer in answers:
                self.on_answer(rank, answer)
        if self.errors:
            self._slots.clear()
        self._finished = self.sequence

    @property
    def ranks_here(self):
        """The ranks of the master's machine."""
        return self.layout.ranks()

    def dismiss(self):
        """Tell the leaders and the carrier that the session is over."""
        if self._is_dismissed:
            return
        with interrupts_held(), contextlib.suppress(WorkerDied):  # the job may be over, too
            self._is_dismissed = True
            self.on_over()
            self.link.tell(None, ("over", self.session))

    def rows(self):
        """Return the numbers that the ranks reported in the last call, in rank order."""
        rows = list(self.local.rows())
        for machine in range(1, len(self.layout.counts)):
            rows += self._rows[machine]
        return rows

    def _warn(self, patience):
        patience = patience or Patience(PATIENCE_SECONDS, HEARTBEAT_SECONDS)
        others = range(1, len(self.layout.counts))
        patience.wait_for_hosts([self.layout.hosts[m] for m in others if m not in self._done])
        # Machines may wait for a reduction with others that have ended the call.
        left = {**self._left, 0: self.begun}  # machine -> the number of its reductions
        self.link.tell(None, ("left", self.session, self.sequence, left))
        return patience

    def _on_done(self, machine, session, sequence, begun, *content):
        if (session, sequence) == (self.session, self.sequence):
            self._done[machine] = content
            self._left[machine] = begun

    def _on_died(self, machine, session, message, rank, exitcode):
        if session == self.session:
            self._death = message, rank, exitcode
            self._raise_death()

    def _on_lost(self, machine, host, why):
        message = f"Machine {host} is lost: {why}. The session has ended, and the job with it."
        self._death = message, self.layout.first(machine), None
        self._raise_death()

    def _raise_death(self):
        # In each wait: a Ctrl-C that was delayed may have replaced the first exception.
        if self._death is not None:
            raise WorkerDied(*self._death)

    def wait(self, has_come, *args, **kwargs):
        """Take messages until `has_come`; raise if a machine, or a worker there, has died."""
        self._raise_death()
        super().wait(has_come, *args, **kwargs)
