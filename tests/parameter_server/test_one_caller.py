"""KVStore's face: one caller, lists of arrays, str and int keys, futures."""

import numpy as np
import pytest
from support.parameter_server import SECONDS, Held

from synkhronos import parameter_server as ps
from synkhronos.extensions import update_rules

pytestmark = pytest.mark.usefixtures("quickly_compiled")


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def subtract(key, gradient, weight):
    weight -= gradient


def test_a_pull_before_any_push_returns_the_value_of_init():
    with ps.create("local") as store:
        value = 2 * ones(2, 3)
        store.init(3, value)
        value[:] = 0  # it was copied
        out = ones(2, 3)
        assert store.pull(3, out).wait(SECONDS) is None
        assert (out == 2).all()
        assert (store.pull(3).wait() == 2).all()


def test_a_push_replaces_the_value_by_the_sum_and_does_not_add_it():
    with ps.create("local") as store:
        store.init("w", ones(2))
        for _ in range(2):
            store.push("w", [ones(2), 2 * ones(2)])
            assert (store.pull("w").wait() == 3).all()
        store.push("w", 7 * ones(2))  # one array is enough
        assert (store.pull("w").wait() == 7).all()


@pytest.mark.parametrize("size", [3, 30_000, 1_500_000])
def test_pushpull_is_in_place_or_into_out(size):
    with ps.create("local") as store:
        store.init(0, ones(size))
        a, b = 2 * ones(size), 3 * ones(size)
        store.pushpull(0, [a, b]).wait(SECONDS)
        assert (a == 5).all() and (b == 5).all()
        outs = [np.zeros(size, np.float32) for _ in range(3)]
        store.pushpull(0, [a, b], out=outs).wait(SECONDS)
        assert all((out == 10).all() for out in outs) and (a == 5).all()


def test_lists_of_keys():
    with ps.create("local") as store:
        keys = ["a", 5, "b"]
        store.init(keys, [ones(1), ones(2), ones(3)])
        assert store.keys == keys
        store.push(keys, [[ones(1)] * 2, [ones(2)] * 3, ones(3)])
        outs = [np.zeros(n, np.float32) for n in (1, 2, 3)]
        assert store.pull(keys, outs).wait(SECONDS) == [None] * 3
        assert [out.tolist() for out in outs] == [[2], [3, 3], [1, 1, 1]]
        future = store.pushpull(keys, outs)
        assert future.exception(SECONDS) is None and future.done()
        assert [v.tolist() for v in store.pull(keys).wait()] == [[2], [3, 3], [1, 1, 1]]


def test_names_of_arguments_are_those_of_kvstore():
    with ps.create("local") as store:
        store.init(key="w", value=ones(2))
        store.push(key="w", value=[ones(2), ones(2)], priority=-1)
        out = ones(2)
        store.pull(key="w", out=out, priority=-1, ignore_sparse=True).wait()
        assert (out == 2).all()
        store.broadcast("v", 3 * ones(1), [out[:1], out[1:]])
        assert (out == 3).all()


def test_an_updater_gets_key_sum_and_weight():
    calls = []

    def update(key, gradient, weight):
        calls.append((key, gradient.tolist(), weight.tolist()))
        weight += 10 * gradient

    with ps.create("local") as store:
        store.set_updater(update)
        store.init("w", ones(2))
        assert (store.pull("w").wait() == 1).all()
        store.push("w", [ones(2), ones(2)])
        assert (store.pull("w").wait() == 21).all()
    assert calls == [("w", [2, 2], [1, 1])]


