"""Reductions over the ranks of several machines: in shared memory, then between the machines.

    fill buffers ──▶ meet ──▶ reduce a share into rank 0's  ──▶ meet ──▶ carriers: all-reduce these
                              buffers, of this machine                   buffers, in place
                     ──▶ meet ──▶ every rank copies from rank 0's buffers

So a byte crosses the network once for each machine, not once for each rank. Rank 0 means the first
rank of a machine here.
"""

import numpy as np

from synkhronos.comm import Aborted
from synkhronos.comm.arrays import Arrays, into, refuse_shapes, weigh
from synkhronos.comm.mpi.all_reduce import reduce_into_first

EQUAL, UNEQUAL = 1, 2  # decisions of leaders
_BUCKET_BITS = 16  # for the number of a bucket; higher bits have the number of the run


class MachinesArrays(Arrays):
    """One rank's part in reductions over several machines."""

    def __init__(self, worker, storage, gate, open_segment):
        super().__init__(worker, storage)  # `worker` is that of this machine
        self._all, self._open = gate, open_segment
        self._is_alone = False
        self._call, self._runs = 0, {}  # a call, and how often it has begun each bucket
        self._begun = {}  # bucket -> its id, and the key of its region, until it has ended
        self._ended = {}  # bucket -> the key of its region, and the places of the results
        self._seen = {}  # key -> places, and views of the first rank's buffers there

    def close(self):
        """Drop the views of other ranks' memory, which keep it mapped."""
        super().close()
        self._seen.clear()

    def exchange(self, arrays, ops, weights, targets, between_devices=True):
        """Reduce arrays that every rank has computed, into arrays of its own."""
        _, factor, divisor = weigh(weights, self._all.rank)
        results, shapes = self.reduce(arrays, ops, weights, factor, divisor)
        if results is None:
            self._refuse(shapes)
        return [
            result.copy() if target is None else into(target, result)
            for result, target in zip(results, targets)
        ]

    def _refuse(self, shapes):
        """Raise for arrays of these shapes on the ranks, which only leaders know."""
        if shapes is None:
            raise Aborted  # the leader of this machine says why
        refuse_shapes(shapes)

    def reduce(self, arrays, ops, weights, factor, divisor):
        """Return views of the reduced arrays, valid until the next exchange, and None.

        If shapes differ, return None, and the shapes on each rank: None, too, but on leaders.
        """
        gate, worker = self._gate, self._worker
        if self._all.is_leader:
            self._all.release_interrupts()  # delayed since the reduction before
        key = self._next_scratch()
        self._exchanges = gate.sequence, self._exchanges[1] + 1
        if self._exchanges[1] == 1:
            self._storage.begin()
        arrays, buffers = self._buffers_for(key, arrays)
        self._fill(arrays, ops, buffers, factor, False)
        self._storage.post()
        gate.meet()
        self._storage.hear()
        everyone = self._storage.arrays(key)
        shapes = [[buffer.shape for buffer in each] for each in everyone]
        is_equal = all(each == shapes[0] for each in shapes)
        first = self._all.first
        counting = [r for r in range(worker.n_ranks) if weights[first + r]]
        if is_equal:
            reduce_into_first(everyone, ops, counting, worker.n_ranks, worker.rank)
            if worker.n_ranks > 1:
                gate.meet()
        answer = None
        if self._all.is_leader:
            # Ranks on devices of other kinds may compute in another precision.
            kinds = [buffer.dtype.str for buffer in everyone[0]]
            answer = self._reduce_between(key, ops, divisor, is_equal, (kinds, shapes))
        if self._all.leader_decision(EQUAL if answer is None else UNEQUAL) == UNEQUAL:
            return None, answer
        return everyone[0], None

    def _reduce_between(self, key, ops, divisor, is_equal, layout):
        gate = self._all
        id = gate.next_id()
        kinds, shapes = layout
        here = (kinds, shapes[0]) if is_equal else ("unequal", shapes)
        places = self._storage.places(0, key) if is_equal else []
        gate.hold_interrupts()
        gate.link.send("reduce", id, places, ops, divisor, here, gate.compress)
        layouts = gate.wait_for_reduction(id)
        return None if layouts is None else self._of_ranks(layouts)

    def begin(self, bucket, arrays, ops, weights):
        """Begin to reduce a bucket: copy the arrays into buffers, and tell the carrier."""
        gate, worker = self._all, self._worker
        if gate.is_leader:
            if not self._begun:
                gate.release_interrupts()  # delayed since the slice before
            gate.hold_interrupts()  # other ranks may get results before this one waits for them
        if self._call != gate.sequence:
            self._call = gate.sequence
            for kept in (self._runs, self._begun, self._ended):
                kept.clear()
            self._storage.begin()
        run = self._runs.get(bucket, 0)
        key = self._next_key(bucket)
        _, factor, divisor = weigh(weights, gate.rank)
        arrays, buffers = self._buffers_for(key, arrays)
        self._fill(arrays, ops, buffers, factor, False)
        layout = self._storage.region_of(key).layout
        # All ranks begin the same buckets in the same order, so these numbers rise on all machines.
        number = run << _BUCKET_BITS | bucket + 1
        id = gate.session, gate.sequence, number
        self._runs[bucket] = run + 1
        self._begun[bucket] = id, key
        counting = [r for r in range(worker.n_ranks) if weights[gate.first + r]]
        places = self._storage.places(worker.rank, key)
        how = counting, ops, divisor, gate.compress
        gate.begin_bucket(number, id, worker.rank, worker.n_ranks, places, layout, *how)

    def end(self, bucket, arrays, ops, weights, targets):
        """Return the results of a bucket: in the targets, or where the first rank has them.

        The first end waits for all buckets: if a rank fails before it has begun the last one, no
        rank has used a result. Else ranks could have different values of shared variables.
        """
        self.end_all()
        results = self._results(*self._ended[bucket])
        return [into(target, result) for result, target in zip(results, targets)]

    def end_all(self):
        """Wait for all buckets that have been begun: the carrier uses their buffers until then."""
        for bucket, (id, key) in sorted(self._begun.items()):
            layouts, places = self._all.wait_for_reduction(id)
            if layouts is not None:
                self._refuse(self._of_ranks(layouts) if self._all.is_leader else None)
            self._ended[bucket] = key, places
        self._begun.clear()

    def _results(self, key, places):
        if self._worker.rank == 0:
            return self._storage.region_of(key).arrays
        known = self._seen.get(key)
        if known is None or known[0] != places:
            segment = self._open(places[0][0])
            views = [segment.array(*place) for _, *place in places]
            known = self._seen[key] = places, views, segment
        return known[1]

    def _next_key(self, bucket):
        if bucket is None:
            return self._next_scratch()
        # A function may run several times in a call: a rank that is ahead fills one region while
        # others still use the results in the other.
        run = self._runs.get(bucket, 0) if self._call == self._all.sequence else 0
        return f"bucket {bucket} {run % 2}"

    def _of_ranks(self, layouts):
        """Return the shapes on each rank, from the layouts of all machines."""
        gate, of_ranks = self._all, []
        for n_ranks, (kinds, shapes) in zip(gate.layout.counts, layouts):
            of_ranks += shapes if kinds == "unequal" else [shapes] * n_ranks
        if all(shapes == of_ranks[0] for shapes in of_ranks):
            raise ValueError(_about_dtypes(gate.layout.hosts, [dtypes for dtypes, _ in layouts]))
        return of_ranks


def _about_dtypes(hosts, dtypes):
    """Return the message for arrays whose dtypes differ between machines.

    >>> _about_dtypes(("node0", "node1"), [["<f8", "<f4"], ["<f8", "<f8"]])
    'all_reduce got arrays of different dtypes on the machines: float32 on node0, float64 on node1.'
    """
    different = next(each for each in zip(*dtypes) if len({*each}) > 1)
    names = [f"{np.dtype(dtype).name} on {host}" for dtype, host in zip(different, hosts)]
    return f"all_reduce got arrays of different dtypes on the machines: {', '.join(names)}."
