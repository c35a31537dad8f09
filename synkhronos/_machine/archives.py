"""Archives: files of arrays with a table of contents, in NumPy's npz format without pickles.

    with new_file(path) as file, writing(file, "weights", keys=["w"]) as arrays:
        arrays["0"] = array                              written at once; the table comes at the end
    with reading(path, "weights") as (table, arrays):    each array is read at its first use
        return dict(zip(table["keys"], arrays.values())) errors here are reported as a damaged file

Checkpoints, snapshots of rules, and weights and states of stores are archives.

An array never takes more memory than its file has bytes, whatever its header says; or a limited
multiple of that, if another program has compressed the file.
"""

import contextlib
import errno
import json
import math
import os
import zipfile
from collections.abc import Mapping

import numpy as np

from synkhronos._machine.files import open_file
from synkhronos._machine.interrupts import raised_here
from synkhronos._wording import one_line, printable, sentence

_VERSION = 1
_LARGE = 1 << 16  # bytes of an array
_MOST_TIMES = 16  # of the bytes of a compressed file
_ALWAYS_READ = 1 << 26  # bytes of arrays that are read, however small the file is
_SUFFIX = ".npy"
_MOST_OF_AN_ERROR = 300
_TABLE = "about"  # the array that holds the table, as JSON
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class _ArrayWriter:
    """A mapping that writes each array into the archive at once, so that no copies are kept."""

    def __init__(self, archive):
        self._archive = archive

    def __setitem__(self, name, array):
        array = np.asarray(array)
        with self._archive.open(f"{name}.npy", "w", force_zip64=True) as file:
            if array.nbytes < _LARGE or not array.flags.forc or array.dtype.hasobject:
                np.lib.format.write_array(file, array, allow_pickle=False)
            else:  # the same bytes, without the copies that NumPy makes of each part
                header = np.lib.format.header_data_from_array_1_0(array)
                np.lib.format.write_array_header_1_0(file, header)
                file.write(array.ravel("K").view(np.uint8).data)


@contextlib.contextmanager
def writing(file, what, **table):
    """Give a mapping that writes arrays to an open file; write the table at the end of the block.

    `what` says what the archive holds; `reading` must ask for the same. `table` consists of JSON.
    """
    with zipfile.ZipFile(file, "w") as archive:
        arrays = _ArrayWriter(archive)
        yield arrays
        arrays[_TABLE] = np.array(json.dumps({"version": _VERSION, "what": what, **table}))


@contextlib.contextmanager
def reading(file, what, name=None):
    """Give the table of an archive, a path or an open file, and its arrays in the file's order.

    ValueError replaces an exception of the block, and tells of a damaged file or another content.
    """
    name = repr(os.fspath(file)) if name is None else name
    opened = contextlib.nullcontext(file) if hasattr(file, "read") else open_file(file)
    with opened as opened, damage_told(name, what), zipfile.ZipFile(opened) as archive:
        arrays = _ArrayReader(archive, opened.seek(0, os.SEEK_END))
        table = arrays.pop_table()
        if table["version"] != _VERSION:
            raise ValueError(f"it is of version {table['version']}, this is {_VERSION}")
        if table["what"] == what:
            yield table, arrays
            return
    raise ValueError(f"{name} holds {one_line(table['what'])}, not {what}.")


class _ArrayReader(Mapping):
    """The arrays of an archive by name, in its order. Each is read once, at its first use."""

    def __init__(self, archive, n_bytes):
        self._archive, self._read, infos = archive, {}, archive.infolist()
        self._infos = {info.filename[: -len(_SUFFIX)]: info for info in infos}
        for info in infos:
            if not info.filename.endswith(_SUFFIX):
                raise ValueError(f"{one_line(info.filename)} is no array")
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(f"{one_line(info.filename)} is compressed in an unusual way")
        if len(self._infos) < len(infos):
            raise ValueError("two of its arrays have one name")
        total = sum(info.file_size for info in infos)
        if total > _MOST_TIMES * n_bytes + _ALWAYS_READ:
            raise ValueError(
                f"its arrays have {total} bytes, more than {_MOST_TIMES} times as many as the file "
                f"({n_bytes}), which may fill the memory; without compression it is read"
            )

    def pop_table(self):
        """Remove the table of contents, and return it."""
        if _TABLE not in self._infos:
            raise ValueError("it has no table of contents")
        return json.loads(str(self._array(self._infos.pop(_TABLE), "U")))

    def __iter__(self):
        return iter(self._infos)

    def __len__(self):
        return len(self._infos)

    def __getitem__(self, name):
        if name not in self._read:
            self._read[name] = self._array(self._infos[name])
        return self._read[name]

    def _array(self, info, kinds="biufc"):
        with self._archive.open(info) as file:
            array = read_npy(file, info.file_size, kinds)
            if file.read(1):
                raise ValueError(f"{one_line(info.filename)} is more than an array")
        return array


def load_npy(path):
    """Return the array of a file in NumPy's format; raise ValueError if it holds something else."""
    with open_file(path) as file:
        try:
            return read_npy(file, os.fstat(file.fileno()).st_size)
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)!r} can't be read: {sentence(error)}") from error


def read_header(file):
    """Read the header of an array in NumPy's format; return the array's shape and dtype."""
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"NumPy's format {version} is not read, only {list(_HEADERS)}")
    shape, _, dtype = _HEADERS[version](file)
    return shape, dtype


def read_npy(file, n_bytes, kinds="biufc"):
    """Read an array in NumPy's format from a file of `n_bytes`; refuse other `kinds` of dtypes."""
    shape, dtype = read_header(file)
    if dtype.kind not in kinds:
        raise ValueError(f"an array has the dtype {one_line(str(dtype))}, and not one of numbers")
    if math.prod(shape) * dtype.itemsize > n_bytes:
        raise ValueError(f"an array of shape {shape} and {dtype} is more than {n_bytes} bytes")
    file.seek(0)
    return np.lib.format.read_array(file, allow_pickle=False)


@contextlib.contextmanager
def damage_told(name, what):
    """Turn an exception of the block, as a damaged file causes, into a ValueError with its name."""
    try:
        yield
    except raised_here(Exception) as error:
        # zipfile, zlib, json and NumPy raise many kinds of errors; a wrong offset gives EINVAL.
        if isinstance(error, OSError) and error.errno not in (errno.EINVAL, None):
            raise
        why = sentence(f"it lacks {error}" if isinstance(error, KeyError) else error)
        why = printable(why[:_MOST_OF_AN_ERROR], kept="")
        raise ValueError(
            f"{name} can't be read: it is damaged, or does not hold {what}: {why}"
        ) from error
