"""Segments of POSIX shared memory, seen as numpy arrays.

    create: open without a name -> reserve -> map     (the owner)
    attach: open the owner's descriptor -> map        (any rank that was sent a SegmentRef)

A segment has no name, so nothing can be left in ``/dev/shm``, whatever kills us. Where the system
can't do that, posix_ipc makes one with a name that is taken away at once.
Other ranks reach it through the descriptor that its owner keeps open, ``/proc/<pid>/fd/<fd>``. The
memory is given back when the owner's last view goes, also while others still have it mapped.
"""

import contextlib
import errno
import itertools
import mmap
import os
import re
import resource
import secrets
import weakref
from pathlib import Path
from typing import Dict, NamedTuple, Optional, Tuple

import numpy as np
import posix_ipc

from synkhronos._machine.interrupts import interrupts_held
from synkhronos.errors import SharedMemoryFull

SHARED_MEMORY = "/dev/shm"

_serials = itertools.count()


@contextlib.contextmanager
def _descriptors_told():
    """Say it in words where there is no descriptor left."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        whose = f"This process has no file descriptor left of its {_limit():,}"
        if error.errno == errno.ENFILE:
            whose = "This machine has no file descriptor left"
        raise SharedMemoryFull(
            f"{whose}. Each Data takes two in the master and one in a worker, and so does what "
            "else is in shared memory. Free some Data (free_memory()), or raise the limit "
            "(ulimit -n) and start again."
        ) from error


def _limit():
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class SegmentRef(NamedTuple):
    """What travels in place of a segment. The serial tells apart uses of one descriptor."""

    pid: int
    fd: int
    serial: int
    nbytes: int


class ArrayRef(NamedTuple):
    """What travels in place of an array that begins where its segment begins."""

    segment: SegmentRef
    dtype: str
    shape: Tuple[int, ...]


class Segment:
    """A block of shared memory: created by one rank, attached by others."""

    def __init__(self, ref: SegmentRef, memory: mmap.mmap):
        self.ref = ref
        self._memory = memory

    @classmethod
    def attach(cls, ref: SegmentRef) -> "Segment":
        """Map the segment that `ref` stands for."""
        with interrupts_held():
            fd = os.open(f"/proc/{ref.pid}/fd/{ref.fd}", os.O_RDWR | os.O_CLOEXEC)
            try:
                return cls(ref, mmap.mmap(fd, ref.nbytes))
            finally:
                os.close(fd)

    def array(self, dtype, shape, offset=0) -> np.ndarray:
        """Return a view. It keeps the memory alive for as long as it lives."""
        return np.ndarray(shape, dtype, self._memory, offset)

    def reference(self, dtype, shape) -> ArrayRef:
        """Return what stands for `array(dtype, shape)` on other ranks."""
        return ArrayRef(self.ref, np.dtype(dtype).str, tuple(shape))


class Segments:
    """The segments that one rank knows: its own, and those of others that it has attached.

    Parameters
    ----------
    on_release : callable, optional
        Called with the SegmentRef and a function that gives the memory back, when the last view
        of an own segment has gone. It runs wherever the garbage collector does. By default the
        memory is given back at once.
    on_lost : callable, optional
        Called when the segment of another rank can't be opened, to raise what is behind it.
    """

    def __init__(self, on_release=None, on_lost=None):
        self._own = weakref.WeakValueDictionary()
        self._attached = {}
        self._on_release = on_release or (lambda ref, give_back: give_back())
        self._on_lost = on_lost or (lambda: None)

    def create(self, nbytes: int) -> Segment:
        """Make a zero-filled segment, with its memory reserved.

        Raises
        ------
        SharedMemoryFull
            When the machine has no room for it, or no descriptor.
        """
        nbytes = max(nbytes, 1)
        with _descriptors_told(), interrupts_held():  # or a descriptor could be lost
            fd = _reserve(nbytes)
            try:
                memory = mmap.mmap(fd, nbytes)
            except BaseException:
                os.close(fd)
                raise
            ref = SegmentRef(os.getpid(), fd, next(_serials), nbytes)
            segment = self._own[ref] = Segment(ref, memory)
            # Views hold the map, not the Segment, so the map's end is the end of the last view.
            end = weakref.finalize(memory, _release, ref, self._on_release)
            end.atexit = False
        return segment

    def attach(self, ref: SegmentRef) -> Segment:
        """Return the segment that `ref` stands for, mapping it on first sight."""
        segment = self._attached.get(ref) or self._own.get(ref)
        if segment is None:
            segment = self._attached[ref] = self.open(ref)
        return segment

    def open(self, ref: SegmentRef) -> Segment:
        """Map the segment of another rank; whoever holds on to it is the caller's to know."""
        try:
            with _descriptors_told():
                return Segment.attach(ref)
        except OSError:
            self._on_lost()
            raise

    def forget(self, refs) -> None:
        """Drop attachments whose owner has released them."""
        for ref in refs:
            self._attached.pop(ref, None)


