"""The host library provides each name that is listed, and no other is used of it."""

import ast
import importlib

import pytest
from support.sources import MODULES

from synkhronos import _host


def test_theano_provides_all_that_is_listed():
    host = importlib.import_module("synkhronos._host.theano.host")
    public = {name for name in vars(host) if not name.startswith("_")}
    assert public == set(_host.NAMES)


def test_each_name_says_what_it_is():
    assert all(text.endswith(".") and len(text) < 80 for text in _host.NAMES.values())


def used_names():
    """Yield (module, name) for each use of the host library in the package."""
    for name, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "_host":
                yield name, node.attr
            elif isinstance(node, ast.ImportFrom) and node.module == "synkhronos._host":
                yield from ((name, alias.name) for alias in node.names)


def test_what_is_used_is_listed_and_what_is_listed_is_used():
    assert {name for _, name in used_names()} == set(_host.NAMES)


def test_other_names_are_refused():
    with pytest.raises(AttributeError, match="no attribute 'anything'"):
        _host.anything  # noqa: B018
