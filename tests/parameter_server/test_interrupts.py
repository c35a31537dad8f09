"""A Ctrl-C before any line of a call: it is raised once, and the store goes on."""

import signal
import sys
import threading

import numpy as np
import pytest
from support.parameter_server import SECONDS

from synkhronos import parameter_server as ps
from synkhronos.parameter_server import (
    engine,
    one_caller,
    pulls,
    reductions,
    rounds,
    stores,
    task_queues,
)

MODULES = [engine, task_queues, one_caller, pulls, reductions, rounds, stores]
FILES = {each.__file__ for each in MODULES}


class InterruptAt:
    """Raises SIGINT before a line of the package, counted from 0, in the main thread."""

    def __init__(self, number):
        self.left = number

    def __call__(self, frame, event, argument):
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            self.left -= 1
            if self.left == -1:
                signal.raise_signal(signal.SIGINT)
        return self

    def __enter__(self):
        self._before = sys.gettrace()  # that of a debugger, or of coverage
        sys.settrace(self)

    def __exit__(self, kind, error, trace):
        sys.settrace(self._before)


def expected_and_parts(size, number):
    parts = [np.full(size, number + d, np.float32) for d in (0, 1)]
    return parts[0] + parts[1], parts


@pytest.mark.parametrize("size, step", [(5, 1), (200_000, 3)])
def test_before_each_line_of_a_round(size, step):
    store = ps.create("local", devices=[0, 1], bigarray_bound=1000)
    store.init("w", np.zeros(size, np.float32))
    number = interrupted = 0
    with store:
        while True:
            trace = InterruptAt(step * number)
            _, parts = expected_and_parts(size, number)
            try:
                with trace:
                    store.pushpull("w", parts).wait(SECONDS)
            except KeyboardInterrupt:
                interrupted += 1
            expected, parts = expected_and_parts(size, 1000 + number)
            store.pushpull("w", parts).wait(SECONDS)
            np.testing.assert_array_equal(parts, [expected, expected])
            number += 1
            if trace.left >= 0:
                break
    assert interrupted == number - 1
    assert number * step > 60


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
