"""`parallel`: functions that ``theano.function`` makes in its block have serial values."""

import concurrent.futures
import contextlib
import copy
import functools
import gc
import logging
import pickle
import warnings
from collections import OrderedDict

import numpy as np
import pytest
import theano
import theano.tensor as T
from support import compiling
from support.layouts import ON_THEANO_DEVICES, Layout
from theano import function as function_of_a_library
from theano.compile.function_module import Function
from theano.compile.nanguardmode import NanGuardMode
from theano.compile.pfunc import pfunc
from theano.gof.graph import ancestors
from theano.sandbox.rng_mrg import MRG_RandomStreams, mrg_uniform
from theano.tensor.inplace import add_inplace
from theano.tensor.nnet import conv2d
from theano.tensor.nnet.conv import conv2d as old_conv2d
from theano.tensor.shared_randomstreams import RandomStreams
from theano.tensor.signal.pool import pool_2d

import synkhronos as synk
from synkhronos import PortingWarning
from synkhronos._session import changes
from synkhronos.porting import ParallelFunction

pytestmark = [
    pytest.mark.skipif(ON_THEANO_DEVICES, reason="graphs of the CPU"),
    pytest.mark.usefixtures("quickly_compiled"),
]
LAYOUTS = [Layout(2), Layout(3, master=1), Layout(1)]
ROWS = 7  # no multiple of 2 or 3


def is_theanos(function):
    """Return whether a function is one that Theano has compiled; those for ranks claim to be."""
    return isinstance(function, Function) and type(function) is not ParallelFunction


class Variables:
    """Inputs with rows, shared variables, and values for the inputs."""

    def __init__(self):
        rng = np.random.RandomState(0)
        self.x, self.y = T.dmatrix("x"), T.ivector("y")
        self.images, self.stack = T.dtensor4("images"), T.dtensor3("stack")
        self.inputs = [self.x, self.y, self.images, self.stack]
        self.n = self.x.shape[0]
        self.w = theano.shared(rng.randn(4, 3), "w")
        self.row = theano.shared(rng.randn(4), "row")
        self.filters = theano.shared(rng.randn(2, 2, 3, 3), "filters")
        self.values = [
            rng.randn(ROWS, 4),
            rng.randint(0, 3, ROWS).astype("int32"),
            rng.randn(ROWS, 2, 6, 6),
            rng.randn(ROWS, 4, 2),
        ]


def softmax_loss(v):
    return T.nnet.categorical_crossentropy(T.nnet.softmax(v.x.dot(v.w)), v.y).mean()


def convolved(v):
    return pool_2d(T.tanh(conv2d(v.images, v.filters)), (2, 2), ignore_border=True)


def normalized(v):
    return (v.x - v.x.mean(axis=0)) / T.sqrt(v.x.var(axis=0) + 1e-4)


def normalized_by_theano(v, axes="per-activation"):
    """Return all that Theano's own batch normalization computes, of rows or of images."""
    x, n = (v.x, 4) if axes == "per-activation" else (v.images, 2)
    pattern = ("x", 0) if x is v.x else ("x", 0, "x", "x")
    parameters = [each[:n].dimshuffle(*pattern) for each in (v.row, T.sqr(v.row))]
    running = {"running_mean": parameters[1], "running_var": 1 + parameters[1]}
    new = T.nnet.bn.batch_normalization_train(x, *parameters, axes, **running)
    fixed = T.nnet.bn.batch_normalization_test(x, *parameters, *running.values(), axes)
    loss = T.tanh(new[0] * fixed).mean() + T.sqr(new[1] + new[2]).sum()
    return [*new, fixed, loss, *T.grad(loss, [v.row, x])]


def by_old_convolutions(v, mode, n_rows=None, **kwargs):
    """Return what Theano's convolution of before 2015 computes, and its gradients."""
    if n_rows is not None:
        kwargs = {"image_shape": (n_rows, 2, 6, 6), "filter_shape": (2, 2, 3, 3), **kwargs}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        new = old_conv2d(v.images, v.filters, border_mode=mode, **kwargs)
        return [new, *T.grad(T.sqr(T.tanh(new)).mean(), [v.filters, v.images])]


def by_levels(v, target):
    """Return probabilities of 6 classes in 2 groups, or of one class for each row."""
    weights, biases = T.stack([v.w, v.w * 2]), T.stack([v.row[:3], v.row[1:]])
    groups = v.w[:, :2], v.row[:2]
    return T.nnet.h_softmax(v.x, v.n, 6, 2, 3, *groups, weights, biases, target)


def of_own_rows(v):
    return T.log(T.nnet.softmax(v.x))[T.arange(v.y.shape[0]), v.y]