@pytest.mark.parametrize("rule", ["sgd", "momentum", "adam"])
def test_an_optimizer_equals_the_rule_in_serial_theano(rule):
    import theano

    rng = np.random.RandomState(0)
    weight = theano.shared(np.ones((3, 2)), "weight")
    gradient = theano.shared(np.zeros((3, 2)), "gradient")
    updates = getattr(update_rules, rule)([gradient], [weight], learning_rate=0.1)
    step = theano.function([], updates=updates, mode="FAST_COMPILE")
    with ps.create("local") as store:
        store.set_optimizer(getattr(update_rules, rule), learning_rate=0.1)
        store.init("w", np.ones((3, 2)))
        for _ in range(4):
            parts = [rng.randn(3, 2) for _ in range(2)]
            gradient.set_value(parts[0] + parts[1])
            step()
            store.push("w", parts)
            np.testing.assert_allclose(store.pull("w").wait(), weight.get_value(), rtol=1e-12)


def test_states_and_weights_are_saved_with_all_pushes_before_and_loaded(tmp_path):
    def push(store, n):
        for _ in range(n):
            store.push("w", [np.full(2, 1.0), np.full(2, 2.0)])

    def made():
        store = ps.create("local")
        store.set_optimizer(update_rules.momentum, learning_rate=0.1)
        return store

    with made() as store:
        store.init("w", np.zeros(2))
        push(store, 3)
        store.save_optimizer_states(tmp_path / "states.npz")
        store.save_weights(tmp_path / "weights.npz")
        push(store, 2)
        expected = store.pull("w").wait()
    with made() as store:
        store.load_weights(tmp_path / "weights.npz")
        store.load_optimizer_states(tmp_path / "states.npz")
        push(store, 2)
        np.testing.assert_array_equal(store.pull("w").wait(), expected)


def test_both_faces_are_one_store():
    with ps.create("local", devices=[0, 1]) as store:
        store.init("w", np.zeros(2, np.float32))
        array = ones(2)
        store.push(array, "w", 0)
        store.push(array.copy(), "w", 1)
        assert (store.pull("w").wait(SECONDS) == 2).all()
        store.push("w", [5 * ones(2)])
        store.pull_req(array, "w", 1)
        store.pull_wait("w", 1, SECONDS)
        assert (array == 5).all()


def test_properties():
    with ps.create("local", devices=[3]) as store:
        assert (store.type, store.devices, store.rank) == ("local", [3], 0)
        assert (store.num_workers, store.num_servers) == (1, 0)
        store.barrier()
        assert "local" in repr(store)


def test_lists_are_pushed_as_a_whole_or_not_at_all():
    with ps.create("local", devices=[0, 1]) as store:
        store.init(["a", "b"], [ones(1), ones(1)])
        store.push(ones(1), "b", 0)
        for call in (store.push, store.pushpull):
            with pytest.raises(ps.OutOfTurn, match="key 'b' is open"):
                call(["a", "b"], [5 * ones(1), ones(1)])
        assert store.pull("a").wait() == 1
        store.set_param("push_op[d]", "mean")
        with pytest.raises(TypeError, match="mean"):
            store.init(["c", "d"], [ones(1), np.ones(1, int)])
        assert store.keys == ["a", "b"]


def test_what_is_gathered_has_a_shape_and_no_value(tmp_path):
    with ps.create("local", devices=[0, 1]) as store:
        store.set_param("push_op[g]", "gather")
        store.init("g", ones(1, 3))
        store.push("g", [ones(1, 3), 2 * ones(1, 3)])
        assert store.pull("g").wait(SECONDS).tolist() == [[1, 1, 1], [2, 2, 2]]
        with pytest.raises(ValueError, match="key 'g' has no value to save"):
            store.save_weights(tmp_path / "w.npz")


def test_a_key_without_a_value_is_not_saved(tmp_path):
    with ps.create("local", devices=[0]) as store:
        store.init_key((2,), 0, 0)
        with pytest.raises(ValueError, match="key 0 has no value to save: no round"):
            store.save_weights(tmp_path / "w.npz")


def test_an_updater_serves_one_store():
    updater = ps.function_updater(lambda key, gradient, weight: None)
    with ps.create("local") as one, ps.create("local") as other:
        one.set_updater(updater)
        with pytest.raises(ValueError, match="belongs to another store"):
            other.set_updater(updater)


