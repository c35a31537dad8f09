"""Waits for messages of MPI, which have an end.

A process that waits looks at MPI for a moment, then sleeps between looks, because ranks share cores
with one another.
"""

from __future__ import annotations

import time
from typing import Callable

from synkhronos._machine.log import log
from synkhronos.comm.group import WaitedTooLong

_LOOKS = 2000  # without a sleep: some hundred microseconds
_SHORTEST, _LONGEST = 2e-5, 2e-3  # seconds of a sleep
_WARN_AFTER = 30.0  # seconds


def wait_until(is_ready: Callable[[], bool], waits_for: str, patience: float) -> None:
    """Wait until a function returns True.

    Raises
    ------
    WaitedTooLong
        After `patience` seconds.
    """
    for _ in range(_LOOKS):
        if is_ready():
            return
    begun, pause, warn_at = time.monotonic(), _SHORTEST, _WARN_AFTER
    while not is_ready():
        waited = time.monotonic() - begun
        if waited > patience:
            raise WaitedTooLong(patience, waits_for)
        if waited > warn_at:
            log.warning("has waited %.0f s for %s", waited, waits_for)
            warn_at *= 2
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST)
