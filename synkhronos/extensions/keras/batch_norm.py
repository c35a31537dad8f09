"""Batch normalization over the rows of all ranks.

    x ──▶ mean ──▶ all_reduce ──▶ mean of (x - mean)² ──▶ all_reduce ──▶ normalized rows

The graph of a model exists before the model is parallel. Each batch normalization in it is one
operation of Theano, which uses the mean and variance of the rows that it is given. The graph is
built anew with the formula above in its place; gradients flow through the all_reduce.
"""

from synkhronos import ops
from synkhronos._host import Constant, SharedVariable, fix_axes, library
from synkhronos._host import tensor as T


class Synchronized:
    """Builds expressions of a model anew; with `is_on` false it returns them as they are."""

    def __init__(self, is_on=True):
        self._is_on = is_on
        self._new = {}  # variable -> the one in its place, often itself
        self._row_counts = {}  # input of a batch normalization -> its number of rows on all ranks
        self._statistics = {}  # mean, or inverse deviation, of some rows -> that of all rows

    def expression(self, variable):
        """Return an expression; its parts without a batch normalization are the same variables."""
        for node in library.gof.graph.io_toposort(self._new, [variable]):
            self._new.update(zip(node.outputs, self._outputs(node)))
        return self._new.get(variable, variable)

    def _outputs(self, node):
        inputs = [self._new.get(v, v) for v in node.inputs]
        if self._is_on and _normalizes_rows(node):
            outputs = _normalized(node, *inputs)
            self._row_counts[node.inputs[0]] = ops.all_reduce(inputs[0].shape[0], "sum")
            self._statistics.update(zip(node.outputs[1:], outputs[1:]))
            return outputs
        if all(new is old for new, old in zip(inputs, node.inputs)):
            return node.outputs
        return node.clone_with_new_inputs(inputs).outputs

    def running_average(self, value):
        """Return the new value of a running average, which is equal on all ranks.

        Returns None for a value that is computed from anything but constants, shared variables, and
        the mean, variance and number of rows of a batch normalization.
        """
        self.expression(value)  # finds its batch normalizations
        new, pending = dict(self._statistics), [value]
        while pending:
            last = pending[-1]
            node = last.owner
            if last in new:
                pending.pop()
            elif isinstance(last, (Constant, SharedVariable)):
                new[last] = last
            elif node is None:
                return None
            elif _is_shape_of(node, self._row_counts):
                # The length of axis 0 differs between ranks, the others are equal.
                count = self._row_counts[node.inputs[0]]
                own = self._new.get(node.inputs[0], node.inputs[0]).shape
                new[last] = T.set_subtensor(own[0], T.cast(count, own.dtype))
            else:
                lacking = [v for v in node.inputs if v not in new]
                pending += lacking
                if not lacking:
                    inputs = [new[v] for v in node.inputs]
                    new.update(zip(node.outputs, node.clone_with_new_inputs(inputs).outputs))
        return new[value] if self._statistics else None


def _normalizes_rows(node):
    batch_norm = T.nnet.bn.AbstractBatchNormTrain
    # With five outputs it has running averages of its own, which Keras does not use.
    return isinstance(node.op, batch_norm) and 0 in node.op.axes and len(node.outputs) == 3


def _is_shape_of(node, variables):
    return isinstance(node.op, library.compile.ops.Shape) and node.inputs[0] in variables


def _normalized(node, x, scale, bias, epsilon, *_):
    """Return the normalized rows, their mean and the inverse of their standard deviation."""
    axes = node.op.axes
    mean = ops.all_reduce(x.mean(axes, keepdims=True))
    # In a second step: the difference of E(x²) and E(x)² would lose digits in single precision.
    variance = ops.all_reduce(T.sqr(x - mean).mean(axes, keepdims=True))
    inverse = T.inv(T.sqrt(variance + epsilon))
    outputs = [(x - mean) * (scale * inverse) + bias, mean, inverse]
    return [fix_axes(T.cast(new, old.dtype), old) for new, old in zip(outputs, node.outputs)]
