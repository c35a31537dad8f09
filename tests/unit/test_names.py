"""A name stands for one class, and a file's name for what two folders have in common at most."""

import ast
from collections import defaultdict

from support.sources import MODULES, modules


def classes(node, outer):
    """Yield the name of each class in a syntax tree, and its full name."""
    for child in ast.iter_child_nodes(node):
        inner = f"{outer}.{child.name}" if hasattr(child, "name") else outer
        if isinstance(child, ast.ClassDef):
            yield child.name, inner
        yield from classes(child, inner)


def test_no_two_classes_have_one_name():
    places = defaultdict(set)  # a set: both branches of an `if` may define one class
    for module, tree in MODULES.items():
        for name, full_name in classes(tree, module):
            places[name].add(full_name)
    assert [sorted(found) for found in places.values() if len(found) > 1] == []


def test_no_file_name_stands_in_more_than_two_folders():
    folders = defaultdict(list)
    for name, path in modules():
        folders[path.name].append(name)
    assert [name for name, found in folders.items() if len(found) > 2] == ["__init__.py"]
