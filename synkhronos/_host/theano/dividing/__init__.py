"""Divide serial functions over the ranks: rules of Theano's own operations, and `intercept`.

    theano.function(...) ──▶ pfunc ──▶ the function that the block was given ──▶ any callable

Libraries import ``theano.function`` and `pfunc` by name, so the code of `pfunc` is replaced, not
its name; and `orig_function`, which ``theano.function`` calls for inputs that are tuples. Calls
from Theano's modules (``eval``, scans), from this package and in other threads go on as before.
"""

import functools
import sys

from theano.compile.function_module import orig_function
from theano.compile.pfunc import pfunc

from synkhronos._host.base.dividing import serial_functions
from synkhronos._host.theano.dividing import operation_rules as operation_rules


def intercept(make):
    """Call ``make(compile_serially, arguments)`` for each ``theano.function`` in a with block.

    `arguments` are those of ``theano.function``, by name, with a list of outputs and "is_list".
    "params" is None if inputs are tuples. See also `serial_functions.made_by`.
    """
    return serial_functions.made_by(make, _replace)


@functools.lru_cache(maxsize=None)
def _replace():
    # The package `theano.compile` has functions of these names.
    modules = [sys.modules["theano.compile.function"], sys.modules["theano.compile.pfunc"]]
    serial_functions.replace_code(pfunc, modules)
    modules[0].orig_function = serial_functions.in_place_of(orig_function, _of_tuples, modules)


def _of_tuples(*args, **kwargs):
    return {"name": kwargs.get("name"), "params": None}
