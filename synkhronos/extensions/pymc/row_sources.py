"""The shared variables, such as `pm.Data`, that the rows of terms are computed from.

    a caller's function ── its own values of these variables ──▶ evaluate(...)
    values as before    ──▶ ranks keep their rows
    other values        ──▶ ranks get new rows

They are inputs of the operation in a model's graph, so each caller brings the values that it has:
PyTensor's functions those of the last `pm.set_data`, samplers that copy data when they compile
their copies. Rows are then as old as all else that the caller computes.

To compare all data in each evaluation would take as long as to evaluate. An array that `RowSources`
holds is known by its identity. nutpie makes arrays of mere addresses: a thread that has compared
the array at an address does not compare it again, as a sampling keeps its data until its threads
end. In functions of JAX data are either constants, or compared by checksums, which JAX computes.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytensor
from pytensor.graph.basic import Constant
from pytensor.graph.traversal import graph_inputs
from pytensor.tensor.sharedvar import TensorSharedVariable

from synkhronos.extensions.pymc.terms import AT_ONCE, Term

_MOST_PLACES = 64  # threads that are remembered; more of them compare again
# Of checksums, by bytes: what indices are multiplied by; shifts and factors.
_MIXING = {
    4: (0x9E3779B9, (16, 0x85EBCA6B), (13, 0xC2B2AE35)),
    8: (0x9E3779B97F4A7C15, (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)),
}
_MOST_SUMS = 4  # checksums that are kept


class RowSources:
    """Shared variables, and the values of theirs that ranks have rows of.

    Attributes
    ----------
    variables : list of TensorSharedVariable
    held : tuple of numpy.ndarray
        The values that ranks have; nothing changes or frees them.
    version : int
        The number of values that have been held.
    """

    def __init__(self, terms: Sequence[Term]):
        self._data = [rows.data for term in terms for rows in term.rows]
        leaves = dict.fromkeys(graph_inputs(self._data))
        self.variables = [each for each in leaves if isinstance(each, TensorSharedVariable)]
        self.held: tuple[np.ndarray, ...] | None = None
        self.version = 0
        self._places: dict[int, tuple] = {}  # thread -> the addresses that it has compared
        self._sums: list[tuple] = []  # values, and what `checksums` returns for them

    def present(self) -> tuple[np.ndarray, ...]:
        """Return the values that the variables have now."""
        return tuple(each.get_value(borrow=True) for each in self.variables)

    def are_held(self, values: Sequence[np.ndarray]) -> bool:
        """Return whether these values are those that ranks have."""
        held = self.held
        if held is None:
            return False
        for own, value in zip(held, values):
            if own is not value:
                return self._are_equal(values)
        return True

    def _are_equal(self, values):
        thread = threading.get_native_id()
        places = tuple(map(_place, values)) if any(map(_may_be_freed, values)) else None
        if places is not None and self._places.get(thread) == places:
            return True
        if not are_equal(self.held, values):
            return False
        if places is None:
            self.held = tuple(values)  # known by their identity from now on
        else:
            if len(self._places) == _MOST_PLACES:
                self._places.clear()
            self._places[thread] = places
        return True

    def hold(self, values: Sequence[np.ndarray]) -> None:
        """Take other values."""
        self.held = tuple(
            value.copy() if _may_be_freed(value) else np.asarray(value) for value in values
        )
        self._places.clear()
        self.version += 1

    def rows(self) -> list[np.ndarray]:
        """Return the data of all terms' rows, in their order, computed from the held values."""
        known = dict(zip(self.variables, self.held))
        inputs = {each: each.type() for each in self.variables}
        computed = [each for each in self._data if each.owner is not None]
        given = {"givens": inputs, "mode": AT_ONCE, "on_unused_input": "ignore"}
        function = pytensor.function([*inputs.values()], computed, **given)
        results = iter(function(*self.held) if computed else ())
        return [np.asarray(_value(each, known, results)) for each in self._data]

    def matching(self, sums: np.ndarray, dtypes: Sequence[str], others: Sequence) -> tuple | None:
        """Return the values with these checksums, of those held, those present, and `others`.

        JAX has computed the checksums from values of its own, of these dtypes.
        """
        for values in (self.held, self.present(), others):
            if values is not None and np.array_equal(self._sums_of(values, dtypes), sums):
                return values
        return None

    def _sums_of(self, values, dtypes):
        for known, their_dtypes, sums in self._sums:
            if their_dtypes == dtypes and all(map(operator.is_, known, values)):
                return sums
        arrays = [each.astype(dtype, copy=False) for each, dtype in zip(values, dtypes)]
        sums = np.concatenate([checksums(each, np) for each in arrays])
        self._sums = [*self._sums[-_MOST_SUMS:], (values, dtypes, sums)]
        return sums


def checksums(array: Any, numpy: Any) -> Any:
    """Return two checksums of an array, and its lengths, by NumPy or ``jax.numpy``.

    Each element is mixed with its index, so that sums differ where elements change places: see
    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014, and MurmurHash3
    for 32 bits.

    >>> a, b = np.array([1.0, 0.0, 0.0, 1.0]), np.array([0.0, 1.0, 1.0, 0.0])
    >>> [int(x == y) for x, y in zip(checksums(a, np), checksums(b, np))]
    [0, 0, 1]
    """
    unsigned = numpy.uint64 if array.dtype.itemsize == 8 else numpy.uint32
    step, *mixing = _MIXING[unsigned(0).dtype.itemsize]
    bits = array if array.dtype == bool else array.view(f"uint{8 * array.dtype.itemsize}")
    bits = bits.ravel().astype(unsigned)
    numbers = numpy.arange(1, bits.size + 1, dtype=unsigned) * unsigned(step)
    sums = []
    for mixed in (bits ^ numbers, bits + numbers):
        for shift, factor in mixing:
            mixed = (mixed ^ (mixed >> unsigned(shift))) * unsigned(factor)
        sums.append((mixed ^ (mixed >> unsigned(mixing[0][0]))).sum(dtype=unsigned))
    shape = numpy.array(array.shape, dtype="uint32")
    return numpy.concatenate([numpy.stack(sums), shape])


def _value(variable, known, results):
    if variable.owner is not None:
        return next(results)
    return variable.data if isinstance(variable, Constant) else known[variable]


def _may_be_freed(array):
    """Return whether an array is a view of an address, which no object of Python keeps."""
    return array.base is None and not array.flags.owndata


def _place(array):
    return array.__array_interface__["data"], array.shape, array.strides


def are_equal(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    """Return whether arrays are equal to the bit."""
    return all(
        one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
        for one, other in zip(some, others, strict=True)
    )
