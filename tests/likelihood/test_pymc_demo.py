"""The demo, the tutorial and the notebook of PyMC models, with small sizes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import gallery
from support.jupyter import in_kernel, needs_jupyter

pytest.importorskip("pymc", minversion="6")

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "demos" / "pymc_large_data.ipynb"
FLAGS = re.sub(r"mode=\w+,?", "", os.environ.get("PYTENSOR_FLAGS", ""))  # the default, numba

pytestmark = pytest.mark.filterwarnings("default")  # PyMC and its libraries warn of many things


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from demos import pymc_large_data

    return pymc_large_data


def test_the_demo_samples_the_same_posterior_on_ranks(demo, capsys):
    small = "--rows 2000 --slopes 3 --shops 4 --draws 300 --tune 200 --ranks 2"
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


@pytest.mark.slow("processes that import PyMC and sample")
@pytest.mark.parametrize("name, tolerance", [("pymc_tutorial", 0.02), ("pymc_gallery", 0.2)])
def test_the_scripts_of_the_page_print_what_it_shows(name, tolerance):
    script = ROOT / "docs" / "examples" / f"{name}.py"
    environment = {**os.environ, "PYTENSOR_FLAGS": FLAGS}
    run = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=300, env=environment
    )
    assert run.returncode == 0, run.stderr
    shown = script.with_suffix(".txt").read_text(encoding="utf-8")
    number = r"-?\d+\.\d*"
    words, others = (re.sub(rf"{number}|[ \n]", "", each) for each in (run.stdout, shown))
    assert words == others
    numbers = [np.array(re.findall(number, each), float) for each in (run.stdout, shown)]
    np.testing.assert_allclose(*numbers, atol=tolerance)


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


@pytest.mark.slow("compiles for a minute")
@needs_jupyter
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTENSOR_FLAGS", FLAGS)
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert text.count("100_000") > 1
    (tmp_path / "small.ipynb").write_text(text.replace("100_000", "10_000"), encoding="utf-8")
    in_kernel(tmp_path, "execute", "small.ipynb", "executed.ipynb")
    cells = json.loads((tmp_path / "executed.ipynb").read_text(encoding="utf-8"))["cells"]
    shown = [output.get("data", {}) for cell in cells for output in cell.get("outputs", ())]
    assert ["(True, True)"] in [each.get("text/plain") for each in shown]
    assert sum("image/png" in each for each in shown) == 2
