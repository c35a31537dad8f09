"""Divide serial functions over the ranks: rules of PyTensor's own operations, and `intercept`."""

from synkhronos._host.base.dividing import (
    AS_SERIAL,
    CannotDivide,
    Mistake,
    divide,
    divide_step,
    examine,
    operation_name,
)
from synkhronos._host.pytensor.dividing import operations
from synkhronos._host.pytensor.dividing.intercepting import intercept

__all__ = [
    "AS_SERIAL",
    "CannotDivide",
    "Mistake",
    "divide",
    "divide_step",
    "examine",
    "intercept",
    "operation_name",
    "operations",
]
