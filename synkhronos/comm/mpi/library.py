"""MPI's library for processes that mpirun has started: loaded, and begun by ``MPI.Init()`` only.

The import alone starts nothing, also in processes that only read the docstrings of other modules.
"""

import signal
import threading

import mpi4py

from synkhronos.comm.mpi.settings import away, open_no_ports

open_no_ports()
mpi4py.rc.initialize = False
mpi4py.rc.finalize = False

with away():
    from mpi4py import MPI as MPI

# Open MPI's library takes SIGHUP when it is loaded, and then it ends no process any more.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGHUP))
