"""Arrays of other machines: how a carrier asks for them, and sends those of its own.

    rank ── fetch ──▶ carrier ── want ────────────────▶ carrier of the machine that has the array
                              ◀── here                  a small array: in the message
                              ◀── coming, and its parts a large one
         ◀── done ──          the place in the arena
             failed           why it did not come

    leader ── copy ──▶ carrier ── send ──────────────▶ carrier of the machine that has the arrays
                               ◀── sending             and the parts of all of them
           ◀── done ──         they are in the memory of ranks that the leader has named
               failed

What comes for a fetch lies in the carrier's arena until the next call of the session. Each message
names its call, because ranks have sockets of their own, and the carrier may read a rank's first
message of a call before the last one of another rank in the call before.
"""

import socket

import numpy as np

from synkhronos._arithmetic.partition import take_rows
from synkhronos.comm.mpi.transfers import SMALL, parts
from synkhronos.errors import SharedMemoryFull

_ALIGN = 64
_SMALLEST, _LARGEST = 1 << 20, 1 << 26  # bytes of a segment of the arena, if its array is smaller
_UNUSED_CALLS = 64  # a segment that no call needed for so long is freed


class Fetch:
    """An array of another machine on its way to this one."""

    def __init__(self):
        self.waiting = []  # (channel, number) of each rank that wants it
        self.answer = None  # the name of the message and its content


class Fetches:
    """The arrays that the ranks of a machine fetch, and those that other machines fetch from it.

    Parameters
    ----------
    carrier : Carrier
    segments : Segments
        The segments that the carrier has made, and those of ranks that it has mapped.
    """

    def __init__(self, carrier, segments):
        self._carrier, self._segments = carrier, segments
        self._arena = Arena(segments.create)
        self._call = 0, 0
        self._under_way = {}  # number -> Fetch
        self._whole = {}  # (machine, place) -> Fetch of this call, for whole arrays
        self._copies = {}  # number -> (channel of the leader, call, arrays to fill)
        self._numbers = 0

    def from_rank_fetch(self, channel, number, call, machine, place, rows, axis):
        """Get an array of another machine, or some of its rows; answer with a place that has it."""
        if call < self._call:
            raise RuntimeError("the call that it was for is over")
        if call > self._call:
            self._call = call
            self._whole.clear()
            self._arena.begin()
        fetch = self._whole.get((machine, place)) if rows is None else None
        if fetch is not None:
            if fetch.answer is None:
                fetch.waiting.append((channel, number))
            else:
                name, answer = fetch.answer
                self._carrier.post(channel, name, number, answer)
            return
        fetch = Fetch()
        fetch.waiting.append((channel, number))
        self._numbers += 1
        self._carrier.tell(machine, "want", self._numbers, call[0], place, rows, axis)
        self._under_way[self._numbers] = fetch
        if rows is None:
            self._whole[machine, place] = fetch

    def from_machine_want(self, machine, number, session, place, rows, axis):
        """Send an array of this machine, or some of its rows."""
        carrier = self._carrier
        try:
            if carrier.has_left(session):
                raise RuntimeError("the session is over")
            array = carrier.open(place)
            if rows is not None:
                array = take_rows(array, rows, axis=axis)
            array = np.ascontiguousarray(array).reshape(array.shape)
        except Exception as error:
            carrier.tell(machine, "failed", number, problem_here(error))
            return
        if array.nbytes <= SMALL:
            carrier.tell(machine, "here", number, array.dtype.str, array.shape, array.tobytes())
            return
        carrier.tell(machine, "coming", number, array.dtype.str, array.shape)
        self._send(machine, [array])

    def from_machine_failed(self, machine, number, problem):
        """Tell the ranks that their array can't be had."""
        self._answer(number, "failed", problem)

    def from_machine_here(self, machine, number, dtype, shape, data):
        """Take a small array."""
        try:
            block, offset = self._arena.take(len(data))
        except (SharedMemoryFull, OSError) as error:
            self._answer(number, "failed", problem_here(error))
            return
        block.bytes_at(offset, len(data))[...] = np.frombuffer(data, np.uint8)
        self._answer(number, "done", (block.ref, dtype, shape, offset))

    def from_machine_coming(self, machine, number, dtype, shape):
        """Receive a large array."""
        nbytes = int(np.dtype(dtype).itemsize * np.prod(shape, dtype=np.int64))
        try:
            block, offset = self._arena.take(nbytes)
        except (SharedMemoryFull, OSError) as error:
            # It comes all the same; the next array must not be taken for it.
            answer = "failed", problem_here(error)
            block, room = None, np.empty(nbytes, np.uint8)
        else:
            answer = "done", (block.ref, dtype, shape, offset)
            block.n_coming += 1
            room = block.bytes_at(offset, nbytes)

        def then():
            if block is not None:
                block.n_coming -= 1
            self._answer(number, *answer)

        self._receive(machine, [room], then)

    def _answer(self, number, name, content):
        fetch = self._under_way.pop(number)
        fetch.answer = name, content
        for channel, theirs in fetch.waiting:
            self._carrier.post(channel, name, theirs, content)

    def are_copying(self, call):
        """Return whether copies of a call, of a session and number, have not ended."""
        return any(each == call for _, each, _ in self._copies.values())

    def from_rank_copy(self, channel, number, call, machine, places, targets):
        """Copy arrays of another machine into arrays of ranks here; answer when they are there."""
        self._copies[number] = channel, call, [self._carrier.open(place) for place in targets]
        self._carrier.tell(machine, "send", number, call[0], places)

    def from_machine_send(self, machine, number, session, places):
        """Send arrays of ranks here, which are not written to until the end of the call."""
        carrier = self._carrier
        try:
            if carrier.has_left(session):
                raise RuntimeError("the session is over")
            arrays = [carrier.open(place) for place in places]
        except Exception as error:
            carrier.tell(machine, "unsent", number, problem_here(error))
            return
        carrier.tell(machine, "sending", number)
        self._send(machine, arrays)

    def from_machine_unsent(self, machine, number, problem):
        """Tell the leader that its arrays can't be had."""
        channel, _, _ = self._copies.pop(number)
        self._carrier.post(channel, "failed", number, problem)

    def from_machine_sending(self, machine, number):
        """Receive arrays into the memory of ranks: also if these want them no more."""
        channel, _, arrays = self._copies[number]

        def then():
            del self._copies[number]
            self._carrier.post(channel, "done", number, None)

        self._receive(machine, arrays, then)

    def _send(self, machine, arrays):
        for part in (part for array in arrays for part in parts(array)):
            self._carrier.send_bulk(machine, part)

    def _receive(self, machine, arrays, then):
        """Receive arrays in parts, and call `then` when all have come."""
        pending = [part for array in arrays for part in parts(array)]
        left = len(pending)

        def one_less():
            nonlocal left
            left -= 1
            if not left:
                then()

        for part in pending:
            self._carrier.receive_bulk(machine, part, one_less)
        if not pending:
            then()


