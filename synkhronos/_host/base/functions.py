"""Properties and changes of functions and expressions, the same for both host libraries.

A shared variable such as a random state has a ``default_update``, which each function that uses
the variable applies.
"""

import functools
import itertools
import re
import threading

import numpy as np

from synkhronos._host.base import chosen_library as host
from synkhronos._host.base.chosen_library import Constant, Variable, ancestors
from synkhronos._machine.deep_recursion import recurses_deep
from synkhronos._machine.interrupts import raised_here

# Two threads can't compile at once: Theano switches its cache of constants off while it compiles.
compiling = threading.RLock()


class PythonOperation(host.Operation):
    """An operation that acts outside of its graph, each time that `perform` runs, by Python code.

    Numba calls `perform`, too, and keeps no code of the function on disk.
    """

    def do_constant_folding(self, *graph_and_node):
        """Return False: it may have no inputs, but is no constant."""
        return False


def is_mode(name) -> bool:
    """Return whether the library has a mode, or a linker, of this name."""
    try:
        host.get_mode(name)
    except raised_here(Exception):  # libraries raise several kinds
        return False
    return True


def computed_by(outputs, updates=None, givens=None, **others):
    """Return all expressions that a function with these arguments computes."""
    pairs = [*(updates or ()), *(givens.items() if hasattr(givens, "items") else givens or ())]
    return [*outputs, *(value for _, value in pairs if isinstance(value, Variable))]


def as_update(variable, value):
    """Return the new value of an update as an expression of its shared variable's type."""
    return variable.type.filter_variable(value, allow_convert=host.CONVERTS_UPDATES)


@recurses_deep
def same_updates(one, other):
    """Return whether two lists of (variable, its update) compute the same from their inputs.

    `one` and `other` are (list of input variables, list of pairs).
    """
    (inputs, pairs), (other_inputs, other_pairs) = one, other
    leaves = [*inputs, *(variable for variable, _ in pairs)]
    other_leaves = [*other_inputs, *(variable for variable, _ in other_pairs)]
    if [each.type for each in leaves] != [each.type for each in other_leaves]:
        return False
    expressions = [as_update(variable, value) for variable, value in pairs]
    other_expressions = [as_update(variable, value) for variable, value in other_pairs]
    return host.equal_computations(expressions, other_expressions, leaves, other_leaves)


def nodes_of(variables):
    """Return the nodes that compute variables, and all that these are computed from, each once."""
    return dict.fromkeys(each.owner for each in ancestors(variables) if each.owner is not None)


def is_by(variable, *classes):
    """Return whether an operation of one of these classes computes a variable."""
    return variable.owner is not None and isinstance(variable.owner.op, classes)


def shared_in(expressions):
    """Return the shared variables that expressions are computed from, each once."""
    shared = (each for each in ancestors(expressions) if isinstance(each, host.SharedVariable))
    return list(dict.fromkeys(shared))


@recurses_deep
def computes_by_element(updates, arrays):
    """Return whether updates compute each element of arrays and targets from that element alone."""
    known = {*arrays, *(target for target, _ in updates)}
    expressions = [as_update(target, value) for target, value in updates]
    return all(_is_by_element(each, known) for each in ancestors(expressions))


def _is_by_element(variable, known):
    """Return whether a value is known, a number, or elementwise of known values and numbers."""
    node, n_axes = variable.owner, getattr(variable.type, "ndim", None)
    if node is None:
        return variable in known or n_axes == 0
    if isinstance(node.op, host.DimShuffle):
        return node.inputs[0].type.ndim == 0
    is_of_numbers = all(getattr(each.type, "ndim", None) == 0 for each in node.inputs)
    return isinstance(node.op, host.Elemwise) or (n_axes == 0 and is_of_numbers)


def is_reusing_memory(function):
    """Return whether a compiled function keeps the memory of its results, and may overwrite it."""
    return not getattr(host.machine_of(function), "allow_gc", False)


@recurses_deep
def swapped(expressions, variables):
    """Return expressions with the keys of a dict replaced; what is no variable stays as it is."""
    new = iter(host.clone_replace([e for e in expressions if isinstance(e, Variable)], variables))
    return [next(new) if isinstance(each, Variable) else each for each in expressions]


