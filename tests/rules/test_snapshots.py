"""Snapshots: everything that training changes comes back; damages and other models are refused."""

import contextlib
import functools
import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import theano
from theano.sandbox.rng_mrg import MRG_RandomStreams

from synkhronos.parameter_server.group.interface import SingleGroup
from synkhronos.rules import snapshots
from synkhronos.rules.job import Interrupt, Job
from synkhronos.rules.recorder import Recorder
from synkhronos.rules.run import Run


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
    states = snapshots.collect(SingleGroup(), history.capture(recorder))
    snapshot = snapshots.Snapshot("BSP", 3, 7, 20, {"total": 9}, states * 2)
    path = snapshots.write(str(tmp_path), snapshot)
    assert path == str(tmp_path / "snapshot_0003_000007.npz")
    kept = (tmp_path / "snapshot_0003_000007.npz").stat().st_size
    assert kept < 100_000 + model.order.nbytes  # once for two ranks; not shared_x, nor images
    draws = train(model), float(model.step())

    other = Model()
    kept = snapshots.History(other)
    read = snapshots.distribute(SingleGroup(), snapshots.find(True, str(tmp_path)))
    assert (read.epoch, read.batch, read.count, read.more) == (3, 7, 20, {"total": 9})
    kept.restore(read.state_of(0), recorder, {})
    assert (train(other), float(other.step())) == draws
    for found, expected in zip(state_of(other), state_of(model)):
        np.testing.assert_array_equal(np.array(found, object), np.array(expected, object))
    assert isinstance(other.history[0], tuple)


def test_an_array_of_the_same_bytes_in_another_shape_has_changed():
    """It stayed as it was before the first batch."""
    model, recorder = Model(), Recorder(None, 2, "m", False)
    history = snapshots.History(model)
    model.order = model.order.reshape(2, -1)
    model.data.order = model.data.order.view("uint64")
    assert {*history.capture(recorder).plain["attributes"]} == {"model.order", "data.order"}


def test_a_setting_of_the_resumed_run_is_kept(tmp_path):
    model, recorder = Model(), Recorder(None, 2, "m", False)
    history = snapshots.History(model)
    model.current = 5
    model.draw.rand()
    model.mask.set_value(np.random.RandomState(9))
    state = history.capture(recorder)
    other = Model()
    other.current = 8
    snapshots.History(other).restore(state, recorder, {"current": 8}, is_own=False)
    assert other.current == 8
    # Another rank's random numbers are not taken.
    assert other.draw.rand() == np.random.RandomState(1).rand()
    assert other.mask.get_value().rand() == np.random.RandomState(3).rand()


def test_another_model_is_refused():
    model, recorder = Model(), Recorder(None, 2, "m", False)
    state = snapshots.History(model).capture(recorder)
    other = Model()
    other.params.append(theano.shared(np.zeros((2, 2), "f4"), "u"))
    with pytest.raises(ValueError, match="the snapshot is of another model: shared variable"):
        snapshots.History(other).restore(state, recorder, {})


def test_each_rank_names_the_snapshot_that_other_ranks_must_resume(tmp_path):
    """Only the first one did: others called it None."""
    model, recorder = Model(), Recorder(None, verbose=False)
    states = 3 * [snapshots.History(model).capture(recorder)]
    path = snapshots.write(str(tmp_path), snapshots.Snapshot("BSP cdd", 1, 2, 8, {}, states))
    snapshot = snapshots.read_file(Path(path))
    group = SimpleNamespace(rank=1, size=2, broadcast=lambda _: snapshot)
    job = Job("BSP", "m", "Model", ["cpu"] * 2, options={"resume": True, "sync_type": "cdd"})
    run = Run(job, group, model, recorder, Interrupt())
    with pytest.raises(ValueError, match=r"/snapshot_0001_000002.npz' is from the middle"):
        run.resume()


