"""Signs of life between the carriers of machines: one that is cut off tells of no death.

A carrier tells others each second that it is alive, and takes them for lost when they are silent:
for 8 seconds, or as many as ``SYNKHRONOS_LOST_AFTER`` says.
"""

from __future__ import annotations

import os
import time
from typing import Callable, Iterable

BEAT_SECONDS = 1.0


def _limit(given):
    """Return the seconds after which a silent machine is lost.

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
    """The signs of life of this carrier, and of those of other machines.

    Parameters
    ----------
    machines : iterable of int
    tell : callable
        ``tell(machine)`` sends one of them a sign of life.
    """

    def __init__(self, machines: Iterable[int], tell: Callable[[int], None]) -> None:
        self._tell, self._beaten = tell, time.monotonic()
        self._heard = dict.fromkeys(machines, self._beaten)  # when each was heard of last

    def note(self, machine: int) -> None:
        """Take note that a machine has been heard of."""
        if machine in self._heard:
            self._heard[machine] = time.monotonic()

    def drop(self, machine: int) -> None:
        """Expect no signs of a machine any more, and send it none."""
        self._heard.pop(machine, None)

    def beat(self) -> bool:
        """Tell the others that this machine is alive, each second; return whether it was time."""
        now = time.monotonic()
        if now - self._beaten < BEAT_SECONDS:
            return False
        if now - self._beaten > LOST_SECONDS / 2:  # this process has been stopped itself
            self._forget(now)
        self._beaten = now
        for machine in list(self._heard):
            self._tell(machine)
        return True

    def silent(self) -> list[int]:
        """Return the machines that are lost."""
        limit = time.monotonic() - LOST_SECONDS
        return [machine for machine, heard in self._heard.items() if heard < limit]

    def _forget(self, now):
        """Count the silence of the others from now on."""
        self._heard = dict.fromkeys(self._heard, now)
