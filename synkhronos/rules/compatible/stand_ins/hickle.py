"""``hickle`` for files of one array, where the package isn't installed."""

from __future__ import annotations

from typing import Any

import numpy as np

from synkhronos.rules.array_files import read, write_hickle


def load(fileobj: Any, path: str = "/", safe: bool = True) -> np.ndarray:
    """Return the array of a file of hickle 2 or 3, or of a ``.npy`` file."""
    return read(getattr(fileobj, "name", fileobj))


def dump(py_obj: Any, file_obj: Any, mode: str = "w", **options: Any) -> None:
    """Write one array into a new file, which hickle 2 and 3 read; mode "w" or "w-"."""
    write_hickle(getattr(file_obj, "name", file_obj), np.asarray(py_obj), mode)
