"""The carrier of a machine: the process that speaks MPI, for all ranks there.

    script or leader ── Unix socket ──┐                            ┌── script or leader
    rank             ── Unix socket ──┤ carrier ═══ MPI ═══ carrier├── rank
    segments of shared memory ── mapped ┘                            └ mapped ── segments

Theano holds Python's lock while it computes, so a rank can't move data meanwhile; and a process
that has begun MPI must not be forked. So MPI has a process of its own, which the first process of
the machine starts. It reads and writes the segments of the ranks where they are.

A message is a tuple whose first item names it: `Carrier` has a method ``from_rank_...`` or
``from_machine_...`` for each. Messages between two carriers keep their order. What is large goes in
a message of its own, announced by a small one, so that both sides are ready for it.

A request that fails here, because descriptors or shared memory are used up, is answered with
"failed" and a sentence that names this machine: its rank raises. Ranks keep memory that the carrier
uses until they have its answer. After a call that was aborted they ask it to "settle", which it
answers when nothing of the call is under way in their memory. At the end of a session, "leave",
they don't wait: the carrier has the last maps of the memory then, which keep it until all is done.

Each second carriers tell one another that they are alive. On other machines than the script's, a
process that has been stopped for long counts as dead, because nothing else would tell the script.
"""

import collections
import functools
import os
import pickle
import signal
import socket
import sys
import time
import traceback
import warnings

import mpi4py

from synkhronos.comm.mpi import folders
from synkhronos.comm.mpi.settings import away, open_no_ports

open_no_ports()
# Open MPI asks the receiver before it sends more than this. The question and the answer would wait
# behind the data that a slow cable has queued; here the receiver is ready in almost all cases. A
# part of an array is a little more: what checks it, and what MPI adds.
os.environ.setdefault("OMPI_MCA_btl_tcp_eager_limit", str((1 << 20) + (1 << 12)))
mpi4py.rc.threads = False  # only one thread calls MPI
# Of another MPI's mpiexec: `synkhronos run` refuses it with a sentence.
warnings.filterwarnings("ignore", "suspicious MPI execution environment", RuntimeWarning)

with folders.of_segment(), away():
    from mpi4py import MPI

from synkhronos._machine.log import log  # noqa: E402
from synkhronos._machine.processes import StopWatch  # noqa: E402
from synkhronos._machine.shared_memory import Segments  # noqa: E402
from synkhronos.comm.channel import Channel, Closed, is_own  # noqa: E402
from synkhronos.comm.heartbeats import LOST_SECONDS, SILENT, Heartbeats  # noqa: E402
from synkhronos.comm.mpi import secret  # noqa: E402
from synkhronos.comm.mpi.fetches import Fetches, problem_here  # noqa: E402
from synkhronos.comm.mpi.reductions import Reductions  # noqa: E402
from synkhronos.comm.mpi.transfers import bytes_of  # noqa: E402
from synkhronos.comm.mpi.waiting import Waiting  # noqa: E402

_REQUESTS = {"fetch", "copy", "reduce", "bucket"}  # of ranks: the answer may be "failed"
_MESSAGE, _BULK = 1, 2  # tags; all-reduces have others
_WINDOW = 16  # parts of arrays to one machine that are under way, each of them copied to be checked


