"""NCCL itself, between ranks that share a GPU.

NCCL refuses two ranks on one GPU of one host. Here each rank names a host of its own, so NCCL
connects them through sockets. That is slow, as the ranks' kernels take turns on the GPU, but all
code is that of ranks with a GPU each on hosts without a faster network.
"""

import os
import sys
import types

from support import stand_in


def counted():
    """Return a class of members of NCCL's cliques that write calls into `stand_in.calls`."""
    from pygpu import collectives

    class Counted(collectives.GpuComm):
        def __new__(cls, clique_id, count, rank):
            os.environ["NCCL_HOSTID"] = f"synkhronos-rank-{rank}"  # read when the rank joins
            return super().__new__(cls, clique_id, count, rank)

        def all_reduce(self, src, op, dest=None):
            stand_in.calls.append("all_reduce")
            return super().all_reduce(src, op, dest)

        def broadcast(self, array, root=-1):
            stand_in.calls.append("broadcast")
            return super().broadcast(array, root)

        def all_gather(self, src, dest=None, nd_up=1):
            stand_in.calls.append("all_gather")
            return super().all_gather(src, dest, nd_up)

    return Counted


def install(hosts=True):
    """Have sessions use it, from the next fork on; without `hosts` NCCL refuses shared GPUs."""
    from pygpu import collectives

    from synkhronos.comm import transports

    module = types.ModuleType("pygpu.collectives")
    module.GpuComm = counted() if hosts else collectives.GpuComm
    module.GpuCommCliqueId = collectives.GpuCommCliqueId
    sys.modules["pygpu.collectives"] = module
    transports.kinds_for = stand_in.kinds_for
