"""The package's model files: each builds, takes a step, validates and saves on made-up data."""

import copy
import importlib.util
import pickle

import numpy as np
import pytest
import theano
from support import compatible, zoo

from synkhronos.rules import compatible as compatible_package
from synkhronos.rules import contract, snapshots

HEAVY = pytest.mark.slow("compiles a large network")
IMAGENET = {"batch_size": 2, "file_batch_size": 4}
MODELS = {
    "Cifar10_model": ("cifar10", {"batch_size": 4, "filters": (2, 3, 2), "units": 8}, None),
    "AlexNet": (
        "alex_net",
        {
            **IMAGENET,
            "input_size": 67,
            "image_size": 72,
            "filters": (4, 4, 6, 6, 4),
            "units": 8,
        },
        None,
    ),
    "GoogLeNet": (
        "googlenet",
        {**IMAGENET, "input_size": 64, "image_size": 70, "width": 1 / 16, "units": 8},
        None,
    ),
    "LSTM": ("lstm", {"batch_size": 4, "units": 6, "n_words": 30}, None),
    "WGAN": (
        "wgan",
        {"batch_size": 4, "width": 2, "noise": 5, "critic_steps_at_first": 1},
        "lasagne",
    ),
    "LSGAN": ("lsgan", {"batch_size": 4, "width": 2, "noise": 5}, "lasagne"),
    "VGG16": (
        "vgg16",
        {**IMAGENET, "input_size": 32, "image_size": 36, "width": 2, "units": 8},
        "lasagne",
    ),
    "ResNet50": (
        "resnet50",
        {**IMAGENET, "input_size": 32, "image_size": 36, "width": 2, "blocks": (1, 1, 1, 1)},
        "lasagne",
    ),
    "Wide_ResNet": ("wresnet", {"batch_size": 4, "blocks": 1, "widen": 1}, "keras"),
}
OWN_UPDATES = ["LSTM", "WGAN", "LSGAN", "Wide_ResNet"]
IS_HEAVY = set(MODELS) - {"LSTM"}


def named(names):
    return [pytest.param(name, marks=HEAVY) if name in IS_HEAVY else name for name in names]


@pytest.fixture(autouse=True)
def made_up(monkeypatch):
    """Make data up; compile little; restore imports and Theano's settings."""
    monkeypatch.setenv("SYNKHRONOS_DATA", "made")
    monkeypatch.setenv("SYNKHRONOS_MADE_BATCHES", "2")
    kept = theano.config.floatX
    theano.config.floatX = "float32"
    with compatible.restored(), zoo.little_compiled():
        yield
    theano.config.floatX = kept


@pytest.fixture
def build(monkeypatch, tmp_path):
    """Return a function that builds a small model by the name of its class."""

    def made(name, **settings):
        file, small, library = MODELS[name]
        if library == "keras":
            monkeypatch.setenv("KERAS_BACKEND", "theano")
            monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
        if library and importlib.util.find_spec(library) is None:
            pytest.skip(f"needs {library}")
        return zoo.build(file, name, **{**small, **settings})

    return made


@pytest.mark.parametrize("name", named(MODELS))
def test_a_model_trains_validates_and_goes_on_from_a_snapshot(build, name, tmp_path):
    model = build(name)
    assert model.data.n_batch_train == 2 and model.data.n_batch_val == 1
    recorder, history = zoo.start(model)
    before, statistics = zoo.values(model.params), zoo.values(model.statistics)
    cost, error = zoo.train(model, recorder)
    assert np.isfinite([cost, error]).all()
    changed = [not np.array_equal(a, b) for a, b in zip(before, zoo.values(model.params))]
    # A parameter may lack a gradient in two small steps: a dead rectifier's.
    assert np.mean(changed) > 0.6
    moved = [not np.array_equal(a, b) for a, b in zip(statistics, zoo.values(model.statistics))]
    assert all(moved)
    result, answer = zoo.validate(model, recorder)
    assert np.isfinite(result).all() and answer is None
    if name not in ("WGAN", "LSGAN"):  # which draw noise in validation too
        np.testing.assert_allclose(zoo.validate(model, recorder)[0], result, rtol=1e-4)
    zoo.end_epoch(model, recorder)

    snapshot = snapshots.Snapshot("BSP", 1, 0, 2, {}, [history.capture(recorder)])
    file = snapshots.write(str(tmp_path), snapshot)
    expected = zoo.train(model, recorder, 1), zoo.values(model.params)
    other = build(name, seed=1)
    # No argument is needed: GoogLeNet and VGG16 required sync_type, so EASGD failed; AlexNet took
    # none, so BSP failed.
    other.compile_iter_fns()
    recorder, history = zoo.watch(other)
    state = snapshots.read_file(snapshots.find(True, str(tmp_path)))
    assert str(tmp_path) in file
    history.restore(state.state_of(0), recorder, {})
    np.testing.assert_array_equal(zoo.train(other, recorder, 1), expected[0])
    for one, two in zip(zoo.values(other.params), expected[1]):
        np.testing.assert_array_equal(one, two)
    model.cleanup()


