"""Uses of a variable in a graph: whether it is a total, or anything is computed with it."""

import numpy as np

from synkhronos._host.base.chosen_library import Constant, Variable
from synkhronos._host.base.dividing.division import operation_name

_KEEP = {"add", "sub", "neg", "maximum", "minimum", "second", "DimShuffle", "Join"}
_KEEP |= {"Maximum", "Minimum", "IncSubtensor", "AdvancedIncSubtensor1", "AdvancedIncSubtensor"}


def is_total(value, variable, rows):
    """Return whether a value is the variable's own, but for factors and terms without it.

    Then a total, such as a moving average, is updated. No factor may depend on `rows`.
    """
    left, seen = [value], {variable}
    while left:
        each = left.pop()
        if each in seen or not uses(each, {variable}):
            continue
        seen.add(each)
        name = operation_name(each.owner)
        users = [x for x in each.owner.inputs if uses(x, {variable})]
        if name in ("mul", "true_div"):
            others = [x for x in each.owner.inputs if x not in users]
            is_scaled = users == each.owner.inputs[:1] or (name == "mul" and len(users) == 1)
            if not is_scaled or any(uses(other, rows) for other in others):
                return False
        elif name not in _KEEP and not name.startswith("convert_to"):
            return False
        left += users
    return True


def uses(value, variables):
    """Return whether a value depends on one of some variables; False if it is no variable.

    Neither a use of its shape counts nor of 0 times it, by which Lasagne adds default updates.
    """
    left, seen = [value] if isinstance(value, Variable) else [], set()
    while left:
        each = left.pop()
        if each in variables:
            return True
        node = each.owner
        if each in seen or node is None:
            continue
        seen.add(each)
        name = operation_name(node)
        if name in ("Shape", "Shape_i"):
            continue
        if name != "mul" or not any(map(_is_zero, node.inputs)):
            left += node.inputs
    return False


def _is_zero(value):
    while value.owner is not None and operation_name(value.owner) == "DimShuffle":
        [value] = value.owner.inputs
    return isinstance(value, Constant) and not np.any(value.data)
