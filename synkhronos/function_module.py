"""Re-export :mod:`synkhronos.functions` under its name of 2017."""

from synkhronos.functions import Function, distribute, function

__all__ = ["Function", "distribute", "function"]
