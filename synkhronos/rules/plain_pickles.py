"""Pickles of other programs, read without running anything that they name.

Recorder files and CIFAR-10's batches are pickles of dicts, lists, strings, numbers and arrays of
NumPy, many of them written by Python 2. Those are read; a pickle that names anything else is
refused. Scalars of NumPy become numbers of Python.

What is read takes memory in proportion to the pickle: what occurs twice in it is converted once,
and stays one object.
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
_NUMBERS_AN_OBJECT = {"PUT", "BINPUT", "LONG_BINPUT"}
_MOST_TUPLES, _MOST_OF_A_DTYPE = 10_000, 64
_INSIDE = object()  # what becomes of an object while its items are converted


def load(data: bytes, name: str, lists: bool = False) -> Any:
    """Return what a pickle holds.

    Parameters
    ----------
    data : bytes
        The pickle.
    name : str
        The file, for messages.
    lists : bool
        Whether to read arrays of objects too, as lists of what is read elsewhere: Keras' data sets
        have such.

    Raises
    ------
    ValueError
        If it is no pickle, or holds more than containers, text, numbers and arrays of them.

    Examples
    --------
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
    """Raise ValueError for what Python's unpickler does not bear.

    It makes room at once for the largest number by which a pickle refers to an object, and computes
    the hash of a tuple in a tuple in a tuple, and so on, in as many calls of a function.
    """
    n_tuples = 0
    for count, (operation, argument, _) in enumerate(pickletools.genops(data), 1):
        if operation.name in _NUMBERS_AN_OBJECT and argument > count:
            raise ValueError(f"it has an object with the number {argument}")
        n_tuples += operation.name.startswith("TUPLE")
        if n_tuples > _MOST_TUPLES:
            raise ValueError(f"it has more than {_MOST_TUPLES} tuples")


class _Refused(Exception):
    """A pickle names something else; the message has its name."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, file, kinds):
        super().__init__(file, encoding="latin1")
        self._kinds = kinds

    def find_class(self, module, name):
        made = _MAKERS.get((module.replace("numpy._core", "numpy.core"), name))
        if made is None:
            raise _Refused(one_line(f"{module}.{name}"))
        return _Maker(functools.partial(_Dtype, self._kinds) if made is _Dtype else made)


class _Maker:
    """Calls a function that makes an object. A pickle can't set its attributes."""

    __slots__ = ("_make",)

    def __init__(self, make):
        self._make = make

    def __call__(self, *args):
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


class _Array:
    """Stands for an array until all of the pickle has been read."""

    def __init__(self, *_):
        self.parts = None

    def __setstate__(self, state):
        _, shape, kind, is_fortran, items = state
        self.parts = shape, kind.dtype, is_fortran, items


def _scalar(kind, item):
    return np.frombuffer(_bytes(item), kind.dtype)[0].item()


def _bytes(text):
    if not isinstance(text, (str, bytes, bytearray)):
        raise TypeError(f"items of an array are no {type(text).__name__}")
    return text.encode("latin1") if isinstance(text, str) else bytes(text)


def _encoded(text, encoding="latin1"):
    """Return bytes: Python 3 writes those so that Python 2 can read them."""
    return text.encode("latin1")


def _ordered(pairs=()):
    return dict(pairs)


_MAKERS = {
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): _Array,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy.core.multiarray", "scalar"): _scalar,
    ("_codecs", "encode"): _encoded,
    ("collections", "OrderedDict"): _ordered,
}


class _Converter:
    """Puts arrays in place of what stands for them, and converts each object once."""

    def __init__(self):
        self._known = {}  # id of an object, which the pickle's value keeps alive -> what it became

    def converted(self, value):
        """Return what becomes of a value."""
        if not isinstance(value, (_Array, _Dtype, dict, list, tuple)):
            return value
        if id(value) not in self._known:
            self._known[id(value)] = _INSIDE
            self._known[id(value)] = self._new(value)
        found = self._known[id(value)]
        if found is _INSIDE:
            raise ValueError("an object contains itself")
        return found

    def _new(self, value):
        if isinstance(value, _Array):
            return np.zeros(0) if value.parts is None else self._array(*value.parts)
        if isinstance(value, dict):
            pairs = value.items()
            return {self.converted(key): self.converted(each) for key, each in pairs}
        if isinstance(value, (list, tuple)):
            return type(value)(self.converted(each) for each in value)
        return value.dtype if isinstance(value, _Dtype) else value

    def _array(self, shape, dtype, is_fortran, items):
        if dtype.kind == "O":
            return [self.converted(each) for each in items]
        # Items of two arrays may be one object.
        if id(items) not in self._known:
            self._known[id(items)] = bytearray(_bytes(items))
        items = np.frombuffer(self._known[id(items)], dtype)
        return items.reshape(shape, order="F" if is_fortran else "C")
