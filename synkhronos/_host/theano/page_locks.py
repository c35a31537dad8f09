"""Lock the pages of inputs in memory, so that a CUDA device reads them without the CPU's help.

    first run with an array    the driver copies it into pages of its own, and these to the device
    second run                 `lock` registers the block of memory that it is in with the driver
    after each run             `wait`: the device may still read locked pages when Theano returns
    the block goes             the driver forgets it first

A block is a `Map`: it shares no page with other memory, and outlives the call.

On an H200 copies from locked pages are 2 to 8 times as fast, but the steps of bench training are as
fast as before, so nothing is locked by default: ``tests/gpu/all.sh phases`` measures both.
"""

import ctypes
import functools
import os
import sys

import numpy as np

from synkhronos._machine.log import log
from synkhronos._machine.shared_memory import Map

VARIABLE = "SYNKHRONOS_LOCKED_GIB"
SMALLEST = 1 << 16  # bytes; the driver takes less along with the command to copy


class _LockedMap(Map):
    """A map that calls `before_unmapping` before it goes: finalizers run after that.

    Other maps have no method of Python's there, in which the exception of a signal would be lost.
    """

    def __del__(self):
        self.before_unmapping()


def limit() -> int:
    """Return how many bytes a rank may lock, which the environment says in GiB."""
    text = os.environ.get(VARIABLE, "").strip() or "0"
    try:
        return int(max(float(text), 0) * 2**30)
    except (ValueError, OverflowError):
        raise ValueError(
            f"the environment variable {VARIABLE} is how many GiB of inputs a rank may lock in "
            f"memory, or 0: a number, but it is {text!r}"
        ) from None


def install(context) -> bool:
    """Lock pages from now on for a `CudaContext`; return whether that works."""
    try:
        # Before Linux 5.9 pages of a process that forks may become others than the locked ones.
        if limit() and [*map(int, os.uname().release.split(".")[:2])] >= [5, 9]:
            PageLocks.current = PageLocks(context, limit())
    except ValueError as problem:
        _tell(problem)
    return PageLocks.current is not None


def wait_for(array) -> None:
    """Wait for the device if an array is in locked pages, which it reads and writes meanwhile."""
    locks = PageLocks.current
    if locks is not None and locks.places.get(id(_block(array))):
        locks.wait()


def wait_after_setting(kind) -> None:
    """Let the `set_value` of a class of shared variables wait for the device."""
    set_value = kind.set_value

    @functools.wraps(set_value)
    def set_and_wait(self, value, borrow=False):
        set_value(self, value, borrow)
        wait_for(value)

    kind.set_value = set_and_wait


class PageLocks:
    """The blocks of memory that are locked for one context, with `most` bytes in all."""

    current = None  # those of this process, once it has opened a CUDA device

    def __init__(self, context, most):
        self._call, self._left, self._pid = context.call, most, os.getpid()
        # id of a block -> its address and bytes, () if it can't be locked, None at its first run
        self.places = {}

    def lock(self, arrays) -> bool:
        """Lock the blocks of arrays that came before; return whether any array is locked."""
        blocks = [_block(each) for each in arrays if getattr(each, "nbytes", 0) >= SMALLEST]
        return sum(self._lock(block) for block in blocks if block is not None) > 0

    def wait(self) -> None:
        """Wait until the device has done everything."""
        self._call("cuCtxSynchronize")

    def _lock(self, block):
        key = id(block)
        if key not in self.places:
            self.places[key] = None
            block.__class__ = _LockedMap
            block.before_unmapping = functools.partial(self._forget, key)
        elif self.places[key] is None:
            self.places[key] = self._register(block)
        return bool(self.places[key])

    def _register(self, block):
        address = ctypes.addressof(ctypes.c_char.from_buffer(block))
        place = ctypes.c_void_p(address), ctypes.c_size_t(len(block))
        problem = f"{VARIABLE} allows no more"
        if len(block) <= self._left:
            status = self._call("cuMemHostRegister_v2", *place, 1)  # CU_MEMHOSTREGISTER_PORTABLE
            if not status:
                self._left -= len(block)
                return place
            problem = f"error {status} of CUDA"
        _tell(problem)
        return ()

    def _forget(self, key):
        place = self.places.pop(key, None)
        if place and os.getpid() == self._pid and not sys.is_finalizing():
            self._left += place[1].value
            self._call("cuMemHostUnregister", place[0])


@functools.lru_cache(maxsize=None)  # once for each problem
def _tell(problem):
    log.debug("Some inputs are not locked in memory: %s", problem)


def _block(array):
    """Return the block of memory that an array is in; None if it is not a `Map`."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array if isinstance(array, Map) else None
