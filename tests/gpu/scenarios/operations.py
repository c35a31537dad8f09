"""Theano's own operations on the device, each in a process of its own, against the CPU.

What is expected comes from NumPy and SciPy: neither compiled code nor the optimizations that put an
operation on the device have a part in it. Only convolution and pooling, whose plain Python doesn't
work beside today's SciPy and NumPy, are compared with Theano's compiled code for the CPU.
"""

import functools
import os
import pickle
import signal

import numpy as np
import theano
import theano.tensor as T
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.signal.pool import pool_2d

import synkhronos as synk
from scenarios import Known, Skip, scenario
from scenarios.compare import close, equal, true

TOLERANCES = {"float16": 5e-3, "float32": 1e-4, "float64": 1e-10}
# Kind of device and operation -> why it can't be had there.
KNOWN = {
    ("opencl", "products_in_half_precision"): "PoCL's devices, for one, have no float16 arithmetic",
    ("opencl", "topk"): "Theano has no kernel for it",
    ("cuda", "topk"): "its kernel uses __ballot without a mask, which no GPU since 2017 has",
}
HALF = T.TensorType("float16", (False, False))
PLAIN = theano.Mode(linker="py", optimizer=None)


def operation(quick=False, reference=PLAIN):
    """Make a function that returns (values of inputs, outputs) a scenario that compares."""

    def wrap(graph):
        @scenario(limit=240)
        @functools.wraps(graph)
        def compare(run):
            if run.quick and not quick:
                raise Skip("--quick")
            status, detail = in_a_fork(compute, graph, reference, run.devices[0])
            if status == "ok":
                return detail
            if (run.kind, graph.__name__) in KNOWN:
                raise Known(f"{KNOWN[run.kind, graph.__name__]}: {detail}")
            raise AssertionError(detail)

        return compare

    return wrap


