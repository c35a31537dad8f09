"""Divide serial functions over the ranks: rules of PyTensor's own operations, and `intercept`.

    pytensor.function(...) ──▶ the function that the block was given ──▶ any callable

Libraries import ``pytensor.function`` by name, so its code is replaced, not its name. Calls from
PyTensor's modules (``eval``), from this package and in other threads go on as before.
"""

import functools

import pytensor
from pytensor.compile import maker

from synkhronos._host.base.dividing import serial_functions
from synkhronos._host.pytensor.dividing import operation_rules as operation_rules


def intercept(make):
    """Call ``make(compile_serially, arguments)`` for each ``pytensor.function`` in a with block.

    `arguments` are those of ``theano.function``, by name. See also `serial_functions.made_by`.
    """
    return serial_functions.made_by(make, _replace)


@functools.lru_cache(maxsize=None)
def _replace():
    serial_functions.replace_code(pytensor.function, [maker], _as_theanos)


def _as_theanos(arguments):
    named = {**arguments, "params": arguments["inputs"], "output_keys": None}
    del named["inputs"]
    return {**named, "no_default_updates": bool(named["no_default_updates"])}
