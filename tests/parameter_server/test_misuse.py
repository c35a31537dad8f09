"""Misuse: an error in the caller's thread that names what is wrong, and a store that goes on."""

import contextlib
import threading
import time

import numpy as np
import pytest
from support.parameter_server import SECONDS, blocked, local, on_threads
from support.threads import in_thread

from synkhronos import parameter_server as ps
from synkhronos.parameter_server import engine
from synkhronos.parameter_server.reductions import names


@pytest.fixture
def store():
    with local([(2, 3), (5,)], [0, 4]) as made:
        yield made
        for d in (0, 4):  # it goes on
            made.push(np.ones((2, 3), np.float32), 0, d)
        out = np.zeros((2, 3), np.float32)
        made.pull_req(out, 0, 0)
        made.pull_wait(0, 0, SECONDS)
        assert (out == 2).all()


ONES = np.ones((2, 3), np.float32)
READ_ONLY = ONES.copy()
READ_ONLY.flags.writeable = False


class AnUpdater(ps.Updater):
    """Does nothing."""


MISUSES = {
    "arguments swapped": (
        lambda s: s.push(0, ONES, 4, 7),
        TypeError,
        "takes an array, a key, a device and a priority; or",
    ),
    "an array and a value": (lambda s: s.push(ONES, 0, 0, value=ONES), TypeError, "no value"),
    "class for an updater": (lambda s: s.set_updater(AnUpdater), TypeError, r"write AnUpdater\(\)"),
    "key without a value": (lambda s: s.init("w"), TypeError, "a key needs a value"),
    "one number for two arrays": (lambda s: s.push([0, 1], 3), TypeError, "got 3"),
    "read-only out": (lambda s: s.pull(0, READ_ONLY), ValueError, "read-only"),
    "unknown parameter, late": (lambda s: s.set_param("bogus", 3), ValueError, "no parameter"),
    "array for a flag": (
        lambda s: s.set_param("update_on_server", ONES),
        ValueError,
        "must be 0 or 1",
    ),
    "out of another shape": (
        lambda s: s.broadcast("b", ONES, ONES[:1].copy()),
        ValueError,
        "out of key 'b' must have shape",
    ),
    "bools": (lambda s: s.init_key((2,), 5, 0, dtype=bool), TypeError, "must be one of numbers"),
    "timeout of close": (lambda s: s.close(timeout="1"), TypeError, "timeout must be a number"),
    "unknown key": (lambda s: s.push(ONES, 7, 0), ValueError, "no key 7: call init_key"),
    "unknown key, pull": (lambda s: s.pull_req(ONES, "w", 0), ValueError, "no key 'w'"),
    "unknown key, wait": (lambda s: s.pull_wait(7, 0), ValueError, "no key 7"),
    "unknown device": (lambda s: s.push(ONES, 0, 1), ValueError, r"devid 1 is none.*\[0, 4\]"),
    "no device": (lambda s: s.push(ONES, 0), TypeError, "devid must be an integer, got None"),
    "negative device": (lambda s: s.pull_wait(0, -1), ValueError, "devid must be at least 0"),
    "list as key": (lambda s: s.pull_wait([0], 0), TypeError, r"key must be an int or a str"),
    "bool as key": (lambda s: s.init_key((2,), True, 0), TypeError, "key must be an int or a str"),
    "shape": (
        lambda s: s.push(np.ones((3, 2), np.float32), 0, 0),
        ValueError,
        r"push of device 0: key 0 takes arrays of shape \(2, 3\), but the array has \(3, 2\)",
    ),
    "shape of the pull": (
        lambda s: s.pull_req(np.ones(4, np.float32), 1, 0),
        ValueError,
        r"pull_req of device 0: key 1 takes arrays of shape \(5,\), but the array has \(4,\)",
    ),
    "dtype": (lambda s: s.push(np.ones((2, 3)), 0, 0), TypeError, "has float32.*has float64"),
    "read-only": (lambda s: s.pull_req(READ_ONLY, 0, 0), ValueError, "read-only"),
    "list for an array": (
        lambda s: s.push([[1, 2, 3]] * 2, 0, 0),
        TypeError,
        "array must be an array of NumPy.*got \\[\\[1, 2, 3",
    ),
    "None for an array": (lambda s: s.pull_req(None, 0, 0), TypeError, "array must be an array"),
    "priority": (lambda s: s.push(ONES, 0, 0, "high"), TypeError, "priority must be an integer"),
    "callback": (lambda s: s.pull_req(ONES, 0, 0, callback=3), TypeError, "must be callable"),
    "callback's arguments": (
        lambda s: s.pull_req(ONES, 0, 0, callback=lambda a, b: None),
        TypeError,
        "callback must take no argument, or the array",
    ),
    "timeout": (lambda s: s.pull_wait(0, 0, timeout="1"), TypeError, "timeout must be a number"),
    "negative timeout": (lambda s: s.pull_wait(0, 0, -1), ValueError, "must not be negative"),
    "init twice": (lambda s: s.init([0, 4]), ps.OutOfTurn, r"before, with devices \[0, 4\]"),
    "parameter too late": (
        lambda s: s.set_param("reduce_thread", 1),
        ps.OutOfTurn,
        "must come before init",
    ),
    "operation too late": (
        lambda s: s.set_param("push_op[0]", "max"),
        ps.OutOfTurn,
        "key 0 has been made",
    ),
    "another shape for a key": (
        lambda s: s.init_key((3, 2), 0, 0),
        ValueError,
        r"key 0 has shape \(2, 3\) and float32, but device 0 gives shape \(3, 2\)",
    ),
    "another dtype for a key": (
        lambda s: s.init_key((2, 3), 0, 0, dtype="float64"),
        ValueError,
        "but device 0 gives.*float64",
    ),
    "dtype without numbers": (lambda s: s.init_key((2,), 5, 0, dtype=object), TypeError, "dtype"),
    "negative length": (lambda s: s.init_key((-1,), 5, 0), ValueError, "no negative lengths"),
    "value twice": (lambda s: s.init(0, np.ones(2)), ValueError, "key 0 is there already"),
    "keys without values": (lambda s: s.init([7, 8], [ONES]), ValueError, "each of the 2 keys"),
    "key twice": (lambda s: s.init([7, 7], [ONES, ONES]), ValueError, "each key once"),
    "no arrays": (lambda s: s.push(0, []), ValueError, "at least one array"),
    "parts of another shape": (
        lambda s: s.push(0, [ONES, np.ones(2, np.float32)]),
        ValueError,
        r"value: key 0 takes arrays of shape \(2, 3\)",
    ),
    "states without an updater": (
        lambda s: s.save_optimizer_states("nowhere"),
        ps.OutOfTurn,
        "set_optimizer",
    ),
    "check without the mode": (
        lambda s: s.check_weight(ONES, 0, 0),
        ps.OutOfTurn,
        "test_on_server",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_refused_and_changes_nothing(store, name):
    call, kind, words = MISUSES[name]
    with pytest.raises(kind, match=words):
        call(store)


def test_a_second_push_in_a_round_names_the_devices_that_are_missing(store):
    first = store.push(ONES.copy(), 0, 0)
    with pytest.raises(ps.OutOfTurn, match=r"device 0 has pushed key 0 already in round 1, in wh"):
        store.push(ONES.copy(), 0, 0)
    with pytest.raises(ps.OutOfTurn, match=r"a round of key 0 is open.*device 4 has"):
        store.push(0, [ONES, ONES])
    store.push(ONES, 0, 4)
    first.wait(SECONDS)


def test_a_second_pull_while_one_waits_is_refused(store):
    out = ONES.copy()
    store.push(ONES.copy(), 0, 0)
    store.pull_req(out, 0, 0)
    with pytest.raises(ps.OutOfTurn, match="device 0 waits for a pull of key 0 already"):
        store.pull_req(ONES.copy(), 0, 0)
    store.push(ONES.copy(), 0, 4)
    store.pull_wait(0, 0, SECONDS)
    assert (out == 2).all()


def test_a_device_that_has_not_made_the_key_is_told():
    with ps.create("local", devices=[0, 1]) as store:
        store.init_key((2,), 0, 0)
        with pytest.raises(ValueError, match="device 1 has not called init_key for key 0"):
            store.push(np.ones(2, np.float32), 0, 1)


@pytest.mark.parametrize(
    "devices, kind, words",
    [
        ([3, 3], ValueError, "a round would wait for ever for the second device 3"),
        ([], ValueError, "at least one device"),
        ([-1], ValueError, "at least 0"),
        (["0"], TypeError, "a device must be an integer"),
        ("01", TypeError, "must be a list of integers"),
        (2, TypeError, "must be a list of integers"),
    ],
)
def test_lists_of_devices_are_checked(devices, kind, words):
    """In mshadow-ps {3, 3} was taken, and the first round never closed."""
    with pytest.raises(kind, match=words):
        ps.create("local", devices=devices)


@pytest.mark.parametrize(
    "kind, words",
    [
        ("foo", "no kind 'foo'. *There are local, dist_async, dist_sync"),
        ("locl", 'perhaps you meant "local"'),
        ("dist", 'perhaps you meant "dist_async"'),
        ("nccl", 'perhaps you meant "local"'),
        ("dist_device_sync", 'perhaps you meant "dist_sync"'),
    ],
)
def test_unknown_kinds_are_refused(kind, words):
    with pytest.raises(ValueError, match=words.replace("'. *", "': ")):
        ps.create(kind)


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("push_op[0]", "median", f"one of {', '.join(names())}, got"),
        ("push_opp[0]", "sum", r"perhaps you meant push_op\[0\]"),
        ("update_on_servr", 1, "perhaps you meant update_on_server"),
        ("pull_at_backend", 1, "there is no parameter 'pull_at_backend'"),
        ("update_on_server", 2, "must be 0 or 1"),
        ("push_thread", "two", '"ndev" or "one"'),
        ("bigarray_bound", 0, "at least 1"),
        ("reduce_thread", -1, "at least 0"),
    ],
)
def test_parameters_are_checked(name, value, words):
    store = ps.create("local")
    with pytest.raises(ValueError, match=words):
        store.set_param(name, value)


