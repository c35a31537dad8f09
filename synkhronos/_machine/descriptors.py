"""The open files of a process: those that it inherits from the script, and its sockets."""

import contextlib
import logging
import os
import socket
import stat
import sys
from typing import Iterable, Iterator, List, Set

_STREAMS = {socket.SOCK_STREAM, socket.SOCK_SEQPACKET}
_LOCKS = {"FLOCK", "OFDLCK"}  # as /proc calls them


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


def tcp_sockets() -> List[int]:
    """Return this process's descriptors of TCP sockets."""
    found = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # that of the folder itself has been closed
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with _as_socket(fd) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        found.append(fd)
    return found


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
        with _as_socket(fd) as connection:
            return connection.type in _STREAMS
    with open(f"/proc/self/fdinfo/{fd}") as lines:
        # Of the file; those of a process (POSIX) are not inherited.
        return any(line.startswith("lock:") and _LOCKS & {*line.split()} for line in lines)


@contextlib.contextmanager
def _as_socket(fd) -> Iterator[socket.socket]:
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
