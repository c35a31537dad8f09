"""Snapshots: everything that training changes comes back; damages and other models are refused."""

import functools
import random

import numpy as np
import pytest
import theano
from theano.sandbox.rng_mrg import MRG_RandomStreams

from synkhronos.rules import snapshots
from synkhronos.rules.asynchronous import Alone
from synkhronos.rules.recorder import Recorder


class Data:
    def __init__(self):
        self.order = np.arange(5)
        self.images = np.zeros((1 << 19, 1))  # too large for a snapshot, and nothing changes it


class Model:
    def __init__(self):
        self.w = theano.shared(np.zeros(3, "f4"), "w")
        self.params, self.data = [self.w], Data()
        self.shared_lr = theano.shared(np.float32(0.1), "lr")
        self.velocity = theano.shared(np.zeros(3, "f4"), "v")
        self.shared_x = theano.shared(np.zeros((200, 200), "f4"), "x")
        self.mask = theano.shared(np.random.RandomState(3))
        noise = MRG_RandomStreams(5).uniform((3,), dtype="float32")
        step = theano.function([], noise.sum(), updates=[(self.velocity, self.velocity + noise)])
        self.step = functools.partial(step)
        self.generator = np.random.default_rng(2)
        self.data.draw = np.random.RandomState(6)
        self.draws_too = self.data.draw  # one state, held twice
        self.order = np.arange(1 << 18)  # larger than what is always kept
        self.current, self.name, self.draw = 0, "m", np.random.RandomState(1)
        self.history = [("a", 1, 2.5, None, True)]


def train(model):
    model.step()
    model.w.set_value(model.w.get_value() + 1)
    model.shared_lr.set_value(np.float32(0.05))
    model.current += 3
    model.history.append(("b", np.float32(1.5)))
    model.data.order = model.data.order[::-1].copy()
    model.generator.shuffle(model.order)
    draws = [model.draw.rand(), np.random.rand(), random.random(), model.mask.get_value().rand()]
    return [*draws, model.generator.random(), model.data.draw.rand(), model.draws_too.rand()]


def state_of(model):
    values = [each.get_value() for each in (model.w, model.velocity, model.shared_lr)]
    return [*values, model.current, model.history, model.data.order, model.order]


def test_a_model_goes_on_as_if_nothing_had_happened(tmp_path):
    np.random.seed(4)
    random.seed(4)
    recorder, model = Recorder(None, 2, "m", False), Model()
    history = snapshots.History(model)
    train(model)
    states = snapshots.collect(Alone(None), history.capture(recorder))
    path = snapshots.write(str(tmp_path), snapshots.Snapshot("BSP", 3, 7, 20, {"total": 9}, states))
    assert path == str(tmp_path / "snapshot_0003_000007.npz")
    kept = (tmp_path / "snapshot_0003_000007.npz").stat().st_size
    assert kept < 100_000 + model.order.nbytes  # not shared_x, nor images
    draws = train(model), float(model.step())

    other = Model()
    kept = snapshots.History(other)
    read = snapshots.distribute(Alone(None), snapshots.find(True, str(tmp_path)))
    assert (read.epoch, read.batch, read.count, read.more) == (3, 7, 20, {"total": 9})
    kept.restore(read.state_of(0), recorder, {})
    assert (train(other), float(other.step())) == draws
    for found, expected in zip(state_of(other), state_of(model)):
        np.testing.assert_array_equal(np.array(found, object), np.array(expected, object))
    assert isinstance(other.history[0], tuple)


def test_a_setting_of_the_resumed_run_is_kept(tmp_path):
    model, recorder = Model(), Recorder(None, 2, "m", False)
    history = snapshots.History(model)
    model.current = 5
    state = history.capture(recorder)
    other = Model()
    other.current = 8
    snapshots.History(other).restore(state, recorder, {"current": 8})
    assert other.current == 8


def test_another_model_is_refused():
    model, recorder = Model(), Recorder(None, 2, "m", False)
    state = snapshots.History(model).capture(recorder)
    other = Model()
    other.params.append(theano.shared(np.zeros((2, 2), "f4"), "u"))
    with pytest.raises(ValueError, match="the snapshot is of another model: shared variable"):
        snapshots.History(other).restore(state, recorder, {})


def test_files_that_are_no_snapshots(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no snapshot_\*\.npz in"):
        snapshots.find(True, str(tmp_path))
    with pytest.raises(FileNotFoundError, match="there is no snapshot"):
        snapshots.find(str(tmp_path / "a.npz"), "")
    (tmp_path / "snapshot_0001.npz").write_bytes(b"PK no zip")
    with pytest.raises(ValueError, match="is no snapshot of a rule, or damaged"):
        snapshots.distribute(Alone(None), snapshots.find(True, str(tmp_path)))


class Weight:
    def __init__(self, value):
        self.val = theano.shared(value)


class Layer:
    def __init__(self, **weights):
        for name, value in weights.items():
            setattr(self, name, Weight(value))


def test_the_files_of_theano_mpi_are_read(tmp_path):
    """A .npy file for each weight of each layer; nothing there ever read them."""
    for epoch in (5, 10):
        np.save(tmp_path / f"W_0_{epoch}.npy", np.full((2, 3), epoch, "f4"))
        np.save(tmp_path / f"b_0_{epoch}.npy", np.full(3, epoch, "f4"))
        np.save(tmp_path / f"W0_2_{epoch}.npy", np.full(2, -epoch, "f4"))
        np.save(tmp_path / f"lr_{epoch}.npy", 0)
    model = Model()
    model.layers = [
        Layer(W=np.zeros((2, 3), "f4"), b=np.zeros(3, "f4")),
        Layer(),
        Layer(W0=np.zeros(2, "f4")),
    ]
    read = snapshots.distribute(Alone(None), snapshots.find(str(tmp_path), ""))
    assert (read.rule, read.epoch) == (None, 11)
    snapshots.restore_old(model, read)
    assert model.layers[0].W.val.get_value().tolist() == [[10] * 3] * 2
    assert model.layers[2].W0.val.get_value().tolist() == [-10, -10]
    model.layers.pop()
    with pytest.raises(ValueError, match="layer 2 of the model has no weight W0"):
        snapshots.restore_old(model, read)