@pytest.mark.parametrize("name", ["update_on_server", "test_on_server"])
def test_modes_that_need_an_updater_say_so(name):
    with ps.create("local", devices=[0], **{name: "1"}) as store:
        with pytest.raises(ps.OutOfTurn, match="need an updater"):
            store.init_key((2,), 0, 0)
        store.set_updater(lambda key, gradient, weight: None)
        store.init_key((2,), 0, 0)


def test_gather_with_an_updater_is_refused_not_ignored():
    store = ps.create("local")
    store.set_param("push_op[0]", "gather")
    store.set_updater(lambda key, gradient, weight: None)
    store.init([0])
    with pytest.raises(ValueError, match="can't be gather with an updater"):
        store.init_key((2,), 0, 0)
    assert store.keys == []
    store.close()


def test_integers_have_no_mean():
    with ps.create("local", devices=[0]) as store:
        store.set_param("push_op[0]", "mean")
        with pytest.raises(TypeError, match="int64 can't be reduced by mean"):
            store.init_key((2,), 0, 0, dtype="int64")


def test_the_log_names_devices_that_have_not_pushed(store, caplog, monkeypatch):
    monkeypatch.setattr(engine, "WARN_AFTER", 0.05)
    store.push(np.ones(5, np.float32), 1, 0)
    store.pull_req(np.ones(5, np.float32), 1, 0)
    with pytest.raises(ps.RoundTimeout):
        store.pull_wait(1, 0, timeout=0.5)
    warned = [r.getMessage() for r in caplog.records if r.name.startswith("synkhronos")]
    assert len(warned) == 4  # at doubling intervals
    assert all("key 1" in text and "device 4 has not pushed" in text for text in warned)


