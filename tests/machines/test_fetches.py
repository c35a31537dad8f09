"""The arena of fetched arrays, and the messages of a carrier about them, without MPI."""

import collections
import random

import numpy as np
import pytest

from synkhronos._machine.shared_memory import Segments
from synkhronos.comm.mpi.fetches import Arena, Fetches
from synkhronos.comm.mpi.transfers import PART
from synkhronos.errors import SharedMemoryFull


class Carrier:
    """Keeps what a carrier is asked to send, to ranks and to other machines."""

    def __init__(self, machine=0, n_machines=2):
        self.machine, self.n_machines, self.segments = machine, n_machines, Segments()
        self.posted, self.told, self.receiving = [], [], []
        self.over = set()

    def post(self, peer, *message):
        self.posted.append((peer, *message))

    def tell(self, machine, *message):
        self.told.append((machine, *message))

    def send_parts(self, machine, parts, transfer):
        self.told += [(machine, "part", transfer, part.copy()) for part in parts]

    def receive_parts(self, machine, parts, transfer, then):
        self.receiving += [(part, lambda i=i: then(i)) for i, part in enumerate(parts)]

    def has_left(self, session):
        return session == 0

    def is_over(self, call):
        return call in self.over

    def open(self, place):
        segment, dtype, shape, offset = place
        return self.segments.attach(segment).array(dtype, shape, offset)


@pytest.fixture
def carrier():
    return Carrier()


@pytest.fixture
def fetches(carrier):
    return Fetches(carrier)


def blocks_of(arena, sizes):
    return [arena.take(nbytes) for nbytes in sizes]


def test_many_arrays_lie_in_few_segments():
    arena = Arena(Segments().create)
    for _ in range(3):
        arena.begin()
        places = blocks_of(arena, [10_000] * 1000)
        assert len({block.segment.ref for block, _ in places}) <= 5
        taken = sorted((block.segment.ref.serial, offset) for block, offset in places)
        for (serial, offset), (other, following) in zip(taken, taken[1:]):
            assert serial != other or offset + 10_000 <= following


def test_calls_of_the_same_arrays_take_no_new_memory():
    made = []
    segments = Segments()
    arena = Arena(lambda nbytes: made.append(nbytes) or segments.create(nbytes))
    for _ in range(100):
        arena.begin()
        blocks_of(arena, [100, 100 << 20, 100, 3 << 20, 7])
    assert made == [1 << 20, 100 << 20, 3 << 20]
    for _ in range(100):
        arena.begin()
        blocks_of(arena, [100])
    assert [block.segment.ref.nbytes for block in arena._blocks] == [1 << 20]


def test_what_is_still_coming_is_not_overwritten():
    arena = Arena(Segments().create)
    [(block, offset)] = blocks_of(arena, [1000])
    block.n_coming += 1
    arena.begin()
    [(again, other)] = blocks_of(arena, [1000])
    assert (again, other) == (block, offset + 1024)
    block.n_coming -= 1
    arena.begin()
    assert blocks_of(arena, [1000]) == [(block, offset)]


def test_unused_segments_go_where_there_is_no_room():
    segments, full = Segments(), False

    def create(nbytes):
        if full and nbytes > 1 << 21:
            raise SharedMemoryFull("on purpose")
        return segments.create(nbytes)

    arena = Arena(create)
    blocks_of(arena, [1 << 20, 1 << 20])
    full = True
    blocks_of(arena, [1 << 21])  # and no more than that
    with pytest.raises(SharedMemoryFull):
        blocks_of(arena, [1 << 22])
    assert len(arena._blocks) == 3