def is_in_a_segment(array) -> bool:
    """Return whether an array is a view of a segment."""
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array, mmap.mmap)


_MAPPED = re.compile(r"/dev/shm/(#|synkhronos-)\S* \(deleted\)")


def mapped_by(pid: int) -> Optional[Dict[int, int]]:
    """Return the bytes of each segment that a process has mapped, by the number of its inode.

    A map keeps its file open, so it is looked for there. None where the system does not tell.
    """
    found: Dict[int, int] = {}
    try:
        paths = list(Path(f"/proc/{pid}/fd").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return found
    except OSError:
        return None
    for path in paths:
        try:
            if _MAPPED.fullmatch(os.readlink(path)):
                found[path.stat().st_ino] = path.stat().st_size
        except OSError:
            continue  # closed by now
    return found


def _open_unnamed() -> int:
    """Return the descriptor of a new, empty piece of shared memory that has no name."""
    try:
        # On Linux it never has one, so that not even a SIGKILL just now could leave it behind.
        flags = os.O_TMPFILE | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
        return os.open(SHARED_MEMORY, flags, 0o600)
    except AttributeError:
        pass
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EISDIR, errno.EOPNOTSUPP, errno.EINVAL):
            raise
    created = posix_ipc.SharedMemory(
        "/synkhronos-" + secrets.token_hex(16), posix_ipc.O_CREX, mode=0o600
    )
    created.unlink()
    return created.fd


def _reserve(nbytes: int) -> int:
    fd = _open_unnamed()
    try:
        os.fchmod(fd, 0o600)  # whatever the umask has left of it: other ranks open it by its mode
        # Untouched pages would be handed out later or not at all (SIGBUS): take them all now.
        os.posix_fallocate(fd, 0, nbytes)
    except (OSError, OverflowError) as error:
        os.close(fd)
        if isinstance(error, OSError) and error.errno not in (
            errno.ENOSPC,
            errno.ENOMEM,
            errno.EFBIG,
        ):
            raise
        free = os.statvfs(SHARED_MEMORY)
        raise SharedMemoryFull(
            f"No room for {nbytes:,} bytes of shared memory: {SHARED_MEMORY} has "
            f"{free.f_bavail * free.f_frsize:,} bytes free. Free some Data (free_memory()), or "
            "give the machine more (in Docker: --shm-size)."
        ) from error
    except BaseException:
        os.close(fd)
        raise
    return fd


def _release(ref: SegmentRef, on_release) -> None:
    # A forked child inherits the object but not the ownership.
    if ref.pid == os.getpid():
        with interrupts_held():
            on_release(ref, lambda: _give_back(ref.fd))


def _give_back(fd: int) -> None:
    os.ftruncate(fd, 0)  # returns the pages now, though other ranks have them mapped
    os.close(fd)
