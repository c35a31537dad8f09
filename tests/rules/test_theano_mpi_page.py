"""The page for users of Theano-MPI: each defect that it lists has a test, and imports are there."""

import ast
import importlib
import re
from pathlib import Path

import pytest
from support.compatible import restored

from synkhronos.rules import compatible
from synkhronos.rules.recorder import COLUMNS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "theano_mpi.rst").read_text(encoding="utf-8")


def defects():
    """Return (defect, names of tests) of the rows of the table."""
    table = PAGE.partition(".. _theano-mpi-defects:")[2].partition("list-table::")[2]
    rows = re.findall(r"   \* - (.*?)\n     -(.*?)(?=\n   \*|\Z)", table, re.DOTALL)
    rows = [(said, re.findall(r"``(\w+)``", named)) for said, named in rows[1:]]
    return [row for row in rows if not row[0].startswith("**")]


def names_of_tests():
    found = set()
    for path in ROOT.glob("tests/*/test_*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return found


def test_each_defect_has_a_test():
    assert len(defects()) > 40
    named = {name for _, names in defects() for name in names}
    assert all(names for _, names in defects())
    assert named - names_of_tests() == set()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"^``(theanompi\.[\w.]+)``  ", PAGE, re.M))))
def test_what_model_files_import_is_there(name):
    listed = re.search(rf"^``{re.escape(name)}`` +(.*)$", PAGE, re.M)[1]
    with restored():
        compatible.install()
        module = importlib.import_module(name)
        for each in re.findall(r"``([\w.]+)[(\w, )]*``", listed):
            found = module
            for part in each.split("."):
                found = (
                    getattr(found, part)
                    if hasattr(found, part)
                    else importlib.import_module(f"{found.__name__}.{part}")
                )


def test_columns_are_those_of_the_recorder():
    for name, columns in COLUMNS.items():
        said = re.search(rf"^``{name}`` +(.*)$", PAGE, re.M)[1]
        for column in columns:
            assert column.replace("lr", "learning rate") in said, name
