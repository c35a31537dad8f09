"""The connections between the carriers of a job: a TCP connection for each pair, sealed.

    message    tag and length, payload, MAC ──▶ into the memory that waits for it

So a carrier sleeps until a socket can be read or written, and a process that has ended is known at
once. MPI can do neither: it must be polled, and its messages could not be checked without a copy.

Two processes of one machine have a Unix socket, which needs no seal: the system tells who is at the
other end. Where a pair can't connect the job does not begin, and the error names both machines.

A wrong MAC ends the connection, as its bytes are not what the other process has sent.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import pickle
import socket
import struct
from typing import Any

import numpy as np

from synkhronos._machine.heartbeats import lost_seconds, silent
from synkhronos.comm.mpi.rendezvous import MOST_LEADERS, Start, agree
from synkhronos.comm.mpi.rendezvous import Unreachable as Unreachable
from synkhronos.comm.mpi.sealed import MAC, Seal
from synkhronos.comm.mpi.transfers import bytes_of

_LAST, MESSAGE = 0, 1  # the tags of a goodbye, and of messages that are unpickled
_HEAD = struct.Struct("=IQ")  # tag, bytes of the payload
_GIVEN = struct.Struct("Q")  # bytes of the message to a leader
_BUFFERED = 1 << 16  # bytes that are read in addition to a large payload
_SMALL = 1 << 15  # bytes of a payload that passes through this buffer
_LARGEST = 1 << 40  # bytes of a payload
_AT_ONCE = 1 << 22  # bytes that are taken from one process before others have a turn


class Changed(ConnectionError):
    """A connection brings other bytes than the process at its other end has sent."""


class MessageRequest:
    """A message that is being sent, whose memory must stay as it is until it `is_done`.

    Or one that is awaited; its memory may change before the message was checked.
    """

    __slots__ = "is_done", "memory", "tag"

    def __init__(self, tag, memory):
        self.tag, self.memory, self.is_done = tag, memory, False


class TaggedMessages:
    """The messages of processes, which find by their tags who waits for them.

    `on_message` takes the sender of each message.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._arrived: dict[tuple[int, int], collections.deque] = {}  # (source, tag) -> payloads
        self._wanted: dict[tuple[int, int], collections.deque] = {}  # (source, tag) -> Requests
        self.on_message = lambda source: None

    def receive(self, machine: int, buffer: np.ndarray, tag: int) -> MessageRequest:
        """Begin to receive into an array."""
        coming = MessageRequest(tag, bytes_of(buffer))
        arrived = self._arrived.get((machine, tag))
        if arrived:
            _fill(coming, _pop(self._arrived, (machine, tag)))
        else:
            self._wanted.setdefault((machine, tag), collections.deque()).append(coming)
        return coming

    def take(self, tag: int) -> tuple[int, np.ndarray] | None:
        """Return the (sender, payload) of a message that no `receive` waits for, or None."""
        for source, kind in self._arrived:
            if kind == tag:
                payload = _pop(self._arrived, (source, tag))
                left = self._arrived.pop((source, tag), None)
                if left is not None:  # at the end of the dict: other senders are next
                    self._arrived[source, tag] = left
                return source, payload
        return None

    def deliver(self, source: int, tag: int, payload: np.ndarray) -> None:
        """Give a message to who waits for it."""
        self.on_message(source)
        if (source, tag) in self._wanted:
            _fill(_pop(self._wanted, (source, tag)), payload)
        else:
            self._arrived.setdefault((source, tag), collections.deque()).append(payload)

    def memory_for(self, source: int, tag: int, nbytes: int) -> np.ndarray:
        """Return the memory of who waits for the next message with this tag, or new memory."""
        wanted = self._wanted.get((source, tag))
        if wanted and len(wanted[0].memory) == nbytes:
            return wanted[0].memory
        return np.empty(nbytes, np.uint8)


