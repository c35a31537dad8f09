"""Sums of shared variables' values over the ranks of a rule.

    shared variables ──▶ Flat, in memory of the group ──▶ Group.all_reduce   ar, asa32, asa16
    on CUDA devices of one machine ──▶ NCCL (rules.nccl)                      nccl32, nccl16

All strategies leave the same bits on all ranks. Sums of float16 are computed in float32, except by
NCCL, and rounded once. `ar` and `asa32` are one exchange here: each rank sums its share in the
order of ranks, and all get all shares; so is `asa16`, with contributions that were rounded to 16
bits before. `nccl32` and `nccl16` are NCCL's where every rank has a CUDA device of its own on one
machine; elsewhere they are `ar` and `asa16`.

References
----------
Ma, Mao, Taylor, "Theano-MPI: a Theano-based Distributed Training Framework", arXiv:1605.08325
(`asa`: all-to-all, sum, all-gather).
"""

from __future__ import annotations

from typing import Any, Sequence

from synkhronos import _host
from synkhronos.comm.group import Group, RankLost
from synkhronos.rules.variables import Flat

STRATEGIES = ("nccl32", "nccl16", "ar", "asa32", "asa16")


def strategy_for(name: str, devices: Sequence[str], hosts: Sequence[str]) -> tuple[str, str]:
    """Return the strategy to take for a name, and a note if it is another one.

    >>> strategy_for("asa32", ["cpu", "cpu"], ["a", "a"])
    ('asa32', '')
    >>> strategy_for("nccl32", ["cpu", "cpu"], ["a", "a"])
    ('ar', 'nccl32 needs CUDA devices: ranks exchange in host memory, with the same sums')
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
        return "asa16", f"nccl16 {why}: ranks exchange in host memory, in 16 bits"
    return "ar", f"nccl32 {why}: ranks exchange in host memory, with the same sums"


class Exchanger:
    """Sums over all ranks, in place, of the values of some shared variables.

    Parameters
    ----------
    group : Group
    strategy : str
        ``ar``, ``asa32``, ``asa16``, ``nccl32`` or ``nccl16``.
    sources, targets : list of shared variables
        Values of `sources` are summed into `targets`; both may be the same variables.
    """

    def __init__(
        self, group: Group, strategy: str, sources: Sequence[Any], targets: Sequence[Any]
    ) -> None:
        self._group, self._sources, self._targets = group, list(sources), list(targets)
        self._nccl = None
        self._sixteen_bits = strategy.endswith("16")
        if strategy.startswith("nccl"):
            from synkhronos.rules.nccl import Clique

            self._nccl = Clique(group, self._sixteen_bits)
        else:
            self._flat = Flat(self._targets, group.allocate, sums=True)

    def sum(self, weight: float) -> None:
        """Set the targets to the sum over ranks of each rank's sources, times its weight."""
        if self._nccl is not None:
            self._nccl.sum(self._sources, self._targets, weight)
            return
        for array in self._flat.read(self._sources):
            if weight != 1:
                array *= array.dtype.type(weight)
            self._group.all_reduce(array, "sum", self._sixteen_bits)
        self._flat.write()


def broadcast(group: Group, variables: Sequence[Any], root: int = 0) -> None:
    """Give all ranks the values of one rank.

    Raises
    ------
    ValueError
        On all ranks, if the variables differ between ranks in number, shape or dtype.
    """
    described = [(str(each.dtype), _host.peek(each).shape) for each in variables]
    for rank, other in enumerate(everyone := group.all_gather(described)):
        if other != everyone[root]:
            raise ValueError(
                f"the parameters of rank {rank} differ from those of rank {root} in number, shape "
                "or dtype: all ranks must build the same model."
            )
    if variables:
        flat = Flat(variables)
        arrays = flat.read()
        for array, value in zip(arrays, group.broadcast(arrays, root)):
            array[...] = value
        flat.write()
        flat.detach()


def swap(group: Group, flat: Flat, partner: int | None) -> None:
    """Exchange all values with another rank; without a partner do nothing."""
    if partner is None:
        return
    arrays = flat.read()
    group.send(partner, arrays)
    came = None, None
    while came[0] != partner:  # others may have left by now
        came = group.receive(group.patience)
        if came is None or came == (partner, None):
            raise RankLost(f"rank {partner} has sent nothing", partner)
    for array, other in zip(arrays, came[1][0]):
        array[...] = other
    flat.write()
