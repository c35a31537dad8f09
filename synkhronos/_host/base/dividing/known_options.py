"""Options of operations, such as the axis of a sum: those that the rules know.

A rule is written for the options that its operations have. A new release of the host library may
bring another one, which changes what an operation does to rows. So the folder of each host library
has a table, `OPTIONS`, and an operation that has an option beside it takes no rows.
"""

import inspect

from synkhronos._host.base.dividing.chosen_operations import OPTIONS

ANY = "*"  # in place of names: the rule divides the graph that the options are about
_REST = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


def options_of(kind):
    """Return the options of a class: its `__props__`, else the arguments of its constructor."""
    props = getattr(kind, "__props__", None)
    if props is not None:
        return set(props)
    parameters = inspect.signature(kind).parameters.values()
    return {each.name for each in parameters if each.kind not in _REST}


def unknown_options(kind):
    """Return the options of a class of operations that no rule knows, in order."""
    known = {name for each in kind.__mro__ for name in OPTIONS.get(each.__name__, "").split()}
    return [] if ANY in known else sorted(options_of(kind) - known)
