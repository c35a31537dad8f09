"""The open files that a forked process inherits from the script."""

import contextlib
import logging
import os
import socket
import stat
from typing import Iterable, Set

_STREAMS = {socket.SOCK_STREAM, socket.SOCK_SEQPACKET}


def leave_to_parent(kept: Iterable[int]) -> None:
    """Replace the script's pipes, connections and locked files by /dev/null, in a child.

    What the script closes would stay open in the child otherwise: a program that reads from a pipe
    would not see its end, a peer not that of a connection, and a lock (``flock``) would stay. The
    numbers stay taken: objects of the script, which may close them here, hit no other file.

    Parameters
    ----------
    kept : iterable of int
        Descriptors that stay, beside the standard streams, their copies, and those that the log
        is written to.
    """
    kept = {0, 1, 2, *kept, *_of_the_log()}
    standard = {_identity(fd) for fd in (1, 2)}
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        for name in os.listdir("/proc/self/fd"):
            fd = int(name)
            with contextlib.suppress(OSError):  # that of the folder itself has been closed
                if fd not in kept and _identity(fd) not in standard and _is_held_open(fd):
                    os.dup2(nothing, fd, inheritable=False)
    finally:
        os.close(nothing)


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
        connection = socket.socket(fileno=fd)
        try:
            return connection.type in _STREAMS
        finally:
            connection.detach()
    with open(f"/proc/self/fdinfo/{fd}") as lines:
        return any(line.startswith("lock:") and "FLOCK" in line for line in lines)


def _of_the_log() -> Set[int]:
    """Return the descriptors that handlers of the log write to: ranks write to the log, too."""
    found = set()
    for logger in (logging.getLogger("synkhronos"), logging.getLogger()):
        for handler in logger.handlers:
            queue = getattr(handler, "queue", None)
            for name in ("stream", "sock", "socket"):
                found |= _numbers(getattr(handler, name, None))
            found |= _numbers(getattr(queue, "_writer", None))
    return found


def _numbers(file):
    with contextlib.suppress(AttributeError, OSError, ValueError, TypeError):
        return {file.fileno()}
    return set()
