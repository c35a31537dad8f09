"""Messages and transfers between movers and servers, in their group.

    sender                                       receiver
    tell(name, ...)      ── message ──────────▶  the loop calls the handler of this name
    send(transfer)       ── "chunk", ... ─────▶  the same, with the chunk in the message

Messages come in the order in which they were sent. Arrays travel in chunks, of which at most
`UNDER_WAY` are on their way to each process, so that transfers of a higher priority can overtake.
"""

from __future__ import annotations

from typing import Any, Iterator, NamedTuple

from synkhronos.parameter_server.group.interface import Group
from synkhronos.parameter_server.remote.queues import Queue, Transfer

UNDER_WAY = 2  # chunks to each process


class Failure(NamedTuple):
    """An exception as it is sent."""

    name: str  # of its class
    text: str
    attributes: dict[str, Any] | None = None


class Post:
    """All messages and transfers of one process."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._queues: dict[int, Queue] = {}
        self.dead: set[int] = set()  # processes that have ended, or are lost

    def tell(self, rank: int, *message: Any) -> None:
        """Send a message to a process; return at once."""
        if rank not in self.dead:
            self._group.send(rank, *message)

    def send(self, rank: int, transfer: Transfer) -> None:
        """Queue an array for a process."""
        if rank in self.dead:
            _finish(transfer)
            return
        self._queues.setdefault(rank, Queue()).add(transfer)
        self._fill(rank)

    def progress(self) -> None:
        """Begin the chunks that can be sent now."""
        for rank in list(self._queues):
            self._fill(rank)

    def receive(self) -> Iterator[tuple[int, tuple]]:
        """Yield the messages that have come, each with the rank of its sender.

        Arrays in a message are valid until the next one. The last one of a process that ends, or is
        lost, is ``("ended",)``.
        """
        while True:
            came = self._group.receive(0.0)
            if came is None:
                return
            rank, message = came
            if message is None:
                self.dead.add(rank)
                self._queues.pop(rank, None)
            yield rank, message or ("ended",)

    @property
    def is_sending(self) -> bool:
        """Whether transfers have not left this process, or chunks have not been taken."""
        return any(queue or self._group.under_way(rank) for rank, queue in self._queues.items())

    def _fill(self, rank):
        """Send chunks of the transfers that are next."""
        queue = self._queues[rank]
        while queue and self._group.under_way(rank) < UNDER_WAY:
            transfer, begin, chunk = queue.take()
            self._group.send(rank, "chunk", transfer.number, transfer.version, begin, chunk)
            if transfer.is_taken:  # the group has a copy of each chunk
                _finish(transfer)


def _finish(transfer):
    if transfer.on_sent is not None:
        transfer.on_sent()
