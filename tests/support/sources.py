"""The syntax trees of the package's modules."""

import ast
from pathlib import Path

import synkhronos

PACKAGE = Path(synkhronos.__file__).parent


def modules():
    """Yield the name of each module, relative to the package, and its syntax tree."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)
        yield name, ast.parse(path.read_text())


MODULES = {name: tree for name, tree in modules() if name != "conftest"}
