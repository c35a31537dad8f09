"""Test with numbers that a likelihood is a sum over rows.

At two points the likelihood of all rows must be what PyMC computes, and uneven parts of the rows,
in random order, must add up to it, with all gradients.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from typing import Callable, NamedTuple

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
from pymc.pytensorf import compile as compile_function
from pymc.pytensorf import rewrite_pregrad
from pytensor.compile.mode import Mode
from pytensor.graph.rewriting.basic import dfs_rewriter, node_rewriter
from pytensor.scalar.math import Log1mexp, Softplus
from pytensor.tensor.elemwise import Elemwise

from synkhronos._machine.deep_recursion import recurses_deep
from synkhronos._machine.interrupts import raised_here
from synkhronos._machine.processes import ForkedProcess, kill_all
from synkhronos.extensions.pymc.runs import along, compiled
from synkhronos.extensions.pymc.terms import NotByRows, Term, first_line, is_float, values_of

_TOLERANCE, _OF_32_BITS = 1e-10, 1e-5  # of the largest part
_STEPS = (0.3, 0.1, 0.03, 0.01, 1e-3, 1e-4, 1e-6)  # from the initial point, until all is finite
_POINTS = 2
_MOST_ROWS = 50_000  # of the parts that must add up
_COLD = 5.0  # seconds of compiling, from which on PyTensor's cache was probably empty


@node_rewriter([Elemwise])
def _by_functions_of_arrays(fgraph, node):
    """Express operations by those of NumPy: PyTensor computes these two number by number."""
    [x], kind = node.inputs[:1], type(node.op.scalar_op)
    if kind is Softplus:
        return [pt.maximum(x, 0) + pt.log1p(pt.exp(-abs(x)))]
    if kind is Log1mexp:
        return [pt.switch(x > -math.log(2), pt.log(-pt.expm1(x)), pt.log1p(-pt.exp(x)))]
    return False


# Fused operations would run element by element in Python. 48 is after all other rewrites of them.
REWRITTEN = (
    Mode(linker="py", optimizer="fast_run")
    .excluding("fusion", "inplace")
    .register((dfs_rewriter(_by_functions_of_arrays), 48))
)


class Checked(NamedTuple):
    """A term that has passed: its function, and what the test has shown."""

    function: Callable  # compiled, with gradients
    seconds: float  # that it takes for all rows
    point: dict  # of the model
    values: list  # of the term's parameters there
    result: np.ndarray  # its log-likelihood and gradients there
    tolerances: np.ndarray  # for each number of the result


@recurses_deep
def checked(model: pm.Model, observed, term: Term, mode: Mode | None = None) -> Checked:
    """Test a term; return its compiled function, and its time and values in the test.

    The function is of this mode, by default that of ranks on CPU cores. Raises NotByRows unless the
    parts of the term add up to the model's likelihood.
    """
    # With the rewrites that the function of a rank gets: without them log(sigmoid(x)) is rounded.
    given = {"inputs": model.value_vars, "mode": REWRITTEN, "on_unused_input": "ignore"}
    logp = type(model).logp(model, vars=[observed], jacobian=False)
    plain = pytensor.function(outputs=logp, **given)

    @functools.lru_cache(maxsize=None)
    def precise():
        # Only if needed: this compiles for seconds, but in Python some operations round to 32 bits.
        return pytensor.function(model.value_vars, logp, on_unused_input="ignore")

    frontier = model.replace_rvs_by_values(list(term.frontier))
    frontier = pytensor.function(outputs=frontier, **given)
    try:
        function = compiled(term, gradients=True, mode=mode)
    except raised_here(Exception) as error:  # of any kind, from the code of its operations
        raise NotByRows(f"it has no gradients: {first_line(error)}") from error
    parts = _Parts(term, function)
    random = np.random.default_rng(0)
    for _ in range(_POINTS):
        point, whole = _find_point(model, plain, random)
        try:
            values = frontier(**point)
            wholes = [lambda: whole, lambda: float(precise()(**point))]  # noqa: B023
            compared = _compare(term, parts, values, wholes, random.permutation(term.length))
        except NotByRows:
            raise
        except raised_here(Exception) as error:
            raise NotByRows(
                f"its log-likelihood can't be computed from some of its rows: {first_line(error)}"
            ) from error
    return Checked(function, parts.seconds, point, values, *compared)


@recurses_deep
def plain_call(model: pm.Model, observed, point: dict) -> Callable[[], list]:
    """Return a call in which plain PyMC computes a likelihood and its gradients at a point."""
    logp = type(model).logp(model, vars=observed, jacobian=False)
    floats = [each for each in model.value_vars if is_float(each)]
    outputs = [logp, *pytensor.grad(rewrite_pregrad(logp), floats, disconnected_inputs="ignore")]
    given = {"on_unused_input": "ignore", "trust_input": True}
    function = compile_function(model.value_vars, outputs, **given)
    values = [np.asarray(point[each.name]) for each in model.value_vars]
    return lambda: function(*values)


@contextlib.contextmanager
def plain_compiled_beside(model: pm.Model, observed):
    """Compile the function of `plain_call` meanwhile in a process of its own, for PyTensor's cache.

    If this process compiles long, too, the end waits for the other one, no longer than that.
    """

    def compile_it():
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for fd in (1, 2):
            os.dup2(nowhere, fd)
        plain_call(model, observed, model.initial_point())()

    begin, process = time.monotonic(), ForkedProcess(compile_it)
    try:
        yield
        seconds = time.monotonic() - begin
        if seconds > _COLD:
            process.join(seconds)
    finally:
        kill_all([process], 1.0)
        process.close()


def _find_point(model, plain, random):
    start = model.initial_point(random_seed=0)
    for step in _STEPS:
        point = {
            name: value + (step * random.standard_normal(value.shape)).astype(value.dtype)
            if np.issubdtype(value.dtype, np.floating)
            else value
            for name, value in start.items()
        }
        try:
            whole = float(plain(**point))
        except pm.logprob.utils.ParameterValueError:
            continue
        if np.isfinite(whole):
            return point, whole
    raise NotByRows(
        "its log-likelihood is not finite at any point near the initial one, where PyMC begins, "
        "too: give parameters an initval=, and see model.debug()"
    )


class _Parts:
    """Computes the log-likelihood and gradients of some rows of a term, in one vector."""

    def __init__(self, term, function):
        self._term, self._function = term, function
        self.seconds = float("inf")  # the shortest time of a call with all rows
        self._arrays = values_of([rows.data for rows in term.rows])

    def __call__(self, values, chosen=slice(None)):
        rows = [
            each.arranged(along(array, each.axis, chosen))
            for array, each in zip(self._arrays, self._term.rows)
        ]
        own = [along(value, axis, chosen).copy() for value, axis in zip(values, self._term.axes)]
        begin = time.perf_counter()
        [result] = self._function(*own, *rows)
        if isinstance(chosen, slice):
            self.seconds = min(self.seconds, time.perf_counter() - begin)
        return self._of_all_rows(np.array(result), values, chosen)

    def _of_all_rows(self, result, values, chosen):
        """Return the vector for all rows: zeros are the gradients for rows that aren't chosen."""
        found, begin = [result[:1]], 1
        for value, axis, parameter in zip(values, self._term.axes, self._term.parameters):
            if is_float(parameter):
                gradient = np.zeros(value.shape)
                where = along(np.arange(value.size).reshape(value.shape), axis, chosen)
                gradient.flat[where.ravel()] = result[begin : begin + where.size]
                found.append(gradient.ravel())
                begin += where.size
        return np.concatenate(found)


