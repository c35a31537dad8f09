"""Where the values of shared variables live: in shared memory, mapped by all ranks.

    own      key -> home       this rank's values, which Theano works on where they are
    boards   rank -> log       where each rank's homes are: written before a meeting, read after it
    others   key -> arrays     the values of the other ranks, seen through their homes

A variable gets its home with its first collective. Updates that run in place leave it there; where
Theano or ``set_value`` has put another array into the variable, `bring_home` copies it back.
A log tells the state, not events: who misses an entry in a call that fails reads it in the next.
"""

import pickle
import weakref
from typing import NamedTuple, Tuple

import numpy as np

from synkhronos import _theano
from synkhronos._shm import Segment, SegmentRef

_ALIGN = 64  # bytes of a cache line: no two ranks write to one of them
_HEADER = 8  # bytes before each entry of a log, with its length


class Place(NamedTuple):
    """Where arrays lie in a segment: the dtype, shape and offset of each."""

    segment: SegmentRef
    arrays: Tuple[Tuple[str, Tuple[int, ...], int], ...]


class _Home:
    """Some bytes of an own segment, and the arrays that are in them now."""

    def __init__(self, segment, begin, nbytes):
        self.segment, self.begin, self.nbytes = segment, begin, nbytes
        self.layout, self.arrays = None, ()

    def lay_out(self, layout):
        """Have it hold arrays of these dtypes and shapes, one after another."""
        places, offset = [], self.begin
        for dtype, shape in layout:
            places.append((dtype, shape, offset))
            offset += _round_up(_nbytes(dtype, shape))
        self.layout, self.place = layout, Place(self.segment.ref, tuple(places))
        self.arrays = [self.segment.array(*place) for place in places]
        return self.arrays


