"""Settings of the C library's allocator, so that freed memory is used for the next arrays.

A training step frees the results of its operations, and the next step allocates arrays of the same
sizes. By default the C library returns the memory to the system, which clears each page before it
gives it out again. That takes a fifth of the time of a step with convolutions.
"""

import ctypes
import os

# glibc's highest limit. The memory of larger arrays still goes back to the system.
_LARGEST = 32 << 20
_KEPT = 512 << 20  # the most free memory that stays at the end of the heap
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h


def keep_freed_memory() -> bool:
    """Let this process keep freed memory, unless the environment has settings; return whether."""
    if any(name in os.environ for name in _SETTINGS):
        return False
    try:
        set_option = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return False
    return bool(set_option(_MMAP_THRESHOLD, _LARGEST) and set_option(_TRIM_THRESHOLD, _KEPT))
