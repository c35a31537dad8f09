"""CUDA devices of one machine through NCCL: the only importer of pygpu's collectives.

    allocate ──▶ vote ──▶ meet ──▶ meet, enqueue ──▶ wait for the own device ──▶ meet
                 on what each rank                   workers: the master waits for them
                 is going to reduce                  in the meeting, where it sees a death

Arrays that have the same shape on all ranks, and a dtype that NCCL knows, stay on the devices. All
others go through the memory of the host, as do all arrays before `join`.

NCCL has no way out for a rank if another rank does not come: its kernel spins for ever. Therefore:

- No rank enqueues anything before all ranks have met, with everything checked and allocated.
- From that meeting until everything is enqueued, a Ctrl-C waits.
- The master, which must report deaths to the user, waits for its own device only after it has met
  the workers, whose devices have finished.

If a worker is killed in between, the gate tells the master, which kills the other workers; the
driver ends their kernels. NCCL ends the master's own kernel when the master aborts the group.

See "Collective Operations" and "Thread Safety" in the NCCL User Guide of NVIDIA.
"""

import contextlib
import ctypes
import hashlib
import threading

import numpy as np

from synkhronos import _host
from synkhronos._machine.interrupts import interrupts_held
from synkhronos._machine.log import log
from synkhronos.comm.arrays import weigh

_DTYPES = ("int8", "int32", "int64", "uint64", "float16", "float32", "float64")
_KNOWN = ("avg", "sum", "prod", "min", "max")  # the operations that NCCL has
_LARGEST = 2**31 - 1  # elements of an array: libgpuarray counts in C's int
_ABORT_SECONDS = 10


