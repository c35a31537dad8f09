"""Archives: files of arrays with a table of contents, as NumPy's npz without pickles.

    with new_file(path) as file, writing(file, "weights", keys=["w"]) as arrays:
        arrays["0"] = array                              one after the other, the table at the end
    with reading(path, "weights") as (table, arrays):    every array is read, so a damage is found
        return dict(zip(table["keys"], arrays.values())) what is raised here is a damage, too

Checkpoints, snapshots of rules, and weights and states of stores are archives. Files that were
written before there was one format are read as well: their tables say nothing of what they hold.
"""

import contextlib
import errno
import json
import os
import zipfile

import numpy as np

from synkhronos._machine.interrupts import raised_here
from synkhronos._wording import one_line, sentence

_VERSION = 1
_LARGE = 1 << 16  # bytes of an array
_TABLE, _OLD_TABLE = "about", "synkhronos"  # the array that holds the table, as JSON


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
    with damage_told(name, what), zipfile.ZipFile(file) as archive:
        arrays = {each[: -len(".npy")]: _read(archive, each) for each in archive.namelist()}
        table = _TABLE if _TABLE in arrays else _OLD_TABLE
        if table not in arrays:
            raise ValueError("it has no table of contents")
        table = json.loads(str(arrays.pop(table)))
        if table["version"] != _VERSION:
            raise ValueError(f"it is of version {table['version']}, this is {_VERSION}")
        there = table.get("what", what)
        if there == what:
            yield table, arrays
            return
    raise ValueError(f"{name} holds {one_line(there)}, not {what}.")


def _read(archive, name):
    with archive.open(name) as file:
        array = np.lib.format.read_array(file, allow_pickle=False)
        if file.read(1) or not name.endswith(".npy"):
            raise ValueError(f"{one_line(name)} is more than an array")
    return array


@contextlib.contextmanager
def damage_told(name, what):
    """Raise ValueError, which names the file, for what a damaged one makes the block raise."""
    try:
        yield
    except raised_here(Exception) as error:
        # Damages raise errors of many kinds, of zipfile, zlib, json and NumPy; EINVAL of an offset.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        why = sentence(f"it lacks {error}" if isinstance(error, KeyError) else error)
        raise ValueError(
            f"{name} can't be read: it is damaged, or does not hold {what}: {why}"
        ) from error