class Arena:
    """Memory for the arrays that come in one call: a few segments, which the next call fills anew.

    Parameters
    ----------
    create : callable
        Takes a number of bytes; returns a Segment, or raises SharedMemoryFull.
    """

    def __init__(self, create):
        self._create, self._blocks = create, []

    def begin(self) -> None:
        """Begin a call: no array of the last one is needed any more."""
        for block in self._blocks:
            block.unused_calls = 0 if block.used else block.unused_calls + 1
            if not block.n_coming:  # else something is still on its way, for a rank that is gone
                block.used = 0
        self._blocks = [each for each in self._blocks if each.unused_calls < _UNUSED_CALLS]

    def take(self, nbytes):
        """Return a block, and where in it there is room for so many bytes."""
        block = next((each for each in self._blocks if each.takes(nbytes)), None)
        if block is None:
            block = self._add(nbytes)
        offset, block.used = block.used, block.used + -(-nbytes // _ALIGN) * _ALIGN
        return block, offset

    def _add(self, nbytes):
        sizes = [block.ref.nbytes for block in self._blocks]
        total = sum(size for size in sizes if size <= _LARGEST)
        try:
            segment = self._create(max(nbytes, min(max(total, _SMALLEST), _LARGEST)))
        except SharedMemoryFull:
            self._blocks = [block for block in self._blocks if block.used]
            segment = self._create(nbytes)
        block = _Block(segment)
        self._blocks.append(block)
        return block


class _Block:
    """A segment of the arena, filled from its begin.

    Attributes
    ----------
    used : int
        The bytes that this call has taken.
    n_coming : int
        The number of arrays in it that have not come yet.
    unused_calls : int
        The number of calls since one has taken bytes.
    """

    def __init__(self, segment):
        self._segment, self.ref = segment, segment.ref
        self.used = self.n_coming = self.unused_calls = 0

    def takes(self, nbytes):
        """Return whether an array of so many bytes belongs here."""
        size = self.ref.nbytes
        # A segment for one large array is not filled with small ones, or the next call's large one
        # would need another.
        return self.used + nbytes <= size and (size <= _LARGEST or nbytes > size // 4)

    def bytes_at(self, offset, nbytes):
        """Return a view of some bytes."""
        return self._segment.array(np.uint8, (nbytes,), offset)


def problem_here(error):
    """Return the sentence for an error of this carrier, with the name of its machine."""
    return f"{socket.gethostname()} could not do its part, {type(error).__name__}: {error}"
