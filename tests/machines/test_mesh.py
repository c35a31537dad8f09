"""The connections between carriers: what is sent comes, and only that; each end is known."""

import contextlib
import select
import socket
import threading

import numpy as np
import pytest
from support.waiting import LONG, wait_until

from synkhronos.comm.mpi import mesh, rendezvous
from synkhronos.comm.mpi.mesh import Mesh, _Connection
from synkhronos.comm.mpi.rendezvous import Unreachable
from synkhronos.comm.mpi.sealed import Seal
from synkhronos.comm.mpi.secret import NoSecret

SECRET = b"of this job"


class Comm:
    """What a Mesh needs of MPI.Comm, for processes that are threads here."""

    def __init__(self, rank, size, shared):
        self.rank, self.size, (self._barrier, self._rows) = rank, size, shared

    def Allgather(self, own, everyone):
        self._rows[self.rank] = own
        self._barrier.wait(LONG)
        for rank, row in self._rows.items():
            everyone[rank] = row


@pytest.fixture
def meshes():
    """Return what makes a number of them that are connected; they are closed after the test."""
    all_of_them = []

    def make(*given):
        made = connected(*given)
        all_of_them.extend(made)
        return made

    yield make
    for one in all_of_them:
        for each in getattr(one, "_connections", {}).values():
            each.close()


def connected(n, secrets=SECRET, with_leaders=False):
    """Return n of them that are connected, or what they have raised."""
    shared, made = (threading.Barrier(n), {}), {}
    secrets = secrets if isinstance(secrets, list) else [secrets] * n

    def make(rank):
        try:
            made[rank] = Mesh(Comm(rank, n, shared), secrets[rank], with_leaders)
        except Exception as error:
            made[rank] = error

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(n)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(2 * LONG)
    return [made[rank] for rank in range(n)]


def of_tcp(monkeypatch):
    """Let the Unix sockets of others not be found."""
    true = rendezvous.Start._call

    def call(self, rank, facts):
        return true(self, rank, {**facts, "unix": "none"})

    monkeypatch.setattr(rendezvous.Start, "_call", call)


def turn(*them):
    """Let each take and send what it can; return whether there was something."""
    found = False
    for each in them:
        poll = select.poll()
        for descriptor in each.descriptors:
            is_unsent = descriptor in each.unsent
            poll.register(descriptor, select.POLLIN | (select.POLLOUT if is_unsent else 0))
        for descriptor, _ in poll.poll(10):
            found = True
            each.read(descriptor)
    return found


@pytest.fixture(params=["sealed", "hmac", "unix"])
def way(request, monkeypatch):
    if request.param != "unix":
        of_tcp(monkeypatch)
    if request.param == "hmac":
        monkeypatch.setattr(rendezvous, "AESGCM", None)
    return request.param


def test_messages_of_all_sizes_come_to_those_that_wait_for_them(meshes, way):
    three = meshes(3, None if way == "unix" else SECRET)
    families = {each._socket.family for one in three for each in one._connections.values()}
    assert families == {socket.AF_UNIX if way == "unix" else socket.AF_INET}
    assert [one.hosts for one in three] == [[socket.gethostname()] * 3] * 3
    random = np.random.RandomState(1)
    sizes = [0, 1, 100, mesh._SMALL, mesh._SMALL + 1, mesh._BUFFERED, 1 << 20, 5 << 20, 3, 70_000]
    sent = [random.randint(0, 256, size).astype(np.uint8) for size in sizes]
    pairs = [(s, r) for s in range(3) for r in range(3) if s != r]
    # Half of them are awaited before they are sent, each kind with a tag of its own.
    awaited = {pair: [np.zeros_like(each) for each in sent] for pair in pairs}
    coming = []
    for s, r in pairs:
        coming += [three[r].receive(s, each, 1) for each in awaited[s, r]]
    for s, r in pairs:
        for each in sent:
            three[s].send(r, each, 1)
            three[s].send(r, each, 2)
    taken = {pair: [] for pair in pairs}

    def is_all():
        turn(*three)
        for r, one in enumerate(three):
            for source, payload in iter(lambda one=one: one.take(2), None):
                taken[source, r].append(payload)
        return all(each.is_done for each in coming) and all(map(len, taken.values()))

    wait_until(is_all)
    wait_until(lambda: is_all() and not any(one.unsent for one in three))
    wait_until(lambda: is_all() and all(len(each) == len(sent) for each in taken.values()))
    for pair in pairs:
        for one, two, expected in zip(awaited[pair], taken[pair], sent):
            assert np.array_equal(one, expected) and np.array_equal(two, expected)
    assert not any(one._wanted or one._arrived for one in three)


