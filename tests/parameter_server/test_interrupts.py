"""A Ctrl-C before any line of a call: it is raised once, and the store goes on."""

import signal
import threading

import numpy as np
import pytest
from support import interrupts
from support.parameter_server import SECONDS

from synkhronos import parameter_server as ps
from synkhronos.parameter_server import engine, one_caller, reductions, rounds, stores, task_queues

MODULES = [engine, task_queues, one_caller, reductions, rounds, stores]


def expected_and_parts(size, number):
    parts = [np.full(size, number + d, np.float32) for d in (0, 1)]
    return parts[0] + parts[1], parts


@pytest.mark.parametrize("size", [5, 200_000])
def test_before_each_line_of_a_round(monkeypatch, size):
    monkeypatch.setattr(interrupts, "FILES", {each.__file__ for each in MODULES})
    number, came_to_it = 0, True
    with ps.create("local", devices=[0, 1], bigarray_bound=1000) as store:
        store.init("w", np.zeros(size, np.float32))

        def round_of(number):
            expected, parts = expected_and_parts(size, number)
            store.pushpull("w", parts).wait(SECONDS)
            return np.array_equal(parts, [expected, expected])

        while came_to_it:
            came_to_it = interrupts.interrupt_at_line(number, lambda: round_of(number))  # noqa: B023
            assert round_of(1000 + number)
            number += 1
    assert number > 60


def test_a_wait_of_the_main_thread_ends_at_once():
    with ps.create("local", devices=[0, 1]) as store:
        for d in (0, 1):
            store.init_key((3,), 0, d)
        array = np.ones(3, np.float32)
        store.push(array, 0, 0)
        store.pull_req(array, 0, 0)
        main = threading.main_thread().ident  # which the system chooses for a Ctrl-C
        timer = threading.Timer(0.2, signal.pthread_kill, [main, signal.SIGINT])
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            store.pull_wait(0, 0, SECONDS)
        store.push(np.ones(3, np.float32), 0, 1)
        store.pull_wait(0, 0, SECONDS)
        assert (array == 2).all()
