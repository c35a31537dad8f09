"""Compile and call Theano functions."""

import functools

import theano
from theano.compile.mode import Mode, get_mode
from theano.gof import Variable
from theano.scan_module.scan_utils import equal_computations

from synkhronos._host.deep_graphs import compiling_deep
from synkhronos._host.theano import compile_ahead, compile_cache, portable, printing, rewriting
from synkhronos._host.updates import default_updates
from synkhronos._machine.deep_recursion import recurses_deep

compile_cache.fix_cache_keys()
compile_ahead.install()
printing.put_ranks_in_front()

__all__ = ["Mode"]


def float_dtype() -> str:
    """Return Theano's floatX."""
    return theano.config.floatX


def is_mode(name) -> bool:
    """Return whether Theano has a mode, or a linker, of this name."""
    try:
        get_mode(name)
    except Exception:  # Theano raises a plain Exception
        return False
    return True


def compile_function(inputs, outputs, **kwargs):
    """Return a compiled Theano function that takes checked arrays and returns a list."""
    givens = kwargs.get("givens") or ()
    pairs = [
        *(kwargs.get("updates") or ()),
        *(givens.items() if hasattr(givens, "items") else givens),
    ]
    computed = [*outputs, *(value for _, value in pairs if isinstance(value, Variable))]
    kwargs["mode"] = rewriting.mode_for(computed, kwargs.get("mode"))
    function = compiling_deep(theano.function, computed)(inputs, outputs, **kwargs)
    function.trust_input = function.is_of_synkhronos = True
    return function


@recurses_deep
def expression_of(function, inputs, outputs, updates, kwargs):
    """Return the expression of a compiled function, for ranks on another kind of device."""
    updates = [*updates, *default_updates(function, updates)]
    return portable.without_devices(inputs, outputs, updates, kwargs)


def compile_expression(expression):
    """Compile an expression that `expression_of` returned, for the device of this rank."""
    return compile_function(**expression.arguments())


def as_update(variable, value):
    """Return the new value of an update as an expression of its shared variable's type."""
    return variable.type.filter_variable(value, allow_convert=False)


@recurses_deep
def same_updates(one, other):
    """Return whether two lists of (variable, its update) compute the same from their inputs.

    Parameters
    ----------
    one, other : (list of input variables, list of pairs)
    """
    (inputs, pairs), (other_inputs, other_pairs) = one, other
    given = [*inputs, *(variable for variable, _ in pairs)]
    others = [*other_inputs, *(variable for variable, _ in other_pairs)]
    if [each.type for each in given] != [each.type for each in others]:
        return False
    expressions = [as_update(variable, value) for variable, value in pairs]
    other_expressions = [as_update(variable, value) for variable, value in other_pairs]
    return equal_computations(expressions, other_expressions, given, others)


def is_reusing_memory(function):
    """Return whether a compiled function keeps memory of its results, and may write to it again."""
    return not getattr(function.fn, "allow_gc", False)


@recurses_deep
def swapped(expressions, variables):
    """Return expressions with variables, the keys of a dict, replaced; others stay as they are."""
    found = [isinstance(each, Variable) for each in expressions]
    new = iter(theano.clone([e for e, is_one in zip(expressions, found) if is_one], variables))
    return [next(new) if is_one else each for each, is_one in zip(expressions, found)]


def shared_variables(function):
    """Return the shared variables that a compiled function uses or updates."""
    return function.get_shared()


def variables_read(function):
    """Return the shared variables whose values a compiled function reads, not only replaces."""
    pairs = zip(function.maker.inputs, function.maker.fgraph.inputs)
    read = {given.variable for given, inner in pairs if inner.clients}
    return [variable for variable in function.get_shared() if variable in read]


def set_default_update(variable, expression):
    """Give a shared variable an update in all functions that use it."""
    variable.default_update = expression


def run(function, arguments, output_subset=None):
    """Call a compiled function; return all outputs, or those that `output_subset` numbers."""
    try:
        if output_subset is None:
            return function(*arguments)
        if _takes_subset(type(function.fn)):
            return function(*arguments, output_subset=list(output_subset))
        outputs = function(*arguments)
        return [outputs[index] for index in output_subset]
    except BaseException:
        # Theano releases its arguments only after a call that did not raise.
        for container in function.input_storage:
            if container.required:
                container.storage[0] = None
        raise


def _takes_subset(vm_type):
    # The lazy virtual machines accept a subset; the plain loops take no argument at all.
    return vm_type.__name__ in ("CVM", "Stack")


def caster(variable, strict, allow_downcast):
    """Return a function that makes the array of a value that ``theano.function`` makes of it.

    It raises the ``TypeError`` that ``theano.function`` raises.
    """
    return functools.partial(variable.type.filter, strict=strict, allow_downcast=allow_downcast)
