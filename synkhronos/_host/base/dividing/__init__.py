"""Divide serial functions over the ranks: the rules that both host libraries have.

The folder of each host library has those of its own operations, beside `intercept`.
"""

from synkhronos._host.base.dividing import elementwise, indices, scans, shapes
from synkhronos._host.base.dividing.division import CannotDivide, divide

__all__ = ["CannotDivide", "divide", "elementwise", "indices", "scans", "shapes"]
