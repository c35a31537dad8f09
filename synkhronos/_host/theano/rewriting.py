"""Optimizations of the graphs of ranks: of those that all-reduce, and of all those on CPUs.

All-reduces are fused, work in place, and in shared memory:

    as it is written   Dot22 ──▶ an array ──▶ AllReduce ──▶ another ──▶ Elemwise
    fused, in place    Dot22 ──▶ an array ──▶ AllReduce of all  ──▶ Elemwise
                                     └─copy─▶ shared memory ─copy─┘
    lent               Landing, Gemm ──▶ shared memory, reduced ──▶ Elemwise

A product of matrices, such as the gradient of a dense layer, can be computed in shared memory: it
lands there. A result that is lent stays in the memory where it was reduced. It is valid until the
next run, so nothing may hold it that outlives a run of the function, such as an output, a new value
of a shared variable, or a view of one. Both are done only in functions with one AllReduce: then the
next reduction is that of the same node.

On CPUs, operations that take long in Theano are replaced by others with the same results: see
`sums`, `pooling` and `convolutions`. These rewrites have the tag `CPU`, which
``THEANO_FLAGS=optimizer_excluding=synkhronos_cpu`` and ``mode.excluding("synkhronos_cpu")`` turn
off; each has a name too, such as ``synkhronos_pooling``.
"""

import numpy as np
import theano
from theano import gof, tensor
from theano.compile import mode as modes
from theano.tensor import TensorType, blas, constant
from theano.tensor import opt as tensor_opt
from theano.tensor.elemwise import DimShuffle

from synkhronos._host.theano import convolutions, devices, pooling, sums, vectorizing
from synkhronos._host.theano.graph import AllReduce, Landing
from synkhronos._host.theano.overlapping import Overlap

CPU = "synkhronos_cpu"  # the tag of rewrites for functions that run compiled code on CPUs


class _Fuse(gof.Optimizer):
    """Makes one node of all AllReduces that do not depend on one another."""

    def add_requirements(self, fgraph):
        fgraph.attach_feature(gof.toolbox.ReplaceValidate())

    def apply(self, fgraph):
        depths, levels = {}, {}
        for node in fgraph.toposort():
            depth = max((depths.get(x, 0) for x in node.inputs), default=0)
            if isinstance(node.op, AllReduce):
                levels.setdefault(depth, []).append(node)
                depth += 1
            for output in node.outputs:
                depths[output] = depth
        for nodes in levels.values():
            if len(nodes) > 1:
                nodes = sorted(nodes, key=lambda node: node.op.serials)
                ops = tuple(op for node in nodes for op in node.op.ops)
                serials = tuple(serial for node in nodes for serial in node.op.serials)
                outputs = [output for node in nodes for output in node.outputs]
                fused = AllReduce(ops, serials)(*[x for node in nodes for x in node.inputs])
                fgraph.replace_all_validate(
                    list(zip(outputs, fused)), reason="synkhronos_fuse_all_reduce"
                )


@gof.local_optimizer([AllReduce])
def _in_place(node):
    # Only in graphs in which Theano tracks the operations that destroy their inputs.
    if (
        isinstance(node.op, AllReduce)
        and not node.op.inplace
        and hasattr(node.fgraph, "destroyers")
    ):
        in_place = AllReduce(node.op.ops, node.op.serials, inplace=True)
        return in_place(*node.inputs, return_list=True)
    return False


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


# Fused after the graph is simplified, so that no simplification can remove a dependence, and before
# elementwise expressions are fused, at 49. In place after elementwise operations, which may use the
# same buffers, at 75.
modes.optdb.register("synkhronos_fuse_all_reduce", _Fuse(), 48.9, "synkhronos")
modes.optdb.register(
    "synkhronos_all_reduce_in_place",
    gof.TopoOptimizer(_in_place, failure_callback=gof.TopoOptimizer.warn_inplace),
    80,
    "synkhronos",
)
# After all optimizations that work in place. A function that overlaps has nothing left to lend.
modes.optdb.register("synkhronos_overlap", Overlap(may_be_lent, land), 199, "synkhronos")
modes.optdb.register("synkhronos_lend", _Lend(), 200, "synkhronos")
# After all other rewrites, which know nothing of its operations. Its tags are those of functions
# that reduce over the ranks, and of all functions of ranks on CPUs.
modes.optdb.register(
    "synkhronos_vectorize", vectorizing.Vectorize(), 202, "synkhronos", "synkhronos_cpu"
)