def test_close_lets_all_waits_end():
    """In mshadow-ps a delete hung, and so did the threads in PullWait."""
    store = local([(3,)], [0, 1])
    array = np.ones(3, np.float32)
    pushed = store.push(array, 0, 0)
    store.pull_req(array, 0, 0)
    waiting = in_thread(store.pull_wait, 0, 0)
    time.sleep(0.05)
    store.close()
    with pytest.raises(ps.StoreClosed, match="key 0: device 1 has not pushed"):
        waiting.result(SECONDS)
    assert isinstance(pushed.exception(1), ps.StoreClosed)
    for call in (
        lambda: store.push(array, 0, 0),
        lambda: store.pull_req(array, 0, 1),
        lambda: store.init_key((3,), 1, 0),
        lambda: store.init(3, array),
        lambda: store.pull(0),
        lambda: store.barrier(),
    ):
        with pytest.raises(ps.StoreClosed):
            call()
    store.close()  # a second time does nothing


@pytest.mark.parametrize("face", ["a device", "one caller"])
@pytest.mark.parametrize("drain", [True, False])
def test_close_drains_or_cancels_what_is_queued(drain, face):
    """In mshadow-ps queued tasks were dropped, silently."""
    store = local([(20_000,)] * 4)
    arrays = [np.ones(20_000, np.float32) for _ in range(4)]
    came, pulls = [], []
    with contextlib.suppress(ps.StoreClosed), blocked(store, 99, 0):
        for key in range(4):
            store.push(arrays[key], key, 0).wait(SECONDS)
            if face == "a device":
                pulls.append(store.pull_req(arrays[key], key, 0, callback=lambda: came.append(1)))
            else:
                pulls.append(store.pull(key))
        closing = in_thread(store.close, drain)
        time.sleep(0.1)
        assert not closing.done()
    closing.result(SECONDS)
    assert len(came) == (4 if drain and face == "a device" else 0)
    for pull in pulls:
        assert isinstance(pull.exception(1), type(None) if drain else ps.StoreClosed)


