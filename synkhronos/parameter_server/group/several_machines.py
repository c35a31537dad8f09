"""A group over several machines: each rank is in the group of its machine, and has a carrier.

    all_gather, all_reduce   on each machine; then its first rank asks the carrier, which asks the
                             other machines; then on each machine
    send, receive            between ranks of one machine as in its group; else by the carriers

The carriers alone are connected with other machines: see `carrier`.
"""

from __future__ import annotations

import collections
import copy
import os
import pickle
import time
from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np

from synkhronos._arithmetic.blocks import plan as plan_of
from synkhronos._arithmetic.operations import OPERATIONS, check_kind
from synkhronos.comm import Aborted
from synkhronos.comm.mpi.transfers import pickled
from synkhronos.comm.reports import Patience
from synkhronos.comm.shared.gate import HEARTBEAT_MS
from synkhronos.errors import SharedMemoryFull
from synkhronos.parameter_server.group import one_machine as shared
from synkhronos.parameter_server.group.interface import (
    Group,
    RankLost,
    WaitedTooLong,
    named,
    round_to_16_bits,
    scale_of_16_bits,
)


def join(told: Mapping[str, Any]) -> MachinesGroup:
    """Return the group that this process was started for by a `GroupCarrier`."""
    return MachinesGroup(shared.join(told, _Here), **told["machines"])


class _Here(shared.SharedGroup):
    """The group of this machine, with the carrier; ranks have other numbers in the whole group."""

    whole: MachinesGroup
    _looks_elsewhere = True

    def barrier_here(self) -> None:
        """Wait until all ranks of this machine are here, also if ranks elsewhere are lost."""
        self._looks_elsewhere = False
        try:
            self.barrier()
        finally:
            self._looks_elsewhere = True

    @property
    def patience(self):  # type: ignore[override]
        return self.whole.patience

    def _on_notice(self, rank, notice):
        self.whole.note(*notice)

    def _on_end(self, rank):
        if rank == self.size:
            self.whole.note_end_of_carrier()
        elif not self.has_left(rank):
            self.losses[rank] = self.whole.losses[self.whole.here[rank]] = "has died"

    def _raise_loss(self):
        if self._looks_elsewhere:
            self.whole._raise_loss()
        else:
            super()._raise_loss()

    def _raise_left(self, rank):
        raise _left(self.whole.here[rank])

    def _named(self, ranks):
        return named(self.whole.here[rank] for rank in ranks)


class Question(NamedTuple):
    """A question of the first rank of a machine, answered when the first ranks of all have asked.

    Without an operation the answer is the list of all machines' values.
    """

    value: Any  # of this machine; in a reduction its scale for 16 bits or 0, or a small array
    op: str = ""
    array: int = 0  # the number of an array from `allocate`; 0 if ranks here give different ones
    divisor: int = 1
    sixteen_bits: bool = False


