"""Processes that are killed at each point of a call: the right error, and nothing left."""

import ctypes
import functools
import os
import signal
import time

import numpy as np
import psutil
import pytest
import theano
import theano.tensor as T
from support import faults
from support.faults import (
    BOUND,
    CALLS,
    armed,
    begun,
    bounded,
    child_process,
    pids_by_rank,
    set_point,
)
from support.helpers import Call, function
from support.leaks import nothing_left, runs
from support.threads import in_thread
from support.waiting import wait_until

import synkhronos as synk
from synkhronos import WorkerDied, _host
from synkhronos._machine.processes import ForkedProcess
from synkhronos._machine.shared_memory import Segment, Segments
from synkhronos._session.replica import Replica
from synkhronos._session.session import Session
from synkhronos.comm import arrays
from synkhronos.comm.arrays import Arrays
from synkhronos.comm.outputs import Outputs
from synkhronos.comm.shared.gate import SharedGate as Gate
from synkhronos.comm.variable_collectives import Variables
from synkhronos.comm.variable_memory import Storage

pytestmark = pytest.mark.faults

# What is called, and where the rank is killed: before or after something that it does there.
POINTS = [
    ("function", Gate, "next_command", "after"),
    ("function", Replica, "_run_rows", "before"),
    ("function", _host, "run", "before"),
    ("function", _host, "run", "after"),
    ("function", Outputs, "deposit", "before"),
    ("function", Outputs, "deposit", "after"),
    ("function", Gate, "worker_finish", "before"),
    ("growing outputs", Gate, "_put_reply", "before"),
    ("growing outputs", Gate, "_put_reply", "after"),
    ("failing function", Gate, "abort", "before"),
    ("failing function", Gate, "abort", "after"),
    ("exchange", Arrays, "_fill", "before"),
    ("exchange", Gate, "meet", "before"),
    ("exchange", Gate, "_wake", "before"),
    ("exchange", arrays, "reduce_alike", "before"),
    ("large exchange", Arrays, "_fill", "after"),
    ("large exchange", Arrays, "_plan_of_shares", "before"),
    ("large exchange", arrays, "reduce_block", "after"),
    ("all_reduce", Storage, "expose", "before"),
    ("all_reduce", Gate, "meet", "before"),
    ("all_gather", Storage, "values", "before"),
    ("all_gather", Storage, "turn", "after"),
    ("broadcast", Variables, "_give", "before"),
    ("gather", Storage, "expose", "before"),
    ("gather", Storage, "begin", "after"),
    ("distribute", _host, "load", "after"),
]


def check_that_it_is_over(rank, signum, call, pids):
    """Assert that each call tells of the death; then close, and see that a new session works."""
    for refused in (call, lambda: synk.data([1.0])):
        with pytest.raises(WorkerDied, match=f"rank {rank}") as caught:
            refused()
        assert (caught.value.rank, caught.value.exitcode) == (rank, -signum)
    wait_until(lambda: not any(runs(pid) for pid in pids if pid != os.getpid()), BOUND)
    synk.close()


WORKER_SIGNALS = [
    *((signal.SIGKILL, *point) for point in POINTS),
    *((signal.Signals(each), "function", _host, "run", "before") for each in (15, 11, 6, 7, 26)),
]


@pytest.mark.parametrize("signum, what, owner, name, when", WORKER_SIGNALS, ids=faults.point_id)
def test_a_worker_killed_at(no_session, monkeypatch, signum, what, owner, name, when):
    n, master, rank = 3, 1, 2
    set_point(monkeypatch, owner, name, when, faults.hit_by(signum))
    with bounded():
        call, pids = begun(what, n, master)
        told = rf"rank {rank} .*\({signum.name}\)"
        with armed(pids[rank]), pytest.raises(WorkerDied, match=told) as died:
            call()
        assert "Apply node" not in str(died.value)  # of Theano, which catches errors in a graph
        check_that_it_is_over(rank, signum, call, pids)
        faults.use_a_new_session(n, what, master)


