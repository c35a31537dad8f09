"""Reductions of calls that some machines leave: all carriers end the same ones, without MPI."""

import collections

import numpy as np
import pytest

from synkhronos.comm.mpi.reductions import Reductions

N = 60_000  # float32: too many for the message that announces them


class Request:
    def __init__(self, buffer=None):
        self.buffer, self.is_done = buffer, buffer is None


class Network:
    """Messages between carriers, which keep their order."""

    def __init__(self, n_machines):
        self.arrived = collections.defaultdict(collections.deque)
        self.wanted = collections.defaultdict(collections.deque)
        self.told = collections.deque()
        self.carriers = [Carrier(self, m, n_machines) for m in range(n_machines)]

    def match(self, key):
        while self.arrived[key] and self.wanted[key]:
            request, data = self.wanted[key].popleft(), self.arrived[key].popleft()
            request.buffer.reshape(-1).view(np.uint8)[...] = data
            request.is_done = True

    def settle(self):
        """Let all messages come, and all carriers do what they can."""
        for _ in range(50):
            while self.told:
                source, to, (name, *rest) = self.told.popleft()
                self.carriers[to].reductions.from_machines[name](source, *rest)
            for carrier in self.carriers:
                carrier.reductions.progress()


class Carrier:
    mpi = None

    def __init__(self, network, machine, n_machines):
        self.network, self.machine, self.n_machines = network, machine, n_machines
        self.left, self.answers, self.reductions = 0, [], Reductions(self)

    def is_over(self, id):
        return id[0] <= self.left

    def tell_all(self, *message):
        others = (m for m in range(self.n_machines) if m != self.machine)
        self.network.told += [(self.machine, other, message) for other in others]

    def send(self, machine, buffer, tag):
        key = self.machine, machine, tag
        self.network.arrived[key].append(buffer.reshape(-1).view(np.uint8).copy())
        self.network.match(key)
        return Request()

    def receive(self, machine, buffer, tag):
        key, request = (machine, self.machine, tag), Request(buffer)
        self.network.wanted[key].append(request)
        self.network.match(key)
        return request

    def post(self, peer, *message):
        self.answers.append(message)

    def open(self, array):
        return array

    def reduce(self, id, array):
        layout = ["<f4"], [array.shape]
        self.reductions.from_rank_reduce(0, id, [array], ("sum",), 1, layout, False)

    def leave(self, session):
        self.left = session
        self.reductions.leave(self.is_over)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_machine_that_leaves_its_session_strands_no_other(is_first):
    """Rounds stayed without end, and the next session's took their messages."""
    network = Network(3)
    first, second, third = network.carriers
    old = [np.full(N, 1000.0 * (m + 1), "f4") for m in range(3)]
    second.reduce((1, 5, 1), old[1])  # then a worker there is killed, and its leader leaves
    network.settle()
    if is_first:
        second.leave(1)
    first.reduce((1, 5, 1), old[0])
    third.reduce((1, 5, 1), old[2])
    if not is_first:
        second.leave(1)
    network.settle()
    first.reductions.from_rank_give_up(0, 1, 5)
    network.settle()
    for carrier in (first, third):
        carrier.leave(1)
    network.settle()
    assert [carrier.reductions._rounds for carrier in network.carriers] == [{}, {}, {}]
    assert not any(network.arrived.values()) and not any(network.wanted.values())
    new = [np.full(N, m + 1.0, "f4") for m in range(3)]
    for carrier, array in zip(network.carriers, new):
        carrier.reduce((2, 5, 1), array)
    network.settle()
    for array in new:
        np.testing.assert_array_equal(array, 6)
