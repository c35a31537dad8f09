"""The keys of a server: rounds, updates and answers, without processes."""

import cloudpickle
import numpy as np
import pytest

from synkhronos.parameter_server.remote.keeping import Gone, Keeper
from synkhronos.parameter_server.updaters import Updater


class Adds(Updater):
    """Adds gradients to weights, and remembers what it was called with."""

    def __init__(self, first=0.0):
        self.first, self.calls = first, []

    def init_updater(self, rank, parameters):
        super().init_updater(rank, parameters)
        self.calls.append(("updater", rank, parameters))

    def init_model(self, key, weight):
        super().init_model(key, weight)
        self.calls.append(("model", key))
        weight[...] = self.first

    def update(self, key, gradient):
        if np.isnan(gradient).any():
            raise ArithmeticError("the gradient is no number")
        self.calls.append(("update", key, gradient.tolist()))
        self.weights[key] += gradient

    def states(self):
        return {"w": {"n": np.array(len(self.calls))}}

    def set_states(self, states):
        self.calls = [None] * int(states["w"]["n"])


class Kept:
    """A keeper of one server, whose answers are kept."""

    def __init__(self, mode, n_workers=2, updater=None, keys=(("w", 2),), op="sum", weight=None):
        self.answers = []
        self.keeper = Keeper(0, 1, n_workers, self._send, self._fail)
        self.keeper.mode = mode
        if updater is not None:
            for worker in range(n_workers):
                self.keeper.on_updater(worker, cloudpickle.dumps(updater), {"lr": "1"})
        self.dtype = "float32"
        for worker in range(n_workers):
            for number, (name, size) in enumerate(keys):
                given = weight is not None and worker == 0
                self.keeper.on_key(worker, number, name, (size,), self.dtype, op, given)
                if given:
                    self.push(0, 0, weight, number=number)

    @property
    def updater(self):
        return self.keeper._updater

    def _send(self, worker, number, version, begin, array, priority):
        self.answers.append((worker, version, array.tolist()))
        self.sent = array

    def _fail(self, worker, number, version, error):
        self.answers.append((worker, version, error[0]))
        self.error = error

    def push(self, worker, version, values, number=0):
        if version:
            self.keeper.on_begun(worker)
        values = np.array(values, self.dtype)
        for at, value in enumerate(values):  # each element is a chunk
            memory = self.keeper.place(worker, number, version, at, values.itemsize)
            memory[...] = value
            self.keeper.arrived(worker, number, version, values.itemsize)

    def pull(self, worker, version, number=0):
        """Ask for a version; return what has been answered since the last call."""
        self.keeper.on_begun(worker)
        self.keeper.on_request(worker, number, version, 0)
        return self.new()

    def new(self):
        found, self.answers = self.answers, []
        return found


def test_a_round_of_dist_sync_is_closed_by_all_workers():
    kept = Kept("dist_sync")
    kept.push(1, 1, [1, 2])
    assert kept.pull(1, 1) == []
    kept.push(0, 1, [10, 20])
    assert kept.new() == [(1, 1, [11, 22])]
    assert kept.pull(0, 1) == [(0, 1, [11, 22])]
    kept.push(0, 2, [1, 1])  # replaces what was there: KVStore without an updater
    kept.push(1, 2, [1, 1])
    assert kept.pull(0, 2) == [(0, 2, [2, 2])]


@pytest.mark.parametrize(("op", "expected"), [("sum", 9), ("mean", 3), ("max", 5)])
def test_operations_over_workers(op, expected):
    kept = Kept("dist_sync", 3, op=op)
    for worker, value in enumerate([1, 5, 3]):
        kept.push(worker, 1, [value, value])
    assert kept.pull(2, 1) == [(2, 1, [expected, expected])]


