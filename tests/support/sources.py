"""The syntax trees of the package's modules."""

import ast
from collections import UserDict
from pathlib import Path

import synkhronos

PACKAGE = Path(synkhronos.__file__).parent


class Trees(UserDict):
    """The tree of each module by its name, relative to the package; parsed when asked for."""

    def __getitem__(self, name):
        if isinstance(self.data[name], Path):
            self.data[name] = ast.parse(self.data[name].read_text())
        return self.data[name]


def modules():
    """Yield the name of each module, relative to the package, and its file."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)
        yield name, path


MODULES = Trees({name: path for name, path in modules() if not name.endswith("conftest")})
