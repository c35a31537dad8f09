"""The messages between one process and its peers on the same machine, each through a socket.

Large arrays go through shared memory (`large_messages`). The end of a socket, after all that its
peer has sent, is the end of the peer.
"""

from __future__ import annotations

import collections
import os
import socket
import weakref
from typing import Any, Callable, Mapping

from synkhronos._machine.shared_memory import Segments
from synkhronos.comm.channel import Channel, Closed, WithDescriptors
from synkhronos.comm.shared.large_messages import LargeMessages, Packed


class Mail:
    """One process's end; its peers have numbers.

    `on_notice` takes the number of a peer, and a message that it has sent with `tell`; `on_end`
    takes the number of a peer that has ended.
    """

    def __init__(
        self,
        peers: Mapping[int, socket.socket],
        segments: Segments,
        on_notice: Callable[[int, Any], None],
        on_end: Callable[[int], None] = lambda number: None,
    ):
        self._on_notice, self._on_end = on_notice, on_end
        self._channels: dict[int, Channel] = {}
        self.peers: dict[int, int] = {}  # descriptor -> number of each peer that has not ended
        self._came: collections.deque[tuple[int, Any]] = collections.deque()
        self._ended: collections.deque[int] = collections.deque()  # that `take` has to return
        self.large_messages = LargeMessages(segments)
        # A forked process would keep the sockets open, and so hide the end of this one.
        channels = self._all = weakref.WeakSet[Channel]()
        os.register_at_fork(after_in_child=lambda: [each.close() for each in channels])
        for number, each in peers.items():
            self.add(number, each)

    def add(self, number: int, connection: socket.socket) -> None:
        """Exchange messages with one more peer."""
        channel = self._channels[number] = Channel(connection)
        self.peers[channel.fileno()] = number
        self._all.add(channel)

    @property
    def has_come(self) -> bool:
        """Whether `take` has something."""
        return bool(self._came or self._ended)

    @property
    def unsent(self) -> list[int]:
        """The descriptors of sockets that had no room for all that was sent."""
        return [each.fileno() for each in self._channels.values() if each.has_unsent]

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
            self._post(peer, *self.large_messages.pack(peer, message))

    def tell(self, peer: int, *notice: Any) -> None:
        """Send a small message, which goes to `on_notice` of the peer as soon as it comes."""
        if peer in self._channels:
            self._post(peer, notice)

    def _post(self, peer, packed, descriptors=()):
        try:
            self._channels[peer].post(packed, descriptors)
        except Closed:  # what the peer has sent can still be received
            self._channels[peer].discard()

    def take(self) -> tuple[int, tuple | None] | None:
        """Return the next (peer, message) that has come, without a message if the peer has ended.

        Arrays in it are views of the sender's memory until the next `give_back`.
        """
        if self._came:
            peer, packed = self._came.popleft()
            descriptors: list[int] = []
            if isinstance(packed, WithDescriptors):
                packed, descriptors = packed
            return peer, self.large_messages.unpack(peer, packed, descriptors)
        return (self._ended.popleft(), None) if self._ended else None

    def give_back(self) -> None:
        """Tell the senders of arrays that they are not needed any more."""
        for peer, answer in self.large_messages.give_back():
            if peer in self._channels:
                self._post(peer, answer)

    def read(self, descriptor: int) -> None:
        """Read what a peer has sent, and send what there is room for now."""
        peer = self.peers.get(descriptor)
        if peer is None:
            return
        channel = self._channels[peer]
        try:
            messages = channel.receive()
        except Closed:
            self._note_end(peer, channel)
            return
        for each in messages:
            packed = each.message if isinstance(each, WithDescriptors) else each
            if isinstance(packed, Packed):
                self._came.append((peer, each))
            elif not self.large_messages.take_back(packed):
                self._on_notice(peer, packed)
        self._flush(channel)

    def flush(self) -> None:
        """Send what there is room for now."""
        for channel in self._channels.values():
            if channel.has_unsent:
                self._flush(channel)

    @staticmethod
    def _flush(channel):
        try:
            channel.flush()
        except Closed:
            channel.discard()

    def _note_end(self, peer, channel):
        del self._channels[peer], self.peers[channel.fileno()]
        channel.close()
        self.large_messages.drop(peer)
        self._ended.append(peer)
        self._on_end(peer)

    def close(self) -> None:
        """Close all sockets."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        self.peers.clear()
