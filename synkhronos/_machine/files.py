"""Files that are complete or not there: written beside their place, then renamed."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress

from synkhronos._wording import shown


class NewFile:
    """A context: a file beside `path` to write to, which takes its place at the end of the block.

    An exception in the block removes the file, and leaves what was there. A link at `path` stays,
    and the file that it points to is replaced; without `follow` the link is replaced.
    """

    def __init__(self, path, follow=True):
        if follow:
            self._path = os.path.realpath(path)
        else:
            folder, name = os.path.split(path)
            self._path = os.path.join(os.path.realpath(folder), name)
        folder, name = os.path.split(self._path)
        self._folder = folder
        self._written = os.path.join(folder, f".{name}.{secrets.token_hex(4)}")

    def __enter__(self):
        self._file = open(self._written, "xb")
        return self._file

    def __exit__(self, kind, error, trace):
        try:
            with self._file as file:
                if kind is None:
                    file.flush()
                    os.fsync(file.fileno())
            if kind is None:
                if os.path.exists(self._path) and not os.path.islink(self._path):
                    shutil.copymode(self._path, self._written)
                os.replace(self._written, self._path)
                self._keep_name()
        finally:
            with suppress(FileNotFoundError):  # it has its name
                os.unlink(self._written)

    def _keep_name(self):
        """Write the folder to the disk: else a crash of the machine may undo the renaming."""
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            with suppress(OSError):  # some network file systems can't
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


def npz_path(path):
    """Return an argument `path` as a str, of a file of NumPy's format ``.npz``.

    Raises ``TypeError`` for anything but a path, ``ValueError`` for another name or a folder.
    """
    try:
        text = os.fspath(path)
        if not isinstance(text, str):
            raise TypeError
    except TypeError:
        raise TypeError(
            f"path must be the name of a file that ends with .npz, got {shown(path)}."
        ) from None
    if not text.endswith(".npz"):
        raise ValueError(f"path must end with .npz, got {shown(text)}.")
    if os.path.isdir(text):
        raise ValueError(f"path must be the name of a file, but {shown(text)} is a folder.")
    return text
