"""A cluster in one process: the package's carriers, over a network whose time is virtual.

    leader (scripted) ── notices ──▶ carrier (`Carrier`, in a thread) ── Isend ──▶ network
                      ◀────────────                                  ◀── Iprobe, Irecv

Carriers are those of the package, with their loop, waits, seals, fetches and reductions. One thread
runs at a time, that of the machine which is next in virtual time; `select`, `time` and MPI are
replaced for them. A machine's link sends one message after the other, and receives one after the
other. Each message, each byte and each look for messages takes a carrier time.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import itertools
import os
import pickle
import select
import threading
import traceback
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import numpy as np

from synkhronos._machine import heartbeats
from synkhronos._machine.shared_memory import Segments
from synkhronos.comm import channel, reports
from synkhronos.comm.mpi import (
    all_reduce,
    base_carrier,
    carrier,
    mesh,
    variable_collectives,
)
from synkhronos.comm.mpi.job import SessionPlan, Wish
from synkhronos.tools.bench import frame

# Descriptors: those of messages of other machines, and of the end of a message's sending, are two.
_LEADER, _LISTENER, _OTHERS, _SENT = 10, 11, 12, 13
_LEADER_SECONDS, _SOCKET_SECONDS = 1e-4, 3e-5  # of a leader's answer, of a way to or from it
_LAST = 1e4  # virtual seconds after which something hangs


class Costs(NamedTuple):
    """The times of a simulation, in seconds.

    Attributes
    ----------
    latency : float
    byte : float
        Of a byte on the link of a machine, in each direction.
    message : float
        Of a carrier, for a message that it sends or takes.
    seal : float
        Of a carrier, for a byte that it sends or takes.
    """

    latency: float = 50e-6
    byte: float = 8e-10
    message: float = 15e-6
    seal: float = 5e-10


class Traffic(NamedTuple):
    """The messages that a machine has sent, and their bytes without the seals."""

    messages: int
    nbytes: int


def _locked():
    lock = threading.Lock()  # another thread releases it
    lock.acquire()
    return lock


class _Over(BaseException):
    """The simulation has ended."""


class _Message(NamedTuple):
    source: Machine
    target: Machine
    tag: int
    nbytes: int
    content: np.ndarray  # or None, if only the length is carried


class Network:
    """The events of a simulation, and its machines."""

    def __init__(self, n_machines: int, costs: Costs, whole: bool):
        self.whole, self.costs, self.now = whole, costs, 0.0
        self.is_over, self.problem = False, None
        self.running: Machine = None
        self.baton = _locked()
        self._events, self._count = [], itertools.count()
        self.machines = [Machine(self, number) for number in range(n_machines)]

    def at(self, when, do, *arguments):
        """Do something at a time."""
        heapq.heappush(self._events, (when, next(self._count), do, arguments))

    def run_until(self, is_done):
        """Go on until something is done; return the seconds that it took."""
        begun = self.now
        while not is_done():
            self.now, _, do, arguments = heapq.heappop(self._events)
            do(*arguments)
            if self.problem or self.now > _LAST:
                raise frame.Failed(self.problem or "the simulation hangs")
        return self.now - begun

    def send(self, source, target, tag, nbytes, content):
        """Send a message when those before it have left; return when it has left."""
        source.up = max(source.now, source.up) + nbytes * self.costs.byte
        message = _Message(source, self.machines[target], tag, nbytes, content)
        self.at(source.up, self._leave, message)
        return source.up

    def _leave(self, message):
        source, target = message.source, message.target
        if source.is_dead:
            return
        source.wake(_SENT)
        # Its first byte comes after the latency, its last one after those of other messages.
        seconds = message.nbytes * self.costs.byte
        target.down = max(self.now + self.costs.latency, target.down + seconds)
        self.at(target.down, target.take, message)

    def end(self):
        """End all threads."""
        self.is_over = True
        for machine in self.machines:
            machine.go.release()
            machine.join()


class Machine(threading.Thread):
    """A machine with its carrier."""

    def __init__(self, network, number):
        super().__init__(daemon=True)
        self.network, self.rank, self.size = network, number, 0
        self.now = self.up = self.down = 0.0  # its clock; when its link is free, in each direction
        self.is_dead, self.go = False, _locked()
        self.leader = Leader(self)
        self.traffic = Traffic(0, 0)  # all that it has sent until now
        self._wakes, self._nap = (), 0
        self.inbox, self._mail = collections.deque(), collections.deque()  # messages; notices

    def run(self):
        """Be the carrier, from its start to the end of the simulation."""
        self.go.acquire()
        try:
            if not self.network.is_over:
                self.exchange = _Exchange(self)
                self.carrier = carrier.Carrier(self.exchange, self.leader, _Socket(_LISTENER))
                self.carrier.post(0, "hello")
                self.carrier.run()
        except _Over:
            pass
        except BaseException:
            self.network.problem = traceback.format_exc()
        finally:
            if hasattr(self, "carrier"):
                os.close(self.carrier._spare)
        if not self.network.is_over:
            self.network.baton.release()

    # The virtual time of its thread.

    def spend(self, seconds):
        """Compute for so long."""
        self.now += seconds

    def sleep(self, seconds, wakes=()):
        """Let other machines run for so long, or until one of `wakes` happens."""
        self._nap += 1
        self._wakes = wakes
        if self.readable(wakes):
            seconds = 0
        self.network.at(self.now + seconds, self.resume, self._nap)
        self.network.baton.release()
        self.go.acquire()
        if self.network.is_over:
            raise _Over

    def resume(self, nap=0):
        """Let this machine's thread run, until it sleeps; called in the main thread."""
        if nap == self._nap and not self.is_dead:
            self._nap += 1
            self._wakes = ()
            self.now = max(self.now, self.network.now)
            self.network.running = self
            self.go.release()
            self.network.baton.acquire()

    def wake(self, what):
        """End its sleep if it waits for this."""
        if what in self._wakes:
            self._wakes = ()
            self.network.at(self.network.now, self.resume, self._nap)

    def readable(self, wakes):
        """Return those of some descriptors that can be read."""
        found = {_LEADER: self._mail, _OTHERS: self.inbox}
        return [each for each in wakes if found.get(each)]

    # What comes, in the main thread.

    def take(self, message):
        """Take a message of another machine."""
        if not self.is_dead:
            self.inbox.append(message)
            self.wake(_OTHERS)

    def notify(self, *notice):
        """Take a notice of the leader."""
        self._mail.append(notice)
        self.wake(_LEADER)


