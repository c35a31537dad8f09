"""The host library provides each name that is listed, and no other is used of it."""

import ast

import pytest
from support.sources import MODULES

from synkhronos import _host, _systems

HOSTS = ["theano", "pytensor"]
CHOSEN = "synkhronos._host.base.chosen_library"  # in `base` also under the name `host`


def imported(body):
    """Yield (module, name) for each name that statements import."""
    for node in body:
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module, alias.name) for alias in node.names)


def listed():
    """Return the names that `_host` has, as (module, name): of `base`, then a list for each host.

    From the sources, as an environment has one of the libraries.
    """
    tree = MODULES["_host.names"]
    [choice] = [node for node in tree.body if isinstance(node, ast.If)]
    of_base, *of_hosts = [[*imported(body)] for body in (tree.body, choice.body, choice.orelse)]
    assigned = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    for host, names in zip(HOSTS, of_hosts):
        folder = f"synkhronos._host.{host}"
        names[:] = [(module, name) for module, name in names if module != folder]
        names += [(f"{folder}.{value.value.id}", value.attr) for value in assigned]
    return [of_base, *of_hosts]


def test_each_host_provides_all_that_is_listed():
    base, *of_hosts = listed()
    for host, names in zip(HOSTS, of_hosts):
        for module, name in [*base, *names]:
            place = module.replace("synkhronos.", "", 1)
            place = f"_host.{host}.library" if place == "_host.base.chosen_library" else place
            assert name in {*defined_names(MODULES[place])}, (host, module, name)
    theano, pytensor = ([name for _, name in names] for names in of_hosts)
    assert theano == pytensor


def used_by_base():
    """Yield each name of the chosen library that `base` imports, or uses as `host.name`."""
    for name, tree in MODULES.items():
        is_base = name.startswith("_host.base.")
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == CHOSEN:
                yield from (alias.name for alias in node.names)
            elif (
                is_base
                and isinstance(node, ast.Attribute)
                and getattr(node.value, "id", "") == "host"
            ):
                yield node.attr


def test_both_libraries_have_what_base_uses_of_them():
    used = {*used_by_base()}
    assert {"Elemwise", "Scan", "ancestors"} < used
    for name in HOSTS:
        assert used <= {*defined_names(MODULES[f"_host.{name}.library"])}


def defined_names(tree):
    """Yield the names that a module defines or imports."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Try):
            yield from defined_names(node)
        elif isinstance(node, ast.Assign):
            yield from (
                each.id
                for target in node.targets
                for each in ast.walk(target)
                if isinstance(each, ast.Name)
            )


def test_the_host_of_this_process_has_all_names():
    names = {name for names in listed() for _, name in names}
    assert all(getattr(_host, name) is not None for name in names)


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
    """Where the core is alone, others may be listed for the systems."""
    base, of_host, _ = ([name for _, name in names] for names in listed())
    used, known = {name for _, name in used_names()}, {*base, *of_host}
    assert len(known) == len(base + of_host)
    assert used == known or (used < known and _systems.there() != list(_systems._ALL))


def test_other_names_are_refused():
    with pytest.raises(AttributeError, match="no attribute 'anything'"):
        _host.anything  # noqa: B018
