"""The choice of a transport, by the number and the devices of ranks, and a rank's end of it."""

from dataclasses import dataclass
from typing import Optional, Tuple

from synkhronos import _host
from synkhronos._machine.devices import usable_cores
from synkhronos.comm import Gate, Memory
from synkhronos.comm.arrays import Arrays
from synkhronos.comm.mpi.arrays import MachinesArrays
from synkhronos.comm.mpi.gate import GateOfMachines
from synkhronos.comm.mpi.leader_gate import LeaderGate
from synkhronos.comm.mpi.master_gate import MasterGate
from synkhronos.comm.mpi.memory import MachinesMemory
from synkhronos.comm.mpi.outputs import MachinesOutputs
from synkhronos.comm.mpi.variable_collectives import MachinesVariables
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
    are_gpus = _host.title == "Theano" and all(device.startswith("cuda") for device in devices)
    return (base, "nccl") if are_gpus and len({*devices}) == len(devices) else (base,)


@dataclass(eq=False)
class Communicator:
    """One rank's end of a transport: what its commands communicate with."""

    memory: Memory
    variables: Variables
    outputs: Outputs
    arrays: Arrays
    devices: Optional[Nccl] = None  # if it connects the devices of the ranks with one another

    def abort(self) -> None:
        """End, on the master, what its device still waits for from ranks that have died."""
        if self.devices is not None:
            self.devices.abort()

    def forget(self, functions, variables) -> None:
        """Drop the memory and the views of functions and shared variables that are no more."""
        for key in functions:
            self.outputs.forget(key)
        if variables:
            self.variables.forget(variables)
            self.arrays.close()  # its views may be of memory that has gone with them

    def close(self) -> None:
        """Drop all memory and views; the variables that are left keep their values."""
        self.outputs.close()
        self.arrays.close()
        self.variables.close()


class _OfThisMachine:
    """A worker for the shared memory of its machine, which counts the ranks of this machine."""

    def __init__(self, worker):
        self._worker, self.gate = worker, worker.gate.local
        self.rank, self.n_ranks = worker.rank - worker.gate.first, self.gate.n_ranks
        ranks = worker.gate.layout.ranks()
        self.devices = worker.devices[ranks.start : ranks.stop]

    @property
    def variables(self):
        """The shared variables, by key."""
        return self._worker.variables


class _MachinesCommunicator(Communicator):
    """One rank's end of the transport of several machines."""

    def __init__(self, worker, on_release):
        here, gate = _OfThisMachine(worker), worker.gate
        memory = MachinesMemory(gate, on_release)
        storage = Storage(here, memory)
        arrays = MachinesArrays(here, storage, gate, memory.open)
        variables = MachinesVariables(here, storage, arrays, memory, gate)
        super().__init__(memory, variables, MachinesOutputs(memory, gate), arrays)
        if gate.layout.machine == 0:
            gate.on_parts = self._take_parts
        gate.on_over = memory.leave

    def _take_parts(self, parts):
        outputs, exposed = parts
        self.outputs.take(outputs)
        self.variables.take_exposed(exposed)

    def close(self):
        """Drop all memory and views."""
        super().close()
        self.memory.close()


def connect(worker, on_release=None) -> Communicator:
    """Return this rank's communicator.

    When a block of this rank's memory has no view any more, `on_release` takes a hashable that
    names the block and a function that frees the memory. By default it is freed at once.
    """
    if isinstance(worker.gate, GateOfMachines):
        return _MachinesCommunicator(worker, on_release)
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