def copied(wanted, replace):
    """Return copies of variables, computed from the replacements of other variables."""
    new = dict(replace)
    for node in host.io_toposort(list(replace), wanted):
        copy = node.clone_with_new_inputs([new.get(i, i) for i in node.inputs], strict=False)
        new.update(zip(node.outputs, copy.outputs))
    return [new[each] for each in wanted]


def variables_read(function):
    """Return the shared variables whose values a compiled function reads, not only replaces."""
    fgraph = function.maker.fgraph
    pairs = zip(function.maker.inputs, fgraph.inputs)
    read = {given.variable for given, inner in pairs if host.clients_of(fgraph, inner)}
    return [variable for variable in function.get_shared() if variable in read]


def updated_variables(function):
    """Return the shared variables that a compiled function updates."""
    return [i.variable for i in function.maker.inputs if i.update is not None and i.shared]


def default_updates(function, updates):
    """Return a compiled function's default updates, as pairs, but for variables in `updates`."""
    targets = {target for target, _ in updates}
    updated = [i.variable for i in function.maker.inputs if i.implicit and i.update is not None]
    return [(variable, variable.default_update) for variable in updated if variable not in targets]


def without_default_updates(kwargs, variables):
    """Return keyword arguments of `compile_function` that leave out these default updates."""
    if not variables:
        return dict(kwargs)
    # It is False or a list here: with True the function would have no default updates.
    left_out = kwargs.get("no_default_updates") or []
    return {**kwargs, "no_default_updates": [*left_out, *variables]}


def updates_by_default(variables):
    """Return pairs (variable, its default update) for the variables that have one."""
    pairs = [(each, getattr(each, "default_update", None)) for each in variables]
    return [(each, each.type.filter_variable(new)) for each, new in pairs if new is not None]


def destroyed_inputs(function):
    """Return the positions of inputs, no shared variables, that operations of a user overwrite."""
    fgraph, inputs = function.maker.fgraph, function.maker.inputs
    if not hasattr(fgraph, "has_destroyers"):
        return []
    pairs = enumerate(zip(inputs, fgraph.inputs))
    return [i for i, (given, x) in pairs if not given.shared and fgraph.has_destroyers([x])]


def line_of(variable) -> str:
    """Return "file:line" where the script made a variable, or what it is computed from; or ""."""
    for each in itertools.islice(ancestors([variable]), _NEAR):
        traces = [trace for trace in getattr(each.tag, "trace", None) or [] if trace]
        lines = [(file, line) for trace in traces for file, line, *_ in reversed(trace)]
        for file, line in lines:
            if not _LIBRARIES.search(file):
                return f"{file}:{line}"
    return ""


_NEAR = 200  # so many variables are searched for a line of the script
_LIBRARIES = re.compile(r"[/\\](site-packages|dist-packages|synkhronos)[/\\]")


def release_arguments(function):
    """Release what the library keeps of a call that raised: arguments, and views of them."""
    for container in function.input_storage:
        if container.required:
            container.storage[0] = None
    for variable, cell in getattr(host.machine_of(function), "storage_map", {}).items():
        if variable.owner is not None:
            cell[0] = None


def fixed_axes(variable):
    """Return for each axis of a variable whether its length is always 1 (it is broadcastable)."""
    return getattr(variable, "broadcastable", ())  # Theano's sparse ones have no such axes


def cast_value(variable, value):
    """Return a value as a NumPy array of a variable's dtype and ndim, cast without loss."""
    plain = host.tensor_type(variable.dtype, (False,) * variable.ndim)
    return np.asarray(plain.filter(value))


def caster(variable, strict, allow_downcast):
    """Return a function that converts values as the library's functions do, or raises TypeError."""
    return functools.partial(variable.type.filter, strict=strict, allow_downcast=allow_downcast)


# Levels of recursion that a rewrite needs for each operation of the longest path, and for all else.
# If a rewrite runs out of them, the host library skips it, and only prints that.
_OF_OPERATION, _BESIDES = 4, 200


def compiling_deep(compile_function, computed):
    """Return a function that compiles these variables, however deep their graph is."""
    return recurses_deep(compile_function, _OF_OPERATION * depth(computed) + _BESIDES)


