"""Priorities, callbacks and updates: their order, and what a wait covers."""

import threading

import numpy as np
import pytest
from support.parameter_server import SECONDS, Held, blocked, local, on_threads, pull

from synkhronos import parameter_server as ps
from synkhronos.parameter_server import engine, task_queues

PRIORITIES = [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("size", [1, 10_000])
@pytest.mark.parametrize(
    "priorities, order",
    [(PRIORITIES, [5, 4, 3, 2, 1, 0]), ([7] * 6, range(6))],
    ids=["rising", "equal"],
)
def test_the_priorities_of_pulls_are_honoured(priorities, order, size):
    """In mshadow-ps they were stored, and never used; equal ones came as 1, 3, 5, 2, 4."""
    with local([(size,)] * 6) as store:
        came, outs = [], [np.zeros(size, np.float32) for _ in priorities]
        with blocked(store, 99, 0):
            for key, priority in enumerate(priorities):
                store.push(np.ones(size, np.float32), key, 0).wait(SECONDS)
                call = lambda key=key: came.append((key, outs[key][-1]))  # noqa: E731
                store.pull_req(outs[key], key, 0, priority, callback=call)
        for key in range(6):
            store.pull_wait(key, 0, SECONDS)
        assert came == [(key, 1) for key in order]


@pytest.mark.parametrize(
    "pushes, order",
    [
        pytest.param(list(enumerate(PRIORITIES, 1)), [6, 5, 4, 3, 2, 1], id="rising"),
        pytest.param([(key, 0) for key in range(1, 7)], [1, 2, 3, 4, 5, 6], id="equal"),
        pytest.param([(1, 0), (1, 0), (2, 0)], [1, 1, 2], id="two rounds of one key"),
        pytest.param([(1, -5), (2, 0), (1, 9)], [1, 2, 1], id="an earlier round goes first"),
    ],
)
def test_the_priorities_of_pushes_are_honoured(pushes, order):
    """A later round of a high priority lets the earlier ones of its key go first."""
    updater = Held()
    with local([(1,)] * 7, [0], updater) as store:
        ones = np.ones(1, np.float32)
        store.push(ones, 0, 0)
        assert updater.is_there.wait(SECONDS)
        for key, priority in pushes:
            store.push(ones, key, 0, priority)
        updater.may_go.set()
        for key in range(7):
            assert store.pull(key).wait(SECONDS) == [0, *order].count(key)
        assert updater.order == [0, *order]


@pytest.mark.parametrize("size", [2, 20_000])
def test_a_wait_covers_the_callback(size):
    with local([(size,)]) as store:
        array, seen, may_go = np.ones(size, np.float32), [], threading.Event()

        def callback(given):
            assert may_go.wait(SECONDS)
            given *= 10
            seen.append(threading.current_thread())

        store.push(array, 0, 0)
        store.pull_req(array, 0, 0, callback=callback)
        with pytest.raises(ps.RoundTimeout, match="callback"):
            store.pull_wait(0, 0, timeout=0.05)
        may_go.set()
        store.pull_wait(0, 0, SECONDS)
        assert (array == 10).all() and len(seen) == 1


@pytest.mark.parametrize("caller", ["the main thread", "threads"])
def test_a_callback_that_a_caller_waits_for_is_not_left_to_a_thread_that_dozes(monkeypatch, caller):
    for module in (engine, task_queues):
        monkeypatch.setattr(module, "DOZE", 10 * SECONDS)  # was 1 ms, for each key of a round
    with local([(1,)] * 3, [0, 1]) as store:
        called = []

        def rounds(device, others=()):
            for key in [0, 1, 2] * 3:
                for each in (*others, device):
                    out = np.ones(1, np.float32)
                    store.push(out, key, each)
                    store.pull_req(out, key, each, callback=lambda: called.append(1))
                for each in (*others, device):
                    store.pull_wait(key, each, None if caller == "threads" else SECONDS)

        if caller == "threads":
            on_threads([0, 1], rounds)
        else:
            rounds(0, others=(1,))
        assert len(called) == 18


def test_callbacks_of_one_device_run_one_at_a_time_and_those_of_others_beside_them():
    with local([(1,)] * 4, [0, 1]) as store:
        meet = threading.Barrier(2)
        active = {0: 0, 1: 0}

        def callback(device):
            active[device] += 1
            assert active[device] == 1
            meet.wait(SECONDS)  # with one of the other device: else this breaks
            active[device] -= 1

        for key in range(4):
            for d in (0, 1):
                store.push(np.ones(1, np.float32), key, d)
                store.pull_req(np.zeros(1, np.float32), key, d, callback=lambda d=d: callback(d))
        for key in range(4):
            for d in (0, 1):
                store.pull_wait(key, d, SECONDS)


def test_a_callback_may_use_the_store():
    with local([(1,), (1,)]) as store:
        a, b = np.ones(1, np.float32), np.ones(1, np.float32)

        def push_the_next():
            store.push(b, 1, 0)
            store.pull_req(b, 1, 0)

        store.push(a, 0, 0)
        store.pull_req(a, 0, 0, callback=push_the_next)
        store.pull_wait(0, 0, SECONDS)
        store.pull_wait(1, 0, SECONDS)
        assert b[0] == 1


def test_a_callback_that_waits_for_itself_is_told():
    with local([(1,)]) as store:
        store.push(np.ones(1, np.float32), 0, 0)
        store.pull_req(np.ones(1, np.float32), 0, 0, callback=lambda: store.pull_wait(0, 0))
        with pytest.raises(ps.CallbackFailed, match="OutOfTurn"):
            store.pull_wait(0, 0, SECONDS)


def test_a_callback_that_raises_is_raised_by_the_wait_and_the_store_goes_on(caplog):
    with local([(1,)]) as store:
        array = np.ones(1, np.float32)
        store.push(array, 0, 0)
        future = store.pull_req(array, 0, 0, callback=lambda: 1 / 0)
        with pytest.raises(ps.CallbackFailed, match=r"key 0.*ZeroDivisionError") as caught:
            store.pull_wait(0, 0, SECONDS)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert future.exception() is caught.value
        assert "ZeroDivisionError" in caplog.text
        store.push(array, 0, 0)
        pull(store, array, 0, 0)


def test_an_updater_that_raises_is_raised_by_the_wait_and_the_next_round_goes_on():
    calls = []

    def update(key, gradient, weight):
        calls.append(key)
        if len(calls) == 1:
            raise KeyError("no")
        weight += gradient

    with local([(1,)], [0], update) as store:
        array = np.ones(1, np.float32)
        store.push(array, 0, 0)
        store.pull_req(array, 0, 0)
        with pytest.raises(ps.CallbackFailed, match=r"key 0 in round 1.*KeyError"):
            store.pull_wait(0, 0, SECONDS)
        array[:] = 5
        store.push(array, 0, 0)
        pull(store, array, 0, 0)
        assert array[0] == 5
