"""Make something else of the calls of ``theano.function`` in a with block, also inside libraries.

    theano.function(...) ──▶ pfunc ──▶ the function that the block was given ──▶ any callable

Libraries keep ``theano.function`` under names of their own, so the functions that it calls are
replaced: `pfunc`, and `orig_function` for inputs that are tuples, which a `pfunc` from before the
block calls, too. Calls from Theano's modules (``eval``, scans) and from this package go on as
before, and so do those of other threads.
"""

import contextlib
import contextvars
import copyreg
import functools
import gc
import inspect
import sys
from time import perf_counter

from theano.compile.function_module import Function as CompiledFunction
from theano.compile.function_module import _pickle_Function, orig_function
from theano.compile.pfunc import pfunc

from synkhronos._host.base.cells import tell
from synkhronos._host.theano.variables import is_random_state

_make = contextvars.ContextVar("synkhronos parallel", default=None)
# The package `theano.compile` has functions of these names.
_MODULES = [sys.modules["theano.compile.function"], sys.modules["theano.compile.pfunc"]]
_PARAMETERS = inspect.signature(pfunc)


@contextlib.contextmanager
def intercept(make):
    """Call ``make(compile_serially, arguments)`` for each ``theano.function`` in a with block.

    `arguments` are those of ``theano.function``, by name, with a list of outputs and "is_list";
    ``compile_serially(note)`` compiles them as Theano does; if ``note(seconds)`` is given, it is
    called after each call of the function. Such functions, and those that the script has compiled
    before, tell of the shared variables that they update. "params" is None where the inputs can't
    be known.
    """
    for each in gc.get_objects():
        if type(each) is CompiledFunction:
            _let_tell(each)
    token = _make.set(make)
    for module in (*_MODULES, sys.modules["theano.compile"]):
        module.pfunc = _intercepted
    for module in _MODULES:
        module.orig_function = _noted
    try:
        yield
    finally:
        _make.reset(token)


def _intercepted(*args, **kwargs):
    if _is_called_inside():
        return pfunc(*args, **kwargs)
    make = _make.get()
    if make is None:  # after the block, or in another thread
        return _compile_serially(pfunc, args, kwargs)
    bound = _PARAMETERS.bind(*args, **kwargs)
    bound.apply_defaults()
    compile_serially = functools.partial(_compile_serially, pfunc, args, kwargs)
    return make(compile_serially, dict(bound.arguments))


def _noted(*args, **kwargs):
    if _is_called_inside():
        return orig_function(*args, **kwargs)
    make = _make.get()
    compile_serially = functools.partial(_compile_serially, orig_function, args, kwargs)
    if make is None:
        return compile_serially()
    return make(compile_serially, {"name": kwargs.get("name"), "params": None})


def _is_called_inside():
    """Return whether Theano's modules or this package have called what called this."""
    frame = sys._getframe(2)
    while any(frame.f_globals is vars(module) for module in _MODULES):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "").split(".")[0] in ("theano", "synkhronos")


def _compile_serially(compile_function, args, kwargs, note=None):
    function = compile_function(*args, **kwargs)
    _let_tell(function)
    if note is not None:
        function.synkhronos_note = note
        function.__class__ = _Telling
    return function


def _let_tell(function):
    """Let a function tell of what it updates, but for those that this package has compiled."""
    if getattr(function, "is_of_synkhronos", False):
        return
    updated = [
        each.variable
        for each in function.maker.inputs
        if each.shared and each.update is not None and not is_random_state(each.variable)
    ]
    if updated:
        function.synkhronos_updated = updated
        function.__class__ = _Telling


class _Telling(CompiledFunction):
    """A Theano function that tells of its calls, and of what it updates in the master."""

    synkhronos_updated = ()
    synkhronos_note = None

    def copy(self, *args, **kwargs):
        """Return a copy, as Theano does, that tells of what it updates."""
        function = super().copy(*args, **kwargs)
        _let_tell(function)
        return function

    def __call__(self, *args, **kwargs):
        begin = perf_counter()
        try:
            return super().__call__(*args, **kwargs)
        finally:  # one that raises may have written to the values of variables
            for variable in self.synkhronos_updated:
                tell(variable)
            if self.synkhronos_note is not None:
                self.synkhronos_note(perf_counter() - begin)


copyreg.pickle(_Telling, _pickle_Function)
