"""The specifications In and Out, which a host library's ``function`` takes beside variables."""

from synkhronos._host.base import chosen_library as host
from synkhronos._host.base.chosen_library import Variable, without_tuple


def read_input(given):
    """Return the variable of an input and a dict of its other properties; None if it is none."""
    given = without_tuple(given)
    if isinstance(given, Variable):
        return given, {}
    if not isinstance(given, host.SymbolicInput):
        return None
    # Without `mutable` and `borrow`, which permit to reuse memory that the ranks share.
    names = "name", "value", "update", "strict", "allow_downcast", "implicit"
    return given.variable, {name: getattr(given, name, None) for name in names}


def read_output(given):
    """Return the variable of an output, or of an Out; None for anything else."""
    if isinstance(given, host.Out):
        given = given.variable
    return given if isinstance(given, Variable) else None


def is_kept(value):
    """Return whether calls may change the value of an input: whether it is in a container."""
    return isinstance(value, (host.Container, host.SharedVariable))


def storage(variable, value):
    """Return a shared variable of an input's type: for its first value, or for a container."""
    if isinstance(value, (host.Container, host.SharedVariable)) and value.type != variable.type:
        raise TypeError(f"it holds values of type {value.type}")
    if isinstance(value, host.SharedVariable):
        return value
    common = {"name": variable.name, "type": variable.type}
    if isinstance(value, host.Container):
        return host.TensorSharedVariable(**common, value=None, strict=None, container=value)
    return host.TensorSharedVariable(**common, value=value.copy(), strict=True)
