"""How the ranks reach one another's arrays: one interface, one file for each transport.

==========  =====================  ==========================================
kind        ranks                  what it can do
==========  =====================  ==========================================
``shared``  of one machine         all, through shared memory; arrays of devices are copied there
``nccl``    of one machine, each   what all ranks hold alike stays on the devices; the rest as above
            on its own CUDA GPU
==========  =====================  ==========================================
"""

from abc import ABC, abstractmethod


class Communicator(ABC):
    """One rank's end of a transport. All ranks call the same method, in the same order.

    Attributes
    ----------
    can_join : bool
        Whether the ranks' devices can form a clique: with `make_clique_id`, `join` and `leave`.
    """

    can_join = False

    @abstractmethod
    def keep(self, outputs, reduced=()):
        """Hold on to the master's own outputs of this call.

        Those at the positions in `reduced` are reduced over the ranks already.
        """

    @abstractmethod
    def take_note(self, rank, answer):
        """Learn, on the master, what a worker has answered; return whether it was for this."""

    def reduces(self, dtype, ndim, mode):
        """Whether outputs of this kind are worth keeping on the device, for `reduce_outputs`."""
        return False

    def reduce_outputs(self, outputs, modes):
        """Reduce those outputs of a function that can be where they are; None from an idle rank.

        Returns position -> reduced value, which workers have as None.
        """
        return {}

    @abstractmethod
    def deposit(self, key, parts):
        """Hand over a worker's parts of the outputs of function `key`.

        Returns what the master must be told before it can `collect` them, or None.
        """

    @abstractmethod
    def collect(self, key, rank):
        """Return the parts that `rank` deposited in the last call: views, valid until the next."""

    @abstractmethod
    def expose(self, keys):
        """Have the master see these variables' values of this rank, after the finish barrier."""

    @abstractmethod
    def values(self, key):
        """Return, on the master, a variable's value on each rank: views, valid until the next."""

    @abstractmethod
    def value_of(self, rank, key):
        """Return, on the master, a variable's value on one rank that has exposed it: a view."""

    @abstractmethod
    def assign(self, key, array, rows=None):
        """Give this rank's variable a value, or some of its rows: a range or indices."""

    @abstractmethod
    def broadcast(self, keys, root, nccl=True):
        """Replace each variable, on all ranks, with the value on rank `root`.

        Here and below, `nccl` False asks for the way through shared memory.
        """

    @abstractmethod
    def reduce(self, keys, op, root, nccl=True):
        """Replace each variable of rank `root` with the reduction over all ranks.

        Returns None, or, with nothing changed, (position, shapes) of the first that is not of the
        same shape on all.
        """

    @abstractmethod
    def all_reduce(self, keys, op, nccl=True):
        """Replace each variable, on all ranks, with the reduction over all; returns as `reduce`."""

    @abstractmethod
    def reduce_to_new(self, key, op):
        """Return, on the master, the reduction of what all have exposed; else as `reduce`."""

    @abstractmethod
    def all_gather(self, keys, nccl=True):
        """Replace each variable, on all ranks, with the values of all joined along axis 0.

        Returns as `reduce` does.
        """

    @abstractmethod
    def exchange(self, arrays, ops, weights, targets):
        """Reduce what all ranks have computed inside a function, into arrays of each rank's own.

        Returns the targets. In place of those that are None it returns arrays of the communicator,
        which are valid until the next time.
        """

    def landing_place(self, position, shape, dtype):
        """Return an array to compute the one at a position of the next exchange in, or None."""
        return None

    @abstractmethod
    def forget(self, key):
        """Drop what belongs to function `key`."""

    @abstractmethod
    def forget_variables(self, keys):
        """Drop what belongs to these variables."""

    @abstractmethod
    def close(self):
        """Drop everything; the variables that are left keep their values."""


def kind_for(devices) -> str:
    """Return the kind of communicator that ranks on these devices have.

    >>> kind_for(["cuda0", "cuda1"]), kind_for(["cuda0", "cuda0"]), kind_for(["cpu", "cpu"])
    ('nccl', 'shared', 'shared')
    """
    # NCCL refuses two ranks on one GPU.
    own = all(device.startswith("cuda") for device in devices) and len({*devices}) == len(devices)
    return "nccl" if own else "shared"


def connect(worker) -> Communicator:
    """Return this rank's communicator."""
    if kind_for(worker.devices) == "nccl":
        from synkhronos.comm.nccl import Nccl

        return Nccl(worker)
    from synkhronos.comm.shared import SharedMemory

    return SharedMemory(worker)
