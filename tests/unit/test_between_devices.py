"""What goes between devices and what through memory, with stand-ins for devices and ranks."""

from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from synkhronos.comm import nccl
from synkhronos.comm.arrays import Arrays
from synkhronos.comm.outputs import Outputs
from synkhronos.comm.variable_collectives import Variables


class OnDevice(np.ndarray):
    """An array of which the stand-in for the host library says that it is on a device."""

    def sync(self):
        pass


def on_device(values, dtype="float32"):
    return np.array(values, dtype).view(OnDevice)


class Comm:
    """A member with one more rank, which has ones everywhere."""

    def all_reduce(self, source, op, target):
        target[...] = {"sum": np.add, "max": np.maximum}[op](source, 1)

    def broadcast(self, array, root):
        array[...] = array if root == -1 else 1

    def all_gather(self, source, target, nd_up):
        target[...] = np.concatenate([source, np.ones_like(source)])


@pytest.fixture
def worker(monkeypatch):
    variables = {1: on_device([3, 5]), 2: on_device([7])}
    host = SimpleNamespace(
        is_on_device=lambda array: isinstance(array, OnDevice),
        peek=lambda variable: variable,
        replace=lambda variable, array: replaced.append(array.tolist()),
        empty_like=np.empty_like,
        empty_on_device=lambda shape, dtype: on_device(np.empty(shape), dtype),
        scale_on_device=lambda array, factor: np.multiply(array, factor, array),
    )
    replaced = []
    monkeypatch.setattr(nccl, "_host", host)
    gate = Mock(n_ranks=2)
    gate.agree.side_effect = lambda vote: True
    gate.rows.return_value = [2, 6]
    return Mock(
        rank=0, n_ranks=2, gate=gate, devices=["cuda0", "cuda1"], is_master=True,
        variables=variables, replaced=replaced,
    )  # fmt: skip


@pytest.fixture
def devices(worker):
    devices = nccl.Nccl(worker)
    devices._comm = Comm()
    return devices


def test_variables_are_reduced_where_they_are(worker, devices):
    assert devices.reduce((1, 2), "sum", None)
    assert [each.tolist() for each in worker.variables.values()] == [[4, 6], [8]]
    assert devices.reduce((1,), "avg", 0) and worker.replaced == [[2.5, 3.5]]
    assert devices.reduce((1,), "max", 1) and len(worker.replaced) == 1
    assert devices.broadcast((1,), 0) and worker.variables[1].tolist() == [4, 6]
    assert devices.broadcast((1,), 1) and worker.variables[1].tolist() == [1, 1]
    assert devices.all_gather((2,)) and worker.replaced[-1] == [8, 1]


def test_nothing_is_done_before_all_have_joined_or_where_they_disagree(worker, devices):
    worker.gate.agree.side_effect = lambda vote: False
    arrays = [worker.variables[1]]
    done = [
        devices.reduce((1,), "sum", None),
        devices.broadcast((1,), 1),
        devices.all_gather((1,)),
        devices.exchange(arrays, ("sum",), (1, 1), arrays),
        devices.reduce_outputs(arrays, ["sum"]),
    ]
    assert not any(done)
    devices.join(None)
    worker.gate.agree.side_effect = AssertionError
    assert not devices.reduce((1,), "sum", None) and not devices.reduces("float32", 1, "sum")
    assert worker.variables[1].tolist() == [3, 5] and not worker.replaced


@pytest.mark.parametrize(
    "weights, op, expected",
    [((3, 3), "sum", 4), ((3, 3), "avg", 2), ((1, 2), "avg", 4 / 3), ((0, 2), "sum", 1)],
)
def test_arrays_are_weighed(worker, devices, weights, op, expected):
    array = on_device([3.0])
    assert devices.exchange([array, np.ones(1)], (op, op), weights, [array, None]) == [0]
    np.testing.assert_allclose(array, [expected], rtol=1e-6)


def test_a_rank_without_rows_has_no_neutral_maximum(worker, devices):
    array = on_device([3.0])
    worker.gate.agree.side_effect = lambda vote: vote != 0
    assert devices.exchange([array], ("max",), (0, 2), [array]) == []


def test_outputs_are_reduced_by_rows(worker, devices):
    outputs = [on_device([2.0]), np.ones(1), on_device([4.0])]
    found = devices.reduce_outputs(outputs, ["avg", "sum", "gather"])
    assert {position: array.tolist() for position, array in found.items()} == {0: [5 / 8]}
    worker.is_master = False
    assert devices.reduce_outputs(outputs, ["sum", "sum", "sum"]) == {0: None, 2: None}


def test_what_devices_can_not_do_goes_through_memory(worker):
    devices = Mock()
    arrays = Arrays(worker, Mock(), devices)

    def exchange(*given):
        arrays._is_alone = True  # so that memory gives back what it gets
        return [1]

    devices.exchange.side_effect = exchange
    target = np.zeros(2)
    results = arrays.exchange([np.ones(2), "a", np.ones(3)], "xyz", (1,), [target, "b", None])
    assert results[0] is target and target.tolist() == [1, 1]
    assert results[1] == "b" and results[2].tolist() == [1, 1, 1]
    assert arrays.landing_place(0, (2,), np.dtype("f8")) is None

    # One rank reduces with no other: its devices are left alone.
    assert arrays.exchange(["c"], ("sum",), (1,), [None]) == ["c"]
    assert devices.exchange.call_count == 1

    variables = Variables(worker, Mock(), devices)
    variables._meet, variables._reduce = Mock(), Mock(return_value="unequal")
    assert variables.reduce((1,), "sum", 0) is None and not variables._meet.called
    assert variables.reduce((1,), "sum", 0, between_devices=False) == "unequal"
    devices.reduce.return_value = False
    assert variables.reduce((1,), "sum", 0) == "unequal"
    assert devices.reduce.call_count == 2

    assert Outputs(Mock()).reduce([], []) == {} and not Outputs(Mock()).reduces("f8", 1, "sum")
    devices.reduces.return_value = True
    assert Outputs(Mock(), devices).reduces("f8", 1, "sum")
