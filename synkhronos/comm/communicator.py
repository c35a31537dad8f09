"""One rank's end of a transport: what its commands communicate with."""

from typing import Optional

from synkhronos.comm import Memory
from synkhronos.comm.arrays import Arrays
from synkhronos.comm.nccl import Nccl
from synkhronos.comm.outputs import Outputs
from synkhronos.comm.variable_collectives import Variables


class Communicator:
    """One rank's end of a transport.

    Attributes
    ----------
    memory : Memory
    variables : Variables
    outputs : Outputs
    arrays : Arrays
    devices : Nccl or None
        What connects the devices of the ranks with one another.
    """

    def __init__(
        self,
        memory: Memory,
        variables: Variables,
        outputs: Outputs,
        arrays: Arrays,
        devices: Optional[Nccl] = None,
    ):
        self.memory, self.variables = memory, variables
        self.outputs, self.arrays, self.devices = outputs, arrays, devices

    def abort(self) -> None:
        """End, on the master, what its device still waits for from ranks that are gone."""
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
