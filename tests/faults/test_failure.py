"""Deaths, interrupts, no room: the right error in time, and then a session as promised."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import theano.tensor as T
from support import faults
from support.faults import BOUND, ROWS, bounded, held, holding, let_go, may_go, signal_once_held
from support.helpers import Call, function
from support.leaks import names_in_shared_memory, runs
from support.waiting import wait_until

import synkhronos as synk
from synkhronos import SharedMemoryFull

pytestmark = pytest.mark.faults


# Ctrl-C.


@contextlib.contextmanager
def interrupted_once_held(rank):
    with pytest.raises(KeyboardInterrupt), signal_once_held(signal.SIGINT, rank):
        yield


def test_ctrl_c_returns_at_once_also_while_the_next_call_waits_for_the_interrupted_one(no_session):
    synk.fork(2)
    f = holding()
    for rows in (held(1), ROWS, ROWS):
        with interrupted_once_held(1):
            f(rows)
    threading.Timer(0.2, let_go).start()
    np.testing.assert_array_equal(f(ROWS), ROWS)
    assert may_go()


changed = faults.shared_numbers(1)  # calls whose rows have changed while they ran


def hold_and_compare(rows):
    before = rows.copy()
    faults._hold(rows)
    changed[0] += not np.array_equal(rows, before)
    return before


def test_inputs_of_an_interrupted_call_stay_until_the_worker_has_left_it(no_session):
    changed[0] = 0
    synk.fork(2)
    holding()  # nothing is let go yet
    x = T.dvector("x")
    f = function([x], (Call(hold_and_compare)(x), "gather"))
    np.testing.assert_array_equal(f(ROWS), ROWS)
    with interrupted_once_held(1):
        f(held(1))
    threading.Timer(0.2, let_go).start()
    np.testing.assert_array_equal(f(ROWS), ROWS)
    assert changed[0] == 0


def test_close_does_not_wait_for_an_interrupted_call(no_session):
    synk.fork(2)
    f = holding()
    with interrupted_once_held(1):
        f(held(1))
    with bounded(BOUND / 2):  # the worker would be held for longer
        synk.close()


def test_a_storm_of_ctrl_c_never_breaks_the_session(no_session):
    synk.fork(3)
    x = T.dvector("x")
    f = function([x], [(x, "gather"), x.sum()])
    data = synk.data(np.arange(6.0))
    f(data)
    random = np.random.RandomState(0)
    came = []

    def interrupt(signum, frame):
        came.append(signum)
        signal.raise_signal(signal.SIGINT)

    def call_until_it_came(number, wait):
        signal.setitimer(signal.ITIMER_REAL, max(wait, 1e-5))
        while len(came) == number:  # what is raised in a finalizer is dropped by Python
            f(data)

    previous = signal.signal(signal.SIGALRM, interrupt)
    for number, wait in enumerate(random.uniform(0, 0.004, 150)):
        # A timer of the kernel hits anywhere: in the start, the run, the finish, between calls. The
        # loop is a function, as Python 3.13 may raise at its end behind the try.
        with contextlib.suppress(KeyboardInterrupt):
            call_until_it_came(number, wait)
        data[:] = random.rand(6)
        gathered, _ = f(data)
        np.testing.assert_array_equal(gathered, data.data)
    signal.signal(signal.SIGALRM, previous)
    assert len(came) == 150


def test_ctrl_c_of_a_terminal_ends_a_script_and_its_workers(script, tmp_path):
    text = """
import os, signal, sys, threading, time
import numpy as np
import theano.tensor as T
from support.helpers import Call, function
import synkhronos as synk

synk.fork(3)
x = T.dvector("x")
f = function([x], (Call(lambda rows: (time.sleep(600), rows)[1])(x), "gather"))
print(*synk.session.current("test").worker_pids, flush=True)
f(np.ones(6))
"""
    process, pids = _start(tmp_path, text)
    time.sleep(1.5)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGINT
    assert stderr.count("KeyboardInterrupt") == 1, stderr
    wait_until(lambda: not any(map(runs, pids)))


# The master dies.


def _start(tmp_path, text):
    """Start a script in a process group of its own; return it and the numbers it prints."""
    path = tmp_path / "script.py"
    path.write_text(text)
    folders = str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")
    process = subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))},
        start_new_session=True,
    )
    return process, [int(pid) for pid in process.stdout.readline().split()]


def test_when_the_master_is_killed_workers_and_memory_go(tmp_path):
    """Also workers in code in C that holds the interpreter."""
    text = """
import ctypes
import numpy as np
import theano.tensor as T
from support.helpers import Call, function
import synkhronos as synk

synk.fork(3)
x, d = T.dvector("x"), synk.data(np.ones(1_000_000))
f = function([x], (Call(lambda rows: (ctypes.PyDLL(None).sleep(600), rows)[1])(x), "gather"))
print(*synk.session.current("test").worker_pids, flush=True)
f(d)
"""
    names = names_in_shared_memory()
    process, pids = _start(tmp_path, text)
    with process:
        assert len(pids) == 2
        time.sleep(1)
        assert all(map(runs, pids))
        process.kill()
        wait_until(lambda: not any(map(runs, pids)))
    assert names_in_shared_memory() <= names


def test_a_child_of_the_users_does_not_keep_the_workers_alive(tmp_path):
    text = """
import os, time
import synkhronos as synk

synk.fork(2)
child = os.fork()
if child == 0:
    time.sleep(600)
    os._exit(0)
print(*synk.session.current("test").worker_pids, child, flush=True)
time.sleep(600)
"""
    process, (worker, child) = _start(tmp_path, text)
    with process:
        process.kill()
        try:
            wait_until(lambda: not runs(worker))
            assert runs(child)
        finally:
            os.kill(child, signal.SIGKILL)


# No room.


def test_data_that_does_not_fit_is_refused_and_the_session_lives(no_session):
    synk.fork(2)
    x = T.dvector("x")
    f = function([x], (x, "gather"))
    small = synk.data(ROWS)
    room = os.statvfs("/dev/shm")
    too_many = room.f_blocks * room.f_frsize // 8 + 1
    with pytest.raises(SharedMemoryFull, match=r"No room for .*/dev/shm has [\d,]+ bytes free"):
        synk.data(dtype="float64", shape=(too_many,))
    with pytest.raises(SharedMemoryFull):
        small.set_length(too_many)
    np.testing.assert_array_equal(small.data, ROWS)
    np.testing.assert_array_equal(f(small), ROWS)


# Calls from inside calls.


def test_a_call_from_a_signal_handler_is_refused_and_the_outer_one_is_right(no_session):
    synkhronos_error = []
    synk.fork(2)
    f, g = holding(), holding()
    g(ROWS)

    def handler(signum, frame):
        try:
            g(ROWS + 100)
        except synk.SessionError as error:
            synkhronos_error.append(str(error))
        let_go()

    signal.signal(signal.SIGALRM, handler)
    with signal_once_held(signal.SIGALRM, 0):
        np.testing.assert_array_equal(f(held(0)), held(0))
    assert len(synkhronos_error) == 1
    assert "in the middle of another call" in synkhronos_error[0]
    np.testing.assert_array_equal(g(ROWS + 100), ROWS + 100)
