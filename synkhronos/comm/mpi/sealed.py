"""Authenticated messages: each is from a process of the job, for its receiver, and not a replay.

    sender     payload ──▶ copied, with sender, receiver, tag and number, and the HMAC of all that
                                                     │ MPI
    receiver   memory of its own ◀───────────────────┘
               valid    ──▶ in the order of the numbers into the memory that was to receive it
               invalid  ──▶ dropped, with one warning

MPI checks no sender: a program that reaches a port of a process can send to it in the name of any
rank. So no message is unpickled, and no array is used, before it has been checked. Nobody can make
a valid message without the secret, and one that was recorded on the network is valid only once, for
its receiver. Nothing is encrypted.

A large message may come after small ones that were sent later: these are kept until then.

HMAC is that of Krawczyk, Bellare and Canetti, "HMAC: keyed-hashing for message authentication",
RFC 2104.
"""

from __future__ import annotations

import collections
import hmac
import os
import pickle
import struct
import time
from typing import Any, Callable

import numpy as np

from synkhronos._machine.log import log
from synkhronos.comm.mpi.mpi_library import MPI
from synkhronos.comm.mpi.transfers import bytes_of
from synkhronos.comm.reports import Patience

_HEADER = struct.Struct(">4q")  # sender, receiver, tag, number
_MAC = 32
TRAILER = _HEADER.size + _MAC  # bytes that a message is longer than its payload
_HELLO = b"synkhronos: this process of a job has the secret"
_OUTGOING = 16  # requests that are kept before those that have ended are dropped
_WARN_SECONDS, _NAP_SECONDS = 30.0, 0.0005
_COLLECTIVE = 30_000  # the tag of `allgather`


class SecretsDiffer(RuntimeError):
    """Processes of a job do not have the same secret."""


class Seal:
    """Makes the messages of one process, and checks those that it gets; sends nothing.

    The key is the same in all processes of a job, and in no other job.

    >>> zero, one = Seal(b"key", 0, 2), Seal(b"key", 1, 2)
    >>> first, second = zero.close(1, 5, b"first"), zero.close(1, 5, b"second")
    >>> [bytes(payload) for _, payload in one.open(0, 5, first)]
    [b'first']
    >>> one.open(0, 5, first) is None  # once more
    True
    """

    def __init__(self, key: bytes, rank: int, size: int) -> None:
        self._key, self._rank = key, rank
        self._n_sent, self._n_opened = [0] * size, [0] * size
        self._early: list[dict[int, tuple]] = [{} for _ in range(size)]

    def close(self, to: int, tag: int, payload: Any) -> np.ndarray:
        """Return the next message to a process: a copy of the payload, and what `open` checks."""
        payload = bytes_of(payload)
        frame = np.empty(len(payload) + TRAILER, np.uint8)
        frame[: len(payload)] = payload
        _HEADER.pack_into(frame, len(payload), self._rank, to, tag, self._n_sent[to])
        frame[-_MAC:] = np.frombuffer(self._mac(frame), np.uint8)
        self._n_sent[to] += 1
        return frame

    def open(self, source: int, tag: int, frame: np.ndarray) -> list | None:
        """Check a message; return a list of the (tag, payload) that are next, or None if invalid.

        The list is empty if an earlier message is still to come.
        """
        if len(frame) < TRAILER or not hmac.compare_digest(self._mac(frame), frame[-_MAC:]):
            return None
        n = len(frame) - TRAILER
        *names, number = _HEADER.unpack_from(frame, n)
        early, count = self._early[source], self._n_opened[source]
        if names != [source, self._rank, tag] or number < count or number in early:
            return None
        early[number] = tag, frame[:n]
        ready = []
        while count in early:
            ready.append(early.pop(count))
            count += 1
        self._n_opened[source] = count
        return ready

    def _mac(self, frame):
        return hmac.digest(self._key, frame[:-_MAC], "sha256")


