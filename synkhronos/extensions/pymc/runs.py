"""The functions of terms, and the rows that a rank gives them.

A rank evaluates its rows in blocks that stay in its core's cache, each with a `TermEvaluation`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, Sequence

import numpy as np
import pytensor
import pytensor.tensor as pt
from pymc.pytensorf import compile as compile_function
from pytensor.compile.mode import Mode, get_default_mode
from pytensor.graph.basic import Constant, Variable
from pytensor.link.numba.dispatch.basic import cache_key_for_constant
from pytensor.link.numba.linker import NumbaLinker

from synkhronos._machine.deep_recursion import recurses_deep
from synkhronos.extensions.pymc import vectorized
from synkhronos.extensions.pymc.terms import Term, is_float

_BLOCK_BYTES = 1 << 20  # of data that a rank evaluates at once: they fit a core's cache
_BYTES_PER_RESULT = 128  # of data that are read in the time of adding up one more number
_MOST_FUNCTIONS = 64  # that are kept for later blocks

_functions: dict[tuple, Callable] = {}  # numba's, by graph


class Evaluation:
    """An evaluation of some rows of a term, which `vector` computes.

    `copies` has pairs of arguments and the values that they are copies of. `outs` has the places
    for parts of the result, in order, and whether a part is added there.
    """

    def __init__(self, copies, outs):
        self._copies, self._outs, begin = copies, [], 0
        for out, adds in outs:
            self._outs.append((out, slice(begin, begin + out.size), adds))
            begin += out.size

    def vector(self) -> np.ndarray:
        """Return the log-likelihood and the gradients, in one flat vector."""
        raise NotImplementedError

    def run(self) -> None:
        """Compute the vector of these rows, and put it into its places."""
        for own, values in self._copies:
            own[...] = values
        result = self.vector()
        for out, part, adds in self._outs:
            if adds:
                out += result[part]
            else:
                out[...] = result[part].reshape(out.shape)


class TermEvaluation(Evaluation):
    """An evaluation on a core: a compiled function, its arguments, places for results.

    It calls the function's virtual machine, which does not check arguments as the function does.
    With `is_alone` nothing else gives the function arguments, so that they stay in it.
    """

    def __init__(self, function, arguments, copies, outs, is_alone):
        super().__init__(copies, outs)
        self._call, self._is_alone = function.vm, is_alone
        self._cells = [each.storage for each in function.input_storage]
        self._arguments = arguments
        self._result = function.output_storage[0].storage

    def prepare(self):
        """Give the function its arguments."""
        for cell, array in zip(self._cells, self._arguments):
            cell[0] = array

    def read(self):
        """Read the arguments, as fast as the memory allows."""
        for each in self._arguments:
            octets = each.ravel("K").view("uint8")
            octets[: octets.size // 8 * 8].view("int64").sum()

    def vector(self):
        """Return the log-likelihood and the gradients, in one flat vector."""
        if not self._is_alone:
            self.prepare()
        try:
            self._call()
        except SystemError as error:
            if isinstance(error.__cause__, KeyboardInterrupt):  # Ctrl-C in code of Numba
                raise error.__cause__ from None
            raise
        [result] = self._result
        return result


@recurses_deep
def compiled(term: Term, gradients: bool, directions: Sequence[Variable] = (), mode=None):
    """Return the function of a term: of its parameters, of directions, and of its rows.

    By default its mode is the one of ranks on CPU cores.
    """
    inputs = [*term.parameters, *directions, *(rows.variable for rows in term.rows)]
    output = pytensor.Out(term.vector() if gradients else term.logp.reshape((1,)), borrow=True)
    if mode is None:
        mode = vectorized.including(get_default_mode())
        if type(mode.linker) is NumbaLinker:
            mode = Mode(_Linker(), mode.provided_optimizer)
    return compile_function(inputs, [output], mode=mode, on_unused_input="ignore", trust_input=True)


class _Linker(NumbaLinker):
    """Reuses the function that numba compiled for an equal graph, such as that of an earlier block.

    Numba and PyTensor never free what they compile.
    """

    def fgraph_convert(self, fgraph, **kwargs):
        """Return numba's function of a graph."""
        inputs = [each for node in fgraph.toposort() for each in node.inputs]
        constants = [each for each in [*inputs, *fgraph.outputs] if isinstance(each, Constant)]
        # Frozen graphs count 0.0 and -0.0 as equal. In inner graphs PyTensor itself merges them.
        values = [cache_key_for_constant(each.data) for each in constants]
        key = fgraph.freeze(), *values, pytensor.config.numba__fastmath
        if key in _functions:
            return _functions[key]
        converted, key_on_disk = super().fgraph_convert(fgraph, **kwargs)
        function = super().jit_compile((converted, key_on_disk))
        if key_on_disk is not None:  # PyTensor knows all that the code depends on
            if len(_functions) == _MOST_FUNCTIONS:
                del _functions[next(iter(_functions))]
            _functions[key] = function
        return function

    def jit_compile(self, function):
        """Return the function as it is: `fgraph_convert` has compiled it."""
        return function


def along(array: np.ndarray, axis: int | None, chosen) -> np.ndarray:
    """Return some rows of an array, or all of one that has none."""
    return array if axis is None else array[(slice(None),) * axis + (chosen,)]


def floats(term: Term) -> list[Variable]:
    """Return those parameters of a term that are floats."""
    return [each for each in term.parameters if is_float(each)]


@recurses_deep
def along_direction(term: Term) -> tuple[Term, list[Variable]]:
    """Return a term's derivative along a direction, which is a term, too; and the direction.

    Its gradients are the Hessian times the direction.
    """
    directions = [each.type() for each in floats(term)]
    gradients = [each for each in term.gradients() if each is not None]
    products = [(each * one).sum() for each, one in zip(gradients, directions)]
    slope = sum(products, pt.zeros((), term.logp.dtype))
    derived = replace(term, logp=slope)
    derived.gradients()  # raises if PyTensor has none
    return derived, directions


def number_of_blocks(n_rows, rows, arrays, width):
    """Return into how many parts the rows of a rank are cut.

    The data of each, and what is computed from them, should stay in the core's cache; but the
    result, of `width` numbers, is added up for each.
    """
    if not n_rows:
        return 0
    nbytes = n_rows * sum(each.nbytes / each.shape[of.axis] for of, each in zip(rows, arrays))
    return max(1, min(n_rows, round(nbytes / max(_BLOCK_BYTES, _BYTES_PER_RESULT * width))))


def own_value(value, parameter, copies):
    """Return a value, or if a function can't take it as it is, a copy, listed in `copies`."""
    if parameter.dtype == "float64" and value.flags.c_contiguous:
        return value
    copies.append((np.empty(value.shape, parameter.dtype), value))
    return copies[-1][0]
