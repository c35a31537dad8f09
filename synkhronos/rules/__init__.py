"""Theano-MPI's rules: they train a model with one process for each device.

    from synkhronos.rules import BSP

    rule = BSP()
    rule.init(devices=["cpu", "cpu"], modelfile="models.cifar10", modelclass="Cifar10_model")
    rule.wait()

The run ends when the script does, so call ``wait`` before.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any, List

__all__ = ["ASGD", "BSP", "EASGD", "GOSGD", "Rule", "RuleFailed", "theanompi"]

# Imported on first use: `tmlauncher` must set how it handles a Ctrl-C before slow imports.
if TYPE_CHECKING:
    from synkhronos.rules.rule_classes import ASGD, BSP, EASGD, GOSGD, Rule, RuleFailed
else:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.rule_classes"), name)


def __dir__() -> List[str]:
    return sorted({*globals(), *__all__})


def theanompi() -> ModuleType:
    """Let this process import ``theanompi``, as model files do; return that package.

    The ranks of a rule have it without this call.

    Examples
    --------
    >>> import synkhronos.rules
    >>> package = synkhronos.rules.theanompi()
    >>> from theanompi import BSP
    >>> BSP is synkhronos.rules.BSP
    True
    """
    from synkhronos.rules import compatible

    return compatible.install()