def _pop(queues, key):
    """Return the first item of a queue; drop the queue if it is the last."""
    found = queues[key].popleft()
    if not queues[key]:
        del queues[key]
    return found


def _fill(coming, payload):
    if len(payload) != len(coming.memory):
        raise RuntimeError(f"{len(payload)} bytes have come for {len(coming.memory)}")
    if payload is not coming.memory:
        coming.memory[...] = payload
    coming.is_done = True


class Connections(TaggedMessages):
    """The connections of one process with others, of which each direction has its key.

    Each has a number for its keys: its rank; or, `of_leaders`, one that no carrier has.
    """

    def __init__(self, rank: int, size: int, of_leaders: bool = False) -> None:
        super().__init__(rank, size)
        self._first = size if of_leaders else 0
        self._connections: dict[int, _Connection] = {}
        self.descriptors: dict[int, int] = {}  # of connections that have not ended -> process
        self.ended: dict[int, str] = {}  # processes whose connection has ended, and why
        # Takes a descriptor: with a copy in a child, epoll would not forget it by itself.
        self.before_close = lambda descriptor: None

    def add(self, rank: int, connection: Any, key: bytes, with_gmac: bool) -> None:
        """Exchange messages with one more process; `key` is that of the job."""
        seals = None
        if connection.family != socket.AF_UNIX:
            ends = [self._first + each for each in (self.rank, rank)]
            seals = [Seal(key, *each, with_gmac) for each in (ends, ends[::-1])]
        self._connections[rank] = _Connection(connection, seals)
        self.descriptors[connection.fileno()] = rank

    @property
    def unsent(self) -> list[int]:
        """The descriptors of connections that have no room for all that is to be sent."""
        return [fd for fd, rank in self.descriptors.items() if self._connections[rank].queue]

    def can_send(self, machine: int) -> bool:
        """Return whether there is a connection with nothing left to send."""
        connection = self._connections.get(machine)
        return connection is not None and connection.is_writable and not connection.queue

    def send(self, machine: int, buffer: Any, tag: int) -> MessageRequest:
        """Begin to send an array or bytes."""
        sending = MessageRequest(tag, bytes_of(buffer))
        connection = self._connections[machine]
        if connection.is_writable:
            connection.append(sending)
        return sending

    def _end(self, rank, error):
        if self._connections[rank].has_said_goodbye:
            self.end(rank, "")
        elif isinstance(error, (Changed, MemoryError)):
            self.end(rank, "has sent what was changed on its way")
        elif getattr(error, "errno", None) in (errno.ETIMEDOUT, errno.EHOSTUNREACH):
            self.end(rank, silent())
        else:
            self.end(rank, "has ended its connection")

    def end(self, rank: int, why: str) -> None:
        """Exchange nothing more with a process."""
        connection = self._connections[rank]
        if self.descriptors.pop(connection.fileno(), None) is not None:
            self.before_close(connection.fileno())
            connection.close()
            if why:
                self.ended[rank] = why

    def close(self) -> None:
        """Close all connections, in a process that was forked."""
        for each in self._connections.values():
            each.close()

    def say_goodbye(self) -> None:
        """Send nothing more: others know that this process ends; what they send is still read.

        Closed at once, with something unread, a connection would lose what was sent last.
        """
        for rank in self.descriptors.values():
            if self._connections[rank].is_writable:
                self.send(rank, b"", _LAST)
                self._connections[rank].close_writing()

    def read(self, descriptor: int) -> None:
        """Take what has come through a connection, and send what there is room for now."""
        rank = self.descriptors[descriptor]
        connection = self._connections[rank]
        self.on_message(rank)  # a part of a message is a sign of life, too
        try:
            for tag, payload in connection.receive(self, rank):
                if tag == _LAST:
                    connection.has_said_goodbye = True
                else:
                    self.deliver(rank, tag, payload)
        except (OSError, EOFError, MemoryError) as error:  # the last by a length that was changed
            self._end(rank, error)
        else:
            connection.flush()


