"""What a signal handler of the script raises, wherever it comes: it does what a Ctrl-C does."""

import asyncio
import contextlib
import os
import signal
import threading

import numpy as np
import pytest
import theano
import theano.tensor as T
from support import faults
from support.faults import (
    BOUND,
    CALLS,
    bounded,
    held,
    holding,
    let_go,
    pids_by_rank,
    signal_once_held,
)
from support.helpers import Call, function
from support.interrupts import handler_that_raises, raise_at_line
from support.leaks import nothing_left

import synkhronos as synk
from synkhronos import WorkerError, session
from synkhronos._machine import shared_memory

pytestmark = pytest.mark.faults


class Timeout(Exception):
    """An exception that can't be pickled, or made of a message alone."""

    def __init__(self, message, seconds=None):
        super().__init__(message)
        self.lock = threading.Lock()


class OutOfTime(TimeoutError):
    """An error as the system's."""


class Preempted(BaseException):
    """No Exception, as KeyboardInterrupt."""


KINDS = [Timeout, OutOfTime, Preempted]
# Each line once: the kinds take turns, as what a line does hardly depends on the kind.
EVERY_LINE = [
    pytest.param(kind, first, 3, marks=pytest.mark.slow("raises an exception at each line"))
    for first, kind in enumerate(KINDS)
]


@pytest.mark.parametrize("kind, line, stride", [(OutOfTime, 0, 40), *EVERY_LINE])
def test_at_lines_of_fork_nothing_is_left(no_session, other_thread, kind, line, stride):
    with handler_that_raises(kind) as raised:
        while True:
            with nothing_left():
                came_to_it = raise_at_line(line, lambda: synk.fork(2), raised)
                raised.clear()  # its frames keep what was made
                if session._Current.session is not None:
                    synk.close()
            if not came_to_it:
                break
            line += stride
    assert line > 50
    faults.use_a_new_session(2)


@pytest.mark.parametrize("kind, line, stride", [(Timeout, 0, 40), *EVERY_LINE])
def test_at_lines_of_close_nothing_is_left(no_session, other_thread, kind, line, stride):
    with handler_that_raises(kind) as raised:
        while True:
            with nothing_left():
                synk.fork(2)
                call = CALLS["function"](2)
                call()  # so that there is something to give back
                came_to_it = raise_at_line(line, synk.close, raised)
                raised.clear()
                if session._Current.session is not None:
                    synk.close()
                del call
            if not came_to_it:
                break
            line += stride
    assert line > 30
    faults.use_a_new_session(2)


def raise_at_lines_of_a_call(what, kind, line, stride):
    synk.fork(2)
    call = CALLS[what](2)
    call()
    pids = pids_by_rank()
    with handler_that_raises(kind) as raised:
        while raise_at_line(line, call, raised):
            raised.clear()
            call()
            line += stride
    assert pids_by_rank() == pids
    assert line > 30
    synk.close()


@pytest.mark.parametrize("what, kind", [("all_reduce", Timeout), ("distribute", OutOfTime)])
def test_at_some_lines_of_a_call(no_session, other_thread, what, kind):
    """The session goes on with the same processes, and with right results."""
    raise_at_lines_of_a_call(what, kind, 0, 18)


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("kind, line, stride", EVERY_LINE)
def test_at_every_line_of_a_call(no_session, other_thread, what, kind, line, stride):
    raise_at_lines_of_a_call(what, kind, line, stride)


@pytest.mark.parametrize("stride", [8, pytest.param(1, marks=EVERY_LINE[0].marks)])
def test_a_variable_that_the_workers_were_being_told_of(no_session, other_thread, stride):
    synk.fork(2)
    line = 0
    with handler_that_raises(OutOfTime) as raised:
        while True:
            s = theano.shared(np.zeros(3), "s")
            came_to_it = raise_at_line(line, lambda: synk.broadcast(s, np.ones(3)), raised)  # noqa: B023
            raised.clear()
            synk.broadcast(s, np.full(3, 2.0))
            synk.all_reduce(s, "sum")
            np.testing.assert_array_equal(synk.get_value(1, s), np.full(3, 4.0))
            if not came_to_it:
                break
            line += stride
    assert line > 100
    synk.close()


@contextlib.contextmanager
def raises_once_held(kind, *ranks):
    """Fail unless the block raises the exception of an alarm, which comes while ranks are held."""
    raised = []

    def alarm(signum, frame):
        raised.append(kind("time is up"))
        raise raised[-1]

    previous = signal.signal(signal.SIGALRM, alarm)
    try:
        with pytest.raises(kind) as caught, signal_once_held(signal.SIGALRM, *ranks):
            yield
        assert [caught.value] == raised
        assert str(caught.value) == "time is up"
    finally:
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.parametrize(
    "n, kind",
    [
        (2, Timeout),
        *[(1, kind) for kind in KINDS],
        *[pytest.param(2, kind, marks=pytest.mark.thorough) for kind in KINDS[1:]],
    ],
)
def test_it_ends_the_masters_part_and_waits_for_no_worker(no_session, n, kind):
    synk.fork(n)
    f, ranks = holding(), range(n)
    with raises_once_held(kind, *ranks):
        f(held(*ranks, n=n))
    assert synk.status().state == "interrupted"
    let_go()
    np.testing.assert_array_equal(f(np.arange(4.0)), np.arange(4.0))
    synk.close()


