"""The carrier of a machine: the process that is connected with others, for all ranks there.

    script or leader ── Unix socket ──┐                             ┌── script or leader
    rank             ── Unix socket ──┤ carrier ═══ Mesh ═══ carrier├── rank
    segments of shared memory ── mapped ┘                            └ mapped ── segments

Theano holds Python's lock while it computes, so a rank can't move data meanwhile; and a process
that has begun MPI must not be forked. So the first process of the machine starts one for both. It
reads and writes the segments of the ranks where they are. Its messages are as in `BaseCarrier`.

A request may fail here because descriptors or shared memory are used up. The answer is then
"failed" with a sentence that names this machine, which the rank raises. Ranks keep memory that the
carrier uses until they have its answer. After a call that was aborted they ask it to "settle": it
answers when nothing of the call is under way in their memory. At the end of a session, "leave",
they don't wait: the carrier's own maps keep the memory until all is done.

On other machines than the script's, a process that has been stopped for long counts as dead,
because nothing else would tell the script.
"""

import contextlib
import os
import pickle
import signal
import socket
import sys
import traceback

from synkhronos._machine.heartbeats import lost_seconds
from synkhronos._machine.log import log
from synkhronos._machine.processes import StopWatch
from synkhronos.comm.channel import Channel, Closed, is_own
from synkhronos.comm.mpi import secret
from synkhronos.comm.mpi.base_carrier import BaseCarrier
from synkhronos.comm.mpi.fetches import Fetches, problem_here
from synkhronos.comm.mpi.mesh import Mesh, Unreachable
from synkhronos.comm.mpi.mpi_library import MPI, begun
from synkhronos.comm.mpi.mpi_reductions import MpiReductions
from synkhronos.comm.mpi.reductions import Reductions

_LEADER = 0  # the peer number of the first process of the machine
_REQUESTS = {"fetch", "copy", "copy_to_all", "reduce", "bucket"}  # that may be answered "failed"


