"""Intercept the compilation of serial functions, which then report their calls and updates."""

import contextlib
import contextvars
import copyreg
import functools
import inspect
import sys
import types
from time import perf_counter

from synkhronos._host.base.cells import tell
from synkhronos._host.base.chosen_library import CompiledFunction, HasInnerGraph, library
from synkhronos._host.base.dividing.chosen_operations import is_random_state, pickle_function
from synkhronos._machine.instances import classes_of_all, instances_of

_make = contextvars.ContextVar("synkhronos parallel", default=None)


@contextlib.contextmanager
def made_by(make, replace):
    """Let ``make(compile_serially, arguments)`` make functions in a with block and this context.

    The compiling functions of the library call it once ``replace()`` has replaced them. After
    ``compile_serially(note)``, ``note(seconds)`` is called after each call of the function.
    Functions that are compiled serially, before or now, report the shared variables that they
    update.
    """
    replace()
    for each in instances_of(CompiledFunction):
        _let_tell(each)
    token = _make.set(make)
    try:
        yield
    finally:
        _make.reset(token)


def replace_code(function, modules, named=dict):
    """Let a function of the library, which scripts import by name, call `in_place_of` it.

    ``named(arguments)`` returns its arguments under the names that Theano's have.
    """
    parameters = inspect.signature(function)
    compile_function = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )

    def arguments(*args, **kwargs):
        bound = parameters.bind(*args, **kwargs)
        bound.apply_defaults()
        return named(bound.arguments)

    intercepted = in_place_of(compile_function, arguments, modules)
    function.__globals__["synkhronos_intercepted"] = intercepted
    function.__signature__ = parameters
    function.__code__ = _forward.__code__


def _forward(*args, **kwargs):
    return synkhronos_intercepted(*args, **kwargs)  # noqa: F821 - a name in the library's module


def in_place_of(compile_function, arguments, modules):
    """Return a function in place of one that compiles: inside a block it calls the block's `make`.

    Calls from the library itself, from this package, from other threads and after the block compile
    serially. `modules` are those with the frames between this function and the caller.
    """

    def intercepted(*args, **kwargs):
        frame = sys._getframe(1)
        while any(frame.f_globals is vars(module) for module in modules):
            frame = frame.f_back
        if frame.f_globals.get("__name__", "").split(".")[0] in (library.__name__, "synkhronos"):
            return compile_function(*args, **kwargs)
        make = _make.get()
        compile_serially = functools.partial(_compile_serially, compile_function, args, kwargs)
        return make(compile_serially, arguments(*args, **kwargs)) if make else compile_serially()

    return intercepted


def count_alone():
    """Return how many functions the script has compiled with the host library itself."""
    functions = instances_of(CompiledFunction)
    alone = [each for each in functions if not getattr(each.maker, "is_of_synkhronos", False)]
    if not alone:
        return 0
    # The functions of scans and OpFromGraphs don't count.
    kinds = [kind for kind in classes_of_all() if issubclass(kind, HasInnerGraph)]
    inside = [vars(op).get(name) for op in instances_of(*kinds) for name in ("fn", "_fn")]
    return len({*map(id, alone)} - {*map(id, inside)})


def _compile_serially(compile_function, args, kwargs, note=None):
    function = compile_function(*args, **kwargs)
    _let_tell(function, note)
    return function


def _let_tell(function, note=None):
    """Let a function that this package has not compiled report its updates and calls."""
    if getattr(function.maker, "is_of_synkhronos", False):
        return
    updated = [
        each.variable
        for each in function.maker.inputs
        if each.shared and each.update is not None and not is_random_state(each.variable)
    ]
    if updated:
        function.maker.synkhronos_updated = updated
    if note is not None:
        function.maker.synkhronos_note = note
    if updated or note is not None:
        function.__class__ = _Telling


class _Telling(CompiledFunction):
    """A function that reports its calls, and the variables that it updates in the master."""

    __slots__ = ()  # PyTensor's functions can't have further attributes: the maker has them

    def copy(self, *args, **kwargs):
        function = super().copy(*args, **kwargs)
        _let_tell(function)
        return function

    def __call__(self, *args, **kwargs):
        begin = perf_counter()
        try:
            return super().__call__(*args, **kwargs)
        finally:  # one that raises may have written to the values of variables
            for variable in getattr(self.maker, "synkhronos_updated", ()):
                tell(variable)
            note = getattr(self.maker, "synkhronos_note", None)
            if note is not None:
                note(perf_counter() - begin)


copyreg.pickle(_Telling, pickle_function)
