"""Files of one array: hickle's (HDF5), ``.npy`` and ``.npz``. Reading one never runs its code.

hickle stores an array as one data set with attributes. Its versions name the groups above it
differently, so `read` takes the only data set with numbers, wherever it is.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from synkhronos._host import pythons

HICKLE = (".hkl", ".hickle", ".h5", ".hdf5")


def read(path: Any) -> np.ndarray:
    """Return the array of a file; raise ValueError if it has no array of numbers, or several.

    Files of hickle need h5py, else ImportError is raised.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(folder + "/rows.npy", [1, 2])
    ...     read(folder + "/rows.npy")
    array([1, 2])
    """
    path = Path(os.fspath(path))
    if not path.is_file():
        raise FileNotFoundError(f"No file {path} with a batch.")
    if path.suffix in HICKLE:
        return _read_hickle(path)
    try:
        content = np.load(path, allow_pickle=False)
    except ValueError as error:
        raise ValueError(
            f"{path} has no array that can be read without a pickle: {error}"
        ) from None
    if isinstance(content, np.ndarray):
        return content
    with content as archive:
        return archive[_only(path, archive.files)]


def write_hickle(path: Any, array: np.ndarray, mode: str = "w") -> None:
    """Write an array into a file as hickle 3 does."""
    if mode not in ("w", "w-", "x"):
        raise ValueError(f"mode must be 'w' or 'w-', got {mode!r}: a file holds one array.")
    if array.dtype.hasobject:
        raise TypeError(f"{path}: only arrays of numbers can be written, got {array.dtype}.")
    with _h5py(path).File(os.fspath(path), mode) as file:
        file.attrs["CLASS"] = b"hickle"
        file.attrs["VERSION"] = b"3.0.0"
        file.create_dataset("data_0", data=array).attrs["type"] = [b"ndarray"]


def _read_hickle(path):
    h5py = _h5py(path)
    # Some file systems of clusters have no locks, and the ranks only read.
    options = {"locking": False} if h5py.version.version_tuple[:2] >= (3, 5) else {}
    try:
        file = h5py.File(path, "r", **options)
    except OSError as error:
        raise ValueError(f"{path} is no file of hickle (HDF5): {error}") from None
    with file:
        arrays = {}

        def visit(name, node):
            # hickle 1 stores the kind of the object in a second data set, "type".
            if hasattr(node, "shape") and node.dtype.kind in "biuf" and name != "type":
                arrays[name] = node

        file.visititems(visit)
        return arrays[_only(path, list(arrays))][()]


def _only(path, names):
    if len(names) != 1:
        listed = f": {', '.join(sorted(names)[:5])}" if names else ""
        raise ValueError(f"{path} must have one array of numbers, but has {len(names)}{listed}.")
    return names[0]


def _h5py(path):
    try:
        import h5py
    except ImportError:
        needed = f"{path} is a file of hickle, which needs h5py: {pythons.install('rules')}"
        raise ImportError(needed) from None
    return h5py
