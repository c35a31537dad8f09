"""The open files that a process inherits from the script."""

import contextlib
import logging
import os
import socket
import stat
import sys
from typing import Iterable, Iterator, Set

_STREAMS = {socket.SOCK_STREAM, socket.SOCK_SEQPACKET}
_LOCKS = {"FLOCK", "OFDLCK"}  # as /proc calls them


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
        with _as_socket(fd) as connection:
            return connection.type in _STREAMS
    with open(f"/proc/self/fdinfo/{fd}") as lines:
        # Locks of the open file. POSIX locks belong to a process, and are not inherited.
        return any(line.startswith("lock:") and _LOCKS & {*line.split()} for line in lines)


@contextlib.contextmanager
def _as_socket(fd) -> Iterator[socket.socket]:
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
