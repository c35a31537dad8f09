"""Updates that compiled functions make, default updates, and inputs that functions overwrite.

A shared variable such as a random state has a ``default_update``: each function that uses the
variable updates it so.
"""


def updated_variables(function):
    """Return the shared variables that a compiled function updates."""
    return [
        each.variable for each in function.maker.inputs if each.update is not None and each.shared
    ]


def default_updates(function, updates):
    """Return a compiled function's default updates, as pairs, without variables of `updates`."""
    given = {target for target, _ in updates}
    updated = [i.variable for i in function.maker.inputs if i.implicit and i.update is not None]
    return [(variable, variable.default_update) for variable in updated if variable not in given]


def without_default_updates(kwargs, variables):
    """Return keyword arguments of `compile_function` that leave out these default updates."""
    if not variables:
        return dict(kwargs)
    # It is False or a list here: with True the function would have no default updates.
    left_out = kwargs.get("no_default_updates") or []
    return {**kwargs, "no_default_updates": [*left_out, *variables]}


def updates_by_default(variables):
    """Return pairs (variable, its default update) for the variables that have one."""
    pairs = [(each, getattr(each, "default_update", None)) for each in variables]
    return [
        (each, each.type.filter_variable(update)) for each, update in pairs if update is not None
    ]


def destroyed_inputs(function):
    """Return the positions of the inputs into which a compiled function writes, shared ones not.

    There are such inputs only if the user's own expressions have operations that work in place.
    """
    fgraph, inputs = function.maker.fgraph, function.maker.inputs
    if not hasattr(fgraph, "has_destroyers"):
        return []
    return [
        position
        for position, (given, variable) in enumerate(zip(inputs, fgraph.inputs))
        if not given.shared and fgraph.has_destroyers([variable])
    ]
