"""Private copies of shared memory, for the processes that a script forks.

    before the fork    copy each block that `copy_for_children` was called for
    in the child       move the copies to the addresses of the blocks: all arrays in them, views
                       too, keep their values, and no other process sees what is written there
    in the parent      drop the copies

So a child keeps the values at the fork, as it does of all other memory. A private map of the same
file would not do: until the child writes to a page, it shows what other processes write there.

``subprocess`` makes no copies, because its child runs another program.
"""

import contextlib
import ctypes
import mmap
import os
import threading
import weakref

from synkhronos._machine.interrupts import interrupts_held
from synkhronos._machine.log import log

# A PyDLL keeps the GIL during a call, so that no other thread writes to a block meanwhile.
_libc = ctypes.PyDLL(None)
_FAILED = -1
_ALL_PAGES = 0x8000  # MAP_POPULATE: pages that the system adds one by one take twice as long
_ACCESS = mmap.PROT_READ | mmap.PROT_WRITE
_KIND = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _ALL_PAGES
_MAY_MOVE, _FIXED = 1, 2  # flags of mremap
_SHARES = (
    "no memory for a copy of %s bytes of shared variables: a forked process shares them with its "
    "parent"
)


class _Forks(threading.local):
    """The forks that this thread is making: a signal handler may fork during another fork."""

    def __init__(self):
        # For each fork a list with (memory, address, address of the copy, bytes) of each block.
        self.copies = []
        self.is_without_copies = False


_forks = _Forks()
_blocks: "weakref.WeakValueDictionary[int, mmap.mmap]" = weakref.WeakValueDictionary()


def copy_for_children(memory: mmap.mmap) -> None:
    """Let each process that the script forks from now on have a copy of a shared block."""
    _blocks[id(memory)] = memory


@contextlib.contextmanager
def without_copies():
    """Fork without copies in a with block: the child shares all memory."""
    _forks.is_without_copies = True
    try:
        yield
    finally:
        _forks.is_without_copies = False


def _copy_blocks():
    copies = []
    _forks.copies.append(copies)
    if not _blocks or _forks.is_without_copies:
        return
    with interrupts_held():  # Python would print and drop an exception of a signal handler here
        for reference in _blocks.valuerefs():  # a list: other threads may add blocks
            memory = reference()
            if memory is not None:
                address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
                nbytes = len(memory)
                copy = _call("mmap", 0, nbytes, _ACCESS, _KIND, -1, 0)
                if copy == _FAILED:
                    log.warning(_SHARES, f"{nbytes:,}")
                    continue
                # `memory` is in the list to keep the address mapped until after the fork.
                copies.append((memory, address, copy, nbytes))
                _call("memmove", copy, address, nbytes)


def _drop_copies():
    for _, _, copy, nbytes in _end_fork():
        _call("munmap", copy, nbytes)


def _put_copies():
    for _, address, copy, nbytes in _end_fork():
        if _call("mremap", copy, nbytes, nbytes, _MAY_MOVE | _FIXED, address) == _FAILED:
            log.warning(_SHARES, f"{nbytes:,}")
    _forks.copies.clear()
    # Copied blocks are private now. In a worker all blocks are the master's, which may free them.
    _blocks.clear()


def _end_fork():
    return _forks.copies.pop() if _forks.copies else ()


def _call(name, *arguments):
    """Call a function of the C library with integers; return its result."""
    function = _libc[name]  # a new object at each access: no other code sets its result type
    function.restype = ctypes.c_ssize_t
    return function(*map(ctypes.c_ssize_t, arguments))


os.register_at_fork(before=_copy_blocks, after_in_parent=_drop_copies, after_in_child=_put_copies)
