"""Finders that serve the modules of this folder as ``theanompi.*``, and what ranks may lack.

    theanompi.lib.opt            lib/opt.py
    theanompi.models.alex_net    zoo/alex_net.py, by RENAMED

A module that is found so is the module of this package itself, not a second copy of it, so classes
and switches are the same under both names. `hickle` is served only where it isn't installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec

THEIRS = "theanompi"
OURS = "synkhronos.rules.compatible"
STAND_INS = {"hickle": f"{OURS}.stand_ins.hickle"}
# Their names of models, and of folders of models, by which those of the zoo are found.
RENAMED = {
    ".models.lasagne_model_zoo.data": ".models.data",
    ".models.lasagne_model_zoo": ".zoo",
    ".models.keras_model_zoo.data": ".models.data",
    ".models.keras_model_zoo": ".zoo",
    ".models.lstm_theanompi": ".zoo.lstm",
    ".models.lstm_theanompi_outdated": ".zoo.lstm",
    **{f".models.{name}": f".zoo.{name}" for name in ("alex_net", "cifar10", "googlenet", "lstm")},
}

SERVED = (
    "Synkhronos serves theanompi.lib, theanompi.models.layers2, theanompi.models.data, and the "
    "models theanompi.models.{alex_net, cifar10, googlenet, lstm}, "
    "theanompi.models.lasagne_model_zoo.{vgg16, resnet50, wgan, lsgan, lsgan_cifar10} and "
    "theanompi.models.keras_model_zoo.wresnet."
)


def ours(name: str) -> str:
    """Return the name of the module that answers to one of their names.

    >>> ours("theanompi.models.lasagne_model_zoo.vgg16")
    'synkhronos.rules.compatible.zoo.vgg16'
    """
    path = name[len(THEIRS) :]
    for old, new in RENAMED.items():
        if f"{path}.".startswith(f"{old}."):
            return f"{OURS}{new}{path[len(old) :]}"
    return OURS + path


class AliasLoader:
    """Gives the import system a module that is imported under another name."""

    def __init__(self, name: str):
        self._name = name

    def create_module(self, spec: ModuleSpec):
        """Return the module of this package."""
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module) -> None:
        """Give the module its own spec again, which the import system has replaced."""
        module.__spec__ = self._spec


def _spec(name, module):
    spec = ModuleSpec(name, AliasLoader(module), is_package=False)
    found = importlib.util.find_spec(module)
    spec.submodule_search_locations = found.submodule_search_locations
    return spec


class AliasFinder:
    """Finds ``theanompi.a.b`` where this folder has ``a/b``. It comes before all other finders."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Return the spec of one of their modules; None for any other module."""
        if name != THEIRS and not name.startswith(f"{THEIRS}."):
            return None
        module = ours(name)
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {name!r}: {SERVED}", name=name)
        return _spec(name, module)


class StandInFinder:
    """Finds stand-ins for packages that aren't installed. It comes after all other finders."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Return the spec of a stand-in; None for any other module."""
        return _spec(name, STAND_INS[name]) if name in STAND_INS else None


def install() -> None:
    """Put both finders on ``sys.meta_path``, once."""
    if AliasFinder not in sys.meta_path:
        sys.meta_path.insert(0, AliasFinder)
    if StandInFinder not in sys.meta_path:
        sys.meta_path.append(StandInFinder)
