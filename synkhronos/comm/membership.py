"""How a process finds the group that it was started for: by a launcher, or by mpirun.

Light: it imports no NumPy before `join`, because what comes before may set its environment.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
from typing import TYPE_CHECKING, Mapping

from synkhronos._machine.processes import tell_guard_of_mpi

if TYPE_CHECKING:
    from synkhronos.comm.group import Group

VARIABLE = "SYNKHRONOS_GROUP"  # what a launcher tells a rank of its group, as JSON


def place_of(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the rank and the size of the group that a launcher has made, or None.

    >>> place_of({VARIABLE: '{"rank": 1, "size": 2}'}), place_of({})
    ((1, 2), None)
    """
    told = json.loads(environment.get(VARIABLE, "null"))
    return told and (told["rank"], told["size"])


def join(finalizes: bool = False, with_threads: bool = False) -> Group:
    """Return the group of this process.

    Parameters
    ----------
    finalizes : bool
        Whether MPI, if it is there, is ended with the process: it may wait for processes that have
        died.
    with_threads : bool
        Whether several threads, one at a time, use the group.
    """
    if VARIABLE in os.environ:
        from synkhronos.comm.shared import group

        return group.join(os.environ.pop(VARIABLE))  # not for what this process starts
    from synkhronos.comm.mpi import folders, secret

    given = secret.take()  # not for what this process starts
    from synkhronos.comm.mpi.group import MpiGroup
    from synkhronos.comm.mpi.library import MPI

    with folders.of_segment():
        MPI.Init_thread(MPI.THREAD_SERIALIZED if with_threads else MPI.THREAD_SINGLE)
    if finalizes:
        atexit.register(MPI.Finalize)
    tell_guard_of_mpi()
    try:
        return MpiGroup(secret.checked(MPI.COMM_WORLD, given))
    except secret.NoSecret as error:
        sys.stderr.write(f"{socket.gethostname()}: {error}\n")
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
        raise
