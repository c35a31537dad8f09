"""All-reduce as an operation of a Theano graph.

    grads ──▶ AllReduce, AllReduce, ... ──▶ updates           as the user writes it
    grads ──▶ one AllReduce of all of them ──▶ updates        as it is compiled for ranks

All ranks must reduce in the same order. The AllReduces of one level, between which no path leads,
become one node, and each level has an input that was computed from the level before. So the nodes
form a chain, and no schedule can run them in another order. In a node the reductions have the order
in which they were made, also where ranks on other kinds of devices compile the graph for
themselves.
"""

import itertools

import numpy as np
from theano import gof
from theano.gradient import DisconnectedType, grad_undefined
from theano.tensor import TensorType, as_tensor_variable, dscalar
from theano.tensor.type import values_eq_approx_always_true

from synkhronos._host.base.calls import current_call, current_weight
from synkhronos._host.theano import devices

_serials = itertools.count()


class AllReduce(gof.Op):
    """Reduces each input over the ranks; outside of a call, the identity.

    Each reduction has a serial number, which identifies it on all ranks. Outputs that are `lent`
    stay in the memory where the ranks reduce them, valid until the next run: see `rewriting`.
    """

    __props__ = ("ops", "serials", "inplace", "lent")
    bucket = None  # its number, if the reduction was begun before: see `overlapping`

    def __init__(self, ops, serials, inplace=False, lent=()):
        self.ops, self.serials, self.inplace = ops, serials, inplace
        self.lent = lent or (False,) * len(ops)
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
        call = current_call()
        if call is None:
            for x, storage in zip(inputs, output_storage):
                storage[0] = x if self.inplace else x.copy()
            return
        targets = []
        for x, storage, lent in zip(inputs, output_storage, self.lent):
            if lent:
                target = None
            elif self.inplace:
                target = x
            else:
                kept = storage[0]
                fits = kept is not None and kept.shape == x.shape
                target = kept if fits else devices.empty_like(x)
            targets.append(target)
        results = call.reduce(inputs, self.ops, targets, self.bucket)
        for storage, result in zip(output_storage, results):
            storage[0] = result

    def do_constant_folding(self, node):
        """Return False: a reduction of constants is no constant, it depends on the ranks."""
        return False

    def infer_shape(self, node, shapes):
        """Return the shapes of the inputs."""
        return shapes

    def connection_pattern(self, node):
        """Return which input each output depends on: its own alone."""
        everything = range(len(node.inputs))
        return [[i == j for j in everything] for i in everything]

    def grad(self, inputs, gradients):
        """Return the all-reduced gradients: averaged for an average, summed for a sum."""
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


class RankOperation(gof.Op):
    """An operation whose result depends on the rank and the rows of all ranks."""

    def do_constant_folding(self, node):
        """Return False: it is no constant, although it may have no inputs."""
        return False


class RankWeight(RankOperation):
    """The weight of this rank, a number. The mean over the ranks is 1."""

    __props__ = ()

    def make_node(self):
        """Return the node."""
        return gof.Apply(self, [], [dscalar()])

    def perform(self, node, inputs, output_storage):
        """Store the weight in the running call; outside of a call, 1."""
        output_storage[0][0] = np.asarray(current_weight())

    def infer_shape(self, node, shapes):
        """Return an empty shape: it has no axes."""
        return [()]


def rank_weight():
    """Return a RankWeight's output."""
    return RankWeight()()


class Landing(gof.Op):
    """An array, of any contents, for a product of matrices, in shared memory if possible.

    `position` is the position of the product among the inputs of the AllReduce; `bucket` is the
    number of its bucket, if there are several.
    """

    __props__ = ("position", "bucket")

    def __init__(self, position, bucket=None):
        self.position, self.bucket = position, bucket

    def make_node(self, x, y):
        """Return the node, for the product of two matrices."""
        output = TensorType(x.dtype, (False, False))()
        # As in Theano's AllocEmpty: the contents are arbitrary, so Theano's checks skip them.
        output.tag.nan_guard_mode_check = False
        output.tag.values_eq_approx = values_eq_approx_always_true
        output.type.filter_checks_isfinite = False
        return gof.Apply(self, [x, y], [output])

    def perform(self, node, inputs, output_storage):
        """Store an array in the running call's shared memory; without one, a plain array."""
        x, y = inputs
        shape, call, place = (x.shape[0], y.shape[1]), current_call(), None
        if call is not None:
            place = call.landing_place(self.position, shape, x.dtype, self.bucket)
        output_storage[0][0] = np.empty(shape, x.dtype) if place is None else place

    def infer_shape(self, node, shapes):
        """Return the shape of the product."""
        return [(shapes[0][0], shapes[1][1])]


def _lives_on_device(x):
    return isinstance(x, gof.Variable) and devices.is_device_type(x.type)


def communicates(function) -> bool:
    """Return whether a compiled function reduces over the ranks, or uses the ranks' rows."""
    return any(
        isinstance(node.op, (AllReduce, RankOperation))
        for node in function.maker.fgraph.apply_nodes
    )