class MachinesGroup(Group):
    """One rank's end; see `Group`.

    `local` is the group of this machine; `ranks` and `hosts` have the ranks and the name of each
    machine.
    """

    def __init__(
        self, local: _Here, machine: int, ranks: Sequence[Sequence[int]], hosts: Sequence[str]
    ) -> None:
        self._local, self.here = local, ranks[machine]
        local.whole = self
        self.rank, self.size = self.here[local.rank], sum(map(len, ranks))
        self._number_here = {rank: number for number, rank in enumerate(self.here)}
        machine_of = {rank: m for m, each in enumerate(ranks) for rank in each}
        self.hosts = tuple(hosts[machine_of[rank]] for rank in range(self.size))
        self._order = [rank for each in ranks for rank in each]
        self._others = named(rank for rank in self._order if rank not in self._number_here)
        self.losses = {}
        self._own: collections.deque[tuple] = collections.deque()  # messages to itself
        # Ranks elsewhere, in the order in which they left -> the last question of their machine.
        self._left: dict[int, int] = {}
        self._told: set[int] = set()  # ranks whose end `receive` has returned
        # After the end of the carrier, the ranks whose end `receive` has to return.
        self._untold: collections.deque[int] = collections.deque()
        self._n_asked = 0
        self._answers: dict[int, Any] = {}
        self._under_way: collections.Counter[int] = collections.Counter()  # by receiver elsewhere
        self._taken: int | None = None  # the sender elsewhere whose arrays `receive` has returned
        self._plans: dict[tuple[int, str], list] = {}

    def introduce(self, device: str) -> None:
        """Tell `synkhronos top` which rank this process is, and on which device."""
        self._local.label(rank=self.rank, of=self.size, device=device, pid=os.getpid())

    @property
    def _carrier(self):
        return self._local.size

    def note(self, name: str, *rest: Any) -> None:
        """Take a small message of the carrier."""
        if name == "answer":
            number, answer = rest
            self._answers = {number: answer}
        elif name == "taken":
            self._under_way[rest[0]] -= 1
        elif name == "ended":
            rank, why, last_question = rest
            del self._under_way[rank]
            if why is None:
                self._left[rank] = last_question
            else:
                self.losses[rank] = why
        elif name == "abort":
            self._local.abort()

    def note_end_of_carrier(self) -> None:
        """Note that the ranks of all other machines are lost."""
        for rank in self._elsewhere - {*self._left} - {*self.losses}:
            self.losses[rank] = "is lost: the process here that speaks with others has ended"
        self._under_way.clear()

    @property
    def _elsewhere(self):
        return {*range(self.size)} - {*self.here}

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self._local.barrier()
        self._answer_to(Question(None))

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order."""
        by_machine = self._answer_to(Question(self._local.all_gather(value)))
        everyone = dict(zip(self._order, (value for values in by_machine for value in values)))
        return [everyone[rank] for rank in range(self.size)]

    def _answer_to(self, question, place=None):
        """Return the carriers' answer, when the first ranks of all machines have asked."""
        local, number = self._local, self._n_asked + 1
        begun, warnings = time.monotonic(), Patience(shared.WARN_SECONDS, 0.0)
        try:
            if local.rank == 0:
                local.tell(self._carrier, "ask", number, question, place)
            while number not in self._answers:
                if local.is_aborted:
                    raise Aborted
                self._raise_loss()
                if time.monotonic() - begun > self.patience:
                    raise WaitedTooLong(self.patience, self._others)
                warnings.wait_for_others(self._others)
                local.look(min(HEARTBEAT_MS / 1000, self.patience))
            warnings.end()
            return self._answers.pop(number)
        finally:
            self._n_asked = number

    def _raise_loss(self):
        super()._raise_loss()
        # A rank that has left after its machine asked this question is not missed.
        missed = [rank for rank, last in self._left.items() if last <= self._n_asked]
        if not missed:
            return
        self._local.look(0)  # it may have left because of another rank's end: that is raised then
        super()._raise_loss()
        if self._local.is_aborted:
            raise Aborted
        raise _left(missed[0])

    def allocate(self, size: int, dtype: Any) -> np.ndarray:
        """Return memory for `all_reduce`: a flat array of zeros on each rank."""
        dtype = np.dtype(dtype)
        arguments = self.all_gather((size, dtype.str))
        if any(each != arguments[0] for each in arguments):
            raise ValueError(f"allocate() got other arguments on other ranks: {arguments}.")
        problem = array = None
        try:
            array = self._local.allocate(size, dtype)
        except SharedMemoryFull as error:
            problem = str(error)
        problems = [each for each in self.all_gather(problem) if each]
        if problems or array is None:
            if array is not None:
                self._local.forget(array)
            raise SharedMemoryFull(problems[0])
        return array

    def all_reduce(self, array: np.ndarray, op: str = "sum", sixteen_bits: bool = False) -> None:
        """Replace an array from `allocate`, on all ranks, with the reduction over the ranks.

        The reduction over a machine's ranks is rounded to the dtype before it meets the others.
        """
        number, arrays = self._local.arrays_of(array)
        check_kind("all_reduce()", op, array.dtype, "array")
        if sixteen_bits:
            round_to_16_bits(array)
        if not self._local.agree(number):
            number = 0
        elif number:
            key = number, op
            if key not in self._plans:
                parts = "sum" if OPERATIONS[op].divides else op
                self._plans[key] = plan_of(parts, [arrays], len(arrays), self._local.rank, root=0)
            for step, arguments in self._plans[key]:
                step(*arguments)
        self._local.barrier()
        first = arrays[0]
        scale = 0.0
        if sixteen_bits and OPERATIONS[op].scales and self._local.rank == 0:
            scale = float(scale_of_16_bits(first))
        question = Question(scale, op, number, self.size, sixteen_bits)
        if not self._answer_to(question, (self._local.place_of(array), array.dtype)) or not number:
            raise ValueError("all_reduce() got another array on other ranks.")
        if array is not first:
            array[...] = first
        self._local.barrier_here()  # the other ranks here have copied the result

    def send(self, rank: int, *message: Any) -> None:
        """Send a message without waiting for its receiver."""
        self._local.check_open()
        if rank == self.rank:
            self._own.append(copy.deepcopy(message))
        elif rank in self._number_here:
            self._local.send(self._number_here[rank], *message)
        elif rank not in self.losses and rank not in self._left:
            data, buffers = pickled(message)
            self._under_way[rank] += bool(buffers)
            self._local.send(self._carrier, rank, bool(buffers), data, *buffers)

    def under_way(self, rank: int) -> int:
        """Return the number of messages with large arrays that a rank has not received yet."""
        if rank in self._number_here:
            return self._local.under_way(self._number_here[rank])
        return self._under_way[rank]

    def receive(self, seconds: float | None = None) -> tuple[int, tuple | None] | None:
        """Return (rank, message): the next message that has come from any rank."""
        self._acknowledge()
        if self._own:
            return self.rank, self._own.popleft()
        if self._untold:
            return self._next_untold()
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            came = self._local.receive(None if end is None else max(0.0, end - time.monotonic()))
            if came is None:
                return None
            number, message = came
            if number != self._carrier:
                return self.here[number], message
            if message is not None:
                return self._of_carrier(*message)
            self._untold.extend(sorted(self._elsewhere - self._told))
            if self._untold:
                return self._next_untold()

    def _of_carrier(self, name, rank, *rest):
        """Return what `receive` does, for a message of the carrier: one of a rank, or its end."""
        if name == "gone":
            self._told.add(rank)
            return rank, None
        is_large, data, *buffers = rest
        if is_large:
            self._taken = rank
        return rank, pickle.loads(data, buffers=buffers)

    def _next_untold(self):
        rank = self._untold.popleft()
        self._told.add(rank)
        return rank, None

    def _acknowledge(self):
        """Tell the sender of the last arrays that they are not needed any more."""
        if self._taken is not None:
            self._local.tell(self._carrier, "taken", self._taken)
            self._taken = None

    def wait(self, seconds: float, also: Sequence[int] = ()) -> None:
        """Wait until `receive` has something, or a descriptor can be read."""
        self._acknowledge()
        if not self._own:
            self._local.wait(seconds, also)

    def abort(self) -> None:
        """End the collectives of all ranks."""
        self._local.abort()
        self._local.tell(self._carrier, "abort")

    def close(self, seconds: float = 10.0) -> None:
        """Leave the group when others have received all messages, or after `seconds`."""
        if self._local.is_closed:
            return
        self._acknowledge()
        end = time.monotonic() + seconds
        while any(self._under_way.values()) and (left := end - time.monotonic()) > 0:
            self._local.look(left)
        self._local.tell(self._carrier, "leave")
        self._local.close(max(0.0, end - time.monotonic()))


def _left(rank):
    return RankLost(f"rank {rank} has left the group", rank)
