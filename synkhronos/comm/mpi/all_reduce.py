"""All-reduce between machines: the messages, and the machine that computes each part.

    cut the arrays into chunks, as many for each machine; chunk c belongs to machine c + t mod M
    1   every machine ── its values of chunk c ──▶ the owner of c, which reduces them
    2   the owner of c ── the result ──▶ every machine

Each machine sends and receives 2 (M - 1) / M of the bytes, the least that is possible (Patarasuk
and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). Small
arrays have fewer chunks than there are machines: the number t of the all-reduce lets all machines
own them in turn. The owner reduces in the order of the machines, so that the bits of a result
depend only on the layout, and all machines get the same. Chunks are under way in both steps at the
same time.

Nothing here waits: `AllReduce.progress` does what can be done now.
"""

import collections
import math

import numpy as np

from synkhronos._arithmetic.blocks import cut, reduce_block, with_one_nan
from synkhronos._arithmetic.operations import OPERATIONS

CHUNK = 1 << 20  # bytes, at most
_SMALLEST, _ALIGN = 1 << 12, 64
_WINDOW = 4  # messages to or from one machine that are under way in each step


def chunk_bytes(nbytes: float, n_machines: int) -> int:
    """Return the bytes of a chunk: all machines own equally many, unless chunks get too small.

    >>> CHUNK, chunk_bytes(1 << 20, 4), chunk_bytes(1 << 20, 12), chunk_bytes(1 << 10, 12)
    (1048576, 262144, 87424, 4096)
    """
    n_own = max(1, math.ceil(nbytes / (CHUNK * n_machines)))
    units = math.ceil(nbytes / (n_own * n_machines * _ALIGN))
    return max(units * _ALIGN, _SMALLEST)


