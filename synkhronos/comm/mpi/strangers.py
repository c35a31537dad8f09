"""Close connections to MPI's ports that no process of the job has made: they could stop a carrier.

Open MPI reads the first bytes of a connection in the thread that asks it for messages, and waits
there until all have come. So one program that connects, sends two bytes and waits would stop a
carrier. A thread of the carrier looks for that:

    the carrier's thread reads from one connection at two looks   close that connection
    nothing has come through an accepted connection for long      close it
    after that                                                    take no connections for a while

A process of the job sends the first bytes at once, and in one piece. If its connection is not
answered, the system tries again. Releases of Open MPI after 5.0 are to have limits of their own:
https://github.com/open-mpi/ompi/pull/13591.
"""

import contextlib
import ctypes
import os
import socket
import struct
import threading
import time

from synkhronos._machine.descriptors import as_socket, tcp_sockets
from synkhronos._machine.log import log
from synkhronos.comm.heartbeats import lost_seconds

_LOOKS_SECONDS = 0.25
_LOOKS_SECONDS_AFTER_ONE = 0.005  # more such connections may be queued
_ALERT_SECONDS = 60.0
_SEARCH_SECONDS = 1.0
_PART_SECONDS = 0.1  # to wait for the rest of the first bytes
_REST_SECONDS = 5.0  # during which the ports take no connections
_MOST_BYTES = 512  # of a line of /proc
_ARGUMENTS = 6  # of a system call, in that line
# Open MPI reads 24 bytes first. Later it reads more at a time, without waiting.
_MOST_AT_FIRST = 64
_ATTACH, _DETACH = 26, 27  # SO_ATTACH_FILTER and SO_DETACH_FILTER, which Python does not name
_TAKES_NOTHING = struct.pack("HBBI", 6, 0, 0, 0)  # a filter of packets: BPF_RET with 0 bytes


class Strangers(threading.Thread):
    """Closes connections that stop the thread which has made this object, or that may do so."""

    def __init__(self):
        super().__init__(name="strangers", daemon=True)
        # Kept open: there may be no descriptor left when it is needed.
        call = f"/proc/self/task/{threading.get_native_id()}/syscall"
        self._call = os.open(call, os.O_RDONLY | os.O_CLOEXEC)
        self._silence_seconds = max(lost_seconds(), 8.0)
        self._ports = set()  # on which this process listens
        self._read_from = None  # the socket that the thread was reading from at the last look
        self._alert_until = 0.0
        self._rests_until = 0.0  # when the ports take connections again; 0 if they do
        self._has_told = False
        self._is_over = threading.Event()

    def run(self):
        """Look again and again, until `end`, or the thread has ended."""
        next_search = 0.0
        with contextlib.suppress(OSError):
            while True:
                is_alert = time.monotonic() < self._alert_until
                seconds = _LOOKS_SECONDS_AFTER_ONE if is_alert else _LOOKS_SECONDS
                if self._is_over.wait(seconds):
                    break
                self._look_at_call()
                if 0 < self._rests_until < time.monotonic():
                    self._rests_until = 0.0
                    self._filter(_DETACH, 0)
                if time.monotonic() > next_search:
                    next_search = time.monotonic() + _SEARCH_SECONDS
                    self._close_those_with_less(1, self._silence_seconds, "sent nothing")

    def end(self):
        """Look no more."""
        self._is_over.set()

    def _look_at_call(self):
        """Close the connection that the thread reads from, if it read from it at the last look."""
        before, self._read_from = self._read_from, None
        _, *arguments = os.pread(self._call, _MOST_BYTES, 0).split()
        if len(arguments) < _ARGUMENTS:  # it runs, or waits for a page of memory
            return
        fd, _, left = (int(argument, 16) for argument in arguments[:3])
        for each in tcp_sockets([fd]).values():
            whole = each.n_received + left
            if each.port in self._ports and not each.is_listening and whole <= _MOST_AT_FIRST:
                self._read_from = each.inode
                if before == each.inode:
                    what = "sent a part of a message, and waited"
                    self._close_those_with_less(whole, _PART_SECONDS, what)

    def _close_those_with_less(self, n_bytes, seconds, what):
        """Close accepted connections with fewer bytes, or with none for some seconds."""
        sockets = tcp_sockets()
        self._ports = {each.port for each in sockets.values() if each.is_listening}
        for fd, each in sockets.items():
            is_accepted = each.port in self._ports and not each.is_listening
            is_short = is_accepted and each.n_received < n_bytes
            # A program that sends its bytes one by one is not waited for.
            if is_short and (each.n_received or each.idle_seconds > seconds):
                self._close(fd, each.inode, what)

    def _filter(self, option, value):
        """Set an option of the sockets that listen."""
        for fd, each in tcp_sockets().items():
            if each.is_listening:
                with contextlib.suppress(OSError), as_socket(fd) as listening:
                    listening.setsockopt(socket.SOL_SOCKET, option, value)

    def _close(self, fd, inode, what):
        self._alert_until = time.monotonic() + _ALERT_SECONDS
        if not self._rests_until:
            code = ctypes.create_string_buffer(_TAKES_NOTHING)
            self._filter(_ATTACH, struct.pack("HP", 1, ctypes.addressof(code)))
        self._rests_until = time.monotonic() + _REST_SECONDS
        with contextlib.suppress(OSError), as_socket(fd) as connection:  # it has ended by itself
            if os.fstat(fd).st_ino != inode:
                return  # another socket has got its number
            peer, port = connection.getpeername()[0], connection.getsockname()[1]
            connection.shutdown(socket.SHUT_RDWR)  # MPI has the descriptor, and closes it
            if not self._has_told:
                self._has_told = True
                log.warning(
                    "A program on %s connected to port %d of %s, which is MPI's, and %s. Its "
                    "connection has been closed, as more of this kind will be, and the job goes "
                    'on. Let only machines of the job reach this port: see "Sockets that listen" '
                    "in the documentation.",
                    *(peer, port, socket.gethostname(), what),
                )
