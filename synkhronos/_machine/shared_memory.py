"""Segments of POSIX shared memory, seen as numpy arrays.

    create: open without a name -> reserve -> map        (the owner)
    attach: open the owner's descriptor -> check -> map  (any rank that was sent a SegmentRef)

A segment has no name, so nothing is left in ``/dev/shm``, however its processes end. If the system
can't make one without a name, posix_ipc makes a named segment, and the name is removed at once.

Lifetimes:

=============  =================================================================================
owner          has created the segment, and keeps its descriptor open while it has a view: other
               ranks open ``/proc/<pid>/fd/<fd>`` to attach the segment
memory         is freed when the owner truncates the file, after its last view is gone; see
               ``on_release``. A rank that still has the segment mapped must not read it any
               more (``SIGBUS``), and drops the map when it sees that: `Segment.is_freed`. After
               `Segments.leave` the owner only closes the file: the last map keeps the memory
maps           exist in other ranks while these keep the `Segment` or a view
owner's death  closes the descriptor, so that no rank can attach the segment any more. The kernel
               frees the memory when the last map is gone
=============  =================================================================================
"""

import contextlib
import errno
import functools
import itertools
import mmap
import os
import re
import resource
import secrets
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Callable, Dict, NamedTuple, Optional, Tuple

import numpy as np
import posix_ipc

from synkhronos._machine import private_copies, processes
from synkhronos._machine.interrupts import interrupts_held, raised_here
from synkhronos.errors import SessionError, SharedMemoryFull

SHARED_MEMORY = "/dev/shm"

_serials = itertools.count()


def check_sharing() -> None:
    """Raise SessionError if this process and those that it forks can't share memory."""
    try:
        processes.number_in_proc()
    except raised_here(OSError) as error:
        raise SessionError(
            f"fork() needs a /proc that shows this process, because ranks open the memory of one "
            f"another there: {error}. Mount one: mount -t proc proc /proc, or unshare --mount-proc."
        ) from error
    if processes.is_closed_to_others():
        raise SessionError(
            "fork() can't let ranks open the memory of one another: this process has changed its "
            "user, or runs with capabilities, and so the system refuses its /proc/<pid>/fd to "
            "other processes. Change the user before Python starts (setpriv, su, sudo -u), or call "
            "prctl(PR_SET_DUMPABLE, 1)."
        )
    try:
        segment = Segments().create(1)
        Segment.attach(segment.ref)
    except SharedMemoryFull:
        pass  # there may be room later
    except raised_here(OSError) as error:
        raise SessionError(
            f"fork() can't make shared memory and open it again: {error}. It takes a tmpfs on "
            f"{SHARED_MEMORY} that this user may write to, and a /proc that shows open files; "
            "`synkhronos info` checks them."
        ) from error