def in_a_fork(function, *arguments):
    """Call a function in a fork of this process; return "ok" and its result, or what went wrong."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            with os.fdopen(write, "wb") as answer:
                try:
                    message = "ok", function(*arguments)
                except Exception as error:
                    lines = [line for line in str(error).splitlines() if line.strip()]
                    message = "FAIL", f"{type(error).__name__}: {' '.join(lines[:3])}"
                answer.write(pickle.dumps(message))
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    if text:
        return pickle.loads(text)
    if os.WIFSIGNALED(status):
        return "FAIL", f"the process was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return "FAIL", f"the process ended with exit status {os.WEXITSTATUS(status)}"


def compute(graph, reference, device):
    """Compute the outputs on the CPU and on the device; return a line about it."""
    values, outputs = graph()
    arrays = [np.asarray(value, variable.dtype) for variable, value in values.items()]
    expected = theano.function(list(values), outputs, mode=reference)(*arrays)
    synk.fork(devices=[device])
    values, outputs = graph()  # once more, with shared variables on the device
    compiled = theano.function(list(values), outputs)
    largest = 0.0
    for number, (got, value) in enumerate(zip(compiled(*arrays), expected)):
        value = np.asarray(value, got.dtype)
        tolerance = TOLERANCES.get(value.dtype.name)
        largest = max(largest, close(got, value, f"output {number}", tolerance))
    operations = {type(node.op).__name__ for node in compiled.maker.fgraph.apply_nodes}
    on_device = sorted(
        name
        for name in operations
        if name.startswith(("Gpu", "GPUA")) and name not in ("GpuFromHost", "GpuContiguous")
    )
    where = ", ".join(on_device) if on_device or device == "cpu" else "computed on the CPU"
    return f"largest relative difference {largest:.1e}; {where}".rstrip("; ")


def positive(*shape, seed=0):
    """Return numbers from 0.5 to 1.5: sums of them are far from 0."""
    return np.random.RandomState(seed).uniform(0.5, 1.5, size=shape)


def signed(*shape, seed=0):
    """Return numbers from -2 to 2."""
    return np.random.RandomState(seed).uniform(-2, 2, size=shape)


@operation(quick=True)
def sums():
    """Over all axes, one, and two of three: reductions of many blocks."""
    x, y = T.fmatrix("x"), T.ftensor3("y")
    outputs = [
        x.sum(),
        x.sum(axis=0),
        x.sum(axis=1),
        x.mean(axis=0),
        y.sum(axis=1),
        y.sum(axis=(0, 2)),
    ]
    return {x: positive(1000, 257), y: positive(33, 65, 129)}, outputs


@operation()
def sums_of_few_and_many():
    """Over few long rows, and over many short ones."""
    x, y = T.fmatrix("x"), T.fmatrix("y")
    outputs = [x.sum(axis=0), x.sum(axis=1), y.sum(axis=0), y.sum(axis=1)]
    return {x: positive(3, 100003), y: positive(100003, 3)}, outputs


@operation()
def sums_of_other_dtypes():
    """Double precision and integers, which are summed in a wider type."""
    d, i, b = T.dmatrix("d"), T.imatrix("i"), T.bmatrix("b")
    outputs = [d.sum(axis=0), d.sum(), i.sum(axis=0), i.sum(), b.sum(axis=1)]
    integers = np.arange(99 * 101).reshape(99, 101)
    return {d: positive(99, 101), i: integers, b: integers % 5}, outputs


@operation()
def sums_in_half_precision():
    """Summed in single precision, and rounded once."""
    x = HALF("x")
    return {x: positive(99, 101)}, [x.sum(axis=0), x.mean(axis=1)]


@operation()
def products():
    x = T.fmatrix("x")
    return {x: 1 + signed(257, 100) / 100}, [x.prod(axis=0), x.prod(axis=1), x.prod()]


@operation()
def maxima_and_minima():
    """Over rows, columns and all, of numbers and integers."""
    x, i = T.fmatrix("x"), T.imatrix("i")
    outputs = [x.max(axis=0), x.min(axis=1), x.max(), i.max(axis=1), i.min()]
    return {x: signed(1000, 257), i: 100 * signed(300, 7)}, outputs


@operation()
def any_and_all():
    x = T.fmatrix("x")
    value = signed(50, 40)
    return {x: value}, [T.any(x > 1.9, axis=0), T.all(x < 1.9, axis=1), T.any(x > 5)]


@operation()
def variance():
    """What a batch normalisation reduces."""
    x = T.ftensor4("x")
    return {x: signed(16, 8, 9, 9)}, [x.var(axis=(0, 2, 3)), x.std(axis=1)]


@operation(quick=True)
def maximum_and_minimum():
    """Element by element: their kernel names nan, which not every compiler has."""
    x, y = T.fmatrix("x"), T.fmatrix("y")
    values = signed(200, 33), signed(200, 33, seed=1)
    return dict(zip((x, y), values)), [T.maximum(x, y), T.minimum(x, 0.5), T.maximum(x, 0)]


@operation()
def rectifiers():
    """relu and its like, and the gradient."""
    x = T.fmatrix("x")
    outputs = [T.nnet.relu(x), T.nnet.relu(x, 0.1), T.nnet.elu(x), T.switch(x > 0, x, 0)]
    return {x: signed(200, 33)}, [*outputs, T.grad(T.nnet.relu(x).sum(), x)]


@operation()
def elementwise_functions():
    x = T.fmatrix("x")
    return {x: positive(100, 70)}, [
        *(T.exp(x), T.log(x), T.sqrt(x), T.tanh(x), T.nnet.sigmoid(x), T.nnet.softplus(x)),
        *(T.erf(x), x**2, x**2.5, T.floor(3 * x), T.clip(x, 0.8, 1.2), T.isnan(x - x), -x / 3),
    ]


@operation()
def integers():
    """Arithmetic of mixed integers, with division and remainder."""
    i, j = T.imatrix("i"), T.lvector("j")
    numbers = np.arange(1, 61).reshape(12, 5)
    return {i: numbers, j: [1, 2, 3, 4, 5]}, [
        i + j,
        i // j,
        i % j,
        T.eq(i % 2, 0),
        T.cast(i, "int8"),
    ]


@operation()
def half_precision():
    x = HALF("x")
    outputs = [x + x, T.exp(x), T.cast(x, "float32") * 2, x.sum(), T.nnet.softmax(x), x.max(axis=0)]
    return {x: positive(40, 30)}, outputs


@operation(quick=True)
def softmax():
    """With its gradient, over rows longer than a block of threads."""
    x = T.fmatrix("x")
    y = T.nnet.softmax(x)
    return {x: signed(100, 1000)}, [y, T.grad((y**2).sum(), x), T.nnet.logsoftmax(x)]


@operation()
def softmax_of_few_and_many():
    """Many short rows with a bias, and two of 70001 columns."""
    x, y = T.fmatrix("x"), T.fmatrix("y")
    bias = T.fvector("bias")
    outputs = [T.nnet.softmax(x + bias), T.nnet.softmax(y)]
    return {x: signed(4097, 3), bias: [0, 1, -1], y: signed(2, 70001)}, outputs


@operation()
def crossentropy():
    x, labels = T.fmatrix("x"), T.ivector("labels")
    loss = T.nnet.categorical_crossentropy(T.nnet.softmax(x), labels)
    values = {x: signed(128, 10), labels: np.arange(128) % 10}
    return values, [loss, T.grad(loss.mean(), x)]


@operation(quick=True)
def argmax():
    x = T.fmatrix("x")
    largest, where = T.max_and_argmax(x, axis=1)
    return {x: signed(200, 130)}, [x.argmax(axis=1), x.argmax(axis=0), largest, where]


@operation()
def cumulative_sum():
    """Along each axis and flat, over several blocks."""
    x = T.fmatrix("x")
    return {x: positive(70, 3000)}, [T.cumsum(x, axis=0), T.cumsum(x, axis=1), T.cumsum(x)]


@scenario(limit=240)
def topk(run):
    """The three largest of each row, which come in any order."""
    if run.kind == "cpu":
        raise Skip("Theano's code for the CPU fails with today's NumPy")
    status, detail = in_a_fork(largest_three, run.devices[0])
    if status != "ok" and (run.kind, "topk") in KNOWN:
        raise Known(f"{KNOWN[run.kind, 'topk']}: {detail}")
    true(status == "ok", detail)


def largest_three(device):
    """Compare the three largest with NumPy's."""
    value = signed(50, 40).astype("float32")
    synk.fork(devices=[device])
    x = T.fmatrix("x")
    found = theano.function([x], T.topk(x, 3, axis=1, sorted=False))(value)
    equal(np.sort(np.asarray(found)), np.sort(value)[:, -3:], "the three largest")


