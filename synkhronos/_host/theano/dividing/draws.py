"""Rules of random numbers: each rank draws those of its rows, from a stream of its own."""

import theano
from theano.gof.graph import io_toposort
from theano.sandbox.rng_mrg import MRG_RandomStreams, mrg_uniform, mrg_uniform_base
from theano.scan_module.scan_utils import equal_computations
from theano.tensor import basic, raw_random
from theano.tensor.subtensor import Subtensor

from synkhronos._host.base.dividing.division import (
    NOT_FOR_ROWS,
    CannotDivide,
    Value,
    copied,
    ending,
    rule,
)
from synkhronos._host.base.dividing.kinds import ROWS, SHAPE, STREAM
from synkhronos._host.base.functions import number


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
    inputs = [division.of(state).variable, size.variable, *new]
    if not is_each_row:
        inputs[1] = division.same(shape)
    stream, numbers = division.apply(node, inputs)
    if not is_each_row:
        return [stream._replace(kind=STREAM), NOT_FOR_ROWS]
    return [
        stream._replace(kind=STREAM),
        numbers._replace(kind=ROWS, axis=size.axis, exact=size.exact),
    ]


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
    joined = numbers.owner and isinstance(numbers.owner.op, Subtensor) and numbers.owner.inputs[0]
    if not joined or not isinstance(joined.owner and joined.owner.op, basic.Join):
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