@pytest.mark.thorough
def test_it_ends_the_wait_for_a_slow_worker(no_session):
    synk.fork(2)
    f = holding()
    with raises_once_held(OutOfTime, 1):
        f(held(1))
    let_go()
    np.testing.assert_array_equal(f(np.arange(4.0)), np.arange(4.0))
    synk.close()


def test_an_error_of_the_computation_is_a_worker_error_as_before(no_session):
    """Also one of the handler's class, and while the script has a handler."""
    synk.fork(2)
    f = faults.checked(lambda x: x[0] < 0, lambda: OutOfTime("of the operation"))
    said = "OutOfTime: of the operation"
    with handler_that_raises(OutOfTime) as raised, pytest.raises(WorkerError, match=said):
        f(-np.ones(4))
    assert raised == []
    synk.close()


class Signals:
    """An object that gets a signal while something reads it."""

    def __array__(self, *args, **kwargs):
        os.kill(os.getpid(), signal.SIGUSR1)
        return np.ones(4)

    def __call__(self, x):
        return x

    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGUSR1)
        return Signals, ()


@pytest.mark.parametrize("kind", [Timeout, OutOfTime])
def test_it_comes_out_as_itself_while_something_is_read_or_sent(no_session, kind):
    synk.fork(2)
    x, s = T.dvector("x"), theano.shared(np.zeros(4), "s")
    f = function([x], (x, "gather"))
    g = function([x], (Call(Signals())(x), "gather"))
    attempts = [
        lambda: f(Signals()),
        lambda: synk.broadcast(s, Signals()),
        lambda: synk.set_value(1, s, Signals()),
        lambda: synk.data(Signals()),
        lambda: g(np.ones(4)),
    ]
    with handler_that_raises(kind) as raised:
        for number, attempt in enumerate(attempts):
            with pytest.raises(kind) as caught:
                attempt()
            assert caught.value is raised[-1], number
            assert len(raised) == number + 1
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        np.testing.assert_array_equal(g(np.arange(4.0)), np.arange(4.0))
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    synk.close()


def test_it_comes_out_as_itself_while_a_default_is_read(no_session):
    synk.fork(1)
    x = T.dvector("x")
    inputs = [theano.In(x, value=Signals())]
    with handler_that_raises(Timeout) as raised, pytest.raises(Timeout) as caught:
        synk.function(inputs, x)
    assert [caught.value] == raised


# Python only prints an alarm in a callback of the garbage collector, such as that of Hypothesis,
# and in a finalizer, which may leave a descriptor then: so without the fixture `no_session`.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_storm_of_alarms_never_breaks_the_session():
    synk.fork(2)
    x = T.dvector("x")
    f = function([x], [(x, "gather"), x.sum()])
    s = theano.shared(np.zeros(3), "s")
    f(np.arange(6.0))
    random, came = np.random.RandomState(0), []

    def alarm(signum, frame):
        came.append(OutOfTime(f"the {len(came)}th"))
        raise came[-1]

    def call_until_it_came(number, wait):
        signal.setitimer(signal.ITIMER_REAL, max(wait, 1e-5))
        while len(came) == number:  # what is raised in a finalizer is dropped by Python
            f(np.arange(6.0))
            synk.broadcast(s, np.ones(3))

    previous = signal.signal(signal.SIGALRM, alarm)
    try:
        for number, wait in enumerate(random.uniform(0, 0.004, 100)):
            try:
                call_until_it_came(number, wait)
            except OutOfTime as error:
                assert error is came[-1]
            gathered, _ = f(np.arange(6.0))
            np.testing.assert_array_equal(gathered, np.arange(6.0))
    finally:
        signal.signal(signal.SIGALRM, previous)
        synk.close()
    assert len(came) == 100


def test_asyncio_hears_of_one_ctrl_c_once(no_session, monkeypatch):
    reserve, came = shared_memory._reserve, []

    def interrupted(nbytes):
        os.kill(os.getpid(), signal.SIGINT)
        monkeypatch.setattr(shared_memory, "_reserve", reserve)
        return reserve(nbytes)

    async def main():
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, came.append, "Ctrl-C")
        monkeypatch.setattr(shared_memory, "_reserve", interrupted)
        data = synk.data(np.ones(4))
        await asyncio.sleep(0.05)
        assert data.data.sum() == 4

    synk.fork(2)
    asyncio.run(main())
    assert came == ["Ctrl-C"]
    synk.close()


def test_a_slow_worker_does_not_delay_close(no_session):
    synk.fork(2)
    f = holding()
    with raises_once_held(Timeout, 1):
        f(held(1))
    with bounded(BOUND / 2):  # the worker would be held for longer
        synk.close()