@pytest.mark.parametrize("name", named(OWN_UPDATES))
def test_models_with_their_own_updates_refuse_cdd_on_several_ranks(build, name):
    """Theirs died of an AttributeError under the default sync type."""
    model = build(name, size=2)
    with pytest.raises(ValueError, match=f"{name} updates its parameters itself.*sync type avg"):
        contract.compile_functions(model, "cdd")


def test_one_rank_has_nothing_to_exchange_so_cdd_is_taken(build):
    model = build("LSTM")
    recorder, _ = zoo.start(model, "cdd")
    assert np.isfinite(zoo.train(model, recorder)).all()


@HEAVY
def test_models_of_opt_leave_velocities_for_cdd(build):
    """All compile their functions by the same method."""
    model = build("Cifar10_model", size=2)
    zoo.start(model, "cdd")
    contract.check_exchanged_velocities(model)


def test_the_rate_of_googlenet_falls_by_its_formula_over_all_epochs():
    """Theirs raised NameError from epoch 6 on, and multiplied factors that were of the start."""
    modelclass = zoo.load("googlenet", "GoogLeNet")
    model = modelclass.__new__(modelclass)  # its network is not needed
    model.shared_lr = theano.shared(np.float32(0.005))
    contract.ScaledRate(model).set_factor(4)
    for epoch in range(240):
        model.adjust_hyperp(epoch)
        expected = 4 * 0.005 * (1 - (epoch + 1) / 240) ** 0.5
        np.testing.assert_allclose(model.shared_lr.get_value(), expected, rtol=1e-3, atol=1e-9)
    model.adjust_hyperp(240)


@HEAVY
def test_googlenet_trains_and_saves_the_weights_inside_its_inceptions(build):
    """Theirs left them out of snapshots."""
    model = build("GoogLeNet")
    # Each of nine inceptions has six convolutions; there are 3 more, 2 x 3 layers beside, and one.
    assert len(model.params) == 2 * (9 * 6 + 3 + 2 * 3 + 1)
    listed = sum(len(layer.params) for layer in model.layers)
    assert listed == len(model.params)


@HEAVY
def test_the_gans_generators_learn_as_often_as_they_should(build):
    model = build("WGAN", critic_steps_at_first=3, critic_steps=2)
    recorder, _ = zoo.start(model)
    updates = []
    for epoch in range(10):
        zoo.train(model, recorder, epoch)
        updates.append(model.generator_updates)
    # Five times after 3 batches, then after 2.
    assert updates[:6] == [0, 1, 2, 2, 3, 4] and updates[-1] == 5 + (20 - 5 * 3) // 2
    for value in zoo.values(model.critic_params):
        assert abs(value).max() <= 0.01 + 1e-7


@HEAVY
def test_the_gans_exchange_all_parameters_or_the_critics(build):
    model = build("WGAN", exchanged="critic")
    assert set(model.params) == set(model.critic_params)
    assert set(build("WGAN").params) > {*()} and len(build("WGAN").params) > len(model.params)
    with pytest.raises(ValueError, match="exchanged must be 'all' or 'critic', got 'both'"):
        build("LSGAN", exchanged="both")


@HEAVY
def test_lsgan_takes_cifar_too(build):
    model = build("LSGAN", data_set="cifar10")
    recorder, _ = zoo.start(model)
    assert np.isfinite(zoo.train(model, recorder)).all()
    assert model.sample_fn(3).shape == (3, 3, 32, 32)
    with pytest.raises(ValueError, match="data_set must be 'mnist' or 'cifar10', got 'x'"):
        build("LSGAN", data_set="x")


