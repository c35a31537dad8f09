"""Files that are complete or not there: written without a name, or beside their place."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pwd
import re
import secrets
import stat
import time
from contextlib import suppress

from synkhronos._wording import shown

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_LEASE_SECONDS = 5.0
_MOST_LINKS = 40  # in one path, as Linux has it


class PlantedLink(PermissionError):
    """A link on the way to a file is another user's, in a folder to which all may write."""


@contextlib.contextmanager
def new_file(path, follow=True):
    """Give a file beside `path` to write to, which takes its place at the end of the block.

    An exception in the block removes the file, and leaves what was there. A link at `path` stays,
    and the file that it points to is replaced; without `follow` the link is replaced. A link of
    another user in a folder such as /tmp is refused with PermissionError.

    The file has no name until it is complete, so a kill leaves nothing. Where the system has no
    files without names it is called ``.name.1f2e3d4c``: see `remove_left`.
    """
    if follow:
        folder, name = os.path.split(followed(path))
    else:
        folder, name = os.path.split(path)
        folder = followed(folder)
    with _kept(folder) as folder:
        path = os.path.join(folder, name)
        remove_left(folder, re.escape(name))
        written = os.path.join(folder, f".{name}.{secrets.token_hex(4)}")
        descriptor, link = _open(folder, written)
        try:
            with open(descriptor, "wb") as file:
                yield file
                with suppress(FileNotFoundError):
                    old = os.lstat(path)
                    if stat.S_ISREG(old.st_mode) and old.st_uid == os.geteuid():
                        os.fchmod(file.fileno(), old.st_mode & 0o777)
                file.flush()
                os.fsync(file.fileno())
                _give_name(folder, link, written, path)  # while the file has its lock
        except OSError as error:
            if error.errno in _NO_ROOM and error.filename is None:
                error.filename = path
            raise
        finally:
            with suppress(FileNotFoundError):  # it has its name
                os.unlink(written)


@contextlib.contextmanager
def _kept(folder):
    """Give a path of a folder, which stays right if its name becomes that of another one."""
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    kept = f"/proc/self/fd/{directory}"
    try:
        if not os.path.exists(kept):  # a system without it
            kept = folder
        elif os.readlink(kept).casefold() != folder.casefold():  # some file systems ignore case
            raise PermissionError(errno.EACCES, "another program has replaced this folder", folder)
        yield kept
    except OSError as error:
        for each in ("filename", "filename2"):
            name = getattr(error, each)
            if isinstance(name, str) and name.startswith(f"{kept}/"):
                setattr(error, each, folder + name[len(kept) :])
        raise
    finally:
        os.close(directory)


def open_file(path):
    """Open a file to read. Raise OSError for a pipe or a device, and wait for none."""

    def regular(path, flags):
        end = time.monotonic() + _LEASE_SECONDS
        while True:
            try:
                file = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
                break
            except BlockingIOError:  # another process has a lease, and is asked to give it back
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)
        if stat.S_ISDIR(mode := os.fstat(file).st_mode) or stat.S_ISREG(mode):
            return file  # Python refuses folders by itself
        os.close(file)
        raise OSError(errno.ENXIO, "this is a pipe or a device, and not a file", path)

    return open(path, "rb", opener=regular)


def _open(folder, written):
    """Return a new file, locked, and the path of its descriptor; None if it has a name."""
    link, flags = None, os.O_RDWR | os.O_CLOEXEC
    with suppress(AttributeError, OSError):
        file = os.open(folder, os.O_TMPFILE | flags, 0o666)
        link = f"/proc/self/fd/{file}"
    if link is not None and not os.path.exists(link):
        os.close(file)
        link = None
    if link is None:
        file = os.open(written, os.O_CREAT | os.O_EXCL | flags, 0o666)
    with suppress(OSError):  # some network file systems have no locks
        fcntl.flock(file, fcntl.LOCK_EX)
    if link is None and not os.path.exists(written):
        os.close(file)
        return _open(folder, written)  # another process took it for one that is left
    return file, link


def _give_name(folder, link, written, path):
    directory = os.open(folder, os.O_RDONLY)
    try:
        if link is not None:
            # With a descriptor Python calls linkat, which follows the link to the file.
            os.link(link, os.path.basename(written), dst_dir_fd=directory)
        os.replace(written, path)
        with suppress(OSError):  # some network file systems can't
            os.fsync(directory)  # else a crash of the machine may undo the renaming
    finally:
        os.close(directory)


