"""Where the values of shared variables are: in shared memory, whatever puts them elsewhere."""

import gc
import os

import numpy as np
import psutil
import pytest
import theano
import theano.tensor as T
from support.helpers import function, mapped_bytes, on_ranks, shared_memory
from support.interrupts import SOME_AND_EVERY_LINE, interrupt_at_line
from support.layouts import Layout, forked
from support.waiting import wait_until
from theano.tensor.shared_randomstreams import RandomStreams

import synkhronos as synk
from synkhronos import session as _session
from synkhronos.comm.shared import gate_memory

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
    monkeypatch.setattr(gate_memory, "REPLY", 2000)
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
            interrupted = interrupt_at_line(line, calls[verb])
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
