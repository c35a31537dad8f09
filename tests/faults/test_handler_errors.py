"""What a signal handler of the script raises, wherever it comes: it does what a Ctrl-C does."""

import asyncio
import contextlib
import os
import signal

import numpy as np
import pytest
import theano
import theano.tensor as T
from support import faults
from support.faults import held, holding, let_go, signal_once_held
from support.helpers import Call, function
from support.interrupts import OutOfTime, Preempted, Timeout, handler_that_raises

import synkhronos as synk
from synkhronos import WorkerError
from synkhronos._machine import shared_memory

pytestmark = pytest.mark.faults


KINDS = [Timeout, OutOfTime, Preempted]


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


def test_an_error_of_the_computation_is_a_worker_error_as_before(no_session):
    """Also one of the handler's class, and while the script has a handler."""
    synk.fork(2)
    f = faults.checked(lambda x: x[0] < 0, lambda: OutOfTime("of the operation"))
    said = "OutOfTime: of the operation"
    with handler_that_raises(OutOfTime) as raised, pytest.raises(WorkerError, match=said):
        f(-np.ones(4))
    assert raised == []


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
        lambda: synk.function([theano.In(x, value=Signals())], x),
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


def test_asyncio_hears_of_one_ctrl_c_once(no_session, monkeypatch):
    reserve, came = shared_memory._reserve, []

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGINT)
        monkeypatch.setattr(shared_memory, "_reserve", reserve)
        return reserve(*args)

    async def main():
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, came.append, "Ctrl-C")
        monkeypatch.setattr(shared_memory, "_reserve", interrupted)
        data = synk.data(np.ones(4))
        await asyncio.sleep(0.05)
        assert data.data.sum() == 4

    synk.fork(2)
    asyncio.run(main())
    assert came == ["Ctrl-C"]
