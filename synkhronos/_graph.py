"""All-reduce as an operation of a Theano graph.

    grads ──▶ AllReduce, AllReduce, ... ──▶ updates           as the user writes it
    grads ──▶ one AllReduce of all of them ──▶ updates        as it is compiled for ranks

Why all ranks reduce in the same order: of the AllReduces of a graph those of one level, between
which no path leads, become one node, and each level has an input that was computed from the level
before. So the nodes that are left form a chain, and no schedule can run them in another order.
"""

import contextlib
import contextvars

import numpy as np
from theano import gof
from theano.compile import mode as modes
from theano.gradient import DisconnectedType, grad_undefined
from theano.tensor import as_tensor_variable

# Set while a rank runs its part of a call. Elsewhere, as in a plain Theano function or another
# thread, there is nobody to reduce with.
_exchange = contextvars.ContextVar("synkhronos exchange", default=None)


@contextlib.contextmanager
def reducing(exchange, weights):
    """Have AllReduces reduce with ``exchange(arrays, ops, weights, targets)`` for a while."""
    failures = []

    def reduce(arrays, ops, targets):
        try:
            exchange(arrays, ops, weights, targets)
        except BaseException as error:
            failures.append(error)
            raise

    token = _exchange.set(reduce)
    try:
        yield
    except BaseException:
        if failures:  # Theano raises one of its own, without what an exception of ours carries
            raise failures[0] from None
        raise
    finally:
        _exchange.reset(token)


class AllReduce(gof.Op):
    """Reduces each input with those of the other ranks; outside of a call, the identity."""

    __props__ = ("ops", "inplace")

    def __init__(self, ops, inplace=False):
        self.ops, self.inplace = ops, inplace
        if inplace:
            self.destroy_map = {position: [position] for position in range(len(ops))}

    def make_node(self, *inputs):
        """Return the node; each output is of the type of its input."""
        inputs = [as_tensor_variable(x) for x in inputs]
        for x, op in zip(inputs, self.ops):
            if op == "avg" and np.dtype(x.dtype).kind not in "fc":
                raise TypeError(
                    f"all_reduce can't average {x}, of dtype {x.dtype}: the result would not be of "
                    "that type. Cast it, or use op='sum'."
                )
        return gof.Apply(self, inputs, [x.type() for x in inputs])

    def perform(self, node, inputs, output_storage):
        """Reduce with the other ranks."""
        targets = []
        for x, storage in zip(inputs, output_storage):
            if self.inplace:
                storage[0] = x
            elif storage[0] is None or storage[0].shape != x.shape:
                storage[0] = np.empty(x.shape, x.dtype)
            targets.append(storage[0])
        reduce = _exchange.get()
        if reduce is not None:
            reduce(inputs, self.ops, targets)
        elif not self.inplace:
            for x, target in zip(inputs, targets):
                target[...] = x

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
                results.append(AllReduce((op,))(g))
            else:
                results.append(grad_undefined(self, position, x, f"of an all_reduce with {op!r}"))
        return results

    def R_op(self, inputs, eval_points):
        """Return the all-reduced directional derivatives: sums and averages are linear."""
        if any(op not in ("avg", "sum") for op in self.ops):
            raise NotImplementedError(f"all_reduce with {self.ops} has no R operator.")
        return [
            None if point is None else AllReduce((op,))(point)
            for point, op in zip(eval_points, self.ops)
        ]


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
                ops = tuple(op for node in nodes for op in node.op.ops)
                outputs = [output for node in nodes for output in node.outputs]
                fused = AllReduce(ops)(*[x for node in nodes for x in node.inputs])
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
        return AllReduce(node.op.ops, inplace=True)(*node.inputs, return_list=True)
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


def mode_for(outputs, mode):
    """Return the mode to compile for ranks with: where something is all-reduced, one that fuses.

    Raises ``TypeError`` for an AllReduce inside a scan, which the chain could not hold.
    """
    if not _reduces(outputs):
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
    """Whether a compiled function reduces with other ranks while it runs."""
    return any(isinstance(node.op, AllReduce) for node in function.maker.fgraph.apply_nodes)