class Homes:
    """The homes of one rank, and its view of all others'."""

    def __init__(self, worker):
        self._worker = worker
        self._own = {}
        self._unposted = {}
        self._retired = []
        self._generation = self._end = 0
        self._others = [{} for _ in range(worker.n_ranks)]  # rank -> key -> (segment, arrays)
        self._heard = [0] * worker.n_ranks
        self._attached = weakref.WeakValueDictionary()
        self.version = 0  # changes with everything that views of homes depend on

    # This rank's own.

    def begin(self) -> None:
        """Begin a command: what the last one gave up is read by nobody any more."""
        if self._retired:
            self._retired.clear()

    def bring_home(self, keys) -> None:
        """See to it that the values of these variables are in their homes."""
        variables, own = self._worker.variables, self._own
        moved = []
        for key in keys:
            value = _theano.peek(variables[key])
            home = own.get(key)
            if home is None or value is not home.arrays[0]:
                moved.append((key, value))
        if moved:
            self._move_in(moved)

    def _move_in(self, moved):
        self._build({key: (_layout(value),) for key, value in moved})
        for key, value in moved:
            variable, home = self._worker.variables[key], self._own[key]
            layout = (_layout(value),)
            if home.layout != layout:
                self._settle(key, layout)
            elif _is_there(value, home.arrays[0]):
                home.arrays[0] = value  # another view of the same memory, as some ops make
                self.version += 1
                continue
            home.arrays[0][...] = value
            _theano.replace(variable, home.arrays[0])

    def new_value(self, key, shape):
        """Give a variable a value of another shape, of any contents; return the array."""
        variable = self._worker.variables[key]
        layout = ((np.dtype(variable.dtype).str, tuple(shape)),)
        [value] = self.room_for(key, layout)
        _theano.replace(variable, value)
        return value

    def replace_home(self, key, shape):
        """Return an array for a variable's next value, while its present home can be read still."""
        old = self._own.pop(key, None)
        if old is not None:
            self._retired.append(old)
        return self.new_value(key, shape)

    def room_for(self, key, layout):
        """Return arrays of these dtypes and shapes, of any contents, that all ranks can see."""
        home = self._own.get(key)
        if home is None or home.layout != layout:
            self._build({key: layout})
            self._settle(key, layout)
        return self._own[key].arrays

    def _build(self, layouts):
        """Make a new home, in one segment, for each whose own is missing or too small."""
        sizes = {}
        for key, layout in layouts.items():
            needed, home = _room(layout), self._own.get(key)
            if home is None or home.nbytes < needed:
                sizes[key] = needed
                if home is not None:
                    self._retired.append(home)
        if sizes:
            segment, begin = self._worker.segments.create(sum(sizes.values())), 0
            for key, nbytes in sizes.items():
                self._own[key] = _Home(segment, begin, nbytes)
                begin += nbytes

    def _settle(self, key, layout):
        self._own[key].lay_out(layout)
        self._unposted[key] = self._own[key].place
        self.version += 1

    def forget(self, keys) -> None:
        """Drop variables that are no more."""
        self.begin()
        for key in keys:
            if self._own.pop(key, None) is not None:
                self._unposted.pop(key, None)
            for others in self._others:
                others.pop(key, None)
        self.version += 1

    def close(self) -> None:
        """Drop everything; variables that are left keep their values, in memory of their own."""
        self.begin()
        for key, home in self._own.items():
            variable = self._worker.variables.get(key)
            if variable is not None and _theano.peek(variable) is home.arrays[0]:
                _theano.replace(variable, home.arrays[0].copy())
        self._own.clear()
        for others in self._others:
            others.clear()

    # What the ranks tell one another.

    def post(self) -> None:
        """Write down where this rank's homes are, if that has changed. All ranks meet after it."""
        if not self._unposted:
            return
        gate = self._worker.gate
        board = gate.boards[self._worker.rank]
        entry = _entry(self._unposted)
        if self._end + len(entry) > len(board):
            # A new log, of all that holds now; nobody reads the old one between two meetings.
            entry = _entry({key: home.place for key, home in self._own.items()})
            self._generation, self._end = self._generation + 1, 0
            if len(entry) > len(board):
                raise ValueError(
                    f"{len(self._own)} shared variables are more than can be told of at a time."
                )
        board[self._end : self._end + len(entry)] = entry
        self._end += len(entry)
        gate.post_news(self._generation << 32 | self._end)
        self._unposted.clear()

    def hear(self) -> None:
        """Read what the other ranks have written. All ranks have met before it."""
        gate = self._worker.gate
        for rank, heard in enumerate(self._heard):
            news = gate.news(rank)
            if news != heard and rank != self._worker.rank:
                self._read(rank, news, gate.boards[rank])
                self._heard[rank] = news
                self.version += 1

    def _read(self, rank, news, board):
        generation, end = news >> 32, news & 0xFFFFFFFF
        heard = self._heard[rank]
        at = heard & 0xFFFFFFFF
        if heard >> 32 != generation:
            at = 0
            self._others[rank].clear()
        while at < end:
            length = int.from_bytes(board[at : at + _HEADER], "little")
            at += _HEADER
            for key, place in pickle.loads(board[at : at + length]).items():
                self._others[rank][key] = self._attach(place)
            at += length

    def _attach(self, place):
        segment = self._attached.get(place.segment)
        if segment is None:
            segment = Segment.attach(place.segment)
            self._attached[place.segment] = segment
        return segment, [segment.array(*array) for array in place.arrays]

    def arrays(self, key):
        """Return the list of arrays of each rank, in rank order."""
        return [
            self._own[key].arrays if rank == self._worker.rank else others[key][1]
            for rank, others in enumerate(self._others)
        ]

    def value_of(self, rank, key):
        """Return the value of a variable on one rank."""
        if rank == self._worker.rank:
            return self._own[key].arrays[0]
        return self._others[rank][key][1][0]

    def values(self, key):
        """Return the value of a variable on each rank, in rank order."""
        return [arrays[0] for arrays in self.arrays(key)]


def _layout(value):
    return value.dtype.str, value.shape


def _nbytes(dtype, shape):
    return int(np.dtype(dtype).itemsize * np.prod(shape, dtype=np.int64))


def _round_up(nbytes):
    return -(-nbytes // _ALIGN) * _ALIGN


def _room(layout):
    return max(sum(_round_up(_nbytes(*each)) for each in layout), _ALIGN)


def _is_there(value, home):
    return (
        value.__array_interface__["data"][0] == home.__array_interface__["data"][0]
        and value.flags.c_contiguous
        and value.flags.writeable
    )


def _entry(places):
    data = pickle.dumps(places, pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(_HEADER, "little") + data
