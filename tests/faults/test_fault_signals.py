"""Ranks that are stopped, and Ctrl-C wherever it comes: what is said, and that work goes on."""

import contextlib
import logging
import os
import resource
import signal
import threading
import time

import psutil
import pytest
from support import faults
from support.faults import BOUND, armed, begun, bounded, child_process, pids_by_rank, set_point
from support.interrupts import interrupt_at_begin
from support.leaks import nothing_left, runs
from support.threads import in_thread
from support.waiting import wait_until

import synkhronos as synk
from synkhronos import _host, session
from synkhronos._machine.processes import ForkedProcess
from synkhronos._session import session as session_module
from synkhronos._session.session import Session
from synkhronos.comm import reports
from synkhronos.comm.shared import gate
from synkhronos.comm.shared.gate import SharedGate as Gate
from synkhronos.comm.variable_memory import Storage

pytestmark = pytest.mark.faults


# A worker is stopped.


@pytest.fixture
def impatient(monkeypatch, caplog):
    monkeypatch.setattr(gate, "HEARTBEAT_MS", 20)
    monkeypatch.setattr(gate, "PATIENCE_SECONDS", 0.2)
    caplog.set_level(logging.WARNING, "synkhronos")
    return caplog


def said(log):
    return [record.getMessage() for record in log.records if record.name == "synkhronos"]


@contextlib.contextmanager
def continued_once_said(log, words, pid):
    """Continue a stopped process as soon as a message of the log has these words."""

    def watch():
        with contextlib.suppress(AssertionError):
            wait_until(lambda: any(words in message for message in said(log)), BOUND)
        os.kill(pid, signal.SIGCONT)

    watching = in_thread(watch)
    try:
        yield
    finally:
        watching.result()


STOPS = [
    ("function", Gate, "next_command", "after", "finish its part"),
    ("function", _host, "run", "before", "finish its part"),
    ("function", Gate, "worker_finish", "before", "finish its part"),
    ("growing outputs", Gate, "_put_reply", "after", "finish its part"),
    ("failing function", Gate, "abort", "before", "finish its part"),
    ("exchange", Gate, "meet", "before", "come to a reduction"),
    ("exchange", Gate, "meet", "after", ""),  # with four ranks they meet once more
    ("all_reduce", Storage, "expose", "before", "come to a reduction"),
    ("all_reduce", Gate, "meet", "after", "finish its part"),
    ("distribute", _host, "load", "before", "finish its part"),
]


@pytest.mark.parametrize("what, owner, name, when, words", STOPS, ids=faults.point_id)
def test_a_worker_stopped_at(no_session, monkeypatch, impatient, what, owner, name, when, words):
    n, master, rank = 4, 1, 3
    set_point(monkeypatch, owner, name, when, faults.hit_by(signal.SIGSTOP))
    call, _ = begun(what, n, master)
    impatient.clear()
    pid = pids_by_rank()[rank]
    expected = f"for rank {rank} (process {pid}, stopped) to {words}"
    with bounded(), armed(pid), continued_once_said(impatient, expected, pid):
        call()
    messages = said(impatient)
    assert any(expected in message for message in messages), messages
    assert "the call goes on" in messages[-1]
    call()
    assert pids_by_rank()[rank] == pid


