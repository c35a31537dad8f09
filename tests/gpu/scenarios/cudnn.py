"""cuDNN's operations, each in a process of its own, against Theano's compiled code for the CPU.

Half precision is compared with single precision of the same numbers.
"""

import functools
import os

import numpy as np
import theano
import theano.tensor as T
from theano.tensor.nnet import bn
from theano.tensor.signal.pool import pool_2d, pool_3d

import synkhronos as synk
from scenarios import Skip, scenario
from scenarios.compare import close, relative, true
from scenarios.operations import TOLERANCES, in_a_fork, signed
from synkhronos._host.theano import cudnn

CONVOLUTIONS = "GpuDnnConv", "GpuDnnConvGradW", "GpuDnnConvGradI"
TF32_ERROR = 1e-2  # at most, of sums of products that keep 10 bits


def of_cudnn(*names, dtypes=("float32", "float64"), quick=False):
    """Make a function that returns (values of inputs, outputs) for a dtype a scenario.

    The device must compute with operations of these names.
    """

    def wrap(graph):
        @scenario(limit=400)
        @functools.wraps(graph)
        def compare(run):
            version = need_cudnn(run)
            if run.quick and not quick:
                raise Skip("--quick")
            details = []
            for dtype in dtypes:
                status, detail = in_a_fork(largest_difference, graph, dtype, names, run.devices[0])
                true(status == "ok", f"{dtype}: {detail}")
                details.append(f"{dtype} {detail:.1e}")
            return f"cuDNN {version}; largest relative differences: {', '.join(details)}"

        return compare

    return wrap


def need_cudnn(run):
    """Return the version of the cuDNN that the loader finds; skip the scenario without one."""
    if run.kind != "cuda":
        raise Skip("only CUDA devices have cuDNN")
    status, found = in_a_fork(cudnn.find)
    true(status == "ok", found)
    if found is None:
        raise Skip("the loader finds no libcudnn.so")
    if "dnn.enabled=False" in os.environ["THEANO_FLAGS"]:
        raise Skip("the flag dnn.enabled is False")
    return cudnn.shown(found.version)


def largest_difference(graph, dtype, names, device):
    """Compute the outputs on the CPU and on the device; return their largest difference."""
    of_reference = "float32" if dtype == "float16" else dtype
    values, outputs = graph(of_reference)
    arrays = [np.asarray(value, dtype) for value in values.values()]
    reference = theano.function(list(values), outputs)
    expected = reference(*[array.astype(of_reference) for array in arrays])
    synk.fork(devices=[device])
    values, outputs = graph(dtype)
    compiled = theano.function(list(values), outputs)
    need_operations(compiled, names)
    return max(
        close(got, np.asarray(value, got.dtype), f"output {number}", TOLERANCES[dtype])
        for number, (got, value) in enumerate(zip(compiled(*arrays), expected))
    )


def need_operations(function, names):
    """Raise unless operations of these names are in a compiled function."""
    there = {type(node.op).__name__ for node in function.maker.fgraph.apply_nodes}
    true(there.issuperset(names), f"{set(names) - there} are not among {sorted(there)}")


def array(name, n_dimensions, dtype):
    return T.TensorType(dtype, (False,) * n_dimensions)(name)


def convolution_and_gradients(dtype, image, filters, **options):
    """Return inputs and outputs of a convolution in 2 or 3 dimensions, and of its gradients."""
    n_dimensions = len(image)
    x, w, top = (array(name, n_dimensions, dtype) for name in "xwt")
    convolve = T.nnet.conv2d if n_dimensions == 4 else T.nnet.conv3d
    y = convolve(x, w, **options)
    grads = T.grad(None, [x, w], known_grads={y: top})
    ones = np.zeros(image, "float32"), np.zeros(filters, "float32")
    shape = y.shape.eval({x: ones[0].astype(dtype), w: ones[1].astype(dtype)})
    values = {x: signed(*image), w: signed(*filters, seed=1), top: signed(*shape, seed=2) / 8}
    return values, [y, *grads]


ALL = ("float32", "float64", "float16")


@scenario(limit=400)
def all_of_a_network(run):
    """The CNN of ``synkhronos bench training``: no convolution is a matrix product."""
    need_cudnn(run)
    status, detail = in_a_fork(operations_of_a_network, run.devices[0])
    true(status == "ok", detail)
    return detail


def operations_of_a_network(device):
    """Compile the training function, call it once, and return the names of its operations."""
    from synkhronos.tools.bench.networks import Cnn

    synk.fork(devices=[device])
    network = Cnn()
    grads = T.grad(network.loss, network.params)
    updates = [(p, p - 0.01 * g) for p, g in zip(network.params, grads)]
    train = theano.function([network.x, network.y], network.loss, updates=updates)
    need_operations(train, (*CONVOLUTIONS, "GpuDnnPool", "GpuDnnPoolGrad"))
    names = sorted({type(node.op).__name__ for node in train.maker.fgraph.apply_nodes})
    true(not any("Corr" in name for name in names), f"there are matrix products: {names}")
    true(np.isfinite(train(*network.rows(64))), "the loss is not finite")
    return ", ".join(name for name in names if "Dnn" in name)


@scenario(limit=400)
def tf32_is_off_unless_asked_for(run):
    """float32 convolutions differ from float64 by rounding, and with TF32 by more."""
    need_cudnn(run)
    for setting, most in (("0", 1e-5), ("1", TF32_ERROR)):
        status, error = in_a_fork(errors_of_convolutions, setting, run.devices[0])
        true(status == "ok", error)
        run.figures[f"largest relative error, SYNKHRONOS_TF32={setting}"] = f"{error:.1e}"
        true(error <= most, f"with SYNKHRONOS_TF32={setting} the error is {error:.1e}")


