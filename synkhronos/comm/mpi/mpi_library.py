"""MPI's library, for processes that mpirun has started: the import loads it, `begun` begins MPI."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import warnings
from typing import Any, Iterator

import mpi4py

from synkhronos.comm.mpi import folders
from synkhronos.comm.mpi.secret import open_no_ports

open_no_ports()
# Open MPI prints no page about a peer that has ended, and gives the core away while it waits.
os.environ.setdefault("OMPI_MCA_btl_base_warn_peer_error", "0")
os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
# The warning is about the mpiexec of another MPI, which `synkhronos run` refuses with a sentence.
warnings.filterwarnings("ignore", "suspicious MPI execution environment", RuntimeWarning)


@contextlib.contextmanager
def _away():
    """Change to another working folder while MPI is loaded or begun.

    UCX, a library of Open MPI, reads ``./ucx.conf``, which may be another user's.
    """
    before = os.open(".", os.O_PATH)
    try:
        os.chdir("/")
        yield
    finally:
        os.fchdir(before)
        os.close(before)


with _away():
    from mpi4py import MPI as MPI

# Open MPI's library catches SIGHUP when it is loaded: then it would end no process any more.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGHUP))


@contextlib.contextmanager
def begun(level: int = MPI.THREAD_SINGLE) -> Iterator[Any]:
    """Begin MPI, in the thread that uses it; yield the communicator of all processes; end MPI.

    The end waits for the other processes, but not after an exception: then this process must end.
    """
    with folders.of_segment(), _away():
        _call("MPI_Init_thread", None, None, level, ctypes.byref(ctypes.c_int()))
    MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
    yield MPI.COMM_WORLD
    _call("MPI_Finalize")


def _call(name, *arguments):
    """Call MPI without Python's lock, which mpi4py would hold: the other thread runs on."""
    code = getattr(ctypes.CDLL(MPI.__file__), name)(*arguments)
    if code != MPI.SUCCESS:
        raise MPI.Exception(code)
