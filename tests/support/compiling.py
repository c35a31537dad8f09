"""Compiling quickly, where compiled code is not what is tested."""

import contextlib

import theano
from theano.compile import mode

from support.host_library import MODE, ON_PYTENSOR
from support.layouts import ON_DEVICES

# The graph of FAST_RUN, computed by Python. Operations that have no Python code can't run in it.
IN_PYTHON = theano.Mode(theano.gof.vm.VM_Linker(use_cloop=False, c_thunks=False), "fast_run")


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


def fold_constants_in_python():
    """Have Theano compute constants in Python while it compiles, where it has Python code for them.

    For constant arrays it would compile C code, in any mode, that runs once. PyTensor does not.
    """
    if ON_PYTENSOR:
        return
    from theano.gof.op import PureOp
    from theano.tensor.elemwise import Elemwise

    def has_python_code(op, node):
        return type(op).perform is not PureOp.perform and len(node.inputs) < 32

    PureOp.python_constant_folding = Elemwise.python_constant_folding = has_python_code
