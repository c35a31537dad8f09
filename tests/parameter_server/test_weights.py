"""Weights in the store: update_on_server, test_on_server, and initial weights."""

import threading

import numpy as np
import pytest
from support.parameter_server import SECONDS, local, on_threads, pull
from support.threads import in_thread

from synkhronos import parameter_server as ps


class Adds(ps.Updater):
    """Fills weights with 100, adds gradients, and counts its calls."""

    def __init__(self):
        self.calls = []

    def init_updater(self, rank, parameters):
        super().init_updater(rank, parameters)
        self.calls.append(("init_updater", rank))

    def init_model(self, key, weight):
        super().init_model(key, weight)
        self.calls.append(("init_model", key))
        weight[...] = 100

    def update(self, key, gradient):
        self.calls.append(("update", key))
        self.weights[key] += gradient


def test_the_first_pull_returns_the_initial_weight_without_any_push():
    updater = Adds()
    with local([(2,)], [0, 1], updater, update_on_server="1") as store:
        out = pull(store, np.zeros(2, np.float32), 0, 0)
        assert (out == 100).all()
        assert updater.parameters == {"update_on_server": "1"}


def test_init_model_is_called_once_for_a_key():
    """In mshadow-ps each device's InitKey called it again."""
    updater = Adds()
    with local([], [0, 1, 2], updater) as store:
        on_threads([0, 1, 2], lambda device: store.init_key((2,), 0, device))
        assert updater.calls == [("init_updater", 0), ("init_model", 0)]


def test_a_late_init_key_does_not_release_a_pull_with_the_old_weight():
    """In mshadow-ps it did: a device got 100 instead of 103."""
    with local([], [0, 1], Adds()) as store:
        store.init_key((1,), 0, 0)
        array = np.ones(1, np.float32)
        store.push(array, 0, 0)
        store.pull_req(array, 0, 0)
        store.init_key((1,), 0, 1)
        with pytest.raises(ps.RoundTimeout):
            store.pull_wait(0, 0, timeout=0.1)
        store.push(2 * np.ones(1, np.float32), 0, 1)
        store.pull_wait(0, 0, SECONDS)
        assert array[0] == 103


def test_init_key_never_waits_for_other_devices():
    updater = Adds()
    store = local([], [0, 1], updater)
    is_there, may_go = threading.Event(), threading.Event()
    fill = updater.init_model

    def slow(key, weight):
        is_there.set()
        assert may_go.wait(SECONDS)
        fill(key, weight)

    updater.init_model = slow
    with store:
        first = in_thread(store.init_key, (1,), 0, 0)
        assert is_there.wait(SECONDS)
        store.init_key((1,), 0, 1)
        out = np.zeros(1, np.float32)
        store.pull_req(out, 0, 1)
        may_go.set()
        store.pull_wait(0, 1, SECONDS)
        first.result(SECONDS)
        assert out[0] == 100


@pytest.mark.parametrize("size", [2, 50_000])
def test_a_pull_returns_the_weight_after_exactly_one_update_a_round(size):
    updater = Adds()
    with local([(size,)], [0, 1, 2], updater, bigarray_bound=1000) as store:

        def train(device):
            seen = []
            array = np.zeros(size, np.float32)
            for _ in range(5):
                array[:] = device + 1
                store.push(array, 0, device)
                pull(store, array, 0, device)
                assert (array == array[0]).all()
                seen.append(array[0])
            return seen

        for seen in on_threads([0, 1, 2], train).values():
            assert seen == [106, 112, 118, 124, 130]
    assert updater.calls.count(("update", 0)) == 5


def test_an_initial_weight_of_the_first_device_counts():
    with ps.create("local", devices=[0, 1]) as store:
        for device in (0, 1):
            store.init_key((2,), 0, device, weight=np.full(2, device + 5, np.float32))
        out = pull(store, np.zeros(2, np.float32), 0, 1)
        assert (out == 5).all()
        with pytest.raises(ValueError, match="weight of key 1 must have shape"):
            store.init_key((3,), 1, 0, weight=np.zeros(2, np.float32))


def test_test_on_server_returns_sums_and_compares_weights():
    with local([(3,)], [0, 1], Adds(), test_on_server=1) as store:
        mine = np.array([1, 2, 3], np.float32)
        store.set_weight(mine, 0, 0)
        array = np.ones(3, np.float32)
        store.push(array, 0, 0)
        store.push(array.copy(), 0, 1)
        pull(store, array, 0, 0)
        assert (array == 2).all()
        mine += array
        assert store.check_weight(mine, 0, 0) == 0
        mine[1] += 1
        with pytest.raises(
            ps.WeightsDiffer, match=r"key 0, device 0.*element 1: 5\.0 and 4\.0"
        ) as e:
            store.check_weight(mine, 0, 0)
        assert e.value.error == pytest.approx(1 / 12)
        mine[1] = np.nan
        with pytest.raises(ps.WeightsDiffer):
            store.check_weight(mine, 0, 0)


def test_a_callback_gets_the_array_that_was_given():
    import theano

    with local([(2, 3, 4)]) as store:
        variable = theano.shared(np.zeros((6, 4), np.float32))
        memory = np.zeros((6, 4), np.float32).view(np.memmap)
        given = []
        store.push(theano.shared(np.ones((6, 4), np.float32)), 0, 0)
        for array in (variable, memory):
            store.pull_req(array, 0, 0, callback=given.append)
            store.pull_wait(0, 0, SECONDS)
        assert given[0] is variable and given[1] is memory
        assert variable.get_value().shape == (6, 4) and (variable.get_value() == 1).all()
        assert (memory == 1).all()


def test_complex_weights_are_compared():
    with local([(2,)], [0], Adds(), dtype=np.complex64, test_on_server=1) as store:
        value = np.array([1 + 2j, 3j], np.complex64)
        store.set_weight(value, 0, 0)
        assert store.check_weight(value, 0, 0) == 0
        with pytest.raises(ps.WeightsDiffer):
            store.check_weight(value.conj(), 0, 0)
