"""The demos of Theano-MPI's rules: a session script, a configuration file, and an LSTM."""

import importlib
from pathlib import Path

import pytest
from support import gallery
from support.launching import allow_root, needs_mpirun

from synkhronos.rules import cfg, modelfile, tmlauncher
from synkhronos.rules.recorder import Recorder

ROOT = Path(__file__).parents[2]
pytest.importorskip("mpi4py")
pytestmark = [pytest.mark.mpi, needs_mpirun]


@pytest.fixture
def demo(monkeypatch):
    """Import a demo; let Open MPI start processes for root too."""
    allow_root(monkeypatch)
    monkeypatch.setenv("SYNKHRONOS_DATA", "digits")
    monkeypatch.delenv("THEANO_FLAGS", raising=False)
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"demos.{name}")


@pytest.mark.slow("compiles an LSTM")
def test_the_lstm_trains_on_ranks_with_sentences(demo, monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("SYNKHRONOS_DATA", "made")
    monkeypatch.setenv("SYNKHRONOS_MADE_BATCHES", "6")
    monkeypatch.setenv("THEANO_FLAGS", "cxx=,optimizer=fast_compile")
    sizes = ["--epochs", "2", "--batch", "4", "--units", "4", "--words", "20"]
    errors = demo("theano_mpi_lstm").main([*sizes, "--output", str(tmp_path)])
    assert len(errors) == 2 and all(0 <= error <= 1 for error in errors)
    recorder = Recorder(verbose=False)
    recorder.load(tmp_path / "inforec")
    assert [row[0] for row in recorder.val_info] == [6, 12]
    assert list((tmp_path / "snapshots").glob("snapshot_0002.npz"))
    out = capfd.readouterr().out
    assert gallery.unsaid("theano_mpi_lstm", out) == []


@pytest.mark.slow("trains an LSTM on two ranks")
def test_the_lstm_learns_digits(demo):
    pytest.importorskip("sklearn")
    errors = demo("theano_mpi_lstm").main([])
    assert len(errors) == 15 and min(errors) < 0.25


@pytest.mark.slow("trains a convolutional network on ranks")
@pytest.mark.parametrize("rule", ["BSP", "EASGD"])
def test_a_session_script_trains_without_and_with_a_server(demo, rule, capfd):
    pytest.importorskip("sklearn")
    # That all rules learn, other tests say.
    more = [] if rule == "BSP" else ["--devices", "cpu,cpu,cpu", "--epochs", "2"]
    errors = demo("theano_mpi_digits").main(["--rule", rule, *more])
    # Where each worker goes on alone, one that comes late validates some epochs together.
    assert 1 <= len(errors) <= 8 and errors[-1] < 0.9
    if rule == "BSP":
        assert len(errors) == 8 and errors[0] > 0.4 and errors[-1] < 0.15
        assert gallery.unsaid("theano_mpi_digits", capfd.readouterr().out) == []


def test_the_configuration_file_says_the_same_as_the_session_script(demo, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    file = ROOT / "demos" / "theano_mpi_digits.cfg"
    assert tmlauncher.main([f"-cfg={file}", "--dry-run"]) == 0
    assert "synkhronos.rules.worker" in capsys.readouterr().out
    entries = {key: entry.value for key, entry in cfg.read(str(file)).items()}
    arguments = demo("theano_mpi_digits").parse([])
    assert (entries["RULE"], entries["DEVICES"]) == (arguments.rule, ",".join(arguments.devices))
    assert dict(each.split("=") for each in entries["SET"]) == {
        "n_epochs": str(arguments.epochs),
        "batch_size": str(arguments.batch),
        "filters": str(arguments.filters).replace(" ", ""),
        "units": str(arguments.units),
        "learning_rate": str(arguments.rate),
    }
    assert modelfile.find(entries["MODELFILE"], entries["MODELCLASS"]).exists()
