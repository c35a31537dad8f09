"""Messages and transfers between movers and servers, through MPI.

    sender                                       receiver
    tell(name, ...)      ── message ──────────▶  the loop calls the method of this name
    send(transfer)       ── "chunk", ... ─────▶  the loop says where the array goes: expect()
                         ── the array itself ─▶  received into that memory, without a copy;
                                                 a small one is in the message

Messages are pickled tuples, and come in the order in which they were sent. Arrays travel in chunks;
at most `UNDER_WAY` chunks to each process have been given to MPI, so that the next one can be
chosen late. Both ends of a chunk are arrays that others see: memory of a worker's script, or of a
server.
"""

from __future__ import annotations

import os
import pickle
import time
from typing import Any, Callable

import numpy as np

from synkhronos.comm.mpi.library import MPI
from synkhronos.comm.mpi.messages import dead_ranks, is_death
from synkhronos.parameter_server.remote.queues import CHUNK_BYTES, Queue, Transfer

UNDER_WAY = 2  # chunks to each process
_SMALL = 4096  # bytes of a chunk that goes in the message
_MOST_MESSAGES = 64  # under way, while small chunks go in them
_MESSAGE, _ARRAY = 301, 302  # tags
# Open MPI would ask the receiver before it sends a chunk, and the question and the answer would
# wait behind what a slow cable has queued. The system is to queue little, for the same reason.
_SETTINGS = {
    "OMPI_MCA_btl_tcp_eager_limit": str(2 * CHUNK_BYTES),
    "OMPI_MCA_btl_tcp_sndbuf": str(CHUNK_BYTES // 2),
}


def prepare() -> None:
    """Set what Open MPI reads when it is started."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)


class Post:
    """All messages and transfers of one process.

    Parameters
    ----------
    comm : MPI.Comm
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._status = MPI.Status()
        self._sending: list[tuple[Any, int, bytes]] = []  # messages: request, receiver, buffer
        self._queues: dict[int, Queue] = {}
        self._chunks: dict[int, list[tuple[Any, Transfer]]] = {}  # under way, by receiver
        self._arriving: list[tuple[Any, int, Callable[[], None]]] = []
        self._dropped: list[tuple] = []  # of processes that have died
        self.dead: set[int] = set()
        self.heard: dict[int, float] = {}  # time.monotonic() of the last message, by sender

    @property
    def is_busy(self) -> bool:
        """Whether data are under way, or wait for their turn."""
        return bool(self._arriving) or self.is_sending

    def is_receiving_from(self, rank: int) -> bool:
        """Return whether an array of a process is under way to this one."""
        return any(source == rank for _, source, _ in self._arriving)

    def tell(self, rank: int, *message: Any) -> None:
        """Send a message to a process; return at once."""
        if rank in self.dead:
            return
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with _deaths_ignored():
            request = self._comm.Isend([data, MPI.BYTE], rank, _MESSAGE)
            self._sending.append((request, rank, data))

    def send(self, rank: int, transfer: Transfer) -> None:
        """Queue an array for a process."""
        if rank in self.dead:
            _finish(transfer)
            return
        self._queues.setdefault(rank, Queue()).add(transfer)
        self._chunks.setdefault(rank, [])
        self._fill(rank)

    def expect(
        self, rank: int, content: int | bytes, memory: np.ndarray, then: Callable[[], None]
    ) -> None:
        """Receive a chunk into memory; call `then` when it is there.

        `content` is what the message "chunk" has: the number of bytes that follow, or the bytes.
        """
        if isinstance(content, bytes):
            _bytes(memory)[:] = np.frombuffer(content, np.uint8)
            then()
            return
        with _deaths_ignored():
            request = self._comm.Irecv([_bytes(memory), MPI.BYTE], rank, _ARRAY)
            self._arriving.append((request, rank, then))

    def progress(self) -> bool:
        """Go on with all that is under way; return whether something has ended."""
        n_sending = len(self._sending)
        self._sending = [each for each in self._sending if not _has_ended(each[0])[0]]
        happened = len(self._sending) < n_sending
        arriving, self._arriving = self._arriving, []
        done = []
        for each in arriving:
            ended, is_whole = _has_ended(each[0])
            if not ended:
                self._arriving.append(each)
            elif is_whole:
                done.append(each[2])
        for then in done:
            then()
        for rank in list(self._chunks):
            chunks = self._chunks[rank]
            for each in [each for each in chunks if _has_ended(each[0])[0]]:
                chunks.remove(each)
                transfer = each[1]
                transfer.n_under_way -= 1
                happened = True
                if transfer.is_taken and not transfer.n_under_way:
                    _finish(transfer)
            self._fill(rank)
        return happened or bool(done)

    def receive(self) -> list[tuple[int, tuple]]:
        """Return the messages that have come, each with the rank of its sender."""
        found = []
        while True:
            try:
                if not self._comm.Iprobe(MPI.ANY_SOURCE, _MESSAGE, self._status):
                    return found
                data = bytearray(self._status.Get_count(MPI.BYTE))
                source = self._status.source
                self._comm.Recv([data, MPI.BYTE], source, _MESSAGE)
            except MPI.Exception as error:
                if not is_death(error):
                    raise
                self.find_dead()
                return found
            self.heard[source] = time.monotonic()
            message = pickle.loads(data)
            if message[0] != "alive" and source not in self.dead:
                found.append((source, message))

    def find_dead(self) -> set[int]:
        """Return the ranks of the processes that have died, and forget what they were to get."""
        for rank in dead_ranks(self._comm) - self.dead:
            self.drop(rank)
        return self.dead

    def drop(self, rank: int) -> None:
        """Take a process for dead: forget what it was to get, and what was to come from it."""
        self.dead.add(rank)
        if rank in self._queues:
            self._queues[rank].clear()
            self._dropped += self._chunks[rank]  # MPI may still read their memory
            self._chunks[rank] = []
        self._dropped += [each for each in self._sending + self._arriving if each[1] == rank]
        self._sending = [each for each in self._sending if each[1] != rank]
        self._arriving = [each for each in self._arriving if each[1] != rank]

    @property
    def is_sending(self) -> bool:
        """Whether messages or transfers have not left this process."""
        waiting = self._sending or any(self._chunks.values()) or any(self._queues.values())
        return bool(waiting)

    def _fill(self, rank):
        """Begin chunks of the transfers that are next."""
        queue, chunks = self._queues[rank], self._chunks[rank]
        while queue and len(chunks) < UNDER_WAY and len(self._sending) < _MOST_MESSAGES:
            transfer, begin, chunk = queue.take()
            is_small = chunk.nbytes <= _SMALL
            content = chunk.tobytes() if is_small else chunk.nbytes
            self.tell(rank, "chunk", transfer.number, transfer.version, begin, content)
            if is_small:
                if transfer.is_taken and not transfer.n_under_way:
                    _finish(transfer)
                continue
            transfer.n_under_way += 1
            with _deaths_ignored():
                request = self._comm.Isend([_bytes(chunk), MPI.BYTE], rank, _ARRAY)
                chunks.append((request, transfer))


def _finish(transfer):
    if transfer.on_sent is not None:
        transfer.on_sent()


def _bytes(array):
    return array.view(np.uint8) if array.size else np.empty(0, np.uint8)


def _has_ended(request):
    """Return whether a request has ended, and whether it has done what it was to do."""
    try:
        return (True, True) if request.Test() else (False, False)
    except MPI.Exception as error:
        if not is_death(error):
            raise
        return True, False


class _deaths_ignored:
    """A context that drops MPI's errors about dead processes, which `Post.find_dead` tells of."""

    def __enter__(self):
        pass

    def __exit__(self, kind, error, trace):
        return isinstance(error, MPI.Exception) and is_death(error)
