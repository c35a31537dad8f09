"""Divide serial functions over the ranks; the rules are in the modules beside `division`."""

from synkhronos._host.theano.dividing import draws, elementwise, indices, networks, scans, shapes
from synkhronos._host.theano.dividing.division import CannotDivide, divide
from synkhronos._host.theano.dividing.intercepting import intercept

__all__ = [
    "CannotDivide",
    "divide",
    "draws",
    "elementwise",
    "indices",
    "intercept",
    "networks",
    "scans",
    "shapes",
]
