"""How a process finds the group that it was started for.

It imports NumPy in `join` only: the caller may first set environment variables that NumPy reads.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Mapping

if TYPE_CHECKING:
    from synkhronos.parameter_server.group.interface import Group

VARIABLE = "SYNKHRONOS_GROUP"  # in which a launcher describes its group to a rank, as JSON
FOLLOWS = 14  # exit status of a rank that ends because another one has ended
# Begin lines of standard error that go to the rank's log alone, or that one rank says for all.
FOR_LOG, ONCE = "\0log ", "\0once "


def place_of(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Return this process's rank, and the number of ranks on its machine; None without a launcher.

    >>> place_of({VARIABLE: '{"rank": 1, "size": 2}'}), place_of({})
    ((1, 2), None)
    """
    told = json.loads(environment.get(VARIABLE, "null"))
    if told is None:
        return None
    here = told.get("machines", {"machine": 0, "ranks": [range(told["size"])]})
    return here["ranks"][here["machine"]][told["rank"]], told["size"]


def without_mpi(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a process that must not take the place of this one in MPI.

    >>> without_mpi({"OMPI_COMM_WORLD_RANK": "1", "OMP_NUM_THREADS": "2"})
    {'OMP_NUM_THREADS': '2'}
    """
    of_mpi = ("OMPI_", "PMIX_", "PMI_", "PRTE_")
    return {name: value for name, value in environment.items() if not name.startswith(of_mpi)}


def join() -> Group:
    """Return the group that this process was started for."""
    told = json.loads(os.environ.pop(VARIABLE))  # processes that this one starts must not join
    if "machines" in told:
        from synkhronos.parameter_server.group import several_machines

        return several_machines.join(told)
    from synkhronos.parameter_server.group import one_machine

    return one_machine.join(told)
