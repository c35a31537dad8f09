"""Every demo runs, small, and its results are right; what they share refuses bad arguments."""

import argparse
import importlib
import importlib.util
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import theano
from support import gallery
from support.layouts import Layout, forked
from support.running import python

import synkhronos as synk
from synkhronos import session

DEMOS = Path(__file__).parents[2] / "demos"


@pytest.fixture
def demo(monkeypatch):
    """Import demos; end the session if one of them fails to."""

    def load(name):
        spec = importlib.util.spec_from_file_location(f"demos_{name}", DEMOS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    monkeypatch.delenv("SYNKHRONOS_DEVICES", raising=False)
    yield load
    assert session._Current.session is None or session.close(), "the demo left its session open"


@pytest.mark.usefixtures("quickly_compiled")
def test_train_digits_learns_as_serial_theano_does(demo, capsys, tmp_path):
    picture = tmp_path / "curves.png"
    found = demo("train_digits").main(
        # 1438 digits are not a multiple of 100, nor 100 of 3: averages must be over rows.
        ["--ranks", "3", "--epochs", "4", "--batch", "100", "--hidden", "40", "30"]
        + ["--plot", str(picture)]
    )
    assert found["ranks"] == 3
    assert len(found["losses"]) == len(found["accuracies"]) == 4
    assert found["losses"][-1] < found["losses"][0] / 4
    assert found["accuracies"][-1] > 0.85
    assert found["accuracies"][-1] == pytest.approx(found["serial_accuracies"][-1], abs=0.01)
    assert found["difference"] < 1e-4
    assert found["replicas_equal"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    out, err = capsys.readouterr()
    assert "epoch   4" in out and gallery.unsaid("train_digits", out) == []
    assert err == ""  # no progress bars where it is no terminal


@pytest.mark.slow("trains a network with 128 units in two layers")
def test_train_digits_reaches_95_percent(demo):
    found = demo("train_digits").main(["--ranks", "2", "--hidden", "128", "128"])
    assert max(found["accuracies"]) > 0.95 and found["accuracies"][-1] > 0.95


@pytest.mark.usefixtures("quickly_compiled")
def test_several_machines_on_one(demo, capsys):
    found = demo("several_machines").main(["--ranks", "2", "--steps", "8", "--hidden", "8"])
    assert (found["ranks"], len(found["hosts"]), len(set(found["hosts"]))) == (2, 2, 1)
    assert found["losses"] == pytest.approx(found["serial_losses"])
    assert found["losses"][-1] < found["losses"][0]
    assert found["difference"] < 1e-12 and found["replicas_equal"]
    assert f"{found['hosts'][0]}: ranks 0, 1\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--devices", "gpu"], "'gpu' is not the name of a device"),
        (["--devices", "cpu,cpu", "--ranks", "3"], "3"),
        (["--ranks", "two"], "--ranks: must be a whole number of at least 1, got 'two'"),
        (["--seed", "-1"], "--seed: must be a whole number from 0 to 4294967295, got '-1'"),
        (["--plot", "no/such/folder.png"], "--plot: no/such/folder.png can't be written: No such"),
    ],
)
def test_train_digits_says_what_is_wrong_with_its_arguments(demo, capsys, arguments, said):
    with pytest.raises(SystemExit) as end:
        demo("train_digits").main(arguments)
    assert end.value.code not in (0, None)
    assert said in f"{end.value.code} {capsys.readouterr().err}"


@pytest.fixture
def shared(monkeypatch):
    """Import what the demos share."""
    monkeypatch.syspath_prepend(str(DEMOS.parent))
    return lambda name: importlib.import_module(f"demos.{name}")


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("positive", ["1", "12"], ["0", "-1", "1.5", "two", ""]),
        ("seed", ["0", "4294967295"], ["-1", "4294967296", "1e3", "x"]),
        ("above_zero", ["1e-9", "3"], ["0", "-1", "nan", "inf", "fast"]),
    ],
)
def test_numbers_of_the_command_line(shared, kind, good, bad):
    convert = getattr(shared("_arguments"), kind)
    assert [convert(text) for text in good] == [float(text) for text in good]
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match=f"must be a .*, got '{text}'"):
            convert(text)


def test_a_file_is_tried_before_the_training_and_left_as_it_was(shared, tmp_path):
    arguments = shared("_arguments")
    new, old = tmp_path / "new.png", tmp_path / "old.PNG"
    old.write_text("a picture")
    assert arguments.picture(str(new)) == new and not new.exists()
    assert arguments.picture(str(old)) == old and old.read_text() == "a picture"
    for text in (str(tmp_path), str(new / "curves.json"), "/proc/curves.json"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"{text} can't be written: "):
            arguments.output_file(text)
    for text in ("curves", "curves.doc"):
        with pytest.raises(argparse.ArgumentTypeError, match=rf"\.png, .*\.svg, .*, got {text}"):
            arguments.picture(text)


def test_replicas_are_compared_bit_by_bit(shared):
    zero, number = theano.shared(np.zeros(2), "zero"), theano.shared(np.float64(3), "number")
    with forked(Layout(2)):
        equal = shared("_shared").replicas_equal
        synk.broadcast([zero, number])
        assert equal([zero, number])
        synk.set_value(1, zero, [0.0, -0.0])
        assert not equal([zero, number]) and equal([number])
        synk.set_value(1, zero, [0.0])
        assert not equal([zero])


def test_single_precision_unless_the_user_chose(shared, monkeypatch, capsys):
    float_type = shared("_shared").float_type
    monkeypatch.setattr(theano.configparser, "THEANO_FLAGS", "floatX=float64,device=cpu")
    with theano.change_flags(floatX="float32"):  # as Keras does
        assert float_type() == "float64"
    assert not capsys.readouterr().out
    monkeypatch.setattr(theano.configparser, "THEANO_FLAGS", "")
    with theano.change_flags(floatX="float64"):
        assert float_type() == "float32"
    assert "floatX=float32" in capsys.readouterr().out


def test_the_picture_shows_how_fast_runs_were(shared, tmp_path, capsys):
    log = shared("_shared").Log
    runs = [
        log("2 ranks", 10, losses=[2.0, 1.0], seconds=[0.5, 9.0, 0.5]),
        log("serial, 1 thread", 10, True, losses=[2.0, 1.0], seconds=[1.0]),
        log("serial, 2 threads", 10, True, losses=[2.0], seconds=[0.8]),
    ]
    picture = tmp_path / "curves.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text as text
        shared("_reports").plot_runs(picture, runs)
        drawn = picture.read_text()
        shared("_reports").plot_runs(picture, runs[:1])
    for text in (
        "training loss",
        "rows per second",
        "speedup over serial, 1 thread",
        *("2.00", "1.00", "1.25"),
    ):
        assert f">{text}</text>" in drawn, text
    assert "accuracy" not in drawn and "speedup" not in picture.read_text()


def test_a_demo_runs_as_a_script_from_any_folder(tmp_path):
    child = python(DEMOS / "train_digits.py", "--help", cwd=tmp_path)
    assert (child.returncode, child.stderr) == (0, "") and "--ranks" in child.stdout
