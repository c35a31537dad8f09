"""Reductions inside of a function: ranks compute arrays, reduce them, and go on with the results.

    fill boxes, post ──▶ meet ──▶ hear ──▶ little: each rank reduces all arrays for itself
                                           much: each rank reduces a share, for all ──▶ meet

A box is memory for one array of this rank, in a scratch region that all other ranks map. A function
may compute an array in its box, which saves a copy: see `SharedArrays.landing_place`.

A box is valid until the next exchange that uses its region. The exchanges of a call take two
regions in turns: when a rank fills one of them, all ranks have met since it was read.
"""

import numpy as np

from synkhronos import _host
from synkhronos._arithmetic.blocks import cut, reduce_block
from synkhronos._arithmetic.operations import wide
from synkhronos.comm import Arrays

# Up to so many ranks and bytes, each rank reads the arrays of all ranks and reduces them for
# itself. Beyond that the ranks share the work, which takes a second meeting.
_ALL_READ_ALL = 3
_LITTLE = 1 << 17
_PLANS = 64  # lists of views that are kept


class SharedArrays(Arrays):
    """One rank's part in reductions inside of functions."""

    def __init__(self, worker, storage):
        self._worker = worker
        self._gate = worker.gate
        self._storage = storage
        # (key of the region, ranks that weigh) -> version of the storage, arrays, plan
        self._shares = {}
        self._exchanges = 0, 0  # the number of the call, and of the exchanges in it

    def close(self):
        """Drop the views of other ranks' memory, which keep it mapped."""
        self._shares.clear()

    def exchange(self, arrays, ops, weights, targets):
        """Reduce arrays that every rank has computed, into arrays of its own."""
        weighing = [rank for rank, weight in enumerate(weights) if weight]
        equal = len({weights[rank] for rank in weighing}) == 1
        divisor = len(weighing) if equal else sum(weights)
        factor = 1 if equal else weights[self._worker.rank] or 1
        key = self._next_scratch()
        self._exchanges = self._gate.sequence, self._exchanges[1] + 1
        if self._exchanges[1] == 1:
            self._storage.begin()  # the last call has ended on all ranks
        layout = tuple((wide(a.dtype).str, a.shape) for a in arrays)
        arrays, boxes = self._boxes_for(key, layout, arrays)
        in_shares = len(weighing) > _ALL_READ_ALL or sum(box.nbytes for box in boxes) > _LITTLE
        own = self._fill(arrays, ops, boxes, factor, in_shares)
        self._storage.post()
        self._gate.meet()
        self._storage.hear()
        if in_shares:
            plan = self._plan_of_shares(key, own, tuple(weighing))
            for position, box, blocks, others in plan:
                reduce_block(ops[position], blocks, box, divisor)
                for other in others:
                    other[...] = box
            self._gate.meet()
            return [_copy(box, target) for box, target in zip(boxes, targets)]
        sources = zip(*[self._equal_boxes(key)[rank] for rank in weighing])
        return [
            reduce_whole(op, each, np.empty_like(each[0]) if target is None else target, divisor)
            for op, each, target in zip(ops, sources, targets)
        ]

    def _boxes_for(self, key, layout, arrays):
        """Return the arrays, and boxes of their layout; of arrays in other boxes, copies."""
        region = self._storage.region_of(key)
        if region and region.layout != layout:
            # They have been computed in boxes of the old layout, whose memory the new boxes take.
            arrays = [a.copy() if any(a is b for b in region.arrays) else a for a in arrays]
        return arrays, self._storage.room_for(key, layout)

    def landing_place(self, position, shape, dtype, bucket=None):
        """Return the box for the array at a position of the next exchange, or None.

        Only for functions with one exchange: in others the next one might not be that of the array.
        """
        region = self._storage.region_of(self._next_key(bucket))
        # A Ctrl-C can leave a region without a layout.
        if region is None or region.layout is None or position >= len(region.arrays):
            return None
        box = region.arrays[position]
        return box if box.shape == shape and box.dtype == dtype else None

    def _next_key(self, bucket):
        # A bucket may not be the next to be exchanged.
        return self._next_scratch() if bucket is None else None

    def _next_scratch(self):
        """Return the key of the next exchange's region; in a new call, begin with the first."""
        sequence, count = self._exchanges
        if sequence != self._gate.sequence:
            self._exchanges = self._gate.sequence, 0
            count = 0
        # In turns: a rank that is ahead fills one region while others still read the other.
        return f"scratch {count % 2}"

    def _fill(self, arrays, ops, boxes, factor, in_shares):
        """Copy arrays into boxes; return, for each, the array or box that this rank reads itself.

        If ranks reduce in shares, only this rank reads its share of its array. So of a large array
        that share is not copied, but read from the array itself.
        """
        own = list(boxes)
        for position, (array, op, box) in enumerate(zip(arrays, ops, boxes)):
            if _host.is_on_device(array):
                _host.copy_from_device(array, box)
                array = box
            if op == "avg" and factor != 1:
                np.multiply(array, box.dtype.type(factor), box, dtype=box.dtype)
            elif array is box:
                pass  # the function has computed it there
            elif in_shares and _is_like(box, array) and box.nbytes > _LITTLE:
                own[position] = array
            else:
                box[...] = array
        if any(array is not box for array, box in zip(own, boxes)):
            pairs = list(zip(boxes, own))
            for rank in range(self._worker.n_ranks):
                if rank != self._worker.rank:
                    for position, (box, block) in cut(pairs, self._worker.n_ranks, rank):
                        if own[position] is not boxes[position]:
                            box[...] = block
        return own

    def _equal_boxes(self, key):
        """Return the boxes of each rank; raise if their shapes differ."""
        everyone = self._storage.arrays(key)
        shapes = [[box.shape for box in each] for each in everyone]
        if any(each != shapes[0] for each in shapes):
            raise ValueError(
                f"all_reduce got arrays of different shapes on the ranks: in rank order, {shapes}."
            )
        return everyone

    def _plan_of_shares(self, key, own, weighing):
        """Return the blocks of this rank's share of the reduction.

        For each block: the position of its array, the view of this rank's box for the result, the
        views of the ranks that weigh, and the views of the other ranks' boxes that get a copy.
        Plans are kept from call to call, to save the time of making the views. A plan is valid
        until the storage's version changes: its views may be of freed memory after that.
        """
        plan = self._shares.get((key, weighing))
        if plan is not None and plan[0] != self._storage.version:
            self._shares.clear()  # its views may be of freed memory
            plan = None
        if plan is not None and _are_same(own, plan[1]):
            return plan[2]
        everyone, me = self._equal_boxes(key), self._worker.rank
        others = [boxes for rank, boxes in enumerate(everyone) if rank != me]
        sources = [everyone[rank] for rank in weighing if rank != me]
        if me in weighing:
            sources.insert(0, own)  # first: `reduce_block` may write the result to the first only
        values = list(zip(everyone[me], *others, *sources))
        blocks = [
            (position, box, rest[len(others) :], rest[: len(others)])
            for position, (box, *rest) in cut(values, self._worker.n_ranks, me)
        ]
        if _are_same(own, everyone[me]):  # else `own` has arrays of the function, new in each call
            if plan or len(self._shares) >= _PLANS:
                self._shares.clear()
            self._shares[key, weighing] = self._storage.version, own, blocks
        return blocks


def reduce_whole(op, sources, target, divisor):
    """Reduce arrays into a target of the same shape, on a device or not; return the target."""
    if _host.is_on_device(target):
        whole = np.empty(target.shape, sources[0].dtype)
        reduce_whole(op, sources, whole, divisor)
        _host.copy_to_device(target, whole.astype(target.dtype, copy=False))
        return target
    if not (target.flags.c_contiguous and target.dtype == sources[0].dtype):
        whole = np.empty(target.shape, sources[0].dtype)
        reduce_whole(op, sources, whole, divisor)
        target[...] = whole
        return target
    for _, (out, *blocks) in cut([[target, *sources]], 1, 0):
        reduce_block(op, blocks, out, divisor)
    return target


def _is_like(box, array):
    return array.flags.c_contiguous and array.dtype == box.dtype


def _are_same(arrays, others):
    return all(array is other for array, other in zip(arrays, others))


def _copy(array, target):
    """Return the target, with the values of an array; or the array if there is no target."""
    if target is None or target is array:
        return array
    return reduce_whole("sum", [array], target, 1)
