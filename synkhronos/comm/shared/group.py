"""A group of processes of one machine that an ancestor has started: no MPI, and no port.

    launcher   Founding(n)  memory, pipes, a socket for each pair of ranks
               starts each rank with its descriptors, and their numbers in its environment
    rank       join()  ──▶  SharedGroup

Collectives work in shared memory (`meetings`): each rank reduces its share of all arrays where they
lie. Messages go through the sockets, large arrays in them through shared memory. The end of a
socket is the death of its rank, unless the rank has left.
"""

from __future__ import annotations

import collections
import copy
import json
import os
import pickle
import resource
import select
import socket
import time
import weakref
from typing import Any, Sequence

import numpy as np

from synkhronos._arithmetic.blocks import plan as plan_of
from synkhronos._arithmetic.operations import round_to_16_bits
from synkhronos._machine.devices import usable_cores
from synkhronos._machine.shared_memory import Segments
from synkhronos.comm import Aborted
from synkhronos.comm.channel import Channel, Closed, WithDescriptors
from synkhronos.comm.group import Group, RankLost, WaitedTooLong
from synkhronos.comm.reports import Patience
from synkhronos.comm.shared.gate_memory import DONE, MET, SEQUENCE, Memory, make_pipes
from synkhronos.comm.shared.meetings import HEARTBEAT_MS, Meetings
from synkhronos.comm.shared.parcels import Parcels
from synkhronos.errors import SharedMemoryFull

_WARN_SECONDS = 30.0
_HEADER = 8  # bytes before a value on a board, with its length


class Founding:
    """Memory, pipes, and a socket for each pair, which the processes of a new group inherit.

    The process that makes it starts each rank with the descriptors and the variable that `place`
    returns, and closes it when all are started.
    """

    def __init__(self, size: int, host: str = ""):
        self._size, self._host = size, host or socket.gethostname()
        allow_descriptors(size)
        self._memory = os.memfd_create("synkhronos", os.MFD_CLOEXEC)
        os.ftruncate(self._memory, Memory.nbytes(size))
        Memory(size, self._memory).cells[SEQUENCE] = 1  # the one call that all collectives are in
        self._wake_pipes = make_pipes(size)
        for end in (end for pipe in self._wake_pipes for end in pipe):
            os.set_blocking(end, False)
        self._sockets: list[dict[int, socket.socket]] = [{} for _ in range(size)]
        for rank in range(size):
            for other in range(rank):
                self._sockets[rank][other], self._sockets[other][rank] = socket.socketpair()

    def place(self, rank: int) -> tuple[str, list[int]]:
        """Return what to tell a rank, as JSON, and the descriptors that it inherits."""
        peers = {other: each.fileno() for other, each in self._sockets[rank].items()}
        told = {
            "rank": rank,
            "size": self._size,
            "host": self._host,
            "memory": self._memory,
            "wake": self._wake_pipes,
            "peers": peers,
        }
        wake = [end for pipe in self._wake_pipes for end in pipe]
        return json.dumps(told), [self._memory, *wake, *peers.values()]

    def close(self) -> None:
        """Close all descriptors of this process."""
        os.close(self._memory)
        for end in (end for pipe in self._wake_pipes for end in pipe):
            os.close(end)
        for each in self._sockets:
            for end in each.values():
                end.close()