class Nccl:
    """One rank's membership in the group of devices, which `join` begins and `leave` ends.

    Each method for arrays votes first, and does nothing if not all ranks can do the same on their
    devices.
    """

    def __init__(self, worker):
        self._gate, self._worker = worker.gate, worker
        self._comm = None  # NCCL's communicator, between `join` and `leave`

    def introduction(self):
        """Return the id of a new group, which all ranks must `join` with; raise without NCCL."""
        return bytes(group_id().comm_id)

    def join(self, introduction):
        """Become a member, and return when all are; None: a rank could not, so remain without."""
        if introduction is None:
            self._comm = None  # no kernel of the group runs
            return
        number = group_id(introduction)
        self._gate.meet()
        self._comm = member(number, self._worker.n_ranks, self._worker.rank)

    def abort(self):
        """End the kernels of this rank's device that wait for ranks that are gone."""
        comm, self._comm = self._comm, None
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

    def reduce(self, keys, op, root):
        """Reduce variables as `Variables.reduce`; return whether this was done."""
        # All ranks reduce, because NCCL's own reduce hung between GPUs with a direct link (2017).
        if op not in _KNOWN:
            return False
        arrays = self._values(keys)
        targets = arrays if root is None else [_host.empty_like(array) for array in arrays]
        rounds = [
            _NCCLRound(array, op, target, 1, self._worker.n_ranks)
            for array, target in zip(arrays, targets)
        ]
        is_done = self._run(rounds, "all_reduce" if root is None else "reduce")
        if is_done and self._worker.rank == root:
            self._replace(keys, targets)
        return is_done

    def broadcast(self, keys, root):
        """Broadcast variables as `Variables.broadcast`; return whether this was done."""
        arrays = self._values(keys)
        source = -1 if self._worker.rank == root else root
        if not self._agree(_describe(arrays), f"broadcast {root}"):
            return False
        with self._enqueuing():
            for array in arrays:
                self._comm.broadcast(array, source)
        self._wait_for(arrays)
        return True

    def all_gather(self, keys):
        """Join variables as `Variables.all_gather`; return whether this was done."""
        arrays = self._values(keys)
        n_ranks = self._worker.n_ranks
        joined = [_host.empty_on_device((n_ranks * len(a), *a.shape[1:]), a.dtype) for a in arrays]
        if not self._agree(_describe(arrays), "all_gather"):
            return False
        with self._enqueuing():
            for array, target in zip(arrays, joined):
                self._comm.all_gather(array, target, nd_up=0)
        self._wait_for(joined)
        self._replace(keys, joined)
        return True

    def exchange(self, arrays, ops, weights, targets):
        """Reduce what it can as `Arrays.exchange`; return the positions of these arrays."""
        # A rank without rows contributes zeros, which are neutral in sums only.
        known = _KNOWN if all(weights) else ("avg", "sum")
        chosen = []
        if self._comm is not None:
            chosen = [i for i, (a, op) in enumerate(zip(arrays, ops)) if _fits(a) and op in known]
        _, factor, divisor = weigh(weights, self._worker.rank)
        factor = factor if weights[self._worker.rank] else 0
        rounds = [_NCCLRound(arrays[i], ops[i], targets[i], factor, divisor) for i in chosen]
        return chosen if self._run(rounds, f"exchange {chosen}") else []

    def reduces(self, dtype, ndim, mode):
        """Return whether `reduce_outputs` can take outputs of this kind."""
        return (
            self._comm is not None
            and ndim > 0
            and dtype in _DTYPES
            and mode in _KNOWN
            and (mode != "avg" or np.dtype(dtype).kind == "f")
        )

    def reduce_outputs(self, outputs, modes):
        """Reduce the outputs that are on devices; see `Outputs.reduce`."""
        if self._comm is None:
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
            _NCCLRound(outputs[i], modes[i], target, rows[self._worker.rank], sum(rows))
            for i, target in zip(chosen, targets)
        ]
        if not self._run(rounds, f"outputs {chosen}"):
            return {}
        if not self._worker.is_master:
            return dict.fromkeys(chosen)
        return {position: np.asarray(target) for position, target in zip(chosen, targets)}

    def _values(self, keys):
        """Return the values of variables, or an empty list if NCCL can't take them all."""
        arrays = [_host.peek(self._worker.variables[key]) for key in keys]
        return arrays if self._comm is not None and all(map(_fits, arrays)) else []

    def _replace(self, keys, arrays):
        for key, array in zip(keys, arrays):
            _host.replace(self._worker.variables[key], array)

    def _run(self, rounds, verb):
        """Reduce, if all ranks reduce alike arrays in the same way; return whether they did."""
        if not self._agree([each.description for each in rounds], verb):
            return False
        with self._enqueuing():
            for each in rounds:
                each.enqueue(self._comm)
        self._wait_for([each.result for each in rounds])
        for each in rounds:
            each.finish()
        return True

    def _agree(self, described, verb):
        """Vote and meet; return whether all ranks describe the same arrays, and at least one."""
        if self._comm is None:
            return False
        vote = 0
        if described:
            text = repr((verb, described))
            vote = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
        return self._gate.agree(vote) and vote != 0

    @contextlib.contextmanager
    def _enqueuing(self):
        """Meet, and hold back a Ctrl-C until everything is enqueued.

        After a Ctrl-C before that, the master does not come to the meeting, so the workers leave
        the call at the meeting, and no rank enqueues anything.
        """
        with interrupts_held():
            self._gate.meet()
            yield

    def _wait_for(self, arrays):
        """Wait until the devices of all workers have finished these arrays."""
        if not self._worker.is_master:
            for array in arrays:
                array.sync()
        self._gate.meet()


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


class _NCCLRound:
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

    def enqueue(self, comm):
        """Begin the reduction; return before the device has done it."""
        comm.all_reduce(self._source, "sum" if self._op == "avg" else self._op, self.result)

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


def group_id(number=None):
    """Return the id of a group with a number, or of a new one; raise without NCCL."""
    from pygpu.collectives import GpuCommCliqueId

    # GpuCommCliqueId takes writable buffers only.
    arguments = {} if number is None else {"comm_id": bytearray(number)}
    return GpuCommCliqueId(_host.device_context(), **arguments)


def member(number, size, rank):
    """Return the communicator of a rank in the group with an id."""
    from pygpu.collectives import GpuComm

    return GpuComm(number, size, rank)
