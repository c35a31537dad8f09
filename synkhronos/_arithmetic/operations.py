"""The table of operations that reduce arrays element by element. All reductions use it.

    OPERATIONS["logsumexp"] = ReduceOperation(np.logaddexp, lambda dtype: -np.inf, kinds="f")

float16 is combined in float32, whose 24 bits hold the sum of many ranks, and rounded once at the
end. All other arrays are combined in their own dtype: integers wrap around, and have no average.
For bools, sum and max are "or", prod and min are "and".

`combine` must be associative; it is not called for one array. Combined with its identity, a number
does not change. So a sum of squares is no operation: square in the graph, and add up.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, NamedTuple

import numpy as np

HALF = "e"  # the `char` of float16; to compare a dtype with a class takes NumPy three times as long
_SINGLE = np.dtype(np.float32)


class ReduceOperation(NamedTuple):
    """A way to reduce arrays of one shape to one array."""

    combine: Callable[..., Any]  # ``combine(one, other, out=None)``
    identity: Callable[[np.dtype], Any]  # takes a dtype, and returns its neutral number
    divides: bool = False  # whether to divide by the number of arrays or rows at the end
    scales: bool = False  # whether arrays, all times a number, are combined to the result times it
    kinds: str = "biufc"  # kinds of dtypes that it takes
    kinds_in_stores: str = "iufc"  # kinds that it takes in stores, if they are among `kinds`, too
    title: str = "reduction"  # the name of the result in messages


class _Table(dict):
    def __missing__(self, name):
        if name == "mean":  # the name of the average in stores
            return self["avg"]
        raise KeyError(f"{name!r} is no operation: the table has {', '.join(self)}.")


def _limit(dtype, of_integers, infinity):
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return infinity > 0
    if dtype.kind in "iu":
        return getattr(np.iinfo(dtype), of_integers)
    # Complex numbers are compared by their real part, and then by the imaginary one.
    return complex(infinity, infinity) if dtype.kind == "c" else infinity


_OF_COMPARISONS: dict[str, Any] = {"scales": True, "kinds_in_stores": "iuf"}
OPERATIONS: dict[str, ReduceOperation] = _Table(
    avg=ReduceOperation(
        np.add, lambda dtype: 0, divides=True, scales=True, kinds="fc", title="mean"
    ),
    sum=ReduceOperation(np.add, lambda dtype: 0, scales=True, title="sum"),
    prod=ReduceOperation(np.multiply, lambda dtype: 1, title="product"),
    min=ReduceOperation(
        np.minimum, lambda dtype: _limit(dtype, "max", np.inf), title="minimum", **_OF_COMPARISONS
    ),
    max=ReduceOperation(
        np.maximum, lambda dtype: _limit(dtype, "min", -np.inf), title="maximum", **_OF_COMPARISONS
    ),
)
_KINDS = {"b": "bools", "iu": "integers", "f": "floats", "c": "complex numbers"}


def divides(mode: str | None) -> bool:
    """Return whether a mode is an operation that divides at the end, such as an average."""
    return mode in OPERATIONS and OPERATIONS[mode].divides


def kinds_in_words(kinds: str) -> str:
    """Return the kinds of dtypes in words.

    >>> kinds_in_words("iuf"), kinds_in_words("i")
    ('integers and floats', 'integers')
    """
    *others, last = [name for each, name in _KINDS.items() if {*each} & {*kinds}]
    return f"{', '.join(others)} and {last}" if others else last


def check_kind(caller: str, op: str, dtype: str | np.dtype, what: str) -> None:
    """Raise TypeError if an operation does not take arrays of a dtype.

    >>> check_kind("all_reduce()", "avg", "int8", "s")
    Traceback (most recent call last):
    TypeError: all_reduce() can't average s, of dtype int8: the result would not be of that ...
    """
    row = OPERATIONS[op]
    if np.dtype(dtype).kind in row.kinds:
        return
    takes = f"takes {kinds_in_words(row.kinds)}"
    if row.divides:
        raise TypeError(
            f"{caller} can't average {what}, of dtype {dtype}: the result would not be of that "
            f"type. Cast it ({op!r} {takes}), or use 'sum'."
        )
    raise TypeError(
        f"{caller} can't reduce {what}, of dtype {dtype}, with {op!r}, which {takes}: cast it."
    )


def wide(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which arrays of a dtype are combined.

    >>> wide(np.dtype("float16")), wide(np.dtype("int8"))
    (dtype('float32'), dtype('int8'))
    """
    return _SINGLE if dtype.char == HALF else dtype


def divide(total: np.ndarray, divisor: float) -> None:
    """Divide an array by a number, in place."""
    # Multiplying is faster, and exact where the divisor is a power of two.
    if divisor & (divisor - 1) == 0:
        np.multiply(total, reciprocal(total.dtype, divisor), total)
    else:
        np.divide(total, total.dtype.type(divisor), total)


@functools.lru_cache(maxsize=64)
def constant(dtype: np.dtype, number: float) -> np.ndarray:
    """Return a number as an array without axes, which NumPy takes faster than its scalars."""
    return np.array(number, dtype)


@functools.lru_cache(maxsize=64)
def reciprocal(dtype: np.dtype, divisor: int) -> np.ndarray:
    """Return the reciprocal of a power of two.

    >>> reciprocal(np.dtype("float32"), 4)
    array(0.25, dtype=float32)
    """
    if dtype.kind not in "fc":
        raise TypeError(f"arrays of {dtype} have no average of this dtype.")
    return constant(dtype, 1 / divisor)