EXPRESSIONS = {
    "items": lambda v: [v.x * 2 + v.w.sum(), T.switch(v.x > 0, v.x, v.row), T.clip(v.x, -1, 1)],
    "ones and zeros": lambda v: [T.ones_like(v.x), T.zeros((v.n, 3)) + 1, T.alloc(v.row, v.n, 4)],
    "sums": lambda v: [v.x.sum(), v.x.sum(axis=0), v.x.sum(axis=1), 2 - 3 * v.x.sum(), v.y.sum()],
    "sums that are needed": lambda v: [T.sqr(v.x.sum()), v.x.sum() * v.y.sum(), v.x / v.x.sum()],
    "means": lambda v: [v.x.mean(), v.x.mean(axis=0, keepdims=True), v.y.mean(), v.x.std()],
    "comparisons": lambda v: [T.eq(v.y, 1).mean(), T.neq(v.x.argmax(axis=1), v.y).sum()],
    "extremes": lambda v: [v.x.max(), v.x.min(axis=0), v.x.max(axis=1), v.x.argmax(axis=1)],
    "products": lambda v: [v.x.prod(axis=0), v.x.prod(axis=1), v.x.norm(2)],
    "any and all": lambda v: [T.any(v.x > 2), T.all(v.x > -9, axis=0), T.all(v.x > 0, axis=1)],
    "centered": lambda v: [
        normalized(v),
        T.grad(T.sqr(normalized(v)).mean(), v.row, None, "ignore"),
    ],
    "batch normalization": lambda v: [
        *normalized_by_theano(v),
        *normalized_by_theano(v, "spatial"),
    ],
    "matrices": lambda v: [v.x.dot(v.w), v.x.T.dot(v.x), v.w.T.dot(v.x.T), T.dot(v.x, v.row)],
    "covariance": lambda v: [
        T.dot(v.x.T, v.y),
        T.dot(v.y, v.x),
        T.batched_dot(v.stack, v.stack.dimshuffle(0, 2, 1)),
    ],
    "tensordot": lambda v: [T.tensordot(v.stack, v.w, [[1], [0]])],
    "shapes": lambda v: [v.n, v.x.shape, v.x.size, v.n * 1.5, v.n - 1, v.n // 2, v.x.shape[1:]],
    "reshaped": lambda v: [
        v.x.reshape((v.n * 2, 2)),
        v.x.reshape((-1, 2)),
        v.stack.flatten(2),
        v.x.flatten(),
    ],
    "reshaped to a fixed number": lambda v: [
        v.x.reshape((ROWS, 2, 2)),
        conv2d(v.x.reshape((ROWS, 1, 2, 2)), v.filters[:, :1], (ROWS, 1, 2, 2), border_mode=1),
        *T.grad(
            T.sqr(conv2d(v.images.reshape((ROWS, 2, 6, 6)), v.filters, (ROWS, 2, 6, 6))).mean(),
            [v.filters, v.images],
        ),
    ],
    "reshaped by parts": lambda v: [
        v.stack.reshape(T.concatenate([v.x.shape[:1], [-1]]), ndim=2),
        v.stack.reshape((v.n, T.prod(v.stack.shape[1:]))),
    ],
    "length of multiples": lambda v: [
        v.stack.reshape((v.n * 2, 4)).mean(axis=0),
        v.x.flatten().mean(),
    ],
    "axes": lambda v: [
        v.x.dimshuffle(1, 0),
        v.stack.dimshuffle(1, 0, 2),
        v.stack.dimshuffle(2, "x", 0, 1),
    ],
    "joined": lambda v: [T.concatenate([v.x, v.x * 2], axis=1), T.stack([v.x, v.x], axis=2)],
    "columns": lambda v: [
        v.x[:, 1],
        v.x[:, ::-1],
        v.x[:, 1:3],
        v.stack[:, 0, 1],
        v.x.T[0],
        v.x[:, [0, 2]],
    ],
    "along other axes": lambda v: [
        T.cumsum(v.x, axis=1),
        T.cumprod(v.stack, axis=2),
        T.sort(v.x, axis=1),
        T.sort(v.stack.dimshuffle(1, 0, 2), axis=0),
        T.argsort(v.x),
        T.extra_ops.diff(v.x, axis=1),
        T.roll(v.x, 1, axis=1),
        T.repeat(v.stack, T.as_tensor_variable([1, 2]), axis=2),
        T.tile(v.x, (1, 2)),
        T.tile(v.x, (2, 1, 2)),
        T.grad(T.sqr(T.cumsum(v.x, axis=1)).mean(), v.x),
    ],
    "gradients of sorts": lambda v: [
        *T.grad((T.sort(T.tanh(v.x.dot(v.w)), axis=1) * v.row[:3]).sum(), [v.w, v.x]),
        T.grad((T.sort(v.stack, axis=-2) * v.row[:, None]).mean(), v.stack),
        T.grad((T.sort(T.sort(v.x.T, axis=0) * v.row[:, None], axis=0)[0]).sum(), v.x),
    ],
    "patches": lambda v: [
        T.nnet.neighbours.images2neibs(v.images, (2, 2)),
        T.nnet.neighbours.images2neibs(v.images, (3, 3)).max(axis=1).reshape((v.n, 8)),
    ],
    "levels of classes": lambda v: [
        by_levels(v, v.y),
        by_levels(v, None),
        *T.grad(T.log(by_levels(v, v.y)).mean(), [v.w, v.row, v.x]),
    ],
    "split": lambda v: T.split(v.x, [1, 3], 2, axis=1),
    "set columns": lambda v: [
        T.set_subtensor(v.x[:, 1], 0),
        T.inc_subtensor(v.x[:, :2], v.row[:2]),
        T.inc_subtensor(v.x[:, 0], v.y),
    ],
    "own items": lambda v: [of_own_rows(v), -of_own_rows(v).mean(), v.x[T.arange(v.n), 1]],
    "own items set": lambda v: [
        T.set_subtensor(v.x[T.arange(v.n), v.y], 0.0),
        T.extra_ops.to_one_hot(v.y, 4),
    ],
    "looked up": lambda v: [v.w[v.y], v.w[v.y].sum(axis=0), v.row[v.y], v.w[v.y, v.y]],
    "looked up in steps": lambda v: [v.w[T.stack([v.y, v.y], axis=1)].mean(axis=1)],
    "softmax": lambda v: [
        T.nnet.softmax(v.x.dot(v.w) + v.row[:3]),
        T.nnet.logsoftmax(v.x),
        softmax_loss(v),
    ],
    "logistic": lambda v: [
        T.nnet.binary_crossentropy(T.nnet.sigmoid(v.x), T.nnet.sigmoid(-v.x)).mean()
    ],
    "convolution": lambda v: [T.tanh(conv2d(v.images, v.filters))],
    "pooling after convolution": lambda v: [
        convolved(v),
        pool_2d(v.images, (2, 2), ignore_border=True, mode="average_inc_pad").mean(),
    ],
    "old convolutions": lambda v: [
        *by_old_convolutions(v, "valid"),
        *by_old_convolutions(v, "full"),
        *by_old_convolutions(v, "valid", ROWS),
        *by_old_convolutions(v, "full", ROWS),
    ],
    "passed on": lambda v: [
        theano.gradient.disconnected_grad(v.x),
        T.opt.Assert()(v.x, T.gt(v.n, 0)),
    ],
    "of rows alone": lambda v: [v.x],
    "gradients": lambda v: T.grad(softmax_loss(v) + 0.1 * (v.w**2).sum(), [v.w, v.x]),
    "gradients of sums": lambda v: T.grad(T.sqr(v.x.dot(v.w)).sum(), [v.w, v.x]),
    "gradients by logarithms": lambda v: T.grad(
        -T.log(T.nnet.softmax(v.x.dot(v.w)))[T.arange(v.n), v.y].mean(), [v.w]
    ),
    "gradients of lookups": lambda v: T.grad(
        T.sqr(v.w[v.y]).sum() + v.row[v.y].mean(), [v.w, v.row]
    ),
    "gradients of convolutions": lambda v: T.grad(
        T.sqr(convolved(v)).mean(), [v.filters, v.images]
    ),
    "gradients of averages": lambda v: T.grad(
        T.sqr(pool_2d(v.images, (2, 2), ignore_border=True, mode="average_inc_pad")).sum(),
        [v.images],
    ),
    "gradients of extremes": lambda v: T.grad(
        v.x.dot(v.w).max(axis=1).sum() + v.x.dot(v.w).max(), [v.w]
    ),
    "gradients of normalized": lambda v: T.grad((normalized(v).dot(v.w) ** 3).mean(), [v.w, v.x]),
    "gradients of columns": lambda v: T.grad(T.sqr(v.x.dot(v.w[:, :2])[:, 0]).sum(), [v.w, v.x]),
    "second derivatives": lambda v: T.grad(
        (T.grad(T.tanh(v.x.dot(v.w)).mean(), v.w) ** 2).sum(), [v.w]
    ),
}


COMPILED = [
    "reshaped to a fixed number",
    "pooling after convolution",
    "gradients of convolutions",
    "gradients of averages",
]
NOT_IN_PYTHON = {*COMPILED, "convolution", "old convolutions"}
SLOW = pytest.mark.slow("compiles convolutions or pooling")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=SLOW if name in NOT_IN_PYTHON else ()) for name in EXPRESSIONS],
)
def test_divided_expressions_have_serial_values(ranks, name):
    v = Variables()
    outputs = EXPRESSIONS[name](v)
    # Convolutions and the gradients of pooling have compiled code only.
    mode = "FAST_RUN" if name in NOT_IN_PYTHON else None
    serial = theano.function(v.inputs, outputs, mode=mode, on_unused_input="ignore")
    with synk.parallel():
        f = theano.function(v.inputs, outputs, mode=mode, on_unused_input="ignore")
    assert type(f) is ParallelFunction
    for result, expected in zip(f(*v.values), serial(*v.values)):
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_allclose(result, expected, rtol=1e-9, atol=1e-12)
    assert f._theano is None, "it was computed serially"


