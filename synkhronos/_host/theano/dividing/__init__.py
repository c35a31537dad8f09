"""Divide serial functions over the ranks: rules of Theano's own operations, and `intercept`."""

from synkhronos._host.theano.dividing import draws, operation_rules
from synkhronos._host.theano.dividing.intercepting import intercept

__all__ = ["draws", "intercept", "operation_rules"]
