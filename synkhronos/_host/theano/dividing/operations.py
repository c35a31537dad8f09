"""Rules of operations that Theano alone has."""

import theano
from theano.compile.ops import Rebroadcast
from theano.gof import Constant, Variable
from theano.gof.graph import io_toposort
from theano.scan_module.scan_utils import equal_computations
from theano.tensor import basic, blas, extra_ops, subtensor
from theano.tensor.sort import ArgSortOp, SortOp, TopKOp

from synkhronos._host.base.dividing import indices
from synkhronos._host.base.dividing.division import ROWS, Value, copied, ending, rule
from synkhronos._host.base.dividing.elementwise import along_an_axis, argmax, as_it_is, dot

rule(extra_ops.DiffOp, TopKOp)(along_an_axis)
rule(basic.MaxAndArgmax)(argmax)
rule(blas.BatchedDot)(lambda division, node: dot(division, node, n_batch=1))
rule(basic.Mean)(lambda division, node: division.unruled(node))
rule(subtensor.AdvancedSubtensor1)(indices.take)
rule(subtensor.AdvancedSubtensor)(indices.take_items)
rule(subtensor.AdvancedIncSubtensor1, subtensor.AdvancedIncSubtensor)(indices.add_to_items)


@rule(Rebroadcast)
def _rebroadcast(division, node):
    value = division.of(node.inputs[0])
    if node.op.axis.get(value.axis) and value.kind == ROWS:
        division.refuse(node)
    return as_it_is(division, node)


@ending(subtensor.AdvancedSubtensor)
def _gradient_of_sort(node):
    """Find the gradient of a sort: what was sorted by numbers is put back where it was."""
    gradient, *indices = node.inputs
    if len(indices) != gradient.ndim or not all(isinstance(each, Variable) for each in indices):
        return None
    sorts = [n for n in io_toposort([gradient], indices) if isinstance(n.op, ArgSortOp)]
    first = [n.inputs[0].owner for n in sorts if n.inputs[0].owner in sorts]
    if not first:
        return None
    (array, axis), op = first[-1].inputs, first[-1].op
    given = [array, gradient]
    if not isinstance(axis, Constant) or array.ndim != gradient.ndim:
        return None
    # The same by Theano itself.
    with theano.change_flags(compute_test_value="off"):
        expected, _ = SortOp(op.kind, op.order).grad([array, axis], [gradient])
    if not equal_computations(node.outputs, [expected], given, given):
        return None
    others = [each for each in io_toposort(given, node.outputs) if each is not node]
    return others, lambda division: _sort_back(division, node, given, int(axis.data))


def _sort_back(division, node, given, axis):
    """Sort rows back by their own numbers; None where they are sorted along their axis."""
    values = [division.of(each) for each in given]
    axes = {value.axis if value.kind == ROWS else None for value in values}
    if len(axes) > 1 or axes & {None, axis % node.outputs[0].ndim}:
        return None
    division.keep_equal(given)
    [new] = copied(node.outputs, {each: v.variable for each, v in zip(given, values)})
    exact, times = any(value.exact for value in values), division.times_of(node, given)
    return {node.outputs[0]: Value(new, ROWS, *axes, exact, times=times)}
