"""CUDA devices of one machine through NCCL: the only importer of pygpu's collectives.

    allocate ──▶ vote ──▶ meet ──▶ meet, enqueue ──▶ wait for the own device ──▶ meet
                 on what each rank                   workers: the master waits for them
                 is going to reduce                  in the meeting, where it sees a death

Arrays that all ranks have with the same shape, in a dtype that NCCL knows, stay on the devices. All
others go through the base; so do all arrays before `join`.

NCCL has no way out for a rank if another rank does not come: its kernel spins for ever. Therefore:

- No rank enqueues anything before all ranks have met, with everything checked and allocated.
- From that meeting until everything is enqueued, a Ctrl-C waits.
- The master, which must report deaths to the user, waits for its own device only after it has met
  the workers, whose devices have finished.

If a worker is killed in between, the gate tells the master, which kills the other workers; the
driver ends their kernels. NCCL ends the master's own kernel when the master aborts the clique.

References
----------
NVIDIA, NCCL User Guide, "Collective Operations" and "Thread Safety".
"""

import contextlib
import ctypes
import hashlib
import threading

import numpy as np

from synkhronos import _host
from synkhronos._arithmetic.blocks import OPS
from synkhronos._machine.interrupts import interrupts_held
from synkhronos._machine.log import log
from synkhronos.comm import Communicator
from synkhronos.comm.composition import ArraysOver, OutputsOver, VariablesOver

_DTYPES = ("int8", "int32", "int64", "uint64", "float16", "float32", "float64")
_LARGEST = 2**31 - 1  # elements of an array: libgpuarray counts in C's int
_ABORT_SECONDS = 10


class _Clique:
    """One rank's membership in NCCL's clique, and the votes on whether to use it."""

    def __init__(self, worker):
        self._gate, self._worker = worker.gate, worker
        self.comm = None  # NCCL's communicator, between `join` and `leave`

    def join(self, clique_id):
        """Become a member; return when all ranks are members."""
        clique = _clique(clique_id)
        self._gate.meet()
        self.comm = _member(clique, self._worker.n_ranks, self._worker.rank)

    def abort(self):
        """End the kernels of this rank's device that wait for ranks that are gone."""
        comm, self.comm = self.comm, None
        if comm is None:
            return
        # Never freed: pygpu would free what the abort frees, and wait for the other ranks before.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(comm))
        thread = threading.Thread(target=_abort, args=(comm, _host.device_context()), daemon=True)
        thread.start()
        thread.join(_ABORT_SECONDS)
        if thread.is_alive():
            log.warning(
                "NCCL does not end its work on %s: restart the process", self._worker.device
            )

    def run(self, rounds, verb):
        """Reduce, if all ranks are going to reduce the same; return whether this was done."""
        if not self.agree([each.description for each in rounds], verb):
            return False
        with self.enqueuing():
            for each in rounds:
                each.enqueue(self.comm)
        self.wait_for([each.result for each in rounds])
        for each in rounds:
            each.finish()
        return True

    def agree(self, described, verb):
        """Vote and meet; return whether all ranks describe the same arrays, and at least one."""
        if self.comm is None:
            return False
        ballot = 0
        if described:
            text = repr((verb, described))
            ballot = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
        return self._gate.agree(ballot) and ballot != 0

    @contextlib.contextmanager
    def enqueuing(self):
        """Meet, and hold back a Ctrl-C until everything is enqueued.

        After a Ctrl-C before that, the master does not come to the meeting, so the workers leave
        the call at the meeting, and no rank enqueues anything.
        """
        with interrupts_held():
            self._gate.meet()
            yield

    def wait_for(self, arrays):
        """Wait until the devices of all workers have finished these arrays."""
        if not self._worker.is_master:
            for array in arrays:
                array.sync()
        self._gate.meet()


def _clique(number=None):
    """Return the clique with a number, or a new one; raise without NCCL."""
    from pygpu.collectives import GpuCommCliqueId

    # GpuCommCliqueId takes writable buffers only.
    given = {} if number is None else {"comm_id": bytearray(number)}
    return GpuCommCliqueId(_host.device_context(), **given)


def _member(clique, size, rank):
    from pygpu.collectives import GpuComm

    return GpuComm(clique, size, rank)


