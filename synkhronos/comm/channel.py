"""Messages between processes of one machine, over Unix sockets: any objects that pickle."""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
import time
from typing import Any, Callable, Mapping

from synkhronos._machine.interrupts import raised_here

_HEADER = struct.Struct("Q")  # number of bytes that follow
_SEND_AT_ONCE = 1 << 20  # bytes
_SPIN_SECONDS = 0.0005
_READS = 16  # at most, in one `receive`
READ_AT_ONCE = 1 << 16  # bytes; the system would map a larger buffer anew for each read


class Closed(Exception):
    """The other process has closed its end, or has ended."""


class Channel:
    """One end of a connection, a stream socket, which it owns; messages arrive in order, once."""

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._received = bytearray()
        self._unsent = bytearray()
        connection.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor, for ``poll``."""
        return self._socket.fileno()

    @property
    def peer(self) -> int:
        """The process id of the end that listened; for the end that has connected to it."""
        return _credentials(self._socket)[0]

    def send(self, message) -> None:
        """Send a message; wait while the other end has no room for it; raise Closed if it ends."""
        self.post(message)
        while self._unsent:
            _wait_for(self._socket, select.POLLOUT, None)
            self.flush()

    def post(self, message) -> None:
        """Send what there is room for now; `flush` sends the rest."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._unsent += _HEADER.pack(len(data)) + data
        self.flush()

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` has something left to send."""
        return bool(self._unsent)

    def flush(self) -> None:
        """Send what there is room for."""
        try:
            while self._unsent:
                with memoryview(self._unsent)[:_SEND_AT_ONCE] as unsent:
                    sent = self._send_some(unsent)
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except raised_here(OSError) as error:
            raise Closed from error

    def _send_some(self, data: memoryview) -> int:
        return self._socket.send(data)

    def discard(self) -> None:
        """Drop what was not sent."""
        self._unsent.clear()

    def receive(self):
        """Return the messages that have arrived; if there are very many, the first of them."""
        ended = False
        try:
            for _ in range(_READS):  # a peer that keeps sending must not hold up the caller
                data = self._receive_some()
                if not data:
                    ended = True
                    break
                self._received += data
                if len(data) < READ_AT_ONCE:
                    break
        except BlockingIOError:
            pass
        except raised_here(OSError):
            ended = True
        messages, at, buffer = [], 0, self._received
        while len(buffer) - at >= _HEADER.size:
            [length] = _HEADER.unpack_from(buffer, at)
            if len(buffer) - at - _HEADER.size < length:
                break
            at += _HEADER.size
            messages.append(pickle.loads(memoryview(buffer)[at : at + length]))
            at += length
        del buffer[:at]
        if ended and not messages:
            raise Closed
        return messages

    def _receive_some(self) -> bytes:
        return self._socket.recv(READ_AT_ONCE)

    def wait(self, seconds=None) -> bool:
        """Wait up to `seconds` until something can be received; return whether it can."""
        return _wait_for(self._socket, select.POLLIN, seconds)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


class Mail:
    """The messages between one process and its peers, each through a socket; peers have numbers.

    `on_message` takes the number of a peer, and a message that it has sent. The end of a socket,
    after all that its peer has sent, is the end of the peer: `on_end` takes its number.
    """

    kind: type[Channel] = Channel

    def __init__(self, peers: Mapping[int, socket.socket], on_message: Callable, on_end: Callable):
        self._on_message, self._on_end = on_message, on_end
        self._channels: dict[int, Any] = {}
        self.peers: dict[int, int] = {}  # descriptor -> number of each peer that has not ended
        for number, each in peers.items():
            self.add(number, each)

    def add(self, number: int, connection: socket.socket) -> None:
        """Exchange messages with one more peer."""
        channel = self._channels[number] = self.kind(connection)
        self.peers[channel.fileno()] = number

    @property
    def unsent(self) -> list[int]:
        """The descriptors of sockets that had no room for all that was sent."""
        return [each.fileno() for each in self._channels.values() if each.has_unsent]

    def tell(self, peer: int, *message: Any) -> None:
        """Send a message; to a peer that has ended nothing is sent."""
        self._post(peer, message)

    def _post(self, peer, *message):
        if peer in self._channels:
            try:
                self._channels[peer].post(*message)
            except Closed:  # what the peer has sent can still be received
                self._channels[peer].discard()

    def read(self, descriptor: int) -> None:
        """Read what a peer has sent, and send what there is room for now."""
        peer = self.peers.get(descriptor)
        if peer is None:
            return
        channel = self._channels[peer]
        try:
            messages = channel.receive()
        except Closed:
            del self._channels[peer], self.peers[descriptor]
            channel.close()
            self._on_end(peer)
            return
        for each in messages:
            self._on_message(peer, each)
        _flush(channel)

    def flush(self) -> None:
        """Send what there is room for now."""
        for channel in self._channels.values():
            if channel.has_unsent:
                _flush(channel)

    def close(self) -> None:
        """Close all sockets."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        self.peers.clear()


def _flush(channel):
    try:
        channel.flush()
    except Closed:
        channel.discard()


def _wait_for(connection, event, seconds):
    poll = select.poll()  # select.select takes no descriptor above 1023
    poll.register(connection, event)
    return bool(poll.poll(None if seconds is None else 1000 * seconds))


def poll_awake(poll: Any, seconds: float) -> list[tuple[int, int]]:
    """Return what ``poll.poll`` does, at first awake: what a call waits for often comes soon."""
    spins_until = time.monotonic() + _SPIN_SECONDS
    while not (found := poll.poll(0)) and time.monotonic() < spins_until:
        os.sched_yield()
    return found or poll.poll(1000 * max(seconds, 0.0))


def is_own(connection: socket.socket) -> bool:
    """Return whether the other end is a process of this user; only then may it be unpickled."""
    return _credentials(connection)[1] == os.getuid()


def _credentials(connection):
    """Return the ids of the process at the other end, of its user and of its group."""
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
