"""Sums of arrays on CUDA devices of one machine, through NCCL."""

import numpy as np

from synkhronos import _host
from synkhronos.comm import nccl


class GroupSums:
    """Sums of arrays on the devices of a group's ranks, each on its own device of one machine.

    With `sixteen_bits` the sums are computed in float16, scaled so that none overflows. The tests
    need a machine with several GPUs: docs/rules.rst says how to run them.
    """

    def __init__(self, group, sixteen_bits):
        self._group, self._sixteen_bits = group, sixteen_bits
        number = group.broadcast(bytes(nccl.group_id().comm_id))
        self._comm = nccl.member(nccl.group_id(number), group.size, group.rank)

    def __call__(self, value, weight):
        """Return the sum over ranks of each rank's array, times its weight."""
        if weight != 1:
            value = value.copy()
            _host.scale_on_device(value, weight)
        if self._sixteen_bits:
            return self._sum_in_16_bits(value)
        return self._sum(value)

    def _sum(self, value):
        out = _host.empty_like(value)
        self._comm.all_reduce(value, "+", out)
        return out

    def _sum_in_16_bits(self, value):
        # NCCL sums in float16, in which the largest sum must fit: so all ranks use one scale.
        host = np.asarray(value)
        largest = float(np.abs(host).max(initial=0.0)) * self._group.size
        largest = max(self._group.all_gather(largest))
        scale = np.float32(2.0 ** np.ceil(np.log2(largest / 2**15))) if largest else np.float32(1)
        half = _host.to_device((host / scale).astype(np.float16))
        return np.asarray(self._sum(half)).astype(host.dtype) * scale