class _Sent:
    """A message that leaves a machine at a time."""

    def __init__(self, machine, left):
        self._machine, self._left = machine, left

    @property
    def is_done(self):
        """Whether it has left."""
        return self._machine.now >= self._left


class _Exchange(mesh.TaggedMessages):
    """The connections of a machine's carrier; arrays cross them whole, or as their lengths."""

    descriptors, unsent = (_OTHERS, _SENT), ()

    def __init__(self, machine):
        super().__init__(machine.rank, machine.size)
        self._machine, self._network, self.ended = machine, machine.network, {}
        self.hosts = [f"node{number:04}" for number in range(machine.size)]

    def send(self, machine, buffer, tag):
        """Send a message; return a request."""
        me, payload = self._machine, base_carrier.bytes_of(buffer)
        me.traffic = Traffic(me.traffic.messages + 1, me.traffic.nbytes + len(payload))
        self._spend(len(payload))
        is_whole = self._network.whole or tag == base_carrier.MESSAGE
        content = payload.copy() if is_whole else None
        left = self._network.send(me, machine, tag, len(payload), content)
        return _Sent(me, left)

    def end(self, machine, why):
        """Exchange nothing more with a machine."""
        self.ended[machine] = why

    def say_goodbye(self):
        """Do nothing: all has been sent."""

    def read(self, descriptor):
        """Take the messages that have come."""
        inbox = self._machine.inbox
        while inbox:
            message = inbox.popleft()
            self._spend(message.nbytes)
            key, payload = (message.source.rank, message.tag), message.content
            if payload is None:
                payload = self.memory_for(*key, message.nbytes)
            self.deliver(*key, payload)

    def _spend(self, nbytes):
        costs = self._network.costs
        self._machine.spend(costs.message + nbytes * costs.seal)


class _Socket(NamedTuple):
    """Stands for a socket of the carrier."""

    number: int

    def fileno(self):
        return self.number

    def setblocking(self, flag):
        """Do nothing."""


class _Mail:
    """The messages of a carrier with its leader."""

    unsent = ()

    def __init__(self, sockets, on_notice, on_end):
        self._on_notice, self.peers = on_notice, {_LEADER: 0}
        [self._leader] = sockets.values()

    def tell(self, peer, *notice):
        machine = self._leader.machine
        machine.spend(machine.network.costs.message)
        machine.network.at(machine.now + _SOCKET_SECONDS, self._leader.hear, *notice)

    def read(self, descriptor):
        machine = self._leader.machine
        while machine._mail:
            machine.spend(machine.network.costs.message)
            self._on_notice(0, machine._mail.popleft())

    def flush(self):
        """Do nothing: sockets have room."""


