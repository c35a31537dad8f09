"""Where ``Data`` was in 2017; see :mod:`synkhronos.inputs`."""

from synkhronos.inputs import Data, data

__all__ = ["Data", "data"]
