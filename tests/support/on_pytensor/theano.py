"""Theano's names, served from PyTensor, so that one suite tests both hosts. For tests alone.

With PyTensor as the host, `support.host_library` puts this folder on the path of the tests and of
the processes that they start. What PyTensor lacks skips the test that uses it, with a sentence.
"""

import sys
import types
import warnings

import numpy as np
import pytensor
import pytensor.compile.debug.nanguardmode
import pytensor.compile.ops
import pytensor.printing
import pytensor.sparse
import pytensor.tensor as pt
from pytensor import scalar as ps
from pytensor.compile import executor, maker, mode
from pytensor.compile.builders import OpFromGraph  # noqa: F401
from pytensor.gradient import grad, pushforward
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import Op
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors
from pytensor.link.c.type import generic
from pytensor.link.vm import VMLinker
from pytensor.raise_op import Assert
from pytensor.scan.op import Scan
from pytensor.scan.utils import until
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.random.type import random_generator_type
from pytensor.tensor.special import log_softmax, softmax

config = pytensor.config
change_flags = config.change_flags
function = pytensor.function
Mode, Out = pytensor.Mode, pytensor.Out
__version__ = pytensor.__version__


def __getattr__(name):
    return getattr(pytensor, name)


def _skip(what):
    import pytest

    pytest.skip(f"PyTensor has no {what}")


class In(pytensor.In):
    """PyTensor refuses inputs with values, so a test that makes one is skipped."""

    def __init__(self, variable, *args, value=None, **kwargs):
        if value is not None:
            _skip("inputs with values")
        super().__init__(variable, *args, value=value, **kwargs)


def _module(name, **names):
    """Serve a module by its name in Theano, with names that another one may have."""
    served = types.ModuleType(f"theano.{name}")
    inner = names.pop("inner", None)
    if inner is not None:
        served.__getattr__ = lambda each: getattr(inner, each)
    vars(served).update(names)
    sys.modules[f"theano.{name}"] = served
    folder, _, last = name.rpartition(".")
    (vars(sys.modules[f"theano.{folder}"]) if folder else globals())[last] = served
    return served


def _shapes(broadcastable):
    return tuple(1 if each else None for each in broadcastable)


def shared(value, *args, broadcastable=None, **kwargs):
    """Make a shared variable; PyTensor says `shape` where Theano says `broadcastable`."""
    if broadcastable is not None:
        kwargs["shape"] = _shapes(broadcastable)
    if isinstance(value, np.random.RandomState):
        value = np.random.Generator(np.random.PCG64(value.randint(2**31)))
    return pytensor.shared(value, *args, **kwargs)


