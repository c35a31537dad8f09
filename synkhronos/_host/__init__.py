"""The host library, with which users write graphs, behind the names listed here.

    from synkhronos import _host
    _host.peek(variable)             # calls the function of the host

A host is a folder beside this file: its module `library` has what `base` needs of the library, and
its other modules what differs in more than names. Only the modules in these folders import Theano
or PyTensor, and `extensions.pymc`, which is for PyTensor alone. `extensions` and `tools` build
graphs with `library` and `tensor`.

Importing this package imports no host: the first use of a name does, and `choice` says which. From
then on the process has this host.
"""

import importlib
from typing import Any, List

from synkhronos._host.choice import choose

# Module -> the names that it has for others; "{host}" is the folder of the host library.
MODULES = {
    "base.chosen_library": {
        "title": "The name of the host library, for messages.",
        "tuple_forms": "The forms of tuples that are inputs, for messages; empty if none are.",
        "library": "The host library itself, to build graphs with: shared variables, gradients.",
        "tensor": "The module of tensor expressions of the host library.",
        "Variable": "The class of the variables of graphs.",
        "Constant": "The class of variables that are constants.",
        "SharedVariable": "The class of shared variables.",
        "RandomState": "The class of a random state variable's values.",
        "In": "The class of inputs with a value, an update and so on.",
        "Out": "The class of outputs with options.",
        "Mode": "The class of modes of compilation.",
        "CompiledFunction": "The class of the host's compiled functions.",
    },
    "base.functions": {
        "float_dtype": "Return the dtype of floats that the user has configured (floatX).",
        "is_mode": "Return whether a mode of compilation has this name.",
        "added_to": "Return what an expression adds to a variable; None if it does not.",
        "clips_gradients": "Return whether an expression clips gradients that flow through it.",
        "line_of": "Return the line of the script that made a variable.",
        "caster": "Return a function that casts values as the host casts those of an input.",
        "shared_variables": "Return the shared variables that a compiled function uses or updates.",
        "variables_read": "Return the shared variables whose values a compiled function reads.",
        "set_default_update": "Give a shared variable an update in all functions that use it.",
        "as_update": "Return an update's expression, converted to the type of its shared variable.",
        "same_updates": "Return whether two lists of updates compute the same from their inputs.",
        "shared_in": "Return the shared variables that expressions are computed from.",
        "computes_by_element": "Return whether updates compute each element by itself.",
        "is_reusing_memory": "Return whether a function may write to memory of its last results.",
        "swapped": "Return expressions with some of their variables replaced.",
        "destroyed_inputs": "Return the positions of inputs into which a function writes.",
        "updated_variables": "Return the shared variables that a compiled function updates.",
        "default_updates": "Return a compiled function's updates that come from default updates.",
        "without_default_updates": "Return keyword arguments that leave out some default updates.",
        "updates_by_default": "Return pairs of variables and their default updates.",
    },
    "base.specifications": {
        "read_input": "Return an input's variable and what else it was given with; or None.",
        "read_output": "Return an output's variable; None for anything else.",
        "is_kept": "Return whether an input's value is one that calls may change: a container.",
        "storage": "Return a shared variable of an input's type, for a value or a container.",
    },
    "{host}.compiling": {
        "compile_function": "Compile a function that takes checked arrays and returns a list.",
        "run": "Call a compiled function; return all outputs, or a subset.",
        "expression_of": "Return a function's expression, for ranks on other kinds of devices.",
    },
    "base.repeating": {
        "is_watched": "Return whether a function runs under a mode that watches what it computes.",
        "is_repeatable": "Return whether a function may be run once more without an effect.",
    },
    "{host}.dividing": {  # before the base, which has names of it
        "intercept": "Make something else of the functions that are compiled in a with block.",
    },
    "base.dividing": {
        "divide": "Return the function for ranks that computes what a serial function computes.",
        "divide_step": "Return what ranks compute for a step of training, on inputs of its user.",
        "AS_SERIAL": "The mode of an output that is to have the serial value.",
        "Mistake": "A reduction of the user that does not make the serial value.",
        "operation_name": "Return the name of a node's operation, for messages.",
        "examine": "Return how what ranks compute alone is related to serial values.",
        "CannotDivide": "The exception for a serial function that can't be divided over ranks.",
    },
    "base.dividing.totals": {
        "is_total": "Return whether a value is a variable's, but for factors and terms without it.",
        "uses": "Return whether a value depends on some variables, not only on their shapes.",
    },
    "base.dividing.serial_functions": {
        "count_alone": "Return how many functions the script has of the host library.",
    },
    "base.rows": {
        "row_numbers": "Return an expression of the row numbers of a minibatch.",
        "numbers_of_rows": "Return the row numbers of a minibatch, an array.",
        "without_row_numbers": "Return expressions with inputs in place of row numbers.",
        "divides": "Return whether expressions have rows of ranks, or reductions, in themselves.",
        "input_of_values": "Return an input of which a function uses more than the shape.",
        "compile_number": "Return a function that computes an integer expression in the master.",
        "axes_of_rows": "Return for each output of a function its axes that grow with rows.",
        "sliced_by_inputs": "Return shared variables of which rows are sliced as inputs say.",
    },
    "base.sparse_matrices": {
        "sparse_format": "Return the format of a sparse variable, None for any other.",
        "take_apart": "Return the values of a sparse input's parts.",
        "put_together": "Return the value of a sparse output from its parts.",
    },
    "{host}.sparse": {
        "sparse_parts": "Return variables of a sparse input's parts, and the matrix made of them.",
        "decomposed": "Return expressions of a sparse output's parts.",
    },
    "{host}.variables": {
        "is_array_variable": "Return whether a variable holds an array.",
        "is_random_state": "Return whether a shared variable holds a random state.",
        "lives_on_device": "Return whether the values of a variable are on a device.",
        "fixed_axes": "Return, for each axis of a variable, whether its length is always 1.",
        "lengths": "Return, for each axis of a variable, the length that it always has, or None.",
        "fix_axes": "Return an expression, with the axes fixed that are fixed in a variable.",
        "shared_on_host": "Return a new shared variable whose value is the host's array itself.",
        "shared_zeros": "Return a new shared variable of zeros in the shape of another one.",
        "cast_value": "Return a value as an array of a variable's dtype and number of dimensions.",
        "replace": "Set a shared variable to an array; on the host, without a copy.",
        "on_host": "Return a variable of the same kind whose values are on the host.",
        "on_device": "Return a variable moved to this rank's device.",
    },
    "base.cells": {
        "peek": "Return a shared variable's own value, not a copy.",
        "cell": "Return the list whose one item is a shared variable's value.",
        "put": "Put an object into a shared variable's cell, unchecked; no watcher is told.",
        "read": "Return a shared variable's own value; those that watch it are told.",
        "replace_object": "Set a shared variable that holds no array to an object.",
        "watch": "Call functions whenever the script sets, or reads, a shared variable's value.",
        "borrows": "Return whether others have the array that is a shared variable's value.",
        "tell": "Call what `watch` was given: a variable's value may be a new one.",
        "unwatch": "Undo `watch`.",
        "on_copies": "Let shared variables hold copies of their values inside a with block.",
        "lend": "Set a shared variable to some of its rows inside a with block.",
    },
    "{host}.pickling": {
        "dump": "Pickle compiled functions; shared variables that workers have become ids.",
        "load": "Unpickle the result of `dump`.",
    },
    "{host}.random_numbers": {
        "spread_random_state": "Move a random state to a rank's own stream.",
    },
    "base.serial_random": {
        "keep_state_equal": "Mark a random state that `spread_random_state` is to leave as it is.",
        "is_state_equal": "Return whether a random state is marked so.",
        "draws_of_all_rows": "Return a function's arguments with draws of the rows of all ranks.",
    },
    "base.rank_operations": {
        "rank_weight": "Return an expression of a rank's weight in an average.",
        "communicates": "Return whether ranks reduce while they run a compiled function.",
    },
    "{host}.graph": {
        "all_reduce": "Return an expression that is reduced over the ranks while a function runs.",
        "overlap_reductions": "Say whether functions begin reductions while they still compute.",
    },
    "base.calls": {
        "reducing": "Send a function's reductions through a communicator inside a with block.",
    },
    "base.server_operations": {
        "push": "Return the token of a push through a port, for the outputs of a function.",
        "awaited": "Return an expression of what a port has pulled, and a token.",
        "compile_pushing": "Return a function that pushes arrays early, and waits for them late.",
        "compiling": "The lock of threads that compile functions.",
        "substituted": "Return expressions with variables replaced, but not in the new parts.",
        "leaves": "Return the variables that expressions are computed from, constants apart.",
        "is_computed_from": "Return whether an expression is computed from some variables.",
        "shared_like": "Return a new shared variable of a variable's type.",
    },
    "{host}.device_arrays": {
        "refuse_open_device": "Raise SessionError if this process has opened a device.",
        "require_open_device": "Raise unless the library has opened a device at its import.",
        "import_device_backend": "Import the library that opens devices, or raise ImportError.",
        "open_device": "Open the device of this rank.",
        "device_context": "Return the context of the open device, None for none.",
        "is_on_device": "Return whether a value is an array on a device.",
        "to_host": "Return a value, copied to the host if it is on a device.",
        "to_device": "Return a value, copied to this rank's device if it is on the host.",
        "copy_from_device": "Copy an array from the device into an array of the host.",
        "copy_to_device": "Copy an array, of the host or on the device, into one on the device.",
        "empty_on_device": "Return a new array on the device.",
        "empty_like": "Return a new array like another one, where that one is: device or host.",
        "join_on_device": "Return host arrays, joined along axis 0 in an array on the device.",
        "take_on_device": "Return rows of an array on the device.",
        "scale_on_device": "Multiply an array on the device by a number.",
    },
}
NAMES = {name: text for names in MODULES.values() for name, text in names.items()}


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for module, names in MODULES.items():
        found = importlib.import_module(f"{__name__}.{module.format(host=choose())}")
        globals().update({each: getattr(found, each) for each in names})
    return globals()[name]


def __dir__() -> List[str]:
    return sorted(NAMES)
