"""Pickles of other programs, read without running anything that they name.

Recorder files and CIFAR-10's batches are pickles of dicts, lists, strings, numbers and arrays of
NumPy, many of them written by Python 2. Those are read; a pickle that names anything else is
refused. Scalars of NumPy become numbers of Python.

Reading takes memory in proportion to the pickle: an object to which it refers twice is converted
once, and stays one object.
"""

from __future__ import annotations

import functools
import io
import pickle
import pickletools
from typing import Any

import numpy as np

from synkhronos._wording import one_line, shown

KINDS = "biufSU"  # of the items of arrays: numbers and text, never objects
_PUTS = {"PUT", "BINPUT", "LONG_BINPUT"}
_GETS = {"GET", "BINGET", "LONG_BINGET"}
_MOST_TUPLES = 100_000
_MOST_OF_A_DTYPE = 64  # characters
_AN_OBJECT = 64  # bytes
_MOST_TIMES, _ALWAYS_MADE = 16, 1 << 26  # a pickle may make 16 times its bytes, and 64 MiB
_INSIDE = object()  # marks an object whose items are being converted


def load(data: bytes, name: str, lists: bool = False) -> Any:
    """Return the object in a pickle; `name` is its file, for messages.

    Raise ValueError if it is no pickle, or holds more than containers, text, numbers and arrays of
    them. With `lists` arrays of objects are read, too, as lists: Keras' data sets have some.

    >>> load(pickle.dumps({"lr": [[1, np.float32(0.5)]]}), "inforec.pkl")
    {'lr': [[1, 0.5]]}
    """
    try:
        _check(data)
        kinds = f"{KINDS}O" if lists else KINDS
        return _Converter().converted(_Unpickler(io.BytesIO(data), kinds).load())
    except _Refused as refused:
        raise ValueError(
            f"{name} is not read: it names {refused}, but only containers, text, numbers and "
            "arrays of NumPy are taken from a pickle."
        ) from None
    except Exception as error:  # a damaged pickle raises errors of any kind
        raise ValueError(f"{name} is no pickle that can be read: {shown(error, 200)}") from None


def _check(data):
    """Raise ValueError for a pickle that would exhaust the memory or the stack of the unpickler.

    The unpickler allocates memory for the largest number by which a pickle refers to an object, and
    hashes nested tuples by one recursive call for each level. Tuples of arguments, which each
    number of NumPy has, don't count.
    """
    n_tuples, numbers, of_arguments, new = 0, set(), set(), None
    for count, (operation, argument, _) in enumerate(pickletools.genops(data), 1):
        name = operation.name
        if name in _PUTS or name == "MEMOIZE":
            number = len(numbers) if name == "MEMOIZE" else argument
            if number > count:
                raise ValueError(f"it refers to object {number}, but has fewer objects")
            numbers.add(number)
            if new is not None:
                new.append(number)
            continue
        if name in ("REDUCE", "BUILD") and new is not None:
            n_tuples -= 1
            of_arguments.update(new)
        new = [] if name.startswith("TUPLE") else None
        n_tuples += new is not None or (name in _GETS and argument in of_arguments)
        if n_tuples > _MOST_TUPLES:
            raise ValueError(f"it has more than {_MOST_TUPLES} tuples")


class _Refused(Exception):
    """A pickle names an object that is not allowed; the message is its name."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, file, kinds):
        super().__init__(file, encoding="latin1")
        self._kinds = kinds
        self._left = [_MOST_TIMES * len(file.getbuffer()) + _ALWAYS_MADE]

    def find_class(self, module, name):
        made = _MAKERS.get((module.replace("numpy._core", "numpy.core"), name))
        if made is None:
            raise _Refused(one_line(f"{module}.{name}"))
        made = functools.partial(_Dtype, self._kinds) if made is _Dtype else made
        return _Maker(made, self._left)


class _Maker:
    """Calls a function that makes an object. A pickle can't set attributes of the function.

    `left` has the bytes that all makers together may still make: a small pickle may pass the same
    large argument many times.
    """

    __slots__ = ("_left", "_make")

    def __init__(self, make, left):
        self._make, self._left = make, left

    def __call__(self, *args):
        self._left[0] -= _AN_OBJECT + sum(map(_size, args))
        if self._left[0] < 0:
            raise ValueError("it makes objects of many times its size")
        return self._make(*args)

    def __setstate__(self, state):
        raise _Refused("what makes an object, to change it")


class _Dtype:
    """Stands for a dtype: NumPy's own would take any state from the pickle."""

    def __init__(self, kinds, code, *_):
        self.dtype = np.dtype(str(code)[:_MOST_OF_A_DTYPE])
        if self.dtype.kind not in kinds:
            raise _Refused(f"an array of {self.dtype}")

    def __setstate__(self, state):
        if state[1] in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(state[1])


class _UnreadArray:
    """Stands for an array until all of the pickle has been read."""

    def __init__(self, *_):
        self.parts = None

    def __setstate__(self, state):
        _, shape, kind, is_fortran, items = state
        self.parts = shape, kind.dtype, is_fortran, items


def _scalar(kind, item):
    return np.frombuffer(_bytes(item), kind.dtype)[0].item()


def _size(argument):
    """Return about how many bytes an argument has."""
    if isinstance(argument, (str, bytes, bytearray)):
        return len(argument)
    return _AN_OBJECT * len(argument) if isinstance(argument, (dict, list, tuple)) else 0


def _bytes(text):
    if not isinstance(text, (str, bytes, bytearray)):
        raise TypeError(f"items of an array are no {type(text).__name__}")
    return text.encode("latin1") if isinstance(text, str) else bytes(text)


def _encoded(text, encoding="latin1"):
    """Return bytes: Python 3 writes those so that Python 2 can read them."""
    return text.encode("latin1")


_MAKERS = {
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): _UnreadArray,
    ("numpy.core.multiarray", "_reconstruct"): _UnreadArray,
    ("numpy.core.multiarray", "scalar"): _scalar,
    ("_codecs", "encode"): _encoded,
    ("collections", "OrderedDict"): dict,
}


class _Converter:
    """Replaces `_UnreadArray` and `_Dtype` by arrays and dtypes; converts each object once."""

    def __init__(self):
        self._known = {}  # id of an object, which the pickle's value keeps alive -> what it became

    def converted(self, value):
        """Return the converted value."""
        if not isinstance(value, (_UnreadArray, _Dtype, dict, list, tuple)):
            return value
        if id(value) not in self._known:
            self._known[id(value)] = _INSIDE
            self._known[id(value)] = self._new(value)
        if self._known[id(value)] is _INSIDE:
            raise ValueError("an object contains itself")
        return self._known[id(value)]

    def _new(self, value):
        if isinstance(value, _UnreadArray):
            return np.zeros(0) if value.parts is None else self._array(*value.parts)
        if isinstance(value, dict):
            pairs = value.items()
            return {self.converted(key): self.converted(each) for key, each in pairs}
        if isinstance(value, (list, tuple)):
            return type(value)(self.converted(each) for each in value)
        return value.dtype

    def _array(self, shape, dtype, is_fortran, items):
        if dtype.kind == "O":
            return self.converted(items)
        # Arrays that share their bytes in the pickle share them here. A single byte is not shared:
        # Python has only one object for equal ones.
        known = self._known if len(items) > 1 else {}
        if id(items) not in known:
            known[id(items)] = bytearray(_bytes(items))
        array = np.frombuffer(known[id(items)], dtype)
        return array.reshape(shape, order="F" if is_fortran else "C")
