"""Where ``Function`` was in 2017; see :mod:`synkhronos.functions`."""

from synkhronos.functions import Function, distribute, function

__all__ = ["Function", "distribute", "function"]
