"""Arrays of other machines: how a carrier asks for them, and sends those of its own.

    rank, leader ── fetch, copy ──▶ carrier ── want ────▶ carrier of the machine that has the arrays
                                            ◀── coming    with small arrays; large ones follow
                 ◀── done, failed ──

A rank fetches an array, or some of its rows, into its carrier's arena, where it lies until the
next call of the session: the answer is its place. A leader has arrays copied into memory of ranks
that it names. Each message names its call, because ranks have sockets of their own, and the carrier
may read a rank's first message of a call before the last one of another rank in the call before.
"""

import socket

import numpy as np

from synkhronos._arithmetic.partition import take_rows
from synkhronos.comm.mpi.transfers import SMALL
from synkhronos.errors import SharedMemoryFull

_ALIGN = 64
_SMALLEST, _LARGEST = 1 << 20, 1 << 26  # bytes of a segment of the arena, if its array is smaller
_UNUSED_CALLS = 64  # a segment that no call needed for so long is freed


class _Fetch:
    """Arrays of another machine on their way to this one.

    Attributes
    ----------
    waiting : list of (int, object)
        The peer, and the id of its request, for each that wants them.
    call : tuple
    targets : list of numpy.ndarray, or None
        Where they are to lie; None for the arena.
    answer : tuple
        The name of the message, and its content.
    """

    def __init__(self, peer, id, call, targets):
        self.waiting, self.call, self.targets = [(peer, id)], call, targets
        self.answer = None


class Fetches:
    """The arrays that the ranks of a machine fetch, and those that other machines fetch from it.

    Parameters
    ----------
    carrier : Carrier
    """

    def __init__(self, carrier):
        self._carrier = carrier
        self._arena = Arena(carrier.segments.create)
        self._call = 0, 0
        self._under_way = {}  # number -> _Fetch
        self._whole = {}  # (machine, place) -> _Fetch of this call, for whole arrays
        self._numbers = 0

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
            fetch = self._want(_Fetch(peer, id, call, None), machine, [place], rows, axis)
            if rows is None:
                self._whole[machine, place] = fetch
        elif fetch.answer is None:
            fetch.waiting.append((peer, id))
        else:
            name, content = fetch.answer
            self._carrier.post(peer, name, id, content)

    def from_rank_copy(self, peer, id, call, machine, places, targets):
        """Copy arrays of another machine into arrays of ranks here; answer when they are there."""
        arrays = [self._carrier.open(place) for place in targets]
        self._want(_Fetch(peer, id, call, arrays), machine, places)

    def _want(self, fetch, machine, places, rows=None, axis=0):
        self._numbers += 1
        self._under_way[self._numbers] = fetch
        self._carrier.tell(machine, "want", self._numbers, fetch.call[0], places, rows, axis)
        return fetch

    def are_copying(self, call):
        """Return whether copies of a call, of a session and number, have not ended."""
        return any(each.targets and each.call == call for each in self._under_way.values())

    def from_machine_want(self, machine, number, session, places, rows, axis):
        """Send arrays of ranks here, or some of their rows; they do not change in this call."""
        carrier = self._carrier
        try:
            if carrier.has_left(session):
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
            carrier.tell(machine, "coming", number, kinds, arrays)
        else:
            carrier.tell(machine, "coming", number, kinds, None)
            carrier.send_arrays(machine, arrays)

    def from_machine_failed(self, machine, number, problem):
        """Tell the ranks that their arrays can't be had."""
        self._answer(number, "failed", problem)

    def from_machine_coming(self, machine, number, kinds, arrays):
        """Receive arrays, also if nobody wants them any more."""
        targets, block, answer = self._under_way[number].targets, None, ("done", None)
        if targets is None:
            [(dtype, shape)] = kinds
            nbytes = int(np.dtype(dtype).itemsize * np.prod(shape, dtype=np.int64))
            try:
                block, offset = self._arena.take(nbytes)
            except (SharedMemoryFull, OSError) as error:
                # It comes all the same; the next array must not be taken for it.
                targets, answer = [np.empty(shape, dtype)], ("failed", problem_here(error))
            else:
                targets = [block.array(dtype, shape, offset)]
                answer = "done", (block.ref, dtype, shape, offset)
                block.n_coming += 1

        def then():
            if block is not None:
                block.n_coming -= 1
            self._answer(number, *answer)

        if arrays is None:
            self._carrier.receive_arrays(machine, targets, then)
            return
        for target, array in zip(targets, arrays):
            target[...] = array
        then()

    def _answer(self, number, *answer):
        fetch = self._under_way.pop(number)
        fetch.answer = name, content = answer
        for peer, id in fetch.waiting:
            self._carrier.post(peer, name, id, content)


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

    def array(self, dtype, shape, offset):
        """Return an array in it."""
        return self._segment.array(dtype, shape, offset)


def problem_here(error):
    """Return the sentence for an error of this carrier, with the name of its machine."""
    return f"{socket.gethostname()} could not do its part, {type(error).__name__}: {error}"