def test_sums_have_equal_bits_in_any_order_of_arrival():
    """Sums are taken in the order of workers, not of arrival."""
    values = np.float32([1e8, 1.0, -1e8])
    found = []
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        kept = Kept("dist_sync", 3, keys=[("w", 1)])
        for worker in order:
            kept.push(worker, 1, values[worker : worker + 1])
        found.append(kept.pull(0, 1)[0][2])
    assert found == [[float((values[0] + values[1]) + values[2])]] * 3


def test_a_worker_may_be_a_round_ahead():
    kept = Kept("dist_sync")
    kept.push(0, 1, [1, 1])
    kept.push(0, 2, [5, 5])
    assert kept.pull(0, 2) == []
    kept.push(1, 1, [2, 2])
    assert kept.pull(1, 1) == [(1, 1, [3, 3])]
    kept.push(1, 2, [5, 5])
    assert kept.new() == [(0, 2, [10, 10])]


def test_an_answer_does_not_change_while_it_is_sent():
    kept = Kept("dist_async", updater=Adds())
    kept.push(0, 1, [1, 1])
    kept.pull(0, 1)
    sent = kept.sent
    kept.push(1, 1, [1, 1])
    assert sent.tolist() == [1, 1]
    assert kept.pull(1, 1) == [(1, 1, [2, 2])]


def test_dist_async_applies_each_push_and_answers_with_ones_own():
    kept = Kept("dist_async", updater=Adds())
    assert kept.pull(0, 1) == []  # never before the own push
    kept.push(1, 1, [10, 10])
    assert kept.new() == []
    kept.push(0, 1, [1, 1])
    assert kept.new() == [(0, 1, [11, 11])]
    assert kept.pull(0, 0) == [(0, 0, [11, 11])]


def test_init_model_is_called_once_a_key_and_no_late_key_gets_an_old_weight():
    """In mshadow-ps each init_key ran it again, and a late one answered pulls with old weights."""
    kept = Kept("dist_sync", updater=Adds(first=100))
    for worker in range(2):
        assert kept.pull(worker, 0) == [(worker, 0, [100, 100])]
    kept.push(0, 1, [1, 1])
    kept.push(1, 1, [2, 2])
    kept.keeper.on_key(1, 5, "w", (2,), "float32", "sum", False)
    assert kept.pull(0, 1) == [(0, 1, [103, 103])]
    calls = [("updater", 0, {"lr": "1"}), ("model", "w"), ("update", "w", [3, 3])]
    assert kept.updater.calls == calls


def test_the_weight_of_worker_0_counts():
    kept = Kept("dist_sync", updater=Adds(first=100), weight=[3, 4])
    assert kept.pull(1, 0) == [(1, 0, [3, 4])]
    kept.push(0, 1, [1, 1])
    kept.push(1, 1, [1, 1])
    assert kept.pull(1, 1) == [(1, 1, [5, 6])]


def test_a_weight_stays_when_the_updater_comes_later():
    kept = Kept("dist_sync", weight=[3, 4])
    assert kept.pull(0, 0) == [(0, 0, [3, 4])]
    kept.keeper.on_updater(0, cloudpickle.dumps(Adds(first=100)), {})
    assert kept.pull(1, 0) == [(1, 0, [3, 4])]
    kept.push(0, 1, [1, 1])
    kept.push(1, 1, [1, 1])
    assert kept.pull(1, 1) == [(1, 1, [5, 6])]


def test_an_updater_that_comes_after_rounds_is_refused_and_leaves_their_results_alone():
    kept = Kept("dist_sync", 1)
    kept.push(0, 1, [3, 4])
    kept.pull(0, 1)
    sent = kept.sent
    kept.keeper.on_updater(0, cloudpickle.dumps(Adds()), {})
    kept.push(0, 2, [1, 1])
    assert kept.pull(0, 2) == [(0, 2, "OutOfTurn")]
    assert "an updater has come after the first push: call set_updater" in kept.error[1]
    assert sent.tolist() == [3, 4]


