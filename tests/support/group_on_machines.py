"""A machine of `groups.MachinesJob`, as a process of mpirun, whose forks are its ranks.

python -m support.group_on_machines FOLDER
"""

import contextlib
import gc
import itertools
import os
import signal
import sys
import time
import traceback

import cloudpickle

from support.groups import SECONDS, outcome
from synkhronos.parameter_server.group import membership


def machine(folder):
    """Run one crew after another, until there is a file `end`."""
    from synkhronos.comm.mpi import mpi_library
    from synkhronos.comm.mpi.mesh import Mesh

    with mpi_library.begun() as comm:
        for number in itertools.count(1):
            while not os.path.exists(f"{folder}/{number}/work"):
                if os.path.exists(f"{folder}/end"):
                    return
                time.sleep(0.002)
            run_crew(f"{folder}/{number}", Mesh(comm, None))


def run_crew(folder, comm):
    """Start the ranks of this machine, carry their messages, and wait for their ends."""
    from synkhronos.parameter_server.group.carrier import GroupCarrier

    with open(f"{folder}/work", "rb") as file:
        ranks, function = cloudpickle.load(file)
    carrier = getattr(function, "carrier", GroupCarrier)(comm, ranks)
    pids = []
    for number in range(len(ranks[carrier.machine])):
        value, descriptors = carrier.place(number)
        pid = os.fork()
        if pid == 0:
            gc.freeze()  # no finalizer of the carrier's memory may run here
            os.environ[membership.VARIABLE] = value
            rank(folder, function, {0, 1, 2, *descriptors})
        pids.append(pid)
    carrier.close()
    carrier.run()
    for pid in pids:
        os.waitpid(pid, 0)
    open(f"{folder}/ended{carrier.machine}", "w").close()
    del carrier
    gc.collect()


def rank(folder, function, descriptors):
    """Run the function as one rank, in a fork that keeps only some descriptors; end it."""
    try:
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in descriptors:
                with contextlib.suppress(OSError):  # that of the list
                    os.close(int(name))
        signal.alarm(int(SECONDS))  # one that hangs ends
        group = membership.join()
        with open(f"{folder}/pid{group.rank}.new", "w") as file:
            file.write(str(os.getpid()))
        os.rename(file.name, f"{folder}/pid{group.rank}")
        found = outcome(function, group)
        with open(f"{folder}/result{group.rank}", "wb") as file:
            cloudpickle.dump(found, file)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


if __name__ == "__main__":
    machine(sys.argv[1])
