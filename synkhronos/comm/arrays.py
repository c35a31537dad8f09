"""Reductions inside of a function: ranks compute arrays, reduce them, and go on with the results.

    fill buffers, post ──▶ meet ──▶ hear ──▶ small: each rank reduces all arrays for itself
                                             large: each rank reduces a share, for all ──▶ meet

A buffer is memory for one array of this rank, in a scratch region that all other ranks map. A
function may compute an array in its buffer, which saves a copy: see `Arrays.landing_place`.

The exchanges of a call alternate between two regions. When a rank fills one of them again, all
ranks have met since it was read.
"""

import functools

import numpy as np

from synkhronos import _host
from synkhronos._arithmetic.blocks import cut, reduce_block, with_one_nan
from synkhronos._arithmetic.operations import OPERATIONS, wide

# Up to this many ranks and bytes, each rank reads the arrays of all ranks and reduces them for
# itself. Beyond that the ranks share the work, which takes a second meeting.
_ALL_READ_ALL = 3
_LITTLE = 1 << 17
_MOST_PLANS = 64  # that are kept


class Arrays:
    """One rank's part in reductions inside of functions, of arrays that every rank computes there.

    `devices`, an Nccl or None, reduces arrays on devices, where it can.
    """

    def __init__(self, worker, storage, devices=None):
        self._worker, self._gate, self._storage = worker, worker.gate, storage
        self._devices = devices
        self._is_alone = self._gate.n_ranks == 1
        # (key of the region, ranks with rows) -> version of the storage, arrays, plan
        self._shares = {}
        self._everyone = {}  # key of the region -> version of the storage, buffers of each rank
        self._exchanges = 0, 0  # the number of the call, and of the exchanges in it

    def close(self):
        """Drop the views of other ranks' memory, which keep it mapped."""
        self._shares.clear()
        self._everyone.clear()

    def exchange(self, arrays, ops, weights, targets, between_devices=True):
        """Reduce arrays that every rank has computed; return the targets, with the results.

        `weights` has the number of rows that each rank computed from: the arrays of a rank without
        rows don't count. A target may be the array itself, or None: then the result is an array
        that is valid until the next exchange, which may use its memory again. All arrays may be on
        devices, and are reduced there only if `between_devices`. Raises ValueError on every rank
        if shapes differ.
        """
        if self._is_alone:
            return [into(target, array) for target, array in zip(targets, arrays)]
        if between_devices and self._devices is not None:
            return self._exchange_between_devices(arrays, ops, weights, targets)
        weighing, factor, divisor = weigh(weights, self._worker.rank)
        key = self._next_scratch()
        self._exchanges = self._gate.sequence, self._exchanges[1] + 1
        if self._exchanges[1] == 1:
            self._storage.begin()  # the last call has ended on all ranks
        arrays, buffers = self._buffers_for(key, arrays)
        nbytes = sum(buffer.nbytes for buffer in buffers)
        in_shares = len(weighing) > _ALL_READ_ALL or nbytes > _LITTLE
        own = self._fill(arrays, ops, buffers, factor, in_shares)
        self._storage.post()
        self._gate.meet()
        self._storage.hear()
        if in_shares:
            plan = self._plan_of_shares(key, own, weighing)
            for position, buffer, blocks, others in plan:
                reduce_block(ops[position], blocks, buffer, divisor)
                for other in others:
                    other[...] = buffer
            self._gate.meet()
            return [into(target, buffer) for buffer, target in zip(buffers, targets)]
        sources = zip(*[self._equal_buffers(key)[rank] for rank in weighing])
        return [
            reduce_alike(op, each, target, divisor)
            for op, each, target in zip(ops, sources, targets)
        ]

    def _exchange_between_devices(self, arrays, ops, weights, targets):
        done = self._devices.exchange(arrays, ops, weights, targets)
        results, rest = list(targets), [i for i in range(len(arrays)) if i not in done]
        if rest:
            arrays, ops, targets = ([each[i] for i in rest] for each in (arrays, ops, targets))
            reduced = self.exchange(arrays, tuple(ops), weights, targets, between_devices=False)
            for i, result in zip(rest, reduced):
                results[i] = result
        return results

    def begin(self, bucket, arrays, ops, weights):
        """Begin to reduce a bucket: arrays that the function needs reduced later, at `end`.

        The arrays may not be written to until then. On one machine nothing begins before `end`.
        Buckets of a function are numbered from 0, in the order in which all ranks begin them. For
        the other arguments see `exchange`.
        """

    def end(self, bucket, arrays, ops, weights, targets):
        """Return the reduced arrays of a bucket that was begun with the same ones; see `exchange`.

        In place of a target None, an array is valid until the next `begin` of the bucket. Other
        ranks may have the same array, so the function must not write to it.
        """
        results = self.exchange(arrays, ops, weights, targets)
        return [
            result.copy() if target is None else result for result, target in zip(results, targets)
        ]

    def end_all(self):
        """Wait, when the function has run, for the buckets that it has begun and not ended."""

    def landing_place(self, position, shape, dtype, bucket=None):
        """Return memory for the array at a position of the next exchange, or bucket, or None.

        A function that computes the array there saves a copy. The memory is valid until that
        exchange has ended. Only for functions with one exchange: in others the next one might not
        be that of the array.
        """
        if self._devices is not None:
            return None  # positions count all arrays, not only those that go through memory
        region = self._storage.region_of(self._next_key(bucket))
        # A Ctrl-C can leave a region without a layout.
        if region is None or region.layout is None or position >= len(region.arrays):
            return None
        buffer = region.arrays[position]
        return buffer if buffer.shape == shape and buffer.dtype == dtype else None

    def _next_key(self, bucket):
        # Here a bucket is exchanged at its end, so another exchange may come before it.
        return self._next_scratch() if bucket is None else None

    def _next_scratch(self):
        """Return the key of the next exchange's region; in a new call, begin with the first."""
        sequence, count = self._exchanges
        if sequence != self._gate.sequence:
            self._exchanges = self._gate.sequence, 0
            count = 0
        # A rank that is ahead fills one region while others still read the other.
        return f"scratch {count % 2}"

    def _buffers_for(self, key, arrays):
        """Return the arrays, copied if they are in old buffers, and buffers for them."""
        layout = tuple((wide(a.dtype).str, a.shape) for a in arrays)
        region = self._storage.region_of(key)
        if region and region.layout != layout:
            # The new buffers may take the memory of the old ones.
            arrays = [a.copy() if any(a is b for b in region.arrays) else a for a in arrays]
        return arrays, self._storage.room_for(key, layout)

    def _fill(self, arrays, ops, buffers, factor, in_shares):
        """Copy arrays into buffers; return for each the one that this rank reads: array or buffer.

        If ranks reduce in shares, only this rank reads its own share of its array. So that share of
        a large array is not copied: the rank reads it in the array itself.
        """
        own = list(buffers)
        for position, (array, op, buffer) in enumerate(zip(arrays, ops, buffers)):
            if _host.is_on_device(array):
                _host.copy_from_device(array, buffer)
                array = buffer
            if OPERATIONS[op].divides and factor != 1:
                np.multiply(array, buffer.dtype.type(factor), buffer, dtype=buffer.dtype)
            elif array is buffer:
                pass  # the function has computed it there
            elif in_shares and _is_like(buffer, array) and buffer.nbytes > _LITTLE:
                own[position] = array
            else:
                buffer[...] = array
        if any(array is not buffer for array, buffer in zip(own, buffers)):
            pairs, me, n_ranks = list(zip(buffers, own)), self._worker.rank, self._worker.n_ranks
            for first, n_others in ((0, me), (me + 1, n_ranks - me - 1)):
                blocks = cut(pairs, n_ranks, first, n_others) if n_others else ()
                for position, (buffer, block) in blocks:
                    if own[position] is not buffers[position]:
                        buffer[...] = block
        return own

    def _equal_buffers(self, key):
        """Return the buffers of each rank; raise if their shapes differ."""
        version, everyone = self._everyone.get(key, (None, None))
        if version != self._storage.version:
            self._everyone.clear()  # its views may be of freed memory
            everyone = self._storage.arrays(key)
            shapes = [[buffer.shape for buffer in each] for each in everyone]
            if any(each != shapes[0] for each in shapes):
                refuse_shapes(shapes)
            self._everyone[key] = self._storage.version, everyone
        return everyone

    def _plan_of_shares(self, key, own, weighing):
        """Return the blocks of this rank's share of the reduction.

        For each block: the position of its array, the view of this rank's buffer for the result,
        the views of the ranks with rows, and the views of the other ranks' buffers that get a copy.
        Plans are kept, because it takes time to make the views, until the storage's version
        changes: after that the views may be of freed memory.
        """
        plan = self._shares.get((key, weighing))
        if plan is not None and plan[0] != self._storage.version:
            self._shares.clear()
            plan = None
        if plan is not None and _are_same(own, plan[1]):
            return plan[2]
        everyone, me = self._equal_buffers(key), self._worker.rank
        others = [buffers for rank, buffers in enumerate(everyone) if rank != me]
        sources = [everyone[rank] for rank in weighing if rank != me]
        if me in weighing:
            sources.insert(0, own)  # `reduce_block` may write the result to the first source only
        values = list(zip(everyone[me], *others, *sources))
        blocks = [
            (position, buffer, rest[len(others) :], rest[: len(others)])
            for position, (buffer, *rest) in cut(values, self._worker.n_ranks, me)
        ]
        if _are_same(own, everyone[me]):  # else `own` has arrays of the function, new in each call
            if plan or len(self._shares) >= _MOST_PLANS:
                self._shares.clear()
            self._shares[key, weighing] = self._storage.version, own, blocks
        return blocks


