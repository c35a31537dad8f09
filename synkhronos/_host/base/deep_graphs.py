"""Compilation of deep graphs, in which many operations follow one another."""

from synkhronos._machine.deep_recursion import recurses_deep

# Levels of recursion that a rewrite needs for each operation of the longest path, and for all else.
# If a rewrite runs out of them, the host library skips it, and only prints that.
_OF_OPERATION, _BESIDES = 4, 200


def compiling_deep(compile_function, computed):
    """Return a function that compiles these variables, however deep their graph is."""
    return recurses_deep(compile_function, _OF_OPERATION * depth(computed) + _BESIDES)


def depth(variables) -> int:
    """Return the number of operations on the longest path to one of some variables."""
    depths = {}
    left = [getattr(getattr(each, "variable", each), "owner", None) for each in variables]  # or Out
    while left:
        node = left[-1]
        if node is None or node in depths:
            left.pop()
            continue
        above = [each.owner for each in node.inputs if each.owner is not None]
        new = [each for each in above if each not in depths]
        if new:
            left += new
        else:
            depths[left.pop()] = 1 + max((depths[each] for each in above), default=0)
    return max(depths.values(), default=0)
