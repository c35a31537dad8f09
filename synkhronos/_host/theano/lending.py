"""Reductions in shared memory: results that are lent, and products that land there.

    fused, in place    Dot22 ──▶ an array ──▶ AllReduce of all  ──▶ Elemwise
                                     └─copy─▶ shared memory ─copy─┘
    lent               Landing, Gemm ──▶ shared memory, reduced ──▶ Elemwise

A product of matrices, such as the gradient of a dense layer, can be computed in shared memory: it
lands there. A result that is lent stays in the memory where it was reduced. It is valid until the
next run, so it must not become an output, a new value of a shared variable, or a view of one, which
outlive a run. Both are done only in functions with one AllReduce: then the next reduction is that
of the same node.
"""

import numpy as np
from theano import gof
from theano.compile.mode import optdb
from theano.tensor import TensorType, blas, constant
from theano.tensor.type import values_eq_approx_always_true

from synkhronos._host.base.calls import current_call
from synkhronos._host.base.rewriting import Replacer, only_reduction
from synkhronos._host.theano.graph import TheanoAllReduce


class Landing(gof.Op):
    """An array, of any contents, for a product of matrices, in shared memory if possible."""

    __props__ = ("position", "bucket")  # among the inputs of the AllReduce; of several buckets

    def __init__(self, position, bucket=None):
        self.position, self.bucket = position, bucket

    def make_node(self, x, y):
        output = TensorType(x.dtype, (False, False))()
        # As in Theano's AllocEmpty, Theano's checks must skip the arbitrary contents.
        output.tag.nan_guard_mode_check = False
        output.tag.values_eq_approx = values_eq_approx_always_true
        output.type.filter_checks_isfinite = False
        return gof.Apply(self, [x, y], [output])

    def perform(self, node, inputs, output_storage):
        x, y = inputs
        shape, call, place = (x.shape[0], y.shape[1]), current_call(), None
        if call is not None:
            place = call.landing_place(self.position, shape, x.dtype, self.bucket)
        output_storage[0][0] = np.empty(shape, x.dtype) if place is None else place

    def infer_shape(self, node, shapes):
        return [(shapes[0][0], shapes[1][1])]


class _Lend(Replacer):
    """Lends the outputs that may be lent, and lets products land in the same memory."""

    def apply(self, fgraph):
        node = only_reduction(fgraph)
        if node is None or node.op.bucket is not None:
            return
        op, inputs, outputs = node.op, node.inputs, node.outputs
        lent = tuple(may_be_lent(output) for output in outputs)
        if not any(lent):
            return
        landing = [land(x, i) if lent[i] else x for i, x in enumerate(inputs)]
        lender = TheanoAllReduce(op.ops, op.serials, inplace=True, lent=lent)
        pairs = list(zip(outputs, lender(*landing, return_list=True)))
        fgraph.replace_all_validate(pairs, reason="synkhronos_lend")


def may_be_lent(variable):
    """Return whether an output of an AllReduce may stay where it is reduced."""
    # Half precision is reduced in single precision, and so in other memory.
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


# This comes after all optimizations that work in place. `overlapping` does its own lending.
optdb.register("synkhronos_lend", _Lend(), 200, "synkhronos")
