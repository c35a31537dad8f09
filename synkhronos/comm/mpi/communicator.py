"""One rank's end of the transport of several machines, on top of its machine's shared memory."""

from synkhronos.comm.communicator import Communicator
from synkhronos.comm.mpi.arrays import MachinesArrays
from synkhronos.comm.mpi.memory import MachinesMemory
from synkhronos.comm.mpi.outputs import MachinesOutputs
from synkhronos.comm.mpi.variable_collectives import MachinesVariables
from synkhronos.comm.variable_memory import Storage


class _OfThisMachine:
    """A worker as the shared memory of its machine knows it: ranks are counted there alone."""

    def __init__(self, worker):
        self._worker = worker
        self.gate = worker.gate.local
        self.rank = worker.rank - worker.gate.first
        self.n_ranks = self.gate.n_ranks
        ranks = worker.gate.layout.ranks()
        self.devices = worker.devices[ranks.start : ranks.stop]

    @property
    def variables(self):
        """The shared variables, by key."""
        return self._worker.variables


class MachinesCommunicator(Communicator):
    """One rank's end of the transport of several machines."""

    def __init__(self, worker, on_release):
        here, gate = _OfThisMachine(worker), worker.gate
        memory = MachinesMemory(gate, on_release)
        storage = Storage(here, memory)
        arrays = MachinesArrays(here, storage, gate, memory.open)
        outputs = MachinesOutputs(memory, gate)
        variables = MachinesVariables(here, storage, arrays, memory, gate)
        super().__init__(memory, variables, outputs, arrays)
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
