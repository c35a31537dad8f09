"""All-reduce as an operation of a Theano graph.

    grads ──▶ AllReduce, AllReduce, ... ──▶ updates           as the user writes it
    grads ──▶ one AllReduce of all of them ──▶ updates        as it is compiled for ranks

Why all ranks reduce in the same order: of the AllReduces of a graph those of one level, between
which no path leads, become one node, and each level has an input that was computed from the level
before. So the nodes that are left form a chain, and no schedule can run them in another order. In a
node they are in the order in which they were made, also where ranks on other kinds of devices have
compiled the graph for themselves.
"""

import contextlib
import contextvars
import itertools

import numpy as np
from theano import gof
from theano.compile import mode as modes
from theano.gradient import DisconnectedType, grad_undefined
from theano.tensor import as_tensor_variable, dscalar

from synkhronos import _gpuarrays

# Set while a rank runs its part of a call. Elsewhere, as in a plain Theano function or another
# thread, there is nobody to reduce with, and one rank that has all rows.
_exchange = contextvars.ContextVar("synkhronos exchange", default=None)
_weight = contextvars.ContextVar("synkhronos weight", default=1.0)
_serials = itertools.count()


@contextlib.contextmanager
def reducing(exchange, weights, rank):
    """Have AllReduces reduce with ``exchange(arrays, ops, weights, targets)`` for a while."""
    failures = []

    def reduce(arrays, ops, targets):
        try:
            exchange(arrays, ops, weights, targets)
        except BaseException as error:
            failures.append(error)
            raise

    token = _exchange.set(reduce)
    weight = _weight.set(weights[rank] * len(weights) / sum(weights))
    try:
        yield
    except BaseException:
        if failures:  # Theano raises one of its own, without what an exception of ours carries
            raise failures[0] from None
        raise
    finally:
        _weight.reset(weight)
        _exchange.reset(token)


class AllReduce(gof.Op):
    """Reduces each input with those of the other ranks; outside of a call, the identity.

    Each has a serial number, by which the ranks tell it from all others.
    """

    __props__ = ("ops", "serials", "inplace")

    def __init__(self, ops, serials, inplace=False):
        self.ops, self.serials, self.inplace = ops, serials, inplace
        if inplace:
            self.destroy_map = {position: [position] for position in range(len(ops))}

    def make_node(self, *inputs):
        """Return the node; each output is of the type of its input."""
        inputs = [x if _lives_on_device(x) else as_tensor_variable(x) for x in inputs]
        for x, op in zip(inputs, self.ops):
            if op == "avg" and np.dtype(x.dtype).kind not in "fc":
                raise TypeError(
                    f"all_reduce can't average {x}, of dtype {x.dtype}: the result would not be of "
                    "that type. Cast it, or use op='sum'."
                )
        return gof.Apply(self, inputs, [x.type() for x in inputs])

    def __str__(self):
        return f"AllReduce{{{', '.join(self.ops)}}}"

    def perform(self, node, inputs, output_storage):
        """Reduce with the other ranks."""
        targets = []
        for x, storage in zip(inputs, output_storage):
            if self.inplace:
                storage[0] = x
            elif storage[0] is None or storage[0].shape != x.shape:
                storage[0] = _gpuarrays.empty_like(x)
            targets.append(storage[0])
        reduce = _exchange.get()
        if reduce is not None:
            reduce(inputs, self.ops, targets)
        elif not self.inplace:
            for storage, x in zip(output_storage, inputs):
                storage[0] = x.copy()

    def do_constant_folding(self, node):
        """Return that a reduction of constants is none: their sum depends on the ranks."""
        return False

    def infer_shape(self, node, shapes):
        """Return the shapes of the inputs."""
        return shapes

    def connection_pattern(self, node):
        """Each output depends on its own input alone."""
        everything = range(len(node.inputs))
        return [[i == j for j in everything] for i in everything]

    def grad(self, inputs, gradients):
        """Return the all-reduced gradients: of an average the average, of a sum the sum."""
        results = []
        for position, (x, g, op) in enumerate(zip(inputs, gradients, self.ops)):
            if isinstance(g.type, DisconnectedType):
                results.append(DisconnectedType()())
            elif op in ("avg", "sum"):
                results.append(all_reduce(g, op))
            else:
                results.append(grad_undefined(self, position, x, f"of an all_reduce with {op!r}"))
        return results

    def R_op(self, inputs, eval_points):
        """Return the all-reduced directional derivatives: sums and averages are linear."""
        if any(op not in ("avg", "sum") for op in self.ops):
            raise NotImplementedError(f"all_reduce with {self.ops} has no R operator.")
        return [
            None if point is None else all_reduce(point, op)
            for point, op in zip(eval_points, self.ops)
        ]


