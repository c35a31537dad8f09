"""MPI's library for processes that mpirun has started: loaded, and begun by `begin` only.

The import alone starts nothing, also in processes that only read the docstrings of other modules.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import warnings

import mpi4py

from synkhronos.comm.mpi import folders
from synkhronos.comm.mpi.settings import away, open_no_ports
from synkhronos.comm.mpi.strangers import Strangers

open_no_ports()
# Open MPI asks the receiver before it sends more than this. The question and the answer would wait
# behind the data that a slow cable has queued; here the receiver is ready in almost all cases. A
# part of an array is a little more: what checks it, and what MPI adds.
os.environ.setdefault("OMPI_MCA_btl_tcp_eager_limit", str((1 << 20) + (1 << 12)))
os.environ.setdefault("OMPI_MCA_btl_base_warn_peer_error", "0")  # a page, before it says so anew
mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
# Of another MPI's mpiexec: `synkhronos run` refuses it with a sentence.
warnings.filterwarnings("ignore", "suspicious MPI execution environment", RuntimeWarning)

with away():
    from mpi4py import MPI as MPI

# Open MPI's library takes SIGHUP when it is loaded, and then it ends no process any more.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGHUP))


def begin(level: int = MPI.THREAD_SINGLE) -> None:
    """Begin MPI, for a carrier, in the thread that will use it; its errors raise."""
    with contextlib.suppress(OSError):  # a system without this file in /proc
        Strangers().start()
    with folders.of_segment(), away():
        _call("MPI_Init_thread", None, None, level, ctypes.byref(ctypes.c_int()))
    MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)


def end() -> None:
    """End MPI; waits until the other carriers do."""
    _call("MPI_Finalize")


def _call(name, *arguments):
    """Call MPI without Python's lock, which mpi4py keeps here: `Strangers` goes on."""
    code = getattr(ctypes.CDLL(MPI.__file__), name)(*arguments)
    if code != MPI.SUCCESS:
        raise MPI.Exception(code)
