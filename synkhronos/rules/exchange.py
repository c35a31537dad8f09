"""Exchange of arrays between the processes of mpirun, each with one device.

    shared variables ──▶ Flat (host memory) ──▶ ar     in shared memory, and by MPI between machines
                                               asa32  all-to-all, sum of one's share, all-gather
                                               asa16  the same, each contribution in 16 bits
    on CUDA devices of one machine ──▶ NCCL (rules.nccl)

All strategies leave the same bits on all ranks. Sums of float16 are computed in float32, except by
NCCL, and rounded once. `nccl32` and `nccl16` are NCCL's where every rank has a CUDA device of its
own on one machine; elsewhere they are `ar` and `asa16`.

References
----------
Ma, Mao, Taylor, "Theano-MPI: a Theano-based Distributed Training Framework", arXiv:1605.08325
(`asa`: all-to-all, sum, all-gather).
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import numpy as np

from synkhronos.comm.mpi.library import MPI
from synkhronos.rules.arithmetic import rounded_to_16_bits
from synkhronos.rules.machine_sums import MachineSums
from synkhronos.rules.variables import Flat

STRATEGIES = ("nccl32", "nccl16", "ar", "asa32", "asa16")


def strategy_for(name: str, devices: Sequence[str], hosts: Sequence[str]) -> tuple[str, str]:
    """Return the strategy to take for a name, and a note if it is another one.

    >>> strategy_for("asa32", ["cpu", "cpu"], ["a", "a"])
    ('asa32', '')
    >>> strategy_for("nccl32", ["cpu", "cpu"], ["a", "a"])
    ('ar', 'nccl32 needs CUDA devices: ranks exchange by MPI in host memory, with the same sums')
    >>> strategy_for("nccl16", ["cuda0", "cuda0"], ["a", "b"])[0]
    'asa16'
    """
    if name not in STRATEGIES:
        raise ValueError(f"exch_strategy must be one of {', '.join(STRATEGIES)}, got {name!r}.")
    if not name.startswith("nccl"):
        return name, ""
    if not all(device.startswith("cuda") for device in devices):
        why = "needs CUDA devices"
    elif len(set(hosts)) > 1:
        why = "needs ranks on one machine"
    elif len(set(devices)) < len(devices):
        why = "needs a device for each rank"
    else:
        return name, ""
    if name == "nccl16":
        return "asa16", f"nccl16 {why}: ranks exchange by MPI in host memory, in 16 bits"
    return "ar", f"nccl32 {why}: ranks exchange by MPI in host memory, with the same sums"


class Exchanger:
    """Sums over all ranks, in place, of the values of some shared variables.

    Parameters
    ----------
    comm : MPI.Comm
    strategy : str
        ``ar``, ``asa32``, ``asa16``, ``nccl32`` or ``nccl16``.
    sources, targets : list of shared variables
        Values of `sources` are summed into `targets`; both may be the same variables.
    patience : float
        Seconds to wait for another rank.
    """

    def __init__(
        self,
        comm: Any,
        strategy: str,
        sources: Sequence[Any],
        targets: Sequence[Any],
        patience: float = 600.0,
    ) -> None:
        self._sources, self._targets = list(sources), list(targets)
        self._nccl = None
        if strategy.startswith("nccl"):
            from synkhronos.rules.nccl import Clique

            self._nccl = Clique(comm, sixteen_bits=strategy == "nccl16")
            return
        self._sum = _SUMS[strategy](comm, patience)
        self._flat = Flat(self._targets, getattr(self._sum, "allocate", np.empty), sums=True)

    def sum(self, weight: float) -> None:
        """Set the targets to the sum over ranks of each rank's sources, times its weight."""
        if self._nccl is not None:
            self._nccl.sum(self._sources, self._targets, weight)
            return
        for array in self._flat.read(self._sources):
            if weight != 1:
                array *= array.dtype.type(weight)
            self._sum(array)
        self._flat.write()


class _AllToAll:
    """Each rank sums its share of all ranks' arrays, in the order of ranks; then all gather."""

    sixteen_bits = False

    def __init__(self, comm, patience):
        self._comm = comm

    def __call__(self, array):
        comm, size = self._comm, self._comm.size
        counts = [len(part) for part in np.array_split(np.empty(array.size, "i1"), size)]
        begins = [0, *np.cumsum(counts)[:-1].tolist()]
        sent, scales = array, np.ones(size, np.float32)
        if self.sixteen_bits:
            sent, scale = rounded_to_16_bits(array)
            comm.Allgather(np.array([scale]), scales)
            sent = sent.view(np.uint16)
        own = counts[comm.rank]
        received = np.empty((size, own), sent.dtype)
        comm.Alltoallv((sent, (counts, begins)), (received, ([own] * size, None)))
        if self.sixteen_bits:
            received = received.view(np.float16)
        share = array[begins[comm.rank] :][:own]
        share[:] = 0
        for part, scale in zip(received, scales):
            share += part.astype(array.dtype, copy=False) * array.dtype.type(scale)
        comm.Allgatherv(MPI.IN_PLACE, (array, (counts, begins)))


class _AllToAllIn16Bits(_AllToAll):
    """Each contribution is rounded once to 16 bits, and summed in the array's own dtype."""

    sixteen_bits = True


_SUMS: dict[str, Callable[[Any, float], Callable[[np.ndarray], None]]] = {
    "ar": MachineSums,
    "asa32": _AllToAll,
    "asa16": _AllToAllIn16Bits,
}


def broadcast(comm: Any, variables: Sequence[Any], root: int = 0) -> None:
    """Give all ranks the values of one rank.

    Raises
    ------
    ValueError
        On all ranks, if the variables differ between ranks in number, shape or dtype.
    """
    from synkhronos import _host

    described = [(str(each.dtype), _host.peek(each).shape) for each in variables]
    all_described = comm.allgather(described)
    for rank, other in enumerate(all_described):
        if other != all_described[root]:
            raise ValueError(
                f"the parameters of rank {rank} differ from those of rank {root} in number, shape "
                "or dtype: all ranks must build the same model."
            )
    if not variables:
        return
    flat = Flat(variables)
    for array in flat.read():
        comm.Bcast(array, root)
    flat.write()
    flat.detach()


def swap(comm: Any, flat: Flat, partner: int | None) -> None:
    """Exchange all values with another rank; without a partner do nothing."""
    if partner is None:
        return
    for array in flat.read():
        comm.Sendrecv_replace(array, partner, 700, partner, 700)
    flat.write()
