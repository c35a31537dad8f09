"""Inputs as ``theano.function`` takes them beside those of `base.specifications`: tuples."""

import copy

from theano.compile.function_module import convert_function_input
from theano.compile.io import SymbolicInput

from synkhronos._host.base import specifications

tuple_forms = (
    "(variable, value), (name, variable, value), (name, variable) or ((variable, update), value)"
)


def read_input(given):
    """Return what `specifications.read_input` does, of tuples too, as Theano reads them."""
    if isinstance(given, (list, tuple)):
        # Theano sets the value of an In that stands in a tuple.
        parts = [copy.copy(part) if isinstance(part, SymbolicInput) else part for part in given]
        try:
            given = convert_function_input(tuple(parts))
        except Exception:  # of any kind: making the message fails as well
            return None
    return specifications.read_input(given)
