"""Rounds: one push of each device, in a fixed order of summation, and pulls of their results."""

import itertools
import threading

import numpy as np
import pytest
from support.parameter_server import SECONDS, local, on_threads, pull

from synkhronos import parameter_server as ps


def arrays_of(devices, size, dtype, seed=0):
    rng = np.random.RandomState(seed)
    return {d: (100 * rng.standard_normal(size)).astype(dtype) for d in devices}


def reduced(op, arrays, dtype):
    """Return what NumPy makes of the arrays, in order."""
    if op == "gather":
        return np.concatenate([np.atleast_2d(x) for x in arrays])
    total = arrays[0].copy()
    for each in arrays[1:]:
        total = np.maximum(total, each) if op == "max" else total + each
    return (total / len(arrays)).astype(dtype) if op == "mean" else total


@pytest.mark.parametrize("size", [0, 1, 7, 4096, 4097, 300_001])
@pytest.mark.parametrize("op", ["sum", "mean", "max", "gather"])
@pytest.mark.parametrize("devices", [[0], [3, 1], [0, 1, 2, 5]], ids=len)
@pytest.mark.sample(12)
def test_all_devices_get_the_same_bits(devices, op, size):
    parameters = {"push_op[0]": op, "bigarray_bound": 10_000}
    with local([(size,)], devices, **parameters) as store:
        for number in range(3):
            arrays = arrays_of(devices, size, np.float32, number)
            expected = reduced(op, [arrays[d] for d in devices], np.float32)

            def step(device, arrays=arrays):
                out = np.full((len(devices), size), -1, np.float32)
                out = out if op == "gather" else arrays[device].copy()
                store.push(arrays[device], 0, device)
                pull(store, out, 0, device)
                return out

            for got in on_threads(devices, step).values():
                np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "uint8", "complex64"])
def test_sums_are_in_the_dtype_of_the_key(dtype):
    with local([(3, 2)], [0, 1], dtype=dtype) as store:
        arrays = {d: np.full((3, 2), 100 + d, dtype) for d in (0, 1)}
        for d, array in arrays.items():
            store.push(array, 0, d)
        for d, array in arrays.items():
            pull(store, array, 0, d)
            np.testing.assert_array_equal(array, np.full((3, 2), 100, dtype) + np.array(101, dtype))


def test_the_order_of_summation_is_that_of_the_devices_not_of_the_pushes():
    values = {0: 1e8, 1: -1e8, 2: 1.0}  # in float32 the sum depends on the order
    expected = np.float32(values[0]) + np.float32(values[1]) + np.float32(values[2])
    for order in itertools.permutations(values):
        with local([(1,)], [0, 1, 2]) as store:
            for d in order:
                store.push(np.array([values[d]], np.float32), 0, d)
            out = pull(store, np.zeros(1, np.float32), 0, 0)
            assert out[0] == expected


@pytest.mark.parametrize("size", [3, 100_000])
def test_a_pull_pends_until_all_devices_have_pushed(size):
    with local([(size,)], [0, 1]) as store:
        a, b = np.ones(size, np.float32), np.full(size, 2, np.float32)
        pushed = store.push(a, 0, 0)
        pulled = store.pull_req(a, 0, 0)
        with pytest.raises(ps.RoundTimeout, match=r"key 0.*device 1 has not pushed") as caught:
            store.pull_wait(0, 0, timeout=0.05)
        assert isinstance(caught.value, TimeoutError)
        assert (caught.value.key, caught.value.missing) == (0, [1])
        assert not pulled.done() and not pushed.done() and a[0] == 1
        store.push(b, 0, 1)
        store.pull_wait(0, 0, SECONDS)
        assert pulled.done() and pushed.done() and (a == 3).all() and (b == 2).all()


def test_a_pull_without_a_push_gets_the_newest_round():
    with local([(2,)], [0, 1]) as store:
        for number in (1, 2, 3):  # device 1 never waits
            a = np.full(2, number, np.float32)
            store.push(a, 0, 0)
            store.push(a.copy(), 0, 1)
            pull(store, a, 0, 0)
        for _ in range(2):
            out = pull(store, np.zeros(2, np.float32), 0, 1)
            assert (out == 6).all()