def scan(fn, sequences=None, outputs_info=None, *args, **kwargs):
    """Return outputs and updates, of which PyTensor warns that it will return the former only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return pytensor.scan(fn, sequences, outputs_info, *args, **kwargs)


def clone(output, replace=None, share_inputs=True, **kwargs):
    return clone_replace(output, replace, copy_inputs_over=share_inputs, **kwargs)


class Unbroadcast(Op):
    """Forget that axes have length 1: PyTensor refuses such updates of variables of any length."""

    __props__ = ("axes",)
    view_map = {0: [0]}  # noqa: RUF012

    def __init__(self, axes):
        self.axes = axes

    def make_node(self, x):
        shape = [None if axis in self.axes else n for axis, n in enumerate(x.type.shape)]
        return Apply(self, [x], [pt.TensorType(x.dtype, shape)()])

    def perform(self, node, inputs, outputs):
        outputs[0][0] = inputs[0]

    def infer_shape(self, node, shapes):
        return shapes


class RandomStreams:
    """Streams of NumPy's generators, with the arguments of Theano's."""

    def __init__(self, seed=None):
        self.default_instance_seed, self.state_updates = seed, []
        self.seeds = np.random.SeedSequence(seed)

    def updates(self):
        return list(self.state_updates)

    def _draw(self, distribution, size, ndim, dtype, *parameters):
        if isinstance(size, list):
            size = tuple(size)
        (seed,) = self.seeds.spawn(1)
        rng = pytensor.shared(np.random.default_rng(seed))
        after, drawn = distribution(*parameters, size=size, rng=rng, return_next_rng=True)
        rng.default_update = after
        self.state_updates.append((rng, after))
        drawn = drawn if dtype is None else drawn.astype(dtype)
        drawn.rng, drawn.update = rng, (rng, after)
        return drawn

    def uniform(self, size=None, low=0.0, high=1.0, ndim=None, dtype=None):
        return self._draw(pt.random.uniform, size, ndim, dtype, low, high)

    def normal(self, size=None, avg=0.0, std=1.0, ndim=None, dtype=None):
        return self._draw(pt.random.normal, size, ndim, dtype, avg, std)

    def binomial(self, size=None, n=1, p=0.5, ndim=None, dtype="int64"):
        return self._draw(pt.random.binomial, size, ndim, dtype, n, p)


class MRG_RandomStreams:
    def __init__(self, *args, **kwargs):
        _skip("MRG_RandomStreams")


def _categorical_crossentropy(predicted, target):
    if target.ndim == 1:
        return -pt.log(predicted)[pt.arange(target.shape[0]), target]
    return -(target * pt.log(predicted)).sum(axis=-1)


def _binary_crossentropy(output, target):
    return -(target * pt.log(output) + (1.0 - target) * pt.log(1.0 - output))


def _in_place(operation, *inputs):
    return Elemwise(operation, inplace_pattern={0: 0})(*inputs)


def _typed(make):
    """Take the dtype in its place in Theano, where PyTensor wants it by name."""
    return lambda name=None, dtype=None: make(name, dtype=dtype)


_TYPED = ["scalar", "vector", "row", "col", "matrix", "tensor3", "tensor4"]

_module(
    "tensor",
    inner=pt,
    **{name: _typed(getattr(pt, name)) for name in _TYPED},
    grad=grad,
    Rop=pushforward,
    unbroadcast=lambda x, *axes: Unbroadcast(axes)(x),
    addbroadcast=lambda x, *axes: pt.specify_broadcastable(x, *axes),
    split=lambda x, sizes, n, axis=0: pt.split(x, sizes, n_splits=n, axis=axis),
    batched_dot=lambda a, b: pt.matmul(a, b),
)
_module("tensor.shared_randomstreams", RandomStreams=RandomStreams)
_module("tensor.raw_random", random_state_type=lambda: random_generator_type())
_module("tensor.opt", Assert=Assert)
_module(
    "tensor.inplace",
    exp_inplace=lambda x: _in_place(ps.exp, x),
    add_inplace=lambda x, y: _in_place(ps.add, x, y),
)
_module(
    "tensor.nnet",
    softmax=lambda x: softmax(x, axis=-1),
    logsoftmax=lambda x: log_softmax(x, axis=-1),
    sigmoid=pt.sigmoid,
    relu=lambda x: pt.switch(x > 0, x, 0),
    softplus=pt.softplus,
    categorical_crossentropy=_categorical_crossentropy,
    binary_crossentropy=_binary_crossentropy,
    conv2d=lambda *args, **kwargs: _skip("conv2d"),
)
_module(
    "tensor.nnet.bn",
    batch_normalization_train=lambda *args, **kwargs: _skip("theano.tensor.nnet.bn"),
)
_module("tensor.nnet.conv", conv2d=lambda *args, **kwargs: _skip("conv2d"))
_module("tensor.nnet.abstract_conv", get_conv_output_shape=lambda *args: _skip("conv2d"))
_module("tensor.signal")
_module("tensor.signal.pool", pool_2d=lambda *args, **kwargs: _skip("pool_2d"))
_module("tensor.elemwise", inner=pt.elemwise)
_module("tensor.extra_ops", inner=pt.extra_ops)
_module("sandbox")
_module("sandbox.rng_mrg", MRG_RandomStreams=MRG_RandomStreams, mrg_uniform=None)
_module("sparse", inner=pytensor.sparse)
_module("scalar", inner=ps)
_module("ifelse", ifelse=pytensor.ifelse)
_module("printing", inner=pytensor.printing)
_module("gradient", inner=pytensor.gradient)
_module("configparser", change_flags=change_flags)
_module("compile", inner=pytensor.compile)
_module("compile.mode", inner=mode)
_module("compile.ops", inner=pytensor.compile.ops)
_module("compile.pfunc", pfunc=lambda *args, **kwargs: _skip("pfunc"))
_module("compile.nanguardmode", inner=pytensor.compile.debug.nanguardmode)
_module("compile.function_module", Function=executor.Function, FunctionMaker=maker.FunctionMaker)
_module("gof", generic=generic, Op=Op, Apply=Apply, Constant=Constant, Variable=Variable)
_module("gof.op", Op=Op)
_module("gof.graph", ancestors=lambda variables: list(ancestors(variables)))
_module("scan_module")
_module("scan_module.scan_op", Scan=Scan)
_module("scan_module.scan_utils", until=until)
_module("gof.vm", VM_Linker=VMLinker)