class NetworkAllReduce:
    """One all-reduce of contiguous arrays, in place; they are alike on all machines.

    `wire` is a `BaseCarrier`, or another object with its ``machine``, ``n_machines``, ``send`` and
    ``receive``. Averages are divided by `divisor`. An even tag and the next one are used; half of
    `tag` is `t`. With `compress` floats cross the network in half precision, the results only with
    `compress_results`.
    """

    def __init__(self, wire, arrays, ops, divisor, tag, compress=False, compress_results=True):
        self._wire, self._machine, self._n_machines = wire, wire.machine, wire.n_machines
        self._ops, self._divisor = ops, divisor
        self._compress, self._compress_results = compress, compress and compress_results
        self._flat = [array.reshape(-1) for array in arrays]
        self._chunk_list = list(self._chunks())
        machine, n_machines = wire.machine, wire.n_machines
        numbers = range(len(self._chunk_list))
        turn = tag // 2
        self._mine = [c for c in numbers if (c + turn) % n_machines == machine]
        self._sources = {}  # own chunk -> machine -> values that have come
        self._results = {}  # own chunk -> result
        self._spreading = []  # the streams of results to other machines
        self._streams = []
        for distance in range(1, n_machines):  # machines begin with different ones
            other = (machine + distance) % n_machines
            theirs = [c for c in numbers if (c + turn) % n_machines == other]
            self._add_streams(other, theirs, tag)
        if n_machines == 1:  # no values come from others, so chunks are complete
            for chunk in self._mine:
                self._take(chunk, machine, self._values(chunk))

    def _add_streams(self, other, theirs, tag):
        """Add the four streams of messages between this machine and another one."""
        wire, result = self._wire, self._results.__getitem__
        spread = _Stream(wire.send, other, tag + 1, self._mine, result, waits=True)
        self._spreading.append(spread)
        self._streams += [
            _Stream(wire.send, other, tag, theirs, self._values),
            _Stream(wire.receive, other, tag, self._mine, self._empty, self._take),
            # A result is received where the values were: it comes only when these have been sent.
            _Stream(wire.receive, other, tag + 1, theirs, self._room, self._keep),
            spread,
        ]

    def progress(self) -> bool:
        """Do what can be done now; return whether the all-reduce has ended."""
        while sum(stream.progress() for stream in self._streams):  # all of them, in turns
            pass
        self._streams = [stream for stream in self._streams if not stream.is_over]
        return not self._streams

    def _chunks(self):
        """Yield lists of (position, begin, end): parts of arrays of one dtype and operation."""
        whole = chunk_bytes(sum(array.nbytes for array in self._flat), self._n_machines)
        pieces, room, kind = [], whole, None
        for position, array in enumerate(self._flat):
            here = array.dtype, self._ops[position]
            at = 0
            while at < array.size:
                if pieces and (here != kind or room < array.itemsize):
                    yield pieces
                    pieces, room = [], whole
                kind = here
                end = min(at + max(room // array.itemsize, 1), array.size)
                pieces.append((position, at, end))
                room -= (end - at) * array.itemsize
                at = end
        if pieces:
            yield pieces

    def _dtype(self, pieces, compress):
        """Return the dtype in which a chunk crosses the network."""
        dtype = self._flat[pieces[0][0]].dtype
        return np.dtype(np.float16) if compress and dtype.kind == "f" else dtype

    def _values(self, chunk):
        """Return this machine's values of a chunk, as they are sent: a view if that is possible."""
        pieces = self._chunk_list[chunk]
        if len(pieces) == 1:
            position, begin, end = pieces[0]
            values = self._flat[position][begin:end]
        else:
            values = np.concatenate([self._flat[p][begin:end] for p, begin, end in pieces])
        return values.astype(self._dtype(pieces, self._compress), copy=False)

    def _empty(self, chunk):
        """Return memory for a machine's values of a chunk."""
        return self._memory(self._chunk_list[chunk], self._compress)

    def _room(self, chunk):
        """Return the place of a result in the arrays, or new memory if it can't come there."""
        pieces = self._chunk_list[chunk]
        position, begin, end = pieces[0]
        place = self._flat[position][begin:end]
        if len(pieces) > 1 or self._dtype(pieces, self._compress_results) != place.dtype:
            return self._memory(pieces, self._compress_results)
        return place

    def _memory(self, pieces, compress):
        return np.empty(sum(end - begin for _, begin, end in pieces), self._dtype(pieces, compress))

    def _take(self, chunk, machine, values):
        """Take a machine's values of an own chunk; reduce it when all have come."""
        pieces = self._chunk_list[chunk]
        sources = self._sources.setdefault(chunk, {self._machine: self._values(chunk)})
        sources[machine] = values
        if len(sources) < self._n_machines:
            return
        del self._sources[chunk]
        result = self._room(chunk)
        if self._machine > 1:  # `reduce_block` may write to the first two machines' values only
            result = self._memory(pieces, self._compress_results)
        self._results[chunk] = result
        ordered = [
            sources[machine].astype(result.dtype, copy=False) for machine in range(self._n_machines)
        ]
        reduce_block(self._ops[pieces[0][0]], ordered, result, self._divisor)
        self._keep(chunk, self._machine, result)
        for stream in self._spreading:
            stream.may.add(chunk)

    def _keep(self, chunk, machine, result):
        """Write a result into the arrays, unless it was received there."""
        at = 0
        for position, begin, end in self._chunk_list[chunk]:
            place = self._flat[position][begin:end]
            if not np.may_share_memory(place, result):
                place[...] = result[at : at + end - begin]
            at += end - begin


class _Stream:
    """The messages in one step to or from one machine, in order; a few are under way at a time."""

    def __init__(self, transfer, machine, tag, chunks, buffer_of, on_end=None, waits=False):
        self._transfer, self._machine, self._tag = transfer, machine, tag
        self._chunks, self._buffer_of = collections.deque(chunks), buffer_of
        self._on_end = on_end
        self.may = set() if waits else None  # chunks that may be sent or received; None for all
        self._under_way = collections.deque()

    @property
    def is_over(self):
        """Whether all messages have been sent or received."""
        return not (self._chunks or self._under_way)

    def progress(self):
        """Do what can be done now; return whether that was something."""
        happened = False
        while self._under_way and self._under_way[0][1].is_done:
            happened = True
            chunk, _, buffer = self._under_way.popleft()
            if self._on_end is not None:
                self._on_end(chunk, self._machine, buffer)
        while self._chunks and len(self._under_way) < _WINDOW:
            chunk = self._chunks[0]
            if self.may is not None and chunk not in self.may:
                break
            happened = True
            self._chunks.popleft()
            buffer = self._buffer_of(chunk)
            request = self._transfer(self._machine, buffer, self._tag)
            self._under_way.append((chunk, request, buffer))
        return happened


def reduce_all(sources, ops, divisor, compress, out):
    """Reduce lists of small arrays, one of each machine, in that order, into `out`."""
    for position, target in enumerate(out):
        values = [each[position] for each in sources]
        if compress and target.dtype.kind == "f":
            values = [each.astype(np.float16) for each in values]
        result = np.empty(target.shape, values[0].dtype)
        reduce_block(ops[position], values, result, divisor)
        target[...] = with_one_nan(result)


def reduce_into_first(everyone, ops, counting, n_parts, part):
    """Reduce one of `n_parts` of the buffers of some ranks into those of the first rank.

    `everyone` has the buffers of each rank of this machine, `counting` the numbers that the ranks
    with rows have on this machine.
    """
    if not counting:
        if part == 0:
            for op, buffer in zip(ops, everyone[0]):
                buffer.fill(OPERATIONS[op].identity(buffer.dtype))
        return
    if list(counting) == [0]:
        return
    sources = [everyone[rank] for rank in counting]
    for position, (out, *blocks) in cut(list(zip(everyone[0], *sources)), n_parts, part):
        reduce_block(ops[position], blocks, out, 1)  # averages are divided between the machines
