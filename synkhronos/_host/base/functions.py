"""Functions and expressions: questions and changes that are the same in both host libraries."""

import functools
import warnings

from synkhronos._host.base.library import (
    CONVERTS_UPDATES,
    Variable,
    clients_of,
    clone_replace,
    config,
    equal_computations,
    get_mode,
    machine_of,
)
from synkhronos._machine.deep_recursion import recurses_deep
from synkhronos._machine.interrupts import raised_here


def float_dtype() -> str:
    """Return the library's floatX."""
    return config.floatX


def is_mode(name) -> bool:
    """Return whether the library has a mode, or a linker, of this name."""
    try:
        get_mode(name)
    except raised_here(Exception):  # of any kind
        return False
    return True


def computed_by(outputs, updates=None, givens=None, **others):
    """Return what a function with these arguments computes: its outputs, and variables of pairs."""
    pairs = [*(updates or ()), *(givens.items() if hasattr(givens, "items") else givens or ())]
    return [*outputs, *(value for _, value in pairs if isinstance(value, Variable))]


def as_update(variable, value):
    """Return the new value of an update as an expression of its shared variable's type."""
    return variable.type.filter_variable(value, allow_convert=CONVERTS_UPDATES)


@recurses_deep
def same_updates(one, other):
    """Return whether two lists of (variable, its update) compute the same from their inputs.

    Parameters
    ----------
    one, other : (list of input variables, list of pairs)
    """
    (inputs, pairs), (other_inputs, other_pairs) = one, other
    given = [*inputs, *(variable for variable, _ in pairs)]
    others = [*other_inputs, *(variable for variable, _ in other_pairs)]
    if [each.type for each in given] != [each.type for each in others]:
        return False
    expressions = [as_update(variable, value) for variable, value in pairs]
    other_expressions = [as_update(variable, value) for variable, value in other_pairs]
    return equal_computations(expressions, other_expressions, given, others)


def is_reusing_memory(function):
    """Return whether a compiled function keeps memory of its results, and may write to it again."""
    return not getattr(machine_of(function), "allow_gc", False)


@recurses_deep
def swapped(expressions, variables):
    """Return expressions with variables, the keys of a dict, replaced; others stay as they are."""
    found = [isinstance(each, Variable) for each in expressions]
    new = iter(clone_replace([e for e, is_one in zip(expressions, found) if is_one], variables))
    return [next(new) if is_one else each for each, is_one in zip(expressions, found)]


def shared_variables(function):
    """Return the shared variables that a compiled function uses or updates."""
    return function.get_shared()


def variables_read(function):
    """Return the shared variables whose values a compiled function reads, not only replaces."""
    fgraph = function.maker.fgraph
    pairs = zip(function.maker.inputs, fgraph.inputs)
    read = {given.variable for given, inner in pairs if clients_of(fgraph, inner)}
    return [variable for variable in function.get_shared() if variable in read]


def set_default_update(variable, expression):
    """Give a shared variable an update in all functions that use it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Setting default_update", DeprecationWarning)
        variable.default_update = expression


def release_arguments(function):
    """Release the arguments of a call that raised: the library does it only after others."""
    for container in function.input_storage:
        if container.required:
            container.storage[0] = None


def caster(variable, strict, allow_downcast):
    """Return a function that makes the array of a value that the library's functions make of it.

    It raises the ``TypeError`` that they raise.
    """
    return functools.partial(variable.type.filter, strict=strict, allow_downcast=allow_downcast)
