"""Compiling quickly, where compiled code is not what is tested."""

import contextlib

import theano
from theano.compile import mode

from support.layouts import ON_DEVICES


@contextlib.contextmanager
def quickly():
    """Compile functions that name no mode in FAST_COMPILE, without a C compiler.

    Theano makes the default mode once, and goes on using it after a change of ``config.mode``. On
    devices nothing changes: their operations have compiled code only.
    """
    if ON_DEVICES:
        yield
        return
    before = mode.instantiated_default_mode
    with theano.change_flags(mode="FAST_COMPILE"):
        mode.instantiated_default_mode = mode.predefined_modes["FAST_COMPILE"]
        try:
            yield
        finally:
            mode.instantiated_default_mode = before