@pytest.mark.parametrize("n, master, rank", [(2, 0, 1), (3, 1, 2), (4, 1, 0)])
def test_a_worker_killed_before_the_start(no_session, n, master, rank):
    call, pids = begun("function", n, master)
    os.kill(pids[rank], signal.SIGKILL)
    wait_until(lambda: not runs(pids[rank]), BOUND)
    with bounded():
        check_that_it_is_over(rank, signal.SIGKILL, call, pids)
        faults.use_a_new_session(n, master=master)


@pytest.mark.parametrize("what", ["growing outputs", "exchange", "all_reduce", "gather"])
def test_a_worker_killed_when_it_is_done(no_session, monkeypatch, what):
    """The master looks only when the worker has gone, with all that it had to tell."""
    n, master, rank = 3, 1, 2
    set_point(monkeypatch, Gate, "worker_finish", "after", faults.hit_by(signal.SIGKILL))
    finish = Gate.finish

    def finish_late(gate):
        if faults.is_armed():
            wait_until(lambda: not runs(pids[rank]), BOUND)
        finish(gate)

    monkeypatch.setattr(Gate, "finish", finish_late)
    with bounded():
        call, pids = begun(what, n, master)
        with armed(pids[rank]), pytest.raises(WorkerDied, match=rf"rank {rank} .*SIGKILL"):
            call()
            call()
        check_that_it_is_over(rank, signal.SIGKILL, call, pids)
        faults.use_a_new_session(n, what, master)


@pytest.mark.parametrize("rank_that_maps", [0, 1])
def test_a_worker_killed_before_its_memory_is_mapped(no_session, monkeypatch, rank_that_maps):
    """A rank opens a segment through the process that owns it, which may just have gone."""
    attach = Segment.attach

    def attach_late(ref):
        if os.getpid() == pids[rank_that_maps] and ref.pid == pids[2]:
            os.kill(ref.pid, signal.SIGKILL)
            wait_until(lambda: not runs(ref.pid), BOUND)
        return attach(ref)

    monkeypatch.setattr(Segment, "attach", attach_late)
    pids = faults.shared_numbers(3)
    with bounded():
        synk.fork(3)
        pids[:] = pids_by_rank()
        s = theano.shared(np.ones(3))
        with pytest.raises(WorkerDied, match=r"rank 2 .*SIGKILL"):
            synk.all_reduce(s)
        check_that_it_is_over(2, signal.SIGKILL, lambda: synk.all_reduce(s), list(pids))


ENDS = {  # how, and the exit status that is seen
    "os._exit(0)": (lambda: os._exit(0), [0]),
    "os._exit(7)": (lambda: os._exit(7), [7]),
    "os._exit in a thread": (lambda: in_thread(os._exit, 3).result(BOUND), [3]),
    "os.abort": (os.abort, [-6]),
    "a segmentation fault": (lambda: ctypes.string_at(0), [-11]),
    "another program": (lambda: os.execv("/bin/sleep", ["sleep", "60"]), [None]),
    # It notices at its next wait, so the master may see it while it still runs.
    "no descriptors": (lambda: os.closerange(3, 1024), [None, 1]),
}


def end_by_itself(how, rank, rows):
    if rows[0] == 2 * rank:
        ENDS[how][0]()
    return rows


@pytest.mark.parametrize("how", ENDS)
def test_a_worker_ends_by_itself(no_session, capfd, how):
    n, master, rank, rows = 3, 1, 2, np.arange(6.0)
    x = T.dvector("x")
    with bounded():
        synk.fork(n, master_rank=master)
        end = Call(functools.partial(end_by_itself, how, rank))
        f = function([x], (end(x), "gather"))
        np.testing.assert_array_equal(f(rows + 100), rows + 100)
        with pytest.raises(WorkerDied, match=f"rank {rank}") as caught:
            f(rows)
            f(rows + 100)  # without descriptors it may have come to the end of the first call
        assert caught.value.rank == rank
        assert caught.value.exitcode in ENDS[how][1]
        synk.close()
        faults.use_a_new_session(n, master=master)


