"""A process's connection with the carrier of its machine: requests, answers and messages.

    leader    CarrierLink()        starts the carrier, and speaks for its machine
    worker    link.of_worker()     connects to the same carrier, when it has something to ask

    send ──▶ carrier ── done, failed ──▶ take_answer    of what was asked, by its id
                     ── told, lost ────▶ `told`         of other leaders, and of lost machines
                     ── end ───────────▶ every method raises
    tell_directly ──▶ another leader ──▶ `told`

Every method also raises if the carrier has ended, or was stopped for long. The carriers have
connected the first leader with each other one: what is small, and may overtake other messages, has
one hop there and not three.
"""

import collections
import contextlib
import itertools
import os
import pickle
import secrets
import select
import socket
import subprocess
import threading
import time

from synkhronos._machine.devices import python_command
from synkhronos._machine.heartbeats import lost_seconds
from synkhronos._machine.interrupts import interrupts_held
from synkhronos._machine.processes import StopWatch
from synkhronos.comm.channel import Channel, Closed, is_own
from synkhronos.comm.mpi import mesh, secret
from synkhronos.errors import SessionError, WorkerDied

_END_SECONDS = 5.0
_LOOK_SECONDS = 1.0  # a wait for the carrier looks this often whether it was stopped
_PATIENCE_SECONDS = 5.0  # for the carriers to say why a connection between leaders has ended
_DIRECT = 1 << 16  # bytes of a message that leaders exchange directly, at most