class Carrier(BaseCarrier):
    """The event loop of a carrier; ranks connect to the socket `listener`."""

    def __init__(self, mesh, leader, listener, mpi=None):
        super().__init__(mesh, {_LEADER: leader})
        self._listener, self._n_peers = listener, 1
        listener.setblocking(False)  # a rank that connects may have ended before it is accepted
        self.mpi = mpi  # MpiReductions, if all machines trust the network
        self._listeners.update([listener.fileno(), *([mpi.ends] if mpi else [])])
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)  # see `_refuse`
        self._fetches, self._reductions = Fetches(self), Reductions(self)
        self.from_ranks.update(
            tell=self.from_rank_tell,
            lose=lambda peer, machine, why: self._lose(machine, why),
            count=lambda peer, id: self.post(peer, "done", id, tuple(self.traffic)),
            watch=self.from_rank_watch,
            leave=self.from_rank_leave,
            settle=self.from_rank_settle,
            end=self.from_rank_end,
        )
        self.from_machines.update(
            told=lambda machine, message: self.post(_LEADER, "told", machine, message),
            end=self.from_machine_end,
            gone=self.from_machine_gone,
        )
        for part in (self._fetches, self._reductions):
            self.from_ranks.update(part.from_ranks)
            self.from_machines.update(part.from_machines)
        self._settling = None  # (peer, id, (session, sequence))
        self._settled = 0, 0  # the last call in which the ranks here begin nothing more
        self._left = 0  # the last session that has ended here
        self._stop_watch = StopWatch()
        self._workers = {}  # rank -> process id, of the present session
        self._session = 0
        self._has_lost_job = False  # whether the leader was told that the job has ended by a loss
        self._got_sigterm = False

    def fail(self, reason):
        """End all carriers after an error that no rank can be told of."""
        self.has_lost = True
        self.tell_all("end", reason)
        self.post(_LEADER, "end", reason, self.machine)
        self.send_what_is_left()

    def on_notice(self, peer, notice):
        """Do what a rank asks; if that fails, answer "failed"."""
        try:
            super().on_notice(peer, notice)
        except Exception as error:
            if notice[0] not in _REQUESTS:
                raise
            self.post(peer, "failed", notice[1], problem_here(error))

    def read(self, descriptor):
        """Take the messages that have come through a socket, or the connection of a rank."""
        if descriptor == self._listener.fileno():
            self._accept()
        elif self.mpi is not None and descriptor == self.mpi.ends:
            os.read(descriptor, 1)
        else:
            super().read(descriptor)

    def _accept(self):
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            return self._refuse(error)
        if not is_own(connection):
            return connection.close()
        self._mail.add(self._n_peers, connection)
        self._n_peers += 1

    def _refuse(self, error):
        """Answer a connection for which there is no descriptor, with the help of the spare one."""
        os.close(self._spare)
        with contextlib.suppress(OSError, Closed):  # the rank may have ended
            connection, _ = self._listener.accept()
            with connection:
                Channel(connection).post(("failed", None, problem_here(error)))
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def on_end(self, peer):
        """End the job if the leader has ended without saying so."""
        if peer == _LEADER and self.is_running:
            self.from_rank_end(peer, f"The first process on {socket.gethostname()} has ended")

    def progress(self):
        """Go on with reductions; answer the leader when an aborted call is settled."""
        happened = not self.has_lost and self._reductions.progress()  # MPI raises after a loss
        if self._settling is not None:
            peer, id, call = self._settling
            if not self._reductions.have(call) and not self._fetches.are_copying(call):
                self._reductions.drop_announcements(self.is_over)
                self._settling = None
                self.post(peer, "done", id, None)
        return happened

    def is_over(self, id):
        """Return whether the ranks here begin nothing more in the call of a reduction."""
        return id[0] <= self._left or id[:2] <= self._settled

    def has_left(self, session):
        """Return whether a session has ended here."""
        return session <= self._left

    def each_second(self):
        """Kill processes of this machine that have been stopped for long, and tell the master."""
        if self.machine == 0 or self._has_lost_job:  # then other processes may have their numbers
            return
        where, for_long = f"on {socket.gethostname()}", f"was stopped for {lost_seconds():g} s"
        leader = os.getppid()
        if self._stop_watch.seconds(leader) > lost_seconds():
            self.from_rank_end(_LEADER, f"The first process {where} {for_long}")
            os.kill(leader, signal.SIGKILL)
        for rank, pid in list(self._workers.items()):
            if self._stop_watch.seconds(pid) > lost_seconds():
                message = (
                    f"Worker rank {rank} {where} (process {pid}) {for_long}, and then killed. The "
                    "session has ended: close() and fork() to begin again."
                )
                died = "died", self._session, message, rank, -signal.SIGKILL
                self.tell(0, "told", pickle.dumps(died))
                del self._workers[rank]
                os.kill(pid, signal.SIGKILL)

    def on_loss(self, machine, why):
        """End the job: tell the leader here, and other machines."""
        host = self.hosts[machine]
        name = f"Machine {host}" if machine else f"The first machine, {host},"
        reason = f"{name} is lost: It {why}"
        if not self._has_lost_job:
            self.tell_all("end", reason, machine)
        if 0 in (self.machine, machine):  # of the first machine the others tell the launcher
            self.post(_LEADER, "lost", machine, host, f"It {why}")
        if self.machine:
            self.from_machine_end(machine, reason)

    def from_rank_tell(self, peer, to, message):
        """Pass a pickled message on to the leader of one machine, or to those of all others."""
        self._tell(self.others if to is None else [to], ("told", message))

    def from_rank_watch(self, peer, session, workers):
        """Watch the workers of this machine: rank -> process id."""
        self._session, self._workers = session, workers

    def from_rank_leave(self, peer, session):
        """Forget a session that has ended here: no rank begins anything or waits any more.

        Reductions that all machines have begun go on, in memory that nothing else uses.
        """
        self._left = max(self._left, session)
        self._workers = {}
        self._reductions.leave(self.is_over)
        self._fetches.drop_relays()
        if self._settling is not None and self._settling[2][0] <= session:
            self._settling = None
        self.segments.forget_all()

    def from_rank_settle(self, peer, id, session, sequence):
        """Give up a call; answer when nothing of it uses memory of the ranks any more."""
        self._reductions.from_rank_give_up(peer, session, sequence)
        self._settled = max(self._settled, (session, sequence))
        self._fetches.drop_relays()
        self._settling = peer, id, (session, sequence)

    def from_rank_end(self, peer, reason):
        """End the job: this carrier, and those of all other machines, which get the `reason`.

        After a loss this carrier waits until the first machine says that its script has ended,
        because mpirun ends all processes with the first.
        """
        if not self._has_lost_job:
            self.tell_all("end", reason)
            self._has_lost_job = self.has_lost = self.has_lost or reason is not None
        if self.machine == 0 and self._has_lost_job:
            self.tell_all("gone")
        waits = self.machine > 0 and self._has_lost_job and not self._got_sigterm
        self.is_running = waits and 0 not in self._lost

    def hear_sigterm(self, number, frame):
        """End after a SIGTERM, but not before the leader, which may ignore it (`synk.resume`)."""
        self._got_sigterm = True
        self.is_running = self.is_running and not self._has_lost_job

    def from_machine_end(self, machine, reason, lost=None):
        """End, because another machine has, or is `lost`; after a loss not before the script.

        The script may still save something, and mpirun would end it with the first leader.
        """
        if not self._has_lost_job:
            self.post(_LEADER, "end", reason, machine if lost is None else lost)
            self._has_lost_job = self.has_lost = reason is not None
        self.is_running = self._has_lost_job and 0 not in self._lost

    def from_machine_gone(self, machine):
        """End after a loss, because the script has ended."""
        self.is_running = self.is_running and machine != 0

    def open(self, place):
        """Return an array of a rank of this machine, where it is."""
        segment, dtype, shape, offset = place
        return self.segments.attach(segment).array(dtype, shape, offset)


def main(fd: int, bound: int) -> None:
    """Run a carrier: `fd` is its socket to the leader; ranks connect to the socket `bound`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the script handles it
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    given = secret.take()
    leader, listener = socket.socket(fileno=fd), socket.socket(fileno=bound)
    with contextlib.ExitStack() as stack:
        try:
            comm = stack.enter_context(begun(MPI.THREAD_SERIALIZED))
            mesh = Mesh(comm, secret.of_job(given, comm.size), with_leaders=True)
        except (secret.NoSecret, Unreachable) as error:
            log.error("%s: %s", socket.gethostname(), error)
            os._exit(1)  # MPI_Finalize would wait for others
        mpi = MpiReductions(comm, stack) if mesh.trusts else None
        if mpi is None:
            stack.close()
        mesh.give_to_leader(leader)
        listener.listen(1024)  # not in the leader: ranks ask the socket which process has called it
        carrier = Carrier(mesh, leader, listener, mpi)
        signal.signal(signal.SIGTERM, carrier.hear_sigterm)
        try:
            carrier.run()
        except Exception as error:
            traceback.print_exc()
            carrier.fail(f"The process that carries messages can't go on: {problem_here(error)}")
        if carrier.has_lost:
            os._exit(1)  # MPI_Finalize, and MPI's thread, would wait for all machines


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
