"""Pickle compiled functions: shared variables that a worker already has travel as their ids.

master   dump(functions)     a shared variable that the worker has: its id; a new one: its value too
worker   load(data)          compiled functions: neither the rewrites nor the compilers run again
"""

import contextlib
import gc
import io
import pickle
import sys

import cloudpickle
import pytensor
from pytensor.compile import Function, SharedVariable
from pytensor.link.basic import Container

from synkhronos._host.pytensor.functions import compile_now

# Graphs are pickled recursively.
sys.setrecursionlimit(max(sys.getrecursionlimit(), 50000))


class _Pickler(cloudpickle.Pickler):
    """Writes shared variables, their containers and the cells that hold their values as ids.

    A compiled function has containers of its own, but they share the variables' cells.
    """

    def __init__(self, file, id_of):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._id_of = id_of
        self._compiled = {}  # id of an input or output of a function -> it, and its variable

    def persistent_id(self, obj):
        if isinstance(obj, (SharedVariable, Container, list)):
            return self._id_of(obj)
        return None

    def reducer_override(self, obj):
        # Not isinstance: a function of this package says that it is one of PyTensor's.
        if issubclass(type(obj), Function):
            # PyTensor would send the values of shared variables with each function.
            made = obj.maker
            pairs = [(each, each.variable) for each in made.inputs if each.update is not None]
            pairs += zip(made.outputs, made.fgraph.outputs)
            self._compiled.update((id(each), (each, variable)) for each, variable in pairs)
            # The operations first, each after those that it needs: pickle goes into what it has not
            # seen, as deep as the graph is otherwise, and Python has a limit for that.
            return _rebuild_function, (made.fgraph.toposort(), made, list(obj.input_storage))
        if id(obj) in self._compiled:
            return self._without_rewrites(obj)
        return super().reducer_override(obj)

    def _without_rewrites(self, part):
        """Reduce an input or output without the graph that it had before the rewrites."""
        make, arguments, state, *rest = part.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        state, (_, variable) = dict(state), self._compiled[id(part)]
        # Of an update, a worker only needs to know that there is one.
        state["update" if state.get("update") is not None else "variable"] = variable
        return (make, arguments, state, *rest)


def _rebuild_function(nodes, maker, input_storage):
    function = maker.create(input_storage)
    function.trust_input = True
    return function


class _Unpickler(pickle.Unpickler):
    def __init__(self, file, variables):
        super().__init__(file)
        self._variables = variables

    def persistent_load(self, pid):
        kind, key = pid
        variable = self._variables[key]
        if kind == "variable":
            return variable
        return variable.container if kind == "container" else variable.container.storage


def dump(functions, known, new, portable=False) -> bytes:
    """Pickle functions, sending the variables of `known` as ids and those of `new` whole.

    Parameters
    ----------
    functions : dict
        Anything picklable -> (compiled function, anything picklable).
    known, new : dict
        Id -> shared variable.
    portable : bool
        False: PyTensor has no variables on devices.
    """
    for function, _ in functions.values():
        compile_now(function)  # once, before all workers would compile it at the same time
    ids = {}
    file = io.BytesIO()
    for variables in (known, new):
        # New variables are dumped whole, after the ids of the known ones are there: a new variable
        # may refer to a known one.
        if variables is new:
            _Pickler(file, lambda obj: ids.get(id(obj))).dump(new)
        for key, variable in variables.items():
            ids[id(variable)] = ("variable", key)
            ids[id(variable.container)] = ("container", key)
            ids[id(variable.container.storage)] = ("storage", key)
    with _no_garbage_collection():
        _Pickler(file, lambda obj: ids.get(id(obj))).dump(functions)
    return pickle.dumps(_settings()) + file.getvalue()


def _settings():
    """Return the settings on which compiled code depends, but for those that nothing has read."""
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
    file = io.BytesIO(data)
    _set_config(pickle.load(file))
    with _no_garbage_collection():
        new = _Unpickler(file, variables).load()
        variables.update(new)
        try:
            functions = _Unpickler(file, variables).load()
        except BaseException:
            for key in new:  # the master sends them again, with new keys
                del variables[key]
            raise
    for function, _ in functions.values():
        compile_now(function)
    return functions, tuple(new)


@contextlib.contextmanager
def _no_garbage_collection():
    """Keep the collector from searching, again and again, all that is made in the block."""
    was_enabled = gc.isenabled()
    try:
        gc.disable()  # in the block: a Ctrl-C after it must not leave the collector off
        yield
    finally:
        if was_enabled:
            gc.enable()
