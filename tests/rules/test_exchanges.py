"""Exchanges between the ranks of a rule."""

import os
from types import SimpleNamespace

import cloudpickle
import numpy as np
import pytest
import theano
from support.groups import run

from synkhronos import _host
from synkhronos.comm import nccl
from synkhronos.parameter_server import weight_files
from synkhronos.parameter_server.remote.keeping import Keeper
from synkhronos.rules import served
from synkhronos.rules.asgd import Downpour
from synkhronos.rules.bsp import Sums, swap
from synkhronos.rules.device_sums import GroupSums
from synkhronos.rules.easgd import Center
from synkhronos.rules.job import Interrupt
from synkhronos.rules.model_variables import Flat


def halves(group):
    """Return what ranks with numbers in 16 and 32 bits have after each exchange."""
    found = []
    for strategy in ("ar", "asa32"):
        w = theano.shared(np.float16([1 if group.rank else 2048, 7]), "w")
        v = theano.shared(np.full(2, group.rank, np.float32), "v")
        Sums(group, strategy, [w, v], [w, v]).compute(1)
        found.append((w.get_value().dtype.name, w.get_value().tolist(), v.get_value().tolist()))
    return found


def test_float16_is_summed_in_float32_and_rounded_once():
    assert run(3, halves) == [[("float16", [2050.0, 21.0], [3.0, 3.0])] * 2] * 3


def device_sums(group):
    """Return sums of a rank's arrays as NCCL computes them, with arrays of NumPy for devices."""

    class Member:
        def all_reduce(self, value, op, out):
            assert op == "+" and value.dtype == out.dtype
            out[...] = sum(group.all_gather(value))

    nccl.group_id = lambda number=b"new": SimpleNamespace(comm_id=bytearray(number))
    nccl.member = lambda group_id, size, rank: Member() if group_id.comm_id == b"new" else None
    _host.empty_like, _host.to_device = np.empty_like, np.asarray
    _host.scale_on_device = lambda value, weight: np.multiply(value, weight, out=value)
    own = np.float32([1e5 * (1 + group.rank), 0.5, 0])
    found = [GroupSums(group, is_half)(own, 0.5).tolist() for is_half in (False, True)]
    return found, own.tolist()


def test_sums_of_devices():
    """In 16 bits they are scaled so that none overflows."""
    for rank, ((exact, rounded), own) in enumerate(run(3, device_sums)):
        assert exact == [3e5, 0.75, 0] and own == [1e5 * (1 + rank), 0.5, 0]
        assert rounded[0] == pytest.approx(3e5, rel=1e-3) and rounded[2] == 0


@pytest.mark.parametrize("size", [2, 4])
def test_pairs_swap_their_values(size):
    def exchange(group):
        w = theano.shared(np.full(50_000, group.rank, np.float32), "w")
        swap(group, Flat([w]), group.rank ^ 1)
        return np.unique(w.get_value()).tolist()

    assert run(size, exchange) == [[rank ^ 1] for rank in range(size)]


def test_a_child_of_a_rank_writes_into_its_own_values():
    """A process that a model forks has its own values of the model's variables."""

    def fork(group):
        w = theano.shared(np.zeros(3), "w")
        flat = Flat([w], allocate=group.allocate)
        flat.read()
        flat.write()
        pid = os.fork()
        if pid == 0:
            w.get_value(borrow=True)[...] = 1.0
            os._exit(int(w.get_value().sum()))
        return os.waitpid(pid, 0)[1] >> 8, w.get_value().tolist()

    assert run(2, fork) == [(3, [0.0, 0.0, 0.0])] * 2


@pytest.mark.parametrize("updater", [Center(0.25), Downpour(0.1), Downpour(None)])
def test_updaters_of_rules_work_on_a_server_of_a_store(updater):
    """Each worker pulls, and pushes next: what it pulls is what the push before has left."""
    pulled, name = [], "w"
    keeper = Keeper(0, 1, 2, lambda *answer: pulled.append(answer[4].copy()), pytest.fail)
    keeper.mode = "dist_async"
    for worker in range(2):
        keeper.on_updater(worker, cloudpickle.dumps(updater), {})
        keeper.on_key(worker, 0, name, (3,), "float32", "sum", False)
        keeper.on_begun(worker)
    center, squares = np.zeros(3, "f4"), np.zeros(3, "f4")
    for version, pushed in enumerate(np.float32([[4, 0, 8], [1, 2, 3], [0, 5, 0]]), 1):
        for worker in range(2):
            keeper.on_request(worker, 0, version - 1, 0)
            np.testing.assert_array_equal(pulled.pop(), center)
            keeper.place(worker, 0, version, 0, pushed.nbytes)[...] = pushed
            keeper.arrived(worker, 0, version, pushed.nbytes)
            if isinstance(updater, Center):
                center += np.float32(0.25) * (pushed - center)
            elif updater.gamma is None:
                center += pushed
            else:
                squares += pushed * pushed
                tiny = np.finfo("f4").tiny
                center += np.float32(0.1) * pushed / np.sqrt(np.maximum(squares, tiny))
    again = cloudpickle.loads(cloudpickle.dumps(updater))
    again.init_model(name, np.zeros(3, "f4"))
    weight_files.restore(again, keeper.states())
    expected = {name: {"squares": squares.tolist()}} if squares.any() else {}
    found = {key: {k: v.tolist() for k, v in each.items()} for key, each in again.states().items()}
    assert found == expected
    if expected:
        with pytest.raises(ValueError, match="the states must be of the shapes"):
            again.set_states({name: {"squares": np.zeros(2, "f4")}})


def test_stale_updates_are_divided():
    """By 1 + the updates of others since their worker took the weights: Zhang et al. 2016."""
    sent: dict[int, list] = {1: [], 2: [], 3: []}
    group = SimpleNamespace(size=4, send=lambda to, said: sent[to].append(said.weights[0].copy()))
    server = served.Server(None, group, Downpour(None), Interrupt(), divides_stale=True)
    alike, first = {"n_epochs": 100}, np.float32([0.0, 8.0])
    for rank in (1, 2, 3):
        server._n_batches = 1_000
        server._on_first(rank, alike, [first], [], 0)
    expected, update = first.copy(), np.float32([6.0, -6.0])
    for rank, staleness in [(1, 0), (2, 1), (1, 1), (3, 3), (3, 0), (2, 3)]:
        server._on_exchange(rank, 1, 1_000, [update], [])
        expected += update / np.float32(1 + staleness)
        np.testing.assert_array_equal(sent[rank][-1], expected)
