"""Archives: files of arrays with a table of contents, as NumPy's npz without pickles.

    with new_file(path) as file, writing(file, "weights", keys=["w"]) as arrays:
        arrays["0"] = array                              one after the other, the table at the end
    with reading(path, "weights") as (table, arrays):    an array is read when it is asked for
        return dict(zip(table["keys"], arrays.values())) what is raised here is a damage, too

Checkpoints, snapshots of rules, and weights and states of stores are archives. Files that were
written before there was one format are read as well: their tables say nothing of what they hold.

An array takes no more memory than its file has bytes, whatever its header says; in a file that
another program has compressed, arrays take a limited multiple of it.
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
_ALWAYS_READ = 1 << 26  # bytes, which any memory has
_SUFFIX = ".npy"
_MOST_OF_AN_ERROR = 300
_TABLE, _OLD_TABLE = "about", "synkhronos"  # the array that holds the table, as JSON
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class _Arrays:
    """Writes each array that it is given to the archive at once, so that no list keeps copies."""

    def __init__(self, archive):
        self._archive = archive

    def __setitem__(self, name, array):
        array = np.asarray(array)
        with self._archive.open(f"{name}.npy", "w", force_zip64=True) as file:
            if array.nbytes < _LARGE or not array.flags.forc or array.dtype.hasobject:
                np.lib.format.write_array(file, array, allow_pickle=False)
            else:  # without NumPy's copies of each part
                header = np.lib.format.header_data_from_array_1_0(array)
                np.lib.format.write_array_header_1_0(file, header)
                file.write(array.ravel("K").view(np.uint8).data)


@contextlib.contextmanager
def writing(file, what, **table):
    """Give a mapping that writes arrays to an open file; write the table at the end of the block.

    `what` says what the archive holds: it is read as nothing else. `table` is made of JSON.
    """
    with zipfile.ZipFile(file, "w") as archive:
        arrays = _Arrays(archive)
        yield arrays
        text = json.dumps({"version": _VERSION, "what": what, **table})
        arrays[_TABLE] = np.array(text)


@contextlib.contextmanager
def reading(file, what, name=None):
    """Give the table of an archive and its arrays by name, in the order of the file.

    `file` is a path, or an open file with its `name` for messages.

    Raises ``OSError`` if it can't be read, ``ValueError`` if it is damaged or holds something else,
    also for what the block raises.
    """
    name = repr(os.fspath(file)) if name is None else name
    opened = contextlib.nullcontext(file) if hasattr(file, "read") else open_file(file)
    with opened as opened, damage_told(name, what), zipfile.ZipFile(opened) as archive:
        arrays = _Stored(archive, opened.seek(0, os.SEEK_END))
        table = arrays.pop_table()
        if table["version"] != _VERSION:
            raise ValueError(f"it is of version {table['version']}, this is {_VERSION}")
        there = table.get("what", what)
        if there == what:
            yield table, arrays
            return
    raise ValueError(f"{name} holds {one_line(there)}, not {what}.")


class _Stored(Mapping):
    """The arrays of an archive by name, in its order, each read once: when it is asked for."""

    def __init__(self, archive, n_bytes):
        self._archive, self._read = archive, {}
        self._infos = {each.filename[: -len(_SUFFIX)]: each for each in archive.infolist()}
        for info in archive.infolist():
            if not info.filename.endswith(_SUFFIX):
                raise ValueError(f"{one_line(info.filename)} is no array")
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(f"{one_line(info.filename)} is compressed in an unusual way")
        if len(self._infos) < len(archive.infolist()):
            raise ValueError("two of its arrays have one name")
        total = sum(each.file_size for each in archive.infolist())
        if total > _MOST_TIMES * n_bytes + _ALWAYS_READ:
            raise ValueError(
                f"its arrays have {total} bytes, more than {_MOST_TIMES} times as many as the file "
                f"({n_bytes}), which may fill the memory; without compression it is read"
            )

    def pop_table(self):
        """Remove the table of contents, and return it."""
        name = _TABLE if _TABLE in self._infos else _OLD_TABLE
        if name not in self._infos:
            raise ValueError("it has no table of contents")
        return json.loads(str(self._array(self._infos.pop(name), "U")))

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
    """Return the shape and dtype of an array in NumPy's format, of which the bytes follow."""
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"NumPy's format {version} is not read, only {list(_HEADERS)}")
    shape, _, dtype = _HEADERS[version](file)
    return shape, dtype


def read_npy(file, n_bytes, kinds="biufc"):
    """Read an array in NumPy's format, of some kinds of dtypes, from a file of so many bytes."""
    shape, dtype = read_header(file)
    if dtype.kind not in kinds:
        raise ValueError(f"an array has the dtype {one_line(str(dtype))}, and not one of numbers")
    if math.prod(shape) * dtype.itemsize > n_bytes:
        raise ValueError(f"an array of shape {shape} and {dtype} is more than {n_bytes} bytes")
    file.seek(0)
    return np.lib.format.read_array(file, allow_pickle=False)


@contextlib.contextmanager
def damage_told(name, what):
    """Raise ValueError, which names the file, for what a damaged one makes the block raise."""
    try:
        yield
    except raised_here(Exception) as error:
        # Damages raise errors of many kinds, of zipfile, zlib, json and NumPy; EINVAL of an offset.
        if isinstance(error, OSError) and error.errno not in (errno.EINVAL, None):
            raise
        why = sentence(f"it lacks {error}" if isinstance(error, KeyError) else error)
        why = printable(why[:_MOST_OF_AN_ERROR], kept="")
        raise ValueError(
            f"{name} can't be read: it is damaged, or does not hold {what}: {why}"
        ) from error
