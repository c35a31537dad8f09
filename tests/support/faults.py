"""Faults on purpose: a signal that hits one process at one point, and calls to make around it.

A point is before or after a method or function of the library. Tests wrap the function before they
fork; the wrapper reads in shared memory whether its process is to be hit.
"""

import contextlib
import functools
import mmap
import os
import signal
import threading
import time

import numpy as np
import psutil
import theano
import theano.tensor as T

import synkhronos as synk
from support.helpers import Call, function
from support.threads import in_thread
from support.waiting import LONG, TEST_SECONDS, end_after, wait_until
from synkhronos import WorkerError
from synkhronos._machine.processes import ForkedProcess

SIZE = 50_000  # items of a shared variable: more than a block of a reduction
BOUND = LONG  # seconds that a call may take after a fault
HANGS = 5  # after so many times its bound, a call counts as hung

# The process id to hit; the number of hits; then the notes of the process that was hit.
_cells = memoryview(mmap.mmap(-1, 8 * 64)).cast("q")
_TARGET, _HITS, _NOTES = range(3)


def set_point(monkeypatch, owner, name, when, blow) -> None:
    """Wrap a function of `owner`: the armed process calls `blow` before or after it."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        if when == "before":
            _maybe(blow)
        result = original(*args, **kwargs)
        if when == "after":
            _maybe(blow)
        return result

    monkeypatch.setattr(owner, name, wrapped)


def _maybe(blow):
    if _cells[_TARGET] == os.getpid():
        _cells[_TARGET] = 0
        _cells[_HITS] += 1
        blow()


def point_id(value):
    """Return the id of a test's parameter that is a point or a part of one."""
    if isinstance(value, tuple):
        return "-".join(map(point_id, value))
    name = getattr(value, "__name__", None) or getattr(value, "name", value)
    return str(name).replace("synkhronos.", "")


@contextlib.contextmanager
def armed(pid):
    """Arm a process for one hit; fail unless it is hit inside."""
    _cells[_TARGET], _cells[_HITS] = pid, 0
    try:
        yield
        assert _cells[_HITS] == 1, "it never came to that point"
    finally:
        _cells[_TARGET] = _cells[_HITS] = 0


def hit_by(signum):
    """Return a `blow` by which the process sends itself a signal."""
    return lambda: os.kill(os.getpid(), signum)


def note_children() -> None:
    """Write the children of this process into shared memory, where `noted` reads them."""
    children = psutil.Process().children()
    _cells[_NOTES] = len(children)
    for position, child in enumerate(children):
        _cells[_NOTES + 1 + position] = child.pid


def noted():
    count = _cells[_NOTES]
    return list(_cells[_NOTES + 1 : _NOTES + 1 + count])


def arm_this_process() -> None:
    _cells[_TARGET], _cells[_HITS] = os.getpid(), 0


def is_armed():
    """Return whether a process has been armed, hit since or not."""
    return _cells[_TARGET] != 0 or _cells[_HITS] != 0


def shared_numbers(count):
    """Return integers in memory that this process shares with those it forks from now on."""
    return np.frombuffer(mmap.mmap(-1, 8 * count), np.int64)


def pids_by_rank():
    """Return the process id of each rank of the current session."""
    session = synk.session.current("a test")
    pids = list(session.worker_pids)
    pids.insert(session.master_rank, os.getpid())
    return pids


@contextlib.contextmanager
def bounded(seconds=BOUND):
    """Fail if the block takes longer; if it hangs, print tracebacks and end the tests."""
    begin = time.monotonic()
    end_after(HANGS * seconds)
    try:
        yield
    finally:
        end_after(TEST_SECONDS)
    took = time.monotonic() - begin
    assert took < seconds, f"it took {took:.1f} s"


@contextlib.contextmanager
def child_process(target):
    """Run `target` in a forked process and yield the process; kill it at the end."""
    process = ForkedProcess(target)
    try:
        yield process
    finally:
        process.send(signal.SIGKILL)
        process.join(BOUND)
        process.close()


ROWS = np.arange(8.0)


def raise_if(condition, error):
    def check(x):
        if condition(x):
            raise error() if callable(error) else error
        return x

    return check


# Whether held ranks may go on, and from the second cell on which of them have come.
_holds = memoryview(mmap.mmap(-1, 8 * 16)).cast("q")


