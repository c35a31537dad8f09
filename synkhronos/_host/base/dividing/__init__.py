"""Divide serial functions over the ranks: the rules that both host libraries have.

The folder of each host library has those of its own operations, beside `intercept`.
"""

from synkhronos._host.base.dividing import elementwise, indices, relating, scans, shapes
from synkhronos._host.base.dividing.alone import Mistake, examine
from synkhronos._host.base.dividing.division import CannotDivide, divide
from synkhronos._host.base.dividing.steps import AS_SERIAL, divide_step

__all__ = [
    "AS_SERIAL",
    "CannotDivide",
    "Mistake",
    "divide",
    "divide_step",
    "elementwise",
    "examine",
    "indices",
    "relating",
    "scans",
    "shapes",
]
