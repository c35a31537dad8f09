"""Ranks of one machine: every rank works on the arrays of all others where they are.

=============  =================================================================================
`gate`         the barriers, in cells of memory that the ranks inherit (`gate_memory`)
`storage`      where the values of shared variables lie, in segments that all ranks map
`variables`    collectives on these values
`arrays`       reductions inside of functions, in segments too
`outputs`      outputs of functions, from workers to the master
=============  =================================================================================
"""

from synkhronos._arithmetic.partition import take_rows
from synkhronos._machine import shared_memory
from synkhronos.comm import Communicator, Memory
from synkhronos.comm.shared.arrays import SharedArrays
from synkhronos.comm.shared.outputs import SharedOutputs
from synkhronos.comm.shared.storage import Storage
from synkhronos.comm.shared.variables import SharedVariables


class SharedMemory(shared_memory.Segments, Memory):
    """Segments of shared memory, which all ranks map."""

    def fetch(self, reference, rows=None, buffer=None):
        """Return a view of the array, or some of its rows."""
        array = self.attach(reference.segment).array(reference.dtype, reference.shape)
        return array if rows is None else take_rows(array, rows, buffer)

    def forget(self, references):
        """Drop the maps of segments, which may be named by references to their arrays."""
        super().forget([getattr(each, "segment", each) for each in references])

    def holds(self, array):
        """Return whether an array is a view of a segment."""
        return shared_memory.is_in_a_segment(array)

    def mapped_by(self, pid):
        """Return the bytes of each segment that a process has mapped."""
        return shared_memory.mapped_by(pid)


class SharedCommunicator(Communicator):
    """One rank's end of shared memory."""

    def forget(self, functions, variables):
        """Drop what belongs to functions and shared variables that are no more."""
        super().forget(functions, variables)
        if variables:
            self.arrays.close()  # its views may be of what has gone


def connect(worker, on_release) -> Communicator:
    """Return this rank's communicator; see `Segments` for `on_release`."""
    # A rank's memory goes with it: a rank that can't open it waits for the news of a death.
    memory = SharedMemory(on_release, lambda: worker.gate.check_alive(milliseconds=1000))
    storage = Storage(worker, memory)
    return SharedCommunicator(
        memory,
        SharedVariables(worker, storage),
        SharedOutputs(memory),
        SharedArrays(worker, storage),
    )
