"""``synkhronos bench pymc``, with few rows."""

import json

import pytest

pytest.importorskip("pymc", minversion="6")

from benchmarks import BENCHMARKS

from synkhronos.__main__ import main
from synkhronos.tools.bench import frame

pytestmark = pytest.mark.filterwarnings("default")  # PyMC and its libraries warn of many things


def test_bench(capsys, tmp_path):
    arguments = ["--models", "hierarchical", "--rows", "50", "--pays", "20", "--seconds", "0.1"]
    arguments += ["--busy-ok"]
    file, picture = tmp_path / "figures.json", tmp_path / "gains.png"
    arguments += ["--ranks", "2,1", "--draws", "3", "--json", str(file), "--plot", str(picture)]
    assert main(["bench", "pymc", *arguments]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "one chain" in shown and "  hierarchical, 2 ranks " in shown
    results = json.loads(file.read_text())
    [evaluation, alone], [pays], [sampling] = (
        results[each] for each in ("evaluations", "pays", "sampling")
    )
    assert evaluation["model"] == "hierarchical"
    assert evaluation["reading"] > 0
    assert (evaluation["ranks"], alone["ranks"], pays["ranks"], sampling["chains"]) == (2, 1, 2, 2)
    assert pays["rows"] == 20
    assert pays["ranks_us"] > 0
    assert sampling["ranks_means"] == pytest.approx(sampling["plain_means"], rel=1e-3)


def test_beside_jax(capsys, tmp_path):
    pytest.importorskip("jax")
    file = tmp_path / "figures.json"
    arguments = ["--models", "negative_binomial", "--rows", "50", "--seconds", "0.1", "--busy-ok"]
    assert frame.main("benchmarks", BENCHMARKS, "jax", [*arguments, "--json", str(file)]) == 0
    assert "JAX / ranks" in capsys.readouterr().out
    [found] = json.loads(file.read_text())["evaluations"]
    assert min(found["plain_ms"], found["jax_ms"], found["ranks_ms"]) > 0


def test_samplers(capsys, tmp_path):
    file = tmp_path / "figures.json"
    arguments = ["--samplers", "--models", "logistic", "--rows", "50", "--draws", "5", "--busy-ok"]
    assert main(["bench", "pymc", *arguments, "--json", str(file)]) == 0
    assert "one chain" in capsys.readouterr().out
    found = {each["sampler"]: each for each in json.loads(file.read_text())["samplers"]}
    assert found["pymc"]["ranks_ess_per_s"] > 0
    for name, each in found.items():
        assert "(on ranks)" not in each.get("refused", ""), each
        assert "refused" in each or each["ranks_draws_per_s"] > 0, name
