"""Finders that serve the modules of this folder as ``theanompi.*``, and what ranks may lack.

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
ZOO = " The models of Theano-MPI are files in demos/models of Synkhronos: copy the one you need."


class Loader:
    """Gives the import system a module that is imported under another name."""

    def __init__(self, name: str):
        self._name = name

    def create_module(self, spec: ModuleSpec):
        """Return the module of this package."""
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module) -> None:
        """Keep the module as it is: the import system has put its spec in place of ours."""
        module.__spec__ = self._spec


def _spec(name, ours):
    spec = ModuleSpec(name, Loader(ours), is_package=False)
    found = importlib.util.find_spec(ours)
    spec.submodule_search_locations = found.submodule_search_locations
    return spec


class Finder:
    """Finds ``theanompi.a.b`` where this folder has ``a/b``. It comes before all other finders."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Return the spec of one of their modules; None for any other module."""
        if name != THEIRS and not name.startswith(f"{THEIRS}."):
            return None
        ours = OURS + name[len(THEIRS) :]
        if importlib.util.find_spec(ours) is None:
            zoo = ZOO if name.startswith(f"{THEIRS}.models.") else ""
            raise ModuleNotFoundError(
                f"No module named {name!r}: Synkhronos serves theanompi.lib.opt, "
                f"theanompi.lib.recorder, theanompi.models.layers2 and theanompi.models.data.{zoo}",
                name=name,
            )
        return _spec(name, ours)


class StandInFinder:
    """Finds stand-ins for packages that aren't installed. It comes after all other finders."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Return the spec of a stand-in; None for any other module."""
        return _spec(name, STAND_INS[name]) if name in STAND_INS else None


def install() -> None:
    """Put both finders on ``sys.meta_path``, once."""
    if Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)
    if StandInFinder not in sys.meta_path:
        sys.meta_path.append(StandInFinder)
