"""Folders for the files that Open MPI leaves where its processes are killed.

A folder has a lock as long as its process lives. The next process removes folders without one.

As a script this file runs the daemon that mpirun starts on another machine, with a folder of its
own for its files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Iterator, Mapping

# Where PRRTE keeps its files: for all its processes, for mpirun alone, for daemons elsewhere.
_BASES = tuple(f"PRTE_MCA_prte_{which}tmpdir_base" for which in ("", "local_", "remote_"))
_OF_MPIRUN = "synkhronos-mpirun-"
# Where Open MPI has the file of the memory that the processes of a machine share.
_SHARED = "OMPI_MCA_btl_sm_backing_directory"
_OF_SEGMENT = "mpi-of-synkhronos-"
_FILE = Path(__file__).resolve()


@contextlib.contextmanager
def of_mpirun(environment: Mapping[str, str], variable: str = _BASES[1]) -> Iterator[dict]:
    """Yield an environment in which mpirun keeps its files in a new folder, removed afterwards.

    By default mpirun names a folder after its process id. If it is killed, that folder keeps each
    later mpirun with the same id from starting ("The PMIx server's listener thread ...").
    """
    # Else Slurm makes its daemons wait for steps of the job on their machines, also lost ones.
    environment = {"SLURM_OVERLAP": "1", **environment}
    if any(name in environment for name in _BASES):
        yield environment
    else:
        with _new_folder(tempfile.gettempdir(), _OF_MPIRUN) as folder:
            yield {**environment, variable: folder}
    _remove_left(_parent_of_segments(environment), _OF_SEGMENT)  # left by processes of this mpirun


@contextlib.contextmanager
def of_segment() -> Iterator[None]:
    """Let Open MPI make its shared memory in a folder that is removed at the end of the block.

    The block has MPI's start, which ends with a barrier: all that need the memory have mapped it.
    """
    before = os.environ.get(_SHARED)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # Open MPI may need no such memory
            folder = _new_folder(_parent_of_segments(os.environ), _OF_SEGMENT)
            os.environ[_SHARED] = stack.enter_context(folder)
        yield
    os.environ.pop(_SHARED, None)
    if before is not None:
        os.environ[_SHARED] = before


def _parent_of_segments(environment):
    return environment.get(_SHARED, "/dev/shm")


def _remove_left(parent, prefix):
    """Remove the folders of processes that have been killed."""
    for path in Path(parent).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # it is in use, or another user's, or has gone
            held = _hold(path, fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            os.close(held)


@contextlib.contextmanager
def _new_folder(parent, prefix):
    _remove_left(parent, prefix)
    folder, held = _make(parent, prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _make(parent, prefix):
    while True:
        folder = tempfile.mkdtemp(prefix=prefix, dir=parent)
        with contextlib.suppress(FileNotFoundError):
            held = _hold(folder)
            if os.path.exists(folder):  # else another process has removed it before it was locked
                os.set_inheritable(held, True)  # a daemon keeps it if this process is killed
                return folder, held
            os.close(held)


def _hold(path, how=0):
    """Return a descriptor of a folder of this user with a lock, which ends with its processes."""
    held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(held).st_uid != os.geteuid():
            raise PermissionError(f"{path} is another user's")
        fcntl.flock(held, fcntl.LOCK_EX | how)
    except OSError:
        os.close(held)
        raise
    return held


def daemon_arguments(prted: Path, setting: str = "") -> list[str]:
    """Return the arguments with which mpirun starts `prted` on other machines by this file.

    `setting`, NAME=VALUE, goes into the environment of the daemon, which can be found by it.
    """
    words = [*(["env", setting] if setting else []), sys.executable, "-I", str(_FILE), str(prted)]
    # mpirun splits the command at blanks: then the daemon runs without this file.
    is_usable = prted.exists() and not any(" " in word for word in words)
    return ["--prtemca", "prte_launch_agent", " ".join(words)] if is_usable else []


if __name__ == "__main__":
    # Slurm sends a SIGTERM to the daemon, too: the folder goes after its end.
    signal.signal(signal.SIGTERM, lambda *_: None)
    with of_mpirun(os.environ, _BASES[2]) as environment:
        status = subprocess.call(sys.argv[1:], env=environment, close_fds=False)
    sys.exit(status)
