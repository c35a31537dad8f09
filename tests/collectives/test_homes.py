"""Where the values of shared variables are: in shared memory, whatever puts them elsewhere."""

import contextlib
import functools
import gc
import os
import signal
import sys
import threading

import numpy as np
import psutil
import pytest
import theano
import theano.tensor as T
from support.helpers import Call, function, mapped_bytes, on_ranks, shared_memory
from support.interrupts import SOME_AND_EVERY_LINE
from support.layouts import Layout, forked
from support.waiting import wait_until
from theano.tensor.shared_randomstreams import RandomStreams

import synkhronos as synk
from synkhronos import WorkerDied
from synkhronos import session as _session
from synkhronos.comm.shared import arrays, gate, gate_memory, meetings, storage

MEGABYTE = 1 << 20


def held(n, s):
    return [synk.get_value(rank, s).tolist() for rank in range(n)]


LAYOUTS = pytest.mark.parametrize(
    "n, master", [(1, 0), (2, 0), pytest.param(3, 1, marks=pytest.mark.thorough)]
)


# Buffers that Theano and the user replace.


# NumPy 2.5 advises against it.
shape_is_assigned = pytest.mark.filterwarnings("ignore:Setting the shape:DeprecationWarning")


@shape_is_assigned
@LAYOUTS
@pytest.mark.parametrize("is_kept", [False, True])
def test_a_shape_that_is_assigned_to_a_borrowed_value_is_that_of_the_variable(n, master, is_kept):
    with forked(Layout(n, master)):
        s = theano.shared(np.arange(12.0).reshape(6, 2))
        synk.broadcast(s)
        borrowed = s.get_value(borrow=True)
        borrowed.shape = 4, 3
        if not is_kept:
            del borrowed
        shapes = [(6, 2)] * n
        shapes[master] = 4, 3
        assert synk.get_value(master, s).shape == (4, 3) and synk.get_shapes(s) == shapes
        synk.broadcast(s)
        assert held(n, s) == [np.arange(12.0).reshape(4, 3).tolist()] * n
        s.get_value(borrow=True).shape = 2, 6
        synk.set_value(master, s, np.zeros((4, 3)))
        assert s.get_value().shape == (4, 3)
        synk.broadcast(s)
        assert held(n, s) == [np.zeros((4, 3)).tolist()] * n
        borrowed = None


@shape_is_assigned
@LAYOUTS
def test_a_view_of_a_value_with_an_assigned_shape(n, master):
    with forked(Layout(n, master)):
        s = theano.shared(np.arange(12.0).reshape(6, 2))
        synk.broadcast(s)
        borrowed = s.get_value(borrow=True)
        borrowed.shape = 4, 3
        s.set_value(borrowed[:], borrow=True)
        del borrowed
        synk.broadcast(s)
        assert held(n, s) == [np.arange(12.0).reshape(4, 3).tolist()] * n


@LAYOUTS
def test_values_that_were_replaced(n, master):
    with forked(Layout(n, master)):
        s = theano.shared(np.zeros(4))
        synk.broadcast(s)
        borrowed = np.arange(4.0)
        values = [
            (np.arange(4.0), False),
            (borrowed, True),
            (np.arange(8.0)[::2], True),
            (np.arange(16.0).reshape(4, 4).T[1], True),
            (np.arange(4.0)[::-1], True),
            (np.broadcast_to(np.array(3.0), 4), True),
            (np.arange(9.0), True),
            (np.zeros(0), False),
            (np.ones(100_000), True),
            (np.ones(2), False),
        ]
        for value, borrow in values:
            s.set_value(value, borrow=borrow)
            synk.broadcast(s)
            assert held(n, s) == [value.tolist()] * n
            synk.all_reduce(s, "sum")
            assert held(n, s) == [(n * value).tolist()] * n
            np.testing.assert_array_equal(s.get_value(), n * value)
        assert borrowed.tolist() == [0, 1, 2, 3]  # it was copied to shared memory
        s.set_value(np.ones(3))
        inside = s.get_value(borrow=True)
        synk.broadcast(s)
        s.get_value(borrow=True)[:] = 7
        # One rank leaves values where they are; more move them to shared memory.
        assert inside.tolist() == ([7, 7, 7] if n == 1 else [1, 1, 1])
        assert synk.get_value(master, s).tolist() == [7, 7, 7]
        m = theano.shared(np.zeros((2, 3)))
        m.set_value(np.asfortranarray(np.arange(6.0).reshape(2, 3)), borrow=True)
        synk.broadcast(m)
        assert held(n, m) == [[[0, 1, 2], [3, 4, 5]]] * n
        m.set_value(np.arange(6.0).reshape(3, 2).T, borrow=True)
        synk.all_reduce([s, m], "max")
        assert m.get_value().tolist()[0] == [0, 2, 4]