def _compare(term, parts, values, plains, order):
    whole = parts(values)
    variables = [term.logp, *term.parameters, *(rows.variable for rows in term.rows)]
    is_of_32_bits = "float32" in {each.dtype for each in variables}  # the sum may have 64
    tolerance = _OF_32_BITS if is_of_32_bits else _TOLERANCE
    order = order[:_MOST_ROWS]
    together = whole if len(order) == term.length else parts(values, order)
    # No part of one row: it would be C and Fortran contiguous, for which numba compiles anew.
    bounds = sorted({0, min(2, len(order) - 1), len(order) // 3 + 1, len(order)})
    found = [parts(values, order[begin:end]) for begin, end in zip(bounds, bounds[1:])]
    sizes = [1, *(value.size for each, value in zip(term.parameters, values) if is_float(each))]
    begin, tolerances = 0, np.empty(whole.size)
    for number, size in enumerate(sizes):
        part = slice(begin, begin + size)
        of_parts = [each[part] for each in found]
        allowed = tolerance * sum(np.abs(each).max(initial=0) for each in of_parts)
        if not np.abs(sum(of_parts) - together[part]).max(initial=0) <= allowed:
            what = "gradients" if number else "log-likelihoods"
            raise NotByRows(f"it is no sum over rows: {what} of parts don't add up to the whole")
        tolerances[part] = allowed * term.length / len(order)
        begin += size
    _compare_value(whole[0], plains, tolerances[0])
    return whole, tolerances


def _compare_value(value, plains, tolerance):
    if not any(abs(value - each()) <= tolerance for each in plains):
        raise NotByRows(f"it is {value} where PyMC computes {plains[-1]()}")
