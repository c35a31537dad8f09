"""Divide serial functions over the ranks: rules of PyTensor's own operations, and `intercept`."""

from synkhronos._host.pytensor.dividing import operation_rules
from synkhronos._host.pytensor.dividing.intercepting import intercept

__all__ = ["intercept", "operation_rules"]
