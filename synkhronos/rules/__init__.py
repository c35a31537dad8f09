"""Theano-MPI's rules: training by a process of mpirun for each device.

    from synkhronos.rules import BSP

    rule = BSP()
    rule.init(devices=["cpu", "cpu"], modelfile="models.cifar10", modelclass="Cifar10_model")
    rule.wait()

A run ends with the script that has called ``init``, so call ``wait``.
"""

from types import ModuleType

from synkhronos.rules.session import ASGD as ASGD
from synkhronos.rules.session import BSP as BSP
from synkhronos.rules.session import EASGD as EASGD
from synkhronos.rules.session import GOSGD as GOSGD
from synkhronos.rules.session import Rule as Rule
from synkhronos.rules.session import RuleFailed as RuleFailed

__all__ = ["ASGD", "BSP", "EASGD", "GOSGD", "Rule", "RuleFailed", "theanompi"]


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
