"""Pickles of other programs, read without running anything that they name.

Recorder files and CIFAR-10's batches are pickles of dicts, lists, strings, numbers and arrays of
NumPy, many of them written by Python 2. Those are read; a pickle that names anything else is
refused. Scalars of NumPy become numbers of Python.
"""

from __future__ import annotations

import functools
import io
import pickle
from typing import Any

import numpy as np

from synkhronos._wording import one_line

KINDS = "biufSU"  # of the items of arrays: numbers and text, never objects


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
        file = io.BytesIO(data)
        return _converted(_Unpickler(file, f"{KINDS}O" if lists else KINDS).load())
    except _Refused as refused:
        raise ValueError(
            f"{name} is not read: it names {refused}, but only containers, text, numbers and "
            "arrays of NumPy are taken from a pickle."
        ) from None
    except Exception as error:  # a damaged pickle raises errors of any kind
        raise ValueError(f"{name} is no pickle that can be read: {error!r}") from None


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
        return functools.partial(_Dtype, self._kinds) if made is _Dtype else made


class _Dtype:
    """Stands for a dtype: NumPy's own would take any state from the pickle."""

    def __init__(self, kinds, code, *_):
        self.dtype = np.dtype(str(code))
        if self.dtype.kind not in kinds:
            raise _Refused(f"an array of {self.dtype}")

    def __setstate__(self, state):
        if state[1] in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(state[1])


class _Array:
    """Stands for an array until all of the pickle has been read."""

    def __init__(self, *_):
        self.array = np.zeros(0)

    def __setstate__(self, state):
        _, shape, kind, is_fortran, items = state
        if kind.dtype.kind == "O":
            self.array = list(items)
            return
        items = np.frombuffer(_bytes(items), kind.dtype)
        self.array = items.reshape(shape, order="F" if is_fortran else "C").copy()


def _scalar(kind, item):
    return np.frombuffer(_bytes(item), kind.dtype)[0].item()


def _bytes(text):
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


def _converted(value):
    """Return the value with arrays in place of what stands for them."""
    if isinstance(value, _Array):
        return _converted(value.array) if isinstance(value.array, list) else value.array
    if isinstance(value, dict):
        return {_converted(key): _converted(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_converted(each) for each in value)
    if isinstance(value, _Dtype):
        return value.dtype
    return value