@contextlib.contextmanager
def _lack_of_descriptors_or_addresses_explained():
    """Turn an OSError for lack of descriptors or addresses into SharedMemoryFull, with advice."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise SharedMemoryFull(
                "This process can't map more memory: it has no address left (ulimit -v), or too "
                "many maps (sysctl vm.max_map_count). Free some Data (free_memory()), or raise "
                "the limit and start again."
            ) from error
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        whose = f"This process has no file descriptor left of its {limit:,}"
        if error.errno == errno.ENFILE:
            whose = "This machine has no file descriptor left"
        raise SharedMemoryFull(
            f"{whose}. Each Data takes two in the master and one in a worker, and all shared "
            "variables together a few for each rank. Free some Data (free_memory()), or raise the "
            "limit (ulimit -n) and start again."
        ) from error


class SegmentRef(NamedTuple):
    """Refers to a segment in messages; valid while the owner keeps its descriptor open."""

    pid: int  # of the owner in /proc
    fd: int  # the owner's descriptor
    serial: int  # tells segments apart that have the same descriptor, one after another
    nbytes: int
    device: int  # with the inode: shows whether an opened file is the segment
    inode: int


class ArrayRef(NamedTuple):
    """Refers to an array in a segment, in messages."""

    segment: SegmentRef
    dtype: str
    shape: Tuple[int, ...]
    offset: int = 0  # bytes from the beginning of the segment


def nbytes_of(dtype: str, shape: Tuple[int, ...]) -> int:
    """Return the bytes of an array."""
    return int(np.dtype(dtype).itemsize * np.prod(shape, dtype=np.int64))


class Segment:
    """A block of shared memory: created by one rank, attached by others."""

    def __init__(self, ref: SegmentRef, memory: mmap.mmap):
        self.ref = ref
        self._memory = memory  # unmapped when the Segment and all views, which hold it, are gone

    @classmethod
    def attach(cls, ref: SegmentRef) -> "Segment":
        """Map the segment that `ref` refers to; raise OSError if the descriptor is another file."""
        path = f"/proc/{ref.pid}/fd/{ref.fd}"
        with interrupts_held():
            # O_NONBLOCK: it may be a pipe or a device of another process.
            fd = _open(lambda: os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
            try:
                file = os.fstat(fd)
                if (file.st_dev, file.st_ino) != (ref.device, ref.inode):
                    raise OSError(
                        errno.ESTALE,
                        "This is no memory of the session, but a file of another process. The "
                        "ranks must see the same /proc (unshare --mount-proc)",
                        path,
                    )
                return cls(ref, mmap.mmap(fd, ref.nbytes))
            finally:
                os.close(fd)  # the map has a duplicate of its own

    def array(self, dtype, shape, offset=0) -> np.ndarray:
        """Return a view, which keeps the memory mapped while it exists."""
        return np.ndarray(shape, dtype, self._memory, offset)

    def copy_for_children(self) -> None:
        """Let processes that the script forks have a private copy."""
        private_copies.copy_for_children(self._memory)

    def reference(self, dtype, shape, offset=0) -> ArrayRef:
        """Return the reference to ``array(dtype, shape, offset)`` for messages."""
        return ArrayRef(self.ref, np.dtype(dtype).str, tuple(shape), offset)

    @property
    def is_freed(self) -> bool:
        """Whether the owner has truncated the memory."""
        return self._memory.size() == 0  # the size of the file, not of the map


class Segments:
    """The segments of one rank: those that it has created, and those that it has attached.

    When the last view of a created segment is gone, a finalizer calls ``on_release(ref, free)``, at
    any moment and in any thread; by default it frees the memory. `on_lost` is called if another
    rank's segment can't be opened. If `has_data` returns true, errors advise to free Data.
    """

    def __init__(self, on_release=None, on_lost=None):
        self._created = weakref.WeakValueDictionary()  # weak: their views keep the memory
        self._attached = {}  # kept until `forget`
        self._on_release = on_release or (lambda ref, give_back: give_back())
        self._on_lost = on_lost or (lambda: None)
        # Whether other processes may use the memory. Finalizers hold it: self would keep the maps.
        self._sharing = SimpleNamespace(is_left=False)
        self.has_data = lambda: False

    def create(self, nbytes: int) -> Segment:
        """Make a zero-filled segment, with its memory reserved, or raise SharedMemoryFull."""
        nbytes = max(nbytes, 1)
        with _lack_of_descriptors_or_addresses_explained(), interrupts_held():
            # Else a Ctrl-C before the finalizer exists would leak the descriptor and the memory.
            owner = processes.number_in_proc()
            fd = _reserve(nbytes, self.has_data)
            try:
                file = os.fstat(fd)
                memory = mmap.mmap(fd, nbytes)
            except BaseException:
                os.close(fd)
                raise
            ref = SegmentRef(owner, fd, next(_serials), nbytes, file.st_dev, file.st_ino)
            segment = self._created[ref] = Segment(ref, memory)
            # Runs when the map is deallocated, which is after the last view is gone.
            release = _release, os.getpid(), ref, self._on_release, self._sharing
            weakref.finalize(memory, *release).atexit = False  # at exit the kernel frees all
        return segment

    def attach(self, ref: SegmentRef) -> Segment:
        """Return the segment that `ref` refers to: mapped once, and kept until `forget`."""
        segment = self._attached.get(ref) or self._created.get(ref)
        if segment is None:
            segment = self._attached[ref] = self.open(ref)
        return segment

    def adopt(self, ref: SegmentRef, descriptor: int) -> Segment:
        """Map the segment whose descriptor came with a message; keep it until `forget`."""
        try:
            segment = self._attached.get(ref) or self._created.get(ref)
            if segment is None:
                with _lack_of_descriptors_or_addresses_explained():
                    memory = mmap.mmap(descriptor, ref.nbytes)
                segment = self._attached[ref] = Segment(ref, memory)
            return segment
        finally:
            os.close(descriptor)

    def open(self, ref: SegmentRef) -> Segment:
        """Map the segment of another rank. Not cached: the caller keeps it alive."""
        try:
            with _lack_of_descriptors_or_addresses_explained():
                return Segment.attach(ref)
        except OSError:
            self._on_lost()
            raise

    def forget(self, refs) -> None:
        """Drop segments that their owners have released; remaining views keep them mapped."""
        for ref in refs:
            self._attached.pop(ref, None)

    def forget_freed(self) -> None:
        """Drop the segments that their owners have truncated."""
        self.forget([ref for ref, segment in self._attached.items() if segment.is_freed])

    def forget_all(self) -> None:
        """Drop all segments of other ranks; remaining views keep them mapped."""
        self._attached.clear()

    def leave(self) -> None:
        """Never truncate created segments from now on: another process may use them."""
        self._sharing.is_left = True


def is_in_a_segment(array) -> bool:
    """Return whether an array is a view of a segment."""
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array, mmap.mmap)


_MAPPED = re.compile(r"/dev/shm/(#|synkhronos-)\S* \(deleted\)")


def mapped_by(pid: int) -> Optional[Dict[int, int]]:
    """Return {inode: bytes} of the segments that a process has mapped; None if it can't be seen."""
    sizes: Dict[int, int] = {}
    if not processes.proc_has_our_numbers():
        return None
    try:
        paths = list(Path(f"/proc/{pid}/fd").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return sizes
    except raised_here(OSError):
        return None
    for path in paths:
        try:
            if _MAPPED.fullmatch(os.readlink(path)):
                sizes[path.stat().st_ino] = path.stat().st_size
        except raised_here(OSError):
            continue  # the process has closed it since
    return sizes


def _open(make) -> int:
    """Return a descriptor above 2, which `make` opens: C code prints to 1 and 2 in any case."""
    fd = make()
    if fd > 2:
        return fd
    os.close(fd)
    processes.take_standard_streams()
    return make()


def _open_unnamed() -> int:
    """Return the descriptor of a new, empty piece of shared memory that has no name."""
    try:
        # On Linux the file never has a name, so even a SIGKILL here leaves nothing behind.
        flags = os.O_TMPFILE | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
        return os.open(SHARED_MEMORY, flags, 0o600)
    except AttributeError:
        pass
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EISDIR, errno.EOPNOTSUPP, errno.EINVAL):
            raise
    try:
        created = posix_ipc.SharedMemory(
            "/synkhronos-" + secrets.token_hex(16), posix_ipc.O_CREX, mode=0o600
        )
    except posix_ipc.Error as error:  # it is no OSError, and does not say where
        raise OSError(f"{SHARED_MEMORY}: {error}") from error
    created.unlink()  # a SIGKILL between these two lines leaves the segment in /dev/shm
    return created.fd


