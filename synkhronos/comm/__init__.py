"""How the ranks reach one another's arrays: one interface, one file for each transport.

==========  =====================  ==========================================
kind        ranks                  what it can do
==========  =====================  ==========================================
``shared``  of one machine         outputs of functions, through shared memory
==========  =====================  ==========================================
"""

from abc import ABC, abstractmethod


class Communicator(ABC):
    """One rank's end of a transport. All ranks call the same method, in the same order."""

    @abstractmethod
    def keep(self, outputs):
        """Hold on to the master's own outputs of this call."""

    @abstractmethod
    def deposit(self, key, parts):
        """Hand over a worker's parts of the outputs of function `key`.

        Returns what the master must be told before it can `collect` them, or None.
        """

    @abstractmethod
    def collect(self, key, rank):
        """Return the parts that `rank` deposited in the last call: views, valid until the next."""

    @abstractmethod
    def forget(self, key):
        """Drop what belongs to function `key`."""

    @abstractmethod
    def close(self):
        """Drop everything."""


def connect(kind: str, worker) -> Communicator:
    """Return this rank's communicator of the given kind."""
    if kind != "shared":
        raise ValueError(f"{kind!r} is not a kind of communicator. Expected 'shared'.")
    from synkhronos.comm.shared import SharedMemory

    return SharedMemory(worker)