@pytest.mark.slow("compiles updates of each kind")
@LAYOUTS
def test_updates_of_all_kinds(n, master):
    with forked(Layout(n, master)):
        a = theano.shared(np.zeros(4), "a")
        x = T.dvector("x")
        modes = ["FAST_COMPILE", "FAST_RUN"] if n == 2 else ["FAST_COMPILE"]
        for mode in modes:
            updates = {
                "in place": (a + x[:4], lambda old: old + 1),
                "replaced": (x[:4] * 5, lambda old: np.full(4, 5.0)),
                "set_subtensor": (T.set_subtensor(a[1:3], 9), lambda old: [old[0], 9, 9, old[3]]),
                "view": (a[::-1], lambda old: old[::-1]),
                "shape": (T.concatenate([a, x[:4]])[2:6], lambda old: [*old[2:], 1, 1]),
            }
            for expression, expected in updates.values():
                inputs = [x]
                f = synk.function(
                    [],
                    updates=[(a, expression)],
                    bcast_inputs=inputs,
                    mode=mode,
                    on_unused_input="ignore",
                )
                synk.broadcast(a, [1.0, 2, 3, 4])
                old = a.get_value()
                for _ in range(3):
                    f(np.ones(4))
                    old = np.asarray(expected(old))
                    assert synk.gather(a).tolist() == [old.tolist()] * n
                    f(np.ones(4))
                    old = np.asarray(expected(old))
                    synk.all_reduce(a, "avg")
                    np.testing.assert_allclose(synk.gather(a), [old] * n)
        grow = function([], updates=[(a, T.concatenate([a, a]))])
        shrink = function([], updates=[(a, a[1:3])])
        for f, length in ((grow, 8), (shrink, 2), (grow, 4), (grow, 8), (grow, 16), (shrink, 2)):
            f()
            assert synk.get_lengths(a) == [length] * n
            synk.all_reduce(a, "max")
            assert synk.gather(a).shape == (n, length)


@LAYOUTS
def test_updates_that_swap_values(n, master):
    """Each variable's value is then in the other one's home."""
    with forked(Layout(n, master)):
        s, t = theano.shared(np.zeros(3)), theano.shared(np.ones(3))
        swap = function([], updates=[(s, t), (t, s)])
        synk.broadcast([s, t])
        now = [0.0, 1.0]
        actions = [
            lambda: synk.all_reduce([s, t], "max"),
            lambda: synk.all_reduce(s, "max"),
            lambda: synk.all_reduce(t, "min"),
            lambda: synk.broadcast([t, s]),
            lambda: synk.gather(t),
        ]
        for action in [*actions, *actions]:
            swap()
            now.reverse()
            action()
            assert held(n, s) == [[now[0]] * 3] * n
            assert held(n, t) == [[now[1]] * 3] * n
        for value in (5.0, 6.0):
            swap()
            now = [value, now[0]]
            synk.broadcast(s, [value] * 3)
            assert held(n, t) == [[now[1]] * 3] * n
        swap()
        synk.set_value(n - 1, s, [8.0] * 2)
        assert held(n, t)[n - 1] == [now[0]] * 3
        swap()
    assert [s.get_value()[0], t.get_value()[0]] == ([6.0, 8.0] if n - 1 == master else [6.0, 5.0])


def test_a_variable_given_the_array_of_another():
    with forked(Layout(2)):
        s, t = theano.shared(np.arange(3.0)), theano.shared(np.zeros(1))
        synk.broadcast([s, t])
        t.set_value(s.get_value(borrow=True)[1:], borrow=True)
        synk.all_gather(t)
        assert t.get_value().tolist() == [1, 2, 0]
        assert s.get_value().tolist() == [0, 1, 2]


def test_values_are_copied_only_when_they_were_replaced(monkeypatch):
    with forked(Layout(2)):
        s = theano.shared(np.zeros(4))
        add = function([], updates=[(s, T.inc_subtensor(s[1:3], 1))], mode="FAST_RUN")
        synk.all_reduce(s)
        place = s.get_value(borrow=True).__array_interface__["data"]
        for _ in range(3):
            add()
            synk.all_reduce(s, "max")
            synk.broadcast(s)
            s.set_value(s.get_value())
            synk.reduce(s)
            assert s.get_value(borrow=True).__array_interface__["data"] == place


