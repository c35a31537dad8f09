"""Divide serial functions over the ranks: rules of Theano's own operations, and `intercept`."""

from synkhronos._host.base.dividing import (
    AS_SERIAL,
    CannotDivide,
    Mistake,
    divide,
    divide_step,
    examine,
    operation_name,
)
from synkhronos._host.theano.dividing import draws, networks, operations
from synkhronos._host.theano.dividing.intercepting import intercept

__all__ = [
    "AS_SERIAL",
    "CannotDivide",
    "Mistake",
    "divide",
    "divide_step",
    "draws",
    "examine",
    "intercept",
    "networks",
    "operation_name",
    "operations",
]