@pytest.mark.parametrize("is_first", [True, False])
def test_an_updater_that_worker_0_has_not_set_is_refused_in_all_workers(is_first):
    kept = Kept("dist_sync", 2)
    if not is_first:
        kept.push(0, 1, [1, 1])
        assert kept.pull(0, 1) == []
    kept.keeper.on_updater(1, b"", {})
    if is_first:
        assert kept.new() == []
        kept.push(0, 1, [1, 1])
        assert kept.pull(0, 1) == [(0, 1, "OutOfTurn")]
    else:
        assert kept.new() == [(0, 1, "OutOfTurn")]
    kept.push(1, 1, [1, 1])
    assert kept.pull(1, 1) == [(1, 1, "OutOfTurn")]
    assert "worker 0 has no updater, but another worker has set one" in kept.error[1]


def test_dist_async_tells_each_push_that_has_failed_once_in_a_later_pull():
    kept = Kept("dist_async", 1, Adds())
    kept.push(0, 1, [np.nan, 1])
    kept.push(0, 2, [2, 3])
    assert kept.pull(0, 2) == [(0, 2, "CallbackFailed")]
    kept.push(0, 3, [1, 1])
    assert kept.pull(0, 3) == [(0, 3, [3, 4])]
    kept.push(0, 4, [np.nan, 1])
    assert kept.pull(0, 3) == [(0, 3, [3, 4])]
    assert kept.pull(0, 4) == [(0, 4, "CallbackFailed")]
    assert kept.pull(0, 4) == [(0, 4, [3, 4])]


def test_what_a_dead_worker_has_half_pushed_is_forgotten():
    kept = Kept("dist_async", updater=Adds())
    kept.keeper.place(1, 0, 1, 0, 4)
    kept.keeper.on_gone(Gone(1, "node1", "was killed", True))
    [key] = kept.keeper._keys.values()
    assert not key.arriving


def test_others_wait_for_the_first_value_only_when_they_pull():
    kept = Kept("dist_sync", keys=())
    kept.keeper.on_key(1, 0, "w", (2,), "float32", "sum", True)
    assert kept.pull(1, 0) == []
    kept.keeper.on_key(0, 7, "w", (2,), "float32", "sum", True)
    assert kept.new() == []
    kept.push(0, 0, [1, 2], number=7)
    assert kept.new() == [(1, 0, [1, 2])]


def test_a_push_waits_for_the_updater_of_worker_0():
    kept = Kept("dist_async")
    kept.push(1, 1, [1, 1])
    kept.keeper.on_begun(1)
    assert kept.new() == []
    kept.keeper.on_updater(0, cloudpickle.dumps(Adds()), {})
    assert kept.pull(1, 1) == [(1, 1, [1, 1])]


def test_dist_async_without_an_updater_is_refused():
    """In mshadow-ps a pull without one went into memory that was never made."""
    kept = Kept("dist_async")
    kept.push(0, 1, [1, 1])
    assert kept.pull(0, 1) == [(0, 1, "ParameterServerError")]
    assert "call set_updater or set_optimizer" in kept.error[1]


@pytest.mark.parametrize("mode", ["dist_sync", "dist_async"])
def test_an_updater_that_raises_is_told_and_the_server_goes_on(mode):
    kept = Kept(mode, 1, updater=Adds())
    kept.push(0, 1, [np.nan, 1])
    assert kept.pull(0, 1) == [(0, 1, "CallbackFailed")]
    assert "ArithmeticError: the gradient is no number" in kept.error[1]
    assert "key 'w'" in kept.error[1] and "line" in kept.error[1]
    if mode == "dist_async":
        assert kept.pull(0, 1) == [(0, 1, [0, 0])]
    kept.push(0, 2, [1, 1])
    assert kept.pull(0, 2) == [(0, 2, [1, 1])]


