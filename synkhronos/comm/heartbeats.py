"""Signs of life between the carriers of machines: one that is cut off tells of no death.

A carrier tells others each second that it is alive, and takes them for lost when they are silent:
for 8 seconds, or as many as ``SYNKHRONOS_LOST_AFTER`` says; 0 is never.
"""

from __future__ import annotations

import os
import time
from typing import Callable, Iterable

BEAT_SECONDS = 1.0
VARIABLE = "SYNKHRONOS_LOST_AFTER"


def limit(given: str | None, name: str = VARIABLE) -> float:
    """Return the seconds after which a silent machine is lost, or a stopped process is killed.

    >>> limit(None), limit("60"), limit("0"), limit("never")
    (8.0, 60.0, inf, inf)
    """
    try:
        seconds = float("inf" if given == "never" else given or 8) or float("inf")
    except ValueError:
        seconds = 0.0
    if not seconds >= 2 * BEAT_SECONDS:
        raise ValueError(
            f"{name} must be a number of seconds, at least 2, or 0 for never, got {given!r}."
        )
    return seconds


def lost_seconds() -> float:
    """Return the limit that this process's environment says; raise ValueError if it is none."""
    return limit(os.environ.get(VARIABLE))


def silent() -> str:
    """Return what is said of a machine that is lost.

    >>> silent()
    'has not been heard of for 8 s'
    """
    return f"has not been heard of for {lost_seconds():g} s"


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
        # This process has been stopped itself. A limit of 2 s has no room for later beats.
        if now - self._beaten > max(lost_seconds() / 2, 1.5 * BEAT_SECONDS):
            self._forget(now)
        self._beaten = now
        for machine in list(self._heard):
            self._tell(machine)
        return True

    def silent(self) -> list[int]:
        """Return the machines that are lost."""
        limit = time.monotonic() - lost_seconds()
        return [machine for machine, heard in self._heard.items() if heard < limit]

    def _forget(self, now):
        """Count the silence of the others from now on."""
        self._heard = dict.fromkeys(self._heard, now)
