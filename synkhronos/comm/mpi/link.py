"""A process's connection with the carrier of its machine.

The first process of a machine, its leader, starts the carrier and has a `Link`; its workers connect
to the same carrier for the arrays that they fetch.
"""

import collections
import contextlib
import itertools
import os
import secrets
import socket
import subprocess
import time

from synkhronos._machine.devices import python_command
from synkhronos._machine.interrupts import interrupts_held
from synkhronos.comm.mpi.channel import Channel, Closed, pair
from synkhronos.errors import SessionError, WorkerDied

_END_SECONDS = 5.0


class Link:
    """The leader's connection with its carrier, from the start of the job to its end.

    Attributes
    ----------
    machine, n_machines : int
    name : str
        Of the abstract socket by which workers connect to the carrier.
    first_rank_of : callable
        Takes a machine; returns its first rank in the present session, or None.
    """

    def __init__(self):
        ours, theirs = pair()
        self.name = f"synkhronos-{secrets.token_hex(16)}"
        os.set_inheritable(theirs.fileno(), True)
        code = "from synkhronos.comm.mpi.carrier import main; main(int(sys.argv[1]), sys.argv[2])"
        self._carrier = subprocess.Popen(
            python_command(code, str(theirs.fileno()), self.name),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._owner = os.getpid()
        self.channel = Channel(ours)
        self.machine = self.n_machines = None
        self._sessions = itertools.count(1)
        self._told = collections.deque()
        self._answers = {}
        self._numbers = 0
        self._end = None  # why the job has ended, and the machine
        self._loss = None  # the sentence about a machine that is lost
        self.first_rank_of = lambda machine: None  # while there is a session: its first rank

    def next_session(self) -> int:
        """Return the number of the next session in this job; raise if a machine is lost."""
        if self._loss is not None:
            raise SessionError(f"{self._loss}. The job is over: start it again.")
        return next(self._sessions)

    def begin(self) -> None:
        """Wait until the carrier has begun MPI."""
        while self.machine is None:
            self._receive(None)

    def tell(self, machine, message) -> None:
        """Send a message to the leader of one machine, or of all others if `machine` is None."""
        self._send("tell", machine, message)

    def told(self):
        """Return the next message of another leader, with its machine, or None."""
        return self._told.popleft() if self._told else None

    def untell(self, machine, message):
        """Put a message back, as the next one."""
        self._told.appendleft((machine, message))

    def wait_for_message(self):
        """Return the next message of another leader, with its machine."""
        while not self._told:
            self._receive(None)
        return self._told.popleft()

    def pump(self, seconds=0) -> bool:
        """Take what has come, and wait for it at most so long; return whether something has."""
        if not self.channel.wait(seconds):
            return False
        self._receive(0)
        return True

    def begin_call(self):
        """Tell the carrier that arrays of the last call are not needed any more."""
        self._send("begin")

    def forget(self, references):
        """Tell the carrier that segments have been released."""
        self._send("forget", references)

    def reduce(self, id, places, ops, divisor, layout, compress=False):
        """Begin an all-reduce over the machines; `answer` tells of its end."""
        self._send("reduce", id, places, ops, divisor, layout, compress)

    def begin_bucket(self, *message):
        """Tell the carrier that this rank has begun a bucket; `answer` tells of its end."""
        self._send("bucket", *message)

    def spread(self, id, root, places):
        """Begin to copy arrays from one machine to all others; `answer` tells of its end."""
        self._send("spread", id, root, places)

    def give_up(self, session, sequence):
        """Give up what not all machines have begun of a call; waiting ranks get an answer."""
        self._send("give_up", session, sequence)

    def settle(self, id, session, sequence):
        """Give up a call; `answer` tells when no reduction of it is open any more."""
        self._send("settle", id, session, sequence)

    def answer(self, id):
        """Return whether the answer to a request has come, and the answer."""
        if id in self._answers:
            return True, self._answers.pop(id)
        return False, None

    def fetch(self, machine, place, rows=None, axis=0):
        """Begin to fetch an array of another machine; return the number of its answer."""
        self._numbers += 1
        number = "fetch", self._numbers
        self._send("fetch", number, machine, place, rows, axis, False)
        return number

    def _send(self, *message):
        try:
            with interrupts_held():
                self.channel.send(message)
        except Closed:
            raise self.lost() from None

    def _receive(self, seconds):
        try:
            if not self.channel.wait(seconds):
                return
            # A Ctrl-C between the two would lose messages.
            with interrupts_held():
                self._sort(self.channel.receive())
        except Closed:
            raise self.lost() from None

    def _sort(self, messages):
        for name, *rest in messages:
            if name == "told":
                self._told.append(tuple(rest))
            elif name in ("done", "fetched"):
                self._answers[rest[0]] = rest[1] if name == "done" else tuple(rest[1:])
            elif name == "hello":
                self.machine, self.n_machines = rest
            elif name == "end":
                self._end = tuple(rest)
                raise self.lost()
            elif name == "lost":
                machine, why = rest
                self._told.append((machine, ("lost", why)))
                self._loss = f"Machine {machine} is lost: {why}"

    def lost(self):
        """Return the exception for a job that has ended."""
        reason, machine = self._end or (
            f"The process of {socket.gethostname()} that speaks MPI has ended",
            self.machine,
        )
        if self.machine:
            return JobEnded(reason)
        return WorkerDied(
            f"{reason}, and with it the job on {self.n_machines} machines: start it again.",
            self.first_rank_of(machine),
        )

    def end(self, reason=None) -> None:
        """End the carriers of all machines; `reason` is None at the script's regular end."""
        if os.getpid() != self._owner:
            return
        with contextlib.suppress(WorkerDied):  # it may be over already
            self._send("end", reason)
        self.join()

    def join(self) -> None:
        """Wait until the carrier has ended MPI: mpirun complains about a process that ends before.

        A carrier that waits for a lost machine is killed.
        """
        end = time.monotonic() + _END_SECONDS
        while self._carrier.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        if self._carrier.poll() is None:
            self._carrier.kill()
            self._carrier.wait()

    def leave_in_child(self) -> None:
        """Close this end in a process that was forked from the leader."""
        self.channel.close()


class JobEnded(WorkerDied):
    """Another machine, or the carrier of this one, has ended.

    Attributes
    ----------
    is_regular : bool
        Whether the first machine has ended the job, because its script is at its end.
    """

    def __init__(self, message):
        super().__init__(message or "The script has ended.", None, None)
        self.is_regular = message is None


class Fetcher:
    """A worker's connection with the carrier, for the arrays that it fetches; made when needed."""

    def __init__(self, name):
        self._name, self._channel, self._numbers = name, None, 0

    def fetch(self, machine, place, rows, axis):
        """Return the place in shared memory, here, of rows of an array of another machine."""
        if self._channel is None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.connect(f"\0{self._name}")
            self._channel = Channel(connection)
        self._numbers += 1
        try:
            message = "fetch", self._numbers, machine, place, rows, axis, rows is None
            self._channel.send(message)
            while True:
                self._channel.wait()
                for _, number, segment, dtype, shape, problem in self._channel.receive():
                    if number == self._numbers:
                        if problem is not None:
                            raise SessionError(f"An array did not come: {problem}")
                        return segment, dtype, shape
        except Closed:
            raise JobEnded("The carrier of this machine has ended.") from None

    def close(self):
        """Close the connection."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
