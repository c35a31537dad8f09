"""Conversion of lists, scalars and arrays to arrays of a dtype, without loss unless asked for."""

import numbers
import warnings

import numpy as np

from synkhronos._wording import count, shown, truth

_KINDS = "biufc"  # dtypes of bools, signed and unsigned integers, floats, complex numbers
_EXACT = 2**53  # float64 holds all integers below it


def check_dtype(dtype):
    """Return a dtype of numbers or bools; raise TypeError for anything else."""
    try:
        dtype = np.dtype(dtype)
    except TypeError:
        raise TypeError(f"dtype must be the name of a NumPy dtype, got {dtype!r}.") from None
    if dtype.kind not in _KINDS:
        raise TypeError(f"dtype must be one of numbers or bools, got {dtype}.")
    return dtype.newbyteorder("=")


def as_array(value, dtype, force_cast, what):
    """Return a list or scalar as an array, of `dtype` if given; raise if that loses values."""
    with warnings.catch_warnings():
        # For rows of unequal length older NumPy warns and makes an array of objects, which is
        # refused below. NumPy 1.24 and later raise.
        warnings.simplefilter("ignore")
        try:
            array = np.asarray(value)
        except ValueError as error:
            if "inhomogeneous" not in str(error):
                raise
            array = np.asarray(None)
    check_kind(array, value, what)
    if dtype is None or force_cast:
        return array
    if np.dtype(dtype).kind in "iu" and not _is_exact(array):
        return _exact_integers(value, np.dtype(dtype), what)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy warns of lost values, which are checked below
        cast = array.astype(dtype)
        same = cast.astype(array.dtype) == array
    if array.dtype.kind in "iu" and cast.dtype.kind in "iu":
        same &= (cast < 0) == (array < 0)  # one that wraps in both casts seems the same
    if array.dtype.kind in "fc" and _KINDS.index(cast.dtype.kind) >= _KINDS.index(array.dtype.kind):
        same = np.isfinite(cast) | ~np.isfinite(array)  # rounding is no loss
    if not same.all():
        raise _loss(what, cast.dtype, array[~same].flat[0].item())
    return cast


def _is_exact(array):
    """Return whether an array that NumPy made of a list holds the list's integers exactly.

    NumPy makes floats of integers if a float, or integers below and above 2**63, are among them.
    """
    return array.dtype.kind != "f" or bool((np.abs(array) < _EXACT).all())


def _exact_integers(value, dtype, what):
    """Return a list or scalar as an array of integers; raise if an item does not fit."""
    items, limits = np.array(value, object), np.iinfo(dtype)
    for item in items.flat:
        # As an int of Python: NumPy would compare its integers with these as floats.
        item = item.item() if isinstance(item, np.generic) else item
        if not (limits.min <= item <= limits.max and item == int(item)):
            raise _loss(what, dtype, item)
    return items.astype(dtype)


def _loss(what, dtype, item):
    return TypeError(
        f"{what} is of dtype {dtype}, which can't hold {item!r}. Cast it yourself, or "
        "pass force_cast=True."
    )


def check_kind(array, value, what):
    """Raise TypeError unless an array, which is made of `value`, holds numbers or bools."""
    if array.dtype.kind not in _KINDS:
        wanted = "numbers or bools in rows of one length"
        if array.size and all(isinstance(item, numbers.Integral) for item in array.flat):
            wanted = "numbers or bools, no integers of more than 64 bits"
        raise TypeError(f"{what} must hold {wanted}, got {shown(value)}, of dtype {array.dtype}.")
    if np.ma.is_masked(value):
        raise TypeError(f"{what} can't hold the masked items of the value: see its filled().")


def condition(value, dtype, ndim, force_cast, what):
    """Return a value as an array that can be cast up to `dtype`, or any array if `force_cast`."""
    force_cast = truth("force_cast", force_cast)
    if not isinstance(value, np.ndarray):
        value = as_array(value, dtype, force_cast, what)
    check_kind(value, value, what)
    if value.ndim != ndim:
        raise TypeError(
            f"{what} has {count(ndim, 'dimension')}, but the value has {value.ndim}, shape "
            f"{value.shape}."
        )
    if value.dtype == dtype or force_cast:
        return value
    if np.promote_types(value.dtype, dtype) != dtype:
        raise TypeError(
            f"{what} is of dtype {dtype}, to which {value.dtype} can't be cast up. Cast it "
            "yourself, or pass force_cast=True."
        )
    return value
