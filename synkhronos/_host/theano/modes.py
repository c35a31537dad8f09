"""Modes of compilation for ranks."""

from theano import gof
from theano.compile.mode import Mode, get_mode

from synkhronos._host.base.rewriting import with_fused_reductions
from synkhronos._host.theano import devices, lending, overlapping  # noqa: F401 - rewrites
from synkhronos._host.theano.faster import switch


def mode_for(outputs, mode):
    """Return the mode to compile for ranks with.

    It has the rewrites for CPUs if it compiles C code, and fuses all-reduces if there are any.

    Raises ``TypeError`` for an AllReduce inside a scan: it can't be part of the chain.
    """
    mode = get_mode(mode)
    if devices.device_kind() == "cpu":
        mode = switch.for_cpus(mode)
    elif type(mode.linker) is gof.PerformLinker or not getattr(mode.linker, "c_thunks", True):
        # A mode such as FAST_COMPILE runs Python code only; operations on devices have none.
        mode = Mode("vm", mode.provided_optimizer)
    return with_fused_reductions(mode, outputs)
