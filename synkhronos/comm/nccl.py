"""CUDA devices of one machine through NCCL: the only importer of pygpu's collectives.

    allocate ──▶ vote ──▶ meet ──▶ meet, enqueue ──▶ wait for the own device ──▶ meet
                 on what each rank                   workers: the master waits for them
                 is going to reduce                  in the meeting, where it sees a death

What all ranks hold alike, in a dtype that NCCL knows, stays on the devices. All else goes the exact
way, through shared memory; and so does everything before `join`.

NCCL has no way out for a rank whose peer does not come: its kernel spins. So nothing is enqueued
before all ranks have met, with everything checked and allocated; from there on a Ctrl-C waits; and
the master, which must tell the user, never waits for its own device before it has heard that the
workers are done. When a worker is killed in between, the master is told by the gate and kills the
others, whose kernels the driver ends. What is left is the master's own kernel: its device is of no
use until the process ends. Nor is the clique left before, which would wait for the others.

References
----------
NVIDIA, NCCL User Guide, "Collective Operations" and "Thread Safety".
"""

import contextlib
import hashlib

import numpy as np

from synkhronos import _host
from synkhronos._arithmetic.blocks import OPS
from synkhronos._machine.interrupts import interrupts_held
from synkhronos.comm import Communicator
from synkhronos.comm.composition import ArraysOver, OutputsOver, VariablesOver

_DTYPES = ("int8", "int32", "int64", "uint64", "float16", "float32", "float64")
_LARGEST = 2**31 - 1  # elements of an array: libgpuarray counts in C's int


class _Clique:
    """One rank's membership in NCCL's clique, and how the ranks agree to use it."""

    def __init__(self, worker):
        self._gate, self._worker = worker.gate, worker
        self.comm = None  # of NCCL, between `join` and `leave`

    def join(self, clique_id):
        """Become a member; returns when all ranks are."""
        from pygpu.collectives import GpuComm, GpuCommCliqueId

        # It takes a buffer that can be written to.
        clique = GpuCommCliqueId(_host.device_context(), comm_id=bytearray(clique_id))
        self._gate.meet()
        self.comm = GpuComm(clique, self._worker.n_ranks, self._worker.rank)

    def run(self, rounds, verb):
        """Reduce, if all ranks are to do the same; return whether it was done."""
        if not self.agree([each.description for each in rounds], verb):
            return False
        with self.all_together():
            for each in rounds:
                each.enqueue(self.comm)
        self.wait_for([each.result for each in rounds])
        for each in rounds:
            each.finish()
        return True

    def agree(self, described, verb):
        """Vote and meet; return whether all ranks are to do the same, and something."""
        if self.comm is None:
            return False
        ballot = 0
        if described:
            text = repr((verb, described))
            ballot = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
        return self._gate.agree(ballot) and ballot != 0

    @contextlib.contextmanager
    def all_together(self):
        """Meet, and let no Ctrl-C come before everything is enqueued.

        It may have come before: then the master does not meet, and nobody enqueues anything.
        """
        with interrupts_held():
            self._gate.meet()
            yield

    def wait_for(self, arrays):
        """Wait until this rank's device has the arrays, and then for the other ranks."""
        if not self._worker.is_master:
            for array in arrays:
                array.sync()
        self._gate.meet()


