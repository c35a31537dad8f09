"""Reads pickles of plain data: containers, numbers, text and arrays; nothing in them can run."""

from __future__ import annotations

import pickle
from typing import Any, BinaryIO

import numpy as np

# The names that pickled arrays need, in NumPy from 1.x to 2.x, and in Python 2.
_OF_ARRAYS = {
    "_reconstruct": np.core.multiarray._reconstruct,
    "scalar": np.core.multiarray.scalar,
    "ndarray": np.ndarray,
    "dtype": np.dtype,
    "_frombuffer": np.core.numeric._frombuffer,
}
_MODULES = {
    "numpy",
    *(f"numpy.{c}.{m}" for c in ("core", "_core") for m in ("multiarray", "numeric")),
}


class PlainUnpickler(pickle.Unpickler):
    """An unpickler that makes arrays, containers, numbers and text only."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function by its name; refuse all that arrays don't need."""
        if module in _MODULES and name in _OF_ARRAYS:
            return _OF_ARRAYS[name]
        if (module, name) == ("_codecs", "encode"):  # of bytes, in protocols 0 to 2
            return _encode
        raise pickle.UnpicklingError(
            f"the pickle names {module}.{name}; only arrays, containers, numbers and text are read."
        )


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"the pickle has bytes in the encoding {encoding!r}.")
    return text.encode("latin1")


def read(stream: BinaryIO) -> Any:
    """Return the next object in a stream of pickles.

    Text of Python 2 becomes text, one character for each byte.

    >>> import io
    >>> read(io.BytesIO(pickle.dumps({"labels": [3, 1]})))
    {'labels': [3, 1]}
    """
    return PlainUnpickler(stream, encoding="latin1").load()
