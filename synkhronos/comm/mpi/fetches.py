"""Arrays of other machines: how a carrier asks for them, and sends those of its own.

    rank, leader ── fetch, copy ──▶ carrier ── want ────▶ carrier of the machine that has the arrays
                                            ◀── coming    small arrays in it, others next
                 ◀── done, failed ──

A rank fetches an array, or some of its rows, into its carrier's arena, where it stays until the
next call of the session: the answer is its place. A leader asks the carrier to copy arrays into
memory of its ranks. Each message names its call, because each rank has its own socket: the carrier
may read a rank's first message of a call before another rank's last one of the call before.

If all machines copy the same arrays, each passes on every part when it has come. Arrays of up to
256 KiB go through a binomial tree: they reach M machines in log2(M) steps, in each of which the
first machine sends them. Larger ones go along a chain, in which no machine sends the arrays more
than once: in P parts that takes as long as about 1 + (M - 2) / P transfers, not M - 1. If they have
fewer parts of 64 KiB than the chain has machines, each machine passes them on to two others, which
takes about 2 + 2 log2(M) / P. The chain:

    machine with the arrays ── part 2 ──▶ next machine ── part 1 ──▶ the one after it ── part 0 ──▶
"""

import collections
import socket
from dataclasses import dataclass
from typing import Any, List, Optional

import numpy as np

from synkhronos._arithmetic.partition import take_rows
from synkhronos._machine.shared_memory import nbytes_of
from synkhronos.comm.handlers import Handlers
from synkhronos.comm.mpi.transfers import PART, SMALL, parts_of
from synkhronos.errors import SharedMemoryFull

_ALIGN = 64
_SMALLEST, _LARGEST = 1 << 20, 1 << 26  # bytes of a segment of the arena, if its array is smaller
_TREE = 1 << 18  # the most bytes of arrays that go through a tree
_SMALLEST_PART, _PARTS = 1 << 16, 4  # of a chain: bytes of a part, and parts for each machine
_UNUSED_CALLS = 64  # a segment that so many calls have not used is freed


@dataclass(eq=False)
class _Fetch:
    """Arrays of another machine on their way to this one."""

    waiting: list  # (peer, id of its request) of each that wants them
    call: tuple  # its session and number
    targets: Optional[List[np.ndarray]]  # where they go; None for the arena
    relay: "Optional[_Relay]" = None
    answer: Optional[tuple] = None  # the name of the message to `waiting`, and its content


class _Relay:
    """A place in a tree or chain: passes on what comes, to each machine behind it that has asked.

    `key` is the call and the places of the arrays; `is_complete` says whether all has come.
    """

    def __init__(self, carrier, key, n_behind):
        self._carrier, self.key, self.is_complete = carrier, key, False
        self._n_behind, self._asked = n_behind, []  # (machine, number) of those that have asked
        self._message = None  # about the arrays, for machines that ask later
        self._parts = []  # that have come, for machines that ask later

    def ask(self, machine, number):
        """Pass the arrays on to a machine, too."""
        self._asked.append((machine, number))
        if self._message is not None:
            name, *content = self._message
            self._carrier.tell(machine, name, number, *content)
            self._carrier.send_parts(machine, self._parts, number)
        if len(self._asked) == self._n_behind:
            self._parts = []

    def tell(self, name, *content):
        """Pass on a message about the arrays."""
        self._message = name, *content
        for machine, number in self._asked:
            self._carrier.tell(machine, name, number, *content)

    def send(self, part):
        """Pass on a part of the arrays."""
        if len(self._asked) < self._n_behind:
            self._parts.append(part)
        for machine, number in self._asked:
            self._carrier.send_parts(machine, [part], number)

    @property
    def is_over(self):
        """Whether nothing is left to pass on."""
        have_asked = len(self._asked) == self._n_behind
        return self.is_complete and (have_asked or self._carrier.is_over(self.key[0]))


