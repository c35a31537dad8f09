"""The walk of a call: how many functions of the package it calls, in how many files.

Waits don't count: how long they take, and so what they call, depends on what else runs.
"""

import os
import sys
from typing import NamedTuple

import synkhronos

_ROOT = os.path.dirname(synkhronos.__file__) + os.sep
_WAITS = "_wait", "write"  # of the methods that wait for cells, and wake others


class Walk(NamedTuple):
    """Calls of functions, files, and how often the next line is in another file."""

    calls: int
    files: int
    changes: int


class Counter:
    """Counts, in a with block, what runs in this thread; `walk` has the result."""

    walk = None

    def __enter__(self):
        self._names, self._calls, self._waiting = [], 0, 0
        sys.setprofile(self._look)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)
        self.walk = Walk(self._calls, len({*self._names}), len(self._names))

    def _look(self, frame, event, argument):
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(_ROOT):
            return
        if frame.f_code.co_name in _WAITS:
            self._waiting += 1 if event == "call" else -1
            return
        if self._waiting:
            return
        if event == "call":
            self._calls += 1
        else:
            frame = frame.f_back
            if frame is None:
                return
        name = frame.f_code.co_filename
        if name.startswith(_ROOT) and name not in self._names[-1:]:
            self._names.append(name)


def walk_of(call, warm=5):
    """Return the shortest walk of a few warm calls: some do more, such as forget memory."""
    for _ in range(warm):
        call()
    walks = []
    for _ in range(3):
        with Counter() as counter:
            call()
        walks.append(counter.walk)
    return min(walks)
