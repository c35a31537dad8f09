"""The choice of a transport, by the number of ranks and their devices."""

from typing import Tuple

from synkhronos._machine.devices import usable_cores
from synkhronos.comm import Gate
from synkhronos.comm.arrays import Arrays
from synkhronos.comm.communicator import Communicator
from synkhronos.comm.mpi.communicator import MachinesCommunicator
from synkhronos.comm.mpi.gate import GateOfMachines
from synkhronos.comm.mpi.leader_gate import LeaderGate
from synkhronos.comm.mpi.master_gate import MasterGate
from synkhronos.comm.nccl import Nccl
from synkhronos.comm.outputs import Outputs
from synkhronos.comm.shared.gate import SharedGate
from synkhronos.comm.shared.memory import SharedMemory
from synkhronos.comm.single import SingleGate, SingleMemory
from synkhronos.comm.variable_collectives import Variables
from synkhronos.comm.variable_memory import Storage


def make_gate(n_ranks: int, master_rank: int) -> Gate:
    """Return the gate of a new session, in the master, before it forks."""
    if n_ranks == 1:
        return SingleGate(master_rank)
    return SharedGate(n_ranks, master_rank, spin=n_ranks <= usable_cores())


def make_gate_of_machines(plan, link) -> Gate:
    """Return the gate of a machine's first process, before it forks the ranks of the machine."""
    layout, master_rank = plan.layout(link.machine), plan.master_rank
    n_ranks = layout.counts[layout.machine]
    is_first = layout.machine == 0
    local = SharedGate(n_ranks, master_rank if is_first else 0, n_ranks <= usable_cores())
    return (MasterGate if is_first else LeaderGate)(local, layout, plan, link)


def kinds_for(devices) -> Tuple[str, ...]:
    """Return the transports for ranks on these devices, each on top of the one before.

    >>> kinds_for(["cpu"]), kinds_for(["cuda0", "cuda0"]), kinds_for(["cuda0", "cuda1"])
    (('single',), ('shared',), ('shared', 'nccl'))
    """
    base = "single" if len(devices) == 1 else "shared"
    # NCCL refuses two ranks on one GPU.
    are_gpus = all(device.startswith("cuda") for device in devices)
    return (base, "nccl") if are_gpus and len({*devices}) == len(devices) else (base,)


def connect(worker, on_release=None) -> Communicator:
    """Return this rank's communicator.

    Parameters
    ----------
    worker : Worker
    on_release : callable, optional
        Called when a block of this rank's memory has no view any more, with a hashable that names
        the block and a function that frees the memory. By default it is freed at once.
    """
    if isinstance(worker.gate, GateOfMachines):
        return MachinesCommunicator(worker, on_release)
    kinds = kinds_for(worker.devices)
    memory = SingleMemory()
    if kinds[0] == "shared":
        # A segment can't be opened if its owner has died. The master, which may learn of the death
        # a moment later, waits for that, so that it reports the death and not the failed open.
        memory = SharedMemory(on_release, lambda: worker.gate.check_alive(milliseconds=1000))
    storage = Storage(worker, memory)
    devices = Nccl(worker) if "nccl" in kinds else None
    return Communicator(
        memory,
        Variables(worker, storage, devices),
        Outputs(memory, devices),
        Arrays(worker, storage, devices),
        devices,
    )
