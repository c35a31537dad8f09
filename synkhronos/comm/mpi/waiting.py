"""The waits of a carrier. MPI must be polled for messages: none of its calls sleeps.

    something has happened a moment ago   poll MPI without a pause
    data are under way                    short naps, up to half a millisecond
    nothing is under way                  sleep until a rank's socket, or one of MPI's, can be read
    MPI does not use sockets              naps that get longer, the longer nothing has happened

The ranks of a machine usually use all its cores, so a carrier must not poll when nothing can have
come. Where MPI uses TCP, its sockets, which are among this process's descriptors, become readable
with a message. If messages come and no socket was readable, MPI uses something else, such as
InfiniBand.
"""

import contextlib
import os
import select
import time

from synkhronos._machine.descriptors import tcp_sockets

_AWAKE_SECONDS = 0.001
_SHORTEST, _LONGEST = 0.00005, 0.0005  # naps while data are under way
_NAPS = (  # (seconds since something has happened, at most; seconds of a nap)
    (0.01, 0.00005),
    (0.2, 0.0002),
    (10.0, 0.001),
    (float("inf"), 0.005),
)
_SLEEP_SECONDS = 0.02  # the longest sleep if MPI uses sockets
_SELECTS = 1024  # select() takes descriptors below this
_MISSES = 3  # messages in a row without a readable socket: then MPI does not use sockets
_BARREN = 1000  # times in a row that a socket was readable without a message: then it is ignored


class Waiting:
    """The sockets of a carrier, and when it last had something to do."""

    def __init__(self):
        self._own = set()  # descriptors of the sockets of ranks
        self._of_mpi = {}  # descriptor -> how often in a row it was readable without a message
        self._poll_own, self._poll_all = select.poll(), select.poll()
        self._last = time.monotonic()
        self._tells = True  # whether MPI's sockets become readable with messages
        self._misses, self._told = 0, None

    def add(self, fd):
        """Wait for a rank's socket, too."""
        self._own.add(fd)
        self._of_mpi.pop(fd, None)  # a closed socket of MPI may have had this number
        self._poll_own.register(fd, select.POLLIN)
        self._poll_all.register(fd, select.POLLIN)

    def remove(self, fd):
        """Wait for a rank's socket no more."""
        self._own.discard(fd)
        self._poll_own.unregister(fd)
        self._poll_all.unregister(fd)

    def find_sockets(self):
        """Find the sockets that MPI has opened by now."""
        found = {fd for fd, each in tcp_sockets().items() if each.is_in_use and fd not in self._own}
        for fd in found.difference(self._of_mpi):
            self._poll_all.register(fd, select.POLLIN)
            self._of_mpi[fd] = 0
        for fd in set(self._of_mpi).difference(found):
            self._drop(fd)

    def for_ranks(self, is_busy):
        """Wait, shortly if data are under way; return the descriptors of ranks that can be read."""
        idle, self._told = time.monotonic() - self._last, None
        if idle < _AWAKE_SECONDS:
            os.sched_yield()
            return self._ready(0)
        if is_busy:
            return self._ready(min(max(_SHORTEST, idle / 4), _LONGEST))
        if not (self._tells and self._of_mpi):
            return self._ready(next(nap for limit, nap in _NAPS if idle < limit))
        events = self._poll_all.poll(1000 * min(max(idle / 4, 0.001), _SLEEP_SECONDS))
        self._told = [fd for fd, _ in events if fd in self._of_mpi]
        for fd, event in events:
            if event & select.POLLNVAL:
                self._drop(fd)
        return [fd for fd, _ in events if fd in self._own]

    def note(self, happened, has_come):
        """Note whether something has happened, and whether a message has come by MPI."""
        if happened or has_come:
            self._last = time.monotonic()
        if self._told is None:
            return
        if has_come:
            self._misses = 0 if self._told else self._misses + 1
            self._tells = self._misses < _MISSES
        for fd in self._told:
            self._of_mpi[fd] = 0 if has_come else self._of_mpi.get(fd, 0) + 1
            if self._of_mpi[fd] > _BARREN:
                self._poll_all.unregister(fd)  # but kept in `_of_mpi`, or it would be found again

    def _ready(self, seconds):
        # `poll` can't wait for less than a millisecond.
        if seconds and max(self._own, default=0) < _SELECTS:
            return select.select(self._own, (), (), seconds)[0]
        return [fd for fd, _ in self._poll_own.poll(1000 * seconds)]

    def _drop(self, fd):
        if self._of_mpi.pop(fd, None) is not None:
            with contextlib.suppress(KeyError):
                self._poll_all.unregister(fd)
