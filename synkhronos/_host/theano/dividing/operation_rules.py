"""Rules of operations that Theano alone has."""

from theano.compile.ops import Rebroadcast
from theano.tensor import basic, blas, extra_ops, subtensor
from theano.tensor.sort import TopKOp

from synkhronos._host.base.dividing import indices
from synkhronos._host.base.dividing.division import POSITIONS, ROWS, rule
from synkhronos._host.base.dividing.elementwise import along_an_axis, argmax, as_it_is, dot
from synkhronos._host.base.dividing.relating import linear

rule(extra_ops.DiffOp, TopKOp)(along_an_axis)
rule(basic.MaxAndArgmax)(argmax)
rule(blas.BatchedDot)(lambda division, node: dot(division, node, n_batch=1))
rule(basic.Mean)(lambda division, node: division.unruled(node))
rule(basic.Nonzero)(indices.nonzero)
rule(subtensor.AdvancedSubtensor1)(indices.take)
rule(subtensor.AdvancedSubtensor)(indices.take_items)
rule(subtensor.AdvancedIncSubtensor1, subtensor.AdvancedIncSubtensor)(indices.add_to_items)
linear(blas.BatchedDot)
linear(subtensor.AdvancedSubtensor1, subtensor.AdvancedSubtensor, joint=(0,))
linear(subtensor.AdvancedIncSubtensor1, subtensor.AdvancedIncSubtensor, joint=(0, 1))


@rule(Rebroadcast)
def _rebroadcast(division, node):
    value = division.of(node.inputs[0])
    if node.op.axis.get(value.axis) and value.kind in (POSITIONS, ROWS):
        division.refuse(node)
    return as_it_is(division, node)
