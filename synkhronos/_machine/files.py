"""Files that are complete or not there: written without a name, or beside their place."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from contextlib import suppress

from synkhronos._wording import shown


class NewFile:
    """A context: a file beside `path` to write to, which takes its place at the end of the block.

    An exception in the block removes the file, and leaves what was there. A link at `path` stays,
    and the file that it points to is replaced; without `follow` the link is replaced. A link of
    another user in a folder such as /tmp is refused with PermissionError.

    The file has no name until it is complete, so a kill leaves nothing. Where the system has no
    files without names it is called ``.name.1f2e3d4c``: see `remove_left`.
    """

    def __init__(self, path, follow=True):
        if follow:
            if _is_planted(path):
                raise PermissionError(errno.EACCES, "this link is another user's", path)
            self._path = os.path.realpath(path)
        else:
            folder, name = os.path.split(path)
            self._path = os.path.join(os.path.realpath(folder), name)
        folder, name = os.path.split(self._path)
        self._folder = folder
        self._written = os.path.join(folder, f".{name}.{secrets.token_hex(4)}")

    def __enter__(self):
        remove_left(self._folder, re.escape(os.path.basename(self._path)))
        self._link = None
        with suppress(AttributeError, OSError):
            unnamed = os.open(self._folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)
            self._file, link = open(unnamed, "wb"), f"/proc/self/fd/{unnamed}"
            if os.path.exists(link):
                self._link = link
        if self._link is None:
            self._file = open(self._written, "xb")
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(self._file, fcntl.LOCK_EX)
        if self._link is None and not os.path.exists(self._written):
            self._file.close()
            return self.__enter__()  # another process took it for one that is left
        return self._file

    def __exit__(self, kind, error, trace):
        try:
            with self._file as file:
                if kind is None:
                    if os.path.exists(self._path) and not os.path.islink(self._path):
                        os.fchmod(file.fileno(), stat.S_IMODE(os.stat(self._path).st_mode))
                    file.flush()
                    os.fsync(file.fileno())
                    if self._link is not None:
                        self._give_name()
                    os.replace(self._written, self._path)  # while the file has its lock
                    self._keep_name()
        finally:
            with suppress(FileNotFoundError):  # it has its name
                os.unlink(self._written)

    def _give_name(self):
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            # With a descriptor Python calls linkat, which follows the link to the file.
            os.link(self._link, os.path.basename(self._written), dst_dir_fd=folder)
        finally:
            os.close(folder)

    def _keep_name(self):
        """Write the folder to the disk: else a crash of the machine may undo the renaming."""
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            with suppress(OSError):  # some network file systems can't
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _is_planted(path):
    """Return whether a path is a link of another user, in a folder to which all users may write.

    Linux refuses to follow it, too, but only with ``fs.protected_symlinks``.
    """
    try:
        link, folder = os.lstat(path), os.stat(os.path.dirname(os.path.abspath(path)))
    except OSError:
        return False
    is_shared = folder.st_mode & (stat.S_ISVTX | stat.S_IWOTH) == stat.S_ISVTX | stat.S_IWOTH
    is_others = link.st_uid not in (os.geteuid(), folder.st_uid)
    return stat.S_ISLNK(link.st_mode) and is_shared and is_others


def remove_left(folder, names):
    """Remove what killed processes have left of files that they were writing into a folder.

    `names` is the regular expression of the files' names. Files that are being written have a lock.
    """
    for left in os.listdir(folder):
        if re.fullmatch(rf"\.{names}\.[0-9a-f]{{8}}", left):
            with suppress(OSError), open(os.path.join(folder, left), "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(file.name)


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