class GroupSums:
    """Sums of arrays on the devices of a group's ranks, each of which has one of one machine.

    Not tested where there is no machine with several GPUs: docs/rules.rst says how to test it.

    Parameters
    ----------
    group : Group
    sixteen_bits : bool
        Whether to sum in float16, scaled so that no sum overflows.
    """

    def __init__(self, group, sixteen_bits):
        self._group, self._sixteen_bits = group, sixteen_bits
        number = group.broadcast(bytes(_clique().comm_id))
        self._comm = _member(_clique(number), group.size, group.rank)

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
        # NCCL sums in the dtype that it sends: the largest sum must fit, so the scale is shared.
        host = np.asarray(value)
        largest = float(np.abs(host).max(initial=0.0)) * self._group.size
        largest = max(self._group.all_gather(largest))
        scale = np.float32(2.0 ** np.ceil(np.log2(largest / 2**15))) if largest else np.float32(1)
        half = _host.to_device((host / scale).astype(np.float16))
        return np.asarray(self._sum(half)).astype(host.dtype) * scale


class NcclVariables(VariablesOver):
    """Values of shared variables: NCCL reduces those that fit, the base all others."""

    def __init__(self, worker, clique, base):
        super().__init__(base)
        self._worker, self._clique = worker, clique

    def all_reduce(self, keys, op):
        """Replace each variable, on all ranks, with the reduction over all ranks."""
        arrays = self._arrays(keys)
        rounds = [_Round(array, op, array, 1, self._worker.n_ranks) for array in arrays]
        if not self._clique.run(rounds, "all_reduce"):
            return super().all_reduce(keys, op)
        return None

    def reduce(self, keys, op, root):
        """Replace each variable of rank `root` with the reduction over all ranks."""
        # All ranks reduce, because NCCL's own reduce hung between GPUs with a direct link (2017).
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
        """Replace each variable, on all ranks, with the value on rank `root`."""
        arrays = self._arrays(keys)
        source = -1 if self._worker.rank == root else root
        if not self._clique.agree(_describe(arrays), f"broadcast {root}"):
            super().broadcast(keys, root)
            return
        with self._clique.enqueuing():
            for array in arrays:
                self._clique.comm.broadcast(array, source)
        self._clique.wait_for(arrays)

    def all_gather(self, keys):
        """Replace each variable, on all ranks, with the values of all ranks joined on axis 0."""
        arrays = self._arrays(keys)
        n_ranks = self._worker.n_ranks
        joined = [_host.empty_on_device((n_ranks * len(a), *a.shape[1:]), a.dtype) for a in arrays]
        if not self._clique.agree(_describe(arrays), "all_gather"):
            return super().all_gather(keys)
        with self._clique.enqueuing():
            for array, target in zip(arrays, joined):
                self._clique.comm.all_gather(array, target, nd_up=0)
        self._clique.wait_for(joined)
        self._replace(keys, joined)
        return None

    def _arrays(self, keys):
        """Return the values of variables, or an empty list if NCCL can't take them all."""
        arrays = [_host.peek(self._worker.variables[key]) for key in keys]
        return arrays if self._clique.comm is not None and all(map(_fits, arrays)) else []

    def _replace(self, keys, arrays):
        for key, array in zip(keys, arrays):
            _host.replace(self._worker.variables[key], array)


class NcclArrays(ArraysOver):
    """Reductions inside of functions: NCCL reduces arrays that fit, the base all others."""

    def __init__(self, worker, clique, base):
        super().__init__(base)
        self._worker, self._clique = worker, clique

    def exchange(self, arrays, ops, weights, targets):
        """Reduce arrays that every rank has computed, into arrays of its own."""
        weighing = [weight for weight in weights if weight]
        equal = len(set(weighing)) == 1
        divisor = len(weighing) if equal else sum(weights)
        mine = weights[self._worker.rank]
        # A rank without rows contributes a neutral element, which is known (zero) for sums only.
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

    def landing_place(self, position, shape, dtype, bucket=None):
        """Return None: positions count all arrays, not only those that go through memory."""
        return None


