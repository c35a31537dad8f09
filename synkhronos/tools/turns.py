"""Measurements that take turns, so that other programs disturb all alike."""

import contextlib
import sys
import time

import numpy as np

from synkhronos._machine.log import has_terminal

_LONG_SECONDS = 0.1  # repetitions that take longer need none before them to wake the ranks

clock = time.perf_counter


@contextlib.contextmanager
def shown(text):
    """Show on a terminal what the block does, in one line of standard error."""
    if not has_terminal():
        yield
        return
    clear = "\r\x1b[K"  # to the begin of the line, and erase it
    print(clear + text, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(clear, end="", file=sys.stderr, flush=True)


def progress(what, steps):
    """Yield each of `steps`; show on a terminal how many are done."""
    for done, step in enumerate(steps):
        with shown(f"{what}: {done} of {len(steps)}"):
            yield step


def seconds_of(call, *args):
    """Return the seconds that a call takes."""
    begin = clock()
    call(*args)
    return clock() - begin


class Turns:
    """Measurements that take turns in rounds; `rounds_of` each has the seconds of its repetitions.

    All rounds of a measurement take `seconds`; a round has at most `most` repetitions, or exactly
    so many if `seconds` is None.
    """

    def __init__(self, seconds, rounds=5, most=300):
        self._seconds, self._n_rounds, self._most = seconds, rounds, most
        self._measurements, self._counts, self.rounds_of = {}, {}, {}

    def add(self, key, times):
        """Add a measurement: ``times(count)`` returns the seconds of `count` repetitions."""
        self._measurements[key], self.rounds_of[key] = times, []

    def add_calls(self, calls):
        """Add calls that are timed here, by their names."""
        for key, call in calls.items():
            self.add(key, lambda count, call=call: [seconds_of(call) for _ in range(count)])

    def take(self):
        """Take all measurements: one round."""
        for key, times in self._measurements.items():
            if key not in self._counts:
                once, count = min(times(2)), self._most
                if self._seconds is not None:
                    fit = self._seconds / self._n_rounds / max(once, 1e-9)
                    count = int(min(max(fit, 1), self._most))
                self._counts[key] = count, once > _LONG_SECONDS
            count, is_long = self._counts[key]
            # At first the caches have the arrays of another measurement, and the ranks sleep.
            warm = 0 if is_long else 1 + count // 10
            self.rounds_of[key].append(times(warm + count)[warm:])

    def take_all(self, what):
        """Take all rounds, and show how many are done; return the figures of each measurement."""
        for _ in progress(what, range(self._n_rounds)):
            self.take()
        return self.figures()

    def figures(self):
        """Return the `spread` of the seconds of each measurement."""
        return {
            key: spread([each for one in rounds for each in one])
            for key, rounds in self.rounds_of.items()
        }


def spread(values):
    """Return the median of values, the least and the most, the outer tenths, and their number.

    >>> figures = spread([3.0, 1.0, 2.0])
    >>> figures["median"], figures["least"], figures["count"]
    (2.0, 1.0, 3)
    """
    found = np.percentile(values, [50, 0, 100, 10, 90]).tolist()
    return {**dict(zip(("median", "least", "most", "p10", "p90"), found)), "count": len(values)}
