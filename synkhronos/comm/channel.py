"""Messages between two processes of one machine, over a Unix socket: any object that pickles."""

import os
import pickle
import select
import socket
import struct

from synkhronos._machine.interrupts import raised_here

_HEADER = struct.Struct("Q")
_AT_ONCE = 1 << 20  # bytes


class Closed(Exception):
    """The other process has closed its end, or has ended."""


class Channel:
    """One end of a pair; messages arrive in order, none twice.

    Parameters
    ----------
    connection : socket.socket
        A stream socket. The channel owns it.
    """

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
        """The id of the process that listened, on the end that has connected to it."""
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
                sent = self._socket.send(memoryview(self._unsent)[:_AT_ONCE])
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except raised_here(OSError) as error:
            raise Closed from error

    def receive(self):
        """Return a list of the messages that have come since."""
        ended = False
        try:
            while True:
                data = self._socket.recv(_AT_ONCE)
                if not data:
                    ended = True
                    break
                self._received += data
                if len(data) < _AT_ONCE:
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

    def wait(self, seconds=None) -> bool:
        """Wait until something can be received, at most so long; return whether it can."""
        return _wait_for(self._socket, select.POLLIN, seconds)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def _wait_for(connection, event, seconds):
    poll = select.poll()  # select.select takes no descriptor above 1023
    poll.register(connection, event)
    return bool(poll.poll(None if seconds is None else 1000 * seconds))


def is_own(connection: socket.socket) -> bool:
    """Return whether the process at the other end is of this user; what it sends is unpickled."""
    return _credentials(connection)[1] == os.getuid()


def _credentials(connection):
    """Return process, user and group of the other end: that has connected, or that listens."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return struct.unpack("3i", found)


def pair():
    """Return two sockets that are connected with one another."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
