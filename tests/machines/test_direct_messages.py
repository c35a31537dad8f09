"""What leaders tell one another directly, and what they do without their connections."""

import os
import pickle
import socket

import numpy as np
import pytest
from support.waiting import wait_until

from synkhronos.comm.channel import Channel
from synkhronos.comm.mpi import link as _link
from synkhronos.comm.mpi.link import CarrierLink
from synkhronos.comm.mpi.mesh import Connections
from synkhronos.errors import WorkerDied


class Leader:
    """A leader's link, with the test in place of its carrier."""

    def __init__(self, rank, connection):
        ours, theirs = socket.socketpair()
        self.carrier, self.link = Channel(theirs), CarrierLink("")
        self.link.machine, self.link.n_machines = rank, 2
        self.link._set_channel(ours)
        self.link._leaders = Connections(rank, 2, of_leaders=True)
        self.link._leaders.add(1 - rank, connection, b"key", True)
        self.link.poll.register(connection, _link.select.EPOLLIN)
        self.link._leaders.before_close = self.link.poll.unregister

    def messages(self):
        self.link.receive(seconds=0)
        taken = [*self.link.told]
        self.link.told.clear()
        return taken


@pytest.fixture
def leaders():
    listener = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listener.getsockname())
    other, _ = listener.accept()
    listener.close()
    made = [Leader(0, one), Leader(1, other)]
    yield made
    for each in made:
        each.link.close()
        each.carrier.close()


def test_small_messages_go_directly_and_others_through_the_carrier(leaders):
    first, second = leaders
    first.link.tell_directly([1], ("command", 7))
    assert second.messages() == [(0, ("command", 7))]
    assert first.carrier.receive() == [] and first.link._sent[0] == 1
    large = np.ones(9_000)
    first.link.tell_directly([1], ("command", large))
    [(name, machine, data)] = first.carrier.receive()
    assert (name, machine) == ("tell", 1)
    np.testing.assert_array_equal(pickle.loads(data)[1], large)
    assert second.messages() == [] and first.link._sent[0] == 1


def test_what_a_leader_does_not_read_goes_through_the_carrier(leaders):
    """It waits for no room, in which the other leader might wait as well."""
    first, second = leaders
    told, n_direct = [], -1
    while not told:
        first.link.tell_directly([1], ("command", bytes(60_000)))
        told, n_direct = first.carrier.receive(), n_direct + 1
    assert [each[:2] for each in told] == [("tell", 1)]
    taken = []

    def have_all_come():
        first.link.receive(seconds=0)
        taken.extend(second.messages())
        return len(taken) == n_direct

    wait_until(have_all_come)
    assert {each for _, each in taken} == {("command", bytes(60_000))}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_connection_that_ends_alone_is_told_as_a_loss(leaders, monkeypatch, rank):
    """A message may have been lost with it, for which a call would wait for ever."""
    monkeypatch.setattr(_link, "_PATIENCE_SECONDS", 0.1)
    here, there = leaders[rank], leaders[1 - rank]
    copies = [os.dup(each) for each in here.link._leaders.descriptors]  # as a child has them
    there.link._leaders.close()
    for _ in range(20):
        here.link.receive(0.02)
    for each in copies:
        os.close(each)
    assert here.carrier.receive() == [("lose", 1 - rank, "has ended its connection")]


def test_the_reason_of_the_carriers_comes_before(leaders):
    first, second = leaders
    second.link._leaders.close()
    first.link.receive(0.02)
    first.carrier.send(("end", "The first process on b has ended", 1))
    with pytest.raises(WorkerDied, match=r"^The first process on b has ended, and with it"):
        for _ in range(3):
            first.link.receive(0.02)
