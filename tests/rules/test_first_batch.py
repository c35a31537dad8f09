"""Data that do not fit, before anything is compiled."""

import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import theano

from synkhronos.rules import first_batch
from synkhronos.rules.compatible.models import layers2
from synkhronos.rules.first_batch import FirstBatch


class OfImages:
    """A model as Theano-MPI's are: its functions are None before they are compiled."""

    takes, loads, labels = (4, 3, 6, 6), (4, 3, 6, 6), 4

    def __init__(self):
        self.data = SimpleNamespace(n_batch_train=4.0, n_batch_val=2)
        self.x, self.current_t, self.train_iter_fn = theano.tensor.tensor4("x"), 0, None
        self.shared_x = theano.shared(np.zeros((1, 1, 1, 1), theano.config.floatX))
        self.shared_y = theano.shared(np.zeros(1, "int64"))
        layer = layers2.Flatten(self.x, 2, printinfo=False, input_shape=self.takes)
        self.layers = layers2.get_layers(layer)

    def train_iter(self, count, recorder):
        recorder.start()
        np.random.rand()
        self.shared_x.set_value(np.zeros(self.loads, theano.config.floatX))
        self.shared_y.set_value(np.zeros(self.labels, "int64"))
        recorder.end("wait")
        cost, error = self.train_iter_fn(0)
        recorder.train_error(count, cost, error)
        self.current_t += 1


@pytest.mark.parametrize(
    "changed",
    [{}, {"loads": (2, 3, 6, 6), "labels": 2}, {"loads": (3, 6, 6, 5), "labels": 5}],
    ids=["as it is", "another number of images", "the batch as the last axis"],
)
def test_a_first_batch_that_fits_leaves_the_model_as_it_was(changed):
    model = type("OfImages", (OfImages,), changed)()
    before = np.random.get_state()[1].copy()
    FirstBatch().check(model)
    assert model.train_iter_fn is None and model.current_t == 0
    np.testing.assert_array_equal(np.random.get_state()[1], before)


def test_data_that_do_not_fit_are_refused_with_both_shapes():
    """Theirs compiled for minutes first."""
    model = type("OfImages", (OfImages,), {"loads": (4, 3, 8, 8)})()
    said = r"of the shape \(4, 3, 8, 8\).*takes \(4, 3, 6, 6\).*Nothing was compiled"
    with pytest.raises(ValueError, match=said):
        FirstBatch().check(model)
    model = type("OfImages", (OfImages,), {"labels": 5})()
    with pytest.raises(ValueError, match=r"images of the shape \(4, 3, 6, 6\).*but 5 labels"):
        FirstBatch().check(model)


def test_a_batch_that_can_not_be_loaded_is_told_before_compiling():
    def train_iter(self, count, recorder):
        return [][5]

    model = type("OfImages", (OfImages,), {"train_iter": train_iter})()
    with pytest.raises(RuntimeError, match="OfImages can't load its first batch: IndexError"):
        FirstBatch().check(model)


@pytest.mark.parametrize("how", ["has a function", "has no batch"])
def test_a_model_that_loads_in_another_way_is_not_asked(how):
    model = type("OfImages", (OfImages,), {"loads": (4, 3, 8, 8)})()
    if how == "has a function":
        model.train_iter_fn = print
    else:
        model.data.n_batch_train = 0
    FirstBatch().check(model)


class Streams(OfImages):
    """Its data move: a generator, a file, an object with a cursor."""

    def __init__(self, path):
        super().__init__()
        path.write_text("one\ntwo\n" * 5_000)
        self.data.numbers, self.data.file = iter(range(9)), path.open()
        self.data.log = path.with_name("log").open("w")
        self.data.cursor = SimpleNamespace(at=0, draws=np.random.RandomState(1))
        self.data.file.readline()

    def train_iter(self, count, recorder):
        next(self.data.numbers)
        for _ in range(5_000):
            self.data.file.readline()
        print("loads", file=self.data.log, flush=True)
        self.data.cursor.at += 1
        self.data.cursor.draws.rand()
        super().train_iter(count, recorder)


def test_a_look_at_the_data_has_no_effects(tmp_path):
    """A generator lost its first batch, and a file was read on from another line."""
    model = type("Streams", (Streams,), {"loads": (4, 3, 8, 8)})(tmp_path / "rows")
    draws = np.random.RandomState(1)
    with pytest.raises(ValueError, match="do not fit"):
        FirstBatch().check(model)
    data = model.data
    assert next(data.numbers) == 0 and data.cursor.at == 0
    assert data.cursor.draws.rand() == draws.rand()
    data.log.close()
    assert (tmp_path / "log").read_text() == ""
    assert data.file.read() == "two\n" + "one\ntwo\n" * 4_999
    data.file.close()


@pytest.mark.parametrize("what", ["a thread", "a pipe"])
def test_a_model_that_shares_something_with_a_copy_is_not_asked(what):
    look, end = FirstBatch(), threading.Event()
    model = type("OfImages", (OfImages,), {"loads": (4, 3, 8, 8)})()
    thread, pipe = threading.Thread(target=end.wait), ()
    if what == "a thread":
        thread.start()
    else:
        pipe = os.pipe()
    look.check(model)
    end.set()
    for each in pipe:
        os.close(each)
    with pytest.raises(ValueError, match="do not fit"):
        if what == "a thread":
            thread.join()
        look.check(model)


def test_a_look_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(first_batch, "_SECONDS", 0.2)
    model = type("OfImages", (OfImages,), {"train_iter": lambda *_: threading.Event().wait()})()
    FirstBatch().check(model)


def test_a_network_of_lasagne_is_compared_too():
    lasagne = pytest.importorskip("lasagne")
    model = OfImages()
    model.layers = []
    model.output_layer = lasagne.layers.InputLayer((None, 3, 8, 8))
    with pytest.raises(ValueError, match=r"takes \(None, 3, 8, 8\)"):
        FirstBatch().check(model)
    model.output_layer = lasagne.layers.InputLayer((None, 3, 5, 5))  # may be cut off in the graph
    FirstBatch().check(model)