def test_an_updater_that_puts_another_array_in_place_of_the_weight_is_told():
    class Assigns(Adds):
        def update(self, key, gradient):
            self.weights[key] = self.weights[key] + gradient

    kept = Kept("dist_async", 1, updater=Assigns())
    kept.push(0, 1, [1, 1])
    assert kept.pull(0, 1) == [(0, 1, "CallbackFailed")]
    assert "has assigned self.weights['w']" in kept.error[1]


def test_an_updater_that_can_not_be_made_is_told():
    kept = Kept("dist_async", 1)
    kept.keeper.on_updater(0, b"no pickle", {})
    kept.push(0, 1, [1, 1])
    assert kept.pull(0, 1) == [(0, 1, "CallbackFailed")]
    assert "init_updater" in kept.error[1]


@pytest.mark.parametrize(
    ("size", "dtype", "op"), [(3, "float32", "sum"), (2, "float64", "sum"), (2, "float32", "max")]
)
def test_a_key_that_differs_is_refused(size, dtype, op):
    kept = Kept("dist_sync")
    kept.keeper.on_key(1, 4, "w", (size,), dtype, op, False)
    assert kept.new() == [(1, None, "ValueError")]
    assert f"the shape ({size},), {dtype} and" in kept.error[1]
    assert "has it with (2,), float32 and 'sum'" in kept.error[1]
    assert kept.keeper.place(1, 4, 1, 0, 8) is None  # what was pushed meanwhile is dropped


@pytest.mark.parametrize("how", ["has left", "was killed by SIGKILL (signal 9)"])
def test_a_round_that_can_not_be_closed_is_told(how):
    kept = Kept("dist_sync", 3)
    kept.push(2, 1, [1, 1])
    kept.push(0, 1, [1, 1])
    assert kept.pull(0, 1) == []
    kept.keeper.on_gone(Gone(2, "node1", how, how != "has left"))
    assert kept.new() == []  # it has pushed in this round
    kept.push(1, 1, [1, 1])
    assert kept.new() == [(0, 1, [3, 3])]
    kept.push(0, 2, [1, 1])
    assert kept.pull(0, 2) == [(0, 2, "WorkerLost")]
    assert kept.error[1] == f"worker 2 on node1 {how}: round 2 of key 'w' can't be closed."
    assert kept.error[2] == {"rank": 2, "host": "node1", "reason": how}
    assert kept.pull(1, 1) == [(1, 1, [3, 3])]  # a round that was closed is still there


def test_dist_async_goes_on_without_a_worker():
    kept = Kept("dist_async", updater=Adds())
    kept.keeper.on_gone(Gone(1, "node1", "was killed", True))
    kept.push(0, 1, [1, 1])
    assert kept.pull(0, 1) == [(0, 1, [1, 1])]


@pytest.mark.parametrize("mode", ["dist_sync", "dist_async"])
def test_a_key_has_no_value_if_worker_0_has_gone_before(mode):
    kept = Kept(mode, keys=())
    kept.keeper.on_key(1, 0, "w", (2,), "float32", "sum", True)
    assert kept.pull(1, 0) == []
    kept.keeper.on_gone(Gone(0, "node0", "was killed", True))
    assert kept.new() == [(1, 0, "WorkerLost")]


def test_states_are_those_of_the_updater():
    kept = Kept("dist_async", 1, updater=Adds())
    kept.push(0, 1, [1, 1])
    states = kept.keeper.states()
    other = Kept("dist_async", 1, updater=Adds())
    other.keeper.set_states(states)
    assert len(other.updater.calls) == 3
    with pytest.raises(RuntimeError, match="no updater"):
        Kept("dist_sync").keeper.set_states(states)


def test_memory_of_pushes_is_used_again():
    kept = Kept("dist_sync", updater=Adds())
    for version in range(1, 6):
        for worker in range(2):
            kept.push(worker, version, [1, 1])
    [key] = kept.keeper._keys.values()
    assert len(key.pool) == 2 and not key.rounds and not key.arriving