def test_the_first_message_of_a_call_ends_the_last_one(carrier, fetches):
    """Whichever rank's comes first: each has a socket of its own."""
    place = "an array"
    for call in (1, 1), (1, 2):
        carrier.told.clear()
        fetches.from_rank_fetch("a", 1, call, 0, place, None, 0)
        fetches.from_rank_fetch("b", 5, call, 0, place, None, 0)
        [(machine, name, number, *what)] = carrier.told
        assert (machine, name) == (0, "want")
        assert what == [call, [place], None, 0, 0, PART]
        carrier.posted.clear()
        fetches.from_machine_coming(0, number, [("<f8", (2,))], [np.arange(2.0)], PART)
        fetches.from_rank_fetch("c", 7, call, 0, place, None, 0)
        answers = {(channel, theirs) for channel, _, theirs, _ in carrier.posted}
        assert answers == {("a", 1), ("b", 5), ("c", 7)}
        for _, name, _, found in carrier.posted:
            np.testing.assert_array_equal(carrier.open(found), [0, 1])
            assert name == "done" and found[3] == 0
    with pytest.raises(RuntimeError, match="is over"):
        fetches.from_rank_fetch("a", 2, (1, 1), 0, place, None, 0)


def test_arrays_go_whole_or_in_rows(carrier, fetches):
    array = carrier.segments.create(8000)
    values = array.array("f8", (10, 100))
    values[...] = np.arange(1000).reshape(10, 100)
    place = array.ref, "<f8", (10, 100), 0
    fetches.from_machine_want(1, 3, (1, 1), [place], range(2, 4), 0, 0, PART)
    fetches.from_machine_want(1, 4, (1, 1), [place], np.array([5, 1]), 1, 0, PART)
    (_, coming, _, kinds, [rows], _), (_, _, _, other_kinds, [columns], _) = carrier.told
    assert (coming, kinds, other_kinds) == ("coming", [("<f8", (2, 100))], [("<f8", (10, 2))])
    np.testing.assert_array_equal(rows, values[2:4])
    np.testing.assert_array_equal(columns, values[:, [5, 1]])


def test_a_want_of_a_session_that_has_ended_is_refused(carrier, fetches):
    fetches.from_machine_want(1, 3, (0, 1), [None], None, 0, 0, PART)
    [(machine, name, number, problem)] = carrier.told
    assert (machine, name, number) == (1, "failed", 3)
    assert "the session is over" in problem


def test_an_array_for_which_there_is_no_room_is_received_and_its_rank_told(carrier, fetches):
    def full(nbytes):
        raise SharedMemoryFull("No room")

    fetches._arena = Arena(full)
    fetches.from_rank_fetch("a", 1, (1, 1), 0, "an array", None, 0)
    number = carrier.told[0][2]
    fetches.from_machine_coming(0, number, [("<f8", (300, 1000))], None, PART)
    assert sum(part.nbytes for part, _ in carrier.receiving) == 2_400_000
    for _, then in carrier.receiving:
        assert not carrier.posted
        then()
    [(channel, name, theirs, problem)] = carrier.posted
    assert (channel, name, theirs) == ("a", "failed", 1)
    assert "could not do its part, SharedMemoryFull: No room" in problem


def test_arrays_are_copied_into_the_memory_of_ranks(carrier, fetches):
    source, target = carrier.segments.create(1 << 22), carrier.segments.create(1 << 22)
    shapes = [(3,), (0, 5), (200, 1000)]  # the last one in two parts
    offsets = [0, 64, 64]
    places, targets = (
        [(each.ref, "<f8", *where) for where in zip(shapes, offsets)] for each in (source, target)
    )
    source.array("f8", (3,))[...] = 7
    source.array("f8", (200_000,), 64)[...] = np.arange(200_000)
    fetches.from_rank_copy("leader", 5, (1, 1), 1, places, targets)
    assert carrier.told == [(1, "want", 1, (1, 1), places, None, 0, 1, PART)]
    fetches.from_machine_want(1, 1, (1, 1), places, None, 0, 0, PART)
    (_, name, number, kinds, _, part), *sent = carrier.told[1:]
    assert (name, number, kinds) == ("coming", 1, [("<f8", shape) for shape in shapes])
    fetches.from_machine_coming(1, 1, kinds, None, part)
    assert fetches.are_copying((1, 1)) and not fetches.are_copying((1, 2))
    assert len(sent) == len(carrier.receiving) == 3
    for (_, _, _, data), (part, then) in zip(sent, carrier.receiving):
        assert not carrier.posted
        part[...] = data
        then()
    assert carrier.posted == [("leader", "done", 5, None)] and not fetches.are_copying((1, 1))
    assert target.array("f8", (3,)).tolist() == [7] * 3
    np.testing.assert_array_equal(target.array("f8", (200_000,), 64), np.arange(200_000))


