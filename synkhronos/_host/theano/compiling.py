"""Compile and call Theano functions."""

import copy
import functools

import theano
from theano import gof
from theano.compile.mode import Mode, get_mode
from theano.printing import Print

from synkhronos._host.base import functions
from synkhronos._host.base.rewriting import with_fused_reductions
from synkhronos._host.theano import device_arrays, lending, overlapping, portable  # noqa: F401
from synkhronos._host.theano.cuda_context import CudaContext
from synkhronos._host.theano.faster import switch
from synkhronos._machine.deep_recursion import recurses_deep
from synkhronos._machine.log import rank_in_a_call


@functools.wraps(Print.perform)
def _print_with_rank(op, node, inputs, output_storage, perform=Print.perform):
    """Print a message that begins with the rank in a call of several ranks: "[rank 1] ..."."""
    rank = rank_in_a_call()
    if rank is not None:
        op = copy.copy(op)  # the graphs of other functions have the same operation
        op.message = f"[rank {rank}] {op.message}"
    perform(op, node, inputs, output_storage)


switch.install()
Print.perform = _print_with_rank


def compile_function(inputs, outputs, **kwargs):
    """Return a compiled Theano function that takes checked arrays and returns a list."""
    computed = functions.computed_by(outputs, **kwargs)
    kwargs["mode"] = mode_for(computed, kwargs.get("mode"))
    function = functions.compiling_deep(_compile, computed)(inputs, outputs, **kwargs)
    function.trust_input = function.maker.is_of_synkhronos = True
    return function


def _compile(*args, **kwargs):
    if CudaContext.current is not None:
        CudaContext.current.enter_thread()
    return theano.function(*args, **kwargs)


def mode_for(outputs, mode):
    """Return the mode to compile for ranks with: with fused AllReduces and rewrites for CPUs."""
    mode = get_mode(mode)
    if device_arrays.device_context() is None:
        mode = switch.for_cpus(mode)
    elif type(mode.linker) is gof.PerformLinker or not getattr(mode.linker, "c_thunks", True):
        # A mode such as FAST_COMPILE runs Python code only; operations on devices have none.
        mode = Mode("vm", mode.provided_optimizer)
    return with_fused_reductions(mode, outputs)


@recurses_deep
def expression_of(function, inputs, outputs, updates, kwargs):
    """Return the expression of a compiled function, for ranks on another kind of device."""
    updates = [*updates, *functions.default_updates(function, updates)]
    return portable.without_devices(inputs, outputs, updates, kwargs)


def run(function, arguments, output_subset=None):
    """Call a compiled function; return all outputs, or those that `output_subset` numbers."""
    if CudaContext.current is not None:
        CudaContext.current.enter_thread()
    try:
        if output_subset is None:
            outputs = function(*arguments)
        # The lazy virtual machines accept a subset; the plain loops take no argument at all.
        elif type(function.fn).__name__ in ("CVM", "Stack"):
            outputs = function(*arguments, output_subset=list(output_subset))
        else:
            outputs = function(*arguments)
            outputs = [outputs[index] for index in output_subset]
    except BaseException:
        functions.release_arguments(function)
        raise
    return outputs
