"""The gate of another machine's leader: it takes the master's commands, for the ranks there."""

import pickle

import numpy as np

from synkhronos.comm import reports
from synkhronos.comm.mpi.gate import GateOfMachines


class Nothing:
    """A command that does nothing, in place of one that a leader could not read."""

    def run(self, worker):
        """Do nothing."""


class LeaderGate(GateOfMachines):
    """The gate of another machine's leader, and of its workers."""

    def __init__(self, *args):
        super().__init__(*args)
        self._commands = {}
        self._next = None
        self.parts = lambda: None  # returns the outputs of this machine's ranks for the master
        self.answers = []
        self.has_ended = False
        self._handlers.update(command=self._on_command, over=self._on_over, wish=self._on_wish)

    def start(self, command):
        """Start a command on this machine."""
        self.local.start(command)

    def finish(self):
        """Finish a command on this machine."""
        self.local.finish()

    def rows(self):
        """Return the numbers that the ranks of this machine reported."""
        return list(self.local.rows())

    def next_command(self):
        """Wait for the master's next command, and start it on this machine."""
        if not self.is_leader:
            return super().next_command()
        self.wait(lambda: self._next is not None or self.has_ended, in_call=False)
        if self.has_ended:
            raise SessionOver
        (slot, payload, small), self._next = self._next, None
        self._left = {}
        self.link.answers.clear()  # of a call that was left early
        self.answers.clear()
        try:
            if payload is not None:
                self._commands[slot] = pickle.loads(payload)
        except BaseException:
            self.local.start(Nothing())
            raise
        command = self._commands[slot]
        refs = zip(getattr(command, "inputs", ()), small)
        self.given = {ref: np.ndarray(ref.shape, ref.dtype, bytearray(data)) for ref, data in refs}
        self.local.start(command)
        if self._aborted == self.sequence:
            self.local.abort()  # "abort" came before the call was started here
        return command

    def worker_finish(self, reply=None, error=None):
        """Wait for the workers of this machine; tell the master how the command has ended."""
        if not self.is_leader:
            return self.local.worker_finish(reply, error)
        if error is not None:
            self.local.abort()
        elif reply is not None:
            self.on_answer(self.rank, reply)
        if self.local.is_aborted:
            # Workers of this machine may wait for buckets that this process has not begun.
            self.link.send("give_up", self.session, self.sequence)
        self.local.finish()
        errors = {self.first + rank: each for rank, each in self.local.errors.items()}
        self.local.errors.clear()
        if error is not None:
            errors[self.rank] = reports.report_on(error)
        if errors:
            self.link.tell(None, ("abort", self.session, self.sequence))
        parts = None
        if errors or self.local.is_aborted or self._aborted == self.sequence:
            self.drop_reductions()
        else:
            try:
                parts = self.parts()
            except Exception as problem:  # such as no shared memory for the outputs
                errors[self.rank] = reports.report_on(problem)
        content = self.rows(), errors, list(self.answers), parts
        self._finished = self.sequence
        self.link.tell_directly([0], ("done", self.session, self.sequence, self.begun, *content))
        return None

    def _on_command(self, machine, session, sequence, slot, payload, small):
        if session == self.session:
            self._next = slot, payload, small

    def _on_over(self, machine, session):
        if session == self.session:
            self.has_ended = True

    def _on_wish(self, machine, *rest):
        self.has_ended = True  # the master begins another session
        return True

    def wait(self, has_come, *args, **kwargs):
        """Take messages until `has_come`; leave if the session is over."""
        super().wait(lambda: has_come() or self.has_ended, *args, **kwargs)
        if self.has_ended and not has_come():
            raise SessionOver


class SessionOver(BaseException):
    """The master has ended the session: leave it at once."""
