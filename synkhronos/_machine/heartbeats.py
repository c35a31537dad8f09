"""Heartbeats between machines: one that is cut off from the network can't report its own death.

The carrier of each machine, its network process, sends one each second. It counts a machine as lost
after 8 seconds without one, or as many as ``SYNKHRONOS_LOST_AFTER`` says; 0 is never.
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
    """Return the limit in this process's environment; raise ValueError if it is not valid."""
    return limit(os.environ.get(VARIABLE))


def silent() -> str:
    """Return why a machine counts as lost, for messages.

    >>> silent()
    'has not been heard of for 8 s'
    """
    return f"has not been heard of for {lost_seconds():g} s"


class Heartbeats:
    """Send heartbeats, by ``tell(machine)``, and note when each machine was last heard of."""

    def __init__(self, machines: Iterable[int], tell: Callable[[int], None]) -> None:
        self._tell, self._last_beat = tell, time.monotonic()
        self._heard = dict.fromkeys(machines, self._last_beat)  # when each was last heard of

    def note(self, machine: int) -> None:
        """Note that something has come from a machine."""
        if machine in self._heard:
            self._heard[machine] = time.monotonic()

    def drop(self, machine: int) -> None:
        """Send a machine no more heartbeats, and expect none of it."""
        self._heard.pop(machine, None)

    @property
    def seconds_left(self) -> float:
        """The seconds until the next heartbeat."""
        return max(self._last_beat + BEAT_SECONDS - time.monotonic(), 0.0)

    def beat(self) -> bool:
        """Send heartbeats if the last are a second old; return whether they were."""
        now = time.monotonic()
        pause = now - self._last_beat
        if self._last_beat + BEAT_SECONDS > now:  # as `seconds_left` adds them up
            return False
        # After such a pause it was this process that was stopped: it counts silence from now on.
        if pause > max(lost_seconds() / 2, 1.5 * BEAT_SECONDS):
            self._heard = dict.fromkeys(self._heard, now)
        self._last_beat = now
        for machine in list(self._heard):
            self._tell(machine)
        return True

    def silent(self) -> list[int]:
        """Return the machines that are lost."""
        limit = time.monotonic() - lost_seconds()
        return [machine for machine, heard in self._heard.items() if heard < limit]
