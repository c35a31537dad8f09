"""Compile each of Theano's operations of cuDNN, for a folder with its headers; run as a script.

It prints a line of JSON for each: its name, what the compiler says, and the symbols of cuDNN.
There need be no GPU: the context is a stand-in, and what is compiled is not loaded.
"""

import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import theano
from theano.gof import Constant, FunctionGraph
from theano.gof.cc import CLinker
from theano.gof.cmodule import std_include_dirs
from theano.gof.graph import inputs as inputs_of
from theano.gof.graph import io_toposort
from theano.gpuarray import dnn
from theano.gpuarray import type as device_types
from theano.gpuarray.type import GpuArrayType

from synkhronos._host.theano import cudnn


class Context:
    """Stands in for the context of a GPU of compute capability 9.0."""

    kind, bin_id, cudnn_handle_param = b"cuda", b"compute_90", None


def pretend(folder):
    """Let Theano use the cuDNN in a folder, of which only the headers are needed."""
    include = folder / "include"
    found = cudnn.CuDNN(cudnn.header_version(include), str(folder / "lib"), str(include))
    device_types._context_reg[None] = Context()
    device_types.GpuContextType.filter = lambda self, data, **kwargs: data
    dnn.dnn_present.avail, dnn.version.v = True, found.version
    cudnn._enabled[:] = [cudnn.Facts(found.version, False, False)]
    cudnn._change_theano(found)
    return found.version


def array(n_dimensions, dtype="float32"):
    return GpuArrayType(dtype, (False,) * n_dimensions)()


def convolutions(n, dtype, **more):
    """Return a convolution in n dimensions and its two gradients."""
    x, w, y = (array(n + 2, dtype) for _ in range(3))
    suffix = "3d" if n == 3 else ""
    named = (
        getattr(dnn, name + suffix) for name in ("dnn_conv", "dnn_gradweight", "dnn_gradinput")
    )
    forward, gradweight, gradinput = named
    return [
        forward(x, w, **more),
        gradweight(x, y, (4, 3) + (3,) * n, **more),
        gradinput(w, y, (2, 3) + (9,) * n, **more),
    ]


def outputs():
    """Return variables that all operations together compute, but for recurrent networks.

    GpuDnnDropoutOp is not among them: its code names what Theano has nowhere.
    """
    x, s, theta = array(4), array(4), array(3)
    transformed = dnn.dnn_spatialtf(x, theta)
    return [
        *convolutions(2, "float32", num_groups=2, dilation=(2, 2)),
        *convolutions(3, "float64", subsample=(2, 2, 2)),
        *convolutions(2, "float16", border_mode="half", algo="time_once"),
        dnn.dnn_pool(x, (2, 2)),
        dnn.GpuDnnPoolGrad("average_exc_pad")(x, x, x, (2, 2), (2, 2), (0, 0)),
        dnn.dnn_pool(array(5, "float16"), (2, 2, 2)),
        dnn.GpuDnnSoftmax("accurate", "channel")(x),
        dnn.GpuDnnSoftmaxGrad("log", "instance")(x, x),
        dnn.GpuDnnReduction("norm2", (0, 2), "float32", "float32", False)(x),
        *dnn.GpuDnnReduction("maximum", (1,), "float64", "float64", True)(array(3, "float64")),
        *dnn.GpuDnnBatchNorm("spatial", running_averages=True)(x, s, s, 1e-4, 0.1, s, s),
        dnn.GpuDnnBatchNormInference("per-activation")(x, s, s, s, s),
        *dnn.GpuDnnBatchNormGrad("spatial")(x, x, s, s, s),
        transformed,
        *theano.grad(None, [x, theta], known_grads={transformed: x}),
    ]


def recurrent():
    """Return what an LSTM and its gradients compute, with its descriptor and parameters."""
    x, h, c, w = array(3), array(3), array(3), array(1)
    descriptor, dropout = dnn.rnndesc_type(), dnn.dropoutdesc_type
    lstm = dnn.GpuDnnRNNOp("lstm", "unidirectional")
    reserve, y, hy, cy = lstm(descriptor, w, x, h, c)
    made = dnn._RNNDescriptor(None)
    none = dropout.make_constant(None).data
    return [
        *(reserve, y, hy, cy),
        *theano.grad((y.sum() + cy.sum()).transfer("cpu"), [w, x, h, c]),
        made(8, 1, none, "linear", "unidirectional", "lstm", "float32"),
        dnn._RNNParamSize(None)(None, [2, 3], 0),
        *dnn._RNNSplitParams("gru")(w, None, 0, [2, 3], 0),
        *dnn._DropoutDescriptor(None)(0.0, 4242, None),
    ]


def operations(variables):
    """Return the nodes of cuDNN that compute variables, one for each operation and its types."""
    found = {}
    for node in io_toposort(inputs_of(variables), variables):
        if isinstance(node.op, (dnn.DnnBase, dnn.GpuDnnConvDesc)):
            types = tuple(str(each.type) for each in node.inputs)
            found.setdefault((type(node.op).__name__, types), node)
    return list(found.values())


def compiled(node, folder):
    """Compile the C++ code of one node, without optimization; return what is to be printed."""
    variables = [each for each in dict.fromkeys(node.inputs) if not isinstance(each, Constant)]
    linker = CLinker().accept(FunctionGraph(variables, node.outputs, clone=True))
    code = linker.get_dynamic_module().code()
    flags = [each for each in linker.compile_args() if not each.startswith(("-O", "-march"))]
    paths = [f"-I{each}" for each in [*std_include_dirs(), *linker.header_dirs()] if each]
    target = Path(folder, f"{id(node)}.o")
    command = ["g++", "-O0", "-c", "-x", "c++", "-", "-o", str(target), *flags, *paths]
    child = subprocess.run(command, input=code, text=True, capture_output=True)
    symbols = []
    if child.returncode == 0:
        listed = subprocess.run(["nm", "-u", target], text=True, capture_output=True, check=True)
        symbols = [line.split()[-1] for line in listed.stdout.splitlines()]
    return {
        "name": type(node.op).__name__,
        "said": child.stderr,
        "failed": child.returncode != 0,
        "asks_at_once": "maxfree = c_get_largest" in code.split("choose_algo")[0],
        "symbols": [each for each in symbols if each.startswith("cudnn")],
    }


def main(folder):
    version = pretend(folder)
    variables = outputs() + (recurrent() if version < 90000 else [])
    nodes = operations(variables)
    with tempfile.TemporaryDirectory() as objects, ThreadPoolExecutor(2) as pool:
        for result in pool.map(lambda node: compiled(node, objects), nodes):
            print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
