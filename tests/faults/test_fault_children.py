"""Processes that the user starts in the middle of a session, which goes on beside them."""

import concurrent.futures
import gc
import multiprocessing
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.faults import BOUND, CALLS, begun, bounded, child_process, pids_by_rank
from support.helpers import function, square
from support.layouts import Layout, forked
from support.leaks import nothing_left

import synkhronos as synk
from synkhronos import SessionError

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def pair():
    """A session, and what calls can be made in it."""
    with forked(Layout(2)) as current:
        current.call = CALLS["function"](2)
        current.call()
        x = T.dvector("x")
        current.f = function([x], (x.sum(), "sum"))
        current.data = synk.data(np.arange(5.0))
        current.s = theano.shared(np.ones(3), "s")
        synk.all_reduce(current.s)
        current.f(current.data)
        yield current
        del current.call, current.f, current.data, current.s


# A child that the user forks.


def refused(do):
    with pytest.raises(SessionError, match="fork"):
        do()


def fork_a_session(pair):
    begun("function", 2)


def fork_and_close(pair):
    fork_a_session(pair)
    synk.close()


def drop_everything(pair):
    vars(pair).clear()
    gc.collect()


def have_a_child(pair):
    with child_process(lambda: refused(lambda: pair.f(pair.data))) as process:
        assert process.join(BOUND)
        assert process.exitcode == 0


CHILDREN = {
    "does nothing": lambda pair: None,
    "exits": lambda pair: os._exit(5),
    "exits by sys.exit": lambda pair: sys.exit(5),
    "raises": lambda pair: pair.no_such_name,
    "is killed": lambda pair: os.kill(os.getpid(), signal.SIGKILL),
    "calls a function": lambda pair: refused(lambda: pair.f(pair.data)),
    "makes a function": lambda pair: refused(lambda: synk.function([], T.zeros(2))),
    "distributes": lambda pair: refused(synk.distribute),
    "makes Data": lambda pair: refused(lambda: synk.data([1.0])),
    "sets Data": lambda pair: refused(lambda: pair.data.set_length(50)),
    "reduces": lambda pair: refused(lambda: synk.all_reduce(pair.s)),
    "reads Data": lambda pair: np.testing.assert_array_equal(pair.data.data, np.arange(5.0)),
    "drops everything": drop_everything,
    "closes": lambda pair: synk.close(),
    "closes all descriptors": lambda pair: os.closerange(3, 1024),
    "forks a session": fork_and_close,
    "forks a session and forgets it": fork_a_session,
    "has a child": have_a_child,
}
ENDS = {"exits": 5, "is killed": -9, "raises": 1, "exits by sys.exit": 1}


@pytest.mark.parametrize("what", CHILDREN)
def test_a_child_that(pair, capfd, what):
    pids = pids_by_rank()
    with nothing_left(), bounded():
        with child_process(lambda: CHILDREN[what](pair)) as process:
            for _ in range(3):
                pair.call()  # beside it
            assert process.join(BOUND)
            assert process.exitcode == ENDS.get(what, 0), capfd.readouterr().err
        pair.call()
        assert pair.f(pair.data) == 10
        synk.all_reduce(pair.s)
        assert pids_by_rank() == pids


def test_multiprocessing_by_fork(pair):
    context = multiprocessing.get_context("fork")
    with context.Pool(2) as pool:
        result = pool.map_async(square, range(10))
        pair.call()
        assert result.get(BOUND) == [n * n for n in range(10)]
        pool.terminate()
        pool.join()
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        assert list(pool.map(square, range(4))) == [0, 1, 4, 9]
        pair.call()
    pair.call()


def test_a_program_that_the_user_starts(pair):
    done = subprocess.run(["true"], close_fds=False, timeout=BOUND, check=True)
    assert done.returncode == 0
    pair.call()


FORKS_MEANWHILE = """
import os, signal, threading, time
import numpy as np
import theano.tensor as T
import synkhronos as synk
from synkhronos._machine import processes

children, threads, begins = [], [], threading.Event()

def fork_a_child():
    begins.set()
    pid = os.fork()
    if pid == 0:
        signal.pause()
    children.append(pid)

def pipe_and_fork(make=processes.make_pipe):
    ends = make()
    threads.append(threading.Thread(target=fork_a_child))
    threads[-1].start()
    begins.wait()
    threads[-1].join(0.3)
    return ends

processes.make_pipe = pipe_and_fork
synk.fork(2)
for thread in threads:
    thread.join()
x = T.dvector("x")
f = synk.function([x], (x.sum(), "sum"))
assert f(np.ones(4)) == 4
[worker] = {rank.pid for rank in synk.status().ranks} - {os.getpid()}
os.kill(worker, signal.SIGKILL)
begin = time.monotonic()
try:
    f(np.ones(4))
except synk.WorkerDied:
    print("noticed", time.monotonic() - begin < 60)
finally:
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
"""


def test_a_child_that_a_thread_forks_during_fork_hides_no_death(script):
    assert script(FORKS_MEANWHILE).stdout == "noticed True\n"
