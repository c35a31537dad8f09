"""The all-reduces of a carrier, from the requests of its ranks to the answers.

    ranks ── reduce, bucket ──▶ a round ── ready ──▶ all other carriers
    all have said "ready"   ──▶ `NetworkAllReduce`, or MPI, two at a time, in order of their numbers
                            ──▶ done, to all ranks that wait

Each carrier sends "ready" to each other one: M (M - 1) messages, but a machine waits for one hop.

When a call is aborted, it is given up: the carriers begin no more of its rounds, and tell one
another ("over") how many they have begun. So all know which rounds all machines have begun. These
go on to their end on all machines, and all others are dropped on all: no machine has a result that
another one does not have.
"""

import functools

from synkhronos.comm.handlers import Handlers
from synkhronos.comm.mpi.all_reduce import NetworkAllReduce, reduce_all, reduce_into_first
from synkhronos.comm.mpi.fetches import problem_here
from synkhronos.comm.mpi.transfers import GIVEN_UP, small_for_all

# All machines begin rounds in the same order. With two at a time, the first chunks of a round are
# sent in the pause at the end of the round before; with more, all would end late.
_OPEN_ROUNDS = 2
_REDUCE, _TAGS = 1 << 12, 1 << 13  # the first tag of all-reduces, and half their number


class Reductions:
    """The rounds that the ranks of a machine have begun, and what other machines say of theirs."""

    def __init__(self, carrier):
        self._carrier = carrier
        self._rounds = {}  # id -> ReductionRound
        self._buckets = {}  # id -> Bucket, until all ranks here have begun it
        self._ready = {}  # id -> machine -> announcement
        self._begun = 0, 0, 0  # the last round that was begun here
        self._given_up = 0, 0  # the session and number of the last call that was given up
        self._over = {}  # machine -> the last call it gave up: session, number, number of rounds
        self.from_ranks = Handlers(
            reduce=self.from_rank_reduce,
            bucket=self.from_rank_bucket,
            give_up=self.from_rank_give_up,
        )
        self.from_machines = Handlers(over=self.from_machine_over, ready=self.from_machine_ready)

    def have(self, call):
        """Return whether a call, or one before it, has rounds that have not ended."""
        return any(key[:2] <= call for key in self._rounds)

    def progress(self):
        """Do what can be done now; return whether a round has ended."""
        happened, n_open = False, 0
        for id in sorted(self._rounds):
            work = self._rounds[id]
            if work.progress():
                happened = True
                self._end(id).answer(work.result)
            else:
                n_open += work.go_on is not None
            if n_open == _OPEN_ROUNDS:
                break
        return happened

    def leave(self, is_over):
        """Give up the calls in which the ranks here begin nothing more.

        Other machines may have begun a reduction that has not started here, and would wait for it.
        """
        for call in sorted({key[:2] for key in self._rounds if is_over(key)}):
            self.from_rank_give_up(None, *call)
        for key in [key for key in self._buckets if is_over(key)]:
            del self._buckets[key]  # which not all ranks have begun
        self.drop_announcements(is_over)

    def drop_announcements(self, is_over):
        """Drop the announcements of rounds that the ranks here do not begin any more."""
        for key in [key for key in self._ready if is_over(key) and key not in self._rounds]:
            del self._ready[key]

    def from_rank_reduce(self, peer, id, places, ops, divisor, layout, compress):
        """Reduce arrays over the machines, in place."""
        if id[:2] <= self._given_up:
            return self._carrier.post(peer, "done", id, GIVEN_UP)
        arrays = [self._carrier.open(place) for place in places]
        answer = functools.partial(self._carrier.post, peer, "done", id)
        return self._begin_round(id, arrays, layout, answer, ops, divisor, compress)

    def from_rank_bucket(self, peer, id, rank, n_ranks, places, layout, counting, ops, *how):
        """Take a rank's part of a bucket; begin to reduce it when all of this machine have come."""
        if id[:2] <= self._given_up:
            return self._carrier.post(peer, "done", id, GIVEN_UP)
        bucket = self._buckets.setdefault(id, Bucket(n_ranks))
        bucket.add(rank, peer, places, layout)
        if not bucket.is_complete:
            return None
        del self._buckets[id]

        def answer(layouts):
            told = layouts if layouts == GIVEN_UP else (layouts, bucket.places)
            bucket.answer(self._carrier.post, "done", id, told)

        try:
            here, arrays = bucket.layout, []
            if here[0] != "unequal":
                arrays = bucket.reduce(self._carrier.open, ops, counting)
            self._begin_round(id, arrays, here, answer, ops, *how)
        except Exception as error:
            # Before the answer: else a later bucket may begin, and others wait for this one.
            self.from_rank_give_up(None, *id[:2])
            bucket.answer(self._carrier.post, "failed", id, problem_here(error))
        return None

    def _begin_round(self, id, arrays, layout, answer, *how):
        limit = small_for_all(self._carrier.n_machines)
        is_small = sum(array.nbytes for array in arrays) <= limit
        inline = [array.copy() for array in arrays] if is_small else None
        ready = self._ready.setdefault(id, {})
        ready[self._carrier.machine] = layout, inline
        self._begun = id
        self._rounds[id] = ReductionRound(self._carrier, id, ready, arrays, answer, *how)
        self._carrier.tell_all("ready", id, layout, inline)

    def _end(self, id):
        del self._ready[id]
        return self._rounds.pop(id)

    def from_rank_give_up(self, peer, session, sequence):
        """Begin no more reductions of a call; tell all machines how many have been begun here."""
        if (session, sequence) > self._given_up:
            self._given_up = session, sequence
            begun = self._begun[2] if self._begun[:2] == (session, sequence) else 0
            self._over[self._carrier.machine] = session, sequence, begun
            self._carrier.tell_all("over", session, sequence, begun)
        for key in [key for key in self._buckets if key[:2] <= self._given_up]:
            self._buckets.pop(key).answer(self._carrier.post, "done", key, GIVEN_UP)
        for key, work in list(self._rounds.items()):
            if work.go_on is None and self._is_given_up(key):
                self._end(key).answer(GIVEN_UP)

    def _is_given_up(self, key):
        session, sequence, number = key
        return any(
            over[:2] == (session, sequence) and over[2] < number for over in self._over.values()
        )

    def from_machine_over(self, machine, session, sequence, begun):
        """Take note of how many reductions of an aborted call another machine has begun."""
        self._over[machine] = session, sequence, begun
        self.from_rank_give_up(None, session, sequence)

    def from_machine_ready(self, machine, id, layout, inline):
        """Take note that another machine has begun an all-reduce."""
        if self._carrier.is_over(id) and id not in self._rounds:
            return  # this machine has left the call without it
        self._ready.setdefault(id, {})[machine] = layout, inline


