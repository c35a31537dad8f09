"""A group of one process: each collective gives back what it got, and messages come to the sender.

Read it as the specification of `Group`.
"""

from __future__ import annotations

import collections
import copy
import pickle
import select
import socket
from typing import Any, Sequence

import numpy as np

from synkhronos._arithmetic.operations import check_kind, round_to_16_bits
from synkhronos.comm import Aborted
from synkhronos.comm.group import Group


class SingleGroup(Group):
    """The only rank."""

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
