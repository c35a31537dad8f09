"""Users' arrays that rounds read and write: NumPy arrays, shared variables, arrays on devices.

    push:  value ──▶ Operand.read()  ──▶ the array itself, or a copy of what is on a device
    pull:  result ──▶ Operand.write() ──▶ the same memory, so that views of it see the result

The engine uses plain NumPy arrays as they are; anything else becomes an operand.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from synkhronos import _host
from synkhronos._host.choice import is_imported
from synkhronos._wording import shown
from synkhronos.parameter_server.reductions import NUMBERS


class Operand:
    """An array that a round reads from or writes to."""

    __slots__ = ()
    shape: tuple
    dtype: np.dtype

    def read(self) -> np.ndarray:
        """Return the present values: the memory itself on the host, a copy from a device."""
        raise NotImplementedError

    def write(self, array: np.ndarray) -> None:
        """Copy an array of the same shape into the operand's memory."""
        raise NotImplementedError


def operand_of(value: Any, name: str, writes: bool = False) -> Operand:
    """Return the operand of a user's array: of NumPy, a shared variable, or a GpuArray.

    Raise TypeError, with the name of the argument, for anything else, such as lists, and for dtypes
    that are no numbers. Raise ValueError if the round `writes` and the array is read-only.

    >>> import numpy as np, theano
    >>> weight = theano.shared(np.zeros(2), "weight")
    >>> operand = operand_of(weight, "array", writes=True)
    >>> operand.write(np.ones(2))
    >>> operand.shape, weight.get_value()
    ((2,), array([1., 1.]))
    """
    if isinstance(value, np.ndarray):
        return _array(value, name, writes)
    # If a library has not been imported, the value can't be one of its objects.
    if "pygpu" in sys.modules and _host.is_on_device(value):
        return _OnDevice(_numbers(value, name))
    if is_imported() and isinstance(value, _host.Variable):
        return _shared_variable(value, name, writes)
    hint = (
        ": its result could not be written back. Make it an array once, with numpy.asarray()"
        if isinstance(value, (list, tuple, int, float, complex, np.generic))
        else ""
    )
    raise TypeError(
        f"{name} must be an array of NumPy, a shared variable, or a GpuArray, got {shown(value)}"
        f"{hint}."
    )


def _array(value, name, writes):
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{name} must be an array without a mask, which a sum would ignore; fill it, with "
            "filled()."
        )
    _numbers(value, name)
    if writes and not value.flags.writeable:
        raise ValueError(
            f"{name} is read-only, but results are written into it: give a copy, or an array "
            "that owns its memory."
        )
    return _ArrayOperand(np.asarray(value))


def _numbers(value, name):
    if value.dtype.kind not in NUMBERS:
        raise TypeError(f"{name} must hold numbers, got an array of dtype {value.dtype}.")
    return value


def _shared_variable(variable, name, writes):
    if not isinstance(variable, _host.SharedVariable):
        raise TypeError(
            f"{name} must be a shared variable or an array, got the expression {variable}: it has "
            "a value only inside a compiled function. Store it in a shared variable, by an update."
        )
    if _host.is_random_state(variable) or not _host.is_array_variable(variable):
        raise TypeError(
            f"{name} must be a shared variable that holds an array, got {variable} of type "
            f"{variable.type}."
        )
    if _host.lives_on_device(variable):
        return _SharedOnDevice(variable)
    operand = _Shared(variable)
    _numbers(operand, name)
    value = _host.peek(variable)
    if writes and isinstance(value, np.ndarray) and not value.flags.writeable:
        raise ValueError(
            f"{name} is {variable}, whose array is read-only, but results are written into it: "
            "set its value without borrow=True."
        )
    return operand


class _ArrayOperand(Operand):
    __slots__ = ("_array", "dtype", "shape")

    def __init__(self, array):
        self._array, self.shape, self.dtype = array, array.shape, array.dtype

    def read(self):
        return self._array

    def write(self, array):
        self._array[...] = array


class _OnDevice(_ArrayOperand):
    __slots__ = ()

    def read(self):
        return _host.to_host(self._array)

    def write(self, array):
        _host.copy_to_device(self._array, _cast(array, self.dtype))


class _Shared(Operand):
    """A shared variable on the host. Its value may become another array at any call."""

    __slots__ = ("_variable",)

    def __init__(self, variable):
        self._variable = variable

    @property
    def shape(self):
        return np.shape(_host.peek(self._variable))

    @property
    def dtype(self):
        return np.dtype(self._variable.dtype)

    def read(self):
        # Operations in Python may leave a NumPy scalar in place of an array without axes.
        return np.asarray(_host.peek(self._variable))

    def write(self, array):
        own = _host.peek(self._variable)
        if isinstance(own, np.ndarray) and own.flags.writeable and own.shape == array.shape:
            own[...] = array
        else:
            _host.replace(self._variable, np.array(array))


class _SharedOnDevice(_Shared):
    __slots__ = ()

    @property
    def shape(self):
        return _host.peek(self._variable).shape

    def read(self):
        return _host.to_host(_host.peek(self._variable))

    def write(self, array):
        _host.replace(self._variable, _cast(array, self.dtype))


def _cast(array, dtype):
    """Return an array of the dtype of a device's memory, to which it is copied byte by byte."""
    return np.ascontiguousarray(array, dtype).reshape(array.shape)
