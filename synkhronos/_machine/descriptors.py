"""The open files of a process: those that it inherits from the script, and its TCP sockets."""

import contextlib
import logging
import os
import resource
import socket
import stat
import struct
import sys
from typing import Dict, Iterable, Iterator, NamedTuple, Optional, Set

_STREAMS = {socket.SOCK_STREAM, socket.SOCK_SEQPACKET}
_LOCKS = {"FLOCK", "OFDLCK"}  # as /proc calls them
# Of tcp_info in linux/tcp.h: the state, milliseconds since the last data, bytes received.
_INFO, _LISTEN = struct.Struct("B51xI72xQ"), 10
_MOST_NUMBERS = 65_536


def leave_to_parent(kept: Iterable[int]) -> None:
    """Replace the script's pipes, connections and locked files by /dev/null, in a child.

    Otherwise readers and peers would not see the end when the script closes them, and locks would
    stay. Their numbers stay in use, so that objects of the script that close them close no other.

    The `kept` descriptors, the standard streams, their copies and the logs' files are not replaced.
    """
    kept = {0, 1, 2, *kept, *_of_output()}
    standard = {_identity(fd) for fd in (1, 2)}
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # no descriptor is left: the worker reports it when it needs one
        return
    for fd in numbers:
        with contextlib.suppress(OSError):  # that of /proc/self/fd is closed by now
            if fd not in kept and _identity(fd) not in standard and _is_held_open(fd):
                os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)


class TcpSocket(NamedTuple):
    """A TCP socket: one that listens, or an end of a connection."""

    inode: int  # identifies the socket while it is open
    port: int  # of this end
    is_listening: bool
    n_received: int  # bytes
    idle_seconds: float  # since the last data came, or since the connection began

    @property
    def is_in_use(self) -> bool:
        """Whether it listens, or has received something."""
        return self.is_listening or self.n_received > 0


def tcp_sockets(numbers: Optional[Iterable[int]] = None) -> Dict[int, TcpSocket]:
    """Return the TCP sockets among this process's descriptors, or among `numbers`."""
    sockets = {}
    for fd in _open_numbers() if numbers is None else numbers:
        with contextlib.suppress(OSError, OverflowError):  # none has this number
            file = os.fstat(fd)
            if stat.S_ISSOCK(file.st_mode):
                with as_socket(fd) as of_fd:
                    if of_fd.family in (socket.AF_INET, socket.AF_INET6):
                        info = of_fd.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
                        # Linux before 4.1 does not count bytes: take a large number, not zero.
                        state, idle, n_received = _INFO.unpack(info.ljust(_INFO.size, b"\1"))
                        facts = of_fd.getsockname()[1], state == _LISTEN, n_received, idle / 1000
                        sockets[fd] = TcpSocket(file.st_ino, *facts)
    return sockets


def _open_numbers():
    """Return this process's descriptors; all possible ones if none is left to list them with."""
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return range(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _MOST_NUMBERS))


def _identity(fd):
    """Return what two descriptors of one file have in common; None for a closed one."""
    with contextlib.suppress(OSError):
        status = os.fstat(fd)
        return status.st_dev, status.st_ino


def _is_held_open(fd):
    """Return whether other programs notice an open descriptor: a pipe, connection or lock."""
    mode = os.fstat(fd).st_mode
    if stat.S_ISFIFO(mode):
        return True
    if stat.S_ISSOCK(mode):
        with as_socket(fd) as connection:
            return connection.type in _STREAMS
    with open(f"/proc/self/fdinfo/{fd}") as lines:
        # Locks of the open file. POSIX locks belong to a process, and are not inherited.
        return any(line.startswith("lock:") and _LOCKS & {*line.split()} for line in lines)


@contextlib.contextmanager
def as_socket(fd) -> Iterator[socket.socket]:
    """Give a descriptor as a socket object in a with block; the socket stays open after it."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(None)  # a timeout would make the socket non-blocking
    try:
        connection = socket.socket(fileno=fd)
    finally:
        socket.setdefaulttimeout(before)
    try:
        yield connection
    finally:
        connection.detach()


def _of_output() -> Set[int]:
    """Return the descriptors that this process prints and logs to."""
    numbers = _numbers(sys.stdout) | _numbers(sys.stderr)
    for logger in [logging.getLogger(), *logging.getLogger().manager.loggerDict.values()]:
        for handler in getattr(logger, "handlers", ()):
            target = getattr(handler, "target", None) or handler  # of a MemoryHandler
            for name in ("stream", "sock", "socket"):
                numbers |= _numbers(getattr(target, name, None))
            numbers |= _numbers(getattr(getattr(target, "queue", None), "_writer", None))
    return numbers


def _numbers(file):
    """Return the descriptor of a file in a set, which is empty if it has none."""
    with contextlib.suppress(Exception):  # any object may stand for a stream
        return {file.fileno()}
    return set()
