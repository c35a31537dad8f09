"""The host library provides each name that is listed, and no other is used of it."""

import ast
import importlib

import pytest
from support.sources import MODULES

from synkhronos import _host
from synkhronos._host.choice import choose

HOSTS = ["theano", "pytensor"]


def names_of(module):
    """Return the names that a module imports and assigns, not those that begin with _."""
    return {name for name in defined_names(MODULES[module]) if not name.startswith("_")}


@pytest.mark.parametrize("name", HOSTS)
def test_each_host_provides_all_that_is_listed(name):
    """From the sources, as an environment has one of the libraries."""
    own, shared = names_of(f"_host.{name}.host"), names_of("_host.base.host")
    assert own | shared == set(_host.NAMES)
    assert not own & shared


def defined_names(tree):
    """Yield the names that a module defines or imports."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from (
                each.id
                for target in node.targets
                for each in ast.walk(target)
                if isinstance(each, ast.Name)
            )


def test_the_host_of_this_process_has_all_names():
    assert all(getattr(_host, name) is not None for name in _host.NAMES)
    host = importlib.import_module(f"synkhronos._host.{choose()}.host")
    assert {name for name in vars(host) if not name.startswith("_")} <= set(_host.NAMES)


def used_names():
    """Yield (module, name) for each use of the host library in the package."""
    for name, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "_host":
                yield name, node.attr
            elif isinstance(node, ast.ImportFrom) and node.module == "synkhronos._host":
                names = {alias.name for alias in node.names}
                yield from ((name, each) for each in names if f"_host.{each}" not in MODULES)


def test_what_is_used_is_listed_and_what_is_listed_is_used():
    assert {name for _, name in used_names()} == set(_host.NAMES)


def test_other_names_are_refused():
    with pytest.raises(AttributeError, match="no attribute 'anything'"):
        _host.anything  # noqa: B018
