"""From lists and numbers to arrays, as exactly as a dtype can hold them."""

import contextlib
import numbers
import warnings

import numpy as np

KINDS = "biufc"  # of dtypes: bools, integers with and without a sign, floats, complex numbers


def as_array(value, dtype, force_cast, what):
    """Return a list or scalar as an array, of `dtype` if one is given, as exactly as it can."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rows of unequal length: an array of objects
        array = np.asarray(value)
    check_kind(array, value, what)
    if dtype is None or force_cast:
        return array
    if array.dtype.kind == "f" and np.dtype(dtype).kind in "iu":
        # NumPy makes floats of unsigned 64-bit integers among smaller ones.
        objects = np.array(value, object)
        if all(isinstance(item, numbers.Integral) for item in objects.flat):
            with contextlib.suppress(OverflowError):
                cast = objects.astype(dtype)
                if (cast == objects).all():
                    return cast
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is lost, which is looked for here
        cast = array.astype(dtype)
        same = cast.astype(array.dtype) == array
    if array.dtype.kind in "fc" and KINDS.index(cast.dtype.kind) >= KINDS.index(array.dtype.kind):
        same = np.isfinite(cast) | ~np.isfinite(array)  # fractions are rounded
    if not same.all():
        wrong = array[~same].flat[0].item()
        raise TypeError(
            f"{what} is of dtype {cast.dtype}, which can't hold {wrong!r}. Cast it yourself, or "
            "pass force_cast=True."
        )
    return cast


def check_kind(array, value, what):
    """Raise TypeError for an array of anything but numbers or bools; `value` is what it was."""
    if array.dtype.kind not in KINDS:
        raise TypeError(
            f"{what} must hold numbers or bools in rows of one length, got {repr(value)[:80]}, "
            f"of dtype {array.dtype}."
        )