class NcclOutputs(OutputsOver):
    """Outputs of functions: NCCL reduces arrays that fit, the master combines all others."""

    def __init__(self, worker, clique, base):
        super().__init__(base)
        self._worker, self._gate, self._clique = worker, worker.gate, clique

    def reduces(self, dtype, ndim, mode):
        """Return whether `reduce` can take outputs of this kind, so that they stay on devices."""
        return (
            self._clique.comm is not None
            and ndim > 0
            and dtype in _DTYPES
            and mode not in (None, "gather")
            and (mode != "avg" or np.dtype(dtype).kind == "f")
        )

    def reduce(self, outputs, modes):
        """Reduce the outputs that are on devices; the master gets the results."""
        if self._clique.comm is None:
            return {}
        self._gate.meet()  # after it, the row counts of all ranks can be read
        rows = self._gate.rows()
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
    """One rank's end of a clique, composed with a base."""

    def __init__(self, clique, base, **parts):
        super().__init__(base.memory, base=base, **parts)
        self._clique = clique

    def introduction(self):
        """Return the id of a new clique, which all ranks must join with; raise without NCCL."""
        return bytes(_clique().comm_id)

    def join(self, introduction):
        """Become a member of the clique; return when all ranks are members."""
        self._clique.join(introduction)

    def leave(self):
        """Use the base from now on."""
        # No kernel of the clique runs: this follows a `join` that failed on a rank.
        self._clique.comm = None

    def abort(self):
        """End what the device does in a round, because a rank is gone."""
        self._clique.abort()

    def forget(self, functions, variables):
        """Drop the memory and the views of functions and shared variables that are no more."""
        self.base.forget(functions, variables)

    def close(self):
        """Drop all memory and views of the base."""
        self.base.close()


def connect(worker, base) -> Communicator:
    """Return this rank's communicator, composed with `base`."""
    clique = _Clique(worker)
    return NcclCommunicator(
        clique,
        base,
        variables=NcclVariables(worker, clique, base.variables),
        outputs=NcclOutputs(worker, clique, base.outputs),
        arrays=NcclArrays(worker, clique, base.arrays),
    )


def _abort(comm, context):
    """Let NCCL end its kernels, and free the communicator; pygpu has no function for it."""
    handle = _handle(comm, context)
    if handle is None:
        return
    get_extension = ctypes.CDLL("libgpuarray.so.3").gpuarray_get_extension
    get_extension.restype, get_extension.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    enter, leave = (
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(get_extension(name))
        for name in (b"cuda_enter", b"cuda_exit")
    )
    end = ctypes.CDLL("libnccl.so").ncclCommAbort
    end.argtypes = [ctypes.c_void_p]
    enter(context.ptr)  # NCCL frees memory of the context that is current in this thread
    try:
        end(handle)
    finally:
        leave(context.ptr)


def _handle(comm, context):
    """Return the address of NCCL's communicator in pygpu's, or None if pygpu's is another one.

    pygpu/collectives.h has the object: behind the head of every Python object, the address of
    libgpuarray's communicator. That one has the addresses of its context and of NCCL's.
    """
    if not any(base.__module__ == "pygpu.collectives" for base in type(comm).__mro__):
        return None
    inner = ctypes.c_void_p.from_address(id(comm) + object.__basicsize__).value
    of_context, handle = (ctypes.c_void_p * 2).from_address(inner)
    return handle if of_context == context.ptr else None


class _Round:
    """One array to be reduced. All memory for it is allocated here, before the ranks vote.

    Temporary arrays may go as soon as `finish` has returned, though the device may still work on
    them: all operations of a device are in one stream, Theano's default
    (``gpuarray.single_stream``), so their memory is used again only after that.
    """

    def __init__(self, array, op, target, weight, divisor):
        self._op, self._target, self._divisor = op, target, divisor
        self.description = _describe([array]), op
        self._source, self.result = array, target
        is_half = array.dtype == np.float16
        if is_half:
            # In half precision, 11 bits, a sum could lose a rank's whole contribution.
            self._source = self.result = array.astype("float32")
        if weight != 1 and (op == "avg" or weight == 0):
            self._source = self._source if is_half else array.copy()
            if weight:
                _host.scale_on_device(self._source, weight)
            else:
                self._source[...] = 0

    def enqueue(self, clique):
        """Begin the reduction; return before the device has done it."""
        clique.all_reduce(self._source, "sum" if self._op == "avg" else self._op, self.result)

    def finish(self):
        """Divide if it is an average, and store the result in the target."""
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
