"""The contract of model files: each thing that is missing has a sentence, old forms are called."""

import numpy as np
import pytest
import theano

from synkhronos.rules import contract


class Data:
    n_batch_train, n_batch_val = 4.0, 2


class Complete:
    def __init__(self, config=None):
        config = {} if config is None else config
        self.params = [theano.shared(np.zeros(2, "f4"))]
        self.data, self.epoch, self.n_epochs, self.n_subb = Data(), 0, 3, 1
        self.shared_lr = theano.shared(np.float32(0.5))
        self.hidden = config.get("hidden", 8)
        self.calls = []

    def compile_iter_fns(self, *args, **kwargs):
        self.calls.append(kwargs)

    def train_iter(self, count, recorder):
        return count

    val_iter = reset_iter = adjust_hyperp = cleanup = train_iter


def test_a_complete_model_is_taken():
    contract.check(Complete())


def test_data_may_be_divided_into_batches_when_the_model_is_compiled():
    """Wide_ResNet of Theano-MPI does so."""
    model = Complete()
    model.data = type("Later", (), {"batch_data": lambda self, size: None})()
    contract.check(model)
    with pytest.raises(TypeError, match="its data has no number n_batch_train"):
        contract.check(model, is_compiled=True)


@pytest.mark.parametrize("name", [*contract.ATTRIBUTES, *contract.METHODS])
def test_what_is_missing_is_said(name):
    model = Complete()
    setattr(model, name, None)
    with pytest.raises(TypeError, match=rf"Complete can't be trained:\n  - it has no \w+ {name}: "):
        contract.check(model)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ((theano.shared(1.0) for _ in "ab"), "must be a list of shared variables, not generator"),
        ([], "its list params is empty"),
        ([np.zeros(3)], "must be shared variables, not array"),
    ],
)
def test_params_of_a_wrong_kind(params, message):
    model = Complete()
    model.params = params
    with pytest.raises(TypeError, match=message):
        contract.check(model)


def test_data_without_numbers_of_batches():
    model = Complete()
    model.data = object()
    with pytest.raises(TypeError, match="its data has no number n_batch_train"):
        contract.check(model)


def test_compile_iter_fns_is_called_as_it_can_be():
    """Theano-MPI passed sync_type to models that take none, or none to models that need it."""

    class NoKeyword(Complete):
        def compile_iter_fns(self):
            self.calls.append("none")

    class Needs(Complete):
        def compile_iter_fns(self, sync_type):
            self.calls.append(sync_type)

    for kind, expected in ((NoKeyword, "none"), (Needs, "avg"), (Complete, {"sync_type": "avg"})):
        model = kind()
        contract.compile_functions(model, "avg")
        assert model.calls == [expected]
        assert model.sync_type == "avg"


def test_print_info_with_verbose_or_without():
    """It was a TypeError at the end of the first epoch of GANs."""

    class Old(Complete):
        def print_info(self, recorder):
            self.calls.append(recorder)

    class New(Complete):
        def print_info(self, recorder, verbose):
            self.calls.append((recorder, verbose))

    old, new = Old(), New()
    for model in (old, new, Complete()):
        contract.print_info(model, "r", verbose=True)
        contract.print_info(model, "r", verbose=False)
    assert old.calls == ["r"]
    assert new.calls == [("r", True), ("r", False)]


def test_settings_reach_config_attributes_shared_variables_and_data():
    settings = {"hidden": 3, "n_epochs": 9, "shared_lr": 0.25, "data.n_batch_train": 7}
    model, _ = contract.make_model(Complete, {}, settings)
    assert (model.hidden, model.n_epochs, model.data.n_batch_train) == (3, 9, 7)
    assert model.shared_lr.get_value() == np.float32(0.25)


def test_a_constructor_without_config():
    class NoConfig(Complete):
        def __init__(self):
            raise AssertionError

    with pytest.raises(TypeError, match=r"must take one argument, a dict \(config\)"):
        contract.make_model(NoConfig, {}, {})


def test_velocities_of_other_numbers():
    model = Complete()
    model.vels, model.vels2 = [theano.shared(0.0)], [theano.shared(0.0), theano.shared(0.0)]
    with pytest.raises(TypeError, match="of the same length, they have 1 and 2"):
        contract.check_exchanged_velocities(model)


def test_a_step_that_stays_pending_is_told_once():
    model = Complete()
    model.vels, model.vels2 = [theano.shared(0.0)], [theano.shared(0.0)]
    with pytest.warns(match="the last step of an epoch is pending in validation and snapshots"):
        contract.check_exchanged_velocities(model)


def test_a_rate_can_be_scaled_only_if_there_is_one():
    model = Complete()
    contract.ScaledRate(model).set_factor(2)
    assert contract.learning_rate(model) == 1.0
    del model.shared_lr
    with pytest.raises(TypeError, match="set scale_lr to False"):
        contract.ScaledRate(model).set_factor(2)
    assert np.isnan(contract.learning_rate(model))


def test_statistics_are_found_by_name_or_listed():
    model = Complete()
    model.layer = {"m": theano.shared(np.zeros(2, "f4"), "bn.running_mean")}
    assert contract.statistics_of(model) == [model.layer["m"]]
    model.statistics = []
    assert contract.statistics_of(model) == []
