"""The process of a machine that carries what its ranks have for those of other machines, by MPI.

    rank   ── socket ──┐                         ┌── socket ── rank
    rank   ── socket ──┤ carrier ══ MPI ══ carrier ├── socket ── rank
    memory ── mapped ──┘                         └── mapped ── memory

It makes the group of its machine, of which each rank has one more socket: with the carrier. So no
rank speaks MPI. The first rank of each machine asks for collectives, each with a number: a question
is answered when all machines have asked it, and each rank gets the answer.

=================  ===========================================================================
of a rank          to, taken (by the receiver), ask, abort, leave
to a rank          from, taken, answer, abort, ended; gone, after the last message of that rank
between carriers   to, taken, asked, gone, abort, alive, over
=================  ===========================================================================
"""

from __future__ import annotations

import collections
import socket
import time
from typing import Any, Callable, Sequence

from synkhronos._machine.shared_memory import Segments
from synkhronos.comm.heartbeats import SILENT
from synkhronos.comm.mpi.all_reduce import AllReduce
from synkhronos.comm.mpi.machines import Machines
from synkhronos.comm.mpi.waiting import Waiting
from synkhronos.comm.shared.group import Founding
from synkhronos.comm.shared.mail import Mail
from synkhronos.errors import SharedMemoryFull

_FIRST_TAG, _N_TAGS = 1 << 10, 1 << 10  # of all-reduces, each of which has two
_LAST_SECONDS = 10.0  # for what was sent last