def depth(variables) -> int:
    """Return the number of operations on the longest path to one of some variables, or Outs."""
    given = [getattr(each, "variable", each) for each in variables]
    depths = {None: 0}
    for node in host.io_toposort([], [each for each in given if isinstance(each, Variable)]):
        depths[node] = 1 + max((depths[each.owner] for each in node.inputs), default=0)
    return max(depths.values())


# Other linkers print or check results in each run.
_LINKERS = {
    "CLinker", "JAXLinker", "NumbaLinker", "OpWiseCLinker", "PerformLinker", "VMLinker",
    "VM_Linker",
}  # fmt: skip
_PACKAGES = {"theano", "pytensor", "synkhronos"}
# These operations print, stop, call Python code of the script, or send and receive.
_WITH_EFFECTS = {
    "Print", "FromFunctionOp", "PdbBreakpoint", "LoadFromDisk", "MPIRecv", "MPIRecvWait", "MPISend",
    "MPISendWait",
}  # fmt: skip


def is_watched(function) -> bool:
    """Return whether a function runs under a mode that watches it, or a linker of the script."""
    linker = getattr(function.maker, "linker", None)
    return getattr(linker, "callback", None) is not None or type(linker).__name__ not in _LINKERS


def is_repeatable(function) -> bool:
    """Return whether another run has no effect: it prints nothing, and runs no code of the user."""
    has_effects = function.profile is not None or is_watched(function)
    return not (has_effects or any(map(_has_effects, function.maker.fgraph.apply_nodes)))


def _has_effects(node):
    kind = type(node.op)
    if isinstance(node.op, PythonOperation):
        return True
    if kind.__module__.partition(".")[0] not in _PACKAGES or kind.__name__ in _WITH_EFFECTS:
        return True
    return any(map(_has_effects, nodes_of(host.inner_outputs(node.op))))


def number(variable):
    """Return the number that a variable always is, if the graph says it, else None."""
    try:
        return host.get_scalar_constant_value(variable)
    except host.NotScalarConstantError:
        return None


def axis_of(node):
    """Return the axis along which an operation goes if the graph says it, else None."""
    axis = node.op.axis if hasattr(node.op, "axis") else number(node.inputs[1])
    return None if axis is None else int(axis) % node.inputs[0].ndim


def operation_name(node):
    """Return the name of a node's operation, for messages."""
    op = getattr(node.op, "scalar_op", node.op)
    return getattr(op, "name", None) or type(op).__name__


_KEEP = {"add", "sub", "neg", "maximum", "minimum", "second", "DimShuffle", "Join"}
_KEEP |= {"Maximum", "Minimum", "IncSubtensor", "AdvancedIncSubtensor1", "AdvancedIncSubtensor"}


def is_total(value, variable, rows):
    """Return whether a variable's update is the variable, but for factors and terms without it.

    Such are totals and moving averages. A factor must not depend on `rows`.
    """
    left, seen = [value], {variable}
    while left:
        each = left.pop()
        if each in seen or not uses(each, {variable}):
            continue
        seen.add(each)
        name = operation_name(each.owner)
        users = [x for x in each.owner.inputs if uses(x, {variable})]
        if name in ("mul", "true_div"):
            others = [x for x in each.owner.inputs if x not in users]
            is_scaled = users == each.owner.inputs[:1] or (name == "mul" and len(users) == 1)
            if not is_scaled or any(uses(other, rows) for other in others):
                return False
        elif name not in _KEEP and not name.startswith("convert_to"):
            return False
        left += users
    return True


def is_computed_from(expression, variables):
    """Return whether an expression is computed from one of some variables."""
    return not set(variables).isdisjoint(ancestors([expression]))


def uses(value, variables):
    """Return whether a value depends on one of some variables; False if it is no variable.

    Neither its shape counts, nor 0 times it, by which Lasagne adds default updates.
    """
    left, seen = [value] if isinstance(value, Variable) else [], set()
    while left:
        each = left.pop()
        if each in variables:
            return True
        node = each.owner
        if each in seen or node is None:
            continue
        seen.add(each)
        name = operation_name(node)
        if name in ("Shape", "Shape_i"):
            continue
        if name != "mul" or not any(map(_is_zero, node.inputs)):
            left += node.inputs
    return False


def _is_zero(value):
    while value.owner is not None and operation_name(value.owner) == "DimShuffle":
        [value] = value.owner.inputs
    return isinstance(value, Constant) and not np.any(value.data)
