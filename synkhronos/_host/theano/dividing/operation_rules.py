"""Rules of operations that Theano alone has, most of them of neural networks."""

import copy

from theano.compile.ops import Rebroadcast
from theano.tensor import basic, blas, extra_ops, subtensor
from theano.tensor.nnet import abstract_conv, blocksparse, bn, conv, neighbours, nnet
from theano.tensor.signal import pool
from theano.tensor.sort import TopKOp

from synkhronos._host.base.dividing import indices
from synkhronos._host.base.dividing.division import rule
from synkhronos._host.base.dividing.elementwise import along_an_axis, argmax, as_it_is, dot
from synkhronos._host.base.dividing.kinds import PART, POSITIONS, ROWS, SAME
from synkhronos._host.base.dividing.relating import linear
from synkhronos._host.base.functions import number

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


rule(
    nnet.Softmax,
    nnet.LogSoftmax,
    nnet.SoftmaxGrad,
    nnet.CrossentropySoftmax1HotWithBiasDx,
    nnet.CrossentropyCategorical1Hot,
    nnet.CrossentropyCategorical1HotGrad,
)(_by_row())
rule(nnet.SoftmaxWithBias, nnet.CrossentropySoftmaxArgmax1HotWithBias, blocksparse.SparseBlockGemv)(
    _by_row(1)
)


@rule(blocksparse.SparseBlockOuter)
def _sum_of_blocks(division, node):
    """Add products of all rows to zeros: the gradient of a SparseBlockGemv."""
    target, *_ = node.inputs
    if number(target) != 0 or division.of(target).kind != SAME or target.dtype == "float16":
        return division.unruled(node)
    [new] = _by_row(0)(division, node)
    return [new._replace(kind=PART) if new.kind == ROWS else new]


def _of_images(*positions, kind=ROWS):
    """Return a rule: inputs at `positions` are images in rows; `kind` PART is a sum over them."""

    def of_images(division, node):
        values = [division.of(node.inputs[position]) for position in positions]
        if all(value.kind != ROWS for value in values):
            return division.unruled(node)
        [axis, *others] = {value.axis for value in values}
        n_free = node.inputs[0].ndim - node.op.ndim if hasattr(node.op, "ndim") else 1
        if any(value.kind != ROWS for value in values) or others or axis >= n_free:
            division.refuse(node)
        new = [
            division.of(each).variable if position in positions else division.same(each)
            for position, each in enumerate(node.inputs)
        ]
        exact = any(value.exact for value in values)
        n_images = getattr(node.op, "imshp", None) and node.op.imshp[0]
        if n_images is not None:
            place = max(range(len(values)), key=lambda i: values[i].exact)
            images = node.inputs[positions[place]]
            division.require_images(int(number(n_images)), values[place], images)
            node = _without_batch_size(node)
        if kind == PART:
            return division.apply(node, new, PART)
        return division.apply(node, new, ROWS, axis, exact)

    return of_images


def _without_batch_size(node):
    """Return a node whose operation takes any number of images."""
    op = copy.copy(node.op)
    op.imshp = (None, *op.imshp[1:])
    return op.make_node(*node.inputs)


linear(
    abstract_conv.AbstractConv,
    abstract_conv.AbstractConv_gradInputs,
    abstract_conv.AbstractConv_gradWeights,
    conv.ConvOp,
)
linear(
    nnet.SoftmaxGrad,
    nnet.CrossentropySoftmax1HotWithBiasDx,
    nnet.CrossentropyCategorical1HotGrad,
    place=0,
)
linear(pool.AveragePoolGrad, place=1)
linear(pool.MaxPoolGrad, place=2)


rule(abstract_conv.AbstractConv, pool.Pool)(_of_images(0))
rule(abstract_conv.AbstractConv_gradInputs)(_of_images(1))
rule(abstract_conv.AbstractConv_gradWeights)(_of_images(0, 1, kind=PART))
# The inputs are images, the pooled images (not for averages), and gradients.
rule(pool.AveragePoolGrad)(_of_images(0, 1))
rule(pool.PoolGrad, pool.DownsampleFactorMaxGradGrad)(_of_images(0, 1, 2))


@rule(conv.ConvOp)
def _old_convolution(division, node):
    """Convolve each image alone, or add up over all images: the gradient of filters."""
    images, filters = map(division.of, node.inputs)
    kinds, op = (images.kind, filters.kind), node.op
    if ROWS not in kinds:
        return division.unruled(node)
    if kinds == (ROWS, ROWS) and images.axis == filters.axis == 1:
        division.keep_equal(node.inputs)
        n_images, changed = op.imshp[0], {"imshp": (None, *op.imshp[1:])}
        mine, kind = [images.variable, filters.variable], PART
    elif filters.kind != ROWS and images.axis == 0:
        n_images, changed = op.bsize, {"bsize": None}
        mine, kind = [images.variable, division.same(node.inputs[1])], ROWS
    else:
        division.refuse(node)
    if n_images is not None:
        if not images.exact or (op.imshp, op.kshp) != (op.imshp_logical, op.kshp_logical):
            division.refuse(node, f"rows, a fixed number of {n_images}")
        division.require(n_images)
        node = _convolution(op, changed).make_node(*node.inputs)
    return division.apply(node, mine, kind, 0, kind == ROWS and images.exact)


def _convolution(op, changed):
    """Return an old convolution with changed shapes, by which it chooses its algorithm."""
    shapes = {name: getattr(op, name) for name in ("imshp", "kshp", "nkern", "bsize")}
    shapes.update(changed)
    others = ("dx", "dy", "verbose", "version", "direction_hint", "openmp")
    others = {name: getattr(op, name) for name in others}
    return conv.ConvOp(output_mode=op.out_mode, **shapes, **others)


def _by_expression(rewriter):
    """Return a rule: divide the elementwise operations and sums by which Theano replaces it."""
    return lambda division, node: division.expand(node, rewriter.transform)


@rule(neighbours.Images2Neibs)
def _neighbours(division, node):
    """Cut each image into patches, which become rows one after another."""
    value = division.of(node.inputs[0])
    if value.kind != ROWS:
        return division.unruled(node)
    if value.axis != 0:
        division.refuse(node, "images whose rows don't lie along axis 0")
    rest = [division.same(each) for each in node.inputs[1:]]
    return division.apply(node, [value.variable, *rest], ROWS)


# These use means and variances of all rows.
rule(bn.AbstractBatchNormTrain)(_by_expression(bn.local_abstract_batch_norm_train))
rule(bn.AbstractBatchNormTrainGrad)(_by_expression(bn.local_abstract_batch_norm_train_grad))
rule(bn.AbstractBatchNormInference)(_by_expression(bn.local_abstract_batch_norm_inference))
