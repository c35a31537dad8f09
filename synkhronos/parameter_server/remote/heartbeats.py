"""Signs of life between processes of different hosts: a host that is cut off tells nothing.

The deaths of processes are told by mpirun, but its daemon on a host that is cut off can't. So each
process tells those of other hosts that it is alive, and takes them for lost when they are silent.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any, Iterable, Iterator

BEAT_SECONDS = 1.0
LOST_SECONDS = 8.0
SILENT = f"has not been heard of for {LOST_SECONDS:.0f} s"


class Heartbeats:
    """The signs of life of this process, and of those on other hosts.

    Parameters
    ----------
    post : Post
    ranks : iterable of int
        Of the processes on other hosts.
    """

    def __init__(self, post: Any, ranks: Iterable[int]) -> None:
        self._post, self._ranks = post, set(ranks)
        self._beaten = time.monotonic()
        for rank in self._ranks:
            post.heard[rank] = self._beaten
        self._lock = threading.Lock()
        self._is_over = threading.Event()

    def beat(self) -> None:
        """Tell the others that this process is alive, if the last time was a second ago."""
        now = time.monotonic()
        if now - self._beaten < BEAT_SECONDS:
            return
        if now - self._beaten > LOST_SECONDS / 2:  # this process has been stopped itself
            self._forget(now)
        self._beaten = now
        for rank in self._ranks - self._post.dead:
            self._post.tell(rank, "alive")

    def silent(self) -> set[int]:
        """Return the processes that are lost."""
        limit = time.monotonic() - LOST_SECONDS
        return {r for r in self._ranks - self._post.dead if self._post.heard[r] < limit}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let a thread beat inside of `elsewhere`; all other messages are this thread's."""
        if not self._ranks:
            yield
            return
        self._lock.acquire()
        thread = threading.Thread(target=self._run, name="synkhronos-heartbeats", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            self._lock.release()
            thread.join()

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Run a block that may take long, such as an updater, and sends no message."""
        if not self._lock.locked():
            yield
            return
        begun = time.monotonic()
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()
            now = time.monotonic()
            if now - begun > BEAT_SECONDS:  # it has read no messages meanwhile
                self._forget(now)

    def _forget(self, now):
        """Count the silence of the others from now on."""
        for rank in self._ranks:
            self._post.heard[rank] = now

    def _run(self):
        while not self._is_over.wait(BEAT_SECONDS / 2):
            if self._lock.acquire(blocking=False):
                try:
                    if not self._is_over.is_set():
                        self.beat()
                finally:
                    self._lock.release()
