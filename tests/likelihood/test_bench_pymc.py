"""``synkhronos bench pymc``, with few rows."""

import json

import pytest

pytest.importorskip("pymc", minversion="6")

from synkhronos.__main__ import main

pytestmark = [
    pytest.mark.filterwarnings("default"),  # PyMC and its libraries warn of many things
]


def test_bench(capsys):
    arguments = ["--models", "hierarchical", "--rows", "50", "--pays", "20", "--seconds", "0.1"]
    assert main(["bench", "pymc", *arguments, "--draws", "3", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    [evaluation], [pays], [sampling] = (
        results[each] for each in ("evaluations", "pays", "sampling")
    )
    assert evaluation["model"] == "hierarchical"
    assert evaluation["reading"] > 0
    assert pays["rows"] == 20
    assert pays["ranks_us"] > 0
    assert sampling["ranks_means"] == pytest.approx(sampling["plain_means"], rel=1e-3)
    from synkhronos.tools.bench import pymc

    pymc._print(results)
    assert "one chain" in capsys.readouterr().out
