"""A group: processes that work together, all with the same methods.

    all ranks       barrier, all_gather, broadcast, all_reduce     in the same order on each rank
    pairs of ranks  send ──▶ receive                               in order; nobody else waits

==============  ==================================================================================
``single``      one process
``shared``      processes of one machine: shared memory, and a socket for each pair; no MPI, no port
``mpi``         processes of several machines: `shared` on each, and a carrier that speaks MPI
==============  ==================================================================================

A rank that dies is in `losses` of the others. Collectives raise RankLost then;
`receive` tells of it once, after all messages of that rank, and the others can go on.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any, Iterable, Sequence

import numpy as np


class RankLost(RuntimeError):
    """Another rank has ended, and did not say so; `rank` is its number."""

    def __init__(self, text: str, rank: int | None = None) -> None:
        super().__init__(text)
        self.rank = rank


class WaitedTooLong(RuntimeError):
    """Other ranks did not come within `patience` seconds."""

    def __init__(self, seconds: float, what: str) -> None:
        super().__init__(
            f"waited {seconds:.0f} s for {what}: is one of them stopped? The option patience lets "
            "a run wait longer."
        )


def named(ranks: Iterable[int]) -> str:
    """Return ranks in words.

    >>> named([0, 2])
    'rank 0 and rank 2'
    """
    return " and ".join(f"rank {rank}" for rank in ranks)


class Group(ABC):
    """One rank's end of a group.

    Attributes
    ----------
    rank, size : int
    hosts : tuple of str
        The name of each rank's machine.
    losses : dict
        Rank -> how it was lost, in words.
    patience : float
        Seconds that a collective waits for other ranks.
    """

    rank: int
    size: int
    hosts: tuple[str, ...]
    losses: dict[int, str]
    patience: float = 600.0

    def introduce(self, device: str) -> None:  # noqa: B027 - one rank alone is not watched
        """Say what this process is, and on which device, to `synkhronos top`."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until all ranks are here.

        Raises
        ------
        RankLost
            If a rank was lost, also a while before, or has left, before it came to this barrier.
        Aborted
            If a rank has aborted the group.
        WaitedTooLong
            After `patience` seconds.
        """

    def _raise_loss(self) -> None:
        """Raise RankLost if a rank was lost."""
        if self.losses:
            rank = min(self.losses)
            raise RankLost(f"rank {rank} {self.losses[rank]}", rank)

    @abstractmethod
    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order: any objects that pickle.

        Raises what `barrier` raises.
        """

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        """Return the values of all ranks on rank `root`, and None on the others.

        Raises what `barrier` raises.
        """
        values = self.all_gather(value)
        return values if self.rank == root else None

    def broadcast(self, value: Any = None, root: int = 0) -> Any:
        """Return the value of rank `root`; what other ranks give is not looked at."""
        return self.all_gather(value if self.rank == root else None)[root]

    @abstractmethod
    def allocate(self, size: int, dtype: Any) -> np.ndarray:
        """Return memory for `all_reduce`: a flat array of zeros, the same on all ranks.

        It is a collective: all ranks call it with the same arguments.

        Raises
        ------
        ValueError
            On all ranks, if the arguments differ.
        SharedMemoryFull
            On all ranks, if one has no room for it.
        """

    @abstractmethod
    def all_reduce(self, array: np.ndarray, op: str = "sum", sixteen_bits: bool = False) -> None:
        """Replace the values of an array of `allocate`, on all ranks, with the reduction of all.

        The result has the same bits on all ranks.

        Parameters
        ----------
        array : numpy.ndarray
            The same on all ranks: that of their first `allocate`, or of their second, and so on.
        op : str
            See `synkhronos._arithmetic.operations`.
        sixteen_bits : bool
            Whether each contribution is rounded to float16, with a scale of its own. Between
            machines it travels so. Of floats only.

        Raises
        ------
        ValueError
            If it is no array of `allocate`; on all ranks, if it is another one on some.
        """

    @abstractmethod
    def send(self, rank: int, *message: Any) -> None:
        """Send a message; don't wait for its receiver. To a rank that was lost nothing is sent.

        Arrays in it are copied now, but for those in memory of `allocate`: these must not change
        until the receiver has taken the message after this one, or has answered.
        """

    def under_way(self, rank: int) -> int:
        """Return how many messages to a rank it has not taken, of those with large arrays."""
        return 0

    @abstractmethod
    def receive(self, seconds: float | None = None) -> tuple[int, tuple | None] | None:
        """Return (rank, message): the next message that has come from any rank.

        Messages of one rank come in their order, and its end after all of them, once; between ranks
        there is no order. Large arrays in a message are views of the sender's memory, valid until
        the next `receive`.

        Parameters
        ----------
        seconds : float, optional
            How long to wait; None for as long as it takes.

        Returns
        -------
        (int, tuple), (int, None) or None
            Without a message the rank has left the group, or is in `losses`. None if nothing has
            come.
        """

    def receive_from(self, rank: int, what: str = "") -> tuple:
        """Return the next message of a rank; nothing is kept that comes from others before it.

        Raises
        ------
        RankLost
            If the rank has died, or has left.
        WaitedTooLong
            After `patience` seconds: for `what`, or the rank.
        """
        end = time.monotonic() + self.patience
        while True:
            came = self.receive(max(0.0, end - time.monotonic()))
            if came is None:
                raise WaitedTooLong(self.patience, what or f"rank {rank}")
            if came[0] == rank and came[1] is None:
                raise RankLost(f"rank {rank} has died", rank)
            if came[0] == rank:
                return came[1]

    @abstractmethod
    def wait(self, seconds: float, also: Sequence[int] = ()) -> None:
        """Wait until `receive` has something, or a descriptor can be read, at most so long."""

    @abstractmethod
    def abort(self) -> None:
        """End the collectives of all ranks, now and later: they raise Aborted."""

    @abstractmethod
    def close(self, seconds: float = 10.0) -> None:
        """Leave the group, when others have taken what was sent to them, or after so many seconds.

        The others are told that this rank has left, and is not lost.
        """