class Sealed:
    """A communicator with the methods of mpi4py's that the package uses, on top of `comm`.

    `on_message` takes the sender of each message that was checked. Raises SecretsDiffer if a
    process has another secret.
    """

    def __init__(self, comm: Any, secret: bytes) -> None:
        self._comm = comm
        self._secret = secret
        self.rank, self.size = comm.rank, comm.size
        self._seal = Seal(self._agree(), comm.rank, comm.size)
        self._status = MPI.Status()
        self._outgoing: list[Any] = []  # requests: MPI reads their memory until they have ended
        self._incoming: list[tuple] = []  # request, source, tag, frame
        self._arrived: dict[tuple[int, int], collections.deque] = {}  # payloads, by source and tag
        self._wanted: dict[tuple[int, int], collections.deque] = {}  # of Irecv
        self._most_outgoing = _OUTGOING
        self._has_warned = False
        self.on_message: Callable[[int], None] = lambda source: None

    def _agree(self):
        """Return the key of this job, from the secret and a random number of each process.

        So no message of another job is valid in this one, even with the same secret.
        """
        drawn = os.urandom(32)
        own = drawn + hmac.digest(self._secret, _HELLO + drawn, "sha256")
        everyone = np.empty((self.size, len(own)), np.uint8)
        self._comm.Allgather(np.frombuffer(own, np.uint8), everyone)
        for rank, hello in enumerate(everyone):
            expected = hmac.digest(self._secret, _HELLO + hello[:32].tobytes(), "sha256")
            if not hmac.compare_digest(expected, hello[32:]):
                raise SecretsDiffer(f"process {rank} of this job has another secret than this one")
        return hmac.digest(self._secret, everyone.tobytes(), "sha256")

    def Isend(self, buffer: Any, dest: int, tag: int = 0) -> Any:
        """Begin to send a copy of an array or of bytes; return a request."""
        request = self._comm.Isend([self._seal.close(dest, tag, buffer), MPI.BYTE], dest, tag)
        if len(self._outgoing) > self._most_outgoing:
            self._outgoing = [each for each in self._outgoing if not each.Test()]
            self._most_outgoing = max(_OUTGOING, 2 * len(self._outgoing))
        self._outgoing.append(request)
        return request

    def Irecv(self, buffer: Any, source: int, tag: int = 0) -> _Coming:
        """Begin to receive into an array, which changes only after the message was checked."""
        coming = _Coming(self, source, bytes_of(buffer))
        self._wanted.setdefault((source, tag), collections.deque()).append(coming)
        self._match(source, tag)
        return coming

    def Iprobe(self, source: int, tag: int, status: Any = None) -> bool:
        """Return whether there is a checked message that no `Irecv` waits for."""
        self.progress(source)
        if source == MPI.ANY_SOURCE:
            source = next((each for each, kind in self._arrived if kind == tag), MPI.ANY_SOURCE)
        queue = self._arrived.pop((source, tag), None)
        if queue is None:
            return False
        self._arrived[source, tag] = queue  # at the end of the dict: other sources are next
        if status is not None:
            status.source, status.tag = source, tag
            status.Set_elements(MPI.BYTE, len(queue[0]))
        return True

    def progress(self, source: int = MPI.ANY_SOURCE) -> None:
        """Take the messages that have come; raise the errors of MPI's ``Iprobe`` for a source."""
        status = self._status
        while self._comm.Iprobe(source, MPI.ANY_TAG, status):
            self._take(status.source, status.tag, status.Get_count(MPI.BYTE))
        if not self._incoming:
            return
        incoming, self._incoming = self._incoming, []
        for each in incoming:
            request, sender, tag, frame = each
            try:
                if not request.Test():
                    self._incoming.append(each)
                    continue
                opened = self._seal.open(sender, tag, frame)
            except MPI.Exception as error:
                if error.Get_error_class() != MPI.ERR_TRUNCATE:
                    raise
                opened = None
            if opened is None:
                self._refuse(sender)
            else:
                self.on_message(sender)
            for kind, payload in opened or ():
                self._arrived.setdefault((sender, kind), collections.deque()).append(payload)
                self._match(sender, kind)

    def _take(self, source, tag, nbytes):
        """Begin to receive a message; one that is larger than all memory is cut, and so invalid."""
        try:
            frame = np.empty(nbytes, np.uint8)
        except (MemoryError, ValueError):
            frame = np.empty(0, np.uint8)
        request = self._comm.Irecv([frame, MPI.BYTE], source, tag)
        self._incoming.append((request, source, tag, frame))

    def _match(self, source, tag):
        arrived, wanted = self._arrived.get((source, tag)), self._wanted.get((source, tag))
        while arrived and wanted:
            wanted.popleft().fill(arrived.popleft())
        for queues, queue in (self._arrived, arrived), (self._wanted, wanted):
            if queue is not None and not queue:
                del queues[source, tag]

    def _refuse(self, source):
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "dropped a message in the name of process %d of this job, which has not sent it so:"
                " another program sends to the ports of MPI here. More of them are dropped "
                "without a word",
                source,
            )

    def Recv(self, buffer: Any, source: int, tag: int = 0) -> None:
        """Wait for a message, into an array."""
        _wait_until(self.Irecv(buffer, source, tag).Test, source)

    def allgather(self, value: Any) -> list:
        """Return the objects of all processes, which are pickled."""
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        others = [rank for rank in range(self.size) if rank != self.rank]
        for rank in others:
            self.Isend(data, rank, _COLLECTIVE)
        values = {self.rank: value}
        for rank in others:
            _wait_until(lambda rank=rank: self.Iprobe(rank, _COLLECTIVE), rank)
            payload = self._arrived[rank, _COLLECTIVE].popleft()
            self._match(rank, _COLLECTIVE)
            values[rank] = pickle.loads(payload)
        return [values[rank] for rank in range(self.size)]


class _Coming:
    """The request of an `Irecv`: an array into which a message is to come."""

    def __init__(self, sealed, source, memory):
        self._sealed, self._source, self._memory = sealed, source, memory
        self._has_come = False

    def fill(self, payload):
        """Take the checked message."""
        if len(payload) != len(self._memory):
            raise RuntimeError(f"{len(payload)} bytes have come for {len(self._memory)}")
        self._memory[...] = payload
        self._has_come = True

    def Test(self):
        """Return whether the message is there."""
        if not self._has_come:
            self._sealed.progress(self._source)
        return self._has_come


def _wait_until(is_ready, rank):
    warnings = Patience(_WARN_SECONDS, 0.0)
    while not is_ready():
        warnings.wait_for_others(f"process {rank}")
        time.sleep(_NAP_SECONDS)
    warnings.end()