class ReductionRound:
    """An all-reduce, from its announcement to its answer.

    `ready` has the announcements: machine -> layout, and arrays if they are small. At the end
    `answer` takes `result`, which is None, or the layouts of all machines if they differ; or
    GIVEN_UP.
    """

    def __init__(self, carrier, id, ready, arrays, answer, ops, divisor, compress):
        self._carrier, self._id, self._ready, self.answer = carrier, id, ready, answer
        self._arrays, self._ops, self._divisor, self._compress = arrays, ops, divisor, compress
        self.result = None
        self.go_on = None  # while arrays are under way: does what can be done, as `progress`

    def progress(self):
        """Do what can be done now; return whether the round has ended."""
        if self.go_on is not None:
            return self.go_on()
        if len(self._ready) < self._carrier.n_machines:
            return False
        layouts, values = zip(*(each for _, each in sorted(self._ready.items())))
        how = self._ops, self._divisor
        # All machines may have the same "unequal" layout.
        if layouts[0][0] == "unequal" or any(layout != layouts[0] for layout in layouts):
            self.result = list(layouts)
            return True
        if values[0] is not None:
            reduce_all(values, *how, self._compress, self._arrays)
            return True
        mpi = self._carrier.mpi
        if mpi is not None and mpi.can_reduce(self._arrays, self._ops, self._compress):
            self.go_on = mpi.begin(self._arrays, *how)
        else:
            session, sequence, number = self._id
            tag = _REDUCE + 2 * ((977 * session + 31 * sequence + number) % _TAGS)
            work = NetworkAllReduce(self._carrier, self._arrays, *how, tag, self._compress)
            self.go_on = work.progress
        return self.go_on()


class Bucket:
    """A reduction that a function begins long before it needs the results, on the carrier.

        rank      fills buffers ── ("bucket", id, buffers) ──▶ carrier            and computes on
        carrier   when all ranks of its machine have begun it: reduces into the buffers of the first
                  rank, then between machines ── ("done", id, places) ──▶ all ranks of its machine
        rank      uses the buffers of the first rank where they are, or copies them

    No rank waits for another one, or for the carrier, before it needs a result.
    """

    def __init__(self, n_ranks):
        self._peers = []
        self._places = [None] * n_ranks
        self._layouts = [None] * n_ranks

    def add(self, rank, peer, places, layout):
        """Take the part of one rank, which has this number on its machine."""
        self._peers.append(peer)
        self._places[rank], self._layouts[rank] = places, layout

    def answer(self, post, *message):
        """Send a message to all ranks that have begun it."""
        for peer in self._peers:
            post(peer, *message)

    @property
    def is_complete(self):
        """Whether all ranks of this machine have begun it."""
        return len(self._peers) == len(self._places)

    @property
    def layout(self):
        """The dtypes and shapes of all ranks of this machine, or ("unequal", shapes of each)."""
        first, *others = self._layouts
        kinds = [kind for kind, _ in first]
        shapes = [[shape for _, shape in layout] for layout in self._layouts]
        if all(layout == first for layout in others):
            return kinds, shapes[0]
        return "unequal", shapes

    @property
    def places(self):
        """The places of the results: the buffers of the first rank."""
        return self._places[0]

    def reduce(self, open_place, ops, counting):
        """Reduce the buffers of the `counting` ranks into those of the first; return these."""
        buffers = [[open_place(place) for place in places] for places in self._places]
        reduce_into_first(buffers, ops, counting, 1, 0)
        return buffers[0]