def test_a_large_message_comes_into_the_memory_that_waits_without_a_copy(meshes, monkeypatch):
    of_tcp(monkeypatch)
    one, other = meshes(2)
    memory = np.zeros(1 << 20, np.uint8)
    coming = other.receive(0, memory, 1)
    given = []
    monkeypatch.setattr(other, "memory_for", lambda *key: given.append(key) or coming.memory)
    one.send(1, np.ones(1 << 20, np.uint8), 1)
    wait_until(lambda: turn(one, other) and coming.is_done)
    assert given == [(0, 1, 1 << 20)] and memory.all()


def test_what_is_sent_is_what_was_there_when_its_sending_began(meshes, monkeypatch):
    of_tcp(monkeypatch)
    one, other = meshes(2)
    memory = np.ones(64 << 20, np.uint8)
    sending, last = one.send(1, memory, 2), one.send(1, np.ones(10), 3)
    assert one.unsent and sending.is_done and not last.is_done  # the system has a part of it
    memory[...] = 2
    coming = other.receive(0, np.zeros_like(memory), 2)
    wait_until(lambda: turn(one, other) and coming.is_done)
    assert (coming.memory == 1).all() and not other.ended


def test_a_message_of_another_length_is_no_message_for_who_waits(meshes):
    one, other = meshes(2)
    other.receive(0, np.zeros(3), 1)
    one.send(1, np.zeros(4), 1)
    with pytest.raises(RuntimeError, match="32 bytes have come for 24"):
        wait_until(lambda: turn(one, other) and False)


def test_the_end_of_a_process_is_known_after_its_messages(meshes):
    one, other = meshes(2)
    one.send(1, b"last", 1)
    for each in one._connections.values():
        each.close()
    wait_until(lambda: turn(other) and other.ended)
    assert other.ended == {0: "has ended its connection"} and not other.descriptors
    assert bytes(other.take(1)[1]) == b"last"
    assert not other.send(0, b"nobody takes it", 1).is_done


def test_what_came_before_the_end_is_read_after_a_failed_write(meshes):
    one, other = meshes(2)
    one.send(1, b"last", 1)
    for each in one._connections.values():
        each.close()
    other.send(0, b"nobody reads it", 1), other.send(0, b"nobody reads it", 1)
    wait_until(lambda: turn(other) and other.ended)
    assert bytes(other.take(1)[1]) == b"last"


def test_a_process_that_says_goodbye_is_not_lost(meshes):
    three = one, other, third = meshes(3)

    def wait_for(is_there):
        wait_until(lambda: [turn(*three), is_there()][1])

    one.send(1, np.ones(1 << 20), 1)
    one.say_goodbye()
    coming = other.receive(0, np.zeros(1 << 20), 1)
    wait_for(lambda: coming.is_done and len(third.descriptors) == len(other.descriptors) == 1)
    assert coming.memory.view(float).all()
    assert not other.ended and not third.ended
    assert not one.send(2, b"after the goodbye", 1).is_done
    third.send(1, b"goes on", 1)
    wait_for(lambda: (2, 1) in other._arrived)