@operation()
def products_of_matrices():
    """Of matrices, transposed ones and vectors: dot, gemm, gemv, ger."""
    x, y, v = T.fmatrix("x"), T.fmatrix("y"), T.fvector("v")
    outputs = [T.dot(x, y), T.dot(x.T, x), T.dot(x, v), T.dot(x, y) * 2 + x[:, :50], T.outer(v, v)]
    return {x: signed(130, 70), y: signed(70, 50, seed=1), v: signed(70)}, outputs


@operation()
def products_in_double_precision():
    x, y = T.dmatrix("x"), T.dmatrix("y")
    return {x: signed(130, 70), y: signed(70, 50, seed=1)}, [T.dot(x, y), T.dot(y.T, x.T)]


@operation()
def products_in_half_precision():
    """Of matrices of some size, transposed ones, sums of products, and vectors."""
    x, y, v = HALF("x"), HALF("y"), T.TensorType("float16", (False,))("v")
    outputs = [T.dot(x, y), T.dot(x.T, x), T.dot(x, y) * 2 + x[:, :50], T.dot(x, v), T.outer(v, v)]
    return {x: positive(130, 70), y: positive(70, 50, seed=1), v: positive(70)}, outputs


@operation()
def products_of_batches():
    x, y = T.ftensor3("x"), T.ftensor3("y")
    return {x: signed(9, 20, 30), y: signed(9, 30, 40, seed=1)}, [T.batched_dot(x, y)]


@operation(reference=None)
def convolution():
    x, w = T.ftensor4("x"), T.ftensor4("w")
    conv = T.nnet.conv2d
    outputs = [conv(x, w), conv(x, w, border_mode="half"), conv(x, w, subsample=(2, 2))]
    return {x: signed(4, 3, 17, 15), w: signed(6, 3, 3, 3, seed=1)}, outputs


@operation(reference=None)
def gradients_of_convolution():
    x, w = T.ftensor4("x"), T.ftensor4("w")
    loss = T.sqr(T.nnet.conv2d(x, w, border_mode="half")).sum()
    return {x: signed(4, 3, 17, 15), w: signed(6, 3, 3, 3, seed=1)}, T.grad(loss, [x, w])


@operation(reference=None)
def pooling():
    """Largest and average, overlapping too, with gradients."""
    x = T.ftensor4("x")
    largest = pool_2d(x, (2, 2), ignore_border=True)
    average = pool_2d(x, (3, 3), stride=(2, 2), ignore_border=True, mode="average_exc_pad")
    outputs = [largest, average, T.grad(T.sqr(largest).sum(), x), T.grad(T.sqr(average).sum(), x)]
    return {x: signed(3, 4, 18, 16)}, outputs


@operation()
def indexing():
    """Row numbers, slices, pairs of indices; the gradient of a look-up; a store."""
    x, rows = T.fmatrix("x"), T.lvector("rows")
    loss = T.sqr(x[rows]).sum()
    outputs = [
        x[rows],
        x[2:40:3],
        x[::-1],
        x[rows, rows],
        T.grad(loss, x),
        T.set_subtensor(x[3:5], 1),
    ]
    return {x: signed(50, 40), rows: [3, 0, 39, 3, 17]}, outputs


@operation()
def shapes():
    """Joined, stacked, reshaped, flattened, repeated and transposed."""
    x, y = T.fmatrix("x"), T.fmatrix("y")
    outputs = [
        T.concatenate([x, y]),
        T.stack([x, x]),
        x.reshape((5, -1)),
        x.T.flatten(),
        T.alloc(y, 3, 10, 7),
    ]
    return {x: signed(10, 7), y: signed(10, 7, seed=1)}, [
        *outputs,
        x.dimshuffle(1, "x", 0) + y.dimshuffle(1, "x", 0),
    ]


@operation()
def random_uniform():
    """The same numbers on every device."""
    stream = MRG_RandomStreams(3)
    draws = (
        stream.uniform((50, 40), dtype="float32"),
        stream.binomial((60,), p=0.3, dtype="float32"),
    )
    return {}, list(draws)


@operation()
def loop():
    x = T.fmatrix("x")
    last, _ = theano.scan(
        lambda row, state: T.tanh(row + state), x, outputs_info=T.zeros_like(x[0])
    )
    return {x: signed(12, 9)}, [last]
