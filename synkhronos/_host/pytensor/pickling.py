"""Pickle compiled functions: shared variables that a worker already has travel as their ids.

master   dump(functions)     a shared variable that the worker has: its id; a new one: its value too
worker   load(data)          compiled functions: neither the rewrites nor the compilers run again
"""

import importlib
import pickle

import pytensor
from pytensor.compile import Function
from pytensor.link.numba.linker import NumbaLinker

from synkhronos._host.base.pickles import Pickler, dump_with, load_with
from synkhronos._host.pytensor.compiling import compile_now


class _PyTensorPickler(Pickler):
    """Writes functions without what only rewrites need."""

    def __init__(self, file, ids):
        super().__init__(file, ids)
        self._compiled = {}  # id of an input or output of a function -> it, and its variable

    def reducer_override(self, obj):
        # Not isinstance: `__class__` of this package's functions is PyTensor's Function, too.
        if issubclass(type(obj), Function):
            # PyTensor would send the values of shared variables with each function.
            maker = obj.maker
            pairs = [(each, each.variable) for each in maker.inputs if each.update is not None]
            pairs += zip(maker.outputs, maker.fgraph.outputs)
            self._compiled.update((id(each), (each, variable)) for each, variable in pairs)
            # The nodes come first, each after those that it needs: else pickle would recurse as
            # deep as the graph is, beyond Python's limit.
            return _rebuild_function, (maker.fgraph.toposort(), maker, list(obj.input_storage))
        if id(obj) in self._compiled:
            return self._without_rewrites(obj)
        return super().reducer_override(obj)

    def _without_rewrites(self, part):
        """Reduce an input or output without the graph that it had before the rewrites."""
        make, arguments, state, *rest = part.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        state, (_, variable) = dict(state), self._compiled[id(part)]
        # A worker only needs to know that there is an update.
        state["update" if state.get("update") is not None else "variable"] = variable
        return (make, arguments, state, *rest)


def _rebuild_function(nodes, maker, input_storage):
    if isinstance(maker.linker, NumbaLinker):
        importlib.import_module("synkhronos._host.pytensor.numba_operations")
    function = maker.create(input_storage)
    function.trust_input = True
    return function


def dump(functions, known, new, portable=False) -> bytes:
    """Pickle functions, sending the variables of `known` as ids and those of `new` whole."""
    for function, _ in functions.values():
        compile_now(function)  # once, before all workers would compile it at the same time
    return dump_with(_PyTensorPickler, _settings(), functions, known, new)


def _settings():
    """Return the settings on which compiled code depends, except those never read."""
    variables = pytensor.config._config_var_dict
    return {
        name: each.val
        for name, each in variables.items()
        if each.mutable and hasattr(each, "val")
        if each.in_c_key or name.startswith("numba__")
    }


def _set_config(values):
    """Set the master's settings, which its script may have changed after the fork."""
    for name, value in values.items():
        if getattr(pytensor.config, name) != value:
            setattr(pytensor.config, name, value)


def load(data, variables):
    """Undo `dump`: add the new variables to `variables`, and return the functions and their ids."""
    return load_with(_set_config, compile_now, data, variables)
