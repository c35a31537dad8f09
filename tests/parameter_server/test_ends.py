"""Ends: of stores, their threads and processes, and of users' code that fails or waits for ever."""

import gc
import os
import signal
import threading
import time
import weakref

import numpy as np
import pytest
from support.parameter_server import SECONDS, Held, blocked, local
from support.threads import in_thread

from synkhronos import parameter_server as ps


def test_close_in_the_main_thread_runs_callbacks_of_rounds_that_are_still_updated():
    updater = Held()
    store = local([(2,)], [0], updater)
    came, array = [], np.ones(2, np.float32)
    updater.may_go.set()
    for number in (1, 2):
        store.push(array, 0, 0)
        future = store.pull_req(array, 0, 0, callback=lambda number=number: came.append(number))
        if number == 1:
            store.pull_wait(0, 0)
            updater.may_go.clear()
    updater.go_soon()
    store.close()
    assert came == [1, 2] and future.exception() is None


def test_an_interrupted_close_has_closed_the_store():
    store = local([(2,)], [0, 1])
    with blocked(ps.create("local", devices=[0]), 9, 0):  # another store is not concerned
        store.init_key((1,), 5, 0)
        store.init_key((1,), 5, 1)
        may_go = threading.Event()
        for d in (0, 1):
            store.push(np.ones(1, np.float32), 5, d)
        store.pull_req(np.ones(1, np.float32), 5, 0, callback=lambda: may_go.wait(SECONDS))
        store.push(np.ones(2, np.float32), 0, 1)
        store.pull_req(np.ones(2, np.float32), 0, 1)
        waiting = in_thread(store.pull_wait, 0, 1)
        main = threading.main_thread().ident
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.2, signal.pthread_kill, [main, signal.SIGINT]).start()
            store.close()
        with pytest.raises(ps.StoreClosed):
            waiting.result(SECONDS)
        with pytest.raises(ps.StoreClosed):
            store.push(np.ones(2, np.float32), 0, 0)
        store.close()
        may_go.set()


def test_close_without_draining_drops_rounds_for_good():
    updater = Held()
    store = local([(2,)], [0], updater)
    futures = [store.push(np.ones(2, np.float32), 0, 0) for _ in range(3)]
    assert updater.is_there.wait(SECONDS)
    updater.go_soon()
    store.close(drain=False)
    time.sleep(0.1)
    assert [type(future.exception()) for future in futures] == [
        type(None),
        ps.StoreClosed,
        ps.StoreClosed,
    ]
    assert updater.order == [0]


def test_close_waits_for_an_update_in_a_thread_that_waits():
    updater = Held()
    store = local([(2,)], [0], updater)
    has_asked = threading.Event()

    def train():
        array = np.ones(2, np.float32)
        store.push(array, 0, 0)
        store.pull_req(array, 0, 0)
        has_asked.set()
        store.pull_wait(0, 0, SECONDS)

    training = in_thread(train)
    assert has_asked.wait(SECONDS) and updater.is_there.wait(SECONDS)
    updater.go_soon()
    store.close()
    assert updater.order == [0]
    training.result(SECONDS)


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit, KeyError])
def test_an_updater_may_raise_anything(error):
    def update(key, gradient, weight):
        raise error("no")

    with local([(2,)], [0], update) as store:
        array = np.ones(2, np.float32)
        for _ in range(2):
            store.push(array, 0, 0)
            store.pull_req(array, 0, 0)
            with pytest.raises(ps.CallbackFailed, match=error.__name__):
                store.pull_wait(0, 0, SECONDS)


def test_a_key_that_can_not_be_made_fails_for_all_devices():
    is_there, may_go = threading.Event(), threading.Event()

    class Fails(ps.Updater):
        def init_model(self, key, weight):
            is_there.set()
            assert may_go.wait(SECONDS)
            raise KeyError("no")

    with local([], [0, 1], Fails()) as store:
        making = in_thread(store.init_key, (2,), 0, 0)
        assert is_there.wait(SECONDS)
        store.init_key((2,), 0, 1)
        pulled = store.pull_req(np.zeros(2, np.float32), 0, 1)
        may_go.set()
        with pytest.raises(KeyError):
            making.result(SECONDS)
        assert "key 0 could not be made" in str(pulled.exception(SECONDS))
        with pytest.raises(ValueError, match="no key 0"):
            store.push(np.zeros(2, np.float32), 0, 1)


