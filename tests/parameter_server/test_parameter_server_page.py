"""The page of the parameter server: its code runs, its names are there, its defects have tests."""

import ast
import re
import textwrap
from pathlib import Path

import numpy as np
import pytest

from synkhronos import parameter_server as ps
from synkhronos.parameter_server import reductions
from synkhronos.parameter_server.parameters import PARAMETERS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "parameter_server.rst").read_text(encoding="utf-8")
API = (ROOT / "docs" / "parameter_server_api.rst").read_text(encoding="utf-8")
THEIRS = """CreateSharedModel SetParam Init InitKey Push PullReq PullWait SetWeight_ CheckWeight
    InitUpdater InitModel Update"""


@pytest.mark.usefixtures("quickly_compiled")
def test_the_code_computes_what_the_page_says():
    blocks = re.findall(r"code-block:: python\n\n((?: {4}.*\n|\n)+)", PAGE)
    names = {}
    for block in blocks:
        exec(textwrap.dedent(block), names)
    # The network has been trained by two devices: as one does with all rows.
    rows, targets = names["rows"], names["targets"]
    weights = [names["first"].copy(), names["second"].copy()]
    for _ in range(20):
        hidden = np.tanh(rows.dot(weights[0]))
        error = (hidden.dot(weights[1]) - targets) / len(rows)
        below = error.dot(weights[1].T) * (1 - hidden**2)
        weights = [weights[0] - 0.1 * rows.T.dot(below), weights[1] - 0.1 * hidden.T.dot(error)]
    for trained in names["trained"]:
        for found, expected in zip(trained, weights):
            np.testing.assert_allclose(found, expected, rtol=1e-9)
    assert abs(weights[0] - names["first"]).max() > 0.01


def rows_of(label):
    """Return (theirs, ours) of the rows of a list-table."""
    table = PAGE.partition(f".. _{label}:")[2].partition("list-table::")[2]
    table = re.split(r"\n\n\S", table)[0]
    rows = re.findall(r"   \* - (.*?)\n     -(.*?)(?=\n   \*|\Z)", table, re.DOTALL)
    return [row for row in rows[1:] if not row[0].startswith("**")]


def test_names_are_there():
    rows = rows_of("parameter-server-names")
    assert len(rows) > 20
    store = ps.create("local")
    for _, ours in rows:
        for owner, name in re.findall(r"``(store|ps)\.(\w+)", ours):
            assert hasattr(store if owner == "store" else ps, name), name
    theirs = " ".join(each for each, _ in rows)
    for name in re.findall(r"\w+", THEIRS):
        assert re.search(rf"\b{name}\b", theirs), name


def test_parameters_are_those_of_the_store():
    [table] = re.findall(r"^Parameters\n-+\n(.*?)^\.\. _", PAGE, re.M | re.S)
    listed = dict(re.findall(r"^``(\w+)`` +(\S+) ", table, re.M))
    assert set(listed) == set(PARAMETERS)
    for name, default in listed.items():
        said = default.strip("`").replace(",", "")
        value = PARAMETERS[name][0]
        assert said == str(int(value) if isinstance(value, bool) else value), name
    [ops] = re.findall(r"^``push_op\[KEY\]`` +``sum`` +the reduction of a key: (.*)$", table, re.M)
    assert set(re.findall(r"``(\w+)``", ops)) <= set(reductions.names()) and "<operations>" in ops


def test_kinds_are_all_explained():
    kinds = re.findall(r"^``(local|dist_\w+)``  ", PAGE, re.M)
    assert kinds == ["local", "dist_sync", "dist_async"] and set(kinds) == set(ps.KINDS)


def names_of_tests():
    found = set()
    for path in (ROOT / "tests" / "parameter_server").glob("test_*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return found


def test_each_defect_has_a_test():
    rows = rows_of("parameter-server-defects")
    assert len(rows) > 15
    there = names_of_tests()
    for defect, tests in rows:
        named = re.findall(r"``(\w+)``", tests)
        assert named, defect
        assert set(named) <= there, defect


def test_the_api_page_has_each_public_name():
    listed = re.findall(r"^\.\. (?:auto\w+|data):: (\w+)", API, re.M)
    assert sorted(listed) == sorted(ps.__all__)
