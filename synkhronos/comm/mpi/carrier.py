"""The carrier of a machine: the process that speaks MPI, for all ranks there.

    script or leader ── Unix socket ──┐                            ┌── script or leader
    rank             ── Unix socket ──┤ carrier ═══ MPI ═══ carrier├── rank
    segments of shared memory ── mapped ┘                            └ mapped ── segments

Theano holds Python's lock while it computes, so a rank can't move data meanwhile; and a process
that has begun MPI must not be forked. So MPI has a process of its own, which the first process of
the machine starts. It reads and writes the segments of the ranks where they are.

A message is a tuple whose first item names it: `Carrier` has a method ``from_rank_...`` or
``from_machine_...`` for each. Messages between two carriers keep their order. What is large goes in
a message of its own, announced by a small one, so that both sides are ready for it.
"""

import collections
import functools
import os
import pickle
import select
import signal
import socket
import struct
import sys
import time

import mpi4py

# Open MPI asks the receiver before it sends more than this. The question and the answer would wait
# behind the data that a slow cable has queued; here the receiver is ready in almost all cases.
os.environ.setdefault("OMPI_MCA_btl_tcp_eager_limit", str(1 << 20))
mpi4py.rc.threads = False  # only one thread calls MPI

import numpy as np  # noqa: E402
from mpi4py import MPI  # noqa: E402

from synkhronos._arithmetic.partition import take_rows  # noqa: E402
from synkhronos._machine.shared_memory import Segments  # noqa: E402
from synkhronos.comm.mpi.buckets import Bucket  # noqa: E402
from synkhronos.comm.mpi.channel import Channel, Closed  # noqa: E402
from synkhronos.comm.mpi.transfers import (  # noqa: E402
    GIVEN_UP,
    SMALL,
    Fetch,
    Round,
    Spread,
    bytes_of,
    parts,
)

# MPI has to be asked whether something has come. For a moment the carrier asks all the time. Then
# it sleeps between two looks, and leaves the core to the ranks: the longer nothing has happened,
# the longer.
_SELECTS = 1024  # select() takes descriptors below
_AWAKE_SECONDS = 0.001
_NAPS = (  # (nothing has happened for so long, seconds of a pause)
    (0.01, 0.00005),
    (0.2, 0.0002),
    (10.0, 0.001),
    (float("inf"), 0.005),
)
HEARTBEAT_SECONDS = 1.0
LOST_SECONDS = 8.0  # a machine that has not been heard of for this long is lost
# All machines begin rounds in one order. With two at a time, a round's first chunks fill the pause
# at the end of the round before; with more, all would end late.
_OPEN_ROUNDS = 2
_MOST_FREE = 16  # segments
_MESSAGE, _BULK = 1, 2  # tags; all-reduces have others