class GroupCarrier:
    """The loop of the carrier of one machine.

    Parameters
    ----------
    comm : MPI.Comm or Sealed
        Of the carriers; machines have the numbers of its processes.
    ranks : list of list of int
        The ranks on each machine.
    """

    def __init__(self, comm: Any, ranks: Sequence[Sequence[int]]) -> None:
        self._machines = Machines(comm)
        self.machine = comm.rank
        self._ranks, self._here = ranks, ranks[comm.rank]
        self._machine_of = {rank: m for m, each in enumerate(ranks) for rank in each}
        self._hosts = comm.allgather(socket.gethostname())
        self._founding = Founding(len(self._here), has_carrier=True)
        self._segments = Segments()
        sockets = self._founding.sockets_of_carrier()
        self._mail = Mail(sockets, self._segments, self._on_notice)
        self._waiting = Waiting()
        for descriptor in self._mail.peers:
            self._waiting.add_descriptor(descriptor)
        self._pair = socket.socketpair()
        self._waiting.add(self._pair[0])  # it waits for one at least
        self._leaving: set[int] = set()  # ranks here that have said so
        self._gone: set[int] = set()
        self._asked: dict[int, dict[int, Any]] = collections.defaultdict(dict)
        self._places: dict[int, Any] = {}  # question -> what lies where, here
        self._reductions: list[tuple[int, AllReduce, Any]] = []
        self._over = set()  # machines of which all ranks have ended
        self.has_lost = False
        self.on_lost: Callable[[int], None] = lambda rank: None

    def place(self, local: int) -> tuple[str, list[int]]:
        """Return what to tell a rank of this machine, and what it inherits; see `Founding`."""
        machines = {"machine": self.machine, "ranks": self._ranks, "hosts": self._hosts}
        return self._founding.place(local, machines=machines)

    def close(self) -> None:
        """Close what the ranks have inherited, when all are started."""
        self._founding.close()

    def run(self) -> None:
        """Carry messages until all ranks have ended, on all machines that are not lost."""
        while self._over != set(range(len(self._ranks))):
            is_busy = self._machines.is_sending or self._reductions or self._mail.unsent
            happened = False
            for descriptor in self._waiting.for_ranks(bool(is_busy)):
                happened |= self._read(descriptor)
            self._mail.flush()
            happened |= self._machines.progress() | self._progress()
            has_come = False
            for machine, (name, *rest) in self._machines.received():
                has_come = True
                getattr(self, f"_from_machine_{name}")(machine, *rest)
            self._waiting.note(happened, has_come)
            silent = self._machines.beat()
            if silent is not None:
                self._waiting.find_sockets()
                self._segments.forget_freed()
            for machine in silent or ():
                self._lose(machine)
        end = time.monotonic() + _LAST_SECONDS
        while self._machines.is_sending and not self.has_lost and time.monotonic() < end:
            self._machines.progress()
            time.sleep(0.0005)

    def fail(self) -> None:
        """Leave all: the ranks here have lost those of other machines."""
        self.has_lost = True
        self._mail.close()

    def _read(self, descriptor):
        if descriptor not in self._mail.peers:
            return False
        self._mail.read(descriptor)
        if descriptor not in self._mail.peers:
            self._waiting.remove_descriptor(descriptor)
        while self._mail.has_come:
            local, message = self._mail.take()
            if message is None:
                self._end_of(local)
            else:
                self._from_rank_to(self._here[local], *message)
            self._mail.give_back()
        return True

    def _from_rank_to(self, source, rank, is_large, data, *buffers):
        machine = self._machine_of[rank]
        self._machines.tell(machine, "to", source, rank, is_large, data, *buffers)

    def _on_notice(self, local, notice):
        name, *rest = notice
        if name == "ask":
            number, question, place = rest
            try:
                self._places[number] = self._array_at(place)
            except OSError:  # the rank has died since: the others are told
                return
            self._machines.tell_all("asked", number, question)
            self._note_question(number, self.machine, question)
        elif name == "taken":
            source = rest[0]
            self._machines.tell(self._machine_of[source], "taken", self._here[local], source)
        elif name == "abort":
            self._machines.tell_all("abort")
        elif name == "leave":
            self._leaving.add(local)

    def _end_of(self, local):
        rank = self._here[local]
        why = None if local in self._leaving else "has died"
        self._gone.add(rank)
        self._machines.tell_all("gone", rank, why)
        if self._gone.issuperset(self._here):
            self._machines.tell_all("over")
            self._over.add(self.machine)

    def _tell_ranks(self, *notice):
        for local in range(len(self._here)):
            self._mail.tell(local, *notice)

    def _from_machine_alive(self, machine):
        pass

    def _from_machine_over(self, machine):
        self._over.add(machine)

    def _from_machine_to(self, machine, source, rank, is_large, data, *buffers):
        local = self._here.index(rank)
        try:
            self._mail.send(local, ("from", source, is_large, data, *buffers))
        except SharedMemoryFull:  # through the socket, then
            copies = [bytearray(each) for each in buffers]
            self._mail.send(local, ("from", source, is_large, data, *copies))

    def _from_machine_taken(self, machine, by, source):
        self._mail.tell(self._here.index(source), "taken", by)

    def _from_machine_abort(self, machine):
        self._tell_ranks("abort")

    def _from_machine_gone(self, machine, rank, why):
        if rank in self._gone:
            return
        self._gone.add(rank)
        if why == SILENT:
            self._count_out(self._machine_of[rank])
        self._tell_ranks("ended", rank, why)
        for local in range(len(self._here)):
            self._mail.send(local, ("gone", rank))  # after the messages of this rank

    def _count_out(self, machine):
        """Wait for a machine no more, and take nothing from it."""
        self.has_lost = True
        self._machines.lose(machine)
        self._over.add(machine)

    def _lose(self, machine):
        self._count_out(machine)
        for rank in self._ranks[machine]:
            if rank not in self._gone:
                self.on_lost(rank)
            if self.machine == 0:
                self._machines.tell_all("gone", rank, SILENT)
            self._from_machine_gone(machine, rank, SILENT)

    def _from_machine_asked(self, machine, number, question):
        self._note_question(number, machine, question)

    def _note_question(self, number, machine, question):
        asked = self._asked[number]
        asked[machine] = question
        if len(asked) < len(self._ranks):
            return
        questions = [asked[machine] for machine in sorted(asked)]
        del self._asked[number]
        array = self._places.pop(number)
        kinds = {each[:-1] for each in questions}
        values = [each[-1] for each in questions]
        if kinds == {("gather",)}:
            self._tell_ranks("answer", number, values)
        elif len(kinds) > 1 or not questions[0][1]:
            self._tell_ranks("answer", number, None)
        else:
            self._begin(number, questions[0], array, max(values))

    def _array_at(self, place):
        """Return the array of the first rank here that a question is about, or None."""
        if place is None:
            return None
        (segment, offset, nbytes), dtype = place
        return self._segments.attach(segment).array(dtype, (nbytes // dtype.itemsize,), offset)

    def _begin(self, number, question, array, scale):
        """Begin a reduction over the machines, with a scale for 16 bits, or 0."""
        _, _, op, divisor = question[:4]
        if scale:
            array /= array.dtype.type(scale)
        work = AllReduce(
            self._machines,
            self.machine,
            len(self._ranks),
            [array],
            [op],
            divisor,
            _FIRST_TAG + 2 * (number % _N_TAGS),
            compress=bool(scale),
            compress_results=False,
        )
        self._reductions.append((number, work, (array, scale)))

    def _progress(self):
        """Go on with reductions; return whether one has ended."""
        left = []
        for number, work, (array, scale) in self._reductions:
            if not work.progress():
                left.append((number, work, (array, scale)))
                continue
            if scale:
                array *= array.dtype.type(scale)
            self._tell_ranks("answer", number, True)
        has_ended = len(left) < len(self._reductions)
        self._reductions = left
        return has_ended