@gof.local_optimizer([tensor.pow])
def _square(node):
    """Simplify a power whose exponent is a constant scalar with more axes, such as a square."""
    if node.op != tensor.pow:
        return False
    base, exponent = node.inputs
    shuffle = exponent.owner
    if not (shuffle and isinstance(shuffle.op, DimShuffle)):
        return False
    [scalar] = shuffle.inputs
    if not isinstance(scalar, gof.Constant) or scalar.ndim:
        return False
    folded = constant(scalar.data.reshape((1,) * exponent.ndim), dtype=scalar.dtype)
    return tensor_opt.local_pow_specialize.transform(tensor.pow(base, folded).owner)


# After all that Theano simplifies, and before it fuses elementwise expressions. An expression that
# Theano wrote in the last of its simplifications, such as the variance of a batch normalization, is
# not simplified itself: its squares are computed as powers.
for _name, _rewrite in {
    "squares": _square,
    "sums": sums.interleave,
    "pooling": pooling.pool_contiguously,
    "convolutions": convolutions.copy_row_by_row,
}.items():
    modes.optdb.register(
        f"synkhronos_{_name}", gof.opt.in2out(_rewrite, name=f"synkhronos_{_name}"), 48.8, CPU
    )


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
    reduces = _reduces(outputs)
    if devices.device_kind() != "cpu":
        mode = modes.get_mode(mode)
        if type(mode.linker) is gof.PerformLinker or not getattr(mode.linker, "c_thunks", True):
            # A mode such as FAST_COMPILE runs Python code only; operations on devices have none.
            mode = modes.Mode("vm", mode.provided_optimizer)
    else:
        mode = _for_cpus(modes.get_mode(mode))
    if not reduces:
        return mode
    mode = modes.get_mode(mode)
    if isinstance(mode.provided_optimizer, gof.Query):
        return mode.including("synkhronos")
    return mode.clone(optimizer=gof.SeqOptimizer([mode.optimizer, _Fuse()]))


def _for_cpus(mode):
    optimizer, linker = mode.provided_optimizer, mode.linker
    # Modes that watch each operation, such as DebugMode, have other linkers: they watch Theano's.
    compiles = (
        bool(theano.config.cxx)
        and isinstance(linker, (gof.vm.VM_Linker, gof.OpWiseCLinker, gof.CLinker))
        and getattr(linker, "c_thunks", None) is not False
    )
    if compiles and isinstance(optimizer, gof.Query) and "fast_run" in optimizer.include:
        return mode.including(CPU)
    return mode


def _reduces(outputs):
    found = False
    for variable in _ancestors(outputs):
        op = getattr(variable.owner, "op", None)
        found = found or isinstance(op, AllReduce)
        # The graphs inside of a scan and of an OpFromGraph; the latter may become part of this one.
        inner = getattr(op, "outputs", None) or getattr(op, "local_outputs", None) or ()
        if inner and _reduces([v for v in inner if isinstance(v, gof.Variable)]):
            if not getattr(op, "is_inline", False):
                raise TypeError(
                    f"ops.all_reduce is inside of {op}, where ranks can't be kept in step. Reduce "
                    "what it is given, or what it returns (an OpFromGraph may be inline=True)."
                )
            found = True
    return found


def _ancestors(outputs):
    """Return all variables that the outputs and default updates are computed from."""
    found = gof.graph.ancestors(outputs)
    default = [v.default_update for v in found if getattr(v, "default_update", None) is not None]
    return found + gof.graph.ancestors(default)
