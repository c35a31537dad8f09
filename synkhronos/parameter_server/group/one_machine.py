"""A group of processes of one machine that an ancestor has started: no MPI, and no port.

    launcher   GroupSetup(n)  memory, pipes, a socket for each pair of ranks
               starts each rank with its descriptors, and their numbers in its environment
    rank       join()  ──▶  SharedGroup

Collectives work in shared memory (`gate`): each rank reduces its share of all ranks' arrays in
place. Messages go through the sockets, large arrays in them through shared memory. If a socket ends
before its rank has left the group, the rank has died.
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
from typing import Any, Mapping, Sequence

import numpy as np

from synkhronos._arithmetic.blocks import plan as plan_of
from synkhronos._arithmetic.operations import check_kind
from synkhronos._machine.devices import usable_cores
from synkhronos._machine.processes import take_standard_streams
from synkhronos._machine.shared_memory import Segments
from synkhronos.comm import Aborted
from synkhronos.comm.reports import Patience
from synkhronos.comm.shared.gate import HEARTBEAT_MS, Meetings
from synkhronos.comm.shared.gate_memory import MET, SEQUENCE, GateMemory, make_file, make_wake_pipes
from synkhronos.errors import SharedMemoryFull
from synkhronos.parameter_server.group.interface import (
    Group,
    RankLost,
    WaitedTooLong,
    named,
    round_to_16_bits,
)
from synkhronos.parameter_server.group.large_messages import MailWithArrays

WARN_SECONDS = 30.0
_HEADER = 8  # bytes before a value on a board, with its length


class GroupSetup:
    """Memory, pipes, and a socket for each pair, which the processes of a new group inherit.

    The process that makes it starts each rank with the descriptors and the variable that `place`
    returns, and closes it when all are started. A carrier is one more process, with the number
    `size`, which exchanges messages with each rank.
    """

    def __init__(self, size: int, has_carrier: bool = False):
        self._size = size
        take_standard_streams()  # the descriptors made here must not be theirs
        allow_descriptors(size)
        self._memory = make_file(size)
        # To the cells, all collectives are meetings in one call.
        GateMemory(size, self._memory).cells[SEQUENCE] = 1
        self._wake_pipes = make_wake_pipes(size)
        members = range(size + has_carrier)
        self._sockets: list[dict[int, socket.socket]] = [{} for _ in members]
        for rank in members:
            for other in range(rank):
                self._sockets[rank][other], self._sockets[other][rank] = socket.socketpair()

    def sockets_of_carrier(self) -> dict[int, socket.socket]:
        """Return the sockets of the carrier, which closes them."""
        return self._sockets.pop()

    def place(self, rank: int, **more: Any) -> tuple[str, list[int]]:
        """Return what `join` needs on a rank, as JSON, and the descriptors that it inherits."""
        peers = {other: each.fileno() for other, each in self._sockets[rank].items()}
        place = {
            **more,
            "rank": rank,
            "size": self._size,
            "host": socket.gethostname(),
            "memory": self._memory,
            "wake": self._wake_pipes,
            "peers": peers,
        }
        return json.dumps(place), [self._memory, *self._wake_pipes, *peers.values()]

    def close(self) -> None:
        """Close all descriptors of this process."""
        for descriptor in (self._memory, *self._wake_pipes):
            os.close(descriptor)
        for ends in self._sockets:
            for end in ends.values():
                end.close()


def allow_descriptors(size: int) -> None:
    """Let this process have the descriptors that `GroupSetup` takes; ValueError if it can't."""
    needed = size * (size + 5) + 150
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if needed <= soft or soft == resource.RLIM_INFINITY:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ValueError(
            f"{size} processes take some {needed:,} descriptors of the one that starts them, but "
            f"it may have {hard:,}: raise the limit (ulimit -n), or start fewer."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def join(told: Mapping[str, Any], kind: type[SharedGroup] | None = None) -> SharedGroup:
    """Return the group of a process that was started with a `GroupSetup.place`."""
    file, pipes = told["memory"], told["wake"]
    for descriptor in (file, *pipes, *told["peers"].values()):
        os.set_inheritable(descriptor, False)
    peers = {int(other): socket.socket(fileno=fd) for other, fd in told["peers"].items()}
    memory = GateMemory(told["size"], file)
    return (kind or SharedGroup)(told["rank"], memory, file, pipes, peers, told["host"])


class SharedGroup(Meetings, Group):
    """One rank's end; see `Group`."""

    def __init__(
        self,
        rank: int,
        memory: GateMemory,
        file: int,
        pipes: list[int],
        peers: dict[int, socket.socket],
        host: str,
    ):
        self.size = size = len(pipes)
        self.hosts = (host,) * size
        self.losses, self._file = {}, file
        self._own: collections.deque[tuple] = collections.deque()  # messages to itself
        self._segments = Segments()
        self._mail = MailWithArrays(peers, self._segments, self._on_notice, self._on_end)
        # id of this rank's array -> its number, the arrays of all ranks
        self._arrays: dict[int, tuple[int, list[np.ndarray]]] = {}
        self._large: dict[int, Any] = {}  # segments of values that are too large for a board
        self.is_closed = False
        self._plans: dict[tuple[int, str], list] = {}
        self._n_gathered = 0
        self._waiting_since = 0.0
        Meetings.__init__(self, memory, pipes, rank, size, spin=size <= usable_cores())

    def _locate_cells(self):
        super()._locate_cells()
        for descriptor in self._mail.peers:
            self._poll.register(descriptor, select.POLLIN)

    def introduce(self, device: str) -> None:
        """Tell `synkhronos top` which rank this process is, and on which device."""
        self.label(rank=self.rank, of=self.size, device=device, pid=os.getpid())

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.check_open()
        self._raise_loss()
        if self.is_aborted:
            raise Aborted
        self._waiting_since = time.monotonic()
        self._meet()

    def check_open(self) -> None:
        """Raise RuntimeError if this rank has left the group."""
        if self.is_closed:
            raise RuntimeError("the group is closed.")

    def _check_not_left(self, cell, value, abort):
        # Called while the rank is missing: a death after it has come does not fail a barrier.
        self._raise_loss()
        super()._check_not_left(cell, value, abort)

    def _sleep(self):
        happened = self.look(HEARTBEAT_MS / 1000)
        if happened and time.monotonic() - self._waiting_since > self.patience:
            return False  # messages come, but not the rank
        return happened

    def _raise_left(self, rank):
        raise RankLost(f"rank {rank} has left the group", rank)

    def _warn(self, patience, kind, value):
        waited, everyone = time.monotonic() - self._waiting_since, range(self.size)
        if waited > self.patience:
            raise WaitedTooLong(self.patience, self._named(self.slowest(everyone, MET, value)))
        if patience is None:
            patience = Patience(WARN_SECONDS, HEARTBEAT_MS / 1000)
        patience.wait_for_others(self._named(self.slowest(everyone, MET, value)))
        return patience

    def _named(self, ranks):
        return named(ranks)

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
        # A rank that is ahead writes to one half, while others still read the other.
        self._n_gathered += 1
        board = _half(self.boards[self.rank], self._n_gathered)
        length = len(data)
        if length > len(board) - _HEADER:
            segment = self._large[self._n_gathered % 2] = self._segments.create(length)
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
            values = [own if rank == self.rank else self._read(*pair) for rank, pair in pairs]
        if min(lengths) < 0:
            self.barrier()  # until then other ranks may read this rank's segment
        return values

    def _read(self, board, length):
        if length >= 0:
            return pickle.loads(board[_HEADER : _HEADER + length])
        segment = self._segments.open(pickle.loads(board[_HEADER:]))
        return pickle.loads(segment.array(np.uint8, (-length,)))

    def allocate(self, size: int, dtype: Any) -> np.ndarray:
        """Return memory for `all_reduce`: a flat array of zeros on each rank."""
        dtype = np.dtype(dtype)
        segment = None
        try:
            segment = self._segments.create(max(1, size * dtype.itemsize))
            segment.copy_for_children()  # values of variables may lie there
            ref_or_problem = segment.ref
        except SharedMemoryFull as error:
            ref_or_problem = str(error)
        everyone = self.all_gather((ref_or_problem, size, dtype.str))
        arguments = [each[1:] for each in everyone]
        if any(each != arguments[0] for each in arguments):
            raise ValueError(f"allocate() got other arguments on other ranks: {arguments}.")
        problems = [problem for problem, *_ in everyone if isinstance(problem, str)]
        if problems:
            raise SharedMemoryFull(problems[0])
        arrays = [
            (segment if rank == self.rank else self._segments.open(ref)).array(dtype, (size,))
            for rank, (ref, *_) in enumerate(everyone)
        ]
        own = arrays[self.rank]
        self._arrays[id(own)] = len(self._arrays) + 1, arrays
        self._mail.large_messages.note(own, segment.ref)
        self.barrier()  # all ranks have opened all segments
        return own

    def all_reduce(self, array: np.ndarray, op: str = "sum", sixteen_bits: bool = False) -> None:
        """Replace an array from `allocate`, on all ranks, with the reduction over the ranks."""
        number, arrays = self.arrays_of(array)
        check_kind("all_reduce()", op, array.dtype, "array")
        if sixteen_bits:
            round_to_16_bits(array)
        key = id(array), op
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = plan_of(op, [arrays], len(arrays), self.rank)
        if not self.agree(number):
            self.barrier()  # all have read the numbers
            raise ValueError("all_reduce() got another array on other ranks.")
        for step, arguments in plan:
            step(*arguments)
        self.barrier()

    def arrays_of(self, array: np.ndarray) -> tuple[int, list[np.ndarray]]:
        """Return the number of an array from `allocate`, and the arrays of all ranks."""
        if id(array) not in self._arrays:
            raise ValueError("all_reduce() takes arrays of allocate(), not views or others.")
        return self._arrays[id(array)]

    def forget(self, array: np.ndarray) -> None:
        """Drop an array from `allocate`; all ranks do."""
        self._arrays.pop(id(array), None)

    def place_of(self, array: np.ndarray) -> tuple:
        """Return where an array from `allocate` is: its segment, offset and bytes."""
        return self._mail.large_messages.place_of(array)

    def meet(self):
        """Wait until all ranks are here."""
        self.barrier()

    def send(self, rank: int, *message: Any) -> None:
        """Send a message without waiting for its receiver."""
        self.check_open()
        if rank == self.rank:
            self._own.append(copy.deepcopy(message))
        else:
            self._mail.send(rank, message)

    def tell(self, rank: int, *notice: Any) -> None:
        """Send a small message that `receive` does not return, but `_on_notice` takes."""
        self._mail.tell(rank, *notice)

    def under_way(self, rank: int) -> int:
        """Return the number of messages with large arrays that a rank has not received yet."""
        return self._mail.large_messages.under_way(rank)

    def receive(self, seconds: float | None = None) -> tuple[int, tuple | None] | None:
        """Return (rank, message): the next message that has come from any rank."""
        self.check_open()
        self._mail.give_back()
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            if self._own:
                return self.rank, self._own.popleft()
            if self._mail.has_come:
                return self._mail.take()
            left = None if end is None else max(0.0, end - time.monotonic())
            if not self.look(left) and left is not None and left <= 0:
                return None

    def wait(self, seconds: float, also: Sequence[int] = ()) -> None:
        """Wait until `receive` has something, or a descriptor can be read."""
        self._mail.give_back()
        if not self._own and not self._mail.has_come:
            self.look(seconds, also)

    def look(self, seconds: float | None, also: Sequence[int] = ()) -> bool:
        """Read from the sockets; wait up to `seconds` for something; return whether it came."""
        unsent = self._mail.unsent
        for descriptor in unsent:
            self._poll.modify(descriptor, select.POLLIN | select.POLLOUT)
        for descriptor in also:
            self._poll.register(descriptor, select.POLLIN)
        happened = self._poll.poll(None if seconds is None else 1000 * seconds)
        for descriptor in unsent:
            self._poll.modify(descriptor, select.POLLIN)
        for descriptor in also:
            self._poll.unregister(descriptor)
        for descriptor, _ in happened:
            if descriptor == self._wake_pipe:
                self._empty_wake_pipe()
            elif descriptor in self._mail.peers:
                self._mail.read(descriptor)
                if descriptor not in self._mail.peers:
                    self._poll.unregister(descriptor)
        return bool(happened)

    def _on_notice(self, rank, notice):
        raise NotImplementedError(f"rank {rank} has told {notice!r}")

    def _on_end(self, rank):
        if not self.has_left(rank):
            self.losses[rank] = "has died"

    def close(self, seconds: float = 10.0) -> None:
        """Leave the group when others have received all messages, or after `seconds`."""
        if self.is_closed:
            return
        self._mail.give_back()
        end = time.monotonic() + seconds
        while self._mail.is_under_way and (left := end - time.monotonic()) > 0:
            self.look(left)
        self.is_closed = True
        self._cells[self._done] = self._cells[SEQUENCE]
        self._wake_all()
        self._segments.leave()  # others may still use these segments
        self._mail.close()
        self._arrays.clear()
        self._plans.clear()
        self._segments.forget_all()
        for each in (self._file, *self._wake_pipes):
            os.close(each)


def _half(board, number):
    middle = len(board) // 2
    return board[middle:] if number % 2 else board[:middle]