def all_reduce(x, op):
    """Return an AllReduce of one variable."""
    return AllReduce((op,), (next(_serials),))(x)


class RankWeight(gof.Op):
    """A number: what this rank weighs, where on average ranks weigh 1."""

    __props__ = ()

    def make_node(self):
        """Return the node."""
        return gof.Apply(self, [], [dscalar()])

    def perform(self, node, inputs, output_storage):
        """Ask the call that runs."""
        output_storage[0][0] = np.asarray(_weight.get())

    def do_constant_folding(self, node):
        """Return that it is no constant, though it has no inputs."""
        return False

    def infer_shape(self, node, shapes):
        """Return that it has no axes."""
        return [()]


def _lives_on_device(x):
    return isinstance(x, gof.Variable) and _gpuarrays.is_device_type(x.type)


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
    # Only where Theano looks after who destroys what.
    if (
        isinstance(node.op, AllReduce)
        and not node.op.inplace
        and hasattr(node.fgraph, "destroyers")
    ):
        in_place = AllReduce(node.op.ops, node.op.serials, inplace=True)
        return in_place(*node.inputs, return_list=True)
    return False


# Fused when the graph is simplified, so that no simplification can take away a dependence; before
# elementwise expressions are, at 49. In place after those, which may use the same buffers, at 75.
modes.optdb.register("synkhronos_fuse_all_reduce", _Fuse(), 48.9, "synkhronos")
modes.optdb.register(
    "synkhronos_all_reduce_in_place",
    gof.TopoOptimizer(_in_place, failure_callback=gof.TopoOptimizer.warn_inplace),
    80,
    "synkhronos",
)


def move_to_device():
    """Have Theano's backend for devices, which this rank has opened, take AllReduces along."""
    from theano.gpuarray import opt
    from theano.gpuarray.basic_ops import as_gpuarray_variable

    @opt.register_opt("fast_compile")
    @opt.op_lifter([AllReduce])
    @opt.register_opt2([AllReduce], "fast_compile")
    def local_gpua_all_reduce(op, context_name, inputs, outputs):
        return op(*[as_gpuarray_variable(x, context_name) for x in inputs], return_list=True)


def mode_for(outputs, mode):
    """Return the mode to compile for ranks with: where something is all-reduced, one that fuses.

    Raises ``TypeError`` for an AllReduce inside a scan, which the chain could not hold.
    """
    reduces = _reduces(outputs)
    if _gpuarrays.kind() != "cpu":
        mode = modes.get_mode(mode)
        if type(mode.linker) is gof.PerformLinker or not getattr(mode.linker, "c_thunks", True):
            # As in FAST_COMPILE: it runs Python only, and operations on devices have none.
            mode = modes.Mode("vm", mode.provided_optimizer)
    if not reduces:
        return mode
    mode = modes.get_mode(mode)
    if isinstance(mode.provided_optimizer, gof.Query):
        return mode.including("synkhronos")
    return mode.clone(optimizer=gof.SeqOptimizer([mode.optimizer, _Fuse()]))


def _reduces(outputs):
    found = False
    for variable in _ancestors(outputs):
        op = getattr(variable.owner, "op", None)
        found = found or isinstance(op, AllReduce)
        # The graphs inside of a scan, and of an OpFromGraph, which may be made part of this one.
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
    """Return all variables that these are computed from, and with them their default updates."""
    found = gof.graph.ancestors(outputs)
    default = [v.default_update for v in found if getattr(v, "default_update", None) is not None]
    return found + gof.graph.ancestors(default)


def communicates(function) -> bool:
    """Whether ranks reduce while they run a compiled function, or ask what they weigh."""
    return any(
        isinstance(node.op, (AllReduce, RankWeight)) for node in function.maker.fgraph.apply_nodes
    )
