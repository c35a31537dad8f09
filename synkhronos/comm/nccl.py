"""CUDA devices of one machine through NCCL: the only importer of pygpu's collectives.

    vote ──▶ meet ──▶ enqueue ──▶ wait for the own device ──▶ meet
    on what each rank           workers: the master waits for them
    is going to reduce          in the meeting, where it sees a death

What all ranks hold alike, in a dtype that NCCL knows, stays on the devices. All else goes the exact
way, through shared memory; and so does everything before `join`.

NCCL has no way out for a rank whose peer does not come: its kernel spins. So nothing is enqueued
before all ranks have met, with everything checked; and the master, which must tell the user, never
waits for its own device before it has heard that the workers are done. When a worker is killed in
between, the master is told by the gate and kills the others, whose kernels the driver ends. What is
left is the master's own kernel: its device is of no use until the process ends.

References
----------
NVIDIA, NCCL User Guide, "Collective Operations" and "Thread Safety".
"""

import hashlib

import numpy as np

from synkhronos import _gpuarrays, _theano
from synkhronos.comm.shared import SharedMemory

_DTYPES = ("int8", "int32", "int64", "uint64", "float16", "float32", "float64")
_LARGEST = 2**31 - 1  # elements of an array: libgpuarray counts in C's int


class Nccl(SharedMemory):
    """One rank's end of a clique."""

    can_join = True

    def __init__(self, worker):
        super().__init__(worker)
        self._clique = None

    def make_clique_id(self) -> bytes:
        """Return what the ranks of a new clique know one another by; raises without NCCL."""
        from pygpu.collectives import GpuCommCliqueId

        return bytes(GpuCommCliqueId(_gpuarrays.context()).comm_id)

    def join(self, clique_id):
        """Become a member of the clique; returns when all ranks have."""
        from pygpu.collectives import GpuComm, GpuCommCliqueId

        # It takes a buffer that can be written to.
        clique = GpuCommCliqueId(_gpuarrays.context(), comm_id=bytearray(clique_id))
        self._gate.meet()
        self._clique = GpuComm(clique, self._worker.n_ranks, self._worker.rank)

    def leave(self):
        """Go the way through shared memory from now on."""
        self._clique = None

    def close(self):
        """Drop everything; the variables that are left keep their values."""
        self.leave()
        super().close()

    # Values of shared variables.

    def all_reduce(self, keys, op):
        """Replace each variable, on all ranks, with the reduction of all."""
        arrays = self._agreed(keys, "all_reduce", op)
        if arrays is None:
            return super().all_reduce(keys, op)
        for array in arrays:
            self._reduce_array(array, op, array, self._worker.n_ranks)
        self._wait_for(arrays)
        return None

    def reduce(self, keys, op, root):
        """Replace each variable of the rank `root` with the reduction of all."""
        arrays = self._agreed(keys, "reduce", op)
        if arrays is None:
            return super().reduce(keys, op, root)
        # NCCL's own reduce was seen to hang between GPUs that are linked directly (2017).
        reduced = [_gpuarrays.empty_like(array) for array in arrays]
        for array, target in zip(arrays, reduced):
            self._reduce_array(array, op, target, self._worker.n_ranks)
        self._wait_for(reduced)
        if self._worker.rank == root:
            self._replace(keys, reduced)
        return None

    def broadcast(self, keys, root):
        """Replace each variable with the value on rank `root`."""
        arrays = self._agreed(keys, "broadcast", root)
        if arrays is None:
            super().broadcast(keys, root)
            return
        for array in arrays:
            self._clique.broadcast(array, -1 if self._worker.rank == root else root)
        self._wait_for(arrays)

    def all_gather(self, keys):
        """Replace each variable with the values of all ranks, joined along axis 0."""
        arrays = self._agreed(keys, "all_gather", "")
        if arrays is None:
            return super().all_gather(keys)
        n_ranks = self._worker.n_ranks
        joined = [_gpuarrays.empty((n_ranks * len(a), *a.shape[1:]), a.dtype) for a in arrays]
        for array, target in zip(arrays, joined):
            self._clique.all_gather(array, target, nd_up=0)
        self._wait_for(joined)
        self._replace(keys, joined)
        return None

    def _replace(self, keys, arrays):
        for key, array in zip(keys, arrays):
            _theano.replace(self._worker.variables[key], array)

    # Inside a function.

    def exchange(self, arrays, ops, weights, targets):
        """Reduce arrays that every rank has computed, into arrays of its own."""
        everything = list(zip(arrays, ops, targets))
        fast = []
        if self._clique is not None:
            # A rank without rows has a neutral element for sums only.
            summed = ("avg", "sum") if not all(weights) else ("avg", "sum", "prod", "min", "max")
            fast = [each for each in everything if _fits(each[0]) and each[1] in summed]
            if not self._vote([(array, op) for array, op, _ in fast], "exchange"):
                fast = []
        if fast:
            weighing = [weight for weight in weights if weight]
            equal = len(set(weighing)) == 1
            divisor = len(weighing) if equal else sum(weights)
            mine = min(1, weights[self._worker.rank]) if equal else weights[self._worker.rank]
            for array, op, target in fast:
                self._reduce_weighted(array, op, target, mine, divisor)
            self._wait_for([target for _, _, target in fast])
        rest = [each for each in everything if not any(each is other for other in fast)]
        if rest:
            arrays, ops, targets = zip(*rest)
            super().exchange(arrays, ops, weights, targets)

    def reduces(self, dtype, ndim, mode):
        """Whether outputs of this kind are worth keeping on the device, for `reduce_outputs`."""
        return (
            self._clique is not None
            and ndim > 0
            and dtype in _DTYPES
            and mode not in (None, "gather")
            and (mode != "avg" or np.dtype(dtype).kind == "f")
        )

    def reduce_outputs(self, outputs, modes):
        """Reduce a function's outputs that are on devices, to the master.

        Parameters
        ----------
        outputs : list, or None on a rank that has not run
        modes : list of str or None

        Returns
        -------
        dict
            Position -> reduced value: a host array on the master, None on workers. Those that are
            not in it are left to be reduced by the master.
        """
        if self._clique is None:
            return {}
        outputs = outputs or []
        chosen = [
            position
            for position, (output, mode) in enumerate(zip(outputs, modes))
            if _fits(output) and self.reduces(str(output.dtype), output.ndim, mode)
        ]
        if not self._vote([(outputs[i], modes[i]) for i in chosen], "outputs"):
            return {}
        rows = [self._gate.rows_of(rank) for rank in range(self._worker.n_ranks)]
        reduced = {position: _gpuarrays.empty_like(outputs[position]) for position in chosen}
        for position, target in reduced.items():
            mine = rows[self._worker.rank]
            self._reduce_weighted(outputs[position], modes[position], target, mine, sum(rows))
        self._wait_for(list(reduced.values()))
        if not self._worker.is_master:
            return dict.fromkeys(reduced)
        return {position: np.asarray(target) for position, target in reduced.items()}

    # Between ranks.

    def _agreed(self, keys, verb, argument):
        """Return the values of variables, if they are such on all ranks that NCCL can take them."""
        if self._clique is None:
            return None
        arrays = [_theano.peek(self._worker.variables[key]) for key in keys]
        fit = all(_gpuarrays.is_on_device(array) and _fits(array) for array in arrays)
        described = [(array, argument) for array in arrays] if fit else []
        return arrays if self._vote(described, verb) else None

    def _vote(self, described, verb):
        """Meet; return whether all ranks are to do the same, and something."""
        ballot = 0
        if described:
            text = repr((verb, [(a.shape, str(a.dtype), argument) for a, argument in described]))
            ballot = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
        self._gate.cast_ballot(ballot)
        self._gate.meet()
        return ballot != 0 and self._gate.is_unanimous()

    def _reduce_array(self, array, op, target, divisor):
        """Have `target` become the reduction of all ranks' arrays."""
        if array.dtype == np.float16:
            # Its 11 bits would lose a rank's whole contribution.
            wide = array.astype("float32")
            self._reduce_array(wide, op, wide, divisor)
            target[...] = wide
            return
        self._clique.all_reduce(array, "sum" if op == "avg" else op, target)
        if op == "avg":
            _gpuarrays.scale(target, 1 / divisor)

    def _reduce_weighted(self, array, op, target, weight, divisor):
        if op == "avg" or weight == 0:
            wide = array.astype("float32") if array.dtype == np.float16 else array.copy()
            if weight == 0:
                wide[...] = 0
            else:
                _gpuarrays.scale(wide, weight)
            self._reduce_array(wide, op, wide, divisor)
            target[...] = wide
        else:
            self._reduce_array(array, op, target, divisor)

    def _wait_for(self, arrays):
        if not self._worker.is_master:
            for array in arrays:
                array.sync()
        self._gate.meet()


def _fits(array):
    return (
        _gpuarrays.is_on_device(array)
        and array.ndim > 0
        and 0 < array.size <= _LARGEST
        and str(array.dtype) in _DTYPES
        and array.flags.c_contiguous
        and array.flags.aligned
    )
