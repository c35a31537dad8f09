"""Requests to servers: none is lost, whatever comes between, and each keeps its priority."""

import queue

import numpy as np
import pytest
from support.parameter_server import SECONDS

from synkhronos.parameter_server.backends import RemoteBackend
from synkhronos.parameter_server.engine import Engine
from synkhronos.parameter_server.parameters import Parameters
from synkhronos.parameter_server.rounds import Key


class Servers:
    """A link whose servers answer each request at once with a number that grows."""

    mode, num_servers = "dist_async", 1

    def __init__(self):
        self.requests, self._arrived, self._value = [], queue.Queue(), 0
        self._memory = [np.zeros(3, np.float32), np.zeros(3, np.float32)]

    def init_key(self, *arguments):
        pass

    def request(self, number, version, priority):
        self.requests.append((version, priority))
        self._value += 1
        self._memory[version % 2][:] = self._value
        self._arrived.put((number, version, None))

    def next(self, timeout):
        try:
            return [self._arrived.get(timeout=timeout)]
        except queue.Empty:
            return []

    def incoming(self, number, version):
        return self._memory[version % 2]

    def close(self, timeout):
        self._arrived.put((0, 0, None))


@pytest.fixture
def engine():
    backend = RemoteBackend(Servers())
    made = backend.engine = Engine(Parameters(), 1, backend)
    key = Key("w", 0, (3,), np.dtype("float32"), "sum", [0])
    backend.init_key(key, None)
    yield made, key
    backend.leave(1)
    made.close([key], False, 5)


def test_a_pull_while_a_result_is_published_is_not_lost(engine, monkeypatch):
    made, key = engine
    publish, pulls = made.publish, []

    def publish_and_pull(*arguments):
        publish(*arguments)
        if not pulls:  # as another thread would, that the first pull has woken
            pulls.append(made.pull(key, None, (), 0))

    monkeypatch.setattr(made, "publish", publish_and_pull)
    assert made.pull(key, None, (), 0).wait(SECONDS)[0] == 1
    assert pulls[0].wait(SECONDS)[0] == 2


def test_a_request_that_had_to_wait_keeps_its_priority(engine):
    made, key = engine
    backend = made.backend
    backend._asked[0, 0] = [(0, 0)]  # one is under way
    backend.request(key, 2, 7)
    assert backend._link.requests == []
    backend._take(key, 0, None)
    assert backend._link.requests == [(2, 7)]
