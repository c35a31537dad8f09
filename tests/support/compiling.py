"""Compiling quickly, where compiled code is not what is tested."""

import contextlib

import numpy as np
import theano
from theano.compile import mode

from support.host_library import MODE, ON_PYTENSOR
from support.layouts import ON_DEVICES

# The graph of FAST_RUN, computed by Python. Operations that have no Python code can't run in it.
IN_PYTHON = theano.Mode(theano.gof.vm.VM_Linker(use_cloop=False, c_thunks=False), "fast_run")
if MODE == "JAX":  # ranks on devices of JAX have no other
    IN_PYTHON = mode.predefined_modes["FAST_COMPILE"] = mode.predefined_modes[MODE]

# The same on the host, beside ranks on devices: with variables of `tensor_constructor`.
ON_HOST = IN_PYTHON.excluding("gpuarray_opt", "gpuarray")


def quickly():
    """Compile functions that name no mode in FAST_COMPILE, without a C compiler."""
    return by_default(mode.predefined_modes[MODE])


def in_python():
    """Compile functions that name no mode as FAST_RUN does, but without a C compiler."""
    return by_default(IN_PYTHON)


@contextlib.contextmanager
def by_default(chosen):
    """Compile functions that name no mode in another one than Theano's.

    Theano makes the default mode once, and goes on using it after a change of ``config.mode``. On
    devices nothing changes: their operations have compiled code only.
    """
    if ON_DEVICES:
        yield
        return
    if ON_PYTENSOR:
        with theano.change_flags(mode="Mode"):
            made = mode._CACHED_RUNTIME_MODES
            key = "MODE", theano.config.linker
            before = made.get(key)
            made[key] = chosen
            try:
                yield
            finally:
                made[key] = before
                if before is None:
                    del made[key]
        return
    before = mode.instantiated_default_mode
    with theano.change_flags(mode="FAST_COMPILE"):  # of the class of those chosen here: Mode
        mode.instantiated_default_mode = chosen
        try:
            yield
        finally:
            mode.instantiated_default_mode = before


def always(monkeypatch, kind):
    """Compile C code for a class of operations in modes that compute in Python, too."""

    def make_thunk(self, *args, impl=None):
        return super(kind, self).make_thunk(*args, impl="c")

    monkeypatch.setattr(kind, "make_thunk", make_thunk, raising=False)


def fold_constants_in_python():
    """Have Theano compute constants in Python while it compiles, where it has Python code for them.

    For constant arrays it would compile C code, in any mode, that runs once. PyTensor does not.
    """
    if ON_PYTENSOR:
        return
    from theano.gof.op import PureOp
    from theano.tensor.elemwise import Elemwise

    def has_python_code(op, node):
        if type(op).__module__.startswith("theano.gpuarray"):
            return False
        return type(op).perform is not PureOp.perform and len(node.inputs) < 32

    PureOp.python_constant_folding = Elemwise.python_constant_folding = has_python_code


def compute_streams_in_numpy():
    """Have MRG_RandomStreams make the states of its 15,360 streams, and draw, all at once.

    Theano makes one after another, in Python where nothing is compiled: a second for each state,
    and a minute for a million numbers.
    """
    if ON_PYTENSOR:
        return
    from theano.sandbox import rng_mrg

    parts = [slice(3), slice(3, 6)]
    moduli = [np.uint64(rng_mrg.M1), np.uint64(rng_mrg.M2)]
    apart = [rng_mrg.A1p72, rng_mrg.A2p72], [rng_mrg.A1p134, rng_mrg.A2p134]
    of_streams, of_draws = ([np.array(each, "uint64") for each in pair] for pair in apart)

    def ahead(states, matrices):
        halves = zip(parts, matrices, moduli)
        return np.concatenate([_product(states[:, part], a, m) for part, a, m in halves], axis=1)

    def states_of_streams(self, n_streams, dtype, inc_rstate=True):
        first = np.array([self.rstate], "uint64")
        found, matrices = first, of_streams
        while len(found) < n_streams:
            found = np.concatenate([found, ahead(found, matrices)])
            matrices = [_product(a.T, a, m).T for a, m in zip(matrices, moduli)]
        if inc_rstate:
            self.rstate = ahead(first, of_draws)[0].astype("int32")
        return found[:n_streams].astype("int32")

    def perform(self, node, inputs, outputs, params):
        states, size = np.array(inputs[0], "int64"), inputs[1]
        drawn = np.empty(int(np.prod(size)), "int64")
        for begin in range(0, len(drawn), len(states)):
            own = states[: len(drawn) - begin]  # the first streams draw once more than others
            _, x2, x3, y1, _, y3 = own.T.copy()
            own[:, [1, 2, 4, 5]] = own[:, [0, 1, 3, 4]]
            own[:, 0] = ((x2 << 22) + (x3 << 7) + x3) % rng_mrg.M1
            own[:, 3] = ((y1 << 15) + (y3 << 15) + y3) % rng_mrg.M2
            above = own[:, 0] - own[:, 3]
            drawn[begin : begin + len(own)] = above + rng_mrg.M1 * (above <= 0)
        if self.output_type.dtype == "float16":
            drawn = (drawn & 0x7FFF) + 1
        norm = {"float16": np.float16(3.0458e-05), "float32": np.float32(4.6566126e-10)}
        values = drawn * float(norm.get(self.output_type.dtype, 2.0**-31))
        outputs[0][0] = states.astype("int32")
        outputs[1][0] = values.reshape(size).astype(self.output_type.dtype)

    rng_mrg.MRG_RandomStreams.get_substream_rstates = states_of_streams
    rng_mrg.mrg_uniform.perform = perform


def _product(vectors, matrix, modulus):
    """Return the product of a matrix and each vector, modulo a number below 2**31."""
    return (vectors[:, None] * matrix % modulus).sum(axis=2) % modulus
