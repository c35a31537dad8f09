"""The demo, the tutorial and the notebook of PyMC models, with small sizes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import gallery

pytest.importorskip("pymc", minversion="6")

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "demos" / "pymc_large_data.ipynb"


pytestmark = pytest.mark.filterwarnings("default")  # PyMC and its libraries warn of many things


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from demos import pymc_large_data

    return pymc_large_data


def test_the_demo_samples_the_same_posterior_on_ranks(demo, capsys):
    small = "--rows 2000 --slopes 3 --shops 4 --draws 100 --tune 100 --ranks 2"
    plain, parallel = demo.main(small.split())
    printed = capsys.readouterr().out
    for name, draws in demo.parameters(plain).items():
        others = demo.parameters(parallel)[name]
        # Sums in another order move a trajectory in its last digits first, and so all draws.
        assert abs(draws.mean() - others.mean()) < 0.6 * draws.std(), name
        assert 0.6 < draws.std() / others.std() < 1.6, name
        assert name in printed
    assert [run.label for run in (plain, parallel)] == ["plain PyMC", "2 ranks"]
    assert "speedup" in printed and gallery.unsaid("pymc_large_data", printed) == []


@pytest.mark.slow("a process that imports PyMC and samples")
def test_the_tutorial_prints_what_the_page_shows():
    script = ROOT / "docs" / "examples" / "pymc_tutorial.py"
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    shown = script.with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    printed = run.stdout.splitlines()
    assert printed[:-1] == shown[:-1]
    numbers = [np.array(re.findall(r"-?\d\.\d*", each[-1]), float) for each in (printed, shown)]
    np.testing.assert_allclose(*numbers, atol=0.02)


def test_the_notebook_is_stored_with_its_outputs_and_names_no_machine():
    text = NOTEBOOK.read_text(encoding="utf-8")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert "error" not in {output["output_type"] for output in outputs}
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert len(text) < 400_000
    text = re.sub(r'"image/png": ".*?"', "", text)
    assert not re.findall(r"/home|/root|/tmp|/work|ipykernel_\d|site-packages", text)