def test_close_does_not_wait_for_a_callback_for_ever():
    store = local([(1,)])
    may_go = threading.Event()
    array = np.ones(1, np.float32)
    store.push(array, 0, 0)
    store.pull_req(array, 0, 0, callback=lambda: may_go.wait(SECONDS))
    with pytest.raises(ps.RoundTimeout, match=r"key 0|callback"):
        store.close(timeout=0.2)
    may_go.set()


def test_an_exception_in_the_block_cancels_and_is_the_one_that_is_raised():
    with pytest.raises(KeyError), local([(1,)], [0, 1]) as store:
        store.push(np.ones(1, np.float32), 0, 0)
        raise KeyError
    with pytest.raises(ps.StoreClosed):
        store.push(np.ones(1, np.float32), 0, 1)


def test_threads_end_with_the_store():
    before = set(threading.enumerate())
    with local([(50_000,)], [0, 1]) as store:

        def step(device):
            array = np.ones(50_000, np.float32)
            store.push(array, 0, device)
            store.pull_req(array, 0, device, callback=lambda: None)
            store.pull_wait(0, device, SECONDS)

        on_threads([0, 1], step)
        assert set(threading.enumerate()) - before
    assert not set(threading.enumerate()) - before


def test_a_wait_that_ends_by_its_timeout_leaves_no_task_behind(store):
    """A thread that waits runs tasks; one that stops waiting hands them on."""
    store.push(np.ones((2, 3), np.float32), 0, 0)
    store.pull_req(np.ones((2, 3), np.float32), 0, 0)
    store.init_key((50_000,), 9, 0)
    store.init_key((50_000,), 9, 4)
    for _ in range(20):
        waiting = in_thread(store.pull_wait, 0, 0, 0.01)
        time.sleep(0.0095)
        futures = [store.push(np.ones(50_000, np.float32), 9, d) for d in (0, 4)]
        until = time.monotonic() + SECONDS
        while not futures[0].done():
            assert time.monotonic() < until
            time.sleep(0.001)
        with pytest.raises(ps.RoundTimeout):
            waiting.result(SECONDS)
    store.push(np.ones((2, 3), np.float32), 0, 4)
    store.pull_wait(0, 0, SECONDS)
