"""Messages with arrays, between ranks of one machine: large arrays go through shared memory.

    sender      pack       puts large arrays into a segment, and sends their places
    receiver    unpack     makes views of the segment
                give_back  answers that the views are not needed any more
    sender      take_back  can fill the segment again

An array that is in shared memory already is not copied: its place is sent. Descriptors of the
segments go with the message: the system keeps their files open until the other end has received
them, so that the arrays outlive a sender that dies.
"""

from __future__ import annotations

import collections
import itertools
import os
import pickle
import socket
import weakref
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence

import numpy as np

from synkhronos._machine.shared_memory import SegmentRef, Segments
from synkhronos.comm.channel import READ_AT_ONCE, Channel, Mail
from synkhronos.comm.mpi.transfers import pickled

_MOST_DESCRIPTORS = 64  # with one message
_FREE_SEGMENTS = 4  # at most, kept to be filled again
_ALIGN = 64


class Packed(NamedTuple):
    """A message as `pack` makes it."""

    data: bytes
    number: int = 0  # which the receiver answers; 0 for a message without large arrays
    places: tuple = ()  # (segment, offset, bytes) of each large array

    @property
    def segments(self) -> list[SegmentRef]:
        """The segments of the arrays, whose descriptors go with the message in this order."""
        return list(dict.fromkeys(place[0] for place in self.places))


class _Taken(NamedTuple):
    number: int


def _round_up(nbytes):
    return -(-nbytes // _ALIGN) * _ALIGN


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

    def pack(self, rank: int, message: tuple) -> Packed:
        """Return what to send to a rank."""
        data, large = pickled(message)
        if not large:
            return Packed(data)
        places = [self.place_of(array) for array in large]
        copied = [array for array, place in zip(large, places) if place is None]
        number, segment = next(self._numbers), None
        if copied:
            segment = self._room_for(sum(_round_up(array.nbytes) for array in copied))
            filled = iter(self._fill(segment, copied))
            places = [place or next(filled) for place in places]
        self._under_way[number] = rank, segment
        return Packed(data, number, tuple(places))

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

    def unpack(self, rank: int, packed: Packed, descriptors: Sequence[int]) -> tuple:
        """Return the message of a rank; its large arrays are views until `give_back` is called."""
        views = []
        if packed.number:
            self._held.append((rank, packed.number))
            self._segments.forget_freed()
            segments = packed.segments
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


class _ChannelWithDescriptors(Channel):
    """A channel on which file descriptors can go with a message."""

    def __init__(self, connection: socket.socket):
        super().__init__(connection)
        self._n_sent = 0  # bytes, since the start
        # (position in the stream of bytes to send, descriptors that go with the byte there)
        self._beside: collections.deque[tuple[int, list[int]]] = collections.deque()
        self._received_descriptors: list[int] = []  # that `take_descriptors` has not returned

    def post(self, message, descriptors=()):
        """Send as `Channel.post`; the descriptors must stay open until all is sent."""
        if descriptors:
            self._beside.append((self._n_sent + len(self._unsent), descriptors))
        super().post(message)

    def _send_some(self, data):
        position = self._beside[0][0] - self._n_sent if self._beside else len(data)
        if position:
            sent = self._socket.send(data[:position])
        else:
            _, descriptors = self._beside[0]
            beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, np.array(descriptors, np.intc))]
            end = self._beside[1][0] - self._n_sent if len(self._beside) > 1 else len(data)
            sent = self._socket.sendmsg([data[:end]], beside)
            self._beside.popleft()
        self._n_sent += sent
        return sent

    def discard(self):
        """Drop what was not sent."""
        super().discard()
        self._beside.clear()

    def _receive_some(self):
        room = socket.CMSG_SPACE(4 * _MOST_DESCRIPTORS)
        data, beside, _, _ = self._socket.recvmsg(READ_AT_ONCE, room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in beside:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = content[: len(content) // 4 * 4]
                self._received_descriptors += np.frombuffer(whole, np.intc).tolist()
        return data

    def take_descriptors(self, count):
        """Return the descriptors of the next message with some, which the caller has to close."""
        taken = self._received_descriptors[:count]
        del self._received_descriptors[:count]
        return taken

    def close(self):
        """Close this end."""
        super().close()
        for descriptor in self.take_descriptors(None):
            os.close(descriptor)


class MailWithArrays(Mail):
    """A process's messages with its peers: with large arrays by `send`, small ones by `tell`.

    `on_notice` takes the number of a peer, and a message that it has sent with `tell`; `on_end`
    takes the number of a peer that has ended.
    """

    kind = _ChannelWithDescriptors

    def __init__(
        self,
        peers: Mapping[int, socket.socket],
        segments: Segments,
        on_notice: Callable[[int, Any], None],
        on_end: Callable[[int], None] = lambda number: None,
    ):
        self._on_notice, self._on_end_of_peer = on_notice, on_end
        self._came: collections.deque[tuple[int, Packed, list[int]]] = collections.deque()
        self._ended: collections.deque[int] = collections.deque()  # that `take` has to return
        self.large_messages = LargeMessages(segments)
        super().__init__(peers, self._take_message, self._note_end)
        # A forked process would keep the sockets open, and so hide the end of this one.
        channels = weakref.WeakSet(self._channels.values())
        os.register_at_fork(after_in_child=lambda: [each.close() for each in channels])

    @property
    def has_come(self) -> bool:
        """Whether `take` has something."""
        return bool(self._came or self._ended)

    @property
    def is_under_way(self) -> bool:
        """Whether a peer has not received all that was sent to it."""
        return any(
            channel.has_unsent or self.large_messages.under_way(peer)
            for peer, channel in self._channels.items()
        )

    def send(self, peer: int, message: tuple) -> None:
        """Send a message, which may have arrays; to a peer that has ended nothing is sent."""
        if peer in self._channels:
            packed = self.large_messages.pack(peer, message)
            self._post(peer, packed, [each.fd for each in packed.segments])

    def take(self) -> tuple[int, tuple | None] | None:
        """Return the next (peer, message) that has come, without a message if the peer has ended.

        Arrays in it are views of the sender's memory until the next `give_back`.
        """
        if self._came:
            peer, packed, descriptors = self._came.popleft()
            return peer, self.large_messages.unpack(peer, packed, descriptors)
        return (self._ended.popleft(), None) if self._ended else None

    def give_back(self) -> None:
        """Tell the senders of arrays that they are not needed any more."""
        for peer, answer in self.large_messages.give_back():
            self._post(peer, answer)

    def _take_message(self, peer, message):
        if isinstance(message, Packed):
            descriptors = self._channels[peer].take_descriptors(len(message.segments))
            self._came.append((peer, message, descriptors))
        elif not self.large_messages.take_back(message):
            self._on_notice(peer, message)

    def _note_end(self, peer):
        self.large_messages.drop(peer)
        self._ended.append(peer)
        self._on_end_of_peer(peer)
