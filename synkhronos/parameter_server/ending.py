"""The end of a store: what is left is waited for, or dropped.

    close ──▶ drain: rounds that are closed, pulls that are ready ──▶ cancel: all others fail

A callback or an updater that runs is waited for; it can't be stopped.
"""

from __future__ import annotations

import time
from typing import Any, Callable, ContextManager, Sequence

from synkhronos.parameter_server.errors import OutOfTurn, StoreClosed
from synkhronos.parameter_server.lanes import Lanes
from synkhronos.parameter_server.rounds import Key, devices_have


def drain(
    lock: ContextManager, wait: Callable[..., Any], keys: Sequence[Key], end: float | None = None
) -> None:
    """Wait until all rounds that are closed are reduced, and all pulls done that are ready.

    Parameters
    ----------
    lock : lock
        The engine's, under which the keys change.
    wait : callable
        Its method `wait`.
    keys : list of Key
    end : float, optional
        The time of ``time.monotonic()`` until which it waits.

    Raises
    ------
    RoundTimeout
        If something is left at that time.
    """
    for key in keys:
        while True:
            with lock:
                left = [each for each in (*key.queue, *key.queued) if not each.is_done]
            if not left:
                break
            try:
                wait(left[0], None if end is None else max(0.0, end - time.monotonic()))
            except OutOfTurn:  # in a callback or an updater
                break


def cancel(lanes: Lanes, keys: Sequence[Key]) -> None:
    """Fail all that has not begun. The caller holds the lock."""
    dropped = StoreClosed("the store was closed before this was done.")
    for lane in lanes.all:
        for _, _, task in lane.heap:
            task.finish(dropped)
        lane.heap = []
    for key in keys:
        first = [key.queue[0]] if key.is_reducing else []
        for closed in list(key.queue)[len(first) :]:
            closed.finish(dropped)
        key.queue.clear()
        key.queue.extend(first)
        key.set_aside = []
        missing = key.missing()
        why = f"{devices_have(missing)} not pushed" if missing else "its round was not closed"
        error = StoreClosed(f"the store was closed; key {key.name!r}: {why}.")
        if not first:  # the one that runs finishes its own pulls
            key.fail_pulls(error)
        for pull in [each for each in key.waiting if each.needed > first[0].version]:
            key.waiting.remove(pull)
            pull.finish(error)
        if key.round is not None:
            key.round.finish(error)