class Mesh(Connections):
    """The connections of one process with all others of `comm`, an MPI.Comm.

    Without a `secret` all processes must be on one machine. Raises NoSecret if a process has
    another one, and Unreachable if one can't be reached within a minute.
    """

    def __init__(self, comm: Any, secret: bytes | None, with_leaders: bool = False) -> None:
        super().__init__(comm.rank, comm.size)
        self.hosts = [socket.gethostname()]  # the names of the machines of all processes
        self._how: tuple = (b"", False)  # key, with_gmac
        self.trusts = False  # whether all processes trust the network between them
        self._of_leader: dict[int, socket.socket] = {}
        if self.size == 1:
            return
        with contextlib.ExitStack() as stack:
            start = Start(self.rank, stack, is_on_network=secret is not None)
            key, facts = agree(comm, secret or b"", start.facts)
            self._how = key, all(each["gmac"] for each in facts)
            self.trusts = all(each["trusts"] for each in facts)
            self.hosts = [each["host"] for each in facts]
            for number, connection in start.connect(key, facts, with_leaders):
                if number < self.size:
                    self.add(number, connection, *self._how)
                else:
                    self._of_leader[number - self.size] = connection

    def give_to_leader(self, channel: socket.socket) -> None:
        """Give the first process of this machine its connections with other ones."""
        descriptors = [each.fileno() for each in self._of_leader.values()]
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, np.array(descriptors, np.intc))]
        message = pickle.dumps((self.rank, self.size, list(self._of_leader), self._how))
        with contextlib.suppress(BrokenPipeError):  # it has ended: the carrier will tell all
            channel.sendmsg([_GIVEN.pack(len(message)), message], beside if descriptors else [])
        for each in self._of_leader.values():
            each.close()


def connections_given(channel: Any) -> Connections:
    """Return the connections that `give_to_leader` gives, and that have come."""
    room = socket.CMSG_SPACE(4 * MOST_LEADERS)
    with socket.fromfd(channel.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
        head, beside, flags, _ = end.recvmsg(_GIVEN.size, room, socket.MSG_CMSG_CLOEXEC)
        if not head:
            raise EOFError
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, "too few descriptors are left for the connections")
        rank, size, machines, how = pickle.loads(end.recv(*_GIVEN.unpack(head)))
    given = Connections(rank, size, of_leaders=True)
    descriptors = np.frombuffer(beside[0][2] if beside else b"", np.intc).tolist()
    for machine, descriptor in zip(machines, descriptors):
        given.add(machine, socket.socket(fileno=descriptor), *how)
    return given