class Leader:
    """The first process of a machine: it sends what a real one does, in the same messages."""

    def __init__(self, machine):
        self.machine, self.network = machine, machine.network
        self.cluster: Cluster = None
        self._id = None

    def send(self, *notice):
        """Send the carrier a message, as `CarrierLink.send` does."""
        when = self.network.now + _LEADER_SECONDS + _SOCKET_SECONDS
        self.network.at(when, self.machine.notify, *notice)

    def tell(self, machine, message):
        """Send a message to one leader, or to all others, as `CarrierLink.tell` does."""
        self.send("tell", machine, pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def tell_directly(self, machines, message):
        """Send a message to leaders, as `CarrierLink.tell_directly` does."""
        costs, when = self.network.costs, self.network.now
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for machine in machines:
            when += costs.message + len(data) * (costs.byte + costs.seal)
            self.network.at(when, self._leave, self.network.machines[machine].leader, data)

    def _leave(self, other, data):
        me, comes = self.machine, self.network.now + self.network.costs.latency + _LEADER_SECONDS
        me.traffic = Traffic(me.traffic.messages + 1, me.traffic.nbytes + len(data))
        self.network.at(comes, other.hear, "told", me.rank, data)

    def hear(self, name, *rest):
        """Take a message of the carrier, or of another leader."""
        if name == "hello":
            if self.machine.rank == 0:
                self.tell(None, ("wish", Wish(1, None, None, None, _FACTS)))
        elif name == "told":
            machine, (what, *content) = rest[0], pickle.loads(rest[1])
            getattr(self, f"_on_{what}")(machine, *content)
        elif name == "done":
            self.finish()
        elif name in ("end", "lost"):
            self.cluster.knowing.add(self.machine.rank)
        else:
            raise frame.Failed(f"a carrier has answered {name}: {rest}")

    def _on_wish(self, machine, wish):
        self.tell(0, ("offer", 1, _FACTS, ("cpu",), None))

    def _on_offer(self, machine, *content):
        self.cluster.done.add(machine)
        n = self.cluster.n_machines
        if len(self.cluster.done) == n - 1:
            names = tuple(f"node{number:04}" for number in range(n))
            plan = SessionPlan(1, (1,) * n, names, ("cpu",) * n, 0, None, False, False, 0)
            self.tell(None, ("plan", plan))
            self.cluster.ready.add(0)

    def _on_plan(self, machine, plan):
        self.cluster.ready.add(self.machine.rank)

    def _on_command(self, machine, *content):
        self.begin()

    def begin(self):
        """Begin this machine's part of the operation."""
        cluster = self.cluster
        place = cluster.places[self.machine.rank]
        if cluster.what == "call":
            self.finish()
        elif cluster.what == "all_reduce":
            layout = ([place[1]], [place[2]])
            id = 1, cluster.sequence, 1
            self.send("reduce", id, [place], ("sum",), 1, layout, False)
        elif self.machine.rank == 0:
            values = cluster.arrays[0]
            limit = variable_collectives._SMALL // max(cluster.n_machines - 1, 1)
            is_small = values.nbytes <= limit
            offered = [[(place, values.copy() if is_small else None)]]
            self.tell(None, ("exchanged", (1, cluster.sequence, 1), offered))
            self.finish()

    def _on_exchanged(self, machine, id, offered):
        rank, [[(place, value)]] = self.machine.rank, offered
        if value is not None:
            self.cluster.arrays[rank][...] = value
            self.finish()
            return
        places = (self.cluster.places[rank],)
        self.send("copy_to_all", ("copy_to_all", id[1]), id[:2], machine, (place,), places)

    def finish(self):
        """Tell the first machine of the end of this one's part."""
        rank, cluster = self.machine.rank, self.cluster
        if rank == 0:
            cluster.done.add(0)
            return
        output = cluster.what == "call"
        parts = ([(rank, [np.float32(10)])] if output else [], {})
        self.tell_directly([0], ("done", 1, cluster.sequence, 0, [0], {}, [], parts))

    def _on_done(self, machine, *content):
        self.cluster.done.add(machine)


_FACTS = ("node0000", "0.1.0", "01234567", "Theano 1.0.5", "1.23.5", "3.11.7")


class Cluster:
    """Machines that have begun a session, and what can be done with them.

    Parameters
    ----------
    n_machines : int
    costs : Costs, optional
    most : int
        The bytes of the largest array.
    whole : bool
        Whether arrays are carried and reduced; else only their lengths are, in messages as many.

    Attributes
    ----------
    arrays : list of numpy.ndarray
        The memory of each machine's rank.
    start : tuple
        What `do` returns, of the begin of the session.
    """

    def __init__(self, n_machines, costs=None, most=1 << 20, whole=True):
        self.network = Network(n_machines, costs or Costs(), whole)
        self._stack, self._whole = contextlib.ExitStack(), whole
        self._segments = Segments()
        memory = [self._segments.create(most) for _ in range(n_machines if whole else 1)]
        self._memory = memory if whole else memory * n_machines
        self.places = [None] * n_machines
        self.ready, self.knowing, self.done = set(), set(), set()
        self.n_machines, self.what, self.sequence = n_machines, "start", 0

    def __enter__(self):
        self._stack.enter_context(_replaced(self.network, self._whole, self._segments))
        for each in self.network.machines:
            each.leader.cluster, each.size = self, self.n_machines
            each.start()
            self.network.at(0.0, each.resume)
        try:
            self.start = self._measured(lambda: len(self.ready) == self.n_machines)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception):
        self.network.end()
        self._stack.close()

    def do(self, what, nbytes=0):
        """Do a call, a broadcast or an all_reduce; return its seconds, and each one's `Traffic`."""
        self.what = what
        self.sequence += 1
        self.done.clear()
        kind = "<f4", (nbytes // 4,)
        self.arrays = [segment.array(*kind) for segment in self._memory]
        self.places = [(segment.ref, *kind, 0) for segment in self._memory]
        first = self.network.machines[0].leader
        others = range(1, self.n_machines)
        first.tell_directly(others, ("command", 1, self.sequence, 0, None, []))
        first.begin()
        return self._measured(lambda: len(self.done) == self.n_machines)

    def kill(self, number):
        """Let a machine be silent; return the seconds until all know, and what was sent."""
        self.network.machines[number].is_dead = True
        return self._measured(lambda: len(self.knowing) == self.n_machines - 1)

    def pass_time(self, seconds):
        """Let nothing but signs of life be sent for so long; return as `do` does."""
        end = self.network.now + seconds
        return self._measured(lambda: self.network.now >= end)

    def _measured(self, is_done):
        before = [each.traffic for each in self.network.machines]
        seconds = self.network.run_until(is_done)
        after = [each.traffic for each in self.network.machines]
        return seconds, [Traffic(*(b - a for a, b in zip(*each))) for each in zip(before, after)]


@contextlib.contextmanager
def _replaced(network, whole, segments):
    """Replace the time, the waits and the sockets of carriers."""
    clock = SimpleNamespace(
        monotonic=lambda: network.running.now,
        sleep=lambda seconds: network.running.sleep(seconds),
    )

    class Poll(dict):
        """A `select.poll`: descriptor -> events."""

        register, unregister = dict.__setitem__, dict.__delitem__

        def poll(self, milliseconds):
            network.running.sleep(milliseconds / 1000, self)
            return [(each, select.POLLIN) for each in network.running.readable(self)]

    polls = SimpleNamespace(poll=Poll, POLLIN=select.POLLIN, POLLOUT=select.POLLOUT)
    made = [
        *((module, "time", clock) for module in (base_carrier, heartbeats, reports)),
        (base_carrier, "select", polls),
        (channel, "_SPIN_SECONDS", 0.0),
        (base_carrier, "Mail", _Mail),
        (base_carrier, "Segments", lambda: segments),
        (carrier, "StopWatch", lambda: SimpleNamespace(seconds=lambda pid: 0.0)),
    ]
    if not whole:
        scratch = np.zeros(1 << 20, np.uint8)

        def memory(self, pieces, compress):
            dtype = self._dtype(pieces, compress)
            return scratch[: dtype.itemsize * sum(e - b for _, b, e in pieces)].view(dtype)

        def receive(self, machine, buffer, tag):
            return self._comm.receive(machine, scratch[: buffer.nbytes], tag)

        made += [
            (base_carrier.BaseCarrier, "receive", receive),
            (all_reduce, "reduce_block", lambda *_: None),
            (all_reduce.NetworkAllReduce, "_memory", memory),
        ]
    with contextlib.ExitStack() as stack:
        for target, name, value in made:
            stack.enter_context(mock.patch.object(target, name, value))
        yield