def test_the_learning_rate_of_the_wgan_falls_in_the_second_half_and_keeps_a_warm_ups_factor():
    """Theirs was set absolutely, so the factor of the warm-up was lost."""
    pytest.importorskip("lasagne")
    modelclass = zoo.load("wgan", "WGAN")
    model = modelclass.__new__(modelclass)  # its networks are not needed
    model.n_epochs, model.shared_lr = 10, theano.shared(np.float32(5e-5))
    contract.ScaledRate(model).set_factor(4)
    rates = []
    for epoch in range(10):
        model.adjust_hyperp(epoch)
        rates.append(float(model.shared_lr.get_value()))
    expected = [min(1, 2 * (1 - (epoch + 1) / 10)) * 4 * 5e-5 for epoch in range(10)]
    np.testing.assert_allclose(rates, expected, rtol=1e-5, atol=1e-12)


def test_the_lstm_equals_numpy(build):
    model = build("LSTM")
    zoo.start(model)
    (words, mask), labels = model.data.batch("val", 0)
    E, W, U, b, V, c = zoo.values(model.params)
    state = cells = np.zeros((words.shape[1], 6))
    total = 0

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    for word, m in zip(words, mask[..., None]):
        into, forget, out, new = np.split(E[word] @ W + b + state @ U, 4, axis=1)
        new_cells = sigmoid(forget) * cells + sigmoid(into) * np.tanh(new)
        new_state = sigmoid(out) * np.tanh(new_cells)
        cells, state = m * new_cells + (1 - m) * cells, m * new_state + (1 - m) * state
        total = total + m * state
    scores = np.exp(total / mask.sum(0)[:, None] @ V + c)
    probabilities = scores / scores.sum(axis=1, keepdims=True)
    expected = -np.log(probabilities[np.arange(len(labels)), labels]).mean()
    cost, error = model.val_iter_fn(words, mask, labels)
    np.testing.assert_allclose(cost, expected, rtol=1e-5)
    assert error == np.mean(probabilities.argmax(axis=1) != labels)


def test_the_lstm_asks_to_stop_when_its_error_does_not_fall(build):
    model = build("LSTM", patience=2)
    recorder, _ = zoo.start(model)
    model.train_iter_fn = lambda *batch: (0.0, 0.0)  # learns nothing
    answers = [zoo.validate(model, recorder)[1] for _ in range(3)]
    assert answers == [None, None, "stop"]


def test_settings_come_from_the_config_and_unknown_ones_are_refused(build):
    model = build("LSTM", lr_step=[1], learning_rate=0.5, **{"data.n_batch_train": 1})
    assert model.lr_step == [1] and model.data.n_batch_train == 1
    recorder, _ = zoo.start(model)
    zoo.train(model, recorder)
    assert model.data.n_batch_train == 1
    model.adjust_hyperp(0), model.adjust_hyperp(1), model.adjust_hyperp(2)
    np.testing.assert_allclose(model.shared_lr.get_value(), 0.05, rtol=1e-6)
    with pytest.raises(ValueError, match="no attribute 'units_of_it'"):
        build("LSTM", units_of_it=3)
    with pytest.raises(ValueError, match="file_batch_size must be a multiple of batch_size=4"):
        build("LSTM", file_batch_size=6)


def test_ranks_train_with_all_batches_and_each_with_its_own(build, monkeypatch):
    monkeypatch.setenv("SYNKHRONOS_MADE_BATCHES", "5")
    seen = []
    for rank in range(2):
        model = build("LSTM", rank=rank, size=2)
        model.epoch = 3
        loaded = []
        model.train_batch = lambda part, m=model, s=loaded: s.append(copy.copy(m.loaded)) or (0, 0)
        recorder = zoo.Recorder(None, 1000, "LSTM", verbose=False)
        for _ in range(model.data.n_batch_train):
            model.train_iter(0, recorder)
        seen += [words.tobytes() for words, _, _ in loaded]
    assert len(seen) == len(set(seen)) == 5


@HEAVY
def test_a_run_of_few_epochs_ends_with_small_steps_too(build):
    assert build("Cifar10_model").lr_step == [50, 60, 65]
    assert build("Cifar10_model", n_epochs=14).lr_step == [10, 12, 13]
    assert build("Cifar10_model", n_epochs=14, lr_step=[3]).lr_step == [3]


