"""``theanompi.lib.base``: a process with its device, and its communicator."""

from __future__ import annotations

import os
from typing import Any

from synkhronos.parameter_server.group import membership
from synkhronos.parameter_server.group.interface import Group, SingleGroup


class Comm:
    """The methods of mpi4py's communicators that scripts use, on a group of this package."""

    def __init__(self, group: Group):
        self.group, self.rank, self.size = group, group.rank, group.size
        self.Get_rank, self.Get_size = (lambda: self.rank), (lambda: self.size)
        self.barrier = self.Barrier = group.barrier
        self.allgather = group.all_gather

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the object of rank `root`."""
        return self.group.broadcast(obj, root)

    def gather(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Return the objects of all ranks on rank `root`, None on the others."""
        return self.group.gather(obj, root)

    def allreduce(self, obj: Any) -> Any:
        """Return the sum of the objects of all ranks, in rank order."""
        first, *others = self.group.all_gather(obj)
        for each in others:
            first = first + each
        return first


class MPI_GPU_Process:
    """A process of a run, with a device, which may be a core.

    A process that no launcher has started is the only one.

    Attributes
    ----------
    comm : object
        Has the methods of mpi4py's communicators that scripts use.
    rank, size : int
    ctx, gpucomm : None
        Arrays of ranks are exchanged through the group, in host memory or by NCCL.
    """

    _group: Any = None  # of this process, which joins it once

    def __init__(self, device: str):
        self.device = device
        self.get_internode_comm()
        self.init_device()

    def get_internode_comm(self) -> None:
        """Set ``comm``, ``rank`` and ``size``."""
        kind = MPI_GPU_Process
        if kind._group is None:
            kind._group = membership.join() if membership.place_of(os.environ) else SingleGroup()
            kind._group.introduce(self.device)
        self.group: Group = kind._group
        self.comm = Comm(self.group)
        self.rank, self.size = self.comm.rank, self.comm.size

    def get_intranode_comm(self) -> None:
        """Set ``gpucomm``: none is needed."""
        self.gpucomm: Any = None

    def get_intranode_pair_comm(self, pair: Any) -> Any:
        """Return the group, by which two ranks exchange."""
        return self.group

    def get_intranode_pair_comm_dict(self) -> dict[str, Any]:
        """Return the group for each pair of this rank and another: their digits -> the group."""
        pairs = (sorted((self.rank, other)) for other in range(self.size) if other != self.rank)
        return {f"{one}{other}": self.group for one, other in pairs}

    def init_device(self) -> None:
        """Let Theano open the device, unless it is imported already."""
        flags = [each for each in os.environ.get("THEANO_FLAGS", "").split(",") if each]
        if not any(each.startswith("device=") for each in flags):
            os.environ["THEANO_FLAGS"] = ",".join([*flags, f"device={self.device}"])
        self.ctx: Any = None
