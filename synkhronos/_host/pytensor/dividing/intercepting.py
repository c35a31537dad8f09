"""Intercept calls of ``pytensor.function`` in a with block, also inside libraries.

    pytensor.function(...) ──▶ the function that the block was given ──▶ any callable

Libraries import ``pytensor.function`` by name, so its code is replaced, not its name. Calls from
PyTensor's modules (``eval``), from this package and in other threads go on as before.
"""

import contextlib
import inspect
import types

import pytensor
from pytensor.compile import maker

from synkhronos._host.base.dividing import serial_functions

_PARAMETERS = inspect.signature(pytensor.function)
_compile = types.FunctionType(
    pytensor.function.__code__, vars(maker), "function", pytensor.function.__defaults__
)


def _forward(*args, **kwargs):
    return synkhronos_intercepted(*args, **kwargs)  # noqa: F821 - a name in PyTensor's module


@contextlib.contextmanager
def intercept(make):
    """Call ``make(compile_serially, arguments)`` for each ``pytensor.function`` in a with block.

    `arguments` are those of ``theano.function``, by name; ``compile_serially(note)`` compiles them
    as PyTensor does; if ``note(seconds)`` is given, it is called after each call of the function.
    Such functions, and those that the script has compiled before, report the shared variables that
    they update.
    """
    token = serial_functions.begin(make)
    maker.synkhronos_intercepted = _intercepted
    pytensor.function.__signature__ = _PARAMETERS
    pytensor.function.__code__ = _forward.__code__
    try:
        yield
    finally:
        serial_functions.end(token)


def _intercepted(*args, **kwargs):
    def arguments():
        """Return the arguments under the names that Theano's have."""
        bound = _PARAMETERS.bind(*args, **kwargs)
        bound.apply_defaults()
        named = dict(bound.arguments)
        named.update(params=named.pop("inputs"), output_keys=None)
        return {**named, "no_default_updates": bool(named["no_default_updates"])}

    return serial_functions.make_instead(_compile, arguments, [maker], args, kwargs)
