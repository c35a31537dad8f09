"""The methods of a group, which a rank calls.

    all ranks       barrier, all_gather, broadcast, all_reduce     in the same order on each rank
    pairs of ranks  send ──▶ receive                               in order; nobody else waits

When a rank dies, it is in `losses` of the others. Their collectives raise RankLost; `receive`
returns the end of that rank once, after all of its messages, and the others can go on.
"""

from __future__ import annotations

import collections
import copy
import pickle
import select
import socket
import time
from abc import ABC, abstractmethod
from typing import Any, Iterable, Sequence

import numpy as np

from synkhronos._arithmetic.operations import check_kind
from synkhronos.comm import Aborted


class RankLost(RuntimeError):
    """Another rank has died, or has left the group too early; `rank` is its number."""

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
    """One rank's end of a group."""

    rank: int
    size: int
    hosts: tuple[str, ...]  # the name of each rank's machine
    losses: dict[int, str]  # rank -> how it was lost, in words
    patience: float = 600.0  # seconds that a collective waits for other ranks

    def introduce(self, device: str) -> None:  # noqa: B027 - one rank alone is not watched
        """Tell `synkhronos top` which rank this process is, and on which device."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until all ranks are here.

        Raises
        ------
        RankLost
            If a rank was lost at any time, or has left, before it came to this barrier.
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

        All collectives raise what `barrier` raises.
        """

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        """Return the values of all ranks on rank `root`, and None on the others."""
        values = self.all_gather(value)
        return values if self.rank == root else None

    def broadcast(self, value: Any = None, root: int = 0) -> Any:
        """Return the value of rank `root`; the values of other ranks are ignored."""
        return self.all_gather(value if self.rank == root else None)[root]

    @abstractmethod
    def allocate(self, size: int, dtype: Any) -> np.ndarray:
        """Return memory for `all_reduce`: a flat array of zeros on each rank.

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
        """Replace an array from `allocate`, on all ranks, with the reduction over the ranks.

        The result has the same bits on all ranks.

        Parameters
        ----------
        array : numpy.ndarray
            From the same call of `allocate` on all ranks, such as the second of each.
        op : str
            See `synkhronos._arithmetic.operations`.
        sixteen_bits : bool
            Whether each rank's array, of floats, is first rounded to float16, with a scale of its
            own. It crosses the network in that form if the operator `scales`.

        Raises
        ------
        ValueError
            If the array is not from `allocate`; on all ranks, if it is from different calls.
        """

    @abstractmethod
    def send(self, rank: int, *message: Any) -> None:
        """Send a message without waiting for its receiver; to a lost rank nothing is sent.

        Arrays in it are copied now, except for arrays from `allocate`: these must not change
        until the receiver has taken the message after this one, or has answered.
        """

    def under_way(self, rank: int) -> int:
        """Return the number of messages with large arrays that a rank has not received yet."""
        return 0

    @abstractmethod
    def receive(self, seconds: float | None = None) -> tuple[int, tuple | None] | None:
        """Return (rank, message): the next message that has come from any rank.

        Messages of one rank come in their order, then once (rank, None): it has left the group, or
        is in `losses`. Between ranks there is no order. Large arrays in a message are views of the
        sender's memory, valid until the next `receive`.

        Returns None if nothing comes within `seconds`; without `seconds` it waits for as long as
        it takes.
        """

    def receive_from(self, rank: int, what: str = "") -> tuple:
        """Return the next message of a rank; drop messages of others that come before it.

        Raises
        ------
        RankLost
            If the rank has died, or has left.
        WaitedTooLong
            After `patience` seconds; it names `what`, or else the rank.
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
        """Wait until `receive` has something, or a descriptor in `also` can be read."""

    @abstractmethod
    def abort(self) -> None:
        """End the collectives of all ranks, now and later: they raise Aborted."""

    @abstractmethod
    def close(self, seconds: float = 10.0) -> None:
        """Leave the group when others have received all messages, or after `seconds`.

        The others learn that this rank has left, so they don't count it as lost.
        """


class SingleGroup(Group):
    """The only rank: a collective returns what it got, and messages come to their sender.

    Read it as the specification of `Group`.
    """

    rank, size = 0, 1

    def __init__(self) -> None:
        self.hosts, self.losses = (socket.gethostname(),), {}
        self._came: collections.deque[tuple] = collections.deque()
        self._is_aborted = False

    def barrier(self) -> None:
        """Return: all ranks are here."""
        if self._is_aborted:
            raise Aborted

    def all_gather(self, value: Any) -> list[Any]:
        """Return the value, in a list."""
        pickle.dumps(value)  # raises for what could not be sent to other ranks
        self.barrier()
        return [value]

    def allocate(self, size: int, dtype: Any) -> np.ndarray:
        """Return a flat array of zeros."""
        return np.zeros(size, dtype)

    def all_reduce(self, array: np.ndarray, op: str = "sum", sixteen_bits: bool = False) -> None:
        """Leave the array as it is, but for rounding: the reduction of one array is the array."""
        check_kind("all_reduce()", op, array.dtype, "array")
        self.barrier()
        if sixteen_bits:
            round_to_16_bits(array)

    def send(self, rank: int, *message: Any) -> None:
        """Keep a copy of a message until `receive`."""
        self._came.append(copy.deepcopy(message))

    def receive(self, seconds: float | None = None) -> tuple[int, tuple | None] | None:
        """Return (0, message), or None: nothing more can come while this rank waits."""
        return (0, self._came.popleft()) if self._came else None

    def wait(self, seconds: float, also: Sequence[int] = ()) -> None:
        """Wait for the descriptors; messages are there already."""
        if not self._came:
            select.select(also, (), (), seconds)

    def abort(self) -> None:
        """End all collectives."""
        self._is_aborted = True

    def close(self, seconds: float = 10.0) -> None:
        """Return: nobody is left."""


def round_to_16_bits(array: np.ndarray) -> None:
    """Round an array, in place, to float16 times a power of two.

    The largest value is scaled to between 1 and 2. So nothing overflows, and small gradients keep
    the 11 bits of float16.

    >>> array = np.array([1.0001, -3.0])
    >>> round_to_16_bits(array)
    >>> array
    array([ 1., -3.])
    """
    scale = array.dtype.type(scale_of_16_bits(array))
    np.multiply((array / scale).astype(np.float16), scale, array, dtype=array.dtype)


def scale_of_16_bits(values: np.ndarray) -> np.float32:
    """Return the power of two by which `round_to_16_bits` scales."""
    largest = float(np.abs(values).max(initial=0.0))
    if not np.isfinite(largest) or largest == 0.0:
        return np.float32(1)
    return np.float32(2.0 ** np.floor(np.log2(largest)))
