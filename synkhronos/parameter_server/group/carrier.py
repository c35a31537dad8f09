"""The carrier of a group: the process of each machine that is connected with the others.

    rank   ── socket ──┐                         ┌── socket ── rank
    rank   ── socket ──┤ carrier ══ TCP ══ carrier ├── socket ── rank
    memory ── mapped ──┘                         └── mapped ── memory

It makes the group of its machine, with one more socket for each rank: to the carrier. The first
rank of each machine asks for collectives, which are numbered: when all machines have asked a
question, all ranks get the answer.

=================  ===========================================================================
from a rank        to, taken (by the receiver), ask, abort, leave
to a rank          from, taken, answer, abort, ended; gone, after the last message of that rank
between carriers   to, taken, asked, gone, abort, alive, over
=================  ===========================================================================
"""

from __future__ import annotations

import collections
from typing import Any, Callable, Sequence

import numpy as np

from synkhronos.comm.mpi.all_reduce import NetworkAllReduce, reduce_all
from synkhronos.comm.mpi.base_carrier import BaseCarrier
from synkhronos.comm.mpi.transfers import small_for_all
from synkhronos.errors import SharedMemoryFull
from synkhronos.parameter_server.group.large_messages import MailWithArrays
from synkhronos.parameter_server.group.one_machine import GroupSetup
from synkhronos.parameter_server.group.several_machines import Question

_FIRST_TAG, _N_TAGS = 1 << 10, 1 << 10  # of all-reduces, each of which has two