class Carrier:
    """The event loop of a carrier."""

    def __init__(self, leader, listener, given=None):
        comm = MPI.COMM_WORLD.Dup()
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._comm = secret.checked(comm, given)
        self.machine, self.n_machines = self._comm.rank, self._comm.size
        self._hosts = self._comm.allgather(socket.gethostname())
        self._others = [m for m in range(self.n_machines) if m != self.machine]
        self._segments = Segments()
        self._fetches = Fetches(self, self._segments)
        self._leader, self._listener = leader, listener
        self._channels = {leader.fileno(): leader}
        self._has_unsent = False
        self._waiting = Waiting()
        self._waiting.add(leader)
        self._waiting.add(listener)
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)  # to refuse connections with
        self._sending = []  # (request, buffer)
        self._bulk = collections.defaultdict(collections.deque)  # by machine: (part, then)
        self._n_bulk = collections.Counter()  # by machine: parts that are under way
        self._receiving = []  # (request, buffer, what to do then); also some that is sent
        self._reductions = Reductions(self)
        self._settling = None  # (channel, id, session, sequence)
        self._settled = 0, 0  # the last call in which the ranks here will begin nothing more
        self._left = 0  # the last session that has ended here
        partners = self._others if self.machine == 0 else [0]
        self._heartbeats = Heartbeats(partners, lambda machine: self.tell(machine, "alive"))
        self._stop_watch = StopWatch()
        self._workers = {}  # rank -> process id, of the present session
        self._session = 0
        self.is_running, self.has_lost = True, False
        self._leader.post(("hello", self.machine, self.n_machines))

    def run(self) -> None:
        """Carry messages until the leader or the first machine says that it is over."""
        while self.is_running:
            is_busy = self._reductions.are_under_way or self._receiving or self._sending
            happened = self._serve_ranks(self._waiting.for_ranks(is_busy or self._has_unsent))
            has_come = self._serve_machines()
            happened |= self._move()
            self._waiting.note(happened, has_come)
            if self._heartbeats.beat():
                for machine in self._heartbeats.silent()[:1]:
                    self._lose(machine)
                self._waiting.find_sockets()
                self._segments.forget_freed()
                if self.machine != 0:
                    self._end_stopped()
        self._send_what_is_left()

    def fail(self, reason):
        """End all carriers after an error that no rank can be told of."""
        self.has_lost = True
        self.tell_all("end", reason)
        self.post(self._leader, "end", reason, self.machine)
        self._send_what_is_left()

    def _send_what_is_left(self):
        for request, _ in self._sending:
            _wait_at_most(request, 1.0)

    def _serve_ranks(self, descriptors):
        happened = False
        for fd in descriptors:
            happened = True
            if fd == self._listener.fileno():
                self._accept()
                continue
            channel = self._channels[fd]
            try:
                channel.flush()
                messages = channel.receive()
            except Closed:
                self._drop(channel)
                continue
            for message in messages:
                self._serve(channel, *message)
        unsent = [channel for channel in self._channels.values() if channel.has_unsent]
        for channel in unsent:
            self.post(channel)
        self._has_unsent = bool(unsent)
        return happened

    def _serve(self, channel, name, *rest):
        try:
            self._handler(f"from_rank_{name}")(channel, *rest)
        except Exception as error:
            if name not in _REQUESTS:
                raise
            self.post(channel, "failed", rest[0], problem_here(error))

    def _handler(self, name):
        those = self, self._fetches, self._reductions
        return next(getattr(each, name) for each in those if hasattr(each, name))

    def post(self, channel, *message):
        """Send a message to a rank, or what is left of the last ones."""
        try:
            if message:
                channel.post(message)
            else:
                channel.flush()
        except Closed:
            self._drop(channel)

    def _accept(self):
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            return self._refuse(error)
        if not is_own(connection):
            return connection.close()
        channel = Channel(connection)
        self._channels[channel.fileno()] = channel
        self._waiting.add(channel)

    def _refuse(self, error):
        """Answer a connection for which there is no descriptor."""
        os.close(self._spare)
        try:
            connection, _ = self._listener.accept()
        except OSError:
            pass  # it has gone
        else:
            self.post(Channel(connection), "failed", None, problem_here(error))
            connection.close()
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _drop(self, channel):
        if channel.fileno() not in self._channels:
            return
        self._waiting.remove(channel)
        del self._channels[channel.fileno()]
        if channel is self._leader:
            # It has ended without a word: the other machines end their parts.
            self.tell_all("end", f"The first process on {socket.gethostname()} has ended")
            self.is_running = False
        channel.close()

    def _serve_machines(self):
        status, happened = MPI.Status(), False
        while self._comm.Iprobe(MPI.ANY_SOURCE, _MESSAGE, status):
            happened = True
            data = bytearray(status.Get_count(MPI.BYTE))
            machine = status.Get_source()
            self._comm.Recv([data, MPI.BYTE], machine, _MESSAGE)
            self._heartbeats.note(machine)
            name, *rest = pickle.loads(data)
            self._handler(f"from_machine_{name}")(machine, *rest)
        return happened

    def _move(self):
        """Go on with what is under way."""
        happened = False
        if self._sending:
            left = [each for each in self._sending if not each[0].Test()]
            happened = len(left) < len(self._sending)
            self._sending = left
        left, have_come = [], []
        for each in self._receiving:
            (have_come if each[0].Test() else left).append(each)
        self._receiving = left
        for _, _, then in have_come:
            happened = True
            then()
        happened |= self._reductions.progress()
        if self._settling is not None:
            self._settle()
        return happened

    def _settle(self):
        """Answer the leader when nothing of a call that was given up is under way any more."""
        channel, id, *call = self._settling
        call = tuple(call)
        if not self._reductions.have(call) and not self._fetches.are_copying(call):
            self._reductions.drop_announcements(self.is_over)
            self._settling = None
            self.post(channel, "done", id, None)

    def is_over(self, id):
        """Return whether the ranks here begin nothing more in the call of a reduction."""
        return id[0] <= self._left or id[:2] <= self._settled

    def has_left(self, session):
        """Return whether a session has ended here."""
        return session <= self._left

    def _end_stopped(self):
        """Kill processes of this machine that have been stopped for long, and say so."""
        where, for_long = f"on {socket.gethostname()}", f"was stopped for {LOST_SECONDS:g} s"
        leader = os.getppid()
        if self._stop_watch.seconds(leader) > LOST_SECONDS:
            self.tell_all("end", f"The first process {where} {for_long}")
            self.is_running = False
            os.kill(leader, signal.SIGKILL)
        for rank, pid in list(self._workers.items()):
            if self._stop_watch.seconds(pid) > LOST_SECONDS:
                message = (
                    f"Worker rank {rank} {where} (process {pid}) {for_long}, and then killed. The "
                    "session has ended: close() and fork() to begin again."
                )
                self.tell(0, "told", ("died", self._session, message, rank, -signal.SIGKILL))
                del self._workers[rank]
                os.kill(pid, signal.SIGKILL)

    def _lose(self, machine):
        host = self._hosts[machine]
        self.post(self._leader, "lost", machine, host, f"It {SILENT}")
        for other in self._others:
            if other != machine:
                self.tell(other, "end", f"Machine {host} is lost")
        self._heartbeats.drop(machine)
        self.has_lost = True
        if machine == 0:
            reason = f"The first machine, {host}, is lost: It {SILENT}"
            self.post(self._leader, "end", reason, machine)
            self.is_running = False

    def tell(self, machine, *message):
        """Send a message to the carrier of another machine."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._sending.append((self._comm.Isend([data, MPI.BYTE], machine, _MESSAGE), data))

    def tell_all(self, *message):
        """Send a message to the carriers of all other machines."""
        for machine in self._others:
            self.tell(machine, *message)

    def send(self, machine, buffer, tag):
        """Send an array; return the request."""
        return self._comm.Isend([bytes_of(buffer), MPI.BYTE], machine, tag)

    def receive(self, machine, buffer, tag):
        """Receive an array; return the request."""
        return self._comm.Irecv([bytes_of(buffer), MPI.BYTE], machine, tag)

    def send_bulk(self, machine, part, then=lambda: None):
        """Send a part of an array; call `then` when it has gone."""
        self._bulk[machine].append((part, then))
        self._begin_bulk(machine)

    def _begin_bulk(self, machine):
        while self._bulk[machine] and self._n_bulk[machine] < _WINDOW:
            part, then = self._bulk[machine].popleft()
            self._n_bulk[machine] += 1
            then = functools.partial(self._sent, machine, then)
            self._receiving.append((self.send(machine, part, _BULK), part, then))

    def _sent(self, machine, then):
        self._n_bulk[machine] -= 1
        self._begin_bulk(machine)
        then()

    def receive_bulk(self, machine, part, then):
        """Receive a part of an array; call `then` when it has come."""
        self._receiving.append((self.receive(machine, part, _BULK), part, then))

    def from_rank_tell(self, channel, to, message):
        """Pass a message on to the leaders of one machine, or of all others."""
        for machine in self._others if to is None else [to]:
            self.tell(machine, "told", message)

    def from_rank_watch(self, channel, session, workers):
        """Watch the workers of this machine: rank -> process id."""
        self._session, self._workers = session, workers

    def from_rank_leave(self, channel, session):
        """Forget a session that has ended here: nothing more is begun, and no rank waits.

        What has been begun on all machines goes on in memory that nothing else uses any more.
        """
        self._left = max(self._left, session)
        self._workers = {}
        self._reductions.leave(self.is_over)
        if self._settling is not None and self._settling[2] <= session:
            self._settling = None
        self._segments.forget_all()

    def from_rank_settle(self, channel, id, session, sequence):
        """Give up a call; answer when nothing of it is under way in memory of the ranks."""
        self._reductions.from_rank_give_up(channel, session, sequence)
        self._settled = max(self._settled, (session, sequence))
        self._settling = channel, id, session, sequence

    def from_rank_end(self, channel, reason):
        """End this carrier, and those of all other machines."""
        self.tell_all("end", reason)
        self.is_running = False

    def from_machine_alive(self, machine):
        """Take note: the time was written down already."""

    def from_machine_told(self, machine, message):
        """Pass a message on to the leader of this machine."""
        self.post(self._leader, "told", machine, message)

    def from_machine_end(self, machine, reason):
        """End, because another machine has."""
        self.post(self._leader, "end", reason, machine)
        self.is_running = False

    def open(self, place):
        """Return an array of a rank of this machine, where it is."""
        segment, dtype, shape, offset = place
        return self._segments.attach(segment).array(dtype, shape, offset)


def _wait_at_most(request, seconds):
    end = time.monotonic() + seconds
    while not request.Test() and time.monotonic() < end:
        os.sched_yield()


def main(fd: int, bound: int) -> None:
    """Run a carrier: `fd` is its socket to the leader, and to `bound` ranks connect."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the script answers it
    given = secret.take()
    listener = socket.socket(fileno=bound)
    listener.listen(1024)  # here: ranks ask for the number of the process that has called it
    try:
        carrier = Carrier(Channel(socket.socket(fileno=fd)), listener, given)
    except secret.NoSecret as error:
        log.error("%s: %s", socket.gethostname(), error)
        os._exit(1)  # the end of MPI would wait for others
    try:
        carrier.run()
    except Exception as error:
        traceback.print_exc()
        carrier.fail(f"The process that speaks MPI can't go on: {problem_here(error)}")
    finally:
        if carrier.has_lost:
            # The end of MPI would wait for the lost machine. So does what Python does at its exit.
            os._exit(1)
    # Here, not at Python's exit: messages may be under way in memory that the carrier holds.
    MPI.Finalize()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
