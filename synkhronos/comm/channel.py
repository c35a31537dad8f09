"""Messages between two processes of one machine, over a Unix socket: any object that pickles.

File descriptors can go with a message. The system keeps their files open until the other end has
received them, even if the sender ends before.
"""

import array
import collections
import os
import pickle
import select
import socket
import struct
from typing import Any, List, NamedTuple

from synkhronos._machine.interrupts import raised_here

_HEADER = struct.Struct("QQ")  # number of bytes that follow, and of descriptors
_MOST_DESCRIPTORS = 64  # with one message
_SEND_AT_ONCE = 1 << 20  # bytes
_READS = 16  # at most, in one `receive`
_READ_AT_ONCE = 1 << 16  # bytes; the system would map a larger buffer anew for each read


class WithDescriptors(NamedTuple):
    """A message that came with descriptors, which the receiver has to close."""

    message: Any
    descriptors: List[int]


class Closed(Exception):
    """The other process has closed its end, or has ended."""


class Channel:
    """One end of a connection, a stream socket, which it owns; messages arrive in order, once."""

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._received = bytearray()
        self._unsent = bytearray()
        self._n_sent = 0  # bytes, since the start
        # (position in the stream of bytes to send, descriptors that go with the byte there)
        self._beside = collections.deque()
        self._descriptors = []  # received, of messages that are not complete
        connection.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor, for ``poll``."""
        return self._socket.fileno()

    @property
    def peer(self) -> int:
        """The process id of the end that listened; for the end that has connected to it."""
        return _credentials(self._socket)[0]

    def send(self, message) -> None:
        """Send a message; wait while the other end has no room for it.

        Raises
        ------
        Closed
            If the other end is closed.
        """
        self.post(message)
        while self._unsent:
            _wait_for(self._socket, select.POLLOUT, None)
            self.flush()

    def post(self, message, descriptors=()) -> None:
        """Send what there is room for now; `flush` sends the rest.

        The descriptors must stay open until all is sent.
        """
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        if descriptors:
            self._beside.append((self._n_sent + len(self._unsent), descriptors))
        self._unsent += _HEADER.pack(len(data), len(descriptors)) + data
        self.flush()

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` has something left to send."""
        return bool(self._unsent)

    def flush(self) -> None:
        """Send what there is room for."""
        try:
            while self._unsent:
                sent = self._send_some()
                del self._unsent[:sent]
                self._n_sent += sent
        except BlockingIOError:
            pass
        except raised_here(OSError) as error:
            raise Closed from error

    def _send_some(self):
        unsent = memoryview(self._unsent)
        try:
            if not self._beside:
                return self._socket.send(unsent[:_SEND_AT_ONCE])
            before = self._beside[0][0] - self._n_sent
            if before:
                return self._socket.send(unsent[: min(before, _SEND_AT_ONCE)])
            numbers = array.array("i", self._beside[0][1])
            beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)]
            end = self._beside[1][0] - self._n_sent if len(self._beside) > 1 else len(unsent)
            sent = self._socket.sendmsg([unsent[: min(end, _SEND_AT_ONCE)]], beside)
            self._beside.popleft()
            return sent
        finally:
            unsent.release()

    def discard(self) -> None:
        """Drop what was not sent."""
        self._unsent.clear()
        self._beside.clear()

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
                if len(data) < _READ_AT_ONCE:
                    break
        except BlockingIOError:
            pass
        except raised_here(OSError):
            ended = True
        messages, at, buffer = [], 0, self._received
        while len(buffer) - at >= _HEADER.size:
            length, n_descriptors = _HEADER.unpack_from(buffer, at)
            if len(buffer) - at - _HEADER.size < length:
                break
            at += _HEADER.size
            message = pickle.loads(memoryview(buffer)[at : at + length])
            if n_descriptors:
                beside = [self._descriptors.pop(0) for _ in range(n_descriptors)]
                message = WithDescriptors(message, beside)
            messages.append(message)
            at += length
        del buffer[:at]
        if ended and not messages:
            raise Closed
        return messages

    def _receive_some(self):
        room = socket.CMSG_SPACE(4 * _MOST_DESCRIPTORS)
        data, beside, _, _ = self._socket.recvmsg(_READ_AT_ONCE, room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in beside:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
                self._descriptors += numbers
        return data

    def wait(self, seconds=None) -> bool:
        """Wait up to `seconds` until something can be received; return whether it can."""
        return _wait_for(self._socket, select.POLLIN, seconds)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()


def _wait_for(connection, event, seconds):
    poll = select.poll()  # select.select takes no descriptor above 1023
    poll.register(connection, event)
    return bool(poll.poll(None if seconds is None else 1000 * seconds))


def is_own(connection: socket.socket) -> bool:
    """Return whether the other end is a process of this user; only then may it be unpickled."""
    return _credentials(connection)[1] == os.getuid()


def _credentials(connection):
    """Return the ids of the process at the other end, of its user and of its group."""
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))


def pair():
    """Return two sockets that are connected with each other."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
