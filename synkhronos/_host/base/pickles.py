"""Pickles in which ids stand for the shared variables that the reader has.

    master   Pickler ──▶ ("variable", 3), ("container", 3), ("storage", 3) ──▶ Unpickler   worker

A compiled function has containers of its own, but they share the variables' cells.
"""

import contextlib
import gc
import io
import pickle

import cloudpickle

from synkhronos._machine.deep_recursion import recurses_deep


def persistent_ids(variables):
    """Return ``id(object)`` -> persistent id, for variables (a dict), containers and cells."""
    ids = {}
    for key, variable in variables.items():
        ids[id(variable)] = ("variable", key)
        ids[id(variable.container)] = ("container", key)
        ids[id(variable.container.storage)] = ("storage", key)
    return ids


class Pickler(cloudpickle.Pickler):
    """Writes `persistent_ids` in place of objects. The caller keeps the variables alive."""

    def __init__(self, file, ids):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._ids = ids

    def persistent_id(self, obj):
        return self._ids.get(id(obj))


class Unpickler(pickle.Unpickler):
    """Reads what a Pickler has written, with variables (key -> variable) of this process."""

    def __init__(self, file, variables):
        super().__init__(file)
        self._variables = variables

    def persistent_load(self, pid):
        kind, key = pid
        variable = self._variables[key]
        if kind == "variable":
            return variable
        return variable.container if kind == "container" else variable.container.storage


@contextlib.contextmanager
def no_garbage_collection():
    """Switch the collector off: it would search all objects made in the block again and again."""
    was_enabled = gc.isenabled()
    try:
        gc.disable()  # inside of try: a Ctrl-C after it must not leave the collector off
        yield
    finally:
        if was_enabled:
            gc.enable()


@recurses_deep
def dump_with(pickler, settings, functions, known, new, values=None) -> bytes:
    """Pickle settings, then new variables whole, then functions, with ids for all variables.

    ``pickler(file, ids)`` returns a Pickler; compiled code depends on the settings. `functions`
    maps anything picklable to (compiled function, or expression, anything picklable), `known` and
    `new` map keys to variables. The reader gets `values`, if given, in place of new variables.
    """
    file, ids = io.BytesIO(), persistent_ids(known)
    # New variables may refer to known ones.
    pickler(file, ids).dump(new if values is None else values)
    ids.update(persistent_ids(new))
    with no_garbage_collection():
        pickler(file, ids).dump(functions)
    return pickle.dumps(settings) + file.getvalue()


@recurses_deep
def load_with(set_settings, finish, data, variables, make=lambda sent, variables: sent):
    """Undo `dump_with`: add new variables to `variables`; return the functions and their ids."""
    file = io.BytesIO(data)
    set_settings(pickle.load(file))
    with no_garbage_collection():
        new = Unpickler(file, variables).load()
        for key, sent in new.items():
            variables[key] = make(sent, variables)
        try:
            functions = Unpickler(file, variables).load()
        except BaseException:
            for key in new:  # the master sends them again, with new keys
                del variables[key]
            raise
    return {key: (finish(each), rest) for key, (each, rest) in functions.items()}, tuple(new)
