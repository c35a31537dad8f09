"""The host library, in which users write graphs: chosen once, hidden behind the names listed here.

    from synkhronos import _host
    _host.peek(variable)             # the host that was chosen

A host is a folder beside this file with a module `host` that has every name of `NAMES`. Nothing
else in the package imports Theano. `extensions` and `tools` build graphs with `library` and
`tensor`. Importing this package imports no host: the first use of a name does.
"""

import importlib
from typing import Any

NAMES = {
    # Modules and classes.
    "library": "The host library itself, to build graphs with: shared variables, gradients.",
    "tensor": "Its module of tensor expressions.",
    "Variable": "The class of the variables of graphs.",
    "Constant": "The class of variables that are constants.",
    "SharedVariable": "The class of shared variables.",
    "RandomState": "The class of a random state variable's values.",
    "Mode": "The class of modes of compilation.",
    # Functions.
    "float_dtype": "Return the dtype of floats that the user has configured (floatX).",
    "is_mode": "Return whether a mode of compilation has this name.",
    "compile_function": "Compile a function that takes checked arrays and returns a list.",
    "run": "Call a compiled function, for all outputs or some.",
    "cast_input": "Return a value as the array that the host's own function makes of it.",
    "shared_variables": "Return the shared variables that a compiled function uses or updates.",
    "default_updates": "Return a compiled function's updates that come from default updates.",
    "without_default_updates": "Return keyword arguments that leave out some default updates.",
    "as_update": "Return an update's expression in the type of its shared variable.",
    "expression_of": "Return a function's expression, for ranks on other kinds of devices.",
    # Variables and their values.
    "is_array_variable": "Return whether a variable holds an array.",
    "is_random_state": "Return whether a shared variable holds a random state.",
    "lives_on_device": "Return whether the values of a variable are on a device.",
    "fixed_axes": "Return for each axis of a variable whether its length is always 1.",
    "fix_axes": "Return an expression with the fixed axes of a variable.",
    "shared_zeros": "Return a new shared variable of zeros in the shape of another one.",
    "cast_value": "Return a value as an array of a variable's dtype and number of dimensions.",
    "peek": "Return a shared variable's own value, not a copy.",
    "replace": "Make an array the value of a shared variable, without a copy on the host.",
    "replace_object": "Make an object the value of a shared variable that holds no array.",
    "lend": "Make a shared variable hold some of its rows inside a with block.",
    "on_host": "Return a variable of the same kind whose values are on the host.",
    "on_device": "Return a variable moved to this rank's device.",
    # Functions and random states of the ranks.
    "dump": "Pickle compiled functions, with the shared variables that a worker has as ids.",
    "load": "Unpickle the result of `dump`.",
    "spread_random_state": "Move a random state to a rank's own stream.",
    # Operations in graphs.
    "all_reduce": "Return an expression that is reduced over the ranks while a function runs.",
    "rank_weight": "Return an expression of a rank's weight in an average.",
    "communicates": "Return whether ranks reduce while they run a compiled function.",
    "reducing": "Send a function's reductions through a communicator inside a with block.",
    # Devices. A host without devices says that nothing is on a device.
    "refuse_open_device": "Raise if this process has opened a device.",
    "import_device_backend": "Import the library that opens devices, or raise ImportError.",
    "open_device": "Open the device of this rank.",
    "device_context": "Return the context of the open device, None for none.",
    "is_on_device": "Return whether a value is an array on a device.",
    "to_host": "Return a value, copied to the host if it is on a device.",
    "to_device": "Return a value, copied to this rank's device if it is on the host.",
    "copy_from_device": "Copy an array from the device into an array of the host.",
    "copy_to_device": "Copy an array of the host into an array on the device.",
    "empty_on_device": "Return a new array on the device.",
    "empty_like": "Return a new array like another one, on the same side: device or host.",
    "join_on_device": "Return arrays of the host joined along axis 0, on the device.",
    "take_on_device": "Return rows of an array on the device.",
    "scale_on_device": "Multiply an array on the device by a number.",
}


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    host = importlib.import_module(f"{__name__}.theano.host")
    globals().update({each: getattr(host, each) for each in NAMES})
    return globals()[name]