@pytest.mark.parametrize(
    "use",
    [
        lambda store: store.pull(0).wait(),
        lambda store: store.init("new", np.zeros(2)),
        lambda store: store.pushpull("other", [np.ones(2, np.float32)]).wait(),
    ],
    ids=["pull", "init", "pushpull"],
)
def test_an_updater_that_waits_for_its_own_store_is_told(use):
    def update(key, gradient, weight):
        if key == 0:
            use(store)

    with local([(2,)], [0], update) as store:
        store.init("other", np.zeros(2, np.float32))
        array = np.ones(2, np.float32)
        store.push(array, 0, 0)
        store.pull_req(array, 0, 0)
        with pytest.raises(ps.CallbackFailed, match=r"OutOfTurn: an updater can't"):
            store.pull_wait(0, 0, SECONDS)


def test_a_callback_in_a_callback_leaves_the_outer_one_guarded():
    with local([(1,), (1,)], [0, 1]) as store:
        arrays = np.ones((4, 1), np.float32)
        for d in (0, 1):
            store.push(arrays[d], 0, d)
            store.push(arrays[2 + d], 1, d)

        def outer():
            store.pull_req(arrays[1], 0, 1, callback=lambda: None)
            store.pull_wait(0, 1)
            store.pull_wait(0, 0)  # its own

        store.pull_req(arrays[0], 0, 0, callback=outer)
        with pytest.raises(ps.CallbackFailed, match="OutOfTurn"):
            store.pull_wait(0, 0, SECONDS)


def test_a_store_that_nothing_refers_to_is_collected_and_its_threads_end():
    before = set(threading.enumerate())
    store = local([(1,)])
    array = np.ones(1, np.float32)
    store.push(array, 0, 0)
    store.pull_req(array, 0, 0, callback=lambda: None)
    store.pull_wait(0, 0, SECONDS)
    engine = weakref.ref(store._engine)
    del store
    gc.collect()
    assert engine() is None
    until = time.monotonic() + SECONDS
    while set(threading.enumerate()) - before:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_timeout_holds_although_a_callback_is_slow():
    with local([(1,)], [0, 1]) as store:
        may_go = threading.Event()
        for d in (0, 1):
            store.push(np.ones(1, np.float32), 0, d)
        future = store.pull_req(np.ones(1, np.float32), 0, 0, callback=lambda: may_go.wait(SECONDS))
        with pytest.raises(ps.RoundTimeout):
            in_thread(future.wait, 0.1).result(SECONDS / 2)
        may_go.set()
        future.wait(SECONDS)


def test_a_child_process_can_not_use_the_store_and_does_not_hang():
    store = local([(1,)])
    with store._engine.lock:  # as while another thread is in the midst of a call
        child = os.fork()
        if child == 0:
            try:
                store.push(np.ones(1, np.float32), 0, 0)
                os._exit(1)
            except ps.StoreClosed as error:
                store.close()
                os._exit(0 if "belongs to the process" in str(error) else 2)
            os._exit(3)
    until = time.monotonic() + SECONDS
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    assert os.WEXITSTATUS(status) == 0 and os.WIFEXITED(status)
    store.close()


def test_a_thread_that_can_not_start_leaves_its_tasks_to_waits(monkeypatch, caplog):
    with local([(50_000,)]) as store:
        array = np.ones(50_000, np.float32)

        def refuse(self):
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            store.push(array, 0, 0)
            store.pull_req(array, 0, 0)
        store.pull_wait(0, 0, SECONDS)
        assert "can't start" in caplog.text
    assert (array == 1).all()