# From one session to the next.


def test_variables_go_from_one_session_to_the_next(no_session):
    s, random = theano.shared(np.arange(4.0)), RandomStreams(1).uniform((1,)).rng
    f = None
    for n in (2, 3, 1):
        synk.fork(n)
        assert held(n, s) == [[0, 1, 2, 3]] * n
        synk.broadcast(random)
        synk.scatter(s, np.arange(10.0))
        synk.all_gather(s)
        f = function([], (s.sum(), "sum"))
        assert f() == n * 45
        synk.set_value(n - 1, s, [1.0])
        synk.broadcast(s, np.arange(4.0))
        synk.close()
        np.testing.assert_array_equal(s.get_value(), np.arange(4.0))
        with pytest.raises(synk.SessionError, match="closed"):
            f()


def test_values_stay_after_close(no_session):
    with forked(Layout(2)):
        s, t, u, number = (theano.shared(v) for v in (np.ones(3), np.eye(2), np.ones(9), 2.5))
        synk.all_reduce([s, t, u, number], "sum")
        swap = function([], updates=[(s, u[:3]), (u, s)])
        swap()
        t.set_value(t.get_value(borrow=True).T, borrow=True)
    assert s.get_value().tolist() == [2, 2, 2]
    assert t.get_value().tolist() == [[2, 0], [0, 2]]
    assert u.get_value().tolist() == [2, 2, 2]
    assert number.get_value() == 5
    double = theano.function([], updates=[(s, s * 2)], mode="FAST_COMPILE")
    double()
    assert s.get_value().tolist() == [4, 4, 4]


def test_data_of_a_closed_session(no_session):
    synk.fork(2)
    old = synk.data(np.ones(3))
    synk.close()
    synk.fork(2)
    s = theano.shared(np.zeros(3))
    synk.broadcast(s)
    for call in (
        lambda: synk.broadcast(s, old),
        lambda: synk.scatter(s, old),
        lambda: synk.set_value(0, s, old),
        lambda: synk.set_value(1, s, old),
    ):
        with pytest.raises(synk.SessionError, match="closed"):
            call()
        assert synk.gather(s).tolist() == [[0, 0, 0]] * 2
    synk.close()


# What the ranks tell one another.


def test_places_that_only_the_master_heard_of(no_session):
    synk.fork(3)
    s, t = theano.shared(np.ones(1)), theano.shared(np.ones(1))
    for size in (10, 10_000, 3, 100_000, 1_000_000):
        for rank in range(3):
            synk.set_value(rank, s, np.full(size, float(rank)))
            assert synk.get_value(rank, s).tolist() == [rank] * size
            # Descriptors that are used again must not be taken for those of before.
            synk.set_value(rank, t, np.full(2 * size, -1.0))
            assert synk.get_value(rank, t)[-1] == -1
    synk.all_reduce([s, t], "sum")
    assert held(3, s) == [[3.0] * 1_000_000] * 3
    synk.close()


def test_more_news_than_a_board_can_hold(no_session, monkeypatch):
    monkeypatch.setattr(gate_memory, "BOARD", 4000)
    synk.fork(3)
    variables = [theano.shared(np.ones(1)) for _ in range(5)]
    for turn in range(1, 40):
        s = variables[turn % 5]
        synk.set_value(turn % 3, s, np.ones(100 * turn))
        assert synk.get_shapes(s)[turn % 3] == (100 * turn,)
        assert synk.get_value(turn % 3, s).tolist() == [1] * 100 * turn
        synk.broadcast(s, [1.0])
        synk.all_reduce(variables, "max")
        assert held(3, variables[turn % 3]) == [[1]] * 3
    many = [theano.shared(np.ones(1)) for _ in range(100)]
    with pytest.raises(synk.WorkerError, match="more than can be told"):
        synk.all_reduce(many)
    del many
    synk.all_reduce(variables, "sum")
    assert held(3, s) == [[3]] * 3
    synk.close()


def test_an_answer_too_long_leaves_the_variables_as_they_were(no_session, monkeypatch):
    monkeypatch.setattr(gate, "REPLY", 2000)
    synk.fork(3)
    s, t = theano.shared(np.arange(3.0)), theano.shared(np.ones(1))
    synk.all_reduce([s, t], "sum")
    many = [theano.shared(np.ones((i, 1, 2, 3))) for i in range(200)]
    with pytest.raises(synk.WorkerError, match="too long"):
        synk.get_shapes(many)
    del many
    synk.all_reduce(s, "avg")
    synk.all_reduce([s, t], "max")
    assert held(3, s) == [[0, 3, 6]] * 3
    synk.close()