def changed(frame, how):
    """Return what of a message, and perhaps of the next, has come."""
    frame = bytearray(frame)
    if how == "repeated":
        return frame + frame
    if how == "exchanged":
        return frame[len(frame) // 2 :] + frame[: len(frame) // 2]
    frame[{"tag": 3, "payload": 20, "mac": -1, "length": 11}[how]] ^= 1
    return frame


@pytest.mark.parametrize("how", ["tag", "payload", "mac", "length", "repeated", "exchanged"])
def test_a_message_that_was_changed_on_its_way_ends_the_connection(meshes, how):
    _, other = meshes(2, None)
    with contextlib.ExitStack() as stack:
        sender, middle, attacker, receiver = (
            stack.enter_context(each) for _ in range(2) for each in socket.socketpair()
        )
        other._connections[0].close()
        theirs = _Connection(sender, [Seal(b"key", 0, 1), Seal(b"key", 1, 0)])
        other._connections[0] = _Connection(receiver, [Seal(b"key", 1, 0), Seal(b"key", 0, 1)])
        other.descriptors = {receiver.fileno(): 0}
        payloads = [b"x" * 40] * (2 if how == "exchanged" else 1)
        theirs.queue.extend(
            mesh.MessageRequest(1, np.frombuffer(each, np.uint8)) for each in payloads
        )
        theirs.flush()
        attacker.sendall(changed(middle.recv(1000), how))
        wait_until(lambda: turn(other) and other.ended)
        assert other.ended == {0: "has sent what was changed on its way"}
        assert (other.take(1) is not None) == (how == "repeated") and other.take(1) is None


def test_programs_without_the_key_are_sent_away_at_the_start(meshes, monkeypatch):
    of_tcp(monkeypatch)
    strangers, addresses, true = [], [], rendezvous.Start.connect
    rank = rendezvous._NUMBER.pack(1)

    def connect(self, key, facts, with_leaders):
        """Connect all others when strangers have."""
        if self._rank == 0:
            addresses.append((facts[0]["addresses"][0], facts[0]["port"]))
            for said in (b"", b"GET / HTTP/1.0\r\n\r\n" + bytes(40), rank + bytes(32), rank):
                stranger = socket.create_connection(addresses[0])
                stranger.sendall(said)
                strangers.append(stranger)
        return true(self, key, facts, with_leaders)

    monkeypatch.setattr(rendezvous.Start, "connect", connect)
    one, other = meshes(2)
    one.send(1, b"right", 1)
    wait_until(lambda: turn(other))
    assert bytes(other.take(1)[1]) == b"right"
    for stranger in strangers:
        stranger.settimeout(LONG)
        with contextlib.suppress(ConnectionError):
            assert len(stranger.recv(100)) == rendezvous._NONCE and stranger.recv(100) == b""
        stranger.close()
    with pytest.raises(OSError):  # nothing listens any more
        socket.create_connection(addresses[0])


def test_other_secrets_are_refused(meshes):
    one, other = meshes(2, [SECRET, b"another"])
    assert isinstance(one, NoSecret) and isinstance(other, NoSecret)
    assert "process 1 of this job has another secret than this one" in str(one)


def test_machines_that_can_not_connect_are_named_with_their_addresses(meshes, monkeypatch):
    of_tcp(monkeypatch)
    monkeypatch.setattr(rendezvous, "_START_SECONDS", 1.0)
    monkeypatch.setattr(rendezvous, "_CALL_SECONDS", 0.5)
    monkeypatch.setattr(rendezvous, "addresses", lambda: ["127.9.9.9"])
    monkeypatch.setattr(rendezvous.Start, "_answer", lambda self, connection: connection.close())
    one, other = meshes(2)
    here = socket.gethostname()
    said = f"{here} can't connect to {here}, whose addresses are 127.9.9.9. If machines have others"
    for each in (one, other):
        assert isinstance(each, Unreachable) and str(each).startswith(said)
        assert "SYNKHRONOS_NETWORK=10.1.0.0/16" in str(each)


@pytest.mark.parametrize("name", ["SYNKHRONOS_NETWORK", "OMPI_MCA_btl_tcp_if_include"])
def test_addresses_are_those_of_the_named_networks(monkeypatch, name):
    found = rendezvous.addresses()
    assert found[-1] == "127.0.0.1"
    for network in ("lo", "127.0.0.0/8", "nothing, 127.0.0.0/24"):
        monkeypatch.setenv(name, network)
        assert rendezvous.addresses() == ["127.0.0.1"]
    monkeypatch.setenv(name, "203.0.113.0/24")
    assert rendezvous.addresses() == found  # none is there


def of_leaders(meshes, n):
    """Return what the leaders of n machines get from their carriers."""
    given = []
    for one in meshes(n, SECRET, True):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            one.give_to_leader(ours)
            ours.sendall(b"a message of the carrier")
            given.append(mesh.connections_given(theirs))
            assert theirs.recv(100) == b"a message of the carrier"
    return given


@pytest.mark.parametrize("n", [1, 2, 4])
def test_carriers_give_the_first_leader_a_connection_with_each_other_one(meshes, monkeypatch, n):
    of_tcp(monkeypatch)
    first, *others = of_leaders(meshes, n)
    assert (first.rank, first.size) == (0, n) and len(first.descriptors) == n - 1
    for rank, other in enumerate(others, start=1):
        assert (other.rank, other.size) == (rank, n) and len(other.descriptors) == 1
        assert [each for each in range(n) if other.can_send(each)] == [0]
        first.send(rank, b"to %d" % rank, mesh.MESSAGE), other.send(0, b"back", mesh.MESSAGE)
    answers = [None] * (n - 1)

    def is_all():
        turn(first, *others)
        for source, payload in iter(lambda: first.take(mesh.MESSAGE), None):
            answers[source - 1] = bytes(payload)
        return None not in answers and all((0, mesh.MESSAGE) in each._arrived for each in others)

    wait_until(is_all)
    assert answers == [b"back"] * (n - 1)
    heard = [bytes(each.take(mesh.MESSAGE)[1]) for each in others]
    assert heard == [b"to %d" % rank for rank in range(1, n)]
    for each in (first, *others):
        each.close()


def test_what_goes_from_carrier_to_carrier_is_nothing_for_leaders(meshes, monkeypatch):
    of_tcp(monkeypatch)
    one, other = meshes(2, SECRET, True)
    key, with_gmac = one._how
    mac = one._connections[1]._seals[0].next(mesh.MESSAGE, b"a command")
    assert not Seal(key, 2, 3, with_gmac).is_next(mesh.MESSAGE, b"a command", mac)
    assert Seal(key, 0, 1, with_gmac).is_next(mesh.MESSAGE, b"a command", mac)
    for each in (*one._of_leader.values(), *other._of_leader.values()):
        each.close()