class Carrier:
    """The event loop of a carrier."""

    def __init__(self, leader, listener):
        self._comm = MPI.COMM_WORLD.Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.machine, self.n_machines = self._comm.rank, self._comm.size
        self._others = [m for m in range(self.n_machines) if m != self.machine]
        self._segments = Segments()
        self._leader, self._listener = leader, listener
        self._channels = {leader.fileno(): leader}
        self._poll = select.poll()
        self._poll.register(leader, select.POLLIN)
        self._poll.register(listener, select.POLLIN)
        self._sending = []  # (request, buffer)
        self._receiving = []  # (request, buffer, what to do then)
        self._rounds = {}  # id -> Round
        self._ready = collections.defaultdict(dict)  # id -> machine -> announcement
        self._over = {}  # machine -> session, call, number of exchanges: of an aborted call
        self._begun = 0, 0, 0  # the last reduction that was begun here
        self._buckets = {}  # id -> Bucket, until all ranks here have begun it
        self._given_up = 0, 0  # the session and number of the last call that was given up
        self._spreads = {}  # id -> Spread
        self._settling = None  # (channel, id, session, sequence)
        self._fetches = {}  # number -> Fetch
        self._fetched = {}  # what -> Fetch of this call, for whole arrays
        self._numbers = 0
        self._lent, self._free = [], []  # (segment, number of the fetch) of this call; others
        self._heard = dict.fromkeys(self._others, time.monotonic())
        self._beat = 0.0
        self.is_running, self.has_lost = True, False
        self._leader.post(("hello", self.machine, self.n_machines))

    def run(self) -> None:
        """Carry messages until the leader or the first machine says that it is over."""
        last, nap = time.monotonic(), 0
        while self.is_running:
            happened = self._serve_ranks(nap)
            happened |= self._serve_machines()
            happened |= self._move()
            now = time.monotonic()
            if happened:
                last, nap = now, 0
            elif now - last < _AWAKE_SECONDS:
                os.sched_yield()
            else:
                busy = self._rounds or self._receiving or self._sending
                idle = 0 if busy else now - last
                nap = next(nap for limit, nap in _NAPS if idle < limit)
            if now - self._beat > HEARTBEAT_SECONDS:
                self._beat = now
                self._send_heartbeats(now)
        for request, _ in self._sending:
            _wait_at_most(request, 1.0)

    def _serve_ranks(self, seconds):
        happened = False
        for fd in self._ready_sockets(seconds):
            happened = True
            if fd == self._listener.fileno():
                self._accept()
                continue
            channel = self._channels[fd]
            try:
                channel.flush()
                messages = channel.receive()
            except Closed:
                self._drop(channel)
                continue
            for name, *rest in messages:
                getattr(self, f"from_rank_{name}")(channel, *rest)
        for channel in [c for c in self._channels.values() if c.has_unsent]:
            self._post(channel)
        return happened

    def _ready_sockets(self, seconds):
        """Return the descriptors of sockets that can be read; wait for one at most so long."""
        if seconds:
            sockets = [self._listener.fileno(), *self._channels]
            if max(sockets) < _SELECTS:  # `poll` can't wait for less than a millisecond
                return select.select(sockets, (), (), seconds)[0]
        return [fd for fd, _ in self._poll.poll(1000 * seconds)]

    def _post(self, channel, *message):
        try:
            if message:
                channel.post(message)
            else:
                channel.flush()
        except Closed:
            self._drop(channel)

    def _accept(self):
        connection, _ = self._listener.accept()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        _, user, _ = struct.unpack("3i", credentials)
        if user != os.getuid():
            return connection.close()
        channel = Channel(connection)
        self._channels[channel.fileno()] = channel
        self._poll.register(channel, select.POLLIN)

    def _drop(self, channel):
        if channel.fileno() not in self._channels:
            return
        self._poll.unregister(channel)
        del self._channels[channel.fileno()]
        if channel is self._leader:
            # It has ended without a word: the other machines end their parts.
            self._tell_all("end", f"The first process on {socket.gethostname()} has ended")
            self.is_running = False
        channel.close()

    def _serve_machines(self):
        status, happened = MPI.Status(), False
        while self._comm.Iprobe(MPI.ANY_SOURCE, _MESSAGE, status):
            happened = True
            data = bytearray(status.Get_count(MPI.BYTE))
            machine = status.Get_source()
            self._comm.Recv([data, MPI.BYTE], machine, _MESSAGE)
            self._heard[machine] = time.monotonic()
            name, *rest = pickle.loads(data)
            getattr(self, f"from_machine_{name}")(machine, *rest)
        return happened

    def _move(self):
        """Go on with what is under way."""
        happened = False
        if self._sending:
            left = [each for each in self._sending if not each[0].Test()]
            happened = len(left) < len(self._sending)
            self._sending = left
        for each in [each for each in self._receiving if each[0].Test()]:
            happened = True
            self._receiving.remove(each)
            each[2]()
        n_open = 0
        for id in sorted(self._rounds):
            work = self._rounds[id]
            if work.progress():
                happened = True
                del self._rounds[id]
            else:
                n_open += work.has_started
            if n_open == _OPEN_ROUNDS:
                break
        if self._settling is not None:
            self._settle()
        return happened

    def _settle(self):
        """Answer the leader when no reduction of a call that was given up is open any more."""
        channel, id, session, sequence = self._settling
        for key in [key for key in self._rounds if key[0] < session]:
            del self._rounds[key]
        for key, spread in list(self._spreads.items()):
            if key[:2] <= (session, sequence) and not spread.is_open:
                del self._spreads[key]
        if not any(key[:2] == (session, sequence) for key in (*self._rounds, *self._spreads)):
            for key in [key for key in self._ready if key[:2] <= (session, sequence)]:
                del self._ready[key]
            self._settling = None
            self._post(channel, "done", id, None)

    def from_rank_give_up(self, channel, session, sequence):
        """Begin no more reductions of a call; tell all machines how many have been begun here.

        So all carriers come to know which reductions all machines have begun. These go on to their
        end, everywhere. All others are dropped, everywhere.
        """
        if (session, sequence) > self._given_up:
            self._given_up = session, sequence
            begun = self._begun[2] if self._begun[:2] == (session, sequence) else 0
            self._over[self.machine] = session, sequence, begun
            self._tell_all("over", session, sequence, begun)
        for key in [key for key in self._buckets if key[:2] <= self._given_up]:
            for channel in self._buckets.pop(key).channels:
                self._post(channel, "done", key, GIVEN_UP)
        for key, work in list(self._rounds.items()):
            if not work.has_started and self._is_given_up(key):
                del self._rounds[key]
                work.end(GIVEN_UP)

    def _is_given_up(self, key):
        session, sequence, number = key
        return any(
            over[:2] == (session, sequence) and over[2] < number for over in self._over.values()
        )

    def _send_heartbeats(self, now):
        others = self._others if self.machine == 0 else [0]
        for machine in others:
            self.tell(machine, "alive")
        for machine in self._others:
            if (0 in (machine, self.machine)) and now - self._heard[machine] > LOST_SECONDS:
                self._lose(machine)
                return

    def _lose(self, machine):
        self._post(self._leader, "lost", machine, now_silent(LOST_SECONDS))
        for other in self._others:
            if other != machine:
                self.tell(other, "end", f"Machine {machine} is lost")
        self._heard[machine] = float("inf")
        self.has_lost = True
        if machine == 0:
            reason = f"The first machine is lost: {now_silent(LOST_SECONDS)}"
            self._post(self._leader, "end", reason, machine)
            self.is_running = False

    def tell(self, machine, *message):
        """Send a message to the carrier of another machine."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._sending.append((self._comm.Isend([data, MPI.BYTE], machine, _MESSAGE), data))

    def _tell_all(self, *message):
        for machine in self._others:
            self.tell(machine, *message)

    def send(self, machine, buffer, tag):
        """Send an array; return the request."""
        return self._comm.Isend([bytes_of(buffer), MPI.BYTE], machine, tag)

    def receive(self, machine, buffer, tag):
        """Receive an array; return the request."""
        return self._comm.Irecv([bytes_of(buffer), MPI.BYTE], machine, tag)

    def from_rank_tell(self, channel, to, message):
        """Pass a message on to the leaders of one machine, or of all others."""
        for machine in self._others if to is None else [to]:
            self.tell(machine, "told", message)

    def from_rank_begin(self, channel):
        """Begin a call: arrays that the last one fetched are not needed any more."""
        # A call that was left early may have left arrays that are still on their way.
        self._free += [segment for segment, number in self._lent if number not in self._fetches]
        self._lent = [(each, number) for each, number in self._lent if number in self._fetches]
        del self._free[:-_MOST_FREE]
        self._fetched.clear()

    def from_rank_forget(self, channel, references):
        """Drop the maps of segments that their ranks have released."""
        self._segments.forget(references)

    def from_rank_fetch(self, channel, number, machine, place, rows, axis, is_whole):
        """Get some rows of an array of another machine, and answer with a segment that has them."""
        what = machine, place
        fetch = self._fetched.get(what) if is_whole else None
        if fetch is not None:
            if fetch.answer is None:
                fetch.waiting.append((channel, number))
            else:
                self._post(channel, "fetched", number, *fetch.answer)
            return
        fetch = Fetch()
        fetch.waiting.append((channel, number))
        self._numbers += 1
        self._fetches[self._numbers] = fetch
        if is_whole:
            self._fetched[what] = fetch
        self.tell(machine, "want", self._numbers, place, rows, axis)

    def from_rank_reduce(self, channel, id, places, ops, divisor, layout, compress):
        """Reduce arrays over the machines, in place."""
        if id[:2] <= self._given_up:
            return self._post(channel, "done", id, GIVEN_UP)
        arrays = [self._open(place) for place in places]
        how = ops, divisor, layout, compress
        answer = functools.partial(self._post, channel, "done", id)
        return self._begin_round(id, arrays, how, answer)

    def from_rank_bucket(self, channel, id, rank, n_ranks, places, layout, counting, *how):
        """Take a rank's part of a bucket; begin to reduce it when all of this machine have come."""
        if id[:2] <= self._given_up:
            return self._post(channel, "done", id, GIVEN_UP)
        bucket = self._buckets.setdefault(id, Bucket(n_ranks))
        bucket.add(rank, channel, places, layout)
        if not bucket.is_complete:
            return None
        del self._buckets[id]
        ops, divisor, compress = how
        here, arrays = bucket.layout(self.machine), []
        if here[0] != "unequal":
            arrays = bucket.reduce(self._open, ops, counting)

        def answer(layouts):
            for each in bucket.channels:
                told = layouts if layouts == GIVEN_UP else (layouts, bucket.places)
                self._post(each, "done", id, told)

        return self._begin_round(id, arrays, (ops, divisor, here, compress), answer)

    def _begin_round(self, id, arrays, how, answer):
        work = Round(self, id, arrays, *how, answer)
        self._rounds[id], self._begun = work, id
        layout = how[2]
        for machine in self._others:
            self.tell(machine, "ready", id, layout, work.inline)

    def from_rank_spread(self, channel, id, root, places):
        """Copy arrays from the machine `root` to all others; answer when they are there."""
        arrays = [self._open(place) for place in places]
        if self.machine == root:
            for machine in self._others:
                self.tell(machine, "spreading", id, [array.nbytes for array in arrays])
                for array in arrays:
                    for part in parts(array):
                        self._sending.append((self.send(machine, part, _BULK), part))
            return self._post(channel, "done", id, None)
        spread = self._spreads.setdefault(id, Spread())
        spread.give(arrays, lambda: self._post(channel, "done", id, None))
        return self._end_spread(id, spread)

    def from_machine_spreading(self, machine, id, sizes):
        """Receive arrays, into their places if the ranks here have named these already."""
        spread = self._spreads.setdefault(id, Spread())
        for array in spread.announce(sizes):
            for part in parts(array):
                spread.left += 1
                work = self.receive(machine, part, _BULK), part, spread.one_less
                self._receiving.append(work)
        spread.then = lambda: self._end_spread(id, spread)
        self._end_spread(id, spread)

    def _end_spread(self, id, spread):
        if spread.is_complete:
            self._spreads.pop(id, None)
            spread.answer()

    def from_rank_settle(self, channel, id, session, sequence):
        """Give up a call; answer when none of its reductions is open."""
        self.from_rank_give_up(None, session, sequence)
        self._settling = channel, id, session, sequence

    def from_rank_end(self, channel, reason):
        """End this carrier, and those of all other machines."""
        self._tell_all("end", reason)
        self.is_running = False

    def from_machine_alive(self, machine):
        """Take note: the time was written down already."""

    def from_machine_told(self, machine, message):
        """Pass a message on to the leader of this machine."""
        self._post(self._leader, "told", machine, message)

    def from_machine_end(self, machine, reason):
        """End, because another machine has."""
        self._post(self._leader, "end", reason, machine)
        self.is_running = False

    def from_machine_want(self, machine, number, place, rows, axis):
        """Send rows of an array of this machine."""
        try:
            array = self._open(place)
            if rows is not None:
                array = take_rows(array, rows, axis=axis)
            array = np.ascontiguousarray(array).reshape(array.shape)
        except Exception as error:
            return self.tell(machine, "failed", number, f"{type(error).__name__}: {error}")
        if array.nbytes <= SMALL:
            return self.tell(machine, "here", number, array.dtype.str, array.shape, array.tobytes())
        self.tell(machine, "coming", number, array.dtype.str, array.shape)
        for part in parts(array):
            self._sending.append((self.send(machine, part, _BULK), part))
        return None

    def from_machine_failed(self, machine, number, problem):
        """Tell the rank that its array can't be had."""
        self._answer(number, None, None, None, problem)

    def from_machine_here(self, machine, number, dtype, shape, data):
        """Take a small array."""
        segment = self._room(len(data), number)
        segment.array(np.uint8, (len(data),))[...] = np.frombuffer(data, np.uint8)
        self._answer(number, segment.ref, dtype, shape, None)

    def from_machine_coming(self, machine, number, dtype, shape):
        """Receive a large array."""
        nbytes = int(np.dtype(dtype).itemsize * np.prod(shape, dtype=np.int64))
        segment = self._room(nbytes, number)
        pending = list(parts(segment.array(np.uint8, (nbytes,))))
        left = len(pending)

        def one_less():
            nonlocal left
            left -= 1
            if not left:
                self._answer(number, segment.ref, dtype, shape, None)

        for part in pending:
            self._receiving.append((self.receive(machine, part, _BULK), part, one_less))

    def from_machine_over(self, machine, session, sequence, begun):
        """Take note of how many reductions of an aborted call another machine has begun."""
        self._over[machine] = session, sequence, begun
        self.from_rank_give_up(None, session, sequence)

    def from_machine_ready(self, machine, id, layout, inline):
        """Take note that another machine has begun an all-reduce."""
        self._ready[id][machine] = layout, inline

    def _answer(self, number, *answer):
        fetch = self._fetches.pop(number)
        fetch.answer = answer
        for channel, theirs in fetch.waiting:
            self._post(channel, "fetched", theirs, *answer)

    def _open(self, place):
        segment, dtype, shape, offset = place
        return self._segments.attach(segment).array(dtype, shape, offset)

    def _room(self, nbytes, number):
        """Return a segment for a fetched array, for the time of this call."""
        fitting = [s for s in self._free if nbytes <= s.ref.nbytes <= max(4 * nbytes, 1 << 16)]
        if fitting:
            segment = min(fitting, key=lambda segment: segment.ref.nbytes)
            self._free.remove(segment)
        else:
            segment = self._segments.create(max(nbytes + nbytes // 4, 1 << 12))
        self._lent.append((segment, number))
        return segment

    def announcements(self, id):
        """Return the announcements of a round by other machines: machine -> layout, arrays."""
        return self._ready[id]

    def forget_announcements(self, id):
        """Drop the announcements of a round that has ended."""
        self._ready.pop(id, None)


def now_silent(seconds):
    """Return the sentence about a machine that is not heard of any more."""
    return f"It has not been heard of for {seconds:.0f} s"


def _wait_at_most(request, seconds):
    end = time.monotonic() + seconds
    while not request.Test() and time.monotonic() < end:
        os.sched_yield()


def main(fd: int, name: str) -> None:
    """Run a carrier: `fd` is its socket to the leader; ranks connect to the abstract name."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the script answers it
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{name}")
    listener.listen(1024)
    carrier = Carrier(Channel(socket.socket(fileno=fd)), listener)
    try:
        carrier.run()
    finally:
        if carrier.has_lost:
            # The end of MPI would wait for the lost machine. So does what Python does at its exit.
            os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
