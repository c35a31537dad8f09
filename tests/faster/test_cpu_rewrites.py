"""The rewrites of functions for CPU ranks: the results of Theano, bit for bit."""

import itertools
import pickle

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.layouts import Layout
from theano.tensor.nnet import conv2d
from theano.tensor.nnet.abstract_conv import get_conv_output_shape
from theano.tensor.nnet.bn import batch_normalization_train
from theano.tensor.shared_randomstreams import RandomStreams
from theano.tensor.signal.pool import pool_2d

import synkhronos as synk
from synkhronos._host.theano import compiling
from synkhronos._host.theano.faster.convolutions import (
    RowwiseCorrMM,
    RowwiseCorrMMGradInputs,
    RowwiseCorrMMGradWeights,
)
from synkhronos._host.theano.faster.pooling import ContiguousMaxPool, ContiguousMaxPoolGrad
from synkhronos._host.theano.faster.sums import InterleavedSum
from synkhronos._host.theano.faster.switch import CPU

LAYOUTS = [Layout(2, 0)]
FAST_RUN = theano.Mode("cvm", "fast_run")


def compiled(inputs, outputs, *excluding):
    """Compile as ranks do, and check that pickles of the function are functions."""
    mode = compiling.mode_for(outputs, FAST_RUN).excluding(*excluding)
    return pickle.loads(pickle.dumps(theano.function(inputs, outputs, mode=mode)))


def plain(inputs, outputs):
    return theano.function(inputs, outputs, mode=FAST_RUN)


def operations(function):
    return [type(node.op) for node in function.maker.fgraph.apply_nodes]


def same_bits(found, expected):
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    assert [x.shape for x in found] == [x.shape for x in expected]
    for x, y in zip(found, expected):
        # Zeros have signs.
        assert np.array_equal(x, y, equal_nan=True) and np.array_equal(np.signbit(x), np.signbit(y))


def some(random, *shape, dtype="float32"):
    """Return numbers of many magnitudes, so that the order of additions shows."""
    return (random.randn(*shape) * 10.0 ** random.randint(-4, 5, shape)).astype(dtype)


def layouts_of(x):
    """Return arrays with these values: contiguous, in Fortran's order, a view, read backwards."""
    view = np.zeros((*x.shape[:-1], 2 * x.shape[-1] + 1), x.dtype)[..., 1::2]
    view[...] = x
    yield from (x, np.asfortranarray(x), view, x[::-1].copy()[::-1])