def leave_a_child(rank, rows):
    """Have one rank fork a child that outlives it, which the test ends."""
    if rows[0] == rank and os.fork() == 0:
        time.sleep(BOUND)
        os._exit(0)
    return rows


def test_the_death_of_a_worker_with_a_child_is_seen_at_once(no_session):
    x = T.dvector("x")
    synk.fork(2)
    function([x], (Call(functools.partial(leave_a_child, 1))(x), "gather"))(np.arange(2.0))
    call = CALLS["function"](2)
    call()
    pid = pids_by_rank()[1]
    [child] = psutil.Process(pid).children()
    try:
        os.kill(pid, signal.SIGKILL)
        with bounded(BOUND / 2), pytest.raises(WorkerDied, match=r"rank 1 .*SIGKILL"):
            call()
            wait_until(lambda: not runs(pid), BOUND)
            call()
        assert child.is_running()
    finally:
        child.kill()
    synk.close()
    wait_until(lambda: not runs(child.pid), BOUND)


# The master is killed, from outside or by its terminal.

MASTER_POINTS = [
    ("fork", ForkedProcess, "__init__", "after"),
    ("fork", Gate, "watch", "after"),
    ("fork", Gate, "finish", "before"),
    ("function", Segments, "create", "after"),
    ("function", Gate, "start", "before"),
    ("function", Gate, "_wake", "before"),
    ("function", Gate, "start", "after"),
    ("function", _host, "run", "before"),
    ("function", Gate, "finish", "before"),
    ("function", Gate, "finish", "after"),
    ("growing outputs", Gate, "_take_reply", "before"),
    ("failing function", Gate, "raise_errors", "before"),
    ("exchange", Gate, "meet", "before"),
    ("exchange", Gate, "meet", "after"),
    ("large exchange", arrays, "reduce_block", "after"),
    ("all_reduce", Gate, "meet", "before"),
    ("all_reduce", Variables, "_reduce", "after"),
    ("distribute", Gate, "_post", "after"),
    ("close", Session, "quit", "before"),
    ("close", Gate, "start", "after"),
    ("close", Session, "release", "before"),
    ("close", ForkedProcess, "send", "before"),
    ("close", Gate, "close", "before"),
]


def be_a_master(what, n, master):
    """Come to the point where this process is hit, which never returns."""
    if what == "fork":
        faults.arm_this_process()
    call, _ = begun(what, n, master)
    faults.arm_this_process()
    synk.data(np.ones(100_000))
    if what == "close":
        synk.close()
    call()


SIGNALS = [
    *((signal.SIGKILL, *point) for point in MASTER_POINTS),
    *((signal.SIGTERM, *point) for point in MASTER_POINTS[::4]),
    *((signal.SIGHUP, *point) for point in MASTER_POINTS[2::4]),
]


@pytest.mark.parametrize("signum, what, owner, name, when", SIGNALS, ids=faults.point_id)
def test_the_master_killed_at(monkeypatch, signum, what, owner, name, when):
    n, master = (3, 1) if signum == signal.SIGKILL else (2, 0)

    def blow():
        faults.note_children()
        os.kill(os.getpid(), signum)

    set_point(monkeypatch, owner, name, when, blow)
    with nothing_left(), bounded():
        with child_process(lambda: be_a_master(what, n, master)) as process:
            assert process.join(BOUND)
            assert process.exitcode == -signum
        workers = faults.noted()
        assert len(workers) <= n - 1
        assert workers or what == "close"  # by then they may have ended as they were asked to
        wait_until(lambda: not any(map(runs, workers)), BOUND)