@functools.lru_cache(maxsize=64)  # most calls have the same weights as one before
def weigh(weights, rank):
    """Return the ranks with rows, the factor of a rank's arrays in an average, and its divisor.

    >>> weigh((3, 3, 0), 0), weigh((3, 2), 1)
    (((0, 1), 1, 2), ((0, 1), 2, 5))
    """
    weighing = tuple([each for each, weight in enumerate(weights) if weight])
    if len({weights[each] for each in weighing}) == 1:
        return weighing, 1, len(weighing)
    return weighing, weights[rank] or 1, sum(weights)


def refuse_shapes(shapes):
    """Raise for arrays of these shapes on the ranks."""
    raise ValueError(
        f"all_reduce got arrays of different shapes on the ranks: in rank order, {shapes}."
    )


def reduce_whole(op, sources, target, divisor):
    """Reduce arrays into a target of the same shape, on a device or not; return the target."""
    whole = _room_for_result(sources[0], target)
    for _, (out, *blocks) in cut([[whole, *sources]], 1, 0):
        reduce_block(op, blocks, out, divisor)
    return into(target, whole)


def reduce_alike(op, sources, target, divisor):
    """Reduce small arrays, to the same bits on all ranks that do so; return as `into` does."""
    whole = _room_for_result(sources[0], target)
    reduce_block(op, sources, whole, divisor)
    return into(target, with_one_nan(whole))


def _room_for_result(source, target):
    """Return the target, if a reduction of arrays like `source` can be written there; or room."""
    is_whole = target is not None and not _host.is_on_device(target)
    return target if is_whole and _is_like(source, target) else np.empty(source.shape, source.dtype)


def _is_like(buffer, array):
    return array.flags.c_contiguous and array.dtype == buffer.dtype


def _are_same(arrays, others):
    return all(array is other for array, other in zip(arrays, others))


def into(target, array):
    """Return the target, with the values of an array; or the array if there is no target."""
    if target is None or target is array:
        return array
    if _host.is_on_device(target):
        same = array if array.dtype == target.dtype else array.astype(target.dtype)
        _host.copy_to_device(target, same)
    else:
        target[...] = array
    return target
