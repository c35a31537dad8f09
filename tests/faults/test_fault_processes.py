"""Processes and threads of the user's beside a session: neither harms the other."""

import concurrent.futures
import logging
import multiprocessing
import os
import signal
import threading

import psutil
import pytest
from support.faults import BOUND, CALLS, begun, bounded, child_process, pids_by_rank
from support.helpers import square
from support.leaks import nothing_left, runs
from support.waiting import wait_until

import synkhronos as synk
from synkhronos import SessionError, WorkerDied, _host, session
from synkhronos._session import session as session_module

pytestmark = pytest.mark.faults


def test_a_child_that_outlives_the_session(no_session):
    _, pids = begun("function", 2)
    with child_process(lambda: signal.pause()) as process:
        with bounded():
            synk.close()
            assert not runs(pids[1])
            begun("function", 2)
            pid = pids_by_rank()[1]
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not runs(pid), BOUND)
            with pytest.raises(WorkerDied, match="rank 1"):
                synk.data([1.0])
                CALLS["function"](2)()
            synk.close()
        assert process.is_alive()


def test_a_pool_from_before_the_session(no_session):
    context = multiprocessing.get_context("fork")
    with context.Pool(2) as pool:
        assert pool.map(square, [2]) == [4]
        call, _ = begun("function", 2)
        assert pool.map(square, [3]) == [9]
        call()
        synk.close()
        assert pool.map(square, [4]) == [16]
        pool.terminate()
        pool.join()


# Threads.


def in_threads(count, do):
    """Run `do(number)` in threads at the same time; return what each returned, or raised."""
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        begin = threading.Barrier(count)

        def run(number):
            begin.wait(BOUND)
            try:
                return do(number)
            except Exception as error:
                return error

        return list(pool.map(run, range(count), timeout=2 * BOUND))


def test_forks_and_closes_in_several_threads_at_once(no_session):
    others = psutil.Process().children()  # such as what multiprocessing keeps
    for _ in range(3):
        found = in_threads(4, lambda number: synk.fork(3))
        assert sorted(map(str, found))[0] == "3"
        assert [type(each) for each in found].count(SessionError) == 3, found
        assert len(psutil.Process().children()) == len(others) + 2
        CALLS["function"](3)()
        assert in_threads(4, lambda number: synk.close()) == [None] * 4
        assert session._Current.session is None
        assert psutil.Process().children() == others


@pytest.mark.parametrize("what", ["function", "exchange", "all_reduce"])
def test_close_in_a_thread_while_others_call(no_session, what, caplog):
    caplog.set_level(logging.CRITICAL, "synkhronos")
    synk.fork(3)
    calls = [CALLS[what](3) for _ in range(4)]

    def work(number):
        if number == 3:
            try:
                for _ in range(3):
                    calls[number]()
            finally:
                synk.close()
            return
        while True:
            calls[number]()

    with bounded():
        *callers, closer = in_threads(4, work)
    assert closer is None or isinstance(closer, SessionError), closer
    for error in callers:
        assert isinstance(error, (SessionError, WorkerDied)), repr(error)
    begun("function", 2)


def test_close_while_a_thread_computes_for_long(no_session, monkeypatch):
    """The session is given back when that thread has come out of it."""
    monkeypatch.setattr(session_module, "QUIT_SECONDS", 0.2)
    errors, computes, may_go_on = [], threading.Event(), threading.Event()
    real, others = _host.run, psutil.Process().children()

    def compute(*args):
        if threading.current_thread() is thread:
            computes.set()
            may_go_on.wait(BOUND)
        return real(*args)

    def work():
        try:
            calls[0]()
        except SessionError as error:
            errors.append(str(error))

    with nothing_left(), bounded():
        synk.fork(3)
        calls = [CALLS["function"](3)]
        thread = threading.Thread(target=work)
        monkeypatch.setattr(_host, "run", compute)
        thread.start()
        computes.wait(BOUND)
        synk.close()
        assert psutil.Process().children() == others
        begun("all_reduce", 2)
        may_go_on.set()
        thread.join()
        assert "closed" in errors[0]
        CALLS["all_reduce"](2)()
        synk.close()
        del calls[:]


def test_collectives_from_several_threads_take_turns(no_session):
    synk.fork(2)
    calls = [CALLS[what](2) for what in ("function", "broadcast", "exchange", "growing outputs")]

    def work(number):
        for _ in range(20):
            calls[number]()

    with bounded(2 * BOUND):
        assert in_threads(len(calls), work) == [None] * len(calls)


def test_a_worker_killed_while_threads_call(no_session, caplog):
    caplog.set_level(logging.CRITICAL, "synkhronos")
    synk.fork(3)
    calls = [CALLS[what](3) for what in ("function", "exchange", "growing outputs")]
    pid = pids_by_rank()[2]

    def work(number):
        if number == 3:
            return os.kill(pid, signal.SIGKILL)
        while True:
            calls[number]()

    with bounded():
        *callers, _ = in_threads(4, work)
    for error in callers:
        assert isinstance(error, WorkerDied) and error.rank == 2, repr(error)


@pytest.mark.parametrize("when", [0, 1, 2])
def test_a_process_that_can_not_be_started(no_session, monkeypatch, when):
    real, count = os.fork, [when]

    def fork():
        if not count[0]:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        count[0] -= 1
        return real()

    monkeypatch.setattr(os, "fork", fork)
    with nothing_left(), bounded(), pytest.raises(SessionError, match="can't start 4 ranks"):
        synk.fork(4)
    monkeypatch.undo()
    begun("function", 2)


# The end of an interpreter.

BEGIN = """
import atexit, os, signal, sys, threading, time
import numpy as np
import theano
import theano.tensor as T
import synkhronos as synk
synk.fork(3)
x = T.dvector("x")
f = synk.function([x], (x.sum(), "sum"), mode="FAST_COMPILE")
d = synk.data(np.ones(6))
assert f(d) == 6
pids = synk.session.current("a test").worker_pids
print(*pids, flush=True)

def call_for_ever():
    while True:
        f(d)

def start(target, daemon=False):
    thread = threading.Thread(target=target, daemon=daemon)
    thread.start()
    return thread
"""
ENDINGS = {  # how, and the exit status
    "a daemon thread": ("start(call_for_ever, daemon=True)\ntime.sleep(0.3)", 0),
    "a thread that calls last": ("start(lambda: (time.sleep(0.3), f(d)))", 0),
    "an error at exit": ("atexit.register(lambda: 1 / 0)", 0),
    "a stopped worker": (
        "synk._session.session.QUIT_SECONDS = 0.5\nos.kill(pids[0], signal.SIGSTOP)",
        0,
    ),
    "a killed worker": ("os.kill(pids[1], signal.SIGKILL)\ntime.sleep(0.2)\nf(d)", 1),
    "SIGTERM with a handler": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
        "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()\ncall_for_ever()",
        9,
    ),
    "a handler that closes": (
        "signal.signal(signal.SIGTERM, lambda *_: synk.close())\n"
        "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
        "try:\n    call_for_ever()\nexcept (synk.SessionError, synk.WorkerDied):\n    sys.exit(4)",
        4,
    ),
}


@pytest.mark.parametrize("how", ENDINGS)
@pytest.mark.sample(1)
def test_the_interpreter_ends_with(script, how):
    text, status = ENDINGS[how]
    done = script(BEGIN + text, check=False)
    assert done.returncode == status, done.stderr
    pids = [int(pid) for pid in done.stdout.split() if "." not in pid]
    assert len(pids) >= 2
    wait_until(lambda: not any(map(runs, pids)), BOUND)