def reversed_rows(v):
    return v.x[::-1]


def accumulated(v, **kwargs):
    return theano.scan(lambda row, total: total + row, v.x, T.zeros_like(v.row), **kwargs)[0]


REFUSED = {
    "Subtensor": reversed_rows,
    "rows that are selected by their number": lambda v: v.x[:3],
    "which row has the largest value": lambda v: v.x.argmax(axis=0),
    "CumOp": lambda v: T.cumsum(v.x, axis=0),
    "Sort": lambda v: T.sort(v.x, axis=0),
    "one in each step": accumulated,
    "in each step: its steps": lambda v: accumulated(v, go_backwards=True),
    "a fixed number of rows": lambda v: v.x + theano.shared(np.ones((ROWS, 4))),
    "to a fixed number of rows": lambda v: v.x.flatten().reshape((ROWS, 2, 2)),
    "has fixed numbers of rows": lambda v: (
        v.x.reshape((ROWS, 4)).sum() + v.x.reshape((14, 2)).sum()
    ),
    "rows that lie along different axes": lambda v: v.x.dot(v.x.T),
    "AllReduce": lambda v: v.x * synk.ops.all_reduce(v.w.sum(), "sum"),
    "Rows": lambda v: v.x + v.row[synk.rows(0, 4)],
    "not for each row": lambda v: v.x + RandomStreams(3).uniform((4,)),
}


