"""Files that are complete or not there: they get their name when all is written."""

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
_MOST_LINKS = 40  # in one path: Linux's limit


class PlantedLink(PermissionError):
    """A link in the path of a file is another user's, in a folder to which all may write."""


@contextlib.contextmanager
def new_file(path, follow=True):
    """Give a file to write to, which gets the name `path` at the end of the block.

    After an exception in the block an older file at `path` stays. If `path` is a link, the file
    that it points to is replaced; without `follow`, the link. Links of others raise PlantedLink.

    The file has no name until it is complete, so a kill leaves nothing. File systems without
    nameless files get ``.name.1f2e3d4c``, which `remove_left` removes.
    """
    if follow:
        folder, name = os.path.split(followed(path))
    else:
        folder, name = os.path.split(path)
        folder = followed(folder)
    with _kept(folder) as (folder, directory):
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
                if link is not None:
                    # Only with dst_dir_fd does Python call linkat, which follows the link in /proc.
                    os.link(link, os.path.basename(written), dst_dir_fd=directory)
                os.replace(written, path)  # in the block: the file is locked
                with suppress(OSError):  # some network file systems can't
                    os.fsync(directory)  # so that a crash of the machine can't undo the renaming
        except OSError as error:
            if error.errno in _NO_ROOM and error.filename is None:
                error.filename = path
            raise
        finally:
            with suppress(FileNotFoundError):  # it was renamed
                os.unlink(written)


@contextlib.contextmanager
def _kept(folder):
    """Give a path that stays right if another folder gets the name, and the folder's descriptor."""
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    kept = f"/proc/self/fd/{directory}"
    try:
        if not os.path.exists(kept):  # a system without /proc
            kept = folder
        elif os.readlink(kept).casefold() != folder.casefold():  # some file systems ignore case
            raise PermissionError(errno.EACCES, "another program has replaced this folder", folder)
        yield kept, directory
    except OSError as error:
        for attribute in ("filename", "filename2"):
            name = getattr(error, attribute)
            if isinstance(name, str) and name.startswith(f"{kept}/"):
                setattr(error, attribute, folder + name[len(kept) :])
        raise
    finally:
        os.close(directory)


def open_file(path):
    """Open a file to read it. Raise OSError for a pipe or a device, without waiting for it."""

    def regular(path, flags):
        end = time.monotonic() + _LEASE_SECONDS
        while True:
            try:
                file = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
                break
            except BlockingIOError:  # the system asks the holder of a lease to give it back
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)
        if stat.S_ISDIR(mode := os.fstat(file).st_mode) or stat.S_ISREG(mode):
            return file  # Python refuses a folder itself
        os.close(file)
        raise OSError(errno.ENXIO, "this is a pipe or a device, and not a file", path)

    return open(path, "rb", opener=regular)


def _open(folder, written):
    """Return a new, locked file, and the path of its descriptor, or None if the file has a name."""
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
        return _open(folder, written)  # before it was locked, another process has removed it
    return file, link


def followed(path):
    """Return a path without links, as os.path.realpath does; raise PlantedLink for others' links.

    In a folder to which all users may write, and in other users' folders in it, a link must belong
    to this user, to root, or to the owner of the folder.
    """
    resolved, left, n_links = "/", os.path.join(os.getcwd(), path).split("/")[::-1], 0
    while left:
        name = left.pop()
        if name == "..":
            resolved = os.path.dirname(resolved)
        elif name not in ("", "."):
            entry = os.path.join(resolved, name)
            if not os.path.islink(entry):
                resolved = entry
                continue
            n_links += 1
            if n_links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            if not _is_trusted(os.lstat(entry).st_uid, resolved):
                raise PlantedLink(errno.EACCES, "this link is another user's", entry)
            target = os.readlink(entry)
            resolved = "/" if target.startswith("/") else resolved
            left += target.split("/")[::-1]
    return resolved


def _is_trusted(user, folder):
    """Return whether links of a user in a folder are followed: see `followed`."""
    ours = os.geteuid(), 0
    while user not in ours and folder != "/":
        status = os.stat(folder)
        is_for_all = status.st_mode & stat.S_IWOTH
        if is_for_all and user != status.st_uid:
            return False
        if not is_for_all and status.st_uid in ours:  # nobody else could make the link
            return True
        folder = os.path.dirname(folder)
    return True


def remove_left(folder, names):
    """Remove what killed processes have left of files whose names match `names`.

    Files that a process is still writing have a lock, and stay.
    """
    flags = os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    for left in os.listdir(folder):
        if re.fullmatch(rf"\.{names}\.[0-9a-f]{{8}}", left):
            path = os.path.join(folder, left)
            with suppress(OSError):
                # Not opened if it is another user's: a pipe, or a file with a lease, would block.
                if os.lstat(path).st_uid != os.geteuid():
                    continue
                with open(os.open(path, flags), "r+b") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(path)


def shift(path, older):
    """Move each file of `older` to the next name, and give the file at `path` the first name, too.

    The last file is removed. `path` survives a kill, except on file systems without hard links.
    """
    with suppress(FileNotFoundError):
        os.unlink(older[-1])
    for later, name in zip(older[:0:-1], older[-2::-1]):
        with suppress(FileNotFoundError):
            os.replace(name, later)
    with suppress(FileNotFoundError):
        try:
            os.link(path, older[0])
        except OSError:
            os.replace(path, older[0])


@contextlib.contextmanager
def held(path, seconds):
    """Hold a lock for a path in a with block, by ``.name.lock`` beside it.

    Raises ``BlockingIOError`` if another process still has the lock after `seconds`. The system
    unlocks when a process is killed, even if its children live on. On file systems without locks
    nothing is locked.
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
            locks = []  # the lock file is another user's
        try:
            if locks and _is_locked(locks[0], name):
                os.register_at_fork(after_in_child=lambda left=locks: left and os.close(left.pop()))
                try:
                    yield
                finally:
                    if os.getpid() == process:  # not a child that the script has forked
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
    """Return the owner of a lock file, in words; an empty string for this user."""
    with suppress(FileNotFoundError):
        number = os.lstat(lock).st_uid
        if number != os.geteuid():
            with suppress(KeyError):
                number = pwd.getpwuid(number).pw_name
            return f" of the user {number} (who may have left {lock})"
    return ""


def _is_locked(lock, name):
    """Lock an open file; return whether that worked, and the file still has its name."""
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
    """Return an argument `path`, which must be the name of a file that ends with .npz, as a str."""
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
