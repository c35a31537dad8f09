"""The transport of ranks on one machine: each rank reads and writes the arrays of all others.

=============  =================================================================================
`gate`         the barriers, in cells of memory that the ranks inherit (`gate_memory`)
`storage`      segments for the values of shared variables, and logs that tell where these lie
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
    """Segments of shared memory; for their lifetimes see `synkhronos._machine.shared_memory`."""

    def fetch(self, reference, rows=None, buffer=None, axis=0):
        """Return a view of the array, or some of its rows.

        The segment stays mapped until `forget`. A view is valid until the master releases the
        segment, which it does between commands only.
        """
        segment, dtype, shape, offset = reference
        array = self.attach(segment).array(dtype, shape, offset)
        if rows is None:
            return array
        if axis:
            return take_rows(array, rows, buffer, axis)
        if rows.__class__ is range and rows.step > 0:  # as `take_rows`, without one call more
            return array[rows.start : rows.stop : rows.step]
        return take_rows(array, rows, buffer)

    def forget(self, references):
        """Drop segments that the master has released: references to them, or to arrays in them."""
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
        """Drop the memory and the views of functions and shared variables that are no more."""
        super().forget(functions, variables)
        if variables:
            self.arrays.close()  # its views may be of memory that has gone with them


def connect(worker, on_release) -> Communicator:
    """Return this rank's communicator; see `Segments` for `on_release`."""
    # A segment can't be opened if its owner has died. The master may learn of the death a moment
    # later, and waits for that, so that it reports the death and not the failed open.
    memory = SharedMemory(on_release, lambda: worker.gate.check_alive(milliseconds=1000))
    storage = Storage(worker, memory)
    return SharedCommunicator(
        memory,
        SharedVariables(worker, storage),
        SharedOutputs(memory),
        SharedArrays(worker, storage),
    )
