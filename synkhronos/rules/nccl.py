"""NCCL between ranks that have a CUDA device of one machine each.

Not tested where there is no machine with several GPUs: docs/rules.rst says how to test it.
"""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from synkhronos import _host


class Clique:
    """NCCL's communicator of all ranks.

    Parameters
    ----------
    group : Group
        The ranks; one of them makes the clique's id, and broadcasts it.
    sixteen_bits : bool
        Whether to sum in float16, scaled so that no sum overflows.
    """

    def __init__(self, group: Any, sixteen_bits: bool) -> None:
        from pygpu.collectives import GpuComm, GpuCommCliqueId

        self._group, self._sixteen_bits = group, sixteen_bits
        clique = GpuCommCliqueId(_host.device_context())
        # GpuCommCliqueId takes writable buffers only.
        number = group.broadcast(bytes(clique.comm_id))
        clique = GpuCommCliqueId(_host.device_context(), comm_id=bytearray(number))
        self._nccl = GpuComm(clique, group.size, group.rank)

    def sum(self, sources: Sequence[Any], targets: Sequence[Any], weight: float) -> None:
        """Set the targets to the sum over ranks of each rank's sources, times its weight."""
        for source, target in zip(sources, targets):
            value = _host.peek(source)
            if weight != 1:
                value = value.copy()
                _host.scale_on_device(value, weight)
            if self._sixteen_bits:
                _host.replace(target, self._sum_in_16_bits(value))
            else:
                out = _host.empty_like(value)
                self._nccl.all_reduce(value, "+", out)
                _host.replace(target, out)

    def _sum_in_16_bits(self, value):
        # NCCL sums in the dtype that it sends: the largest sum must fit, so the scale is shared.
        host = np.asarray(value)
        largest = float(np.abs(host).max(initial=0.0)) * self._group.size
        largest = max(self._group.all_gather(largest))
        scale = np.float32(2.0 ** np.ceil(np.log2(largest / 2**15))) if largest else np.float32(1)
        half = _host.to_device((host / scale).astype(np.float16))
        out = _host.empty_like(half)
        self._nccl.all_reduce(half, "+", out)
        return np.asarray(out).astype(host.dtype) * scale