class Fetches:
    """The arrays that the ranks of a machine fetch, and those that other machines fetch from it."""

    def __init__(self, carrier):
        self._carrier = carrier
        self._arena = Arena(carrier.segments.create)
        self._call = 0, 0
        self._under_way = {}  # number -> _Fetch
        self._whole = {}  # (machine, place) -> _Fetch of this call, for whole arrays
        self._relays = {}  # (call, places) -> _Relay, until the machines behind it have asked
        self._asked = collections.defaultdict(list)  # the same -> (machine, number), before that
        self._numbers = 0
        self.from_ranks = Handlers(
            fetch=self.from_rank_fetch,
            copy=self.from_rank_copy,
            copy_to_all=self.from_rank_copy_to_all,
        )
        self.from_machines = Handlers(
            want=self.from_machine_want,
            failed=lambda machine, number, problem: self._answer(number, "failed", problem),
            coming=self.from_machine_coming,
        )

    def from_rank_fetch(self, peer, id, call, machine, place, rows, axis):
        """Get an array of another machine, or some of its rows; answer with a place that has it."""
        if call < self._call:
            raise RuntimeError("the call that it was for is over")
        if call > self._call:
            self._call = call
            self._whole.clear()
            self._arena.begin()
        fetch = self._whole.get((machine, place)) if rows is None else None
        if fetch is None:
            fetch = self._want(_Fetch([(peer, id)], call, None), machine, [place], rows, axis)
            if rows is None:
                self._whole[machine, place] = fetch
        elif fetch.answer is None:
            fetch.waiting.append((peer, id))
        else:
            name, content = fetch.answer
            self._carrier.post(peer, name, id, content)

    def from_rank_copy(self, peer, id, call, machine, places, targets):
        """Copy arrays of another machine into arrays of ranks here; answer when they have come."""
        arrays = [self._carrier.open(place) for place in targets]
        self._want(_Fetch([(peer, id)], call, arrays), machine, places)

    def from_rank_copy_to_all(self, peer, id, call, machine, places, targets):
        """Copy arrays that all machines copy, and pass them on."""
        carrier, key, relay = self._carrier, (call, places), None
        arrays = [carrier.open(place) for place in targets]
        for old in [old for old in self._relays.values() if old.key[0] < call and old.is_complete]:
            del self._relays[old.key]  # machines behind it have left that call without it
        nbytes = sum(array.nbytes for array in arrays)
        before, n_behind, part = route(nbytes, carrier.machine, machine, carrier.n_machines)
        if n_behind:
            relay = self._relays[key] = _Relay(carrier, key, n_behind)
            for asked in self._asked.pop(key, ()):
                relay.ask(*asked)
        fetch = _Fetch([(peer, id)], call, arrays, relay)
        self._want(fetch, before, places, origin=machine, part=part)

    def _want(self, fetch, machine, places, rows=None, axis=0, origin=None, part=PART):
        self._numbers += 1
        self._under_way[self._numbers] = fetch
        origin = machine if origin is None else origin
        what = fetch.call, places, rows, axis, origin, part
        self._carrier.tell(machine, "want", self._numbers, *what)
        return fetch

    def are_copying(self, call):
        """Return whether copies of a call, of a session and number, have not ended."""
        return any(each.targets and each.call == call for each in self._under_way.values())

    def drop_relays(self):
        """In calls that are over here, pass on only arrays that have begun to come."""
        for key in [key for key in self._asked if self._carrier.is_over(key[0])]:
            for asked in self._asked.pop(key):
                self._refuse(*asked)
        self._forget_relays()

    def _refuse(self, machine, number):
        error = RuntimeError("the call was left before they had come")
        self._carrier.tell(machine, "failed", number, problem_here(error))

    def _forget_relays(self):
        self._relays = {key: relay for key, relay in self._relays.items() if not relay.is_over}

    def from_machine_want(self, machine, number, call, places, rows, axis, origin, part):
        """Send arrays of ranks here, or some of their rows; they do not change in this call."""
        carrier = self._carrier
        if origin != carrier.machine:
            self._pass_on(machine, number, call, places)
            return
        try:
            if carrier.has_left(call[0]):
                raise RuntimeError("the session is over")
            arrays = [carrier.open(place) for place in places]
            if rows is not None:
                arrays = [take_rows(array, rows, axis=axis) for array in arrays]
            arrays = [np.ascontiguousarray(each).reshape(each.shape) for each in arrays]
        except Exception as error:
            carrier.tell(machine, "failed", number, problem_here(error))
            return
        kinds = [(array.dtype.str, array.shape) for array in arrays]
        if sum(array.nbytes for array in arrays) <= SMALL:
            carrier.tell(machine, "coming", number, kinds, arrays, part)
        else:
            carrier.tell(machine, "coming", number, kinds, None, part)
            parts = [each for array in arrays for each in parts_of(array, part)]
            carrier.send_parts(machine, parts, number)

    def _pass_on(self, machine, number, call, places):
        relay = self._relays.get((call, places))
        if relay is not None:
            relay.ask(machine, number)
            self._forget_relays()
        elif self._carrier.is_over(call):
            self._refuse(machine, number)
        else:
            self._asked[call, places].append((machine, number))

    def from_machine_coming(self, machine, number, kinds, arrays, part):
        """Receive arrays, also if no rank waits for them any more."""
        fetch, block, answer = self._under_way[number], None, ("done", None)
        targets, relay = fetch.targets, fetch.relay
        if relay is not None:
            relay.tell("coming", kinds, arrays, part)
        if targets is None:
            [(dtype, shape)] = kinds
            nbytes = nbytes_of(dtype, shape)
            try:
                block, offset = self._arena.take(nbytes)
            except (SharedMemoryFull, OSError) as error:
                # The array comes all the same, and must go somewhere.
                targets, answer = [np.empty(shape, dtype)], ("failed", problem_here(error))
            else:
                targets = [block.segment.array(dtype, shape, offset)]
                answer = "done", (block.segment.ref, dtype, shape, offset)
                block.n_coming += 1

        def end():
            if block is not None:
                block.n_coming -= 1
            self._answer(number, *answer)

        if arrays is not None:
            for target, array in zip(targets, arrays):
                target[...] = array
            end()
            return
        parts = [each for array in targets for each in parts_of(array, part)]

        def come(position):
            if relay is not None:
                relay.send(parts[position])
            if position == len(parts) - 1:
                end()

        self._carrier.receive_parts(machine, parts, number, come)

    def _answer(self, number, *answer):
        fetch = self._under_way.pop(number)
        fetch.answer = name, content = answer
        if fetch.relay is not None:
            if name == "failed":
                fetch.relay.tell(name, content)
            fetch.relay.is_complete = True
            self._forget_relays()
        for peer, id in fetch.waiting:
            self._carrier.post(peer, name, id, content)


