"""Reductions that ranks of several machines begin while the function still computes.

    gradient of the last layer ──▶ Begin 0 ──────────────────────────▶ End 0 ──▶ update
    of the layer before        ──────────────▶ Begin 1 ──────────────▶ End 1 ──▶ update
    ...                                                 all that needs
    of the first layer         ──────────────▶ Begin n  no reduction   End n ──▶ update

The AllReduce of all gradients is divided into buckets of about 1 MB, in the order in which the
gradients can be computed. Theano's own order of nodes would compute many of them late, so
`_BucketsInOrder` gives the graph the order that the picture shows. The ranks run one compiled
graph, so they begin the buckets in the same order.

References
----------
Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020,
section 3.2: buckets of gradients, and their order.
"""

import numpy as np
from theano import gof
from theano.gof.type import generic

from synkhronos._host.base.calls import current_call
from synkhronos._host.base.rewriting import InOrder, Replacer, n_needed, only_reduction, owners
from synkhronos._host.theano.graph import TheanoAllReduce
from synkhronos._host.theano.lending import land, may_be_lent
from synkhronos._host.theano.library import Elemwise, IfElse, SharedVariable, TensorType, optdb

BUCKET_BYTES = 1 << 20
_UNKNOWN_BYTES = 1 << 20  # of a matrix whose size is not known before it is computed
_DEPTH = 4  # elementwise operations between a gradient and its parameter, at most


class Begin(gof.Op):
    """Begins to reduce a bucket of arrays, and passes them on to its End.

    The last input and output are no arrays. They tie each Begin to the one before it, so that no
    rewrite of the graph changes the order of the buckets.
    """

    __props__ = ("ops", "bucket")

    def __init__(self, ops, bucket):
        self.ops, self.bucket = ops, bucket
        # No other node may read the arrays from here on: they may be reduced where they are.
        self.destroy_map = {position: [position] for position in range(len(ops))}

    def make_node(self, *inputs):
        return gof.Apply(self, inputs, [x.type() for x in inputs])

    def perform(self, node, inputs, output_storage):
        call = current_call()
        if call is not None:
            call.begin(self.bucket, inputs[:-1], self.ops)
        for x, storage in zip(inputs, output_storage):
            storage[0] = x

    def infer_shape(self, node, shapes):
        return shapes


class End(TheanoAllReduce):
    """The AllReduce of a bucket that a Begin has begun."""

    __props__ = (*TheanoAllReduce.__props__, "bucket")

    def __init__(self, ops, serials, lent, bucket):
        super().__init__(ops, serials, inplace=True, lent=lent)
        self.bucket = bucket


class _Overlap(Replacer):
    """Divides the AllReduce of a function, if it is the only one, into buckets, while it is on."""

    is_on = False

    def apply(self, fgraph):
        if not self.is_on:
            return
        node = only_reduction(fgraph)
        # With an IfElse, Theano chooses the order of nodes while the function runs.
        is_lazy = any(isinstance(node.op, IfElse) for node in fgraph.apply_nodes)
        if node is None or is_lazy or any(type(x.type) is not TensorType for x in node.inputs):
            return
        buckets = _buckets(fgraph, node)
        if len(buckets) < 2:
            return
        op, pairs, tie = node.op, [], gof.Constant(generic, None)
        # The ranks of a machine share the array: an operation that overwrites it needs a copy.
        lent = [
            may_be_lent(output) and not fgraph.has_destroyers([output]) for output in node.outputs
        ]
        for number, bucket in enumerate(buckets):
            ops = tuple(op.ops[i] for i in bucket)
            arrays = [
                land(node.inputs[i], at, number) if lent[i] else node.inputs[i]
                for at, i in enumerate(bucket)
            ]
            *begun, tie = Begin(ops, number)(*arrays, tie, return_list=True)
            serials, are_lent = (tuple(each[i] for i in bucket) for each in (op.serials, lent))
            reduced = End(ops, serials, are_lent, number)(*begun, return_list=True)
            pairs += [(node.outputs[i], new) for i, new in zip(bucket, reduced)]
        try:
            fgraph.replace_all_validate(pairs, reason="synkhronos_overlap")
        except gof.InconsistencyError:
            return  # another node reads a gradient late: reduce all at once
        _BucketsInOrder().constrain(fgraph)


def _buckets(fgraph, node):
    """Return lists of positions among the inputs of an AllReduce, in the order of computation."""
    count = n_needed(fgraph.toposort(), owners)
    # Gradients that need fewer operations can be computed first: those of the last layers.
    buckets, room = [], 0
    needed = [count.get(x.owner, 0) for x in node.inputs]
    for position in sorted(range(len(needed)), key=needed.__getitem__):
        if room <= 0:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(position)
        room -= _expected_bytes(node.outputs[position])
    return buckets


def _expected_bytes(gradient):
    """Return the expected size of an array; it is known for certain only after the computation."""
    value = _like(gradient, _DEPTH)
    if value is not None:
        return value.size * np.dtype(gradient.dtype).itemsize
    return _UNKNOWN_BYTES if gradient.ndim > 1 else 0


def _like(variable, depth):
    """Return a shared variable's value that is combined with a variable element by element."""
    for client, _ in variable.clients if depth else ():
        if client == "output" or not isinstance(client.op, Elemwise):
            continue
        for other in client.inputs:
            if isinstance(other, SharedVariable) and other.type == variable.type:
                return other.container.data
        value = _like(client.outputs[0], depth - 1)
        if value is not None:
            return value
    return None


class _BucketsInOrder(InOrder):
    """Each Begin as early as possible, each End as late: the order of the picture."""

    def arranged(self, nodes, before):
        position = {node: number for number, node in enumerate(nodes)}
        ordered = {}  # as a set that keeps its order
        begins = [node for node in nodes if isinstance(node.op, Begin)]
        for begin in sorted(begins, key=lambda node: node.op.bucket):
            needed, left = {begin}, [begin]
            while left:
                new = [each for each in before(left.pop()) if each not in ordered]
                left += [each for each in new if each not in needed]
                needed.update(new)
            ordered.update(dict.fromkeys(sorted(needed, key=position.__getitem__)))
        ended = {}  # node -> the last bucket that it needs
        for node in nodes:
            ended[node] = max((ended[each] for each in before(node)), default=-1)
            if isinstance(node.op, End):
                ended[node] = max(ended[node], node.op.bucket)
        rest = [node for node in nodes if node not in ordered]
        ordered.update(dict.fromkeys(sorted(rest, key=ended.__getitem__)))
        return list(ordered)


def overlap_reductions(overlaps: bool) -> None:
    """Say whether functions that are compiled from now on begin reductions early."""
    _Overlap.is_on = overlaps


# This comes after all optimizations that work in place, and before `lending`.
optdb.register("synkhronos_overlap", _Overlap(), 199, "synkhronos")
