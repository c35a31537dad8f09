"""Memory, pipes and locks of a gate: the master makes them, and the workers inherit them.

    cells     the master's, then one cache line for each rank: integers, each written by one rank
    labels    one for each rank, in which it says what it is
    mailbox   the master's new command
    replies   one buffer for each rank: its answer or its error
    boards    one buffer for each rank, in which it tells all others where its arrays are

The memory is made before the fork. Pages that no rank writes to take no memory. It is freed when
the last process that has inherited it has ended or dropped it. `synkhronos top` finds it by its
name in /proc/<pid>/fd, and reads cells and labels. The name has a number: whoever changes cells or
labels changes the number.
"""

import ctypes
import mmap
import os
import threading
import weakref

import numpy as np

from synkhronos._machine.processes import make_pipe

NAME = "synkhronos-ranks-1"
LABEL = 256  # bytes for each rank
MAILBOX = 1 << 20  # bytes
REPLY = 1 << 16  # bytes for each rank
BOARD = 1 << 21  # bytes for each rank

# The master's cells: the number of the last call, the slot of its command, the command's length in
# the mailbox (0 for a command that the workers know), the number of the last aborted call, the
# first row that the call selects and the one after the last, the time until which ranks don't spin,
# and the length of the last such pause (see `spinning`). All ranks write ABORT, CROWDED and PAUSE.
SEQUENCE, SLOT, LENGTH, ABORT, BEGIN, END, CROWDED, PAUSE = range(8)
# A rank's cells: the last call that it has finished, the cell that it sleeps for plus one (0 if it
# is awake, ELSEWHERE if it waits for another machine), the kind and length of its reply, the number
# of rows that it has computed, its last meeting, how far its board is written, and its vote.
DONE, ASLEEP, REPLY_KIND, REPLY_LENGTH, ROWS, MET, NEWS, VOTE = range(8)
LINE = 8  # cells of a rank, 64 bytes: ranks that write to one cache line slow each other down
# MET is the number of the call, shifted by so many bits, plus the meetings of the call.
MEETINGS = 20
NO_REPLY, ANSWER, ERROR = range(3)
ELSEWHERE = -1


class GateMemory:
    """The shared cells and buffers of one gate. Views of them keep the memory mapped.

    `file` is a descriptor from `make_file`, which `synkhronos top` sees while it is open.
    """

    def __init__(self, n_ranks: int, file: int = -1):
        size = 8 * LINE * (n_ranks + 1)
        nbytes = self.nbytes(n_ranks)
        self._all = memoryview(mmap.mmap(-1, nbytes) if file < 0 else _map(file, nbytes))
        self.cells = self._all[:size].cast("q")
        self.labels = self._split(size, LABEL, n_ranks)
        size += LABEL * n_ranks
        self.mailbox = self._all[size : size + MAILBOX]
        self.replies = self._split(size + MAILBOX, REPLY, n_ranks)
        self.boards = self._split(size + MAILBOX + REPLY * n_ranks, BOARD, n_ranks)

    @staticmethod
    def nbytes(n_ranks: int) -> int:
        """Return the size of the memory for so many ranks."""
        return 8 * LINE * (n_ranks + 1) + MAILBOX + (LABEL + REPLY + BOARD) * n_ranks

    def _split(self, begin, length, count):
        return [self._all[begin + length * i : begin + length * (i + 1)] for i in range(count)]


def _map(file, nbytes):
    """Return a map of a file as an array, which takes no descriptor, other than Python's mmap.

    Functions of a closed session keep the map.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    number, size = ctypes.c_int, ctypes.c_size_t
    libc.mmap.argtypes = ctypes.c_void_p, size, number, number, number, ctypes.c_long
    libc.mmap.restype = ctypes.c_void_p
    libc.munmap.argtypes = ctypes.c_void_p, size
    address = libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(memory, libc.munmap, address, nbytes).atexit = False  # views hold `memory`
    return np.frombuffer(memory, np.uint8)


def make_file(n_ranks: int) -> int:
    """Return the descriptor of memory for so many ranks: a file that is in no folder."""
    file = os.memfd_create(NAME, os.MFD_CLOEXEC)
    try:
        os.fchmod(file, 0o600)
        os.ftruncate(file, GateMemory.nbytes(n_ranks))
    except OSError:  # such as a limit of the size of files
        os.close(file)
        raise
    return file


def make_fence():
    """Return a fence: entering ``with fence:`` orders a store to a cell before the next load.

    A processor, x86 too, may delay a store past a later load of another cell. Then a rank that
    stores its ASLEEP flag and loads a cell, and one that stores the cell and loads the flag, can
    miss each other, and the first sleeps on. Taking a lock is an atomic read-modify-write: on x86 a
    full memory barrier, whichever lock it is. Each process has its own copy of the lock, so no rank
    waits for another. Use ``with``: a Ctrl-C between acquire() and release() would leave the lock
    taken for ever. Put a statement in the block: Python does not leave it if an exception comes at
    a ``pass``.
    """
    return threading.Lock()


def make_wake_pipes(count):
    """Return a descriptor for each rank, of both ends of a pipe; reads and writes don't block.

    All ranks have all of them, so a descriptor for each end would be twice as many.
    """
    pipes = []
    try:
        while len(pipes) < count:
            ends = make_pipe()
            try:
                both = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
                pipes.append(os.open(f"/proc/self/fd/{ends[0]}", both))
            finally:
                for end in ends:
                    os.close(end)
    except OSError:
        for pipe in pipes:
            os.close(pipe)
        raise
    return pipes