def test_copies_of_a_session_that_has_ended_are_refused(carrier, fetches):
    segment = carrier.segments.create(80)
    place = segment.ref, "<f8", (10,), 0
    fetches.from_rank_copy("leader", 3, (2, 1), 1, [place], [place])
    assert fetches.are_copying((2, 1))
    fetches.from_machine_want(1, 1, (0, 1), [place], None, 0, 0, PART)
    (_, name, number, problem) = carrier.told[-1]
    assert (name, number) == ("failed", 1) and "the session is over" in problem
    fetches.from_machines["failed"](1, 1, problem)
    assert carrier.posted == [("leader", "failed", 3, problem)]
    assert not fetches.are_copying((2, 1))


def test_small_arrays_come_with_the_message(carrier, fetches):
    segment = carrier.segments.create(80)
    place = segment.ref, "<f8", (10,), 0
    fetches.from_rank_copy("leader", 3, (1, 1), 1, [place], [place])
    fetches.from_machine_coming(1, 1, [("<f8", (10,))], [np.arange(10.0)], PART)
    assert segment.array("f8", (10,)).tolist() == [*range(10)] and not carrier.receiving
    assert carrier.posted == [("leader", "done", 3, None)]


class Machines:
    """Machines that all copy arrays of one, with messages between them that take any time."""

    def __init__(self, n_machines, root, shapes, seed):
        self.n, self.root, self._random = n_machines, root, random.Random(seed)
        self.carriers = [Carrier(m, n_machines) for m in range(n_machines)]
        self.fetches = [Fetches(carrier) for carrier in self.carriers]
        offsets = np.cumsum([0, *(8 * int(np.prod(shape)) for shape in shapes)])
        nbytes = max(int(offsets[-1]), 8)
        self.places = []
        self.memory = [carrier.segments.create(nbytes) for carrier in self.carriers]
        for segment in self.memory:
            kinds = [("<f8", shape, int(at)) for shape, at in zip(shapes, offsets)]
            self.places.append(tuple((segment.ref, *kind) for kind in kinds))
        self.arrays = [[c.open(place) for place in p] for c, p in zip(self.carriers, self.places)]
        for number, array in enumerate(self.arrays[root]):
            array[...] = np.arange(array.size).reshape(array.shape) + number
        self.under_way = collections.defaultdict(collections.deque)  # (from, to) -> messages
        self.sent = collections.Counter()
        self.come = [[] for _ in range(n_machines)]  # what to call for parts that have come

    def begin(self, machine):
        """Let a machine begin to copy."""
        of = self.root, self.places[self.root], self.places[machine]
        self.fetches[machine].from_rank_copy_to_all("leader", "id", (1, 1), *of)

    def leave(self, machine):
        """End the call on a machine, as after an abort."""
        self.carriers[machine].over.add((1, 1))
        self.fetches[machine].drop_relays()

    def step(self):
        """Let one message come; return whether there was one."""
        for machine, carrier in enumerate(self.carriers):
            for to, *message in carrier.told:
                self.under_way[machine, to].append(message)
            carrier.told.clear()
        ways = [way for way, messages in self.under_way.items() if messages]
        if not ways:
            return any(map(self.see, range(self.n)))
        source, to = way = self._random.choice(ways)
        name, *rest = self.under_way[way].popleft()
        if name == "part":
            self.sent[source] += rest[1].nbytes
            part, then = self.carriers[to].receiving.pop(0)
            part[...] = rest[1]
            self.come[to].append(then)
            if self._random.random() < 0.5:
                self.see(to)
        else:
            self.fetches[to].from_machines[name](source, *rest)
        return True

    def see(self, machine):
        """Let a carrier see which parts have come; return whether there was one."""
        seen, self.come[machine] = self.come[machine], []
        for then in seen:
            then()
        return bool(seen)

    @property
    def others(self):
        return [machine for machine in range(self.n) if machine != self.root]

    def answers(self, machine):
        return [message[1] for message in self.carriers[machine].posted]

    @property
    def are_empty(self):
        return not any(each._relays or each._asked or each._under_way for each in self.fetches)