class CarrierLink:
    """One process's end, from the start of the job to its end.

    `name` is that of the abstract socket of a carrier that runs already; without it one is started.
    """

    def __init__(self, name=None):
        self.machine = self.n_machines = None  # which only leaders know
        self._carrier = self.channel = None
        self._leaders = mesh.Connections(0, 0)
        self._sent = 0, 0  # messages and bytes to these
        self._ended = {}  # machine -> since when it was known that its connection has ended
        self.poll = select.epoll()  # can be polled itself, and forgets what is closed
        self._name = name
        self._owner = os.getpid()
        self._sessions, self._numbers = itertools.count(1), itertools.count(1)
        self.told = collections.deque()  # (machine, message) of other leaders
        self.answers = {}  # to requests, by their ids
        self.fetching = set()  # the ids of requests for arrays that have no answer yet
        self._end = None  # why the job has ended, and the machine
        self._loss = None  # the sentence that `on_loss` got
        self.on_loss = lambda sentence: None  # on the loss of a machine, or of a process elsewhere
        self.first_rank_of = lambda machine: None  # returns the first rank there in the session
        self._stop_watch = StopWatch()
        self._lock = threading.RLock()  # close() in another thread sends, too
        if name is None:
            self._start_carrier()

    def _start_carrier(self):
        ours, theirs = socket.socketpair()
        self._name = f"synkhronos-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0{self._name}")  # no other process has seen the name
        passed = [theirs.fileno(), listener.fileno()]
        code = "from synkhronos.comm.mpi.carrier import main; main(*map(int, sys.argv[1:]))"
        environment = dict(os.environ)  # with the secret of the job, which only the carrier needs
        secret.take()
        self._carrier = subprocess.Popen(
            python_command(code, *map(str, passed)),
            env=environment,
            pass_fds=[*passed, *_descriptors_of_mpi()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        listener.close()
        self._set_channel(ours)

    def _set_channel(self, connection):
        self.channel = Channel(connection)
        self.poll.register(connection, select.EPOLLIN)

    def begin(self) -> None:
        """Wait until the carrier has begun MPI."""
        while not self.channel.wait(_LOOK_SECONDS):
            self.look_after_carrier()
        with interrupts_held():
            try:
                self._leaders = mesh.connections_given(self.channel)
            except (EOFError, ConnectionError):
                raise self._lost() from None
            for each in self._leaders.descriptors:
                self.poll.register(each, select.EPOLLIN)
            self._leaders.before_close = self.poll.unregister
        self.machine, self.n_machines = self._leaders.rank, self._leaders.size

    def of_worker(self) -> "CarrierLink":
        """Return the connection of a worker, in the process that was forked for it."""
        self.close()
        return CarrierLink(self._name)

    def close(self) -> None:
        """Close this end: in a process that was forked, this one goes on."""
        if self.channel is not None:
            self.channel.close()
        self._leaders.close()
        self.poll.close()

    def next_session(self) -> int:
        """Return the number of the next session in this job; raise if a machine is lost."""
        if self._loss is not None:
            raise SessionError(f"{self._loss}. The job is over: start it again.")
        return next(self._sessions)

    def tell(self, machine, message) -> None:
        """Send a message to the leader of one machine, or of all others if `machine` is None."""
        self.send("tell", machine, pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def tell_directly(self, machines, message) -> None:
        """Send leaders a message that may overtake others."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with interrupts_held(), self._lock:
            for machine in machines:
                if len(data) > _DIRECT or not self._leaders.can_send(machine):
                    self.send("tell", machine, data)
                else:
                    self._leaders.send(machine, data, mesh.MESSAGE)
                    self._sent = self._sent[0] + 1, self._sent[1] + len(data)

    def send(self, *message):
        """Send the carrier a message: a name in `BaseCarrier.from_ranks`, and arguments.

        A message that is answered has an id among them, for `take_answer`.
        """
        try:
            with interrupts_held(), self._lock:
                if self.channel is None:
                    self._connect()
                self.channel.send(message)
        except (Closed, ConnectionError):
            raise self._lost() from None

    def _connect(self):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(f"\0{self._name}")
            if not is_own(connection):  # anybody can take the name of a carrier that has ended
                raise ConnectionError
        except OSError:
            connection.close()
            raise
        self._set_channel(connection)

    def ask(self, name, *content):
        """Ask to "fetch" or "copy" arrays of another machine; return the id of the request."""
        with interrupts_held():
            id = name, next(self._numbers)
            self.fetching.add(id)
            self.send(name, id, *content)
        return id

    def count_traffic(self):
        """Return the number of messages that this machine has sent in this job, and their bytes."""
        counts = zip(self._sent, self.wait_for(self.ask("count")))
        return [own + of_carrier for own, of_carrier in counts]

    def take_answer(self, id):
        """Return the answer to a request that has come; raise SessionError if it has failed."""
        answer = self.answers.pop(id)
        if isinstance(answer, SessionError):
            raise answer
        return answer

    def wait_for(self, id):
        """Wait for the answer to a request; return it as `take_answer` does."""
        while id not in self.answers:
            self.receive()
        return self.take_answer(id)

    def wait_for_message(self):
        """Wait for the next message of another leader; return (machine, message)."""
        while not self.told:
            self.receive()
        return self.told.popleft()

    def receive(self, seconds=_LOOK_SECONDS) -> None:
        """Take the messages that have come; wait for the first."""
        for descriptor in self._leaders.unsent:
            self.poll.modify(descriptor, select.EPOLLIN | select.EPOLLOUT)
        ready = self.poll.poll(seconds)
        if not ready:
            return self.look_after_carrier() if seconds else None
        # A Ctrl-C between `receive` and `_sort` would lose messages.
        with interrupts_held():
            for descriptor, _ in ready:
                if descriptor in self._leaders.descriptors:
                    self.poll.modify(descriptor, select.EPOLLIN)
                    self._leaders.read(descriptor)
            for machine, data in iter(lambda: self._leaders.take(mesh.MESSAGE), None):
                self.told.append((machine, pickle.loads(data)))
            if any(descriptor == self.channel.fileno() for descriptor, _ in ready):
                try:
                    self._sort(self.channel.receive())
                except (Closed, ConnectionError):
                    raise self._lost() from None

    def _sort(self, messages):
        for name, *rest in messages:
            if name == "told":
                machine, message = rest
                self.told.append((machine, pickle.loads(message)))
            elif name in ("done", "failed"):
                id, answer = rest
                if name == "failed":
                    answer = SessionError(f"Data did not come or go between machines: {answer}")
                if id is None:  # the carrier could not take the connection
                    self.channel.close()
                    self.channel = None
                    raise answer
                self.answers[id] = answer
                self.fetching.discard(id)
            elif name == "end":
                self._end = tuple(rest)
                raise self._lost()
            elif name == "lost":
                machine, host, why = rest
                self.told.append((machine, ("lost", host, why)))
                self._loss = f"Machine {host} is lost: {why}"
                self.on_loss(self._loss)

    def look_after_carrier(self):
        """Raise if the carrier was stopped for long, which is killed then.

        If the connection with a leader has ended, and no carrier says why, tell the carrier.
        """
        for machine, why in self._leaders.ended.items():
            since = self._ended.setdefault(machine, time.monotonic())
            if time.monotonic() - since > _PATIENCE_SECONDS:
                self._ended[machine] = float("inf")
                self.send("lose", machine, why)
        pid = self._carrier.pid if self._carrier else self.channel.peer
        if self._stop_watch.seconds(pid) > lost_seconds():
            how = f"{_carrier_here()} was stopped for {lost_seconds():g} s"
            self._end = f"{how} and then killed" if self._carrier else how, self.machine
            if self._carrier:
                self._carrier.kill()
            raise self._lost()

    def _lost(self):
        """Return the exception for a job that has ended, with the reason that the carrier sent."""
        if self._end is None and self.channel is not None:
            with contextlib.suppress(Closed, WorkerDied):  # WorkerDied: the reason, now in `_end`
                self._sort(self.channel.receive())
        reason, machine = self._end or (f"{_carrier_here()} has ended", self.machine)
        if self.machine != 0:
            return JobEnded(reason)
        if self._loss is None and reason is not None:
            self._loss = reason
            self.on_loss(reason)
        return WorkerDied(
            f"{reason}, and with it the job on {self.n_machines} machines: start it again.",
            self.first_rank_of(machine),
        )

    def end(self, reason=None) -> None:
        """End the carriers of all machines; `reason` is None at the script's regular end.

        After a loss they end when this process has: see `Carrier.from_machine_end`.
        """
        if os.getpid() != self._owner:
            return
        if self._loss is not None or self._end is not None:
            os.dup(self.channel.fileno())  # stays open longer than `channel` at Python's exit
            return
        with contextlib.suppress(WorkerDied):  # the job may be over already
            if reason is None and os.environ.get(secret.TRUST):
                id = self.ask("settle", float("inf"), 0)  # MPI could not end while it reduces
                while id not in self.answers and self._loss is None:
                    self.receive()
            self.send("end", reason)
        self.join(_END_SECONDS if reason is None else float("inf"))

    def join(self, seconds=_END_SECONDS) -> None:
        """Wait until the carrier has ended: mpirun ends what a process that ends has started.

        After `seconds` the carrier is killed. After a loss it ends after the script, or when the
        first machine is silent.
        """
        end = time.monotonic() + seconds
        while self._carrier.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
            if self._stop_watch.seconds(self._carrier.pid) > lost_seconds():
                break
        if self._carrier.poll() is None:
            self._carrier.kill()
            self._carrier.wait()


def _carrier_here():
    return f"The process of {socket.gethostname()} that speaks with other machines"


class JobEnded(WorkerDied):
    """Another machine, or the carrier of this one, has ended."""

    def __init__(self, message):
        super().__init__(message or "The script has ended.", None, None)
        self.is_regular = message is None  # whether the first machine's script is at its end


def _descriptors_of_mpi():
    """Return the descriptor through which MPICH speaks with its mpiexec, in a list, or []."""
    number = os.environ.get("PMI_FD", "")
    with contextlib.suppress(OSError, ValueError):
        os.fstat(int(number))
        return [int(number)]
    return []