def in_order(x, axes):
    """Add in the order of memory, one number after the other, in double precision."""
    kept = [axis for axis in range(x.ndim) if axis not in axes]
    rows = x.transpose([*axes, *kept])
    total = np.zeros([x.shape[axis] for axis in kept])
    for at in np.ndindex(*rows.shape[: len(axes)]):
        total = total + rows[at]
    return total.astype(x.dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("ndim, axes", [(2, (0,)), (2, (1,)), (4, (0, 2, 3)), (3, (0,))])
@pytest.mark.sample(1)
def test_sums_add_in_the_order_of_theano(ndim, axes, dtype):
    x = T.TensorType(dtype, (False,) * ndim)("x")
    f = compiled([x], [x.sum(axes)])
    assert operations(f) == [InterleavedSum]
    random = np.random.RandomState(1)
    shapes = [(0, 3, 2, 2), (1, 1, 1, 1), (3, 0, 2, 2), (5, 17, 3, 4), (4, 8, 5, 1), (9, 530, 2, 3)]
    for shape in shapes:
        value = some(random, *shape[:ndim], dtype=dtype)
        for x_value in [value, -0.0 * value, *layouts_of(value)]:
            same_bits(f(x_value), [in_order(x_value, axes)])
    value[0] = np.nan
    same_bits(f(value), [in_order(value, axes)])


def test_sums_that_leave_axes_apart_and_sums_of_integers_stay_as_they_are():
    x, i = T.ftensor3("x"), T.imatrix("i")
    outputs = [x.sum(1), x.sum(), i.sum(0), x.astype("float16").sum(0)]
    assert InterleavedSum not in rewritten([x, i], outputs, FAST_RUN)


def max_pool(x, window, stride, pad, ignore_border):
    """Return the pooled images, and a function that computes the gradient: Theano's loops."""
    axes = list(zip(x.shape[-2:], window, stride, pad))
    counts = []
    for length, size, step, border in axes:
        padded = length + 2 * border
        if ignore_border:
            counts.append(max(0, (padded - size) // step + 1))
        elif step >= size:
            counts.append((padded - 1) // step + 1)
        else:
            counts.append(max(0, (padded - 1 - size + step) // step) + 1)
    z = np.zeros((*x.shape[:-2], *counts), x.dtype)
    regions = {}
    for at in itertools.product(*map(range, counts)):
        regions[at] = tuple(
            slice(max(0, n * step - border), min(length, n * step - border + size))
            for n, (length, size, step, border) in zip(at, axes)
        )
    for image in np.ndindex(*x.shape[:-2]):
        for at, region in regions.items():
            pixels = x[image][region].ravel()
            highest = pixels[0]
            for pixel in pixels:
                highest = pixel if pixel > highest else highest
            z[(*image, *at)] = highest

    def gradient(gz):
        gx = np.zeros_like(x)
        for image in np.ndindex(*x.shape[:-2]):
            for at, region in regions.items():
                part = gx[image][region]
                part[x[image][region] == z[(*image, *at)]] += gz[(*image, *at)]
        return gx

    return z, gradient


@pytest.mark.parametrize("ignore_border", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.slow("compiles pooling and its gradient")
def test_max_pooling_and_its_gradient(ignore_border, dtype):
    x, gz = (T.TensorType(dtype, (False,) * 4)(name) for name in ("x", "gz"))
    sizes = [T.lvector(name) for name in ("window", "stride", "pad")]
    z = pool_2d(x, sizes[0], ignore_border, stride=sizes[1], pad=sizes[2])
    inputs, outputs = [x, gz, *sizes], [z, T.grad(None, x, known_grads={z: gz})]
    f = compiled(inputs, outputs)
    assert {ContiguousMaxPool, ContiguousMaxPoolGrad} <= set(operations(f))
    random = np.random.RandomState(2)
    for shape, window, stride, pad in [
        ((2, 3, 8, 6), (2, 2), (2, 2), (0, 0)),
        ((2, 3, 7, 5), (2, 2), (2, 2), (0, 0)),
        ((1, 1, 3, 530), (2, 2), (2, 2), (0, 0)),
        ((2, 1, 9, 7), (3, 3), (2, 2), (1, 1)),
        ((1, 2, 6, 6), (2, 3), (1, 2), (0, 0)),
        ((1, 2, 6, 5), (2, 2), (3, 1), (1, 0)),
        ((0, 2, 6, 5), (2, 2), (2, 2), (0, 0)),
        ((2, 2, 1, 1), (2, 2), (2, 2), (0, 0)),
    ]:
        if any(pad) and not ignore_border:
            continue  # Theano refuses that
        # Few different numbers: a maximum occurs several times, at -0 and at 0 too.
        value = random.randint(-1, 3, shape).astype(dtype)
        value[value == -1] = -0.0
        value[random.rand(*shape) < 0.05] = np.nan
        expected, gradient = max_pool(value, window, stride, pad, ignore_border)
        above = some(random, *expected.shape, dtype=dtype)
        above[random.rand(*above.shape) < 0.2] = -0.0
        for pair in zip(layouts_of(value), layouts_of(above)):
            found = f(*pair, window, stride, pad)
            same_bits(found, [expected, gradient(above)])
        if value.size:  # an output of another shape is there already
            same_bits(f(value, above, window, stride, pad), [expected, gradient(above)])


def test_what_pooling_refuses_is_refused():
    x = T.ftensor4("x")
    sizes = [T.lvector(name) for name in ("window", "stride", "pad")]
    f = compiled([x, *sizes], [pool_2d(x, sizes[0], False, stride=sizes[1], pad=sizes[2])])
    image = np.zeros((1, 1, 4, 4), "float32")
    with pytest.raises(ValueError, match="padding must be zero when ignore border is False"):
        f(image, [2, 2], [2, 2], [1, 1])
    with pytest.raises(ValueError, match="ws must be a vector of size 2"):
        f(image, [2, 2, 2], [2, 2], [0, 0])


def test_average_pooling_and_integers_stay_as_they_are():
    x, i = T.ftensor4("x"), T.itensor4("i")
    outputs = [
        pool_2d(x, (2, 2), ignore_border=True, mode="average_inc_pad"),
        pool_2d(i, (2, 2), ignore_border=True),
    ]
    assert ContiguousMaxPool not in rewritten([x, i], outputs, FAST_RUN)


# The border, and how many pixels the filter moves and leaves out.
CONVOLUTIONS = [
    pytest.param((1, 2), (2, 1), (1, 2), marks=pytest.mark.slow("compiles convolutions")),
    pytest.param("valid", (1, 1), (1, 1), marks=pytest.mark.thorough),
    pytest.param("half", (2, 2), (1, 1), marks=pytest.mark.thorough),
    pytest.param("full", (1, 3), (2, 1), marks=pytest.mark.thorough),
    pytest.param(((3, 0), (0, 4)), (3, 2), (1, 1), marks=pytest.mark.thorough),
]


@pytest.mark.parametrize("border, stride, dilation", CONVOLUTIONS)
def test_convolutions_and_their_gradients(border, stride, dilation):
    x, w, above = T.ftensor4("x"), T.ftensor4("w"), T.ftensor4("above")
    z = conv2d(x, w, border_mode=border, subsample=stride, filter_dilation=dilation)
    outputs = [z, *T.grad(None, [x, w], known_grads={z: above})]
    f, serial = (make([x, w, above], outputs) for make in (compiled, plain))
    convolutions = {RowwiseCorrMM, RowwiseCorrMMGradInputs, RowwiseCorrMMGradWeights}
    assert convolutions <= set(operations(f)) and convolutions.isdisjoint(operations(serial))
    for node in f.maker.fgraph.apply_nodes:
        if type(node.op) in convolutions:
            code = node.op.c_support_code_apply(node, "")
            calls = [code.count(f"synkhronos_each_place<{adds}>((") for adds in ("false", "true")]
            assert calls == [2, 1]  # two directions copy columns, one adds them
    random = np.random.RandomState(3)
    for images, channels, height, width, filters, rows, columns in [
        (3, 2, 9, 12, 4, 3, 3),
        (2, 1, 7, 25, 2, 1, 2),
        (1, 3, 5, 5, 1, 2, 1),
        (1, 1, 5, 6, 2, 3, 3),
        (0, 2, 9, 12, 4, 3, 3),
    ]:
        a = some(random, images, channels, height, width)
        b = some(random, filters, channels, rows, columns)
        c = some(random, *get_conv_output_shape(a.shape, b.shape, border, stride, dilation))
        for arrays in zip(layouts_of(a), layouts_of(b), layouts_of(c)):
            same_bits(f(*arrays), serial(*arrays))


@pytest.mark.slow("compiles a normalization twice")
def test_the_variance_of_a_batch_normalization_is_computed_by_squares():
    x = T.fmatrix("x")
    ones, zeros = (T.constant(np.full((1, 5), n, "float32")) for n in (1, 0))
    normal = batch_normalization_train(x, ones, zeros, "per-activation")[0]
    f, serial = compiled([x], [normal]), plain([x], [normal])
    names = [str(node.op) for node in f.maker.fgraph.apply_nodes]
    assert any("**" in str(node.op) for node in serial.maker.fgraph.apply_nodes)
    assert any("sqr" in name for name in names) and not any("**" in name for name in names)
    value = np.random.RandomState(4).randn(40, 5).astype("float32")
    expected = (value - value.mean(0)) / np.sqrt(value.astype("float64").var(0) + 1e-4)
    np.testing.assert_allclose(f(value)[0], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(f(value)[0], serial(value)[0], rtol=1e-6, atol=1e-6)


def rewritten(inputs, outputs, mode):
    """Return the operations of a function, which is not compiled."""
    graph = theano.FunctionGraph(inputs, outputs)
    compiling.mode_for([], mode).optimizer.optimize(graph)
    return [type(node.op) for node in graph.apply_nodes]


def sums_are(mode):
    x = T.fmatrix("x")
    return rewritten([x], [x.sum(0)], mode) == [InterleavedSum]


def test_modes_turn_the_rewrites_off():
    assert sums_are(FAST_RUN) and sums_are("FAST_RUN")
    for name in (CPU, "synkhronos_sums"):
        assert not sums_are(FAST_RUN.excluding(name))
    assert sums_are(FAST_RUN.excluding("synkhronos_pooling"))
    # In Python, as in FAST_COMPILE, there is nothing to win; and no simplification means none.
    for mode in ("FAST_COMPILE", theano.Mode("py", "fast_run"), theano.Mode("cvm", None)):
        assert not sums_are(mode)
    with theano.change_flags(cxx=""):
        assert not sums_are(FAST_RUN)


@pytest.mark.slow("starts an interpreter")
def test_a_flag_turns_the_rewrites_off(script):
    done = script(
        """
import theano.tensor as T
from synkhronos._host.theano import compiling
import theano

x = T.fmatrix("x")
graph = theano.FunctionGraph([x], [x.sum(0)])
compiling.mode_for([], None).optimizer.optimize(graph)
print([type(node.op).__name__ for node in graph.apply_nodes])
""",
        env={"THEANO_FLAGS": f"optimizer_excluding={CPU}"},
    )
    assert done.stdout == "['Sum']\n"


def test_functions_of_ranks_have_the_rewrites(ranks):
    x = T.fmatrix("x")
    f = synk.function([x], (x.sum(0), "sum"), mode=FAST_RUN)
    value = np.random.RandomState(5).randn(7, 12).astype("float32")
    np.testing.assert_allclose(f(value), value.astype("float64").sum(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(f.as_theano(value), value.sum(0), rtol=1e-5, atol=1e-6)
    assert InterleavedSum in [type(node.op) for node in f.maker.fgraph.apply_nodes]


@pytest.mark.filterwarnings("ignore:.*Supervisor is not added")
def test_rewrites_leave_operations_without_arrays_alone():
    """Their rewriter is given every operation of its kinds' families, such as draws of numbers."""
    x, streams = T.fmatrix("x"), RandomStreams(3)
    drawn = streams.uniform(x.shape)
    graph = theano.FunctionGraph([x, *(state for state, _ in streams.updates())], [x + drawn])
    with theano.change_flags(on_opt_error="raise"):
        compiling.mode_for([], FAST_RUN).optimizer.optimize(graph)
