"""Import model files that were written for Python 2 and for GPUs.

A file below the working folder that mentions theanompi, and the file of the model itself, gets

===========================================  =====================================================
``xrange``, and ``map``, ``filter``, ``zip`` as names of the file, as in Python 2: the last three
                                             return lists. The builtins stay as they are
``isinstance(p, GpuArraySharedVariable)``    is true for shared variables of a CPU rank, too
``x.sync()``                                 does nothing where ``x`` is an array of NumPy: a CPU
                                             rank's ``param.container.value``
``theano.gpuarray.dnn``                      its convolution and pooling compute on a CPU rank, too
``keras.datasets``                           is made up where ``$SYNKHRONOS_DATA`` says so
===========================================  =====================================================

Such files are compiled at each import: their compiled form is of no use elsewhere.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib.util
import re
import sys
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path

import numpy as np

PACKAGE = Path(__file__).resolve().parents[2]
INSTALLED = {"site-packages", "dist-packages"}
OF_PYTHON_2 = re.compile(
    rb"^\s*(print|exec)\s+[^(=\s]|^\s*print\s*$|^\s*except\s+[\w., ()]+,\s*\w+\s*:"
    rb"|^\s*raise\s+\w+\s*,|<>|`[^`]+`|\b0\d+\b|\b\d+[lL]\b|\bur[\"']|^\s*print\s+[\"'(]"
)

_models = set()  # names of modules that are models, whatever they mention


def install() -> None:
    """Put the finder of model files on ``sys.meta_path``, once."""
    if ModelFileFinder not in sys.meta_path:
        sys.meta_path.insert(0, ModelFileFinder)


@contextlib.contextmanager
def model(name: str):
    """Import the module of this name as a model file inside a with block."""
    _models.add(name)
    try:
        yield
    finally:
        _models.discard(name)


def load(name: str, path: Path):
    """Import a file as a model file under a name, unless it is imported already."""
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    spec = importlib.util.spec_from_file_location(
        name, path, loader=ModelFileLoader(name, str(path))
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def origin_of(name: str):
    """Return the file that a top-level module would be imported from; None if there is none."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).resolve() if spec and spec.has_location else None


def dotted_name(path: Path):
    """Return the name under which a file below the working folder is imported; None if by none."""
    try:
        parts = path.relative_to(Path.cwd().resolve()).with_suffix("").parts
    except ValueError:
        return None
    name = ".".join(parts)
    if all(part.isidentifier() for part in parts) and origin_of(name) == path:
        return name
    return None


class ModelFileFinder:
    """Finds model files before other finders do, and leaves all other modules to them."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Return the spec of a model file, with a `ModelFileLoader`; None for any other module."""
        if name in sys.builtin_module_names:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return None
        if name in _models or _is_model_file(Path(spec.origin)):
            spec.loader = ModelFileLoader(name, spec.origin)
            return spec
        return None


def _is_model_file(path):
    path, here = path.resolve(), Path.cwd().resolve()
    below = here in path.parents and not INSTALLED & set(path.relative_to(here).parts)
    return below and PACKAGE not in path.parents and b"theanompi" in path.read_bytes()


class ModelFileLoader(SourceFileLoader):
    """Loads a model file: rewrites ``x.sync()``, and puts the names above into the module."""

    def get_code(self, fullname):
        """Return the compiled file, which is never taken from ``__pycache__``."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)

    def source_to_code(self, data, path, *, _optimize=-1):
        """Compile the source; raise a SyntaxError that names Python 2 where that is the cause."""
        try:
            tree = ast.parse(data, path)
        except SyntaxError as error:
            raise _explained(error, data, path) from error
        tree = ast.fix_missing_locations(_SyncCalls().visit(tree))
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)

    def exec_module(self, module) -> None:
        """Run the file, in a module that has the names above."""
        vars(module).update(
            xrange=range,
            map=_map,
            filter=_filter,
            zip=_zip,
            isinstance=_isinstance,
            **{_SyncCalls.NAME: sync},
        )
        _let_dnn_compute_on_cpus()
        if b"keras.datasets" in self.get_data(self.get_filename(module.__name__)):
            _let_keras_make_data_up()
        super().exec_module(module)


class _SyncCalls(ast.NodeTransformer):
    """Rewrites each ``x.sync()`` to ``sync(x)``."""

    NAME = "_synkhronos_sync"

    def visit_Call(self, node):
        self.generic_visit(node)
        called = node.func
        if (
            isinstance(called, ast.Attribute)
            and called.attr == "sync"
            and not node.args
            and not node.keywords
        ):
            name = ast.copy_location(ast.Name(self.NAME, ast.Load()), called)
            return ast.copy_location(ast.Call(name, [called.value], []), node)
        return node


def _explained(error, data, path):
    """Return the SyntaxError to raise: with the way to Python 3, if the line is Python 2."""
    lines = data.splitlines()
    number = error.lineno or 0
    line = lines[number - 1] if 0 < number <= len(lines) else b""
    if not (OF_PYTHON_2.search(line) or isinstance(error, TabError) or "print" in str(error.msg)):
        return error
    said = f"{error.msg}. The file is written in Python 2: convert it with `2to3 -w {path}`"
    return SyntaxError(said, (path, error.lineno, error.offset, error.text))


def sync(value):
    """Wait for a value on a GPU; return at once for an array of NumPy, which has no `sync`.

    >>> sync(np.zeros(3))
    """
    if isinstance(value, (np.ndarray, np.generic)):
        return None
    return value.sync()


@functools.wraps(map)
def _map(function, *iterables):
    return [*builtins.map(function or _items, *iterables)]


def _items(*items):
    return items[0] if len(items) == 1 else items


@functools.wraps(filter)
def _filter(function, iterable):
    kept = [*builtins.filter(function, iterable)]
    if isinstance(iterable, str):
        return "".join(kept)
    return tuple(kept) if isinstance(iterable, tuple) else kept


@functools.wraps(zip)
def _zip(*iterables):
    return [*builtins.zip(*iterables)]


def _isinstance(value, kinds):
    """Return whether a value is of a kind; a CPU rank's variable is of the kind of a GPU's."""
    if builtins.isinstance(value, kinds):
        return True
    names = {getattr(kind, "__name__", "") for kind in _flat(kinds)}
    if "GpuArraySharedVariable" not in names and "CudaNdarraySharedVariable" not in names:
        return False
    from theano.tensor.sharedvar import TensorSharedVariable

    return builtins.isinstance(value, TensorSharedVariable)


def _flat(kinds):
    if builtins.isinstance(kinds, tuple):
        for each in kinds:
            yield from _flat(each)
    else:
        yield kinds


def _let_keras_make_data_up():
    """Let Keras' data sets follow ``$SYNKHRONOS_DATA``; this imports Keras."""
    from synkhronos.rules.compatible.models.data import keras_data

    keras_data.install()


def _let_dnn_compute_on_cpus():
    """Put our convolution and pooling into ``theano.gpuarray.dnn``; this imports Theano."""
    from synkhronos.rules.compatible.stand_ins import dnn

    dnn.install()