def test_a_short_wait_is_not_told_of_and_a_long_one_also_without_a_descriptor(impatient):
    reports.Patience(10, waited=1).wait_for({1: os.getpid()}, in_a_meeting=False)
    assert said(impatient) == []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        reports.Patience(0, waited=1).wait_for({1: os.getpid()}, in_a_meeting=False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert f"(process {os.getpid()}, unknown) to finish its part" in said(impatient)[0]


def test_close_with_stopped_workers(no_session, monkeypatch):
    monkeypatch.setattr(session_module, "QUIT_SECONDS", 0.5)
    begun("function", 4)
    pids = pids_by_rank()
    for pid in pids[1:]:
        os.kill(pid, signal.SIGSTOP)
    begin = time.monotonic()
    with bounded():
        synk.close()
    assert time.monotonic() - begin > 0.4  # they had their time
    assert not any(runs(pid) for pid in pids[1:])
    faults.use_a_new_session(4)


def test_a_stopped_worker_that_is_killed_ends_the_wait(no_session, impatient):
    call, _ = begun("exchange", 3)
    impatient.clear()  # a busy machine may have made that wait, too
    pid = pids_by_rank()[2]
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(0.5, os.kill, (pid, signal.SIGKILL))
    timer.start()
    with bounded(), pytest.raises(synk.WorkerDied, match="rank 2"):
        call()
    timer.join()
    assert not any("goes on" in message for message in said(impatient))


def test_ctrl_c_while_a_stopped_worker_is_waited_for(no_session, impatient):
    call, pids = begun("all_reduce", 2)
    pid = pids[1]
    os.kill(pid, signal.SIGSTOP)
    for _ in range(2):
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with bounded(), pytest.raises(KeyboardInterrupt):
            call()
        timer.join()
    with continued_once_said(impatient, "rank 1", pid):
        call()


# Ctrl-C at lines of what runs in the master.


def test_ctrl_c_as_a_call_ends_whose_traceback_is_kept(no_session):
    """A notebook keeps it; and a ``finally`` may call a collective before it has gone."""
    call, _ = begun("all_reduce", 2)
    kept = [interrupt_at_begin(session_module._Steps.__exit__, call)]
    call()

    def calls_twice():
        try:
            call()
        finally:
            call()

    kept.append(interrupt_at_begin(session_module._Steps.__exit__, calls_twice))
    call()
    with synk.profile():
        kept.append(interrupt_at_begin(session_module._RecordedSteps.__exit__, call))
        call()
    synk.close()
    assert len(kept) == 3


# Ctrl-C twice, and to a whole process group.

TWICE = [
    ("fork", (Gate, "start"), (Session, "release")),
    ("fork", (session_module, "start_workers"), (Session, "release")),
    ("close", (session_module, "join_all"), (session, "_end_current")),
    ("close", (Gate, "start"), (Session, "release")),
    ("function", (_host, "run"), (Gate, "abort")),
    ("function", (Gate, "finish"), (Gate, "abort")),
    ("function", (Gate, "finish"), (Gate, "drain")),
    ("exchange", (Gate, "meet"), (Gate, "abort")),
    ("all_reduce", (Gate, "meet"), (Gate, "drain")),
]


@pytest.mark.parametrize("what, first, second", TWICE, ids=faults.point_id)
def test_ctrl_c_twice_in_a_row(no_session, other_thread, monkeypatch, what, first, second):
    own, left = os.getpid(), []

    def interrupted(point):
        original = getattr(*point)

        def wrapped(*args):
            if os.getpid() == own and left[:1] == [point]:
                left.pop(0)
                os.kill(own, signal.SIGINT)
            return original(*args)

        monkeypatch.setattr(*point, wrapped)

    interrupted(first)
    interrupted(second)
    if what == "fork":
        left[:] = [first, second]
        with bounded(), pytest.raises(KeyboardInterrupt):
            synk.fork(3)
    else:
        call, _ = begun(what, 3)
        left[:] = [first, second]
        with bounded(), pytest.raises(KeyboardInterrupt):
            synk.close() if what == "close" else call()
    if what not in ("fork", "close"):
        with contextlib.suppress(KeyboardInterrupt), bounded():
            call()
        call()
    assert left == []
    if session._Current.session is not None:
        synk.close()
    faults.use_a_new_session(2)


GROUP = [
    ("fork", ForkedProcess, "__init__", "after"),
    ("fork", Gate, "finish", "before"),
    ("function", Gate, "start", "after"),
    ("function", _host, "run", "before"),
    ("large exchange", Gate, "meet", "before"),
    ("all_reduce", Gate, "meet", "after"),
    ("close", Gate, "start", "after"),
    ("close", Session, "release", "before"),
]


def be_interrupted(what):
    """Have the whole process group be interrupted at the point, then go on."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if what == "fork":
        faults.arm_this_process()
        with pytest.raises(KeyboardInterrupt):
            synk.fork(3)
    call, _ = begun(what, 3)
    if what != "fork":
        pids = pids_by_rank()
        faults.arm_this_process()
        with pytest.raises(KeyboardInterrupt):
            synk.close() if what == "close" else call()
        if what != "close":
            call()
            assert pids_by_rank() == pids
    if what != "close":
        synk.close()
    assert not psutil.Process().children()


@pytest.mark.parametrize("what, owner, name, when", GROUP, ids=faults.point_id)
def test_ctrl_c_to_the_group_at(monkeypatch, what, owner, name, when):
    set_point(monkeypatch, owner, name, when, lambda: os.killpg(0, signal.SIGINT))
    with nothing_left(), bounded(), child_process(lambda: be_interrupted(what)) as process:
        assert process.join(BOUND)
        assert process.exitcode == 0
