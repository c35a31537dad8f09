"""Make something else of the calls of ``theano.function`` in a with block, also inside libraries.

    theano.function(...) ──▶ pfunc ──▶ the function that the block was given ──▶ any callable

Libraries keep ``theano.function`` under names of their own, so the functions that it calls are
replaced: `pfunc`, and `orig_function` for inputs that are tuples, which a `pfunc` from before the
block calls, too. Calls from Theano's modules (``eval``, scans) and from this package go on as
before, and so do those of other threads.
"""

import contextlib
import inspect
import sys

from theano.compile.function_module import orig_function
from theano.compile.pfunc import pfunc

from synkhronos._host.base.dividing import serial_functions

# The package `theano.compile` has functions of these names.
_MODULES = [sys.modules["theano.compile.function"], sys.modules["theano.compile.pfunc"]]
_PARAMETERS = inspect.signature(pfunc)


@contextlib.contextmanager
def intercept(make):
    """Call ``make(compile_serially, arguments)`` for each ``theano.function`` in a with block.

    `arguments` are those of ``theano.function``, by name, with a list of outputs and "is_list";
    ``compile_serially(note)`` compiles them as Theano does; if ``note(seconds)`` is given, it is
    called after each call of the function. Such functions, and those that the script has compiled
    before, tell of the shared variables that they update. "params" is None where the inputs can't
    be known.
    """
    token = serial_functions.begin(make)
    for module in (*_MODULES, sys.modules["theano.compile"]):
        module.pfunc = _intercepted
    for module in _MODULES:
        module.orig_function = _noted
    try:
        yield
    finally:
        serial_functions.end(token)


def _intercepted(*args, **kwargs):
    if serial_functions.is_called_inside(_MODULES):
        return pfunc(*args, **kwargs)
    return serial_functions.make_instead(pfunc, lambda: _arguments(args, kwargs), *args, **kwargs)


def _arguments(args, kwargs):
    bound = _PARAMETERS.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _noted(*args, **kwargs):
    if serial_functions.is_called_inside(_MODULES):
        return orig_function(*args, **kwargs)
    arguments = {"name": kwargs.get("name"), "params": None}
    return serial_functions.make_instead(orig_function, lambda: arguments, *args, **kwargs)