def held(*ranks, n=2):
    """Return rows for `n` ranks and a function of `holding`, which holds some of the ranks."""
    rows = ROWS.copy()
    for rank in ranks:
        rows[len(rows) * rank // n] = -1 - rank
    return rows


def holding():
    """Return a function that gathers its rows; ranks that are `held` wait in it for `let_go`."""
    _holds[:] = memoryview(bytes(_holds.nbytes)).cast("q")
    x = T.dvector("x")
    return function([x], (Call(_hold)(x), "gather"))


def _hold(rows):
    if rows[0] < 0:
        _holds[-int(rows[0])] = 1
        wait_until(lambda: _holds[0])
    return rows


def let_go():
    _holds[0] = 1


def may_go():
    return bool(_holds[0])


@contextlib.contextmanager
def once_held(do, *ranks):
    """Call ``do()`` in a thread, as soon as these ranks are held in a call of the block."""

    def watch():
        wait_until(lambda: all(_holds[1 + rank] for rank in ranks))
        do()

    watching = in_thread(watch)
    try:
        yield
    finally:
        watching.result()


def signal_once_held(signum, *ranks):
    """Send the main thread a signal, when these ranks are held in a call of the block."""
    main = threading.main_thread().ident

    def send():
        time.sleep(0.05)  # on most machines a master that isn't held waits for the others by then
        signal.pthread_kill(main, signum)

    return once_held(send, *ranks)


def checked(condition, error):
    """Return a function that raises on the ranks whose rows meet the condition."""
    x = T.dvector("x")
    return function([x], (Call(raise_if(condition, error))(x), "gather"), name="checked")


def _function(n, **kwargs):
    """Return a call, for n ranks, that checks its results; so do all functions in `CALLS`."""
    x = T.dvector("x")
    s = theano.shared(np.zeros(()), "s")
    f = function([x], [(2 * x, "gather"), x.sum()], updates=[(s, s + 1)])
    rows, batch = synk.data(np.arange(4.0 * n)), np.arange(4 * n)[::-1].copy()

    def call():
        doubled, _ = f(rows, batch=batch, **kwargs)
        np.testing.assert_array_equal(doubled, 2.0 * batch)

    return call


def _growing(n):
    """Return a call whose outputs grow, so that workers send the master new places of them."""
    x = T.dvector("x")
    f = function([x], (x, "gather"))
    rows, length = synk.data(np.arange(4.0**6 * n)), n

    def call():
        nonlocal length
        length = 4 * length if length < 1000 * n else n
        np.testing.assert_array_equal(f(rows, batch=slice(0, length)), np.arange(length))

    return call


def _failing(n):
    """Return a call in which every worker raises."""
    master = os.getpid()

    def fail(rows):
        if os.getpid() != master:
            raise ValueError("on purpose")
        return rows

    x = T.dvector("x")
    f = function([x], (Call(fail)(x), "gather"))

    def call():
        try:
            f(np.ones(n))
        except WorkerError as error:
            assert "on purpose" in str(error)
        else:
            raise AssertionError("no rank raised")

    return call


def _exchange(n, size=3):
    x = T.dmatrix("x")
    f = function([x], synk.ops.all_reduce(x.sum(axis=0), "sum"))

    def call():
        np.testing.assert_array_equal(f(np.ones((n, size))), np.full(size, float(n)))

    return call


def _large_exchange(n):
    return _exchange(n, 40_000)


def _variable(n):
    """Return a shared variable, and a function that fills it with a number of each rank."""
    s = theano.shared(np.zeros(SIZE), "s")

    def fill():
        for rank in range(n):
            synk.set_value(rank, s, np.full(SIZE, rank + 1.0))

    return s, fill


def _held(n, s, expected):
    for rank, value in enumerate(expected):
        got = synk.get_value(rank, s)
        assert got[0] == got[-1] == value, (rank, got)


def _all_reduce(n):
    s, fill = _variable(n)

    def call():
        fill()
        synk.all_reduce(s, "sum")
        _held(n, s, [n * (n + 1) / 2] * n)

    return call


def _all_gather(n):
    s, fill = _variable(n)

    def call():
        fill()
        synk.all_gather(s)
        for rank in range(n):
            np.testing.assert_array_equal(
                synk.get_value(rank, s), np.repeat(np.arange(n) + 1.0, SIZE)
            )

    return call


def _broadcast(n):
    s, fill = _variable(n)

    def call():
        fill()
        synk.broadcast(s, np.full(SIZE, 7.0))
        _held(n, s, [7] * n)

    return call


def _gather(n):
    s, fill = _variable(n)

    def call():
        fill()
        np.testing.assert_array_equal(synk.gather(s)[:, -1], np.arange(n) + 1.0)

    return call


def _distribute(n):
    x = T.dvector("x")

    def call():
        f = function([x], x.sum())
        synk.distribute()
        assert f(np.ones(n)) == 1

    return call


CALLS = {
    "function": _function,
    "growing outputs": _growing,
    "failing function": _failing,
    "exchange": _exchange,
    "large exchange": _large_exchange,
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "gather": _gather,
    "distribute": _distribute,
}


def begun(what, n, master=0):
    """Fork; return a call, after it has been made, and the process of each rank."""
    synk.fork(n, master_rank=master)
    call = CALLS[what if what in CALLS else "function"](n)
    call()
    return call, pids_by_rank()


def use_a_new_session(n, what="function", master=0):
    """Check that a new session works after a fault: fork, call, and close."""
    begun(what, n, master)
    synk.close()