def test_files_that_are_no_snapshots(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no snapshot_\*\.npz in"):
        snapshots.find(True, str(tmp_path))
    with pytest.raises(FileNotFoundError, match="there is no snapshot"):
        snapshots.find(str(tmp_path / "a.npz"), "")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a model with its history, and a function that reads its snapshot with a change."""
    model, folder = Model(), tmp_path_factory.mktemp("written")
    history = snapshots.History(model)
    train(model)
    philox = model.other = np.random.Generator(np.random.Philox(3))
    philox.random()
    states = [history.capture(Recorder(None, 2, "m", False))]
    path = snapshots.write(str(folder), snapshots.Snapshot("BSP", 3, 7, 20, {"total": 9}, states))
    with np.load(path) as file:
        kept = dict(file)

    def read(change):
        arrays = dict(kept)
        about = json.loads(str(arrays.pop("about")))
        change(about, about["ranks"][0]["plain"], arrays)
        np.savez(path, about=json.dumps(about), **arrays)
        return snapshots.distribute(SingleGroup(), snapshots.find(path, ""))

    return model, history, read


DAMAGES = {  # what is said of a value at a place in the attributes, in `plain`, or in the arrays
    "NumPy has no bit generator test": ("attributes", "model.other", "generator", 0, "test"),
    "pos is not that": ("plain", "numpy", "random", 2, 10**9),
    "it lacks '0/f4'": ("about", "ranks", [{"plain": {}, "arrays": {"f4": 0}}]),
    "would set model.params": ("attributes", "model.params", 1),
    "would set model.__class__": ("attributes", "model.__class__", 1),
    "would set model.step": ("attributes", "model.step", None),
    "would set data.a b": ("attributes", "data.a b", 1),
    "'os'": ("attributes", "os.environ", 1),
    "RandomStateType> would get another kind": ("plain", "variable/3", 5),
    "w would get another kind": ("arrays", "0/variable/0", np.zeros((3, 3))),
    "no kind of value 'run'": ("attributes", "model.name", {"run": "x"}),
    "would get another kind of value": ("arrays", "0/variable/4", np.zeros((0, 6), np.int32)),
    "not that of a snapshot": ("about", "epoch", "3"),
    "'train_info'": ("plain", "recorder", "rows", {}),
    "invalid state": ("arrays", "0/random/python", np.full(625, 10**9, np.uint64)),
}


def damage(about, plain, arrays, place, *keys):
    """Put the last of the keys at the place that the others name."""
    owners = {"about": about, "plain": plain, "arrays": arrays, "attributes": plain["attributes"]}
    owner, (*path, key, value) = owners[place], keys
    for each in path:
        owner = owner[each]
    owner[key] = value


@pytest.mark.parametrize("message", DAMAGES)
def test_a_damaged_snapshot_is_refused_before_anything_is_set(written, message):
    """A name chose a class of NumPy (`test` started pytest), and positions crashed NumPy."""
    model, history, read = written
    before = [repr(each) for each in state_of(model)]
    with pytest.raises(
        ValueError, match=r"snapshot_0003.*\.npz' .* does not hold a snap"
    ) as caught:
        snapshot = read(lambda *contents: damage(*contents, *DAMAGES[message]))
        history.restore(snapshot.state_of(0), Recorder(None, 2, "m", False), {})
    assert message in str(caught.value)
    assert [repr(each) for each in state_of(model)] == before


def mutated(value, draw):
    """Return a part of a table of contents with another value somewhere."""
    if isinstance(value, (dict, list)) and value and draw.random() < 0.97:
        key = draw.choice(sorted(value)) if isinstance(value, dict) else draw.randrange(len(value))
        copied = dict(value) if isinstance(value, dict) else list(value)
        copied[key] = mutated(value[key], draw)
        return copied
    numbers = [True, -1, 0, 7, 625, 10**9, 2**64, 2**200, 0.5, float("nan"), float("inf")]
    names = [None, "", "x", "test", "0/random/numpy"]
    return draw.choice([*numbers, *names, [], {}, [1], {"list": [1]}, {"random": []}])


def test_any_other_value_is_refused_or_harmless(written, seeds=range(150)):
    model, history, read = written
    for seed in seeds:
        draw = random.Random(seed)

        def change(about, plain, arrays, draw=draw):
            if draw.random() < 0.7:
                name = draw.choice(["plain", "plain", "arrays"])
                about["ranks"][0][name] = mutated(about["ranks"][0][name], draw)
            elif draw.random() < 0.3:
                key = draw.choice(sorted(about))
                about[key] = mutated(about[key], draw)
            else:
                name = draw.choice(sorted(arrays))
                array = arrays[name]
                cast = [array.astype("f8"), array[..., None], -array.astype("i8"), array * 0]
                arrays[name] = draw.choice([*cast, array.reshape(-1)[:0]])

        try:
            state = read(change).state_of(0)
            history.restore(state, Recorder(None, 2, "m", False), {})
        except ValueError:
            continue
        with contextlib.suppress(ValueError):  # lengths may not fit one another
            model.step()
        np.random.random(700), random.random(), model.generator.random(700), model.draw.rand(700)


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
    read = snapshots.distribute(SingleGroup(), snapshots.find(str(tmp_path), ""))
    assert (read.rule, read.epoch) == (None, 11)
    snapshots.restore_old(model, read)
    assert model.layers[0].W.val.get_value().tolist() == [[10] * 3] * 2
    assert model.layers[2].W0.val.get_value().tolist() == [-10, -10]
    model.layers.pop()
    with pytest.raises(ValueError, match="layer 2 of the model has no weight W0"):
        snapshots.restore_old(model, read)


class Slotted:
    __slots__ = "at"  # one name, and no tuple

    def __init__(self):
        self.at = 0


def test_containers_that_hold_themselves_and_objects_with_slots():
    model = Model()
    model.data.circle, model.data.cursor = [1, 2], Slotted()
    model.data.circle.append(model.data.circle)
    history = snapshots.History(model)
    model.data.circle[0], model.data.cursor.at = 7, 5
    state = history.capture(Recorder(None, 2, "m", False))
    assert state.left_out == ["data.circle (list)"]
    assert state.plain["attributes"]["data.cursor.at"] == 5
