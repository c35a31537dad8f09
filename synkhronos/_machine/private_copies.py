"""Private copies of shared memory, for the processes that a script forks.

    before the fork    copy each block that `copy_for_children` was called for
    in the child       move the copies to where the blocks were mapped: all arrays in a block, views
                       and borrowed ones too, have their values of before, and no other process
                       sees what is written there
    in the parent      drop the copies

So a child has the values of the moment of the fork, as of all other memory. A private map of the
same file would not do: until the child writes to a page, it shows what others write there.

``subprocess`` forks without this, because the child runs another program.
"""

import contextlib
import ctypes
import mmap
import os
import threading
import weakref

from synkhronos._machine.interrupts import interrupts_held
from synkhronos._machine.log import log

# A PyDLL keeps Python's lock in a call: no other thread of Python writes to a block meanwhile.
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
    """The forks that this thread is in: a signal handler may fork inside of another fork."""

    def __init__(self):
        # For each fork a list with (memory, address, address of the copy, bytes) of each block.
        self.copies = []
        self.is_own = False


_forks = _Forks()
_blocks: "weakref.WeakValueDictionary[int, mmap.mmap]" = weakref.WeakValueDictionary()


def copy_for_children(memory: mmap.mmap) -> None:
    """Give each process that the script forks from now on a copy of a shared block of memory."""
    _blocks[id(memory)] = memory


@contextlib.contextmanager
def none_made():
    """Fork without copies in a with block: the child is to share all memory."""
    _forks.is_own = True
    try:
        yield
    finally:
        _forks.is_own = False


def _copy_blocks():
    copies = []
    _forks.copies.append(copies)
    if not _blocks or _forks.is_own:
        return
    with interrupts_held():  # Python prints and drops what these handlers raise
        for reference in _blocks.valuerefs():  # a list: other threads may add blocks
            memory = reference()
            if memory is not None:
                address, nbytes = _place(memory)
                copy = _call("mmap", 0, nbytes, _ACCESS, _KIND, -1, 0)
                if copy == _FAILED:
                    log.warning(_SHARES, f"{nbytes:,}")
                    continue
                # With `memory`, which keeps the address mapped until after the fork.
                copies.append((memory, address, copy, nbytes))
                _call("memmove", copy, address, nbytes)


def _drop_copies():
    for _, _, copy, nbytes in _end_fork():
        _call("munmap", copy, nbytes)


def _put_copies():
    # The child of this thread's fork. If it is a worker, all blocks are the master's, which may
    # free them; if not, all that were copied are private by now.
    for _, address, copy, nbytes in _end_fork():
        if _call("mremap", copy, nbytes, nbytes, _MAY_MOVE | _FIXED, address) == _FAILED:
            log.warning(_SHARES, f"{nbytes:,}")
    _forks.copies.clear()
    _blocks.clear()


def _end_fork():
    return _forks.copies.pop() if _forks.copies else ()


def _place(memory):
    """Return the address of a map, and its bytes."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory)


def _call(name, *arguments):
    """Call a function of the C library with whole numbers; return its result."""
    function = _libc[name]  # a new object, which other code does not configure
    function.restype = ctypes.c_ssize_t
    return function(*map(ctypes.c_ssize_t, arguments))


os.register_at_fork(before=_copy_blocks, after_in_parent=_drop_copies, after_in_child=_put_copies)
