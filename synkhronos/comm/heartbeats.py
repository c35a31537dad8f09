"""Signs of life between processes of different hosts: a host that is cut off tells nothing.

The deaths of processes are told by mpirun, but its daemon on a host that is cut off can't. So each
process tells those of other hosts each second that it is alive, and takes them for lost when they
are silent: for 8 seconds, or as many as ``SYNKHRONOS_LOST_AFTER`` says.
"""

from __future__ import annotations

import os
import time
from typing import Callable, Iterable

BEAT_SECONDS = 1.0


def _limit(given):
    """Return the seconds after which a silent process is lost.

    >>> _limit(""), _limit("inf")
    (8.0, inf)
    """
    try:
        seconds = float(given or 8)
    except ValueError:
        seconds = 0.0
    if not seconds >= 2 * BEAT_SECONDS:
        raise ValueError(
            f"SYNKHRONOS_LOST_AFTER must be a number of seconds, at least 2, got {given!r}."
        )
    return seconds


LOST_SECONDS = _limit(os.environ.get("SYNKHRONOS_LOST_AFTER"))
SILENT = f"has not been heard of for {LOST_SECONDS:g} s"


class Heartbeats:
    """The signs of life of this process, and of those on other hosts.

    Parameters
    ----------
    ranks : iterable of int
        Of the processes on other hosts.
    tell : callable
        ``tell(rank)`` sends one of them a sign of life.
    """

    def __init__(self, ranks: Iterable[int], tell: Callable[[int], None]) -> None:
        self._tell, self._beaten = tell, time.monotonic()
        self._heard = dict.fromkeys(ranks, self._beaten)  # when each was heard of last

    def note(self, rank: int) -> None:
        """Take note that a process has been heard of."""
        if rank in self._heard:
            self._heard[rank] = time.monotonic()

    def drop(self, rank: int) -> None:
        """Expect no signs of a process any more, and send it none."""
        self._heard.pop(rank, None)

    def beat(self) -> bool:
        """Tell the others that this process is alive, each second; return whether it was time."""
        now = time.monotonic()
        if now - self._beaten < BEAT_SECONDS:
            return False
        if now - self._beaten > LOST_SECONDS / 2:  # this process has been stopped itself
            self._forget(now)
        self._beaten = now
        for rank in list(self._heard):
            self._tell(rank)
        return True

    def silent(self) -> list[int]:
        """Return the processes that are lost."""
        limit = time.monotonic() - LOST_SECONDS
        return [rank for rank, heard in self._heard.items() if heard < limit]

    def _forget(self, now):
        """Count the silence of the others from now on."""
        self._heard = dict.fromkeys(self._heard, now)
