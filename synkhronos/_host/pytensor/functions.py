"""Compile and call PyTensor functions.

Numba compiles a function when it is called, and again for each memory layout of an argument. So the
ranks give functions arrays that are C-contiguous and writable only, and compile them before the
first call: first the master, then the workers, which find the code in numba's cache on the disk.

    master   compile_function ──▶ compile_now ──▶ dump ───▶ load ──▶ compile_now   worker
"""

import functools
import warnings

import numpy as np
import pytensor
from pytensor.compile.mode import Mode, get_mode
from pytensor.graph.basic import Variable, equal_computations
from pytensor.graph.replace import clone_replace
from pytensor.link.basic import JITLinker
from pytensor.link.numba.linker import NumbaLinker

from synkhronos._host.base.deep_graphs import compiling_deep
from synkhronos._host.pytensor import rewriting
from synkhronos._machine.deep_recursion import recurses_deep
from synkhronos._machine.interrupts import raised_here
from synkhronos._machine.log import log

__all__ = ["Mode"]


def float_dtype() -> str:
    """Return PyTensor's floatX."""
    return pytensor.config.floatX


def is_mode(name) -> bool:
    """Return whether PyTensor has a mode, or a linker, of this name."""
    try:
        get_mode(name)
    except raised_here(Exception):  # of any kind
        return False
    return True


def compile_function(inputs, outputs, **kwargs):
    """Return a compiled PyTensor function that takes checked arrays and returns a list.

    Raises ValueError for a mode whose arrays are not NumPy's.
    """
    givens = kwargs.get("givens") or ()
    pairs = [
        *(kwargs.get("updates") or ()),
        *(givens.items() if hasattr(givens, "items") else givens),
    ]
    computed = [*outputs, *(value for _, value in pairs if isinstance(value, Variable))]
    kwargs["mode"] = rewriting.mode_for(computed, _checked(get_mode(kwargs.get("mode"))))
    if not kwargs.get("no_default_updates"):
        kwargs.pop("no_default_updates", None)  # PyTensor warns of any value but None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The no_default_updates parameter", DeprecationWarning)
        function = compiling_deep(pytensor.function, computed)(inputs, outputs, **kwargs)
    function.trust_input = True
    return function


def _checked(mode):
    linker = mode.linker
    if isinstance(linker, JITLinker) and not isinstance(linker, NumbaLinker):
        name = type(linker).__name__.replace("Linker", "").upper()
        raise ValueError(
            f"A function of the mode {name} can't run on several ranks: its library starts threads "
            "in the master, which no process survives that is forked afterwards, and its arrays "
            "are not NumPy's. Give mode='NUMBA' (PyTensor's default) or mode='CVM'."
        )
    return mode


def compile_now(function) -> None:
    """Let numba compile a function for the arguments that ranks give it; do nothing in other modes.

    Numba finds code that any process has compiled before in its cache. An error is left to the
    first call, which raises it again.
    """
    if not isinstance(function.maker.linker, NumbaLinker):
        return
    import numba

    try:
        types = [_type_of(each) for each in function.input_storage]
        compile_deep = recurses_deep(function.vm.jit_fn.compile)
        compile_deep((numba.types.BaseTuple.from_types(types),))
    except raised_here(Exception):  # of numba, and of any operation's implementation
        log.debug("%s is compiled at its first call", function.name, exc_info=True)


def _type_of(container):
    """Return numba's type of an argument: of a shared variable's value, or of arrays of ranks."""
    import numba
    from pytensor.link.numba.dispatch.basic import get_numba_type

    value = container.storage[0]
    if value is not None and not container.required:
        return numba.typeof(value)
    return get_numba_type(container.type, layout="C")


def expression_of(function, inputs, outputs, updates, kwargs):
    """Raise RuntimeError: all ranks are on the CPU, and none compiles an expression."""
    raise RuntimeError("PyTensor has no ranks on devices; this is a mistake of Synkhronos.")


def as_update(variable, value):
    """Return the new value of an update as an expression of its shared variable's type."""
    return variable.type.filter_variable(value, allow_convert=True)


@recurses_deep
def same_updates(one, other):
    """Return whether two lists of (variable, its update) compute the same from their inputs.

    Parameters
    ----------
    one, other : (list of input variables, list of pairs)
    """
    (inputs, pairs), (other_inputs, other_pairs) = one, other
    given = [*inputs, *(variable for variable, _ in pairs)]
    others = [*other_inputs, *(variable for variable, _ in other_pairs)]
    if [each.type for each in given] != [each.type for each in others]:
        return False
    expressions = [as_update(variable, value) for variable, value in pairs]
    other_expressions = [as_update(variable, value) for variable, value in other_pairs]
    return equal_computations(expressions, other_expressions, given, others)


def is_reusing_memory(function):
    """Return whether a compiled function keeps memory of its results, and may write to it again."""
    return not getattr(function.vm, "allow_gc", False)


@recurses_deep
def swapped(expressions, variables):
    """Return expressions with variables, the keys of a dict, replaced; others stay as they are."""
    found = [isinstance(each, Variable) for each in expressions]
    new = iter(clone_replace([e for e, is_one in zip(expressions, found) if is_one], variables))
    return [next(new) if is_one else each for each, is_one in zip(expressions, found)]


def shared_variables(function):
    """Return the shared variables that a compiled function uses or updates."""
    return function.get_shared()


def variables_read(function):
    """Return the shared variables whose values a compiled function reads, not only replaces."""
    fgraph = function.maker.fgraph
    pairs = zip(function.maker.inputs, fgraph.inputs)
    used = {given.variable for given, inner in pairs if fgraph.clients[inner]}
    return [variable for variable in function.get_shared() if variable in used]


def set_default_update(variable, expression):
    """Give a shared variable an update in all functions that use it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Setting default_update", DeprecationWarning)
        variable.default_update = expression


def run(function, arguments, output_subset=None):
    """Call a compiled function; return all outputs, or those that `output_subset` numbers.

    PyTensor computes all outputs in any case.
    """
    try:
        if hasattr(function.vm, "jit_fn"):
            arguments = [
                array if array.flags.carray else np.require(array, requirements="CAW")
                for array in arguments
            ]
        outputs = function(*arguments)
        if output_subset is None:
            return outputs
        return [outputs[index] for index in output_subset]
    except BaseException:
        # PyTensor releases its arguments only after a call that did not raise.
        for container in function.input_storage:
            if container.required:
                container.storage[0] = None
        raise


def caster(variable, strict, allow_downcast):
    """Return a function that makes the array of a value that ``pytensor.function`` makes of it.

    It raises the ``TypeError`` that ``pytensor.function`` raises.
    """
    return functools.partial(variable.type.filter, strict=strict, allow_downcast=allow_downcast)