def followed(path):
    """Return a path without links, as os.path.realpath does; raise PlantedLink for others' links.

    In a folder to which all users may write, and in what others have in it, links are refused
    unless they are of this user, of root, or of the owner of that folder. Linux does so for folders
    like /tmp only, and only with ``fs.protected_symlinks``.
    """
    found, left, n_links = "/", os.path.join(os.getcwd(), path).split("/")[::-1], 0
    while left:
        name = left.pop()
        if name == "..":
            found = os.path.dirname(found)
        elif name not in ("", "."):
            there = os.path.join(found, name)
            if not os.path.islink(there):
                found = there
                continue
            n_links += 1
            if n_links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            if not _is_trusted(os.lstat(there).st_uid, found):
                raise PlantedLink(errno.EACCES, "this link is another user's", there)
            target = os.readlink(there)
            found = "/" if target.startswith("/") else found
            left += target.split("/")[::-1]
    return found


def _is_trusted(user, folder):
    """Return whether links of a user in a folder are followed: see `followed`."""
    ours = os.geteuid(), 0
    while user not in ours and folder != "/":
        status = os.stat(folder)
        is_for_all = status.st_mode & stat.S_IWOTH
        if is_for_all and user != status.st_uid:
            return False
        if not is_for_all and status.st_uid in ours:  # its owner says who may write
            return True
        folder = os.path.dirname(folder)
    return True


def remove_left(folder, names):
    """Remove what killed processes have left of files that they were writing into a folder.

    `names` is the regular expression of the files' names. Files that are being written have a lock.
    """
    flags = os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    for left in os.listdir(folder):
        if re.fullmatch(rf"\.{names}\.[0-9a-f]{{8}}", left):
            path = os.path.join(folder, left)
            with suppress(OSError):
                # To open another user's may wait: it is a pipe, or he has a lease.
                if os.lstat(path).st_uid != os.geteuid():
                    continue
                with open(os.open(path, flags), "r+b") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(path)


def shift(path, older):
    """Give the file at `path` the first of the names `older`, too, and each of these the next one.

    The last one goes. A kill leaves `path` as it is, but on file systems without hard links.
    """
    with suppress(FileNotFoundError):
        os.unlink(older[-1])
    for later, name in zip(older[:0:-1], older[-2::-1]):
        with suppress(FileNotFoundError):
            os.replace(name, later)
    with suppress(FileNotFoundError):
        try:
            os.link(path, older[0])
        except FileNotFoundError:
            raise
        except OSError:
            os.replace(path, older[0])


@contextlib.contextmanager
def held(path, seconds):
    """Hold a path in a with block: at most one process does, which keeps ``.name.lock`` beside it.

    Raises ``BlockingIOError`` if another one still does after `seconds`. The system ends the hold
    of a process that is killed, whatever its children do. On file systems without locks there is
    none.
    """
    folder, name = os.path.split(path)
    name, end = os.path.join(folder, f".{name}.lock"), time.monotonic() + seconds
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    process = os.getpid()
    while True:
        try:
            locks = [os.open(name, flags, 0o600)]
        except PermissionError:
            if not os.path.lexists(name):
                raise
            locks = []  # it is another user's
        try:
            if locks and _is_locked(locks[0], name):
                os.register_at_fork(after_in_child=lambda own=locks: own and os.close(own.pop()))
                try:
                    yield
                finally:
                    # A child that the script forks leaves the block, too.
                    if os.getpid() == process:
                        with suppress(FileNotFoundError):
                            os.unlink(name)
                return
        finally:
            if locks:
                os.close(locks.pop())
        if time.monotonic() >= end:
            what = f"another process{_user_of(name)} writes this file"
            raise BlockingIOError(errno.EAGAIN, what, path)
        time.sleep(0.05)


def _user_of(lock):
    """Return the user whom a lock belongs to, in words; nothing for this process's own."""
    with suppress(FileNotFoundError):
        number = os.lstat(lock).st_uid
        if number != os.geteuid():
            with suppress(KeyError):
                number = pwd.getpwuid(number).pw_name
            return f" of the user {number} (who may have left {lock})"
    return ""


def _is_locked(lock, name):
    """Lock an open file if no other process has; return whether it is still the one of its name."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some network file systems have no locks
        return True
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(lock), os.lstat(name))
    return False


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
