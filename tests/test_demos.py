"""Every demo runs, small, and its results are right."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from synkhronos import session

DEMOS = Path(__file__).parent.parent / "demos"


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


@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu", "cpu,cpu,cpu"])
def test_demo_1_agrees_with_theano_for_any_number_of_ranks(demo, monkeypatch, capsys, devices):
    monkeypatch.setenv("SYNKHRONOS_DEVICES", devices)
    found = demo("demo_1").main()
    assert found["ranks"] == devices.count("cpu")
    assert found["results"] == pytest.approx(found["expected"], rel=1e-5)
    assert "Basic math test passed." in capsys.readouterr().out


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
    out = capsys.readouterr().out
    assert "epoch   4" in out and "Results agree" in out
    assert out.count("peedup") >= 2  # in the table, and in the sentence below it


def test_train_digits_reaches_95_percent(demo):
    found = demo("train_digits").main(["--ranks", "2", "--hidden", "128", "128"])
    assert max(found["accuracies"]) > 0.95 and found["accuracies"][-1] > 0.95


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--devices", "gpu"], "'gpu' is not the name of a device"),
        (["--devices", "cpu,cpu", "--ranks", "3"], "3"),
        (["--ranks", "0"], "at least 1"),
        (["--hidden", "many", "5"], "invalid"),
    ],
)
def test_train_digits_says_what_is_wrong_with_its_arguments(demo, capsys, arguments, said):
    with pytest.raises(SystemExit) as end:
        demo("train_digits").main(arguments)
    assert end.value.code not in (0, None)
    assert said in f"{end.value.code} {capsys.readouterr().err}"


def test_demos_run_as_scripts_from_any_folder(tmp_path):
    for command in (["demo_1.py"], ["train_digits.py", "--help"]):
        child = subprocess.run(
            [sys.executable, str(DEMOS / command[0]), *command[1:]],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert (child.returncode, child.stderr) == (0, ""), child.stderr
        assert "Basic math test passed." in child.stdout or "--ranks" in child.stdout
