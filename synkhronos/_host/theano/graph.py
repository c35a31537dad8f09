"""All-reduce as an operation of a Theano graph, also of arrays on devices and in shared memory."""

import numpy as np
from theano import gof
from theano.tensor import TensorType
from theano.tensor.type import values_eq_approx_always_true

from synkhronos._host.base import graph
from synkhronos._host.base.calls import current_call
from synkhronos._host.theano import devices


class AllReduce(graph.AllReduce):
    """Reduces each input over the ranks; outside of a call, the identity.

    Outputs that are `lent` stay in the memory where the ranks reduce them, valid until the next
    run: see `rewriting`.
    """

    __props__ = (*graph.AllReduce.__props__, "lent")
    bucket = None  # its number, if the reduction was begun before: see `overlapping`

    def __init__(self, ops, serials, inplace=False, lent=()):
        super().__init__(ops, serials, inplace)
        self.lent = lent or (False,) * len(ops)

    def as_input(self, x):
        """Return an input as a variable, one on a device as it is."""
        is_on_device = isinstance(x, gof.Variable) and devices.is_device_type(x.type)
        return x if is_on_device else super().as_input(x)

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


all_reduce = AllReduce.of


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