def test_keras_data_sets_are_made_up_too(monkeypatch, tmp_path):
    """Keras would download them."""
    if importlib.util.find_spec("keras") is None:
        pytest.skip("needs keras")
    monkeypatch.setenv("KERAS_BACKEND", "theano")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    text = "from keras.datasets import cifar10, mnist\nclass Model: pass\n"
    (tmp_path / "of_keras.py").write_text(text)
    module = compatible_package.import_model(str(tmp_path / "of_keras.py"))
    (x, y), (x_test, y_test) = module.cifar10.load_data()
    assert x.shape[0] == len(y) and {*x.shape[1:]} == {3, 32} and y.shape[1:] == (1,)
    assert x.dtype == np.uint8 and x_test.shape[1:] == x.shape[1:] and len(x_test) == len(y_test)
    (x, y), _ = module.mnist.load_data()
    assert x.shape[1:] == (28, 28) and x.max() > 200 and y.shape == x.shape[:1]


@HEAVY
def test_a_loader_changes_nothing_but_the_waiting(build):
    results = []
    for para_load in (False, True):
        model = build("VGG16", para_load=para_load)
        assert model.data.para_load == para_load
        recorder, _ = zoo.start(model)
        try:
            images = [model.read_batch(mode, 0)[0].copy() for mode in ("train", "val")]
            results.append((*images, zoo.validate(model, recorder)[0]))
        finally:
            model.cleanup()
    for one, other in zip(*results):
        np.testing.assert_array_equal(one, other)


@HEAVY
@pytest.mark.parametrize(
    "name, count",
    [
        ("AlexNet", 60_965_224),
        ("GoogLeNet", 13_378_280),  # of Caffe's, with both classifiers beside the main one
        ("VGG16", 138_357_544),
        ("ResNet50", 25_557_032),
    ],
)
def test_full_models_have_as_many_parameters_as_the_published_ones(build_full, name, count):
    model = build_full(name)
    assert sum(param.get_value(borrow=True).size for param in model.params) == count


@pytest.fixture
def build_full(build, monkeypatch):
    """Return a function that builds a model of full size, with a batch of one small image each."""
    monkeypatch.setattr("synkhronos.rules.compatible.models.classifier.T.grad", lambda *_: [])

    def made(name):
        monkeypatch.setitem(MODELS, name, (MODELS[name][0], {}, MODELS[name][2]))
        return build(name, batch_size=1, file_batch_size=1)

    return made


@HEAVY
def test_vgg_begins_with_weights_of_lasagnes_recipes(build, tmp_path):
    import lasagne

    model, other = build("VGG16"), build("VGG16", seed=1)
    values = lasagne.layers.get_all_param_values(other.output)
    content = {"param values": values, "model type": "vgg16", "synset words": ["a", "b"]}
    (tmp_path / "vgg16.pkl").write_bytes(pickle.dumps(content, protocol=2))
    model.load_weights(tmp_path / "vgg16.pkl")
    for one, two in zip(zoo.values(model.params), values):
        np.testing.assert_array_equal(one, two)


@HEAVY
def test_vgg_takes_blue_first_minus_a_constant(build):
    model = build("VGG16", rand_crop=False)
    images, _ = model.read_batch("train", 0)
    raw, _ = model.data.batch("train", 0)
    expected = raw[::-1, 2:34, 2:34].transpose(3, 0, 1, 2).astype("float32")
    expected -= np.array([103.939, 116.779, 123.68]).reshape(3, 1, 1)
    np.testing.assert_allclose(images, expected, rtol=1e-5, atol=1e-4)


@HEAVY
def test_a_block_of_the_resnet_begins_as_the_identity(build):
    model = build("ResNet50")
    gammas = [param for param in model.params if param.name == "gamma"]
    zero = [not gamma.get_value().any() for gamma in gammas]
    # One after the first convolution; of each block three, and one of its shortcut.
    assert len(gammas) == 1 + 4 * 4 and sum(zero) == 4
    assert len([param for param in model.params if param.name == "beta"]) == len(gammas)
    assert len(model.statistics) == 2 * len(gammas)


@HEAVY
def test_running_statistics_follow_the_batches(build):
    model = build("ResNet50")
    recorder, _ = zoo.start(model)
    means = [each for each in model.statistics if each.name == "mean"]
    variances = [each for each in model.statistics if each.name == "variance"]
    for _ in range(5):
        zoo.train(model, recorder)
    assert all(np.isfinite(value).all() for value in zoo.values(model.statistics))
    assert all((value > 0).all() for value in zoo.values(variances))
    assert any(abs(value).max() > 0.01 for value in zoo.values(means))