class _Connection:
    """One end of a connection; `seals` are those of what goes out and of what comes in, or None."""

    def __init__(self, connection, seals):
        self._socket, self._seals, self._n_mac = connection, seals, MAC if seals else 0
        self.queue = collections.deque()  # the Requests that the system has not taken whole
        self.is_writable, self.has_said_goodbye = True, False
        self._going = []  # what is left of the first
        self._buffer = bytearray(_BUFFERED)
        self._begin = self._end = 0  # of what has come, in the buffer
        self._tag, self._payload, self._rest = None, None, None  # of a message that is coming
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            _watch(connection)

    def fileno(self):
        """Return the descriptor."""
        return self._socket.fileno()

    def append(self, sending):
        """Send a message after others; what is unpickled overtakes arrays, which may be large."""
        self.queue.append(sending)
        if len(self.queue) == 1:
            self.flush()
        elif sending.tag <= MESSAGE:
            self.queue.pop()
            first = 1 + sum(each.tag <= MESSAGE for each in list(self.queue)[1:])
            self.queue.insert(first, sending)

    def close(self):
        """Close this end."""
        self._socket.close()

    def close_writing(self):
        """Let the other end read to the end."""
        self.is_writable = False
        if not self.queue:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)

    def flush(self):
        """Send what there is room for; nothing if the connection has ended, which reading tells."""
        try:
            while self.queue:
                if not self._going:
                    tag, payload = self.queue[0].tag, self.queue[0].memory
                    mac = self._seals[0].next(tag, payload) if self._seals else b""
                    self._going = [_HEAD.pack(tag, len(payload)), memoryview(payload), mac]
                try:
                    n_sent = self._socket.sendmsg(self._going)
                except BlockingIOError:
                    n_sent = 0
                is_full = n_sent < sum(map(len, self._going))
                while self._going and n_sent >= len(self._going[0]):
                    n_sent -= len(self._going.pop(0))
                if self._going:
                    self._going[0] = memoryview(self._going[0])[n_sent:]
                    tag, is_copied = self.queue[0].tag, self.queue[0].is_done
                    if tag > MESSAGE and not is_copied:  # the MAC is that of what is there now
                        self._going = [memoryview(b"".join(self._going))]
                self.queue[0].is_done = True
                if is_full:
                    return
                self.queue.popleft()
            if not self.is_writable:
                self.close_writing()
        except OSError:
            self.queue.clear()
            self.is_writable = False

    def receive(self, exchange, source):
        """Yield the (tag, payload) of messages; raise EOFError or OSError at the end."""
        left = _AT_ONCE
        with contextlib.suppress(BlockingIOError):
            while left > 0:
                left -= self._read()
                while self._has_next(exchange, source):
                    yield self._take()
                if self._rest is None and self._begin == self._end:
                    break  # if more has come meanwhile, poll tells

    def _read(self):
        """Read into the payload that is coming, and on into the buffer."""
        if self._end > _BUFFERED // 2:
            n_kept = self._end - self._begin
            self._buffer[:n_kept] = self._buffer[self._begin : self._end]
            self._begin, self._end = 0, n_kept
        rest = memoryview(b"") if self._rest is None else self._rest
        into = [*([rest] if len(rest) else []), memoryview(self._buffer)[self._end :]]
        n_read = self._socket.recvmsg_into(into)[0]
        if not n_read:
            raise EOFError
        n_rest = min(n_read, len(rest))
        if n_rest:
            self._rest = rest[n_rest:]
        self._end += n_read - n_rest
        return n_read

    def _has_next(self, exchange, source):
        """Return whether all of a message has come."""
        n_here = self._end - self._begin
        if self._tag is None:
            if n_here < _HEAD.size:
                return False
            tag, nbytes = _HEAD.unpack_from(self._buffer, self._begin)
            if nbytes > _LARGEST:
                raise Changed
            if nbytes <= _SMALL:
                if n_here < _HEAD.size + nbytes + self._n_mac:
                    return False
                payload = np.empty(nbytes, np.uint8)
            else:
                payload = exchange.memory_for(source, tag, nbytes)
            self._begin += _HEAD.size
            n_here = min(self._end - self._begin, nbytes)
            self._tag, self._payload = tag, payload
            payload[:n_here] = np.frombuffer(self._buffer, np.uint8, n_here, self._begin)
            self._rest = memoryview(payload)[n_here:]
            self._begin += n_here
        return not len(self._rest) and self._end - self._begin >= self._n_mac

    def _take(self):
        tag, payload = self._tag, self._payload
        self._tag = self._payload = self._rest = None
        if self._seals:
            mac = bytes(self._buffer[self._begin : self._begin + MAC])
            self._begin += MAC
            if not self._seals[1].is_next(tag, payload, mac):
                raise Changed
        return tag, payload


def _watch(connection):
    """Let the system end a connection through which nothing comes for long."""
    options, seconds = {socket.TCP_NODELAY: 1}, lost_seconds()
    if seconds < float("inf"):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        each = min(max(int(seconds / 4), 1), 32_767)  # the most that Linux takes
        options.update(dict.fromkeys((socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL), each))
        options[socket.TCP_KEEPCNT] = 4
        options[socket.TCP_USER_TIMEOUT] = min(int(1000 * seconds), 2**31 - 1)
    for option, value in options.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
