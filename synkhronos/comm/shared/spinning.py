"""How long a waiting rank spins on a cell before it sleeps.

    wait ──▶ looks without a pause ──▶ looks, and leaves the core to others ──▶ sleeps in `poll`
             100 microseconds          twice as long as the last wait took,
                                       at most 2 milliseconds

To spin is the fastest way to wait if each rank has a core for itself: to wake a sleeper takes some
50 microseconds. If other processes need the core, it is the slowest: a spinning rank keeps the core
from the rank that it waits for, or is itself suspended for some milliseconds. So a rank that was
suspended while it spun sets the cell CROWDED, and all ranks sleep instead of spinning during a
pause. The pause is twice as long as the one before if that ended a short time ago.

With more ranks than cores a rank looks only a few times, and leaves the core to others in between.

The order of stores does not matter here: a value that a rank reads too late only costs time.
"""

import os
import resource
import time

from synkhronos.comm import Aborted
from synkhronos.comm.shared.gate_memory import ABORT, CROWDED, LINE, PAUSE, SEQUENCE

_MS = 1_000_000  # nanoseconds, the unit of all times here
_LOOKS = range(50)  # looks at a cell between two of the clock: 2 to 3 microseconds
_YIELDS = range(20)  # looks with more ranks than cores
SHORTEST = 100_000  # at least as long a rank spins, if it spins at all
LONGEST = 2 * _MS
_SUSPENDED = 400_000  # a gap between two looks that is too long for an interrupt of the processor
_TAKEN = 100_000  # a gap after which another process has had the core that was offered to it
_SLICE = 10 * _MS  # longer than another process has the core at a time
_SHORTEST_PAUSE, _LONGEST_PAUSE = 2 * _MS, 250 * _MS

_clock = time.monotonic_ns  # the same in all processes of a machine


class Spinning:
    """How long one rank spins on the cells of a gate, as it has learnt from its last waits."""

    def __init__(self, cells, has_cores: bool):
        self._cells = cells
        self._has_cores = has_cores  # whether there is a core for each rank
        self._limits = [SHORTEST] * LINE  # for each kind of cell, how long to spin
        self._began = 0  # when this rank began to spin in the present wait; 0 if it did not
        self._switches = 0  # how often this thread had been suspended, at the last look

    def wait(self, cell: int, value: int, call) -> bool:
        """Return whether a cell reaches a value soon; raise Aborted if `call` is aborted."""
        cells = self._cells
        self._began = 0
        if not self._has_cores:
            for _ in _YIELDS:
                if cells[cell] >= value:
                    return True
                if cells[ABORT] == call:
                    raise Aborted
                os.sched_yield()
            return False
        begin = last = _clock()
        if begin < cells[CROWDED]:
            return False
        self._began = begin
        limit = self._limits[cell % LINE]
        while True:
            for _ in _LOOKS:
                if cells[cell] >= value:
                    return True
                if cells[ABORT] == call:
                    raise Aborted
            now = _clock()
            if now - last > _SUSPENDED:
                self._note_suspended(cell, value, now)
                return False
            last = now
            if now - begin > SHORTEST:
                if now - begin > limit:
                    return False
                os.sched_yield()
                last = _clock()
                if last - now > _TAKEN:
                    self._note_suspended(cell, value, last)
                    return False

    def learn(self, cell: int) -> None:
        """Set the next limit after a wait in which this rank has slept."""
        if not self._began:
            return
        kind, took = cell % LINE, _clock() - self._began
        if took < LONGEST:
            self._limits[kind] = min(max(2 * took, SHORTEST), LONGEST)
        else:  # only by half: long and short waits may alternate
            self._limits[kind] = max(self._limits[kind] // 2, SHORTEST)

    def _note_suspended(self, cell, value, now):
        """Stop all ranks from spinning for a while, if another process has had this core."""
        cells = self._cells
        # Between two calls the script may compute with threads on all cores. That a rank was
        # suspended then does not count, unless a call began meanwhile.
        if cell == SEQUENCE and cells[cell] < value:
            return
        # The gap may come from another thread of this process, which holds Python's lock for 5 ms
        # at a time: then the core is still this rank's.
        switches = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
        if switches == self._switches:
            return
        self._switches = switches
        since = now - cells[CROWDED]
        if since < 0:
            return  # another rank has reported it
        self._began = 0  # this wait says nothing about the next
        again = since < 2 * cells[PAUSE] + _SLICE
        pause = 2 * cells[PAUSE] if again else _SHORTEST_PAUSE
        cells[PAUSE] = pause = min(pause, _LONGEST_PAUSE)
        cells[CROWDED] = now + pause