def allow_descriptors(size: int) -> None:
    """Let this process have the descriptors that `Founding` takes; ValueError if it can't."""
    needed = size * (size + 1) + 100
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if needed <= soft or soft == resource.RLIM_INFINITY:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ValueError(
            f"{size} processes take some {needed:,} descriptors of the one that starts them, but "
            f"it may have {hard:,}: raise the limit (ulimit -n), or start fewer."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def join(place: str) -> SharedGroup:
    """Return the group that this process was started for, told its `Founding.place`."""
    told = json.loads(place)
    rank, size = told["rank"], told["size"]
    memory = Memory(size, told["memory"])
    os.close(told["memory"])
    pipes = [tuple(pipe) for pipe in told["wake"]]
    peers = {int(other): socket.socket(fileno=fd) for other, fd in told["peers"].items()}
    for end in [end for pipe in pipes for end in pipe]:
        os.set_inheritable(end, False)
    for each in peers.values():
        each.set_inheritable(False)
    return SharedGroup(rank, memory, pipes, peers, told["host"])


class SharedGroup(Meetings, Group):
    """One rank's end; see `Group`."""

    def __init__(
        self,
        rank: int,
        memory: Memory,
        pipes: list[tuple[int, int]],
        peers: dict[int, socket.socket],
        host: str,
    ):
        self.size = size = len(pipes)
        self.hosts = (host,) * size
        self.losses = {}
        self._channels = {other: Channel(each) for other, each in peers.items()}
        self._ranks = {channel.fileno(): other for other, channel in self._channels.items()}
        self._ended: collections.deque[int] = collections.deque()  # ranks to tell of in `receive`
        self._came: collections.deque[tuple[int, Any]] = collections.deque()
        self._segments = Segments()
        self._parcels = Parcels(self._segments)
        # id of an own array -> its number, those of all ranks
        self._arrays: dict[int, tuple[int, list[np.ndarray]]] = {}
        self._boards: dict[int, Any] = {}  # segments of values that are too large for a board
        self._is_closed = False
        self._plans: dict[tuple[int, str], list] = {}
        self._n_gathered = 0
        self._waiting_since = 0.0
        Meetings.__init__(self, memory, pipes, rank, size, spin=size <= usable_cores())
        # A process that this one forks must not hide its end.
        channels = weakref.WeakSet(self._channels.values())
        os.register_at_fork(after_in_child=lambda: [each.close() for each in channels])

    def _take_place(self):
        super()._take_place()
        for channel in self._channels.values():
            self._poll.register(channel, select.POLLIN)

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self._check_open()
        self._raise_loss()
        if self.is_aborted:
            raise Aborted
        self._waiting_since = time.monotonic()
        self._meet()

    def _check_open(self):
        if self._is_closed:
            raise RuntimeError("the group is closed.")

    def _check_not_left(self, cell, value, abort):
        # Only here: a rank that dies after it has come to a barrier does not fail the barrier.
        self._raise_loss()
        super()._check_not_left(cell, value, abort)

    def _sleep(self):
        happened = self._look(HEARTBEAT_MS / 1000)
        if happened and time.monotonic() - self._waiting_since > self.patience:
            return False  # messages come, but not the rank
        return happened

    def _raise_left(self, rank):
        raise RankLost(f"rank {rank} has left the group", rank)

    def _warn(self, patience, kind, value):
        waited, everyone = time.monotonic() - self._waiting_since, range(self.size)
        if waited > self.patience:
            raise WaitedTooLong(self.patience, _named(self.hindmost(everyone, MET, value)))
        if patience is None:
            patience = Patience(_WARN_SECONDS, HEARTBEAT_MS / 1000)
        patience.wait_for_others(_named(self.hindmost(everyone, MET, value)))
        return patience

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order."""
        self._put_on_board(value)
        return self._read_boards(value)

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        """Return the values of all ranks on rank `root`, and None on the others."""
        self._put_on_board(value if self.rank != root else None)
        return self._read_boards(value, self.rank == root)

    def _put_on_board(self, value):
        """Put a value on this rank's board, and wait until all have done so."""
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        # In turns: a rank that is ahead writes one half, while others still read the other.
        self._n_gathered += 1
        board = _half(self.boards[self.rank], self._n_gathered)
        length = len(data)
        if length > len(board) - _HEADER:
            segment = self._boards[self._n_gathered % 2] = self._segments.create(length)
            segment.array(np.uint8, (length,))[...] = np.frombuffer(data, np.uint8)
            data, length = pickle.dumps(segment.ref, pickle.HIGHEST_PROTOCOL), -length
        board[:_HEADER] = length.to_bytes(_HEADER, "little", signed=True)
        board[_HEADER : _HEADER + len(data)] = data
        self.barrier()

    def _read_boards(self, own, is_reader=True):
        boards = [_half(board, self._n_gathered) for board in self.boards]
        lengths = [int.from_bytes(board[:_HEADER], "little", signed=True) for board in boards]
        values = None
        if is_reader:
            pairs = enumerate(zip(boards, lengths))
            values = [own if rank == self.rank else self._read(*each) for rank, each in pairs]
        if min(lengths) < 0:
            self.barrier()  # until then the memory beside the boards is read
        return values

    def _read(self, board, length):
        if length >= 0:
            return pickle.loads(board[_HEADER : _HEADER + length])
        segment = self._segments.open(pickle.loads(board[_HEADER:]))
        return pickle.loads(segment.array(np.uint8, (-length,)))

    def allocate(self, size: int, dtype: Any) -> np.ndarray:
        """Return memory for `all_reduce`: a flat array of zeros, the same on all ranks."""
        dtype = np.dtype(dtype)
        segment, told = None, None
        try:
            segment = self._segments.create(max(1, size * dtype.itemsize))
            segment.copy_for_children()  # values of variables may lie there
            told = segment.ref
        except SharedMemoryFull as error:
            told = str(error)
        everyone = self.all_gather((told, size, dtype.str))
        asked = [each[1:] for each in everyone]
        if any(each != asked[0] for each in asked):
            raise ValueError(f"allocate() got other arguments on other ranks: {asked}.")
        problems = [ref for ref, *_ in everyone if isinstance(ref, str)]
        if problems:
            raise SharedMemoryFull(problems[0])
        arrays = [
            (segment if rank == self.rank else self._segments.open(ref)).array(dtype, (size,))
            for rank, (ref, *_) in enumerate(everyone)
        ]
        own = arrays[self.rank]
        self._arrays[id(own)] = len(self._arrays) + 1, arrays
        self._parcels.note(own, segment.ref)
        self.barrier()  # until all have opened all
        return own

    def all_reduce(self, array: np.ndarray, op: str = "sum", sixteen_bits: bool = False) -> None:
        """Replace the values of an array of `allocate` with the reduction over all ranks."""
        number, arrays = self._arrays.get(id(array), (0, ()))
        if not number:
            raise ValueError("all_reduce() takes arrays of allocate(), not views or others.")
        if sixteen_bits:
            round_to_16_bits(array)
        key = id(array), op
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = plan_of(op, [arrays], len(arrays), self.rank)
        if not self.agree(number):
            self.barrier()  # all have read the numbers
            raise ValueError("all_reduce() got another array on other ranks.")
        for reduce, out, copies in plan:
            reduce()
            for each in copies:
                each[...] = out
        self.barrier()

    def meet(self):
        """Wait until all ranks are here."""
        self.barrier()

    def send(self, rank: int, *message: Any) -> None:
        """Send a message; don't wait for its receiver."""
        self._check_open()
        if rank == self.rank:
            self._came.append((rank, copy.deepcopy(message)))
        elif rank in self._channels:
            self._post(rank, *self._parcels.pack(rank, message))

    def _post(self, rank, packed, descriptors=()):
        try:
            self._channels[rank].post(packed, descriptors)
        except Closed:  # what it has sent before is still to be received
            self._channels[rank].discard()

    def under_way(self, rank: int) -> int:
        """Return how many messages with large arrays a rank has not taken."""
        return self._parcels.under_way(rank)

    def receive(self, seconds: float | None = None) -> tuple[int, tuple | None] | None:
        """Return (rank, message): the next message that has come from any rank."""
        self._check_open()
        self._give_back()
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            if self._came:
                rank, packed = self._came.popleft()
                if rank == self.rank:
                    return rank, packed
                descriptors = ()
                if isinstance(packed, WithDescriptors):
                    packed, descriptors = packed
                return rank, self._parcels.unpack(rank, packed, descriptors)
            if self._ended:
                return self._ended.popleft(), None
            left = None if end is None else max(0.0, end - time.monotonic())
            if not self._look(left) and left is not None and left <= 0:
                return None

    def wait(self, seconds: float, also: Sequence[int] = ()) -> None:
        """Wait until `receive` has something, or a descriptor can be read."""
        self._give_back()
        if not self._came and not self._ended:
            self._look(seconds, also)

    def _give_back(self):
        """Tell the senders of arrays that this rank needs them no more."""
        for rank, answer in self._parcels.give_back():
            if rank in self._channels:
                self._post(rank, answer)

    def _look(self, seconds, also=()):
        """Take what has come on sockets within a time; return whether there was something."""
        unsent = [channel for channel in self._channels.values() if channel.has_unsent]
        for channel in unsent:
            self._poll.modify(channel, select.POLLIN | select.POLLOUT)
        for descriptor in also:
            self._poll.register(descriptor, select.POLLIN)
        happened = self._poll.poll(None if seconds is None else 1000 * seconds)
        for channel in unsent:
            self._poll.modify(channel, select.POLLIN)
        for descriptor in also:
            self._poll.unregister(descriptor)
        wake = self._wake_pipes[self.rank][0]
        for fd, _ in happened:
            if fd == wake:
                self._drain()
            elif fd in self._ranks:
                self._take(self._ranks[fd])
        return bool(happened)

    def _take(self, rank):
        """Take what a rank has sent; note its end."""
        channel = self._channels.get(rank)
        if channel is None:
            return
        try:
            messages = channel.receive()
        except Closed:
            self._note_end(rank, channel)
            return
        for packed in messages:
            if not self._parcels.take_back(packed):
                self._came.append((rank, packed))
        try:
            channel.flush()
        except Closed:
            channel.discard()

    def _note_end(self, rank, channel):
        self._poll.unregister(channel)
        del self._channels[rank], self._ranks[channel.fileno()]
        channel.close()
        self._parcels.drop(rank)
        self._ended.append(rank)
        if self._cells[self._line(rank) + DONE] < self._cells[SEQUENCE]:
            self.losses[rank] = "has died"

    def close(self, seconds: float = 10.0) -> None:
        """Leave the group, when others have taken what was sent to them."""
        if self._is_closed:
            return
        self._give_back()
        end = time.monotonic() + seconds
        while self._channels and (left := end - time.monotonic()) > 0:
            if not any(
                channel.has_unsent or self._parcels.under_way(rank)
                for rank, channel in self._channels.items()
            ):
                break
            self._look(left)
        self._is_closed = True
        self._cells[self._done] = self._cells[SEQUENCE]
        self._wake_all()
        self._segments.leave()  # others may use what is left
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        self._arrays.clear()
        self._plans.clear()
        self._segments.forget_all()
        for end_of_pipe in (each for pipe in self._wake_pipes for each in pipe):
            os.close(end_of_pipe)


def _half(board, number):
    middle = len(board) // 2
    return board[middle:] if number % 2 else board[:middle]


def _named(ranks):
    return " and ".join(f"rank {rank}" for rank in ranks)
