"""Messages between the processes of mpirun: waits that have an end, and the deaths of processes.

A process that waits looks at MPI for a moment, then sleeps between looks, because ranks share cores
with one another. Under ``mpirun --with-ft ulfm`` the death of a process is an error in the calls
that name it, and the others go on; elsewhere mpirun ends all.

References
----------
MPI Forum, ULFM (User Level Failure Mitigation), in MPI 5.0 and Open MPI 5.
"""

from __future__ import annotations

import time
from typing import Any, Callable

from synkhronos._machine.log import log
from synkhronos.comm.group import RankLost, WaitedTooLong
from synkhronos.comm.mpi.library import MPI

_LOOKS = 2000  # without a sleep: some hundred microseconds
_SHORTEST, _LONGEST = 2e-5, 2e-3  # seconds of a sleep
_WARN_AFTER = 30.0  # seconds


def wait_until(is_ready: Callable[[], bool], waits_for: str, patience: float) -> None:
    """Wait until a function returns True.

    Raises
    ------
    WaitedTooLong
        After `patience` seconds.
    """
    for _ in range(_LOOKS):
        if is_ready():
            return
    begun, pause, warn_at = time.monotonic(), _SHORTEST, _WARN_AFTER
    while not is_ready():
        waited = time.monotonic() - begun
        if waited > patience:
            raise WaitedTooLong(patience, waits_for)
        if waited > warn_at:
            log.warning("has waited %.0f s for %s", waited, waits_for)
            warn_at *= 2
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST)


def complete(request: Any, waits_for: str, patience: float) -> None:
    """Wait until a request of MPI is complete; the errors are those of `wait_until` and `lost`."""
    with lost():
        wait_until(request.Test, waits_for, patience)


class lost:
    """A context that turns MPI's errors about a dead process into `RankLost`."""

    def __init__(self, rank: int | None = None) -> None:
        self._rank = rank

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, MPI.Exception) and is_death(error):
            name = "another rank" if self._rank is None else f"rank {self._rank}"
            raise RankLost(f"{name} has died", self._rank) from error


def is_death(error: MPI.Exception) -> bool:
    """Return whether an error of MPI says that a process has died."""
    names = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")
    kinds = {getattr(MPI, name, None) for name in names} - {None}
    return error.Get_error_class() in kinds


def dead_ranks(comm: Any) -> set[int]:
    """Return the ranks of processes that have died, and acknowledge them.

    After that, receiving from any source works again.
    """
    comm = getattr(comm, "comm", comm)  # of `Sealed`
    if not hasattr(comm, "Get_failed"):
        return set()
    try:
        failed = comm.Get_failed()
        ranks = MPI.Group.Translate_ranks(failed, None, comm.Get_group())
        comm.Ack_failed()
    except (MPI.Exception, NotImplementedError):  # an MPI without fault tolerance
        return set()
    return set(ranks)
