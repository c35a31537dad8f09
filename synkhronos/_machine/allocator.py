"""Settings of the C library's allocator, for processes that allocate the same arrays again.

A step of training frees the results of its operations, and the next step allocates arrays of the
same sizes. By default the C library returns such memory to the system, which then has to clear each
page anew: a fifth of the time of a step with convolutions.
"""

import ctypes
import os

# Larger arrays still go back to the system when they are freed. glibc takes no higher limit.
_LARGEST = 32 << 20
_KEPT = 512 << 20  # freed memory at the end of the heap, at most
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h


def keep_freed_memory() -> bool:
    """Let this process keep freed memory for its next arrays; return whether it will.

    Settings of the environment, such as ``MALLOC_TRIM_THRESHOLD_``, stay as they are.
    """
    if any(name in os.environ for name in _SETTINGS):
        return False
    try:
        set_option = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return False
    return bool(set_option(_MMAP_THRESHOLD, _LARGEST) and set_option(_TRIM_THRESHOLD, _KEPT))
