"""The open files of a process: those that it inherits from the script, and its sockets."""

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
# State, milliseconds since data have come, bytes that have come: see tcp_info in linux/tcp.h.
_INFO, _LISTEN = struct.Struct("B51xI72xQ"), 10
_MOST_NUMBERS = 65_536


def leave_to_parent(kept: Iterable[int]) -> None:
    """Replace the script's pipes, connections and locked files by /dev/null, in a child.

    What the script closes would stay open in the child otherwise: a program that reads from a pipe
    would not see its end, a peer not that of a connection, and a lock (``flock``) would stay. The
    numbers stay taken: objects of the script, which may close them here, hit no other file.

    Descriptors that are `kept` stay, and the standard streams, copies of standard output and error,
    and those that logs are written to.
    """
    kept = {0, 1, 2, *kept, *_of_output()}
    standard = {_identity(fd) for fd in (1, 2)}
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # no descriptor is left: the worker will say so when it needs one
        return
    for fd in numbers:
        with contextlib.suppress(OSError):  # that of the folder itself has been closed
            if fd not in kept and _identity(fd) not in standard and _is_held_open(fd):
                os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)


class TcpSocket(NamedTuple):
    """A TCP socket: one that listens, or an end of a connection.

    Attributes
    ----------
    inode : int
        Its number, which the system gives to one file at a time.
    port : int
        Of this end.
    is_listening : bool
    n_received : int
        The bytes that have come.
    idle_seconds : float
        The time since the last ones, or since the connection began.
    """

    inode: int
    port: int
    is_listening: bool
    n_received: int
    idle_seconds: float

    @property
    def is_in_use(self) -> bool:
        """Whether it listens, or has received something."""
        return self.is_listening or self.n_received > 0


def tcp_sockets(numbers: Optional[Iterable[int]] = None) -> Dict[int, TcpSocket]:
    """Return the TCP sockets among this process's descriptors, or among some of these."""
    found = {}
    for fd in _open_numbers() if numbers is None else numbers:
        with contextlib.suppress(OSError, OverflowError):  # none has this number
            file = os.fstat(fd)
            if stat.S_ISSOCK(file.st_mode):
                with as_socket(fd) as of_fd:
                    if of_fd.family in (socket.AF_INET, socket.AF_INET6):
                        info = of_fd.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
                        # Linux before 4.1 does not say how much has come: much, so that it counts.
                        state, idle, n_received = _INFO.unpack(info.ljust(_INFO.size, b"\1"))
                        port, is_listening = of_fd.getsockname()[1], state == _LISTEN
                        found[fd] = TcpSocket(
                            file.st_ino, port, is_listening, n_received, idle / 1000
                        )
    return found


def _open_numbers():
    """Return the numbers of this process's descriptors; some more if none is left to look with."""
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return range(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _MOST_NUMBERS))


def _identity(fd):
    """Return what two descriptors of one file have in common."""
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _is_held_open(fd):
    """Return whether it is noticed elsewhere that a descriptor stays open."""
    mode = os.fstat(fd).st_mode
    if stat.S_ISFIFO(mode):
        return True
    if stat.S_ISSOCK(mode):
        with as_socket(fd) as connection:
            return connection.type in _STREAMS
    with open(f"/proc/self/fdinfo/{fd}") as lines:
        # Of the file; those of a process (POSIX) are not inherited.
        return any(line.startswith("lock:") and _LOCKS & {*line.split()} for line in lines)


@contextlib.contextmanager
def as_socket(fd) -> Iterator[socket.socket]:
    """Look at a socket, which stays open and as it is."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(None)  # else it would no longer block
    try:
        connection = socket.socket(fileno=fd)
    finally:
        socket.setdefaulttimeout(before)
    try:
        yield connection
    finally:
        connection.detach()


def _of_output() -> Set[int]:
    """Return the descriptors that this process prints and logs to: ranks do so, too."""
    found = _numbers(sys.stdout) | _numbers(sys.stderr)
    for logger in [logging.getLogger(), *logging.getLogger().manager.loggerDict.values()]:
        for handler in getattr(logger, "handlers", ()):
            target = getattr(handler, "target", None) or handler  # of a MemoryHandler
            for name in ("stream", "sock", "socket"):
                found |= _numbers(getattr(target, name, None))
            found |= _numbers(getattr(getattr(target, "queue", None), "_writer", None))
    return found


def _numbers(file):
    with contextlib.suppress(Exception):  # any object may stand for a stream
        return {file.fileno()}
    return set()
