"""All-reduce as an operation of a graph.

    grads ──▶ AllReduce, AllReduce, ... ──▶ updates           as the user writes it
    grads ──▶ one AllReduce of all of them ──▶ updates        as it is compiled for ranks

All ranks must reduce in the same order. The AllReduces of one level, between which no path leads,
become one node, and each level has an input that was computed from the level before. So the nodes
form a chain, and no schedule can run them in another order. Within a node the reductions keep the
order in which they were made, even if ranks on other kinds of devices compile the graph themselves.

A scan whose steps reduce is a level of its own: `After` makes it wait for the level before, and the
next level wait for it. The AllReduces of a step form a chain, too. All ranks must go through
equally many steps.
"""

import itertools

import numpy as np

from synkhronos._arithmetic.operations import check_kind
from synkhronos._host.base import chosen_library as host
from synkhronos._host.base.calls import current_weight
from synkhronos._host.base.chosen_library import tensor
from synkhronos._host.base.functions import nodes_of

_serials = itertools.count()


class RankOperation(host.Operation):
    """An operation whose result depends on other ranks: their arrays, or their rows."""

    def do_constant_folding(self, *graph_and_node):
        """Return False: it is no constant, although it may have no inputs."""
        return False


class AllReduce(RankOperation):
    """Reduces each input over the ranks, in the subclasses; outside of a call, the identity."""

    name = "AllReduce"  # for messages
    __props__ = ("ops", "serials", "inplace")  # a serial number identifies a reduction on all ranks

    def __init__(self, ops, serials, inplace=False):
        self.ops, self.serials, self.inplace = ops, serials, inplace
        if inplace:
            self.destroy_map = {position: [position] for position in range(len(ops))}

    @classmethod
    def of(cls, x, op):
        """Return an AllReduce of one variable."""
        return cls((op,), (next(_serials),))(x)

    def as_input(self, x):
        return tensor.as_tensor_variable(x)

    def make_node(self, *inputs):
        inputs = [self.as_input(x) for x in inputs]
        for x, op in zip(inputs, self.ops):
            check_kind("all_reduce", op, x.dtype, str(x))
        return host.Apply(self, inputs, [x.type() for x in inputs])

    def __str__(self):
        return f"AllReduce{{{', '.join(self.ops)}}}"

    def infer_shape(self, node, shapes):
        return shapes

    def connection_pattern(self, node):
        """Return that each output depends on its own input alone."""
        everything = range(len(node.inputs))
        return [[i == j for j in everything] for i in everything]

    def pullback(self, inputs, outputs, cotangents):
        """Return the all-reduced gradients: averaged for an average, summed for a sum."""
        results = []
        for position, (x, g, op) in enumerate(zip(inputs, cotangents, self.ops)):
            if _is_disconnected(g):
                result = host.DisconnectedType()()
            elif op in ("avg", "sum"):
                result = self.of(g, op)
            else:
                result = host.grad_undefined(self, position, x, f"of an all_reduce with {op!r}")
            results.append(result)
        return results

    def pushforward(self, inputs, outputs, tangents):
        """Return the all-reduced directional derivatives: sums and averages are linear."""
        if any(op not in ("avg", "sum") for op in self.ops):
            raise NotImplementedError(f"all_reduce with {self.ops} has no directional derivative.")
        pairs = zip(tangents, self.ops)
        return [x if _is_disconnected(x) else self.of(x, op) for x, op in pairs]


def _is_disconnected(derivative):
    """Return whether a derivative is 0 because nothing is connected."""
    return derivative is None or isinstance(derivative.type, host.DisconnectedType)


class After(RankOperation):
    """Passes its first input on, when the others have been computed."""

    __props__ = ()

    def __init__(self):
        self.view_map = {0: [0]}  # output -> inputs

    def make_node(self, x, *others):
        return host.Apply(self, [x, *others], [x.type()])

    def perform(self, node, inputs, output_storage):
        output_storage[0][0] = inputs[0]

    def infer_shape(self, node, shapes):
        return shapes[:1]


class RankNumbers(RankOperation):
    """An operation that computes numbers of this rank or of all, which have no gradients."""

    __props__ = ()

    def infer_shape(self, node, shapes):
        """Return empty shapes: numbers have no axes."""
        return [()] * len(node.outputs)

    def connection_pattern(self, node):
        """Return that no output has a gradient with respect to an input."""
        return [[False] * len(node.outputs) for _ in node.inputs]


class RankWeight(RankNumbers):
    """The weight of this rank in the running call, with a mean of 1 over the ranks; outside, 1."""

    def make_node(self):
        return host.Apply(self, [], [tensor.dscalar()])

    def perform(self, node, inputs, output_storage):
        output_storage[0][0] = np.asarray(current_weight())


def has_inside(op, *kinds) -> bool:
    """Return whether a scan or an OpFromGraph has an operation of some kinds in its graph."""
    return any(is_or_has(node, kinds) for node in nodes_of(host.inner_outputs(op)))


def communicates(function) -> bool:
    """Return whether a compiled function reduces over the ranks, or uses the ranks' rows."""
    return any(is_or_has(node, (RankOperation,)) for node in function.maker.fgraph.apply_nodes)


def is_or_has(node, kinds):
    """Return whether a node has an operation of some kinds, or has one inside."""
    return isinstance(node.op, kinds) or has_inside(node.op, *kinds)
