"""A group of processes of mpirun, each of which speaks MPI itself.

    all_reduce   in shared memory within each machine (`machine_sums`), by MPI between machines
    send         a pickled message, which MPI takes over
    receive      what has come from a rank that is alive, and the deaths of the others

Under ``mpirun --with-ft ulfm`` the death of a process is an error in the calls that name it, and
the others go on; elsewhere mpirun ends all.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import socket
import time
from typing import Any, Sequence

import numpy as np

from synkhronos._arithmetic.operations import rounded_to_16_bits
from synkhronos.comm.group import Group, WaitedTooLong
from synkhronos.comm.mpi.library import MPI
from synkhronos.comm.mpi.machine_sums import MachineSums
from synkhronos.comm.mpi.messages import complete, dead_ranks, is_death, wait_until
from synkhronos.comm.mpi.waiting import Waiting

_TAG = 700
_SMALL = 1 << 15  # bytes of a message that does not count as under way
_FIND_SECONDS = 0.25  # between two looks for sockets that MPI has opened
_LEFT = ("synkhronos: a rank leaves",)


class MpiGroup(Group):
    """One rank's end; see `Group`.

    Parameters
    ----------
    comm : MPI.Comm or Sealed
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.rank, self.size = comm.rank, comm.size
        self.losses = {}
        self.hosts = tuple(comm.allgather(socket.gethostname()))
        self._sums = None  # made when it is needed: all ranks need it then
        self._under_way: list[tuple[Any, int, bytes]] = []  # request, receiver, its memory
        self._waiting: Waiting | None = None
        self._own: list[tuple] = []
        self._spare = os.pipe()  # of which nothing ever comes
        self._has_left: set[int] = set()
        self._untold: list[int] = []  # ranks of which `receive` has not told that they are gone

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self._raise_loss()
        complete(self._comm.Ibarrier(), "the other ranks", self.patience)

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order."""
        self.barrier()  # a blocking call is not to wait for one of them
        return self._comm.allgather(value)

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        """Return the values of all ranks on rank `root`, and None on the others."""
        if root:
            everyone = self.all_gather(value)
            return everyone if self.rank == root else None
        self.barrier()
        return self._comm.gather(value)

    def broadcast(self, value: Any = None, root: int = 0) -> Any:
        """Return the value of rank `root`."""
        self.barrier()
        return self._comm.bcast(value, root)

    def allocate(self, size: int, dtype: Any) -> np.ndarray:
        """Return memory for `all_reduce`: a flat array of zeros, the same on all ranks."""
        asked = self.all_gather((size, np.dtype(dtype).str))
        if any(each != asked[0] for each in asked):
            raise ValueError(f"allocate() got other arguments on other ranks: {asked}.")
        if self._sums is None:
            self._sums = MachineSums(self._comm, self.patience)
        return self._sums.allocate(size, dtype)

    def all_reduce(self, array: np.ndarray, op: str = "sum", sixteen_bits: bool = False) -> None:
        """Replace the values of an array of `allocate` with the reduction over all ranks."""
        if op != "sum":
            raise NotImplementedError(f"{op} of ranks that speak MPI")
        if sixteen_bits:
            self._sum_in_16_bits(array)
        else:
            self._sums(array)

    def _sum_in_16_bits(self, array):
        """Send shares to the ranks that sum them, and the sums to all, each in one message."""
        comm, size = self._comm, self.size
        counts = [len(part) for part in np.array_split(np.empty(array.size, "i1"), size)]
        begins = [0, *np.cumsum(counts)[:-1].tolist()]
        half, scale = rounded_to_16_bits(array)
        scales = np.ones(size, np.float32)
        comm.Allgather(np.array([scale]), scales)
        own = counts[self.rank]
        received = np.empty((size, own), np.uint16)
        comm.Alltoallv((half.view(np.uint16), (counts, begins)), (received, ([own] * size, None)))
        share = array[begins[self.rank] :][:own]
        share[:] = 0
        for part, each in zip(received.view(np.float16), scales):
            share += part.astype(array.dtype, copy=False) * array.dtype.type(each)
        comm.Allgatherv(MPI.IN_PLACE, (array, (counts, begins)))

    def send(self, rank: int, *message: Any) -> None:
        """Send a message; don't wait for its receiver."""
        if rank == self.rank:
            self._own.append(copy.deepcopy(message))
        elif rank not in self.losses and rank not in self._has_left:
            self._post(rank, message)

    def _post(self, rank, message):
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._deaths_noted():
            # Complete when its receiver has begun to take it.
            request = self._comm.Issend([data, MPI.BYTE], rank, _TAG)
            self._under_way.append((request, rank, data))

    def under_way(self, rank: int) -> int:
        """Return how many large messages a rank has not begun to take."""
        self._reap()
        return sum(to == rank and len(data) > _SMALL for _, to, data in self._under_way)

    def receive(self, seconds: float | None = None) -> tuple[int, tuple | None] | None:
        """Return (rank, message): the next message that has come from any rank."""
        found: list[tuple[int, Any]] = []

        def has_come():
            self._reap()
            if self._own:
                found.append((self.rank, self._own.pop(0)))
                return True
            status = MPI.Status()
            with self._deaths_noted():
                # Not of any source: what a dead rank has sent can be seen, but not received.
                for rank in self._others:
                    if self._comm.Iprobe(rank, _TAG, status):
                        found.append((rank, self._comm.recv(source=rank, tag=_TAG)))
                        return True
            if self._untold:
                found.append((self._untold.pop(0), None))
            return bool(found)

        if not self._waits(has_come, seconds):
            return None
        rank, message = found[0]
        if message == _LEFT:
            self._has_left.add(rank)
            message = None
        return rank, message

    def wait(self, seconds: float, also: Sequence[int] = ()) -> None:
        """Wait until `receive` has something, or a descriptor can be read."""
        if self._waiting is None:
            self._waiting = Waiting()
            self._waiting.add_descriptor(self._spare[0])  # it waits for one at least
            self._found_at = 0.0
        waiting, end = self._waiting, time.monotonic() + seconds
        for descriptor in also:
            waiting.add_descriptor(descriptor)
        try:
            while True:
                n_under_way = len(self._under_way)
                ready = waiting.for_ranks(is_busy=bool(n_under_way))
                has_come = bool(self._own or self._untold) or self._is_there()
                self._reap()
                waiting.note(bool(ready) or len(self._under_way) < n_under_way, has_come)
                now = time.monotonic()
                if now - self._found_at > _FIND_SECONDS:
                    self._found_at = now
                    waiting.find_sockets()
                if ready or has_come or now > end or len(self._under_way) < n_under_way:
                    return
        finally:
            for descriptor in also:
                waiting.remove_descriptor(descriptor)

    def _is_there(self):
        with self._deaths_noted():
            return any(self._comm.Iprobe(rank, _TAG) for rank in self._others)
        return True  # a death

    @property
    def _others(self):
        gone = {self.rank, *self.losses, *self._has_left}
        return [rank for rank in range(self.size) if rank not in gone]

    @staticmethod
    def _waits(is_ready, seconds):
        if seconds is None:
            wait_until(is_ready, "a message", float("inf"))
            return True
        end = time.monotonic() + seconds
        with contextlib.suppress(WaitedTooLong):
            wait_until(is_ready, "a message", max(0.0, end - time.monotonic()))
            return True
        return False

    def _reap(self):
        """Forget the messages that were sent, and those to ranks that were lost."""
        left = []
        for each in self._under_way:
            request, rank, _ = each
            with self._deaths_noted():
                if rank not in self.losses and not request.Test():
                    left.append(each)
        self._under_way = left

    @contextlib.contextmanager
    def _deaths_noted(self):
        try:
            yield
        except MPI.Exception as error:
            if not is_death(error):
                raise
            for rank in sorted(dead_ranks(self._comm) - {*self.losses} - self._has_left):
                self.losses[rank] = "has died"
                self._untold.append(rank)

    def abort(self) -> None:
        """End all ranks: mpirun does."""
        self._comm.Abort(1)

    def close(self, seconds: float = 10.0) -> None:
        """Leave the group, when others have begun to take what was sent to them."""
        for rank in self._others:
            self._post(rank, _LEFT)
        end = time.monotonic() + seconds
        while self._under_way and time.monotonic() < end:
            self._reap()
            time.sleep(0.001)
