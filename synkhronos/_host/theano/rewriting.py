"""Optimizations of the graphs of ranks that all-reduce, beside those of `base.rewriting`.

    fused, in place    Dot22 ──▶ an array ──▶ AllReduce of all  ──▶ Elemwise
                                     └─copy─▶ shared memory ─copy─┘
    lent               Landing, Gemm ──▶ shared memory, reduced ──▶ Elemwise

A product of matrices, such as the gradient of a dense layer, can be computed in shared memory: it
lands there. A result that is lent stays in the memory where it was reduced. It is valid until the
next run, so nothing may hold it that outlives a run of the function, such as an output, a new value
of a shared variable, or a view of one. Both are done only in functions with one AllReduce: then the
next reduction is that of the same node.
"""

import numpy as np
from theano import gof
from theano.compile import mode as modes
from theano.tensor import TensorType, blas, constant

from synkhronos._host.base.rewriting import with_fused_reductions
from synkhronos._host.theano import devices
from synkhronos._host.theano.faster import switch
from synkhronos._host.theano.graph import AllReduce, Landing
from synkhronos._host.theano.overlapping import Overlap


class _Lend(gof.Optimizer):
    """Lends the outputs that may be lent, and lets products land in the same memory."""

    def add_requirements(self, fgraph):
        fgraph.attach_feature(gof.toolbox.ReplaceValidate())

    def apply(self, fgraph):
        nodes = [node for node in fgraph.apply_nodes if isinstance(node.op, AllReduce)]
        if len(nodes) != 1 or not nodes[0].op.inplace or nodes[0].op.bucket is not None:
            return
        op, inputs, outputs = nodes[0].op, nodes[0].inputs, nodes[0].outputs
        lent = tuple(may_be_lent(output) for output in outputs)
        if not any(lent):
            return
        landing = [land(x, i) if lent[i] else x for i, x in enumerate(inputs)]
        lender = AllReduce(op.ops, op.serials, inplace=True, lent=lent)
        fgraph.replace_all_validate(
            list(zip(outputs, lender(*landing, return_list=True))), reason="synkhronos_lend"
        )


def may_be_lent(variable):
    """Return whether an output of an AllReduce may stay where it is reduced."""
    # Half precision is reduced in single precision, so not in its own memory.
    plain = type(variable.type) is TensorType and variable.dtype != "float16"
    return plain and not _outlives(variable)


def _outlives(variable):
    """Return whether an output of the function may be this array, or share its memory."""
    for client, position in variable.clients:
        if client == "output":
            return True
        shared = {**getattr(client.op, "view_map", {}), **getattr(client.op, "destroy_map", {})}
        for output, inputs in shared.items():
            if position in inputs and _outlives(client.outputs[output]):
                return True
    return False


def land(x, position, bucket=None):
    """Return the same product, computed in a landing place; return `x` if it is no product."""
    op = getattr(x.owner, "op", None)
    if len(x.clients) > 1 or not isinstance(op, (blas.Dot22, blas.Dot22Scalar)):
        return x
    left, right, *scale = x.owner.inputs
    one, zero = (constant(np.asarray(number, x.dtype)) for number in (1, 0))
    place = Landing(position, bucket)(left, right)
    product = blas.gemm_inplace(place, *(scale or [one]), left, right, zero)
    return product if product.type == x.type else x


# After all optimizations that work in place. A function that overlaps has nothing left to lend.
modes.optdb.register("synkhronos_overlap", Overlap(may_be_lent, land), 199, "synkhronos")
modes.optdb.register("synkhronos_lend", _Lend(), 200, "synkhronos")


def open_device(device: str, rank: int, threads: int) -> None:
    """Open the device of this rank, and let Theano's backend move AllReduces to it."""
    devices.open_device(device, rank, threads)
    _lift_all_reduces()


def _lift_all_reduces():
    from theano.gpuarray import opt
    from theano.gpuarray.basic_ops import as_gpuarray_variable

    @opt.register_opt("fast_compile")
    @opt.op_lifter([AllReduce])
    @opt.register_opt2([AllReduce], "fast_compile")
    def local_gpua_all_reduce(op, context_name, inputs, outputs):
        return op(*[as_gpuarray_variable(x, context_name) for x in inputs], return_list=True)


def mode_for(outputs, mode):
    """Return the mode to compile for ranks with.

    It has the rewrites for CPUs if it compiles C code, and fuses all-reduces if there are any.

    Raises ``TypeError`` for an AllReduce inside a scan: it can't be part of the chain.
    """
    mode = modes.get_mode(mode)
    if devices.device_kind() == "cpu":
        mode = switch.for_cpus(mode)
    elif type(mode.linker) is gof.PerformLinker or not getattr(mode.linker, "c_thunks", True):
        # A mode such as FAST_COMPILE runs Python code only; operations on devices have none.
        mode = modes.Mode("vm", mode.provided_optimizer)
    return with_fused_reductions(mode, outputs)
