"""Intercept calls of ``theano.function`` in a with block, also inside libraries.

    theano.function(...) ──▶ pfunc ──▶ the function that the block was given ──▶ any callable

Libraries import ``theano.function`` and `pfunc` by name, so the code of `pfunc` is replaced, not
its name; and `orig_function`, which ``theano.function`` calls for inputs that are tuples. Calls
from Theano's modules (``eval``, scans), from this package and in other threads go on as before.
"""

import contextlib
import inspect
import sys
import types

from theano.compile.function_module import orig_function
from theano.compile.pfunc import pfunc

from synkhronos._host.base.dividing import serial_functions

# The package `theano.compile` has functions of these names.
_MODULES = [sys.modules["theano.compile.function"], sys.modules["theano.compile.pfunc"]]
_PARAMETERS = inspect.signature(pfunc)
_compile = types.FunctionType(pfunc.__code__, vars(_MODULES[1]), "pfunc", pfunc.__defaults__)


def _forward(*args, **kwargs):
    return synkhronos_intercepted(*args, **kwargs)  # noqa: F821 - a name in pfunc's module


@contextlib.contextmanager
def intercept(make):
    """Call ``make(compile_serially, arguments)`` for each ``theano.function`` in a with block.

    `arguments` are those of ``theano.function``, by name, with a list of outputs and "is_list";
    ``compile_serially(note)`` compiles them as Theano does; if ``note(seconds)`` is given, it is
    called after each call of the function. Such functions, and those that the script has compiled
    before, report the shared variables that they update. "params" is None if inputs are tuples.
    """
    token = serial_functions.begin(make)
    in_function, in_pfunc = _MODULES
    in_pfunc.synkhronos_intercepted = _intercepted
    pfunc.__signature__ = _PARAMETERS
    pfunc.__code__ = _forward.__code__
    in_function.orig_function = _noted
    try:
        yield
    finally:
        serial_functions.end(token)


def _intercepted(*args, **kwargs):
    def arguments():
        bound = _PARAMETERS.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    return serial_functions.make_instead(_compile, arguments, _MODULES, args, kwargs)


def _noted(*args, **kwargs):
    def arguments():
        return {"name": kwargs.get("name"), "params": None}

    return serial_functions.make_instead(orig_function, arguments, _MODULES, args, kwargs)