def _reserve(nbytes: int, has_data: Callable[[], bool]) -> int:
    with _lack_of_room_explained(nbytes, has_data):
        fd = _open(_open_unnamed)
        try:
            os.fchmod(fd, 0o600)  # other ranks need permissions that the umask may have removed
            # Reserve all pages now: otherwise the system would provide each at its first use, and
            # send SIGBUS to the process if no memory is left.
            os.posix_fallocate(fd, 0, nbytes)
        except BaseException:
            os.close(fd)
            raise
    return fd


@contextlib.contextmanager
def _lack_of_room_explained(nbytes, has_data):
    """Turn an error for lack of room into SharedMemoryFull, with advice."""
    try:
        yield
    except (OSError, OverflowError) as error:
        number = error.errno if isinstance(error, OSError) else errno.ENOSPC
        if number not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT):
            raise
        largest = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        if number == errno.EFBIG and 0 <= largest < nbytes:
            raise SharedMemoryFull(
                f"No room for {nbytes:,} bytes of shared memory: this process may make files of "
                f"at most {largest:,} bytes, and shared memory is a file. Raise the limit "
                "(ulimit -f) and start again."
            ) from error
        disk = os.statvfs(SHARED_MEMORY)
        lacks = f"{disk.f_bavail * disk.f_frsize:,} bytes free"
        if disk.f_files and not disk.f_favail:
            lacks = "no file left that can be made (inodes)"
        elif number == errno.EDQUOT:
            lacks = "a quota for this user, which is used up"
        advice = "Use smaller arrays (fewer rows in each call)"
        if has_data():
            advice = "Free some Data (free_memory())"
        raise _full(
            f"No room for {nbytes:,} bytes of shared memory: {SHARED_MEMORY} has {lacks}. "
            f"{advice}, or give the machine more (in Docker: --shm-size)."
        ) from error


def _full(message):
    # A variable of the raising frame would make a cycle, which keeps the memory of callers.
    error = SharedMemoryFull(message)
    error._lacks_room = True
    return error


def _release(owner: int, ref: SegmentRef, on_release, sharing) -> None:
    # A process that the script forks from the owner inherits the object, but not the memory.
    if owner == os.getpid():
        free = functools.partial(_give_back, ref.fd, sharing)
        has_begun = False
        try:
            with interrupts_held():  # Python prints and drops exceptions of a finalizer
                has_begun = True
                on_release(ref, free)
        finally:
            if not has_begun:  # a signal came while the block began
                on_release(ref, free)


def _give_back(fd: int, sharing: SimpleNamespace) -> None:
    if not sharing.is_left:
        os.ftruncate(fd, 0)  # frees the pages, even if other ranks still have them mapped
    os.close(fd)  # from now on the number may be another file's: see `SegmentRef.serial`
