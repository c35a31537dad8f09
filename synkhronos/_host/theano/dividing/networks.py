"""Rules of operations of networks, which treat each row of axis 0 alone, and of random numbers.

Each rank draws the random numbers of its rows, from a stream of its own.
"""

import copy

from theano.sandbox.rng_mrg import mrg_uniform_base
from theano.tensor import raw_random
from theano.tensor.nnet import abstract_conv, nnet
from theano.tensor.signal import pool

from synkhronos._host.theano.dividing.division import (
    PART,
    ROWS,
    SHAPE,
    STREAM,
    UNKNOWN,
    CannotDivide,
    Value,
    rule,
)


def _by_row(*shared):
    """Return a rule: all inputs but those at the positions `shared` have rows along axis 0."""

    def by_row(division, node):
        values = [division.of(each) for each in node.inputs]
        if not any(value.kind == ROWS for value in values):
            return division.unruled(node)
        new = []
        for position, (each, value) in enumerate(zip(node.inputs, values)):
            if position in shared:
                new.append(division.same(each))
            elif value.kind == ROWS and value.axis == 0:
                new.append(value.variable)
            elif value.kind != ROWS and each.ndim == 0:
                new.append(division.same(each))
            else:
                division.refuse(node, f"rows and {each}")
        division.keep_equal(node.inputs)
        exact = any(value.exact for value in values)
        return division.apply(node, new, ROWS, 0, exact)

    return by_row


for _op in (nnet.Softmax, nnet.LogSoftmax, nnet.SoftmaxGrad):
    rule(_op)(_by_row())
for _op in (nnet.SoftmaxWithBias, nnet.CrossentropySoftmaxArgmax1HotWithBias):
    rule(_op)(_by_row(1))
for _op in (
    nnet.CrossentropySoftmax1HotWithBiasDx,
    nnet.CrossentropyCategorical1Hot,
    nnet.CrossentropyCategorical1HotGrad,
):
    rule(_op)(_by_row())


def _without_batch_size(node):
    """Return a node whose operation takes images in any number."""
    op = node.op
    if op.imshp is None or op.imshp[0] is None:
        return node
    op = copy.copy(op)
    op.imshp = (None, *op.imshp[1:])
    return op.make_node(*node.inputs)


@rule(abstract_conv.AbstractConv)
def _convolution(division, node):
    return _of_images(division, node, 0)


@rule(abstract_conv.AbstractConv_gradInputs)
def _gradient_of_images(division, node):
    return _of_images(division, node, 1)


def _of_images(division, node, position):
    """Apply an operation that treats each image of one input alone."""
    images = division.of(node.inputs[position])
    if images.kind != ROWS:
        return division.unruled(node)
    new = [
        images.variable if i == position else division.same(each)
        for i, each in enumerate(node.inputs)
    ]
    if images.axis:
        division.refuse(node)
    return division.apply(_without_batch_size(node), new, ROWS, 0, images.exact)


@rule(abstract_conv.AbstractConv_gradWeights)
def _gradient_of_filters(division, node):
    images, gradient = map(division.of, node.inputs[:2])
    if ROWS not in (images.kind, gradient.kind):
        return division.unruled(node)
    if (images.kind, gradient.kind, images.axis, gradient.axis) != (ROWS, ROWS, 0, 0):
        division.refuse(node)
    rest = [division.same(each) for each in node.inputs[2:]]
    return division.apply(
        _without_batch_size(node), [images.variable, gradient.variable, *rest], PART
    )


# The inputs with images come first: these, or one, their pooled images, and gradients.
_N_IMAGES = {pool.Pool: 1, pool.AveragePoolGrad: 2}


@rule(pool.Pool, pool.PoolGrad, pool.DownsampleFactorMaxGradGrad)
def _pool(division, node):
    n_images = _N_IMAGES.get(type(node.op), 3)
    images = [division.of(each) for each in node.inputs[:n_images]]
    if all(value.kind != ROWS for value in images):
        return division.unruled(node)
    axes = {value.axis for value in images}
    if any(value.kind != ROWS for value in images) or len(axes) > 1:
        division.refuse(node)
    [axis] = axes
    if axis >= node.inputs[0].ndim - node.op.ndim:
        division.refuse(node)
    rest = [division.same(each) for each in node.inputs[n_images:]]
    exact = any(value.exact for value in images)
    return division.apply(node, [*(v.variable for v in images), *rest], ROWS, axis, exact)


@rule(raw_random.RandomFunction, mrg_uniform_base)
def _random(division, node):
    state, shape, *parameters = node.inputs
    size = division.of(shape)
    values = [division.of(each) for each in parameters]
    if division.of(state).kind != STREAM:
        raise CannotDivide("draws random numbers from a state that is no shared variable")
    is_each_row = size.kind == SHAPE
    new = []
    for each, value in zip(parameters, values):
        is_mine = value.kind == ROWS and is_each_row and value.axis == size.axis
        is_mine = is_mine and each.ndim >= node.outputs[1].ndim - node.op.ndim_added
        new.append(value.variable if is_mine else division.same(each))
    inputs = [division.of(state).variable, size.variable, *new]
    if not is_each_row:
        inputs[1] = division.same(shape)
    stream, numbers = division.apply(node, inputs)
    numbers = (
        numbers._replace(kind=ROWS, axis=size.axis, exact=size.exact)
        if is_each_row
        else Value(None, UNKNOWN, reason="draws random numbers that are not for each row")
    )
    return [stream._replace(kind=STREAM), numbers]