class NcclVariables(VariablesOver):
    """Values of shared variables: those that all ranks hold alike, on their GPUs, stay there."""

    def __init__(self, worker, clique, base):
        super().__init__(base)
        self._worker, self._clique = worker, clique

    def all_reduce(self, keys, op):
        """Replace each variable, on all ranks, with the reduction of all."""
        arrays = self._arrays(keys)
        rounds = [_Round(array, op, array, 1, self._worker.n_ranks) for array in arrays]
        if not self._clique.run(rounds, "all_reduce"):
            return super().all_reduce(keys, op)
        return None

    def reduce(self, keys, op, root):
        """Replace each variable of the rank `root` with the reduction of all."""
        # NCCL's own reduce was seen to hang between GPUs that are linked directly (2017).
        arrays = self._arrays(keys)
        targets = [_host.empty_like(array) for array in arrays]
        rounds = [
            _Round(array, op, target, 1, self._worker.n_ranks)
            for array, target in zip(arrays, targets)
        ]
        if not self._clique.run(rounds, "reduce"):
            return super().reduce(keys, op, root)
        if self._worker.rank == root:
            self._replace(keys, targets)
        return None

    def broadcast(self, keys, root):
        """Replace each variable with the value on rank `root`."""
        arrays = self._arrays(keys)
        source = -1 if self._worker.rank == root else root
        if not self._clique.agree(_describe(arrays), f"broadcast {root}"):
            super().broadcast(keys, root)
            return
        with self._clique.all_together():
            for array in arrays:
                self._clique.comm.broadcast(array, source)
        self._clique.wait_for(arrays)

    def all_gather(self, keys):
        """Replace each variable with the values of all ranks, joined along axis 0."""
        arrays = self._arrays(keys)
        n_ranks = self._worker.n_ranks
        joined = [_host.empty_on_device((n_ranks * len(a), *a.shape[1:]), a.dtype) for a in arrays]
        if not self._clique.agree(_describe(arrays), "all_gather"):
            return super().all_gather(keys)
        with self._clique.all_together():
            for array, target in zip(arrays, joined):
                self._clique.comm.all_gather(array, target, nd_up=0)
        self._clique.wait_for(joined)
        self._replace(keys, joined)
        return None

    def _arrays(self, keys):
        """Return the values of variables if NCCL can take them all, else none."""
        arrays = [_host.peek(self._worker.variables[key]) for key in keys]
        return arrays if self._clique.comm is not None and all(map(_fits, arrays)) else []

    def _replace(self, keys, arrays):
        for key, array in zip(keys, arrays):
            _host.replace(self._worker.variables[key], array)


class NcclArrays(ArraysOver):
    """Arrays that ranks reduce inside of a function: those on GPUs stay there."""

    def __init__(self, worker, clique, base):
        super().__init__(base)
        self._worker, self._clique = worker, clique

    def exchange(self, arrays, ops, weights, targets):
        """Reduce arrays that every rank has computed, some on the GPUs."""
        weighing = [weight for weight in weights if weight]
        equal = len(set(weighing)) == 1
        divisor = len(weighing) if equal else sum(weights)
        mine = weights[self._worker.rank]
        # A rank without rows has a neutral element for sums only.
        summed = ("avg", "sum") if len(weighing) < len(weights) else OPS
        fast = []
        if self._clique.comm is not None:
            fast = [i for i, (a, op) in enumerate(zip(arrays, ops)) if _fits(a) and op in summed]
        rounds = [
            _Round(arrays[i], ops[i], targets[i], min(mine, 1) if equal else mine, divisor)
            for i in fast
        ]
        if not self._clique.run(rounds, f"exchange {fast}"):
            fast = []
        rest = [i for i in range(len(arrays)) if i not in fast]
        results = list(targets)
        if rest:
            chosen = [[each[i] for i in rest] for each in (arrays, ops, targets)]
            reduced = super().exchange(chosen[0], tuple(chosen[1]), weights, chosen[2])
            for i, result in zip(rest, reduced):
                results[i] = result
        return results

    def landing_place(self, position, shape, dtype):
        """Return None: positions count all arrays, not only those that go through memory."""
        return None


