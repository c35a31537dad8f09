"""Options of the rules: their table, values that are taken and refused, texts, settings."""

import re
from pathlib import Path

import numpy as np
import pytest

from synkhronos.rules import options
from synkhronos.rules.request import Request


def test_defaults_are_complete():
    assert options.check("BSP") == {
        "sync_type": "cdd",
        "exchange_freq": 1,
        "warm_up_epochs": 5,
        "scale_lr": True,
        "exch_strategy": "nccl32",
        "print_freq": 40,
        "snapshot_freq": 5,
        "snapshot_path": "./snapshots/",
        "inforec_path": "./inforec/",
        "resume": False,
        "patience": 600.0,
        "seed": 23455,
        "made_batches": None,
        "log_path": "./logs/",
        "bind": False,
        "grace": 30.0,
    }
    assert options.check("EASGD")["snapshot_freq"] == options.check("ASGD")["tau"] / 5 == 2
    assert options.check("EASGD")["alpha"] == 0.5 and options.check("GOSGD")["p"] == 0.1
    for rule in options.RULES:
        assert options.check(rule, **options.check(rule)) == options.check(rule)


def test_every_default_is_taken_as_a_value_and_as_a_text():
    for rule in options.RULES:
        for option in options.of_rule(rule).values():
            assert option.check(option.default) == option.default
            assert option.parse(str(option.default)) == option.default
            assert option.sentence and not option.sentence.endswith(".")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("alpha", 1, 1.0),
        ("alpha", np.float32(0.25), 0.25),
        ("tau", np.int64(3), 3),
        ("resume", True, True),
        ("resume", "snapshots/epoch_3.npz", "snapshots/epoch_3.npz"),
        ("made_batches", None, None),
    ],
)
def test_values_that_are_taken(name, value, expected):
    found = options.check("EASGD", **{name: value})[name]
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    ("rule", "given", "error", "message"),
    [
        ("EASGD", {"alpha": 0}, ValueError, "alpha must be a number above 0 and at most 1, got 0"),
        ("EASGD", {"alpha": 1.5}, ValueError, "got 1.5"),
        ("EASGD", {"alpha": float("nan")}, ValueError, "alpha must be a number"),
        ("EASGD", {"alpha": True}, TypeError, "got True"),
        ("EASGD", {"alpha": "0.5"}, TypeError, "got '0.5'"),
        ("EASGD", {"tau": 2.0}, TypeError, "tau must be a whole number from 1 on, got 2.0"),
        ("ASGD", {"gamma": float("inf")}, ValueError, "gamma must be a number above 0"),
        ("BSP", {"sync_type": "cd"}, ValueError, "'cdd' or 'avg' or 'swap', got 'cd'. Perhaps you"),
        ("BSP", {"exch_strategy": "nccl"}, ValueError, "Perhaps you meant nccl"),
        ("BSP", {"scale_lr": 1}, TypeError, "scale_lr must be True or False, got 1"),
        ("BSP", {"snapshot_path": " "}, ValueError, "snapshot_path must be a text"),
        ("BSP", {"snapshot_path": b"a"}, TypeError, "snapshot_path must be a text"),
        ("BSP", {"resume": None}, TypeError, "resume must be a text or False or True, got None"),
        ("BSP", {"made_batches": 0}, ValueError, "a whole number from 1 on or None, got 0"),
        ("BSP", {"seed": 2**32}, ValueError, "a whole number from 0 to 4294967295"),
        ("BSP", {"alpha": 0.5}, TypeError, "BSP has no option 'alpha': it is one of EASGD."),
        ("GOSGD", {"tau": 1}, TypeError, "it is one of EASGD and ASGD."),
        ("EASGD", {"alhpa": 1}, TypeError, "no option 'alhpa'. Perhaps you meant alpha."),
        ("GOSGD", {"quux": 1}, TypeError, "there are: bind, exch_strategy, grace, inforec_path"),
        ("BSPP", {}, ValueError, "there is no rule 'BSPP'.*Perhaps you meant BSP"),
        ("bsp", {}, ValueError, "Perhaps you meant BSP"),
        (None, {}, TypeError, f"the rule must be one of {', '.join(options.RULES)}, got None"),
    ],
)
def test_values_that_are_refused(rule, given, error, message):
    with pytest.raises(error, match=message):
        options.check(rule, **given)


