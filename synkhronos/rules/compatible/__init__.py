"""Let model files of Theano-MPI run here: serve the modules that they import, under their names.

    import theanompi.lib.opt
        │  sys.meta_path: `finder.AliasFinder`
        ▼
    synkhronos.rules.compatible.lib.opt        the same module object, under both names

`install` also lets model files run that were written for GPUs and for Python 2: `model_files`.
Nothing here imports Theano before a model file does, so that a rank can choose its device first.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from synkhronos._wording import shown
from synkhronos.rules.compatible import finder, model_files
from synkhronos.rules.options import RULES


def install() -> ModuleType:
    """Serve ``theanompi`` and its modules in this process; return the package.

    It hides an installed Theano-MPI. A second call changes nothing.

    Raises
    ------
    RuntimeError
        If another package has been imported as ``theanompi`` before.

    Examples
    --------
    >>> package = install()
    >>> from theanompi.lib import recorder
    >>> recorder is package.lib.recorder
    True
    """
    here = sys.modules[__name__]
    other = sys.modules.get(finder.THEIRS)
    if other not in (None, here):
        raise RuntimeError(
            f"theanompi is imported already, from {getattr(other, '__file__', 'elsewhere')}. Call "
            "synkhronos.rules.theanompi() before the first import of theanompi."
        )
    model_files.install()
    finder.install()  # the first of all finders
    sys.modules[finder.THEIRS] = here
    return here


def import_model(modelfile: str) -> ModuleType:
    """Import a model file as a rank does: `install`, then the module.

    `modelfile` is a dotted name, found on ``PYTHONPATH`` or below the working folder, or the path
    of a file. The message of a SyntaxError says how a file of Python 2 is converted.
    """
    if not isinstance(modelfile, str) or not modelfile.strip():
        raise TypeError(
            f"modelfile must be a dotted name (models.cifar10) or a path, got {shown(modelfile)}."
        )
    install()
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, as below
    if os.sep in modelfile or modelfile.endswith(".py"):
        return _from_path(Path(modelfile))
    with model_files.model(modelfile):
        try:
            return importlib.import_module(modelfile)
        except ModuleNotFoundError as error:
            if not _is_part_of(error.name, modelfile):
                raise  # the model's own import of something else
            raise ModuleNotFoundError(
                f"No module {modelfile} below {os.getcwd()} or on PYTHONPATH. MODELFILE is a "
                "dotted name such as models.cifar10, or the path of a file: models/cifar10.py."
                + (f" {finder.SERVED}" if modelfile.startswith(f"{finder.THEIRS}.") else ""),
                name=error.name,
            ) from error


def _is_part_of(name, modelfile):
    return name is not None and f"{modelfile}.".startswith(f"{name}.")


def _from_path(path):
    """Import a file: under its dotted name if it is importable by that, else under its own name."""
    if not path.is_file():
        raise FileNotFoundError(f"No model file {path} (the working folder is {os.getcwd()}).")
    full = path.resolve()
    if str(full.parent) not in sys.path:
        sys.path.append(str(full.parent))  # for its helpers; last, so that they hide nothing
    name = model_files.dotted_name(full)
    if name is None:
        name = full.stem
        if model_files.origin_of(name) != full:
            return model_files.load(name, full)
    with model_files.model(name):
        return importlib.import_module(name)


def __getattr__(name: str) -> Any:
    if name in RULES:
        return getattr(importlib.import_module("synkhronos.rules.rule_classes"), name)
    raise AttributeError(f"module 'theanompi' (of Synkhronos) has no attribute {name!r}")