class NcclOutputs(OutputsOver):
    """Outputs of functions: arrays on GPUs are reduced there."""

    def __init__(self, worker, clique, base):
        super().__init__(base)
        self._worker, self._gate, self._clique = worker, worker.gate, clique

    def reduces(self, dtype, ndim, mode):
        """Return whether outputs of this kind are worth keeping on the device, for `reduce`."""
        return (
            self._clique.comm is not None
            and ndim > 0
            and dtype in _DTYPES
            and mode not in (None, "gather")
            and (mode != "avg" or np.dtype(dtype).kind == "f")
        )

    def reduce(self, outputs, modes):
        """Reduce those outputs of a function that are on devices, to the master."""
        if self._clique.comm is None:
            return {}
        self._gate.meet()  # all have told how many rows they computed
        rows = [self._gate.rows_of(rank) for rank in range(self._worker.n_ranks)]
        chosen = [
            position
            for position, (output, mode) in enumerate(zip(outputs or (), modes))
            if _fits(output) and self.reduces(str(output.dtype), output.ndim, mode)
        ]
        targets = [_host.empty_like(outputs[position]) for position in chosen]
        rounds = [
            _Round(outputs[i], modes[i], target, rows[self._worker.rank], sum(rows))
            for i, target in zip(chosen, targets)
        ]
        if not self._clique.run(rounds, f"outputs {chosen}"):
            return {}
        if not self._worker.is_master:
            return dict.fromkeys(chosen)
        return {position: np.asarray(target) for position, target in zip(chosen, targets)}


class NcclCommunicator(Communicator):
    """One rank's end of a clique, on top of the transport that does all else."""

    def __init__(self, clique, base, **parts):
        super().__init__(base.memory, base=base, **parts)
        self._clique = clique

    def introduction(self):
        """Return what the ranks of a new clique know one another by; raise without NCCL."""
        from pygpu.collectives import GpuCommCliqueId

        return bytes(GpuCommCliqueId(_host.device_context()).comm_id)

    def join(self, introduction):
        """Become a member of the clique; returns when all ranks have."""
        self._clique.join(introduction)

    def leave(self):
        """Use the transport underneath from now on."""
        self._clique.comm = None

    def forget(self, functions, variables):
        """Drop what belongs to functions and shared variables that are no more."""
        self.base.forget(functions, variables)

    def close(self):
        """Drop everything."""
        self.base.close()


def connect(worker, base) -> Communicator:
    """Return this rank's communicator, on top of another."""
    clique = _Clique(worker)
    return NcclCommunicator(
        clique,
        base,
        variables=NcclVariables(worker, clique, base.variables),
        outputs=NcclOutputs(worker, clique, base.outputs),
        arrays=NcclArrays(worker, clique, base.arrays),
    )


class _Round:
    """One array to be reduced; what it takes is allocated before the ranks vote.

    Temporary arrays may be dropped when it is finished: all operations of a device are in one
    stream, Theano's default (``gpuarray.single_stream``).
    """

    def __init__(self, array, op, target, weight, divisor):
        self._op, self._target, self._divisor = op, target, divisor
        self.description = _describe([array]), op
        self._source, self.result = array, target
        is_half = array.dtype == np.float16
        if is_half:
            # Its 11 bits would lose a rank's whole contribution.
            self._source = self.result = array.astype("float32")
        if weight != 1 and (op == "avg" or weight == 0):
            self._source = self._source if is_half else array.copy()
            if weight:
                _host.scale_on_device(self._source, weight)
            else:
                self._source[...] = 0

    def enqueue(self, clique):
        """Begin; returns before it is done."""
        clique.all_reduce(self._source, "sum" if self._op == "avg" else self._op, self.result)

    def finish(self):
        """Have the target hold the result."""
        if self._op == "avg":
            _host.scale_on_device(self.result, 1 / self._divisor)
        if self.result is not self._target:
            self._target[...] = self.result


def _describe(arrays):
    return [(array.shape, str(array.dtype)) for array in arrays]


def _fits(array):
    return (
        _host.is_on_device(array)
        and array.ndim > 0
        and 0 < array.size <= _LARGEST
        and str(array.dtype) in _DTYPES
        and array.flags.c_contiguous
        and array.flags.aligned
    )
