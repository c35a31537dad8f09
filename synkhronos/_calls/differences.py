"""Compare arrays except for rounding, and make arrays that differ by rounding alone."""

import numpy as np

from synkhronos import _host

# Relative to the largest expected value. Ranks sum in another order than one process does.
_TOLERANCES = {"float16": 2e-2, "float32": 1e-3, "complex64": 1e-3}
_TOLERANCE = 1e-7  # for all other dtypes
_BLOCK = 1 << 16  # items that are scaled at a time


def difference(found, expected, before=None, beside=0):
    """Return by how much two arrays differ, in words; None if only by rounding.

    With the value `before` an update, the tolerance is relative to the change. `beside` is the
    largest change of all updates of the call, of which the rounding is allowed, too.
    """
    if isinstance(found, list):
        return f"a list of {len(found)} arrays, serially one of shape {expected.shape}"
    found, expected = np.asarray(_host.to_host(found)), np.asarray(_host.to_host(expected))
    if found.shape != expected.shape:
        return f"its shape is {found.shape}, serially {expected.shape}"
    if found.size == 0 or np.array_equal(found, expected):
        return None
    one, other = _wide(found), _wide(expected)
    apart = _distances(one, other)
    if not apart.any():
        return None
    scale = np.abs(other[np.isfinite(other)]).max(initial=0)
    coarse = max(_TOLERANCES.get(str(each.dtype), 0) for each in (found, expected))
    tolerance = (coarse or _TOLERANCE) * scale
    if before is not None and before.shape == other.shape:
        change = change_of(other, before)
        rounding = max(_rounding(each.dtype) for each in (found, expected))
        tolerance = min(tolerance, 10 * (coarse or _TOLERANCE) * change + 64 * rounding * scale)
        tolerance = max(tolerance, 64 * rounding * beside)
    largest = np.nan if np.isnan(apart).any() else apart.max()
    if largest <= tolerance:
        return None
    return f"the largest difference is {largest:.3g}, where the largest value is {scale:.3g}"


def nudged(array, random):
    """Return a copy of an array of floats, each item changed in its last bit; else the array."""
    if array.dtype.kind not in "fc":
        return array
    step, array = _rounding(array.dtype), np.array(array, order="C")
    scale_items(array, lambda n: random.choice([1 - step, 1 + step], n))
    return array


def scale_items(array, factors):
    """Multiply an array of floats in place by random factors: ``factors(n)`` returns n of them."""
    if array.dtype.kind in "fc":
        flat = array.reshape(-1)
        for at in range(0, flat.size, _BLOCK):
            block = flat[at : at + _BLOCK]
            block *= factors(block.size).astype(array.dtype)


def distance(one, other):
    """Return the largest difference of two arrays; infinite if they have different shapes."""
    one, other = np.asarray(one), np.asarray(other)
    if one.shape != other.shape:
        return np.inf
    return np.nan_to_num(_distances(_wide(one), _wide(other)), nan=np.inf).max(initial=0)


def _wide(array):
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _distances(one, other):
    """Return the distance of each pair of items; 0 where both are NaN, or equally infinite."""
    with np.errstate(all="ignore"):
        same = (one == other) | ((one != one) & (other != other))
        return np.abs(np.where(same, 0, one - other))


def change_of(array, before):
    """Return the largest finite change of an item."""
    with np.errstate(all="ignore"):
        return np.nan_to_num(np.abs(array - before), posinf=0).max(initial=0)


def _rounding(dtype):
    return np.finfo(dtype).eps if dtype.kind in "fc" else 0
