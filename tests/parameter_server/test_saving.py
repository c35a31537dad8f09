"""Files of weights and of updaters' states: whole, without pickles, refused where they differ."""

import numpy as np
import pytest

from synkhronos.extensions import update_rules
from synkhronos.parameter_server import weight_files
from synkhronos.parameter_server.updaters import Updater, rule_updater

pytestmark = pytest.mark.usefixtures("quickly_compiled")

WEIGHTS = {
    "layer 1/W\0ä": np.arange(6, dtype="float32").reshape(2, 3).T,
    "b": np.array(3, "float16"),
    "": np.zeros((0, 2)),
    "count": np.arange(3),
}


@pytest.mark.parametrize("as_int", [False, True])
def test_weights_come_back_with_their_keys(tmp_path, as_int):
    weights = dict(enumerate(WEIGHTS.values())) if as_int else WEIGHTS
    path = tmp_path / "weights.npz"
    weight_files.save_weights(path, weights)
    found = weight_files.load_weights(path)
    assert list(found) == list(weights)
    for key, value in weights.items():
        assert found[key].dtype == value.dtype and found[key].flags.writeable
        np.testing.assert_array_equal(found[key], value)
    assert [each.name for each in tmp_path.iterdir()] == ["weights.npz"]


def test_names_of_files_are_checked():
    for path, error, said in [
        (3, TypeError, "path must be the name of a file that ends with .npz, got 3"),
        (b"w.npz", TypeError, "got b'w.npz'"),
        ("weights.npy", ValueError, "path must end with .npz, got 'weights.npy'"),
    ]:
        with pytest.raises(error, match=said):
            weight_files.save_weights(path, {})
        with pytest.raises(error, match=said):
            weight_files.load_weights(path)
        with pytest.raises(error, match=said):
            weight_files.save_states(path, [])
        with pytest.raises(error, match=said):
            weight_files.load_states(path)


def stepped(rule, rounds, size=3, **hyper):
    updater, weight = rule_updater(rule, **hyper), np.ones(size)
    updater.init_model("w", weight)
    for number in range(rounds):
        updater.update("w", np.arange(float(size)) + number)
    return updater, weight


@pytest.mark.parametrize("servers", [1, 2])
def test_states_of_each_server_come_back(tmp_path, servers):
    path, sizes = tmp_path / "states.npz", [3, 5][:servers]
    whole = [stepped(update_rules.adam, 4, size) for size in sizes]
    halves = [stepped(update_rules.adam, 2, size) for size in sizes]
    weight_files.save_states(path, [weight_files.dump(updater) for updater, _ in halves])
    for (_, half), (_, final), size, data in zip(
        halves, whole, sizes, weight_files.load_states(path, servers)
    ):
        # A process that has made another step, from the same weights.
        updater, weight = stepped(update_rules.adam, 1, size)
        weight[...] = half
        weight_files.restore(updater, data)
        for number in (2, 3):
            updater.update("w", np.arange(float(size)) + number)
        np.testing.assert_array_equal(weight, final)
    with np.load(path, allow_pickle=False) as file:
        assert len(file.files) == 1 + 3 * servers  # means, squares, time


def test_states_that_do_not_fit_are_refused(tmp_path):
    path, hyper = tmp_path / "states.npz", {"learning_rate": 1.0}
    updater, _ = stepped(update_rules.momentum, 1, **hyper)
    weight_files.save_states(path, [weight_files.dump(updater)])
    [data] = weight_files.load_states(path)
    with pytest.raises(ValueError, match="has the states of 1 server, but there are 2"):
        weight_files.load_states(path, 2)
    with pytest.raises(ValueError, match=r"those of 'rule momentum', .* is 'rule adam'"):
        weight_files.restore(stepped(update_rules.adam, 1)[0], data)
    with pytest.raises(ValueError, match=r"has shape \(3,\) .* must have \(4,\)"):
        weight_files.restore(stepped(update_rules.momentum, 1, 4, **hyper)[0], data)
    with pytest.raises(ValueError, match="of the keys 'w', but this updater has none"):
        weight_files.restore(rule_updater(update_rules.momentum, **hyper), data)
    with pytest.raises(ValueError, match="the data of a server can't be read: it is damaged, or"):
        weight_files.restore(updater, data[:99])
    with pytest.raises(ValueError, match="data of a server holds states of updaters, not states"):
        weight_files.save_states(path, [path.read_bytes()])


def test_an_updater_without_states_has_a_file_too(tmp_path):
    path = tmp_path / "states.npz"
    updater, _ = stepped(update_rules.sgd, 1, learning_rate=1.0)
    weight_files.save_states(path, [weight_files.dump(updater), weight_files.dump(Updater())])
    one, other = weight_files.load_states(path, 2)
    weight_files.restore(updater, one)
    weight_files.restore(Updater(), other)
    with pytest.raises(ValueError, match="those of 'Updater'"):
        weight_files.restore(updater, other)
