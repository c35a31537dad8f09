"""The models of notebooks on ranks: ``python -m benchmarks gallery``."""

import json

import pytest

pytest.importorskip("pymc", minversion="6")

from benchmarks import BENCHMARKS

from synkhronos.tools.bench import frame

pytestmark = pytest.mark.filterwarnings("default")  # PyMC and its libraries warn of many things

CELLS = [
    "%matplotlib inline\nimport numpy as np, pandas as pd, pymc as pm",
    "raise KeyError('this statement alone is left out')\ndata = pd.read_csv(pm.get_data('d.csv'))",
    "with pm.Model() as normal:\n    b = pm.Normal('b')\n"
    "    pm.Normal('y', b * data.x, observed=data.y)\n    idata = pm.sample()",
    "idata.posterior['b'].mean()\nwith pm.Model() as series:\n"
    "    pm.AR('z', [pm.Normal('rho')], init_dist=pm.Normal.dist(), observed=data.y)",
]


def test_notebooks(capsys, tmp_path):
    code = [{"cell_type": "code", "source": [each]} for each in CELLS]
    (tmp_path / "one.ipynb").write_text(json.dumps({"cells": code}))
    cells = "".join(f"```{{code-cell}} ipython3\n:tags: [a]\n\n{each}\n```\n" for each in CELLS)
    (tmp_path / "two.myst.md").write_text(cells)
    (tmp_path / "three.py").write_text("import pandas\npandas.read_csv('http://nowhere/a.csv')")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "d.csv").write_text("x,y\n1,2\n2,3\n3,5\n5,1\n")
    assert frame.main("benchmarks", BENCHMARKS, "gallery", ["--busy-ok", str(tmp_path)]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "4 models, of which 2 are divided"
    assert lines[2] == "three: no model: FileNotFoundError: needs http://nowhere/a.csv"
    for name, (first, second) in {"one": lines[:2], "two": lines[3:]}.items():
        assert first.startswith(f"{name}, normal: divided y (4 rows); equal to ")
        assert float(first.split("equal to ")[1].split(",")[0]) < 1e-10
        assert second.startswith(f"{name}, series: not divided z: each of its rows depends")
