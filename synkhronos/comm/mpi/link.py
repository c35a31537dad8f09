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
import threading
import time

from synkhronos._machine.devices import python_command
from synkhronos._machine.interrupts import interrupts_held
from synkhronos._machine.processes import StopWatch
from synkhronos.comm.channel import Channel, Closed, is_own, pair
from synkhronos.comm.heartbeats import LOST_SECONDS
from synkhronos.comm.mpi import secret
from synkhronos.errors import SessionError, WorkerDied

_END_SECONDS = 5.0
_LOOK_SECONDS = 1.0  # a wait for the carrier looks after it so often


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
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0{self.name}")  # no other process has seen the name
        passed = [theirs.fileno(), listener.fileno()]
        code = "from synkhronos.comm.mpi.carrier import main; main(*map(int, sys.argv[1:]))"
        given = dict(os.environ)  # with the secret of the job, which only the carrier needs
        secret.take()
        self._carrier = subprocess.Popen(
            python_command(code, *map(str, passed)),
            env=given,
            pass_fds=[*passed, *_descriptors_of_mpi()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        listener.close()
        self._owner = os.getpid()
        self.channel = Channel(ours)
        self.machine = self.n_machines = None
        self._sessions = itertools.count(1)
        self._told = collections.deque()
        self._answers = {}
        self._numbers = 0
        self._fetching = set()  # the numbers of fetches that have no answer yet
        self._end = None  # why the job has ended, and the machine
        self._loss = None  # the sentence about a machine that is lost
        self.first_rank_of = lambda machine: None  # while there is a session: its first rank
        self._stop_watch = StopWatch()
        self._lock = threading.RLock()  # close() in another thread sends, too

    def next_session(self) -> int:
        """Return the number of the next session in this job; raise if a machine is lost."""
        if self._loss is not None:
            raise SessionError(f"{self._loss}. The job is over: start it again.")
        return next(self._sessions)

    def begin(self) -> None:
        """Wait until the carrier has begun MPI."""
        while self.machine is None:
            self._receive(_LOOK_SECONDS)

    def tell(self, machine, message) -> None:
        """Send a message to the leader of one machine, or of all others if `machine` is None."""
        self._send("tell", machine, message)

    def next_message(self):
        """Return the next message of another leader, with its machine, or None."""
        return self._told.popleft() if self._told else None

    def put_back(self, machine, message):
        """Put a message back, as the next one."""
        self._told.appendleft((machine, message))

    def wait_for_message(self):
        """Return the next message of another leader, with its machine."""
        while not self._told:
            self._receive(_LOOK_SECONDS)
        return self._told.popleft()

    def pump(self, seconds=0) -> bool:
        """Take what has come, and wait for it at most so long; return whether something has."""
        if not self.channel.wait(seconds):
            return False
        self._receive(0)
        return True

    @property
    def is_fetching(self) -> bool:
        """Whether arrays that this process has asked for are still on their way."""
        return bool(self._fetching)

    def look_after_carrier(self):
        """Kill a carrier that has been stopped for long, and raise; to call each second."""
        if self._stop_watch.seconds(self._carrier.pid) > LOST_SECONDS:
            self._end = f"{_stopped_carrier()} and then killed", self.machine
            self._carrier.kill()
            raise self.lost()

    def begin_call(self):
        """Drop answers that the last call did not wait for, because it was left early."""
        self._answers.clear()

    def watch(self, session, workers):
        """Tell the carrier which workers to watch: rank -> process id."""
        self._send("watch", session, workers)

    def leave(self, session):
        """Tell the carrier that a session has ended on this machine; its memory may go."""
        with contextlib.suppress(WorkerDied):  # the job may be over, too
            self._send("leave", session)

    def reduce(self, id, places, ops, divisor, layout, compress=False):
        """Begin an all-reduce over the machines; `answer` tells of its end."""
        self._send("reduce", id, places, ops, divisor, layout, compress)

    def begin_bucket(self, *message):
        """Tell the carrier that this rank has begun a bucket; `answer` tells of its end."""
        self._send("bucket", *message)

    def give_up(self, session, sequence):
        """Give up what not all machines have begun of a call; waiting ranks get an answer."""
        self._send("give_up", session, sequence)

    def settle(self, id, session, sequence):
        """Give up a call; `answer` tells when nothing of it is under way any more."""
        self._send("settle", id, session, sequence)

    def answer(self, id):
        """Return whether the answer to a request has come, and the answer.

        Raises
        ------
        SessionError
            If the request has failed.
        """
        if id not in self._answers:
            return False, None
        answer = self._answers.pop(id)
        if isinstance(answer, _Failure):
            raise SessionError(f"{_NOT_COME}: {answer}")
        return True, answer

    def fetch(self, call, machine, place):
        """Begin to fetch an array of another machine; return the number of its answer."""
        return self._ask("fetch", call, machine, place, None, 0)

    def copy(self, call, machine, places, targets):
        """Begin to copy arrays of another machine to places here; return the answer's number."""
        return self._ask("copy", call, machine, places, targets)

    def _ask(self, name, *content):
        with interrupts_held():
            self._numbers += 1
            number = name, self._numbers
            self._fetching.add(number)
            self._send(name, number, *content)
        return number

    def _send(self, *message):
        try:
            with interrupts_held(), self._lock:
                self.channel.send(message)
        except Closed:
            raise self.lost() from None

    def _receive(self, seconds):
        try:
            if not self.channel.wait(seconds):
                return self.look_after_carrier() if seconds else None
            # A Ctrl-C between the two would lose messages.
            with interrupts_held():
                self._sort(self.channel.receive())
        except Closed:
            raise self.lost() from None

    def _sort(self, messages):
        for name, *rest in messages:
            if name == "told":
                self._told.append(tuple(rest))
            elif name in ("done", "failed"):
                id, answer = rest
                self._answers[id] = answer if name == "done" else _Failure(answer)
                self._fetching.discard(id)
            elif name == "hello":
                self.machine, self.n_machines = rest
            elif name == "end":
                self._end = tuple(rest)
                raise self.lost()
            elif name == "lost":
                machine, host, why = rest
                self._told.append((machine, ("lost", host, why)))
                self._loss = f"Machine {host} is lost: {why}"

    def lost(self):
        """Return the exception for a job that has ended, with the reason that the carrier told."""
        if self._end is None:
            with contextlib.suppress(Closed, WorkerDied):  # nothing more, or that it has ended
                self._sort(self.channel.receive())
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

    def explained(self, end):
        """Return an end of the job that a `Line` has seen, with the reason if the carrier told."""
        told = self.lost()
        return end if self._end is None else told

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


_NOT_COME = "Data did not come or go between machines"


class _Failure(str):
    """Why a request has failed, in place of its answer."""


def _stopped_carrier():
    return (
        f"The process of {socket.gethostname()} that speaks MPI was stopped for {LOST_SECONDS:g} s"
    )


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


class Line:
    """A rank's own connection with the carrier, for what leaders don't do for it.

    That is the arrays that it fetches and, on workers, buckets. It is made when it is needed.
    """

    def __init__(self, name):
        self._name, self._channel, self._numbers = name, None, 0
        self._answers = {}
        self._stop_watch = StopWatch()

    def fetch(self, call, machine, place, rows, axis):
        """Return the place in shared memory, here, of rows of an array of another machine."""
        self._numbers += 1
        self._send("fetch", self._numbers, call, machine, place, rows, axis)
        return self._wait_for(self._numbers)

    def begin_bucket(self, *message):
        """Begin a bucket; see `Link.begin_bucket`."""
        self._send("bucket", *message)

    def wait_for_bucket(self, id):
        """Wait for the end of a bucket; return the carrier's answer."""
        answer = self._wait_for(id)
        for old in [each for each in self._answers if isinstance(each, tuple) and each < id]:
            if old[:2] < id[:2]:
                del self._answers[old]  # of a call that was left early
        return answer

    def _send(self, *message):
        try:
            if self._channel is None:
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connection.connect(f"\0{self._name}")
                if not is_own(connection):  # when the carrier has ended, its name can be taken
                    connection.close()
                    raise ConnectionError
                self._channel = Channel(connection)
            self._channel.send(message)
        except (Closed, ConnectionError):
            raise self._ended() from None

    def _wait_for(self, id):
        try:
            while id not in self._answers:
                if not self._channel.wait(_LOOK_SECONDS):
                    self._look_after_carrier()
                for name, number, answer in self._channel.receive():
                    if number is None:  # the carrier could not take the connection
                        self.close()
                        raise SessionError(f"{_NOT_COME}: {answer}")
                    self._answers[number] = answer if name == "done" else _Failure(answer)
        except (Closed, ConnectionError):
            raise self._ended() from None
        answer = self._answers.pop(id)
        if isinstance(answer, _Failure):
            raise SessionError(f"{_NOT_COME}: {answer}")
        return answer

    def _ended(self):
        self.close()
        return JobEnded(f"The process of {socket.gethostname()} that speaks MPI has ended.")

    def _look_after_carrier(self):
        if self._stop_watch.seconds(self._channel.peer) > LOST_SECONDS:
            raise JobEnded(_stopped_carrier())

    def close(self):
        """Close the connection."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._answers.clear()


def _descriptors_of_mpi():
    """Return the descriptor by which MPICH's processes speak with mpiexec, if there is one."""
    number = os.environ.get("PMI_FD", "")
    with contextlib.suppress(OSError, ValueError):
        os.fstat(int(number))
        return [int(number)]
    return []
