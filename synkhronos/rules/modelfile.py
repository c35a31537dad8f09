"""Find the file of a model, and look for its class, without running it."""

from __future__ import annotations

import ast
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from synkhronos import _wording
from synkhronos._host import pythons
from synkhronos.rules.compatible import finder
from synkhronos.rules.compatible.model_files import origin_of

_PACKAGE = Path(__file__).parents[1]
# Packages that models and their data import, and the extras that install them.
EXTRAS = {"lasagne": "demos", "keras": "demos", "sklearn": "rules", "h5py": "rules"}
_WITH_DIGITS = {"Cifar10_data", "MNIST_data", "IMDB_data"}  # may be made of scikit-learn's digits


def is_path(modelfile: str) -> bool:
    """Return whether a model is named by the path of its file, and not by a dotted name.

    >>> is_path("models/cifar10.py"), is_path("models.cifar10")
    (True, False)
    """
    return modelfile.endswith(".py") or os.sep in modelfile


def find(modelfile: str, modelclass: str) -> Path:
    """Return the file of a model; raise if it isn't there, or has no such class.

    `modelfile` is a dotted name, as in an import, or the path of a file.
    """
    for name, value in (("modelfile", modelfile), ("modelclass", modelclass)):
        if not isinstance(value, str):
            raise TypeError(f"{name} must be a text, got {_wording.shown(value)}.")
    if not modelclass.isidentifier():
        raise ValueError(f"modelclass must be the name of a class, got {modelclass!r}.")
    path = _by_path(modelfile) if is_path(modelfile) else _by_name(modelfile)
    _check_class(path, modelfile, modelclass)
    return path


def _by_path(modelfile):
    path = Path(modelfile).expanduser()
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no model file {modelfile!r} in {os.getcwd()}.{_meant(path)}"
        )
    return path


def _folders():
    """Return the folders in which ranks look for a module, the working folder last.

    The script's folder is left out, unless it is on ``PYTHONPATH``.
    """
    here, script = os.getcwd(), getattr(sys.modules.get("__main__"), "__file__", None)
    own = {"", here, os.path.dirname(os.path.abspath(script)) if script else ""}
    on_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [*(each for each in sys.path if each not in own or each in on_path), here]


def _by_name(modelfile):
    parts = modelfile.split(".")
    if not all(part.isidentifier() for part in parts):
        raise ValueError(
            f"modelfile must be a dotted name such as models.cifar10, or the path of a file such "
            f"as models/cifar10.py, got {modelfile!r}."
        )
    places = [Path(folder or ".").joinpath(*parts) for folder in _folders()]
    if parts[0] == "theanompi":
        inside = finder.ours(modelfile).split(".")
        places.insert(0, _PACKAGE.joinpath(*inside[1:]))
    for place in places:
        for path in (place.parent / f"{place.name}.py", place / "__init__.py"):
            if path.is_file():
                return path
    first = places[-1]
    raise FileNotFoundError(
        f"there is no module {modelfile!r}: {'/'.join(parts)}.py is neither in {os.getcwd()} nor "
        f"on PYTHONPATH.{_meant(first.parent / f'{first.name}.py')}"
    )


def _meant(path):
    """Return a sentence that names a file of the folder with a similar name, or an empty string."""
    try:
        return _wording.nearest(path.name, [each.name for each in path.parent.glob("*.py")])
    except OSError:
        return ""


def _check_class(path, modelfile, modelclass):
    nodes = [each for node in _statements(path) for each in ast.walk(node)]
    names = {name for node in nodes for name in _bound(node)}
    if modelclass in names or "*" in names or "__getattr__" in names:
        return
    classes = sorted(node.name for node in nodes if isinstance(node, ast.ClassDef))
    there = f"its classes are {', '.join(classes)}" if classes else "it has no class"
    raise ValueError(
        f"{modelfile} ({path}) has no class {modelclass!r}; {there}."
        f"{_wording.nearest(modelclass, classes)}"
    )


def check_packages(path: Path, modelfile: str) -> None:
    """Raise ImportError if a model's file imports a package that is not installed here."""
    has_digits = os.environ.get("SYNKHRONOS_DATA") == "digits"
    for node in _statements(path):
        if any(isinstance(each, ast.Name) and each.id == "sys" for each in ast.walk(node)):
            return  # it may say in `sys.path` where packages are
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        names = {alias.name for alias in node.names}
        modules = names if isinstance(node, ast.Import) else {f"{'.' * node.level}{node.module}"}
        if has_digits and not names.isdisjoint(_WITH_DIGITS):
            modules.add("sklearn")
        for name in EXTRAS.keys() & {module.partition(".")[0] for module in modules}:
            if not (origin_of(name) or PathFinder.find_spec(name, [os.getcwd(), str(path.parent)])):
                needed = f"{modelfile} needs {name}, which is not installed here"
                raise ImportError(f"{needed}: {pythons.install(EXTRAS[name])}")


def _statements(path):
    """Return the statements of a file; if ranks will say what is wrong, one that binds any name."""
    try:
        return ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError):
        return ast.parse("from _ import *").body


def _bound(node):
    """Return the names that a node of the syntax tree binds."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    return []
