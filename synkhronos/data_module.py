"""Re-export :mod:`synkhronos.inputs` under its name of 2017."""

from synkhronos.inputs import Data, data

__all__ = ["Data", "data"]