def errors_of_convolutions(setting, device):
    """Return the largest error of a convolution and its gradients in float32."""
    os.environ["SYNKHRONOS_TF32"] = setting
    shapes = (16, 64, 16, 16), (64, 64, 3, 3)
    values, outputs = convolution_and_gradients("float64", *shapes, border_mode="half")
    arrays = [value.astype("float32") for value in values.values()]
    reference = theano.function(list(values), outputs)
    expected = reference(*[each.astype("float64") for each in arrays])
    synk.fork(devices=[device])
    values, outputs = convolution_and_gradients("float32", *shapes, border_mode="half")
    compiled = theano.function(list(values), outputs)
    need_operations(compiled, CONVOLUTIONS)
    return max(relative(got, value) for got, value in zip(compiled(*arrays), expected))


@of_cudnn("GpuDnnBatchNorm", "GpuDnnBatchNormGrad", "GpuDnnBatchNormInference")
def batch_normalization(dtype):
    """Of channels and of activations: training, gradients, and with given statistics."""
    x, top, scale, shift = (array(name, 4, dtype) for name in ("x", "top", "scale", "shift"))
    outputs = []
    for axes in ("spatial", "per-activation"):
        once = (True, False, axes == "spatial", axes == "spatial")
        part = tuple(slice(0, 1) if each else slice(None) for each in once)
        one, two = (T.patternbroadcast(each[part], once) for each in (scale, shift))
        y, mean, inverse = bn.batch_normalization_train(x, one, two, axes)
        grads = T.grad(None, [x, scale, shift], known_grads={y: top})
        given = bn.batch_normalization_test(x, one, two, one, two, axes)
        outputs += [y, mean, inverse, *grads, given]
    positive = 1 + signed(1, 5, 7, 6, seed=1) / 4
    values = {x: signed(16, 5, 7, 6), top: signed(16, 5, 7, 6, seed=2)}
    return {**values, scale: positive, shift: 1 + positive}, outputs


@of_cudnn(*CONVOLUTIONS, dtypes=ALL, quick=True)
def convolution_valid(dtype):
    return convolution_and_gradients(dtype, (8, 3, 28, 27), (16, 3, 5, 5))


@of_cudnn(*CONVOLUTIONS, dtypes=ALL)
def convolution_half(dtype):
    return convolution_and_gradients(dtype, (8, 32, 15, 17), (24, 32, 3, 3), border_mode="half")


@of_cudnn(*CONVOLUTIONS)
def convolution_with_strides(dtype):
    options = {"border_mode": (2, 1), "subsample": (2, 3)}
    return convolution_and_gradients(dtype, (4, 3, 23, 31), (8, 3, 5, 3), **options)


@of_cudnn(*CONVOLUTIONS)
def convolution_full_unflipped(dtype):
    options = {"border_mode": "full", "filter_flip": False}
    return convolution_and_gradients(dtype, (4, 3, 9, 11), (8, 3, 3, 5), **options)


@of_cudnn(*CONVOLUTIONS)
def convolution_with_dilation(dtype):
    options = {"border_mode": "half", "filter_dilation": (2, 3)}
    return convolution_and_gradients(dtype, (4, 6, 19, 21), (8, 6, 3, 3), **options)


@of_cudnn(*CONVOLUTIONS)
def convolution_in_groups(dtype):
    options = {"border_mode": "half", "num_groups": 3}
    return convolution_and_gradients(dtype, (4, 6, 19, 21), (9, 2, 3, 3), **options)


@of_cudnn(*CONVOLUTIONS)
def convolution_of_volumes(dtype):
    options = {"border_mode": "half", "subsample": (1, 2, 1)}
    return convolution_and_gradients(dtype, (2, 4, 9, 11, 10), (6, 4, 3, 3, 3), **options)


@of_cudnn("GpuDnnPool", "GpuDnnPoolGrad", quick=True)
def pooling_of_images(dtype):
    """Largest and averages, overlapping and with padding."""
    x = array("x", 4, dtype)
    outputs = [
        pool_2d(x, (2, 2), ignore_border=True),
        pool_2d(x, (3, 3), stride=(2, 2), pad=(1, 1), ignore_border=True, mode="average_inc_pad"),
        pool_2d(x, (3, 2), stride=(2, 2), ignore_border=True, mode="average_exc_pad"),
    ]
    grads = [T.grad(T.sqr(each).sum(), x) for each in outputs]
    return {x: signed(5, 4, 18, 16)}, outputs + grads


@of_cudnn("GpuDnnPool", "GpuDnnPoolGrad")
def pooling_of_volumes(dtype):
    x = array("x", 5, dtype)
    y = pool_3d(x, (2, 2, 2), ignore_border=True)
    return {x: signed(3, 4, 8, 6, 10)}, [y, T.grad(T.sqr(y).sum(), x)]


@of_cudnn("GpuDnnSoftmax", "GpuDnnSoftmaxGrad")
def softmax(dtype):
    """With its gradient and its logarithm."""
    x = array("x", 2, dtype)
    y = T.nnet.softmax(x)
    return {x: signed(100, 1000)}, [y, T.grad((y**2).sum(), x), T.nnet.logsoftmax(x)]


@of_cudnn("GpuDnnReduction")
def reductions(dtype):
    """Sums, squares, largest numbers and where they are."""
    x, y = array("x", 2, dtype), array("y", 4, dtype)
    outputs = [x.sum(), x.sum(axis=0), T.sqr(x).sum(axis=1), x.max(axis=1), x.argmax(axis=0)]
    values = {x: 1 + signed(300, 257) / 4, y: 1 + signed(9, 8, 7, 5) / 4}
    return values, [*outputs, y.sum(axis=(0, 2, 3)), y.mean(axis=(2, 3))]
