"""Names, positions and defaults of Theano-MPI's interface, a fact for each line of a table."""

import importlib
import inspect
from pathlib import Path

import numpy as np
import pytest
import theano
from support import compatible as imports

from synkhronos.rules import compatible

TABLE = (Path(imports.__file__).parent / "theano_mpi_interface.txt").read_text().splitlines()
# Where ours is another one: the model's own number of workers, the size that the constructor got,
# the file that this run has written, and no lines instead of None, which is taken too.
OTHER_DEFAULTS = {
    ("Recorder.plot", "lines"),
    ("pre_model_iter_fn", "k"),
    ("ImageNet_data.get_data", "file_batch_size"),
    ("Recorder.load", "filepath"),
}
OTHER_NAMES = {"uepoch": "epoch"}  # as they were before in Synkhronos


def facts():
    module = ""
    for line in TABLE:
        if line.startswith("["):
            module = line.strip("[]")
        else:
            yield pytest.param(
                module, line, id=f"{module.partition('.')[2]} {line.partition('(')[0]}"
            )


@pytest.fixture(autouse=True)
def served():
    with imports.restored():
        compatible.install()
        yield


@pytest.mark.parametrize("module, line", [*facts()])
def test_a_name_is_there_with_its_positions_and_defaults(module, line):
    name, is_called, parameters = line.partition("(")
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not is_called:
        return
    space = {"np": np}
    exec(f"def theirs({parameters}: pass", space)
    expected = list(inspect.signature(space["theirs"]).parameters.values())
    ours = list(inspect.signature(found).parameters.values())
    if not isinstance(found, type) and ours and ours[0].name == "self":
        ours = ours[1:]
    for position, wanted in enumerate(expected):
        if wanted.kind is wanted.VAR_KEYWORD:  # ours names them
            continue
        assert ours[position].name == OTHER_NAMES.get(wanted.name, wanted.name)
        if wanted.default is not wanted.empty and (name, wanted.name) not in OTHER_DEFAULTS:
            assert ours[position].default == wanted.default
    for more in ours[len(expected) :]:
        assert more.default is not more.empty or more.kind in (
            more.VAR_KEYWORD,
            more.VAR_POSITIONAL,
        )


def test_attributes_that_custom_layers_and_scripts_use_are_there():
    layers2 = importlib.import_module("theanompi.models.layers2")
    x = theano.tensor.tensor4()
    layer = layers2.Conv(x, 1, 0, layers2.Constant(2), filter_shape=(2, 3, 3, 3),
                         printinfo=False, input_shape=(4, 3, 8, 8))  # fmt: skip
    names = "W b convstride filter_shape lib_conv name output output_shape padsize params"
    assert all(hasattr(layer, name) for name in [*names.split(), "weight_type", "input_shape"])
    pool = layers2.Pool(layer, 2, 2, 0, printinfo=False)
    assert (pool.poolsize, pool.poolstride, pool.poolpad) == (2, 2, 0)
    dropped = layers2.Dropout(pool, 2, printinfo=False)
    names = "flag_on flag_off mask prob_drop prob_keep"
    assert all(hasattr(dropped, name) for name in names.split())
    assert dropped in layers2.Dropout.layers


def test_scripts_may_assign_random_states_to_layers2(monkeypatch):
    layers2 = importlib.import_module("theanompi.models.layers2")
    monkeypatch.setattr(layers2, "rng", np.random.RandomState(5))
    expected = np.random.RandomState(5).normal(0, 0.01, (3, 2))
    np.testing.assert_allclose(layers2.Normal((3, 2)).np_values, expected, rtol=1e-6)
    streams = theano.sandbox.rng_mrg.MRG_RandomStreams(7)
    monkeypatch.setattr(layers2, "MRG", streams)
    before = len(streams.state_updates)
    layers2.Crop(theano.tensor.tensor4(), (3, 4, 4, 2), (3, 8, 8, 2), True, False)
    assert len(streams.state_updates) > before


def test_first_weights_are_those_of_their_seed():
    layers2 = importlib.import_module("theanompi.models.layers2")
    layers2.set_seed(23455)
    theirs = np.random.RandomState(23455)
    assert layers2.seed_this == theirs.randint(0, 2**31 - 1)
    expected = theirs.normal(0, 0.05, (4, 3, 5, 5))
    np.testing.assert_allclose(
        layers2.Normal((4, 3, 5, 5), std=0.05).np_values, expected, rtol=1e-5
    )