# Numbers of which sums don't fit into their dtype, or parts of the sums overflow, or are fractions.
NUMBERS = {
    "int8": np.array([100, 90, 100, 7, 80], "int8"),
    "uint8": np.array([100, 90, 100, 7, 80], "uint8"),
    "int64": np.array([100, 90, 100, 7, 80]),
    "int8, rounded": np.array([-9, -9, -8, -8, 1, 9], "int8"),
    "halves": np.array([[0.5, 1], [3, 1], [3, 1], [1, 1], [0.5, 1], [3, 1]]),
    "float16": np.array([5e4, 5e4, 0, 0, -5e4, -4.9e4], "float16"),
    "float32": np.array([3e38, 3e38, 1e38, -1e38, -3e38, -3e38], "float32"),
    "300 rows": np.arange(600.0).reshape(300, 2),  # their number wraps around in 8 bits
    "thirds": np.array([[1.0, 3], [2, 4], [-3, 5], [1, -11], [1, 0], [-2, -1]]),
    "nan": np.array([1, np.nan, 2, 0, 4]),
    "2 and 5": np.array([3.0, 2.0, -3.0, 0.0, 0.0]),
}
NUMBERS["halves, single"] = 200 * NUMBERS["halves"].astype("float32")
NUMBERS["halves, half"] = 200 * NUMBERS["halves"].astype("float16")
ZERO = theano.shared(np.float64(0), "zero")
UNUSUAL = {
    "a small sum, cast": ("int8", lambda b: b.sum(dtype="int8") + b.sum()),
    "a small sum, divided": ("uint8", lambda b: b.sum(dtype="uint8") / 2.0),
    "an unsigned sum": ("uint8", lambda b: T.cast(-b.sum(), "float64")),
    "a small sum in a larger array": (
        "int8",
        lambda b: T.inc_subtensor(T.zeros(3, "int64")[1], b.sum(dtype="int8")),
    ),
    "divided by 0": ("2 and 5", lambda x: x.sum() / ZERO),
    "times infinity": ("2 and 5", lambda x: x.sum() * (1 / ZERO)),
    "a small sum, added up": ("int8", lambda b: b.sum(keepdims=True).sum()),
    "small sums, joined": (
        "int8",
        lambda b: T.stack([b.sum(dtype="int8"), T.cast(b.sum(dtype="int64"), "int32")]),
    ),
    "floats added up as integers": ("halves", lambda x: T.sum(x, dtype="int64")),
    "floats multiplied as integers": ("halves", lambda x: T.prod(x, axis=0, dtype="int8")),
    "half floats": ("float16", lambda x: x.sum()),
    "half floats, cast": ("float16", lambda x: T.cast(x.sum(dtype="float32"), "float16")),
    "single floats, halved": ("halves, single", lambda x: T.dot(x.T, x).sum(dtype="float16")),
    "half floats, multiplied": ("halves, half", lambda x: T.dot(x.T, x)),
    "bools": ("halves", lambda x: T.sum(x > 0, dtype="bool")),
    "divided by another length": (
        "halves",
        lambda x: x.sum() / T.zeros((0, 2)).shape[0] + x.sum() / x[:, 2:].shape[1],
    ),
    "rows of rows": ("300 rows", lambda x: x.reshape((-1, 1))[T.arange(x.shape[0])]),
    "items of rows of rows": (
        "300 rows",
        lambda x: x.reshape((-1, 1))[T.arange(x.shape[0]), T.cast(x[:, 0] < 0, "int64")],
    ),
    "a small length": ("300 rows", lambda x: T.ones((T.cast(x.shape[0], "uint8"),)).sum()),
    "small numbers of rows": (
        "300 rows",
        lambda x: x[T.arange(x.shape[0], dtype="int8")] + x[T.cast(T.arange(x.shape[0]), "int8")],
    ),
    "bits": ("uint8", T.elemwise.CAReduce(theano.scalar.or_)),
    "small products, added up": ("int8", lambda b: T.outer(b.dot(b), b).sum()),
    "a large sum, divided": ("int64", lambda b: (b * 2**56).sum() / 2.0),
    "no number, as an integer": ("nan", lambda x: T.sum(x, dtype="int8", acc_dtype="float64")),
    "a mean of 0": ("thirds", lambda x: T.cast(x.mean(axis=0), "bool") * x.std(axis=0)),
    "a multiple of a mean of 0": ("thirds", lambda x: T.neq(7 * x.mean(axis=0), 0)),
    "a large mean": ("int64", lambda b: (b * 2**56).sum(dtype="float64")),
    "a whole mean, whose parts are rounded": ("int8, rounded", lambda b: T.cast(b.mean(), "int8")),
    "single sums": ("float32", lambda x: T.stack([x.sum(), x.mean(), x.sum() - x.mean() / 2])),
    "single sums that all ranks need": ("float32", lambda x: T.sqr(x.sum())),
    "double sums as single": (
        "float32",
        lambda x: T.cast(T.cast(x, "float64").sum(), "float32"),
    ),
    "single sums in a larger array": (
        "float32",
        lambda x: T.inc_subtensor(T.zeros(3, "float32")[1], x.sum()),
    ),
    "single products": (
        "float32",
        lambda x: T.cast(T.switch(x > 0, 1e30, 1e-30), "float32").prod(),
    ),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # divided by 0
@pytest.mark.parametrize(
    "name, compiled",
    [(name, compiling.quickly) for name in UNUSUAL]
    # Theano's optimizations multiply behind a large sum, which does not wrap around then.
    + [(name, compiling.in_python) for name in UNUSUAL if not name.startswith("a large ")],
)
def test_unusual_numbers_are_serial_theanos(ranks, name, compiled):
    numbers, expression = UNUSUAL[name]
    values = NUMBERS[numbers]
    variable = T.TensorType(values.dtype.name, (False,) * values.ndim)("x")
    output = expression(variable)
    with compiled():
        expected = theano.function([variable], output)(values)
        with synk.parallel():
            result = theano.function([variable], output)(values)
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_array_equal(result, expected)


def of_pairs(v):
    """Return an integer for each pair of items: twice as many as there are rows, of 2 columns."""
    return T.cast(v.x[:, :2].flatten() > 0, "int64")


TWICE_AS_MANY = {
    "filled": lambda v: T.alloc(v.y, v.n * 2),
    "selected by positions": lambda v: v.x[T.arange(v.n), of_pairs(v)],
    "selected": lambda v: v.w[v.y, of_pairs(v)],
    "set": lambda v: T.set_subtensor(v.x[:, :2].reshape((-1, 1))[:, 0], v.y),
    "set by positions": lambda v: T.set_subtensor(v.x[T.arange(v.n), v.y], of_pairs(v)),
    "increased": lambda v: T.inc_subtensor(T.zeros(4)[of_pairs(v)], v.y),
    "increased pairs": lambda v: T.inc_subtensor(T.zeros((4, 3))[v.y, of_pairs(v)], v.y),
    "cross entropy": lambda v: T.nnet.categorical_crossentropy(T.nnet.softmax(v.x), of_pairs(v)),
    "drawn between": lambda v: RandomStreams(3).uniform((v.n * 2,), low=v.y, high=v.y),
}


@pytest.mark.parametrize("name", TWICE_AS_MANY)
def test_the_only_row_of_a_rank_is_not_repeated(ranks, name):
    v = Variables()
    inputs, output = [v.x, v.y], TWICE_AS_MANY[name](v)
    values = [each[: ranks.session.n_ranks] for each in v.values[:2]]
    serial = theano.function(inputs, output, on_unused_input="ignore")
    with synk.parallel():
        f = theano.function(inputs, output, on_unused_input="ignore")
    assert type(f) is ParallelFunction or ranks.session.n_ranks == 1
    assert outcome(f, values) == outcome(serial, values)


def outcome(f, values):
    try:
        return f(*values).tolist()
    except (ValueError, IndexError) as error:
        return type(error)


@pytest.mark.layouts(Layout(2))
def test_rows_that_are_as_many_after_reshaping_are_divided(ranks):
    x = T.dmatrix("x")
    with synk.parallel():
        f = theano.function([x], x.reshape((-1, 2))[T.arange(x.shape[0])])
    two, four = np.arange(12.0).reshape(6, 2), np.arange(24.0).reshape(6, 4)
    np.testing.assert_array_equal(f(two), two)
    assert f._theano is None
    np.testing.assert_array_equal(f(four), four.reshape(12, 2)[:6])


@pytest.mark.layouts(Layout(2))
def test_rows_that_reshaping_would_tear_apart_run_in_the_master(ranks):
    v, total = Variables(), theano.shared(np.zeros(8), "total")
    with synk.parallel():
        reshaped = v.x.reshape((-1, 8))
        f = theano.function([v.x], reshaped, updates=[(total, total + reshaped.sum(axis=0))])
    for n_rows, n_columns in [(6, 4), (7, 8), (6, 4)]:
        x, before = np.random.RandomState(0).randn(n_rows, n_columns), total.get_value()
        np.testing.assert_array_equal(f(x), x.reshape(-1, 8))
        np.testing.assert_allclose(total.get_value(), before + x.reshape(-1, 8).sum(axis=0))


@pytest.mark.layouts(Layout(2))
@pytest.mark.parametrize("reason", REFUSED)
def test_functions_that_cannot_be_divided_stay_theanos(ranks, caplog, reason):
    caplog.set_level(logging.INFO, "synkhronos")
    v = Variables()
    with synk.parallel():
        f = theano.function([v.x], REFUSED[reason](v), name="f")
    assert is_theanos(f)
    assert "f stays a Theano function: it " in caplog.text and reason in caplog.text
    expected = theano.function([v.x], REFUSED[reason](v))
    if reason != "not for each row":
        np.testing.assert_array_equal(f(v.values[0]), expected(v.values[0]))


@pytest.mark.layouts(Layout(2))
def test_functions_without_rows_stay_theanos(ranks, caplog):
    caplog.set_level(logging.INFO, "synkhronos")
    v, a = Variables(), T.dscalar("a")
    with synk.parallel():
        functions = [
            theano.function([a], a * 2),
            theano.function([], v.w * 2),
            theano.function([v.x], v.w * 2, on_unused_input="ignore"),
            theano.function([v.x, theano.In(a, value=1, update=a + 1)], v.x.sum() + a),
            theano.function([v.x], v.x.sum(), profile=True),
        ]
    assert all(map(is_theanos, functions))
    assert caplog.text.count("stays a Theano function") == len(functions)
    assert functions[0](2) == 4
    assert [float(functions[3](np.ones((3, 4)))) for _ in range(2)] == [13, 14]


@pytest.mark.layouts(Layout(2))
def test_a_function_without_a_profile_is_divided(ranks):
    v = Variables()
    with synk.parallel():
        f = theano.function([v.x], v.x.sum(), profile=False)
    assert not is_theanos(f)
    np.testing.assert_allclose(f(v.values[0]), v.values[0].sum())


def adam_like(loss, params):
    updates = OrderedDict()
    count = theano.shared(np.float64(0), "count")
    updates[count] = count + 1
    for param, grad in zip(params, T.grad(loss, params)):
        mean, square = (theano.shared(param.get_value() * 0) for _ in range(2))
        updates[mean] = 0.9 * mean + 0.1 * grad
        updates[square] = 0.99 * square + 0.01 * grad**2
        step = updates[mean] / (1 - 0.9 ** updates[count])
        updates[param] = param - 0.1 * step / (T.sqrt(updates[square]) + 1e-3)
    return updates


def trained(calls):
    """Return losses and variables after calls of a training function, and the function."""
    v = Variables()
    running = theano.shared(np.zeros(4), "running")
    hidden = normalized(v).dot(v.w)
    loss = T.nnet.categorical_crossentropy(T.nnet.softmax(hidden), v.y).mean()
    loss += 0.01 * (v.w**2).sum()
    updates = adam_like(loss, [v.w])
    updates[running] = 0.9 * running + 0.1 * v.x.mean(axis=0)
    step = theano.function([v.x, v.y], loss, updates=updates, name="step")
    predict = theano.function(inputs=[v.x], outputs=v.x.dot(v.w).argmax(axis=1))
    results = calls(step, predict, v)
    return [*results, *(variable.get_value() for variable in updates)], list(updates), step


def usual_calls(step, predict, v):
    x, y, *_ = v.values
    results = [step(x, y), step(x, y=y), *step(x, y).reshape(1), predict(x)]
    v.w.set_value(v.w.get_value() / 2)  # as learning rates decay
    results.append(step(x, y))
    results.append(step(x[:1], y[:1]))  # less rows than ranks: in the master alone
    results.append(step(x, y))
    v.w.get_value(borrow=True)[...] *= 2
    return [*results, step(x, y), predict(x)]


def assert_equal(results, expected):
    for result, wanted in zip(results, expected):
        assert (result.shape, result.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_allclose(result, wanted, rtol=1e-8, atol=1e-12)


def test_training_leaves_serial_values_on_all_ranks(ranks):
    expected, _, _ = trained(usual_calls)
    with synk.parallel() as n:
        results, variables, step = trained(usual_calls)
    assert n == ranks.n and type(step) is ParallelFunction
    assert step._repr_mimebundle_() == {"text/plain": repr(step)}  # what IPython shows
    assert_equal(results, expected)
    step(*Variables().values[:2])  # also after the block
    for variable in variables:
        for rank in range(ranks.n):
            np.testing.assert_array_equal(synk.get_value(rank, variable), variable.get_value())


def trained_by_index(size):
    """Train as the deep learning tutorials do, with minibatches of shared variables."""
    rng = np.random.RandomState(1)
    data = theano.shared(rng.randn(20, 4), "data")
    labels = T.cast(theano.shared(rng.randint(0, 3, 20).astype("float64"), "labels"), "int32")
    v, index, rate = Variables(), T.lscalar("index"), T.dscalar("rate")
    p = T.nnet.softmax(v.x.dot(v.w))
    loss = -T.log(p)[T.arange(v.y.shape[0]), v.y].mean()
    rows = slice(index * size, (index + 1) * size)
    givens = {v.x: data[rows], v.y: labels[rows]}
    updates = [(v.w, v.w - rate * T.grad(loss, v.w))]
    step = theano.function([index, theano.In(rate)], loss, updates=updates, givens=givens)
    errors = theano.function(
        [index], [T.neq(p.argmax(1), v.y).mean(), v.x, v.x.max()], givens=givens
    )
    results = [step(i, 0.1) for i in range(-(-20 // size))]
    for i in range(-(-20 // size)):
        results += errors(i)
    return [*results, v.w.get_value()], (step, errors)


@pytest.mark.parametrize("size", [6, 19, 20])  # the last minibatch has 2 rows, 1, 20
def test_minibatches_by_index_are_divided(ranks, size):
    expected, _ = trained_by_index(size)
    with synk.parallel():
        results, functions = trained_by_index(size)
    assert [type(each) for each in functions] == [ParallelFunction] * 2
    assert_equal(results, expected)


@pytest.mark.layouts(Layout(2))
def test_slices_of_different_lengths_run_in_the_master(ranks):
    short, long, i = theano.shared(np.arange(7.0)), theano.shared(np.arange(9.0)), T.lscalar("i")
    rows = slice(i * 4, (i + 1) * 4)
    with synk.parallel():
        f = theano.function([i], [short[rows].mean(), long[rows].mean()])
    assert [float(each) for each in f(0)] == [1.5, 1.5] and f._theano is None
    assert [float(each) for each in f(1)] == [5, 5.5] and f._theano is not None


@pytest.mark.layouts(Layout(2))
def test_calls_with_another_number_of_rows_than_the_graph_has_are_theanos(ranks):
    v = Variables()
    with synk.parallel():
        f = theano.function([v.x], v.x.reshape((6, 2, 2)).sum(axis=(1, 2)))
    assert f(np.ones((6, 4))).tolist() == [4] * 6 and f._theano is None
    assert f(np.ones((3, 8))).tolist() == [4] * 6 and f._theano is not None
    with pytest.raises(ValueError):
        f(np.ones((7, 4)))


@pytest.mark.layouts(Layout(2))
def test_slices_that_have_no_rule_stay_theanos(ranks):
    data, i, j = theano.shared(np.arange(10.0)), T.lscalar("i"), T.lscalar("j")
    with synk.parallel():
        f = theano.function([i, j], [data[i : i + 2].sum(), data[j : j + 3].sum()])
        g = theano.function([i], data[i])
    assert is_theanos(f) and is_theanos(g)
    assert [float(each) for each in f(1, 2)] == [3, 9] and g(3) == 3


def test_outputs_by_name(ranks):
    x, a = T.dmatrix("x"), T.dscalar("a")
    with synk.parallel():
        f = theano.function([x, a], {"total": (x * a).sum(), "a": a})
    results = f(np.arange(15.0).reshape(5, 3), 2)
    assert {name: float(each) for name, each in results.items()} == {"a": 2, "total": 210}


def test_the_ways_of_outputs_and_inputs(ranks):
    x, a, weights = T.dmatrix("x"), T.dscalar("a"), T.dvector("weights")
    total, rows = (x * a).sum(), x.dot(weights)
    with synk.parallel():
        functions = [
            theano.function([x, a], total),
            theano.function([a, x], [total]),
            theano.function([x, theano.In(a)], theano.Out(total, borrow=True)),
            theano.function([x, a], (total,)),
            theano.function([x, a, weights], [rows, total]),
            theano.function([x, a], None, updates=[], on_unused_input="ignore"),
        ]
    value = np.arange(15.0).reshape(5, 3)
    one, listed, out, of_tuple, several, nothing = functions
    assert one(value, 2) == 210 and one(a=2, x=value.tolist()) == 210 and one(value, a=2) == 210
    assert [float(each) for each in listed(2, value)] == [210]
    assert out(value, 2) == 210 and of_tuple(value, 2) == [210]
    joined, added = several(value, 2, [1, 0, 0])  # not as many weights as rows
    np.testing.assert_array_equal(joined, value[:, 0])
    assert added == 210 and several._theano is None
    assert nothing(value, 2) == []


def with_values():
    """Return what functions compute whose inputs have values, and the functions."""
    data = theano.shared(np.arange(20.0).reshape(10, 2), "data")
    i, x, rate, row = T.lscalar("i"), T.dmatrix("x"), T.dscalar("rate"), T.dvector("row")
    by_name = [i, theano.In(rate, value=0.5), theano.In(row, name="weights", value=[1, 2])]
    step = theano.function(
        by_name, (x * row).sum() * rate, givens={x: data[i * 5 : (i + 1) * 5]}, name="step"
    )
    results = [step(1), step(0, 2), step(i=1, weights=[0, 1]), step(1, rate=3), step(0)]
    mean = theano.function([x, theano.In(rate, value=0.5)], (x * rate).mean(axis=0))
    rows = np.arange(8.0).reshape(4, 2)
    results += [*mean(rows), *mean(rows, 2), *mean(rate=3, x=rows)]
    of_rows = theano.function([theano.In(x, value=rows)], [x * 2, x.sum()])
    results += [*of_rows(), *of_rows(rows[::-1])]
    for wrong in (lambda: step(), lambda: step(1, 2, rate=3), lambda: step(1, no_such=2)):
        with pytest.raises(TypeError):
            wrong()
    of_rows["x"] = rows[:1]  # for the next call of the Theano function alone
    results += [*of_rows(), *of_rows()]
    return results, [step, mean, of_rows]


def test_inputs_with_values_may_be_left_out(ranks):
    expected, _ = with_values()
    with synk.parallel():
        results, functions = with_values()
    assert_equal(results, expected)
    for each in functions:
        assert type(each) is ParallelFunction
    assert functions[1]._theano is None


def test_random_numbers_are_those_of_each_rank(ranks):
    v = Variables()
    x = np.ones((3000, 4))
    with synk.parallel():
        for streams in (RandomStreams(5), MRG_RandomStreams(5)):
            mask = streams.binomial(n=1, p=0.5, size=v.x.shape, dtype="float64")
            f = theano.function([v.x], [v.x * mask, (v.x * mask).mean()])
            assert type(f) is ParallelFunction
            (rows, mean), (again, _) = f(x), f(x)
            assert set(np.unique(rows)) == {0, 1} and abs(rows.mean() - 0.5) < 0.03
            assert float(mean) == pytest.approx(rows.mean())
            assert abs(np.mean(rows == again) - 0.5) < 0.03
            if ranks.n > 1:
                assert abs(np.mean(rows[:1000] == rows[-1000:]) - 0.5) < 0.05


@pytest.mark.layouts(Layout(2))
def test_random_numbers_that_are_the_same_in_each_call_are_not_compared(ranks):
    x = T.dmatrix("x")
    numbers = MRG_RandomStreams(5).uniform(size=x.shape)
    with synk.parallel():
        f = theano.function([x], numbers, no_default_updates=True)
        first = f(np.ones((6, 4)))  # a PortingWarning would be an error
        np.testing.assert_array_equal(f(np.ones((6, 4))), first)
    assert f._theano is None and not np.any(first[:3] == first[3:])


def noisy(v, draw, std):
    """Return a network's loss and gradient for rows with noise, that of a clone, and the noise."""
    noise = draw(size=v.x.shape) * std
    loss = T.sqr(T.tanh((v.x + noise).dot(v.w))).mean()
    clone = theano.clone(loss, {v.x: v.x / 2})
    return [loss, T.grad(loss, v.w), clone, draw(size=v.x.T.flatten()[:, None].shape) * std, noise]


NORMAL = {
    "old": lambda: RandomStreams(5).normal,
    "plain": lambda: MRG_RandomStreams(5).normal,
    "single": lambda: functools.partial(MRG_RandomStreams(5).normal, dtype="float32"),
    "truncated": lambda: MRG_RandomStreams(5).truncated_normal,
}


@pytest.mark.parametrize("kind", NORMAL)
def test_normal_numbers_are_those_of_each_rank(ranks, kind):
    v, std = Variables(), T.dscalar("std")
    outputs = noisy(v, NORMAL[kind](), std)
    with synk.parallel():
        f = theano.function([v.x, std], outputs)
    assert type(f) is ParallelFunction
    values = v.values[0]
    for result, expected in zip(f(values, 0), theano.function([v.x, std], outputs)(values, 0)):
        np.testing.assert_allclose(result, expected, rtol=1e-6)
    *_, merged, noise = f(np.zeros((3001, 4)), 1)
    assert merged.shape == (12004, 1) and noise.shape == (3001, 4)
    for each in (merged, noise):
        assert abs(each.mean()) < 0.05 and abs(each.std() - 1) < 0.05
        assert abs(np.mean(abs(each) < 1) - (0.65 if kind == "truncated" else 0.683)) < 0.03
        assert (abs(each) < 2.3).all() == (kind == "truncated")
        assert abs(np.corrcoef(each[:900, 0], each[-900:, 0])[0, 1]) < 0.15
    assert np.any(f(np.zeros((3001, 4)), 1)[-1] != noise)
    assert f._theano is None


@pytest.mark.layouts(Layout(2))
@pytest.mark.parametrize("change", [lambda u: u[::-1], lambda u: u**2])
def test_only_normal_numbers_as_theano_makes_them_are_drawn_by_row(ranks, change):
    v = Variables()
    with synk.parallel():
        n = MRG_RandomStreams(5).normal(size=v.x.shape)
        [u] = [e for e in ancestors([n]) if e.owner and isinstance(e.owner.op, mrg_uniform)]
        f = theano.function([v.x], theano.clone(n, {u: change(u)}))
    assert is_theanos(f) and f(v.values[0]).shape == v.values[0].shape


@pytest.mark.layouts(Layout(2))
def test_what_theano_refuses_is_refused_as_by_theano(ranks):
    v = Variables()
    loss = v.x.sum()
    with synk.parallel():
        f = theano.function([v.x], loss)
        for bad in (
            lambda make: make([v.x, v.y], loss),
            lambda make: make([v.x, v.x], loss),
            lambda make: make([v.x], loss, updates=[(v.x, v.x)]),
            lambda make: make([v.x], loss, givens={v.x: v.w}),
            lambda make: make([v.x], loss, mode="NO_SUCH_MODE"),
            lambda make: make([v.x], "loss"),
            lambda make: make(v.x, loss),
        ):
            with pytest.raises(Exception) as ours:
                bad(theano.function)
            with pytest.raises(Exception) as theirs:
                in_a_thread(bad, theano.function)
            assert type(ours.value) is type(theirs.value)
    for arguments in ((), (v.values[0], 1), ([[1.0]], 1), (3,), ([["a"] * 4] * 2,)):
        with pytest.raises((TypeError, ValueError)):
            f(*arguments)
    with pytest.raises(TypeError):
        f(no_such_input=1)
    assert f(v.values[0]) == pytest.approx(v.values[0].sum())


def in_a_thread(function, *args):
    """Call a function in a thread of its own, where nothing is made parallel."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


@pytest.mark.layouts(Layout(2))
def test_copies_of_theano_function_are_caught_and_others_are_not(ranks):
    x = T.dvector("x")
    made = []
    with synk.parallel():
        made.append(function_of_a_library([x], x.sum()))
        made.append(theano.compile.function([x], x.sum()))
        made.append(in_a_thread(theano.function, [x], x.sum()))
        with synk.parallel():
            made.append(theano.function([x], x.sum()))
        made.append(theano.function([x], x.sum()))
        made.append(theano.compile.pfunc([x], x.sum()))
        made.append(pfunc([x], x.sum()))
        made.append(theano.function([(x, [1.0, 2.0])], x.sum()))
        assert x.sum().eval({x: [1, 2]}) == 3
        assert type(synk.function([x], x.sum())) is synk.functions.Function
    made.append(theano.function([x], x.sum()))
    kinds = [type(each) is ParallelFunction for each in made]
    assert kinds == [True, True, False, True, True, True, True, False, False]
    told = [each for each in synk.parallel_report().functions if "tuples as inputs" in each.reason]
    assert [each.calls for each in told] == [0]
    assert made[-3]([1, 2]) == made[-2]([1, 2]) == 3


@pytest.mark.layouts(Layout(2))
def test_functions_have_what_theano_functions_have(ranks):
    v = Variables()
    with synk.parallel():
        f = theano.function([v.x], v.x.dot(v.w), updates=[(v.w, v.w + v.x.sum())], name="f")
    assert isinstance(f, Function) and f.name == "f"
    assert [each.variable for each in f.maker.inputs if not each.implicit] == [v.x]
    assert f.get_shared() == [v.w] and f.maker.fgraph.outputs
    assert "dot" in theano.printing.debugprint(f, file="str").lower()
    f.trust_input = True
    assert "ParallelFunction 'f'" in repr(f)
    x, before = v.values[0], v.w.get_value()
    np.testing.assert_allclose(f(x), x.dot(before))
    for each in (pickle.loads(pickle.dumps(f)), copy.copy(f), f.copy()):
        assert type(each) in (Function, type(f.serial))
        assert np.shape(each(x))[-2:] == (ROWS, 3)  # Theano's own copies return lists
    assert not hasattr(f, "no_such") and not hasattr(f, "_no_such")


@pytest.mark.layouts(Layout(2))
def test_functions_of_the_master_tell_other_ranks(ranks):
    v = Variables()
    with synk.parallel():
        double = theano.function([], updates=[(v.w, v.w * 2)])
        f = theano.function([v.x], v.x.dot(v.w).sum())
        x = v.values[0]
        first = f(x)
        double()
        assert f(x) == pytest.approx(2 * first)
        pickle.loads(pickle.dumps(double))
        copy.copy(double)


def test_a_block_in_a_session_refuses_another_number_of_ranks(ranks):
    for wrong in ({"n_parallel": ranks.n + 1}, {"devices": ["cpu"]}, {"threads_per_rank": 1}):
        with pytest.raises(ValueError, match=next(iter(wrong))), synk.parallel(**wrong):
            pass
    with synk.parallel(ranks.n) as n:
        assert n == ranks.n


def changed_in_place(f, x, w, v, u, a):
    """Return what a function computes while a script writes to what variables hold."""
    results = [f(x)]
    for i in range(4):
        a[:] = 3 + i  # which w borrows
        results.append(f(x))
    v.container.storage[0] = np.full(3, 7.0)
    results.append(f(x))
    cell = v.container.storage
    for i in range(2):
        cell[0] = np.full(3, float(i))
        results.append(f(x))
        cell[0][1] = 77
        results.append(f(x))
    mine = v.get_value(borrow=True)
    given = np.zeros(3)
    u.set_value(given, borrow=True)
    for i in range(3):
        mine[0], given[1] = 50 + i, i
        results.append(f(x))
    return results


@pytest.mark.parametrize("check", [False, True])
def test_arrays_that_a_script_has_too_are_followed(ranks, check):
    everything = []
    for is_parallel in (False, True):
        x, a = T.dmatrix("x"), np.ones(3)
        w, v, u = (
            theano.shared(a, borrow=True),
            theano.shared(np.ones(3)),
            theano.shared(np.ones(3)),
        )
        output = (x * w).sum() + (x * v).sum() + (x * u).sum()
        with synk.parallel(check=check) if is_parallel else contextlib.nullcontext():
            f = theano.function([x], output)
            everything.append(changed_in_place(f, np.ones((6, 3)), w, v, u, a))
    assert everything[0] == everything[1]


@pytest.mark.layouts(Layout(2))
def test_a_borrowed_array_that_another_thread_replaces_is_not_put_back(ranks, monkeypatch):
    x, arrays = T.dmatrix("x"), [np.ones(3) for _ in range(3)]
    variables = [theano.shared(each, borrow=True) for each in arrays]
    with synk.parallel():
        f = theano.function([x], (x * sum(variables)).sum())
    assert f(np.ones((6, 3))) == 54
    is_updated = ranks.session.registry.is_updated

    def set_meanwhile(variable):
        variables[1].set_value(np.zeros(3))
        return is_updated(variable)

    monkeypatch.setattr(ranks.session.changes, "_is_updated", set_meanwhile)
    ranks.session.changes.put_back()
    monkeypatch.undo()
    assert f(np.ones((6, 3))) == 36


@pytest.mark.layouts(Layout(2))
def test_a_variable_that_is_collected_while_it_is_sent(ranks, monkeypatch):
    x, w = T.dmatrix("x"), theano.shared(np.ones(3))
    with synk.parallel():
        f, g = theano.function([x], (x * w).sum()), theano.function([x], x.sum())
    assert f(np.ones((6, 3))) == g(np.ones((6, 3)))
    w.set_value(np.zeros(3))
    run = ranks.session.run

    def collect_and_run(*arguments):
        gc.collect()
        return run(*arguments)

    gc.disable()
    try:
        del f, w
        monkeypatch.setattr(ranks.session, "run", collect_and_run)
        assert g(np.ones((6, 3))) == 18
    finally:
        gc.enable()


@pytest.mark.layouts(Layout(2))
def test_buffers_that_a_script_has_too_are_followed(ranks):
    x, buffer = T.dmatrix("x"), bytearray(np.ones(3).tobytes())
    w = theano.shared(np.frombuffer(buffer), borrow=True)
    with synk.parallel(check=False):
        f = theano.function([x], (x * w).sum())
    for value in (1, 2, 5):
        buffer[:] = np.full(3, float(value)).tobytes()
        assert f(np.ones((6, 3))) == 18 * value


class TooLarge(Exception):
    """An exception of a script."""


class Limited(theano.gof.Op):
    """An operation of a script, which raises for large numbers."""

    __props__ = ("kind",)

    def __init__(self, kind):
        self.kind = kind

    def make_node(self, x):
        return theano.gof.Apply(self, [x], [x.type()])

    def perform(self, node, inputs, output_storage):
        if inputs[0] > 5:
            raise self.kind("too large")
        output_storage[0][0] = inputs[0]


@pytest.mark.parametrize("row", [0, -1])  # of the first rank, of the last
def test_errors_are_serial_theanos_and_no_update_is_applied(ranks, row):
    index, w = T.lvector("index"), theano.shared(np.arange(4.0), "w")
    calls, total = theano.shared(0, "calls"), theano.shared(0.0, "total")
    updates = [(calls, calls + 1), (total, total + w[index].sum())]
    with synk.parallel():
        f = theano.function([index], w[index], updates=updates)
    for _ in range(2):
        wrong = np.zeros(6, int)
        wrong[row] = 99
        with pytest.raises(IndexError, match="index 99 is out of bounds") as caught:
            f(wrong)
        cause = caught.value.__cause__
        assert type(cause) is synk.WorkerError and cause.remote_type == "IndexError"
        assert cause.rank == range(ranks.n)[row] and cause.host
        assert "IndexError" in cause.remote_traceback and "IndexError" in str(cause.__cause__)
        assert synk.gather(calls, nd_up=1).tolist() == [0] * ranks.n
        assert f([0, 1, 2, 3]).tolist() == [0, 1, 2, 3]
        assert synk.gather(calls, nd_up=1).tolist() == [1] * ranks.n
        calls.set_value(0)


@pytest.mark.layouts(Layout(2))
def test_the_exceptions_of_a_mode(ranks):
    x = T.dvector("x")
    with synk.parallel(check=False):
        f = theano.function([x], T.log(x).sum(), mode=NanGuardMode(True, True, True))
    with pytest.raises(AssertionError, match="NanGuardMode"):
        f([1, 2, 3, -1])


@pytest.mark.layouts(Layout(2), Layout(2, master=1))
def test_exceptions_have_the_class_that_serial_theano_raises(ranks):
    x = T.dvector("x")
    for kind in (TooLarge, FloatingPointError, MemoryError, ValueError):
        with synk.parallel(check=False):
            f = theano.function([x], Limited(kind)(x.max()))
        with pytest.raises(kind, match="too large") as caught:
            f([1, 2, 9, 3])
        assert type(caught.value) is kind and type(caught.value.__cause__) is synk.WorkerError
        assert f([1, 2]) == 2

    class Local(Exception):
        pass

    with synk.parallel(check=False):
        f = theano.function([x], T.opt.Assert("not positive")(x, T.all(x > 0)).sum())
        g = theano.function([x], Limited(Local)(x.max()))
    with pytest.raises(AssertionError, match="not positive"):
        f([1, 2, 3, -1])
    # A class that can't be pickled is known where the master's own part has raised.
    with pytest.raises((Local, synk.WorkerError), match="too large"):
        g([1, 2, 3, 9])
    assert g([1, 2]) == 2
    with pytest.raises(synk.WorkerError, match="IndexError"):
        synk.function([x], x[99])([1, 2, 3])


def after_an_error(how):
    """Return a variable's values around a call that raises, while the script has what it holds."""
    index, array = T.lvector("index"), np.zeros(4)
    w = theano.shared(array, "w", borrow=how == "borrowed from the script")
    mode = theano.Mode("py", "fast_run")  # in which the update is made in place
    f = theano.function([index], T.eye(4)[index], updates=[(w, w + 1)], mode=mode)
    good, values = [0, 1, 2, 3, 0, 1], []
    if how != "borrowed from the script":
        f(good)
    if how == "borrowed by the script":
        array = w.get_value(borrow=True)
        array[...] = 10
    elif how == "the cell":
        w.container.storage[0] = np.full(4, 10.0)
    for indices in (good, [0, 1, 2, 3, 0, 99], [99, 1, 2, 3, 0, 1], good):
        with contextlib.suppress(IndexError):
            f(indices)
        values.append(w.get_value().tolist())
    if how != "the cell":
        array[0] = 50  # serial Theano may have another array by now
        values.append((w.get_value(borrow=True) is array, array[1:].tolist()))
    f(good)
    return [*values, w.get_value().tolist()]


@pytest.mark.parametrize("how", ["borrowed from the script", "borrowed by the script", "the cell"])
def test_no_update_is_applied_to_what_the_script_has_too(ranks, how):
    expected = after_an_error(how)
    with synk.parallel(check=False):
        found = after_an_error(how)
    assert found == expected


@pytest.mark.layouts(Layout(2), Layout(2, master=1))
@pytest.mark.parametrize("inplace", [False, True])
def test_functions_that_were_compiled_before_the_block_tell_other_ranks(ranks, inplace):
    x, w, v = T.dmatrix("x"), theano.shared(np.ones(3), "w"), theano.shared(np.ones(3), "v")
    new = add_inplace(w, 1) if inplace else w + 1
    before = theano.function([], updates=[(w, new)], accept_inplace=True)
    own = synk.function([x], updates=[(v, v + x.sum())])
    own(np.ones((6, 3)))
    with synk.parallel():
        f = theano.function([x], T.dot(x, w))
    after = theano.function([], updates=[(w, w * 2)])
    for _ in range(5):
        f(np.ones((4, 3)))
    for step, value in ((before, 6), (after, 12)):
        step()
        for _ in range(2):
            assert f(np.ones((4, 3))).tolist() == [value] * 4
    printed = theano.printing.debugprint(pickle.loads(pickle.dumps(before)), file="str")
    assert "add" in printed.lower()
    own(np.ones((6, 3)))  # a rank's own values are left alone
    assert synk.gather(v, nd_up=1).tolist() == [[19] * 3] * 2


@pytest.mark.layouts(Layout(2))
def test_single_items_of_a_large_borrowed_array_are_seen_after_some_calls(ranks):
    x, array = T.dmatrix("x"), np.zeros((1000, 100))
    w = theano.shared(array, "w", borrow=True)
    with synk.parallel(check=False):
        f = theano.function([x], T.dot(x, w).sum(axis=1))
    assert f(np.ones((4, 1000))).tolist() == [0] * 4
    array += 1  # all parts: not told
    assert f(np.ones((4, 1000))).tolist() == [1e5] * 4
    for item in [(5, 7), (998, 3), (321, 99)]:
        array[item] += 1
        with pytest.warns(PortingWarning) as told:
            for _ in range(4):  # as many as there are parts
                found = f(np.ones((4, 1000)))
            warnings.warn("the last", PortingWarning, stacklevel=1)  # one is wanted
        assert found.tolist() == [array.sum()] * 4
        assert len(told) == 1 + (item == (5, 7))


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (5, 1, 9), (200, 3), (3, 400), (41, 41)])
def test_every_item_of_an_array_is_in_a_snapshot(shape, monkeypatch):
    monkeypatch.setattr(changes, "COMPARED_BYTES", 1000)
    array = np.zeros(shape)
    snapshot = changes.ArraySnapshot(array)
    turns = range(max(1, len(snapshot._parts)))
    assert not any(snapshot.differs_from(array) for _ in turns)
    for place in range(array.size):
        array.flat[place] = 1
        assert sum(snapshot.differs_from(array) for _ in turns) == 1
        array.flat[place] = 0
    monkeypatch.setattr(changes, "KEPT_BYTES", array.nbytes - 1)
    assert len(changes.ArraySnapshot(array)._parts) == 1
    assert all(len(before) <= 1000 for _, before in snapshot._parts)


@pytest.mark.layouts(Layout(2))
def test_copies_tell_the_ranks_what_they_update(ranks):
    x, w, other = T.dmatrix("x"), theano.shared(np.ones(4), "w"), theano.shared(np.zeros(4), "v")
    rows = np.arange(20.0).reshape(5, 4)
    with synk.parallel():
        f = theano.function([x], (x * w).sum(), updates=[(w, w + 1)])
        copies = [f.copy(), copy.copy(f), f.copy().copy(), f.copy(swap={w: other})]
        read = theano.function([x], (x * other).sum())
    for i, each in enumerate(copies[:3]):
        f(rows)
        each(rows)
        assert f(rows) == rows.sum() * (3 * i + 3)
    copies[3](rows)
    assert read(rows) == rows.sum()


@pytest.mark.layouts(Layout(2))
def test_the_rules_of_inputs_for_casts_hold(ranks):
    x, rows = T.fmatrix("x"), np.ones((3, 2))
    with synk.parallel():
        f = theano.function([theano.In(x, allow_downcast=True)], x.sum())
        g = theano.function([theano.In(x, strict=True)], x.sum())
    assert f(rows) == 6
    with pytest.raises(TypeError):
        g(rows)
