"""Divide serial functions over the ranks: the rules that both host libraries have.

The folder of each host library has those of its own operations, beside `intercept`.
"""

from synkhronos._host.base.dividing import elementwise, indices, relating, scans, shapes

__all__ = ["elementwise", "indices", "relating", "scans", "shapes"]
