"""Compile and call PyTensor functions.

Numba compiles a function when it is called, and again for each memory layout of an argument. So
ranks pass only C-contiguous, writable arrays, and compile functions before the first call: first
the master, then the workers, which find the code in numba's cache on the disk.

    master   compile_function ──▶ compile_now ──▶ dump ───▶ load ──▶ compile_now   worker

In numba's code an AllReduce is a call of Python. Numba leaves PyTensor's rewrites for BLAS out, so
no product is computed in shared memory. Ranks on devices compute with `jax_functions`.
"""

import importlib
import warnings

import numpy as np
import pytensor
from pytensor.compile.mode import Mode, get_mode
from pytensor.link.basic import JITLinker
from pytensor.link.jax.linker import JAXLinker
from pytensor.link.numba.linker import NumbaLinker

from synkhronos import _systems
from synkhronos._host.base import functions
from synkhronos._host.base.rank_operations import RankOperation
from synkhronos._host.base.rewriting import with_fused_reductions
from synkhronos._host.base.rows import Rows
from synkhronos._host.pytensor.device_arrays import device_context, to_host
from synkhronos._host.pytensor.library import WalkingGraphRewriter, node_rewriter, register
from synkhronos._machine.deep_recursion import recurses_deep
from synkhronos._machine.interrupts import raised_here
from synkhronos._machine.log import log


def compile_function(inputs, outputs, **kwargs):
    """Return a compiled PyTensor function that takes checked arrays and returns a list."""
    computed = functions.computed_by(outputs, **kwargs)
    mode = _checked(get_mode(kwargs.get("mode")))
    kwargs["mode"] = with_fused_reductions(mode, computed)
    if not kwargs.get("no_default_updates"):
        kwargs.pop("no_default_updates", None)  # PyTensor warns of any value but None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The no_default_updates parameter", DeprecationWarning)
        function = functions.compiling_deep(pytensor.function, computed)(inputs, outputs, **kwargs)
    function.trust_input = function.maker.is_of_synkhronos = True
    return function


def _checked(mode):
    linker = mode.linker
    name = type(linker).__name__.replace("Linker", "").upper()
    if device_context() is not None:
        if not isinstance(linker, JAXLinker):
            raise ValueError(
                f"A function of the mode {name} can't run on ranks on devices, which compute with "
                "JAX: leave the mode out, or write mode='JAX'. fork(n) gives ranks CPU cores."
            )
        return Mode(get_mode("JAX").linker.clone(), mode.provided_optimizer)
    if isinstance(linker, JITLinker) and not isinstance(linker, NumbaLinker):
        raise ValueError(
            f"A function of the mode {name} can't run on several ranks: its library starts threads "
            "in the master, which no process survives that is forked afterwards, and its arrays "
            "are not NumPy's. Give mode='NUMBA' (PyTensor's default) or mode='CVM'; with JAX "
            "compute ranks of fork(devices=['cuda0']), or ['jax:cpu']." + _systems.advice("JAX")
        )
    return mode


def compile_now(function):
    """Return a function; numba compiles it now, if at all, for the arguments that ranks pass."""
    if not isinstance(function.maker.linker, NumbaLinker):
        return function
    import numba

    try:
        types = [_type_of(each) for each in function.input_storage]
        compile_deep = recurses_deep(function.vm.jit_fn.compile)
        compile_deep((numba.types.BaseTuple.from_types(types),))
    except raised_here(Exception):  # of numba, or of an operation: the first call raises it again
        log.debug("%s is compiled at its first call", function.name, exc_info=True)
    return function


def _type_of(container):
    """Return numba's type of an argument: of a shared variable's value, or of arrays of ranks."""
    import numba
    from pytensor.link.numba.dispatch.basic import get_numba_type

    value = container.storage[0]
    if value is not None and not container.required:
        return numba.typeof(value)
    return get_numba_type(container.type, layout="C")


def run(function, arguments, output_subset=None):
    """Call a compiled function; return all outputs, or those that `output_subset` numbers."""
    try:
        if isinstance(function.maker.linker, NumbaLinker):
            arguments = [
                array if array.flags.carray else np.require(array, requirements="CAW")
                for array in arguments
            ]
        outputs = function(*arguments)
        if output_subset is not None:
            outputs = [outputs[index] for index in output_subset]
        return outputs if device_context() is None else [*map(to_host, outputs)]
    except BaseException:
        functions.release_arguments(function)
        raise


def expression_of(function, *expression):
    """Return a compiled function, for ranks whose JAX has another kind of device: itself."""
    return function


@node_rewriter([RankOperation, Rows, functions.PythonOperation])
def _for_numba(fgraph, node):
    # It imports numba, which takes a second, and a C mode needs no numba.
    importlib.import_module("synkhronos._host.pytensor.numba_operations")
    return False


# This is for all functions that numba compiles, also those of users.
register("synkhronos_numba", WalkingGraphRewriter(_for_numba, order="in_to_out"), 90, "numba")
