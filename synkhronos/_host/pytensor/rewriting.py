"""Rewrites of the graphs of ranks, for all-reduces, and operations for numba.

    as it is written   Dot ──▶ an array ──▶ AllReduce ──▶ another ──▶ Elemwise
    fused, in place    Dot ──▶ an array ──▶ AllReduce of all ──▶ Elemwise
    in numba's code    Dot ──▶ an array ──▶ a call of Python that reduces it ──▶ Elemwise

Numba leaves PyTensor's rewrites for BLAS out, so no product is computed in shared memory.
"""

import importlib

from pytensor.compile.builders import OpFromGraph
from pytensor.compile.mode import get_mode, optdb
from pytensor.graph.features import ReplaceValidate
from pytensor.graph.op import HasInnerGraph
from pytensor.graph.rewriting.basic import (
    GraphRewriter,
    NodeProcessingGraphRewriter,
    SequentialGraphRewriter,
    WalkingGraphRewriter,
    node_rewriter,
)
from pytensor.graph.rewriting.db import RewriteDatabaseQuery
from pytensor.graph.traversal import ancestors

from synkhronos._host.pytensor.graph import AllReduce, RankOperation
from synkhronos._host.pytensor.rows import Rows
from synkhronos._host.pytensor.storing import Await, Push


class _Fuse(GraphRewriter):
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
                fused = AllReduce(ops, serials)(*[x for node in nodes for x in node.inputs])
                fgraph.replace_all_validate(
                    list(zip(outputs, fused)), reason="synkhronos_fuse_all_reduce"
                )


@node_rewriter([AllReduce])
def _in_place(fgraph, node):
    # Only in graphs in which PyTensor tracks the operations that destroy their inputs.
    if not node.op.inplace and hasattr(fgraph, "destroyers"):
        in_place = type(node.op)(node.op.ops, node.op.serials, inplace=True)
        return in_place(*node.inputs, return_list=True)
    return False


@node_rewriter([AllReduce, RankOperation, Rows, Push, Await])
def _for_numba(fgraph, node):
    # Imported here: that imports numba, which takes a second, and a C mode needs no numba.
    numba_operations = importlib.import_module("synkhronos._host.pytensor.numba_operations")
    op = numba_operations.for_numba(node.op)
    return False if op is None else op(*node.inputs, return_list=True)


# Fused after the graph is simplified, so that no simplification can remove a dependence, and before
# elementwise expressions are fused, at 49. In place after elementwise operations, which may use the
# same buffers, at 50.5.
optdb.register("synkhronos_fuse_all_reduce", _Fuse(), "synkhronos", position=48.9)
optdb.register(
    "synkhronos_all_reduce_in_place",
    WalkingGraphRewriter(
        _in_place,
        order="in_to_out",
        failure_callback=NodeProcessingGraphRewriter.warn_inplace,
    ),
    "synkhronos",
    position=80,
)
# In all functions that numba compiles, also those of users.
optdb.register(
    "synkhronos_numba",
    WalkingGraphRewriter(_for_numba, order="in_to_out"),
    "numba",
    position=90,
)


def mode_for(outputs, mode):
    """Return the mode to compile for ranks with: it fuses all-reduces if there are any.

    Raises ``TypeError`` for an AllReduce inside a scan: it can't be part of the chain.
    """
    mode = get_mode(mode)
    if not _reduces(outputs):
        return mode
    if isinstance(mode.provided_optimizer, RewriteDatabaseQuery):
        return mode.including("synkhronos")
    return mode.clone(optimizer=SequentialGraphRewriter([mode.optimizer, _Fuse()]))


def _reduces(outputs):
    found = False
    for variable in _ancestors(outputs):
        op = getattr(variable.owner, "op", None)
        found = found or isinstance(op, AllReduce)
        op = getattr(op, "core_op", op)
        # The graphs inside of a scan and of an OpFromGraph; the latter may become part of this one.
        if isinstance(op, HasInnerGraph) and _reduces(op.inner_outputs):
            if not (isinstance(op, OpFromGraph) and op.is_inline):
                raise TypeError(
                    f"ops.all_reduce is inside of {op}, where ranks can't be kept in step. Reduce "
                    "what it is given, or what it returns (an OpFromGraph may be inline=True)."
                )
            found = True
    return found


def _ancestors(outputs):
    """Return all variables that the outputs and default updates are computed from."""
    found = list(ancestors(outputs))
    default = [getattr(variable, "default_update", None) for variable in found]
    return [*found, *ancestors([update for update in default if update is not None])]