def test_an_updater_that_puts_another_array_in_place_of_the_weight_is_told():
    class Assigns(ps.Updater):
        def update(self, key, gradient):
            self.weights[key] = self.weights[key] - gradient

    with ps.create("local") as store:
        store.set_updater(Assigns())
        store.init("w", ones(2))
        store.push("w", ones(2))
        with pytest.raises(ps.CallbackFailed, match=r"has assigned self.weights\['w'\]"):
            store.pull("w").wait()


def test_a_mean_of_halves_is_computed_in_single_precision():
    with ps.create("local") as store:
        store.set_param("push_op[w]", "mean")
        store.init("w", np.zeros(2, np.float16))
        store.push("w", [np.full(2, 60000, np.float16)] * 2)
        assert (store.pull("w").wait() == 60000).all()


def test_an_updater_may_come_after_the_keys_and_before_the_first_push():
    with ps.create("local") as store:
        store.init("w", 5 * ones(2))
        store.set_optimizer(update_rules.sgd, learning_rate=0.5)
        assert (store.pull("w").wait() == 5).all()
        store.push("w", [ones(2), ones(2)])
        assert (store.pull("w").wait() == 4).all()
        with pytest.raises(ps.OutOfTurn, match="before the first push"):
            store.set_optimizer(update_rules.sgd, learning_rate=1)


@pytest.mark.parametrize("size", [1_000, 20_000, 1_500_000])
@pytest.mark.parametrize("has_updater", [False, True])
def test_memory_that_was_pushed_may_be_used_again_at_once(size, has_updater):
    """Users of KVStore do so; from 20,000 elements on the sums were of what came after."""
    with ps.create("local") as store:
        if has_updater:
            store.set_updater(subtract)
        store.init("w", np.zeros(size, np.float32))
        arrays, right = [np.empty(size, np.float32) for _ in range(2)], 0
        for number in range(5):
            for device, array in enumerate(arrays):
                array[:] = number + device
            store.push("w", arrays)
            for array in arrays:
                array[:] = -100
            right = right - (2 * number + 1) if has_updater else 2 * number + 1
            if number % 2:  # else the next push comes while this one may be at work
                assert (store.pull("w").wait(SECONDS) == right).all()
        out = np.empty(size, np.float32)
        store.pushpull("w", arrays, out)
        arrays[0][:] = arrays[1][:] = 7
        assert (store.pull("w", out).wait(SECONDS) is None) and (out == out[0]).all()
        assert out[0] == (right + 200 if has_updater else -200)


def test_pushes_wait_for_room_so_that_memory_is_bounded():
    """At most two rounds of a key are ahead of an updater that is slow."""
    held = Held()
    with ps.create("local") as store:
        store.set_updater(held)
        store.init("w", np.zeros(5_000, np.float32))
        array = ones(5_000)
        futures = [store.push("w", array) for _ in range(2)]
        assert held.is_there.wait(SECONDS) and not any(future.done() for future in futures)
        held.go_soon()
        for _ in range(8):
            futures.append(store.push("w", array))
            assert sum(not future.done() for future in futures) <= 2
        assert (store.pull("w").wait(SECONDS) == 10).all()
        assert len(store._keys["w"].spare) <= 3


def test_gathered_arrays_may_be_used_again_at_once():
    with ps.create("local", devices=[0, 1], **{"push_op[0]": "gather"}) as store:
        for device in (0, 1):
            store.init_key((2, 30_000), 0, device)
        arrays = [device + ones(2, 30_000) for device in (0, 1)]
        for _ in range(3):
            store.push(0, arrays)
        for array in arrays:
            array[:] = 0
        found = store.pull(0).wait(SECONDS)
        assert (found[:2] == 1).all() and (found[2:] == 2).all()