# Memory.


def workers():
    return _session._Current.session.worker_pids


def carry():
    gc.collect()
    on_ranks(lambda: 0)


def test_variables_are_released_when_they_are_dropped(no_session):
    synk.fork(3)
    size = 16 * MEGABYTE

    def use(seed):
        s = theano.shared(np.zeros(size // 8))
        t = theano.shared(np.zeros(3))
        synk.all_reduce([s, t])
        synk.broadcast([s, t])
        synk.all_gather(t)
        f = function([], (s.sum(), "sum"))
        assert f() == 0

    use(0)
    carry()
    carry()
    pids = (os.getpid(), *workers())
    mapped, used = [mapped_bytes(pid) for pid in pids], shared_memory()
    descriptors = [psutil.Process(pid).num_fds() for pid in pids]
    for turn in range(3):
        use(turn)
    carry()
    carry()
    assert [psutil.Process(pid).num_fds() for pid in pids] == descriptors
    assert [mapped_bytes(pid) - was < MEGABYTE for pid, was in zip(pids, mapped)] == [True] * 3
    wait_until(lambda: shared_memory() - used < size)
    synk.close()


def test_staged_values_are_released_when_they_are_large(no_session):
    synk.fork(2)
    s = theano.shared(np.zeros(1))
    for _ in range(2):
        synk.scatter(s, np.zeros(8 * MEGABYTE))
        synk.scatter(s, np.zeros(8 * MEGABYTE), batch=np.arange(4 * MEGABYTE))
        synk.set_value(1, s, np.zeros(8 * MEGABYTE), batch=slice(0, 10))
        synk.set_value(1, s, np.zeros(2))
        assert _session._Current.session.staged.nbytes < MEGABYTE
    synk.close()


def test_memory_does_not_grow_with_calls(no_session):
    synk.fork(3)
    s = theano.shared(np.zeros(1000))
    pids = (os.getpid(), *workers())

    def use(turns):
        for turn in range(turns):
            synk.scatter(s, np.ones(2000 + turn % 7))
            synk.all_gather(s)
            synk.all_reduce(s, "sum")
            s.set_value(np.ones(100 + turn % 3))
            synk.broadcast(s)
            synk.get_value(2, s)
            synk.set_value(1, s, np.ones(100 + turn % 3), batch=[0, 1])
        carry()
        return [(mapped_bytes(pid), psutil.Process(pid).num_fds()) for pid in pids]

    before = use(20)
    after = use(100)
    for (mapped, fds), (mapped_then, fds_then) in zip(before, after):
        assert mapped_then - mapped < MEGABYTE and fds_then <= fds + 1
    synk.close()


# Failure.


@pytest.mark.faults
@pytest.mark.parametrize("n", [2, 3])
def test_ctrl_c_at_any_time(no_session, n):
    synk.fork(n)
    variables = [theano.shared(np.ones(size)) for size in (3, 200_000, 70_000, 1)]
    values = [s.get_value() for s in variables]
    synk.broadcast(variables)
    random = np.random.RandomState(0)
    came = []

    def interrupt(signum, frame):
        came.append(signum)
        signal.raise_signal(signal.SIGINT)

    def call_until_it_came(number, wait):
        signal.setitimer(signal.ITIMER_REAL, max(wait, 1e-5))
        while len(came) == number:  # what is raised in a finalizer is dropped by Python
            for s, value in zip(variables, values):
                s.set_value(value, borrow=True)  # has to be brought home
            synk.broadcast(variables)
            synk.all_reduce(variables, "sum")

    signal.signal(signal.SIGALRM, interrupt)
    for number, wait in enumerate(random.uniform(0, 0.004, 60)):
        with contextlib.suppress(KeyboardInterrupt):
            call_until_it_came(number, wait)
        for s, value in zip(variables, values):
            s.set_value(value)
        synk.broadcast(variables)
        synk.all_reduce(variables, "sum")
        for s, value in zip(variables, values):
            assert (synk.gather(s) == n * value).all()
    synk.close()


@pytest.mark.faults
@pytest.mark.parametrize("when", range(1, 5))
@pytest.mark.parametrize("name", ["_Region.lay_out", "_host.replace", "Storage._settle"])
def test_ctrl_c_while_values_are_brought_home(no_session, monkeypatch, name, when):
    owner, name = name.split(".")
    synk.fork(2)
    variables = [theano.shared(np.ones(size)) for size in (1, 2, 3, 4)]
    synk.all_reduce(variables)
    for s in variables:
        s.set_value(np.ones(100))
    count = []

    def interrupted(*args):
        count.append(args)
        if len(count) == when:
            raise KeyboardInterrupt
        return original(*args)

    original = getattr(getattr(storage, owner), name)
    monkeypatch.setattr(getattr(storage, owner), name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        synk.broadcast(variables)
    monkeypatch.undo()
    synk.broadcast(variables)
    synk.all_reduce(variables, "sum")
    assert [s.get_value().sum() for s in variables] == [200] * 4
    assert synk.get_value(1, variables[-1]).sum() == 200
    synk.close()


@pytest.mark.faults
def test_ctrl_c_in_a_large_all_reduce(no_session):
    synk.fork(2)
    s = theano.shared(np.ones(2 << 20))
    synk.broadcast(s)
    synk.all_reduce(s)
    for wait in (0.002, 0.005, 0.01):
        timer = threading.Timer(wait, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            for _ in range(2000):
                synk.all_reduce(s)
        timer.join()
        synk.broadcast(s, [1.0, 2.0])
        synk.all_reduce(s, "sum")
        assert held(2, s) == [[2, 4]] * 2
        synk.broadcast(s, np.ones(2 << 20))
    synk.close()


@pytest.mark.faults
@pytest.mark.parametrize("master", [0, 1])
def test_a_worker_killed_in_the_middle(no_session, master):
    synk.fork(3, master_rank=master)
    s = theano.shared(np.ones(1 << 20))
    synk.all_reduce(s)
    pid = workers()[1]
    timer = threading.Timer(0.1, os.kill, (pid, signal.SIGKILL))
    timer.start()
    with pytest.raises(WorkerDied, match="rank 2"):
        for _ in range(2000):
            synk.all_reduce(s)
    timer.join()
    for call in (lambda: synk.all_reduce(s), lambda: synk.gather(s)):
        with pytest.raises(WorkerDied):
            call()
    synk.close()
    # The share of a rank that is killed stays as it is then: of sums that are not divided yet.
    assert set(s.get_value()) <= {1, 2, 3}
    assert synk.fork(2) == 2
    synk.broadcast(s, np.ones(1 << 20))
    synk.all_reduce(s, "sum")
    assert synk.get_value(1, s)[-1] == 2
    synk.close()


@pytest.mark.faults
def test_no_room_leaves_a_session_to_go_on_with(no_session):
    synk.fork(2)
    s, t = theano.shared(np.ones(3)), theano.shared(np.zeros(2))
    synk.all_reduce([s, t])
    room = os.statvfs("/dev/shm")
    too_many = room.f_blocks * room.f_frsize // 8 + 1
    large = np.broadcast_to(np.array(1.0), (too_many,))
    for call in (
        lambda: synk.broadcast(s, large),
        lambda: synk.scatter(s, large),
        lambda: synk.set_value(0, s, large),
        lambda: synk.set_value(1, s, large),
    ):
        with pytest.raises(synk.SharedMemoryFull):
            call()
    synk.all_reduce([s, t], "sum")
    assert held(2, s) == [[2, 2, 2]] * 2
    synk.close()


@pytest.mark.faults
def test_an_error_on_one_rank_in_the_middle_of_a_collective(no_session, monkeypatch):
    """Another rank waits to meet it; it is told."""
    from synkhronos.comm.shared.storage import Storage

    original = Storage.post

    def failing(self):
        values = [each.get_value(borrow=True) for each in self._worker.variables.values()]
        if self._worker.rank == 1 and values[0][0] == 13:
            raise OSError("no home")
        original(self)

    monkeypatch.setattr(Storage, "post", failing)
    monkeypatch.setattr(meetings, "HEARTBEAT_MS", None)  # no rank looks by itself
    synk.fork(3)
    s = theano.shared(np.zeros(2))
    synk.set_value(1, s, [13.0, 0.0])
    for call in (synk.all_reduce, synk.all_gather, synk.gather, synk.reduce):
        with pytest.raises(synk.WorkerError, match="no home") as caught:
            call(s)
        assert caught.value.rank == 1
    synk.broadcast(s, [1.0, 2.0])
    synk.all_reduce(s, "sum")
    assert held(3, s) == [[3, 6]] * 3
    synk.close()


def test_calls_of_ops_between_collectives(no_session):
    """A worker's own values come from its functions."""
    synk.fork(3)
    s = theano.shared(np.zeros(2))
    pid = theano.shared(np.zeros(1, "int64"))
    tell = function([], updates=[(pid, Call(lambda x: [os.getpid()], T.lvector)(pid))])
    tell()
    assert synk.gather(pid, nd_up=0).tolist() == [os.getpid(), *workers()]
    assert synk.get_value(2, pid).tolist() == workers()[1:]
    synk.all_gather(pid)
    assert held(3, pid) == [[os.getpid(), *workers()]] * 3
    synk.all_reduce(s)
    synk.close()


@LAYOUTS
def test_gathering_time_and_again(n, master):
    """A variable whose storage take turns keeps what others have taken from them."""
    with forked(Layout(n, master)):
        s, t = theano.shared(np.zeros((1, 2)), "s"), theano.shared(np.zeros((1, 2)), "t")
        swap = function([], updates=[(s, t), (t, s)])
        swap()
        for turn in range(6):
            for rank in range(n):
                synk.set_value(rank, s, np.full((2, 2), 10.0 * turn + rank))
            joined = np.repeat(10.0 * turn + np.arange(n), 2)[:, None] * np.ones(2)
            synk.all_gather(s)
            assert all(value == joined.tolist() for value in held(n, s))
            if turn in (2, 4):
                swap()
                assert all(value == joined.tolist() for value in held(n, t))
                synk.all_gather(s)
                synk.all_gather(s)
                assert all(value == joined.tolist() for value in held(n, t))


def interrupt_at(line_number, call, *modules):
    """Make a call, with a Ctrl-C before the given line of modules that it runs, counted from 0."""
    count = 0
    files = [module.__file__ for module in modules]

    def trace(frame, event, _):
        nonlocal count
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            count += 1
            if count > line_number:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(previous)
    return False


@SOME_AND_EVERY_LINE
@pytest.mark.parametrize("verb", ["all_gather", "all_reduce", "broadcast", "set_value"])
def test_a_ctrl_c_at_any_line_leaves_nothing_half_done(verb, stride):
    with forked(Layout(2)):
        s, t = theano.shared(np.zeros((5, 3)), "s"), theano.shared(np.zeros((5, 3)), "t")
        move = function([], updates=[(s, t), (t, s)])
        calls = {
            "all_gather": lambda: synk.all_gather([s, t]),
            "all_reduce": lambda: synk.all_reduce([s, t], "sum"),
            "broadcast": lambda: synk.broadcast([s, t]),
            "set_value": lambda: synk.set_value(0, [s, t], [np.ones((4, 3)), np.ones((7, 3))]),
        }
        line = 0
        while True:
            synk.broadcast([s, t], [np.full((5, 3), 1.0), np.full((2, 3), 2.0)])
            move()
            interrupted = interrupt_at(line, calls[verb], storage)
            for value in (3.0 + line, 4.0 + line):
                for shape in ((5, 3), (1, 6), (2, 3), (10, 3)):
                    synk.broadcast([s, t], [np.full(shape, value), np.full((5, 3), -value)])
                    assert [np.ptp(v) for v in synk.gather([s, t])] == [0, 0]
                    assert [v.flat[0] for v in synk.gather([s, t])] == [value, -value]
            synk.all_reduce([s, t], "sum")
            assert [v.flat[0] for v in synk.gather([s, t])] == [2 * value, -2 * value]
            assert [np.ptp(v) for v in synk.gather([s, t])] == [0, 0]
            if not interrupted:
                break
            line += stride
        assert line > 20


@SOME_AND_EVERY_LINE
@pytest.mark.usefixtures("compiled_if_thorough")
def test_a_ctrl_c_at_any_line_of_an_exchange_leaves_nothing_half_done(stride):
    with forked(Layout(2)):
        x, y = T.dmatrix("x"), T.dmatrix("y")
        f = synk.function([x, y], (synk.ops.all_reduce(T.dot(x.T, y), "sum"), None))
        line = 0
        while True:
            # Of another shape each time, so that the place for it is laid out anew.
            a, b = np.full((4, 150), 1.0 + line), np.ones((4, 130 + line))
            interrupted = interrupt_at(line, functools.partial(f, a, b), storage, arrays)
            for width in (130 + line, 300, 7):
                np.testing.assert_array_equal(
                    f(a, np.ones((4, width))), np.full((150, width), 4 * (1.0 + line))
                )
            if not interrupted:
                break
            line += stride
        assert line > 60
