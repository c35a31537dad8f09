"""Compare what the device computed with what it should have."""

import numpy as np

# Of the largest expected number. Ranks and devices add in another order than NumPy.
TOLERANCES = {"float16": 2e-3, "float32": 1e-5, "float64": 1e-12}


class DifferenceError(AssertionError):
    """Something else came out than was expected."""


def true(condition, what):
    """Raise, saying what did not hold, unless the condition holds."""
    if not condition:
        raise DifferenceError(what)


def same(got, expected, what):
    """Raise unless two plain Python values are equal."""
    true(got == expected, f"{what}: got {got!r}, expected {expected!r}")


def equal(got, expected, what):
    """Raise unless two arrays have the same shape, dtype and bits."""
    got, expected = np.asarray(got), np.asarray(expected)
    _same_type(got, expected, what)
    if got.tobytes() != expected.tobytes():
        raise DifferenceError(f"{what}: {_largest(got, expected)}")


def close(got, expected, what, tolerance=None):
    """Raise unless two arrays agree, to the bit for integers; return the relative difference."""
    got, expected = np.asarray(got), np.asarray(expected)
    _same_type(got, expected, what)
    if expected.dtype.kind != "f":
        equal(got, expected, what)
        return 0.0
    difference = relative(got, expected)
    # Not "difference > tolerance": that lets NaN pass.
    if not difference <= (tolerance or TOLERANCES[expected.dtype.name]):
        raise DifferenceError(
            f"{what}: relative difference {difference:.1e}, {_largest(got, expected)}"
        )
    return difference


def relative(got, expected):
    """Return the largest difference, relative to the largest expected number.

    >>> relative([1.0, 2.5], [1.0, 2.0])
    0.25
    >>> relative([np.nan], [1.0])
    nan
    """
    got, expected = np.asarray(got, "float64"), np.asarray(expected, "float64")
    if not expected.size:
        return 0.0
    scale = np.abs(expected).max()
    return float(np.abs(got - expected).max() / (scale if scale else 1.0))


def refused(kind, call, what):
    """Raise unless the call raises an error of this kind; return the error."""
    try:
        call()
    except kind as error:
        return error
    raise DifferenceError(f"{what} was not refused with {kind.__name__}")


def _same_type(got, expected, what):
    same((got.shape, got.dtype.name), (expected.shape, expected.dtype.name), what)


def _largest(got, expected):
    differ = np.argwhere(np.atleast_1d(got != expected))
    at = tuple(differ[0]) if got.ndim and len(differ) else ()
    count = f"{len(differ)} of {got.size} differ"
    return f"{count}, first at {tuple(map(int, at))}: {got[at]!r} instead of {expected[at]!r}"