def test_the_ranks_are_not_told_what_only_the_launcher_needs(tmp_path):
    (tmp_path / "model.py").write_text("class Model: pass\n")
    model = str(tmp_path / "model.py"), "Model"
    asked = Request.of("BSP", "cpu", *model, given={"bind": True})
    assert asked.bind and not {"bind", "log_path", "grace"} & set(asked.job([]).options)
    with pytest.raises(TypeError, match=r"no option 'bnd'\. Perhaps you meant bind"):
        Request.of("BSP", "cpu", *model, given={"bnd": True})


@pytest.mark.parametrize(
    ("rule", "name", "text", "expected"),
    [
        ("BSP", "scale_lr", "No", False),
        ("BSP", "scale_lr", "1", True),
        ("BSP", "sync_type", " avg ", "avg"),
        ("GOSGD", "p", "1e-3", 0.001),
        ("EASGD", "tau", " 4", 4),
        ("EASGD", "resume", "true", True),
        ("EASGD", "resume", "a/b", "a/b"),
        ("BSP", "made_batches", "none", None),
        ("BSP", "made_batches", "5", 5),
    ],
)
def test_texts(rule, name, text, expected):
    found = options.of_rule(rule)[name].parse(text)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    ("rule", "name", "text", "message"),
    [
        ("BSP", "scale_lr", "maybe", "scale_lr must be True or False, got 'maybe'"),
        ("GOSGD", "p", "nan", "p must be a number from 0 to 1, got nan"),
        ("GOSGD", "p", "2", "got 2.0"),
        ("GOSGD", "p", "", "got ''"),
        ("EASGD", "tau", "2.5", "tau must be a whole number from 1 on, got '2.5'"),
        ("BSP", "sync_type", "swapp", "Perhaps you meant swap"),
    ],
)
def test_texts_that_are_refused(rule, name, text, message):
    with pytest.raises(ValueError, match=message):
        options.of_rule(rule)[name].parse(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n_epochs=3", ("n_epochs", 3)),
        ("lr=1e-3", ("lr", 0.001)),
        ("data.n_batch_train=10", ("data.n_batch_train", 10)),
        ("lr_step=(20,40)", ("lr_step", [20, 40])),
        ("name=a=b", ("name", "a=b")),
        ("use_momentum=False", ("use_momentum", False)),
        ("sizes={'a': [1, None]}", ("sizes", {"a": [1, None]})),
        ("name=", ("name", "")),
        ("name=__import__('os').system('true')", ("name", "__import__('os').system('true')")),
    ],
)
def test_settings(text, expected):
    assert options.parse_setting(text) == expected


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("n_epochs", ValueError, "NAME=VALUE, such as n_epochs=3, got 'n_epochs'"),
        ("=3", ValueError, "'' is no name of a setting"),
        ("a b=3", ValueError, "'a b' is no name of a setting"),
        ("a..b=3", ValueError, "'a..b' is no name"),
        ("lr=1e999", ValueError, "the setting lr must be finite, got inf"),
        ("a={1, 2}", TypeError, "the setting a must be a number, a text"),
        ("a=3j", TypeError, "got 3j"),
        ("a=b'x'", TypeError, "the setting a must be"),
    ],
)
def test_settings_that_are_refused(text, error, message):
    with pytest.raises(error, match=message):
        options.parse_setting(text)


def test_settings_of_a_script():
    assert options.check_setting("lr_step", np.array([1, 2])) == [1, 2]
    assert options.check_setting("lr", np.float32(0.5)) == 0.5
    with pytest.raises(TypeError, match="name of a setting must be a text"):
        options.check_setting(3, 1)


def test_the_page_of_the_api_lists_all_options():
    page = (Path(__file__).parents[2] / "docs" / "rules_api.rst").read_text()
    rows = re.findall(r"^   \* - ``(\w+)``\n     - (.*)\n     - ``(.*)``\n     - (.*)$", page, re.M)
    expected = set()
    for rule in options.RULES:
        for name, option in options.of_rule(rule).items():
            rules = "all" if option.rules == options.RULES else ", ".join(option.rules)
            default = repr(option.default).replace("'", '"')
            expected.add((name, rules, default, option.sentence))
    assert set(rows) == expected and len(rows) == len(expected)