class Arena:
    """Memory for the arrays that come in one call: a few segments, which the next call fills anew.

    `create` takes a number of bytes, and returns a Segment or raises SharedMemoryFull.
    """

    def __init__(self, create):
        self._create, self._blocks = create, []

    def begin(self) -> None:
        """Begin a call: no array of the last one is needed any more."""
        for block in self._blocks:
            block.unused_calls = 0 if block.used else block.unused_calls + 1
            if not block.n_coming:  # else an array is still on its way, for a rank that has ended
                block.used = 0
        self._blocks = [each for each in self._blocks if each.unused_calls < _UNUSED_CALLS]

    def take(self, nbytes):
        """Return a block, and the offset of `nbytes` bytes in it that are free."""
        block = next((each for each in self._blocks if each.takes(nbytes)), None)
        if block is None:
            block = self._add(nbytes)
        offset, block.used = block.used, block.used + -(-nbytes // _ALIGN) * _ALIGN
        return block, offset

    def _add(self, nbytes):
        sizes = [block.segment.ref.nbytes for block in self._blocks]
        total = sum(size for size in sizes if size <= _LARGEST)
        try:
            segment = self._create(max(nbytes, min(max(total, _SMALLEST), _LARGEST)))
        except SharedMemoryFull:
            self._blocks = [block for block in self._blocks if block.used]
            segment = self._create(nbytes)
        block = _ArenaBlock(segment)
        self._blocks.append(block)
        return block


@dataclass(eq=False)
class _ArenaBlock:
    """A segment of the arena, filled from its beginning."""

    segment: Any
    used: int = 0  # bytes that this call has taken
    n_coming: int = 0  # arrays in it that have not come yet
    unused_calls: int = 0  # since the last call that has taken bytes

    def takes(self, nbytes):
        """Return whether an array of so many bytes belongs here."""
        size = self.segment.ref.nbytes
        # A segment for one large array is not filled with small ones: else the large array of the
        # next call would need another segment.
        return self.used + nbytes <= size and (size <= _LARGEST or nbytes > size // 4)


def route(nbytes, machine, origin, n_machines):
    """Return the machine before one, how many are behind it, and the bytes of each part.

    >>> [route(1 << 18, machine, 0, 6) for machine in range(1, 6)]
    [(0, 0, 1048576), (0, 1, 1048576), (2, 0, 1048576), (0, 1, 1048576), (4, 0, 1048576)]
    >>> route(1 << 24, 2, 0, 6), route(1 << 24, 0, 2, 6)
    ((1, 1, 1048576), (5, 1, 1048576))
    >>> [route(1 << 20, machine, 0, 64) for machine in (1, 2, 31, 32)]
    [(0, 2, 65536), (0, 2, 65536), (15, 1, 65536), (15, 0, 65536)]
    """
    place = (machine - origin) % n_machines
    if nbytes > max(_TREE, _SMALLEST_PART * (n_machines - 2)):
        before, n_behind = place - 1, int(place + 1 < n_machines)
        part = nbytes // (_PARTS * max(n_machines - 2, 1)) // _ALIGN * _ALIGN
        part = min(max(part, _SMALLEST_PART), PART) if n_machines > 2 else PART
    elif nbytes > _TREE:
        before, part = (place - 1) // 2, _SMALLEST_PART
        n_behind = sum(each < n_machines for each in (2 * place + 1, 2 * place + 2))
    else:  # without the lowest bit of its number; with a lower one in addition
        lowest = place & -place
        before, part = place - lowest, PART
        n_behind = sum(place + (1 << bit) < n_machines for bit in range(lowest.bit_length() - 1))
    return (before + origin) % n_machines, n_behind, part


def problem_here(error):
    """Return the sentence for an error of this carrier, with the name of its machine."""
    return f"{socket.gethostname()} could not do its part, {type(error).__name__}: {error}"
