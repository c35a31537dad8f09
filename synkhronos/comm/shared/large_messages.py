"""Messages with arrays, between ranks of one machine: large arrays go through shared memory.

    sender      pack       puts large arrays into a segment, and sends their places
    receiver    unpack     makes views of the segment
                give_back  answers that the views are not needed any more
    sender      take_back  can fill the segment again

An array that is in shared memory already is not copied: its place is sent. Descriptors of the
segments go with the message, so that its arrays outlive a sender that dies.
"""

from __future__ import annotations

import itertools
import pickle
from typing import Any, Iterator, NamedTuple, Sequence

import numpy as np

from synkhronos._machine.shared_memory import SegmentRef, Segments

_SMALL = 1 << 15  # bytes of an array that is pickled with the message
_FREE_SEGMENTS = 4  # at most, kept to be filled again
_ALIGN = 64


class Packed(NamedTuple):
    """A message as `pack` makes it."""

    data: bytes
    number: int = 0  # which the receiver answers; 0 for a message without large arrays
    places: tuple = ()  # (segment, offset, bytes) of each large array


class _Taken(NamedTuple):
    number: int


def pickled(message: tuple) -> tuple[bytes, list[np.ndarray]]:
    """Return a pickled message without its large arrays, and the bytes of these arrays."""
    large: list[np.ndarray] = []

    def is_small(buffer):
        raw = buffer.raw()
        if raw.nbytes <= _SMALL:
            return True
        large.append(np.frombuffer(raw, np.uint8))
        return False

    return pickle.dumps(message, 5, buffer_callback=is_small), large


class LargeMessages:
    """The large arrays that one rank has sent, and those that it has received."""

    def __init__(self, segments: Segments):
        self._segments = segments
        self._numbers = itertools.count(1)
        self._under_way: dict[int, tuple[int, Any]] = {}  # number -> receiver, segment
        self._free: list[Any] = []  # segments
        self._shared: list[tuple[int, int, SegmentRef]] = []  # first address, end, segment
        self._held: list[tuple[int, int]] = []  # sender, number of each message that is in use

    def under_way(self, rank: int) -> int:
        """Return the number of messages with large arrays that a rank has not received yet."""
        return sum(to == rank for to, _ in self._under_way.values())

    def note(self, array: np.ndarray, segment: SegmentRef) -> None:
        """Note that a segment has the memory of an array, from its beginning."""
        begin = array.__array_interface__["data"][0]
        self._shared.append((begin, begin + array.nbytes, segment))

    def pack(self, rank: int, message: tuple) -> tuple[Packed, list[int]]:
        """Return what to send to a rank, and the descriptors that go with it."""
        data, large = pickled(message)
        if not large:
            return Packed(data), []
        places = [self.place_of(array) for array in large]
        copied = [array for array, place in zip(large, places) if place is None]
        number, segment = next(self._numbers), None
        if copied:
            segment = self._room_for(sum(_round_up(array.nbytes) for array in copied))
            filled = iter(self._fill(segment, copied))
            places = [place or next(filled) for place in places]
        self._under_way[number] = rank, segment
        segments = list(dict.fromkeys(place[0] for place in places))
        return Packed(data, number, tuple(places)), [each.fd for each in segments]

    def place_of(self, array: np.ndarray) -> tuple[SegmentRef, int, int] | None:
        """Return where in the noted segments an array is: (segment, offset, bytes), or None."""
        begin = array.__array_interface__["data"][0]
        for first, end, segment in self._shared:
            if first <= begin and begin + array.nbytes <= end:
                return segment, begin - first, array.nbytes
        return None

    def _room_for(self, nbytes):
        fitting = [each for each in self._free if nbytes <= each.ref.nbytes <= 4 * nbytes]
        if not fitting:
            return self._segments.create(nbytes)
        chosen = min(fitting, key=lambda each: each.ref.nbytes)
        self._free.remove(chosen)
        return chosen

    @staticmethod
    def _fill(segment, arrays) -> Iterator[tuple[SegmentRef, int, int]]:
        offset = 0
        for array in arrays:
            segment.array(np.uint8, (array.nbytes,), offset)[...] = array
            yield segment.ref, offset, array.nbytes
            offset += _round_up(array.nbytes)

    def unpack(self, rank: int, packed: Packed, descriptors: Sequence[int] = ()) -> tuple:
        """Return the message of a rank; its large arrays are views until `give_back` is called."""
        views = []
        if packed.number:
            self._held.append((rank, packed.number))
            self._segments.forget_freed()
            segments = dict.fromkeys(place[0] for place in packed.places)
            mapped = dict(zip(segments, map(self._segments.adopt, segments, descriptors)))
            for ref, offset, nbytes in packed.places:
                views.append(mapped[ref].array(np.uint8, (nbytes,), offset))
        return pickle.loads(packed.data, buffers=views)

    def give_back(self) -> list[tuple[int, _Taken]]:
        """Return (rank, answer) for each message in use, whose arrays are not needed any more."""
        held, self._held = self._held, []
        return [(rank, _Taken(number)) for rank, number in held]

    def take_back(self, answer: Any) -> bool:
        """Take the answer of a receiver; return False for any other message."""
        if not isinstance(answer, _Taken):
            return False
        self._release(answer.number)
        return True

    def drop(self, rank: int) -> None:
        """Wait for no answer of a rank that has ended."""
        for number in [number for number, (to, _) in self._under_way.items() if to == rank]:
            self._release(number)
        self._held = [each for each in self._held if each[0] != rank]

    def _release(self, number):
        _, segment = self._under_way.pop(number, (None, None))
        if segment is not None:
            self._free.append(segment)
            del self._free[:-_FREE_SEGMENTS]


def _round_up(nbytes):
    return -(-nbytes // _ALIGN) * _ALIGN