def test_a_pull_before_any_push_waits_without_an_initial_weight():
    with local([(1,)]) as store:
        out = np.zeros(1, np.float32)
        store.pull_req(out, 0, 0)
        with pytest.raises(ps.RoundTimeout, match="device 0 has not pushed") as caught:
            store.pull_wait(0, 0, timeout=0.05)
        assert caught.value.missing == [0]
        store.push(np.ones(1, np.float32), 0, 0)
        store.pull_wait(0, 0, SECONDS)
        assert out[0] == 1


def test_a_wait_without_a_request_returns_at_once():
    with local([(1,)]) as store:
        store.pull_wait(0, 0)


@pytest.mark.parametrize("size", [5, 50_000])
def test_a_fast_device_may_push_while_a_slow_one_still_copies(size):
    """The result of a round is kept, beside that of the next, until all have copied it."""
    with local([(size,)], [0, 1], pull_thread="ndev") as store:
        store.init_key((1,), 9, 1)
        store.init_key((1,), 9, 0)
        outs, gate, there = [], threading.Event(), threading.Event()

        def hold():
            there.set()
            assert gate.wait(SECONDS)

        for d in (0, 1):
            store.push(np.zeros(1, np.float32), 9, d)
        store.pull_req(np.zeros(1, np.float32), 9, 1, callback=hold)
        assert there.wait(SECONDS)
        slow = np.zeros(size, np.float32)
        for number in (1, 2, 3):
            for d in (0, 1):
                store.push(np.full(size, number, np.float32), 0, d)
            out = pull(store, np.zeros(size, np.float32), 0, 0)
            outs.append(out[-1])
            if number == 1:  # queued behind the callback that holds device 1 up
                store.pull_req(slow, 0, 1)
        assert outs == [2, 4, 6]
        gate.set()
        store.pull_wait(0, 1, SECONDS)
        assert (slow == 2).all()


def test_arrays_of_another_shape_with_the_same_plane_are_taken():
    with local([(2, 3, 4)], [0, 1]) as store:
        store.push(np.ones((2, 3, 4), np.float32), 0, 0)
        store.push(np.ones((6, 4), np.float32), 0, 1)
        out = pull(store, np.zeros((6, 4), np.float32), 0, 0)
        assert (out == 2).all()


@pytest.mark.parametrize("length", [40, 40_000])
def test_arrays_that_are_not_contiguous_are_read_and_written_in_place(length):
    with local([(2, length)], [0, 1]) as store:
        rng = np.random.RandomState(1)
        a = rng.rand(length, 2).astype(np.float32).T
        b = rng.rand(2, 2 * length).astype(np.float32)[:, ::2]
        expected = a + b
        base = b.base.copy()
        store.push(a, 0, 0)
        store.push(b, 0, 1)
        store.pull_req(a, 0, 0)
        store.pull_req(b, 0, 1)
        store.pull_wait(0, 0, SECONDS)
        store.pull_wait(0, 1, SECONDS)
        np.testing.assert_array_equal(a, expected)
        np.testing.assert_array_equal(b, expected)
        np.testing.assert_array_equal(b.base[:, 1::2], base[:, 1::2])


@pytest.mark.parametrize("shift", [0, 1, 100])
def test_a_pull_into_memory_of_another_push_is_exact(shift):
    """A large result is written block by block while parts are read: not over what is unread."""
    size = 200_000
    memory = np.random.RandomState(2).rand(2 * size + shift).astype(np.float32)
    a, b = memory[:size], memory[size : 2 * size]
    expected = a + b
    into = memory[size - shift : 2 * size - shift]
    with local([(size,)], [0, 1], bigarray_bound=1) as store:
        store.push(a, 0, 0)
        store.pull_req(into, 0, 0)
        store.push(b, 0, 1)
        store.pull_wait(0, 0, SECONDS)
        np.testing.assert_array_equal(into, expected)