class GroupCarrier(BaseCarrier):
    """The loop of the carrier of one machine; see `BaseCarrier`. `ranks` are those of each machine.

    `on_lost` takes the number of a rank whose machine is lost, and why it is.
    """

    def __init__(self, comm: Any, ranks: Sequence[Sequence[int]]) -> None:
        self._ranks, self._here = ranks, ranks[comm.rank]
        self._machine_of = {rank: m for m, each in enumerate(ranks) for rank in each}
        self._setup = GroupSetup(len(self._here), has_carrier=True)
        super().__init__(comm, self._setup.sockets_of_carrier())
        self._leaving: set[int] = set()  # ranks here that have left the group
        self._gone: set[int] = set()  # ranks that have ended
        # number of a question -> machine -> its question
        self._asked: dict[int, dict[int, Question]] = collections.defaultdict(dict)
        self._last_asked: collections.Counter[int] = collections.Counter()  # by machine
        self._arrays: dict[int, Any] = {}  # number of a question -> its array here, or None
        self._reductions: list[tuple[int, NetworkAllReduce, Any]] = []
        self._over: set[int] = set()  # machines of which all ranks have ended
        self.from_ranks.update(
            ask=self.from_rank_ask,
            taken=self.from_rank_taken,
            abort=self.from_rank_abort,
            leave=self.from_rank_leave,
        )
        self.from_machines.update(
            over=self.from_machine_over,
            to=self.from_machine_to,
            taken=self.from_machine_taken,
            abort=self.from_machine_abort,
            gone=self.from_machine_gone,
            asked=self.from_machine_asked,
        )
        self.on_lost: Callable[[int, str], None] = lambda rank, why: None

    def place(self, local: int) -> tuple[str, list[int]]:
        """Return what `GroupSetup.place` does, for a rank of this machine."""
        machines = {"machine": self.machine, "ranks": self._ranks, "hosts": self.hosts}
        return self._setup.place(local, machines=machines)

    def close(self) -> None:
        """Close the descriptors for the ranks, when all are started."""
        self._setup.close()

    def fail(self) -> None:
        """Close all sockets after an error: the ranks here then lose those of other machines."""
        self.has_lost = True
        self._mail.close()

    def make_mail(self, sockets):
        """Return what exchanges messages, some of them with arrays, with the ranks here."""
        return MailWithArrays(sockets, self.segments, self.on_notice)

    def read(self, descriptor):
        """Take the messages that have come through a socket."""
        super().read(descriptor)
        while self._mail.has_come:
            local, message = self._mail.take()
            if message is None:
                self.on_end(local)
            else:
                self.from_rank(local, *message)
            self._mail.give_back()

    def from_rank(self, source, rank, is_large, data, *buffers):
        """Pass a message on to a rank of another machine."""
        machine, source = self._machine_of[rank], self._here[source]
        self.tell(machine, "to", source, rank, is_large, data, *buffers)

    def from_rank_ask(self, local, number, question, place):
        """Pass a question of the first rank here on to all machines."""
        array = None
        if place is not None:
            (segment, offset, nbytes), dtype = place
            try:
                mapped = self.segments.attach(segment)
            except OSError:  # the rank has died since, which `on_end` tells the others
                return
            array = mapped.array(dtype, (nbytes // dtype.itemsize,), offset)
        self._arrays[number] = array
        is_small = array is not None and array.nbytes <= small_for_all(self.n_machines)
        if is_small and not question.sixteen_bits:
            question = question._replace(value=array.copy())
        self.tell_all("asked", number, question)
        self.from_machine_asked(self.machine, number, question)

    def from_rank_taken(self, local, source):
        """Tell a rank of another machine that its arrays are not needed any more."""
        self.tell(self._machine_of[source], "taken", self._here[local], source)

    def from_rank_abort(self, local):
        """Abort the group on all other machines."""
        self.tell_all("abort")

    def from_rank_leave(self, local):
        """Note that a rank leaves: its end will not be a death."""
        self._leaving.add(local)

    def on_end(self, local):
        """Tell all machines of the end of a rank here."""
        rank = self._here[local]
        why = None if local in self._leaving else "has died"
        self._gone.add(rank)
        self.tell_all("gone", rank, why)
        if self._gone.issuperset(self._here):
            self.tell_all("over")
            self.from_machine_over(self.machine)

    def _tell_ranks(self, *notice):
        for local in range(len(self._here)):
            self.post(local, *notice)

    def from_machine_over(self, machine):
        """Note that all ranks of a machine have ended."""
        self._over.add(machine)
        self.is_running = len(self._over) < self.n_machines

    def from_machine_to(self, machine, source, rank, is_large, data, *buffers):
        """Give a message to a rank here."""
        local = self._here.index(rank)
        try:
            self._mail.send(local, ("from", source, is_large, data, *buffers))
        except SharedMemoryFull:  # as bytearrays they go through the socket
            copies = [bytearray(each) for each in buffers]
            self._mail.send(local, ("from", source, is_large, data, *copies))

    def from_machine_taken(self, machine, by, source):
        """Tell a rank here that its arrays are not needed any more."""
        self.post(self._here.index(source), "taken", by)

    def from_machine_abort(self, machine):
        """Abort the group here."""
        self._tell_ranks("abort")

    def from_machine_gone(self, machine, rank, why, is_lost=False):
        """Tell the ranks here of the end of one elsewhere."""
        if is_lost:
            self._count_out(self._machine_of[rank], why)
        if rank in self._gone:
            return
        self._gone.add(rank)
        self._tell_ranks("ended", rank, why, self._last_asked[self._machine_of[rank]])
        for local in range(len(self._here)):
            self._mail.send(local, ("gone", rank))  # after the messages of this rank

    def _count_out(self, machine, why):
        """Wait for a machine no more, and take no message from it."""
        self.lose(machine, why)
        self._reductions = []
        self.from_machine_over(machine)

    def on_loss(self, machine, why):
        """Tell the ranks here, on the first machine all ranks, that those of a machine are lost."""
        self._count_out(machine, why)
        for rank in self._ranks[machine]:
            if rank not in self._gone:
                self.on_lost(rank, why)
            if self.machine == 0:
                self.tell_all("gone", rank, why, True)
            self.from_machine_gone(machine, rank, why, True)

    def from_machine_asked(self, machine, number, question):
        """Take the question of a machine; answer when all have asked."""
        self._last_asked[machine] = number
        asked = self._asked[number]
        asked[machine] = question
        if len(asked) < self.n_machines:
            return
        del self._asked[number]
        array = self._arrays.pop(number)
        values = [asked[machine].value for machine in sorted(asked)]
        if len({each._replace(value=None) for each in asked.values()}) > 1:
            self._tell_ranks("answer", number, None)
        elif not question.op:
            self._tell_ranks("answer", number, values)
        elif not question.array:
            self._tell_ranks("answer", number, None)
        elif isinstance(values[0], np.ndarray):
            reduce_all([[each] for each in values], [question.op], question.divisor, False, [array])
            self._tell_ranks("answer", number, True)
        else:
            self._begin(number, question, array, max(values))

    def _begin(self, number, question, array, scale):
        """Begin a reduction over the machines, with a scale for 16 bits, or 0."""
        if scale:
            array /= array.dtype.type(scale)
        tag = _FIRST_TAG + 2 * (number % _N_TAGS)
        how = [question.op], question.divisor, tag, bool(scale)
        work = NetworkAllReduce(self, [array], *how, compress_results=False)
        self._reductions.append((number, work, (array, scale)))

    def progress(self):
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