IN_TREE, IN_CHAIN = (100, 300), (1000, 200)
SHAPES_FOR_ALL = [[(3,), (40,)], [(5,), (0, 2), IN_TREE], [(200, 250)], [(1000, 1000)]]


@pytest.mark.parametrize("n_machines, root", [(2, 1), (3, 1), (5, 0), (12, 4)])
@pytest.mark.parametrize("shapes", SHAPES_FOR_ALL, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_machines_that_copy_the_same_arrays_pass_them_on(n_machines, root, shapes, seed):
    machines = Machines(n_machines, root, shapes, seed)
    waiting = machines.others
    random.Random(seed).shuffle(waiting)
    while waiting:
        machines.begin(waiting.pop())
        for _ in range(seed * len(waiting)):
            machines.step()
    while machines.step():
        pass
    for machine in machines.others:
        assert machines.answers(machine) == ["done"]
        for array, expected in zip(machines.arrays[machine], machines.arrays[root]):
            np.testing.assert_array_equal(array, expected)
    nbytes = sum(array.nbytes for array in machines.arrays[root])
    turns = n_machines.bit_length() if nbytes <= 1 << 18 else 1
    if n_machines == 12 and shapes == [(200, 250)]:  # more machines than parts
        turns = 2
    assert all(each <= turns * nbytes for each in machines.sent.values())
    assert machines.are_empty


@pytest.mark.parametrize(
    "shape, leaver, behind",
    [
        (IN_CHAIN, 1, {2, 3, 4}),
        (IN_CHAIN, 3, {4}),
        (IN_TREE, 2, {3}),
        (IN_TREE, 4, {5, 6, 7}),
        (IN_TREE, 6, {7}),
    ],
)
@pytest.mark.parametrize("first", ["the others", "the end"])
def test_machines_behind_one_that_has_left_the_call_are_told(shape, leaver, behind, first):
    machines = Machines(5 if shape == IN_CHAIN else 8, 0, [shape], 0)
    if first == "the end":
        machines.leave(leaver)
    for machine in {*machines.others} - {leaver}:
        machines.begin(machine)
    while machines.step():
        pass
    machines.leave(leaver)
    while machines.step():
        pass
    for machine in {*machines.others} - {leaver}:
        assert machines.answers(machine) == ["failed" if machine in behind else "done"]
    for machine in range(machines.n):
        machines.leave(machine)
    assert machines.are_empty


def test_a_copy_that_is_coming_when_the_call_is_left_is_passed_on():
    machines = Machines(4, 0, [IN_CHAIN], 0)
    for machine in (1, 2, 3):
        machines.begin(machine)
    while not machines.sent:
        machines.step()
    machines.leave(1)
    while machines.step():
        pass
    assert [machines.answers(machine) for machine in (1, 2, 3)] == [["done"]] * 3
    assert machines.are_empty


def test_what_the_next_machine_did_not_ask_for_is_forgotten_in_the_next_call():
    machines = Machines(3, 0, [IN_CHAIN], 0)
    machines.begin(1)
    while machines.step():
        pass
    assert machines.answers(1) == ["done"] and len(machines.fetches[1]._relays) == 1
    of = 0, machines.places[0], machines.places[1]
    machines.fetches[1].from_rank_copy_to_all("leader", "id", (1, 2), *of)
    assert [call for call, _ in machines.fetches[1]._relays] == [(1, 2)]
