"""The base of the carriers of sessions and of groups: their loop, and what they exchange.

    ranks ◀── sockets: `Mail` ──▶ carrier ◀══ `Mesh` ══▶ carriers of other machines
    their memory ◀── mapped ──▶

A message is a tuple whose first item names it: a carrier's tables `from_ranks` and `from_machines`
have the methods that take it. Messages between two carriers keep their order. Arrays of ranks go
from memory to memory, in messages of their own, which a small one announces: then both sides are
ready for them.
"""

from __future__ import annotations

import functools
import pickle
import select
import socket
import struct
import time
from typing import Any, Callable, Iterable, Mapping

import numpy as np

from synkhronos._machine.heartbeats import Heartbeats, silent
from synkhronos._machine.shared_memory import Segments
from synkhronos.comm.channel import Mail, poll_awake
from synkhronos.comm.handlers import Handlers
from synkhronos.comm.mpi.mesh import MESSAGE
from synkhronos.comm.mpi.transfers import bytes_of, pickled

_FIRST_BULK, _N_BULK = 21_000, 8_000  # tags of transfers of arrays
_LENGTH = struct.Struct("Q")
_LAST_SECONDS, _AFTER_A_LOSS = 10.0, 1.0  # to wait at the end for messages to be sent


class BaseCarrier:
    """The loop of the carrier of one machine.

    `comm`, a Mesh, is that of all carriers: a machine has the number of its carrier there.
    `sockets` has that of each peer, a process of this machine, by its number. A derived class has::

        on_loss(machine, why)    act on the loss of a machine
        on_end(peer)             act on the end of a peer, all of whose messages have been taken
    """

    def __init__(self, comm: Any, sockets: Mapping[int, socket.socket]) -> None:
        self._comm = comm
        self.machine, self.n_machines = comm.rank, comm.size
        self.others = [machine for machine in range(comm.size) if machine != comm.rank]
        self.hosts = comm.hosts  # the name of each machine
        self.segments = Segments()
        self.from_ranks = Handlers()
        self.from_machines = Handlers(alive=lambda machine: None)  # its time was noted already
        self._mail = self.make_mail(sockets)
        self.post = self._mail.tell  # sends a message to a process of this machine
        self._poll = select.poll()
        self._awaited: dict[int, int] = {}  # descriptor -> the events that it is polled for
        self._listeners: set[int] = set()  # more descriptors, of which `read` takes what comes
        self._moving: list[tuple] = []  # what is awaited, what to call when it has come
        self._lost: set[int] = set()
        watched = self.others if self.machine == 0 else [0]  # which tells the others of losses
        self._heartbeats = Heartbeats(watched, lambda machine: self.tell(machine, "alive"))
        comm.on_message = self._heartbeats.note  # parts of arrays are heartbeats, too
        self.traffic = [0, 0]  # the number of messages that this carrier has sent, and of bytes
        self.is_running = True
        self.has_lost = False  # whether a machine is lost: then the others are not waited for long

    def make_mail(self, sockets: Mapping[int, socket.socket]) -> Mail:
        """Return what exchanges messages with the processes of this machine."""
        return Mail(sockets, self.on_notice, self.on_end)

    def run(self) -> None:
        """Carry messages until `is_running` is false."""
        while self.is_running:
            for descriptor in self._wait():
                if descriptor in self._comm.descriptors:
                    self._comm.read(descriptor)
                else:
                    self.read(descriptor)
            self._mail.flush()
            self._take_messages()
            while self.move():
                self._take_messages()
            for machine, why in list(self._comm.ended.items()):
                self._lose(machine, why)
            if self._heartbeats.beat():
                self.segments.forget_freed()
                self.each_second()
                for machine in self._heartbeats.silent():
                    self._lose(machine, silent())
        self.send_what_is_left()

    def _wait(self, seconds=None):
        """Wait for what can be read or sent, or a heartbeat; at the end `seconds`, for no peer."""
        awaited = dict.fromkeys(self._comm.descriptors, select.POLLIN)
        if seconds is None:
            seconds = self._heartbeats.seconds_left
            awaited.update(dict.fromkeys((*self._mail.peers, *self._listeners), select.POLLIN))
        for unsent in (*self._mail.unsent, *self._comm.unsent):
            awaited[unsent] = awaited.get(unsent, 0) | select.POLLOUT
        if awaited != self._awaited:
            for descriptor in self._awaited.keys() - awaited.keys():
                self._poll.unregister(descriptor)
            for descriptor, events in awaited.items():
                self._poll.register(descriptor, events)
            self._awaited = awaited
        return [each for each, _ in poll_awake(self._poll, seconds)]

    def _lose(self, machine, why):
        if self.is_running and machine not in self._lost:
            self.lose(machine, why)
            self.on_loss(machine, why)

    def progress(self) -> bool:
        """Go on with what the subclass has under way; return whether something has ended."""
        return False

    def each_second(self) -> None:
        """Do what the subclass does each second."""

    def on_notice(self, peer: int, notice: tuple) -> None:
        """Do what a process of this machine asks."""
        name, *rest = notice
        self.from_ranks[name](peer, *rest)

    def read(self, descriptor: int) -> None:
        """Take the messages that have come through a socket."""
        self._mail.read(descriptor)

    def tell(self, machine: int, *message: Any) -> None:
        """Send a message to the carrier of another machine; arrays in it are copied."""
        self._tell([machine], message)

    def tell_all(self, *message: Any) -> None:
        """Send a message to the carriers of all other machines."""
        self._tell(self.others, message)

    def _tell(self, machines, message):
        frame = _framed(message)
        for machine in machines:
            if machine not in self._lost:
                self.send(machine, frame, MESSAGE)

    def _take_messages(self):
        """Take the messages of other carriers."""
        for machine, frame in iter(lambda: self._comm.take(MESSAGE), None):
            if machine not in self._lost:
                name, *rest = _unframed(frame)
                self.from_machines[name](machine, *rest)

    def send(self, machine: int, buffer: Any, tag: int) -> Any:
        """Send an array; return the request."""
        data = bytes_of(buffer)
        self.traffic[0] += 1
        self.traffic[1] += len(data)
        return self._comm.send(machine, data, tag)

    def receive(self, machine: int, buffer: np.ndarray, tag: int) -> Any:
        """Receive an array; return the request."""
        return self._comm.receive(machine, buffer, tag)

    def send_parts(self, machine: int, parts: Iterable[np.ndarray], transfer: int) -> None:
        """Send parts of arrays to a `receive_parts` with the same number of the transfer."""
        for part in parts:
            self.send(machine, part, _FIRST_BULK + transfer % _N_BULK)

    def receive_parts(
        self, machine: int, parts: Iterable[np.ndarray], transfer: int, then: Callable[[int], None]
    ) -> None:
        """Receive into parts of arrays; `then` takes the number of each, in order, as they come."""
        tag = _FIRST_BULK + transfer % _N_BULK
        for position, part in enumerate(parts):
            on_end = functools.partial(then, position)
            self._moving.append((self.receive(machine, part, tag), on_end))

    def move(self) -> bool:
        """Go on with what is under way; return whether something has ended."""
        moving, ended = [], []
        for each in self._moving:
            (ended if each[0].is_done else moving).append(each)
        self._moving = moving
        for _, then in ended:
            then()
        return self.progress() or bool(ended)

    def lose(self, machine: int, why: str) -> None:
        """Exchange nothing more with a machine."""
        self._comm.end(machine, why)
        self.has_lost = True
        self._lost.add(machine)
        self._heartbeats.drop(machine)

    def send_what_is_left(self) -> None:
        """Send all messages, and wait for the end of the other carriers; but not for long."""
        end = time.monotonic() + (_AFTER_A_LOSS if self.has_lost else _LAST_SECONDS)
        self._comm.say_goodbye()
        while (self._mail.unsent or self._comm.descriptors) and time.monotonic() < end:
            self._mail.flush()
            for descriptor in self._wait(end - time.monotonic()):
                if descriptor in self._comm.descriptors:
                    self._comm.read(descriptor)


def _framed(message):
    """Return a message as bytes: what pickle makes of it, and its large arrays.

    Before these there is the number of lengths that follow, and the length of each piece.
    """
    data, large = pickled(message)
    lengths = [len(data), *map(len, large)]
    head = struct.pack(f"{1 + len(lengths)}Q", len(lengths), *lengths)
    return b"".join((head, data, *large))


def _unframed(frame):
    """Return the message; its arrays are views of the frame."""
    [count] = _LENGTH.unpack_from(frame)
    at, pieces = (1 + count) * _LENGTH.size, []
    for length in struct.unpack_from(f"{count}Q", frame, _LENGTH.size):
        pieces.append(frame[at : at + length])
        at += length
    return pickle.loads(pieces[0], buffers=pieces[1:])
