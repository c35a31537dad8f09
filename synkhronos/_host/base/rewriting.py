"""Rewrites of the graphs of ranks that all-reduce, and the modes with them.

as it is written   Dot ──▶ an array ──▶ AllReduce ──▶ another ──▶ Elemwise
fused, in place    Dot ──▶ an array ──▶ AllReduce of all ──▶ Elemwise
"""

from synkhronos._host.base.graph import AllReduce
from synkhronos._host.base.library import (
    GraphRewriter,
    ReplaceValidate,
    RewriteDatabaseQuery,
    SequentialGraphRewriter,
    ancestors,
    in_place_rewriter,
    inner_outputs,
    register,
)


class Fuse(GraphRewriter):
    """Makes one node of all AllReduces that do not depend on one another."""

    def add_requirements(self, fgraph):
        fgraph.attach_feature(ReplaceValidate())

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
                fused = type(nodes[0].op)(ops, serials)(*[x for each in nodes for x in each.inputs])
                fgraph.replace_all_validate(
                    list(zip(outputs, fused)), reason="synkhronos_fuse_all_reduce"
                )


def _in_place(node):
    return None if node.op.inplace else type(node.op)(node.op.ops, node.op.serials, inplace=True)


def with_fused_reductions(mode, outputs):
    """Return a mode that fuses all-reduces, if any outputs or default updates have some.

    Raises ``TypeError`` for an AllReduce inside a scan: it can't be part of the chain.
    """
    return including(mode, "synkhronos", Fuse()) if _reduces(outputs) else mode


def including(mode, tag, rewriter):
    """Return a mode with the rewrites of a tag; one without tags gets a rewriter at its end."""
    if isinstance(mode.provided_optimizer, RewriteDatabaseQuery):
        return mode.including(tag)
    return mode.clone(optimizer=SequentialGraphRewriter([mode.optimizer, rewriter]))


def _reduces(outputs):
    found = False
    for variable in _ancestors(outputs):
        op = getattr(variable.owner, "op", None)
        found = found or isinstance(op, AllReduce)
        op = getattr(op, "core_op", op)
        # The graphs inside of a scan and of an OpFromGraph; the latter may become part of this one.
        if inner_outputs(op) and _reduces(inner_outputs(op)):
            if not getattr(op, "is_inline", False):
                raise TypeError(
                    f"ops.all_reduce is inside of {op}, where ranks can't be kept in step. Reduce "
                    "what it is given, or what it returns (an OpFromGraph may be inline=True)."
                )
            found = True
    return found


def _ancestors(outputs):
    """Return all variables that the outputs and default updates are computed from."""
    found = ancestors(outputs)
    default = [v.default_update for v in found if getattr(v, "default_update", None) is not None]
    return [*found, *ancestors(default)]


# Fused after the graph is simplified, so that no simplification can remove a dependence, and before
# elementwise expressions are fused, at 49. In place after elementwise operations, which may use the
# same buffers, at 75 in Theano and 50.5 in PyTensor.
register("synkhronos_fuse_all_reduce", Fuse(), 48.9, "synkhronos")
register(
    "synkhronos_all_reduce_in_place", in_place_rewriter(AllReduce, _in_place), 80, "synkhronos"
)
