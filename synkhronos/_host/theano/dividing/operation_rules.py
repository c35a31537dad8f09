"""Rules of operations that Theano alone has, of neural networks and of random numbers."""

import copy

import theano
from theano.compile.ops import Rebroadcast
from theano.sandbox.rng_mrg import MRG_RandomStreams, mrg_uniform, mrg_uniform_base
from theano.tensor import basic, blas, extra_ops, raw_random, subtensor
from theano.tensor.nnet import abstract_conv, blocksparse, bn, conv, neighbours, nnet
from theano.tensor.signal import pool
from theano.tensor.sort import TopKOp

from synkhronos._host.base.dividing import indices
from synkhronos._host.base.dividing.division import CannotDivide, Value, ending, rule
from synkhronos._host.base.dividing.elementwise import along_an_axis, argmax, as_it_is, dot
from synkhronos._host.base.dividing.relating import linear
from synkhronos._host.base.functions import copied, is_by, number
from synkhronos._host.base.kinds import PART, POSITIONS, ROWS, SAME, SHAPE, STREAM
from synkhronos._host.theano.library import equal_computations, io_toposort

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


rule(nnet.Softmax, nnet.LogSoftmax, nnet.SoftmaxGrad)(_by_row())
rule(nnet.CrossentropySoftmax1HotWithBiasDx, nnet.CrossentropyCategorical1Hot)(_by_row())
rule(nnet.CrossentropyCategorical1HotGrad)(_by_row())
rule(nnet.SoftmaxWithBias, nnet.CrossentropySoftmaxArgmax1HotWithBias)(_by_row(1))
rule(blocksparse.SparseBlockGemv)(_by_row(1))


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
            op = copy.copy(node.op)
            op.imshp = (None, *op.imshp[1:])  # it takes any number of images
            node = op.make_node(*node.inputs)
        if kind == PART:
            return division.apply(node, new, PART)
        return division.apply(node, new, ROWS, axis, exact)

    return of_images


linear(abstract_conv.AbstractConv, abstract_conv.AbstractConv_gradInputs)
linear(abstract_conv.AbstractConv_gradWeights, conv.ConvOp)
linear(nnet.SoftmaxGrad, nnet.CrossentropySoftmax1HotWithBiasDx, place=0)
linear(nnet.CrossentropyCategorical1HotGrad, place=0)
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


@rule(raw_random.RandomFunction, mrg_uniform_base)
def _random(division, node):
    state, shape, *parameters = node.inputs
    size = division.of(shape)
    values = [division.of(each) for each in parameters]
    if division.of(state).kind != STREAM:
        raise CannotDivide("draws random numbers from a state that is no shared variable")
    is_each_row = size.kind == SHAPE and _draws_each_alone(node)
    new, rows = [], []
    for each, value in zip(parameters, values):
        is_mine = value.kind == ROWS and is_each_row and value.axis == size.axis
        is_mine = is_mine and each.ndim >= node.outputs[1].ndim - node.op.ndim_added
        new.append(value.variable if is_mine else division.same(each))
        rows += [each] if is_mine else []
    if rows and not (size.exact and all(division.of(each).exact for each in rows)):
        division.keep_equal(rows, [shape[size.axis]])
    mine = size.variable if is_each_row else division.same(shape)
    stream, numbers = division.apply(node, [division.of(state).variable, mine, *new])
    of_rows = numbers._replace(kind=ROWS, axis=size.axis, exact=size.exact)
    return [stream._replace(kind=STREAM), of_rows if is_each_row else division.NOT_FOR_ROWS]


def _draws_each_alone(node):
    """Return whether it is known that no number depends on others, as without replacement."""
    function = getattr(node.op, "fn", "")
    if function is raw_random.choice_helper:
        return number(node.inputs[3]) == 1  # with replacement
    is_theanos = getattr(function, "__module__", "") == raw_random.__name__
    return is_theanos or isinstance(function, str)


@ending(basic.Reshape)
def _normal(node):
    """Find what ``MRG_RandomStreams.normal`` makes: uniform numbers, in pairs, to be reshaped."""
    numbers, size = node.inputs
    is_part = is_by(numbers, subtensor.Subtensor)
    if not is_part or not is_by(numbers.owner.inputs[0], basic.Join):
        return None
    draws = _draws(size, node)
    # Compare the nodes with those that Theano itself makes for this size.
    with theano.change_flags(compute_test_value="off"):
        for truncates in (False, True):
            expected = MRG_RandomStreams(1).normal(
                size, ndim=node.op.ndim, dtype=numbers.dtype, nstreams=1, truncate=truncates
            )
            [last] = [n for n in _nodes(size, expected) if n.op == node.op]
            theirs = _draws(size, last)
            pairs = zip(*([each.inputs[0] for each in nodes] for nodes in (draws, theirs)))
            if len(draws) == len(theirs) and equal_computations(
                node.outputs, last.outputs, *zip(*pairs, (size, size))
            ):
                others = [each for each in _nodes(size, node.outputs[0]) if each is not node]
                return others, lambda division: _normal_of_rows(division, node, draws)
    return None


def _nodes(size, result):
    """Return the nodes that compute random numbers from their size, in order."""
    return io_toposort([size], [result])


def _draws(size, node):
    return [n for n in _nodes(size, node.outputs[0]) if isinstance(n.op, mrg_uniform)]


def _normal_of_rows(division, node, draws):
    """Draw the numbers of a rank's rows; None if the size has no length of rows."""
    size = division.of(node.inputs[1])
    states = [division.of(each.inputs[0]) for each in draws]
    if size.kind != SHAPE or any(each.kind != STREAM for each in states):
        return None
    new = {node.inputs[1]: size.variable}
    new.update((each.inputs[0], state.variable) for each, state in zip(draws, states))
    wanted = [*node.outputs, *(each.outputs[0] for each in draws)]
    result, *after = copied(wanted, new)
    values = {each: Value(state, STREAM) for each, state in zip(wanted[1:], after)}
    values[wanted[0]] = Value(result, ROWS, size.axis, size.exact, times=size.times)
    return values
