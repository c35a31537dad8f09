"""Messages between the carriers of machines, and signs of life: one that is cut off is silent.

A message is a tuple whose first item names it. Messages between two carriers keep their order.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any, Iterator

import numpy as np

from synkhronos.comm.heartbeats import Heartbeats
from synkhronos.comm.mpi.library import MPI
from synkhronos.comm.mpi.transfers import bytes_of
from synkhronos.comm.shared.parcels import pickled

_TAG = 1
_PART = 1 << 20  # bytes that are sent at once: each part is a sign of life
_LENGTH = struct.Struct("Q")


class Machines:
    """The carriers of the other machines, as one carrier sees them.

    Parameters
    ----------
    comm : MPI.Comm or Sealed
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.machine, self.n_machines = comm.rank, comm.size
        self.others = [machine for machine in range(comm.size) if machine != comm.rank]
        self._sending: list[tuple[Any, np.ndarray]] = []  # request, its memory
        self._coming: dict[int, list[np.ndarray]] = {}  # parts of the next message of each
        self._lost: set[int] = set()
        watched = self.others if self.machine == 0 else [0]
        self._heartbeats = Heartbeats(watched, lambda machine: self.tell(machine, "alive"))

    def tell(self, machine: int, *message: Any) -> None:
        """Send a message; arrays in it are copied."""
        if machine not in self._lost:
            frame = _framed(message)
            for at in range(0, len(frame), _PART):
                part = frame[at : at + _PART]
                self._sending.append((self._comm.Isend([part, MPI.BYTE], machine, _TAG), part))

    def tell_all(self, *message: Any) -> None:
        """Send a message to all other machines."""
        for machine in self.others:
            self.tell(machine, *message)

    def received(self) -> Iterator[tuple[int, tuple]]:
        """Yield (machine, message) for what has come."""
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, _TAG, status):
            machine, part = status.Get_source(), np.empty(status.Get_count(MPI.BYTE), np.uint8)
            self._comm.Recv([part, MPI.BYTE], machine, _TAG)
            if machine in self._lost:
                continue
            self._heartbeats.note(machine)
            parts = self._coming.setdefault(machine, [])
            parts.append(part)
            if sum(map(len, parts)) == _LENGTH.unpack_from(parts[0])[0]:
                del self._coming[machine]
                yield machine, _unframed(parts[0] if len(parts) == 1 else np.concatenate(parts))

    def send(self, machine: int, buffer: np.ndarray, tag: int) -> Any:
        """Send an array; return the request."""
        return self._comm.Isend([bytes_of(buffer), MPI.BYTE], machine, tag)

    def receive(self, machine: int, buffer: np.ndarray, tag: int) -> Any:
        """Receive an array; return the request."""
        return self._comm.Irecv([bytes_of(buffer), MPI.BYTE], machine, tag)

    @property
    def is_sending(self) -> bool:
        """Whether a message is on its way."""
        return bool(self._sending)

    def progress(self) -> bool:
        """Forget the messages that have gone; return whether there was one."""
        left = [each for each in self._sending if not each[0].Test()]
        has_gone = len(left) < len(self._sending)
        self._sending = left
        return has_gone

    def beat(self) -> list[int] | None:
        """Give a sign of life, if it is time; return the machines that are silent for too long.

        All others exchange signs with the first machine, which tells of those that it has lost.
        """
        return self._heartbeats.silent() if self._heartbeats.beat() else None

    def lose(self, machine: int) -> None:
        """Exchange nothing more with a machine."""
        self._lost.add(machine)
        self._heartbeats.drop(machine)


def _framed(message):
    """Return a message as one array of bytes: its length, what pickle has, large arrays."""
    data, large = pickled(message)
    lengths = [len(each) for each in large]
    head = pickle.dumps((data, lengths), pickle.HIGHEST_PROTOCOL)
    total = 2 * _LENGTH.size + len(head) + sum(lengths)
    first = _LENGTH.pack(total) + _LENGTH.pack(len(head)) + head
    return np.concatenate([np.frombuffer(first, np.uint8), *large])


def _unframed(frame):
    (length,) = _LENGTH.unpack_from(frame, _LENGTH.size)
    at = 2 * _LENGTH.size + length
    data, lengths = pickle.loads(frame[2 * _LENGTH.size : at])
    views = []
    for each in lengths:
        views.append(frame[at : at + each])
        at += each
    return pickle.loads(data, buffers=views)
