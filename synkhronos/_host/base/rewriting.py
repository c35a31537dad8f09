"""Rewrites of the graphs of ranks that all-reduce, modes with them, and orders of nodes.

as it is written   Dot ──▶ an array ──▶ AllReduce ──▶ another ──▶ Elemwise
fused, in place    Dot ──▶ an array ──▶ AllReduce of all ──▶ Elemwise
"""

import collections

from synkhronos._host.base import chosen_library as host
from synkhronos._host.base.chosen_library import ancestors, inner_outputs
from synkhronos._host.base.functions import nodes_of
from synkhronos._host.base.rank_operations import After, AllReduce, has_inside

IN_STEPS = "synkhronos_in_steps"  # the tag of rewrites for the graph of a scan's step, too


class Replacer(host.GraphRewriter):
    """A rewriter of whole graphs, which replaces variables as far as the graphs stay valid."""

    def add_requirements(self, fgraph):
        fgraph.attach_feature(host.ReplaceValidate())


class Fuse(Replacer):
    """Makes one node of all AllReduces that do not depend on one another, and puts all in order."""

    def apply(self, fgraph):
        depths, levels, loops = {}, {}, {}
        for node in fgraph.toposort():
            depth = max((depths.get(x, 0) for x in node.inputs), default=0)
            is_loop = reduces_in_steps(node.op)
            if is_loop or isinstance(node.op, AllReduce):
                (loops if is_loop else levels).setdefault(depth, []).append(node)
                depth += 1
            depths.update(dict.fromkeys(node.outputs, depth))
        for depth, nodes in levels.items():
            if len(nodes) > 1:
                nodes = sorted(nodes, key=lambda node: node.op.serials)
                ops = tuple(op for node in nodes for op in node.op.ops)
                serials = tuple(serial for node in nodes for serial in node.op.serials)
                outputs = [output for node in nodes for output in node.outputs]
                fused = type(nodes[0].op)(ops, serials)(*[x for each in nodes for x in each.inputs])
                pairs = list(zip(outputs, fused))
                fgraph.replace_all_validate(pairs, reason="synkhronos_fuse_all_reduce")
                levels[depth] = [fused[0].owner]
        if loops:
            _put_in_order(fgraph, levels, loops)


def _put_in_order(fgraph, levels, loops):
    """Let each node that reduces, loops among them, wait for the one before."""
    in_order = []
    for depth in sorted({*levels, *loops}):
        of_depth = loops.get(depth, ())
        in_order += levels.get(depth, [])
        in_order += sorted(of_depth, key=lambda node: min(_serials_of(inner_outputs(node.op))))
    for before, node in zip(in_order, in_order[1:]):
        waiting = After()(node.inputs[0], before.outputs[0])
        fgraph.change_input(node, 0, waiting, reason="synkhronos_in_order")


def reduces_in_steps(op):
    """Return whether an operation is a scan with an AllReduce in its step."""
    return isinstance(op, host.Scan) and has_inside(op, AllReduce)


def only_reduction(fgraph):
    """Return the node of an AllReduce in place, if ranks reduce in no other node; else None."""
    nodes = [n for n in fgraph.apply_nodes if isinstance(n.op, AllReduce) or reduces_in_steps(n.op)]
    is_one = len(nodes) == 1 and getattr(nodes[0].op, "inplace", False)
    return nodes[0] if is_one else None


def _serials_of(outputs):
    for node in nodes_of(outputs):
        yield from getattr(node.op, "serials", ())
        yield from _serials_of(inner_outputs(node.op))


def _in_place(node):
    return None if node.op.inplace else type(node.op)(node.op.ops, node.op.serials, inplace=True)


def with_fused_reductions(mode, outputs):
    """Return a mode that fuses all-reduces, if any outputs or default updates have some."""
    return including(mode, "synkhronos", Fuse()) if _reduces(outputs) else mode


def including(mode, tag, rewriter):
    """Return a mode with the rewrites of a tag; one without tags gets a rewriter at its end."""
    if isinstance(mode.provided_optimizer, host.RewriteDatabaseQuery):
        return mode.including(tag)
    return mode.clone(optimizer=host.SequentialGraphRewriter([mode.optimizer, rewriter]))


def _reduces(outputs):
    """Return whether ranks reduce, but not where they may go through different numbers of steps."""
    defaults = [getattr(each, "default_update", None) for each in ancestors(outputs)]
    reduces = False
    for node in nodes_of([*outputs, *(each for each in defaults if each is not None)]):
        reduces = reduces or isinstance(node.op, AllReduce)
        op = getattr(node.op, "core_op", node.op)
        # The graph inside of a scan or an OpFromGraph, which may become part of this one.
        if inner_outputs(op) and _reduces(inner_outputs(op)):
            if not (getattr(op, "is_inline", False) or getattr(op, "reduces_in_steps", False)):
                raise TypeError(
                    f"ops.all_reduce is inside of {op}, where ranks can't be kept in step. Reduce "
                    "what it is given, or what it returns (an OpFromGraph may be inline=True)."
                )
            reduces = True
    return reduces


def n_needed(nodes, before):
    """Return for each node how many it needs with itself; ``before(node)`` are needed directly."""
    needed = {}
    for number, node in enumerate(nodes):
        needed[node] = 1 << number  # the bits of all nodes that it needs
        for each in before(node):
            needed[node] |= needed[each]
    return {node: bin(bits).count("1") for node, bits in needed.items()}


def owners(node):
    """Return the nodes that compute the inputs of a node."""
    return [x.owner for x in node.inputs if x.owner is not None]


class InOrder(host.Feature):
    """A constraint on a graph: its nodes come in the order that `arranged` returns."""

    def constrain(self, fgraph) -> None:
        """Add the constraint, unless it contradicts others."""
        fgraph.attach_feature(self)
        try:
            fgraph.toposort()
        except ValueError:
            fgraph.remove_feature(self)

    def arranged(self, nodes, before):
        """Return the nodes, each after those that it needs, which ``before(node)`` returns."""
        raise NotImplementedError

    def orderings(self, fgraph):
        """Return, for each node, the node before it."""
        others = collections.defaultdict(list)
        for feature in fgraph._features:
            if feature is not self and hasattr(feature, "orderings"):
                for node, before in (feature.orderings(fgraph) or {}).items():
                    others[node] += before
        nodes = host.sorted_nodes(fgraph, dict(others))

        def before(node):
            return owners(node) + others.get(node, [])

        chain = self.arranged(nodes, before)
        return collections.OrderedDict(
            (node, [previous]) for previous, node in zip(chain, chain[1:])
        )


# AllReduces are fused after the graph is simplified, so that no simplification can remove a
# dependence, and before elementwise expressions are fused, at 49. They work in place after
# elementwise operations do, which may use the same buffers (at 75 in Theano, 50.5 in PyTensor).
_TAGS = "synkhronos", IN_STEPS
host.register("synkhronos_fuse_all_reduce", Fuse(), 48.9, *_TAGS)
_rewriter = host.in_place_rewriter(AllReduce, _in_place)
host.register("synkhronos_all_reduce_in_place", _rewriter, 80, *_TAGS)
