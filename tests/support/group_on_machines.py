"""A machine of `groups.CrewOnMachines`, as a process of mpirun; and each of its ranks.

python -m support.group_on_machines FOLDER
"""

import os
import signal
import subprocess
import sys

import cloudpickle

from support.groups import SECONDS, outcome
from synkhronos.parameter_server.group import membership


def machine(folder):
    """Start the ranks of this machine, and carry their messages."""
    from synkhronos.comm.mpi import mpi_library
    from synkhronos.parameter_server.group.carrier import GroupCarrier

    mpi_library.begin()
    with open(f"{folder}/work", "rb") as file:
        ranks, function = cloudpickle.load(file)
    carrier = getattr(function, "carrier", GroupCarrier)(mpi_library.MPI.COMM_WORLD, ranks)
    for number in range(len(ranks[carrier.machine])):
        value, descriptors = carrier.place(number)
        subprocess.Popen(
            [sys.executable, "-m", "support.group_on_machines", folder, "rank"],
            env={**os.environ, membership.VARIABLE: value},
            pass_fds=descriptors,
        )
    carrier.close()
    carrier.run()
    mpi_library.MPI.Finalize()


def rank(folder):
    """Run the function as one rank."""
    signal.alarm(int(SECONDS))  # one that hangs ends
    group = membership.join()
    with open(f"{folder}/pid{group.rank}.new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(file.name, f"{folder}/pid{group.rank}")
    with open(f"{folder}/work", "rb") as file:
        _, function = cloudpickle.load(file)
    found = outcome(function, group)
    with open(f"{folder}/result{group.rank}", "wb") as file:
        cloudpickle.dump(found, file)


if __name__ == "__main__":
    (rank if len(sys.argv) > 2 else machine)(sys.argv[1])
