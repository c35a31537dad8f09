"""Reductions over the ranks of several machines: in shared memory, then between the machines.

    fill boxes ──▶ meet ──▶ reduce a share into rank 0's boxes ──▶ meet ──▶ carriers: all-reduce
                            of this machine                                 these boxes, in place
                   ──▶ meet ──▶ every rank copies from rank 0's boxes

So a byte crosses the network once for each machine, and not once for each rank. "Rank 0" is the
first rank of a machine here.
"""

import numpy as np

from synkhronos._arithmetic.blocks import cut, reduce_block
from synkhronos.comm import Aborted
from synkhronos.comm.shared.arrays import SharedArrays, reduce_whole, wide

EQUAL, UNEQUAL = 1, 2  # verdicts of leaders


class MachinesArrays(SharedArrays):
    """One rank's part in reductions over several machines."""

    def __init__(self, worker, storage, gate):
        super().__init__(worker, storage)  # `worker` is that of this machine
        self._all = gate

    def exchange(self, arrays, ops, weights, targets):
        """Reduce arrays that every rank has computed, into arrays of its own."""
        weighing = [weight for weight in weights if weight]
        equal = len({*weighing}) == 1
        divisor = len(weighing) if equal else sum(weights)
        mine = weights[self._all.rank]
        results = self.reduce(arrays, ops, weights, 1 if equal else mine or 1, divisor)
        if isinstance(results, Unequal):
            if results.of_ranks is None:
                raise Aborted  # the leader of this machine says why
            raise ValueError(
                f"all_reduce got arrays of different shapes on the ranks: in rank order, "
                f"{results.of_ranks}."
            )
        return [
            result.copy() if target is None else reduce_whole("sum", [result], target, 1)
            for result, target in zip(results, targets)
        ]

    def reduce(self, arrays, ops, weights, factor, divisor):
        """Return views of the reduced arrays, valid until the next exchange; or Unequal."""
        gate, worker = self._gate, self._worker
        key = self._next_scratch()
        self._exchanges = gate.sequence, self._exchanges[1] + 1
        if self._exchanges[1] == 1:
            self._storage.begin()
        layout = tuple((wide(a.dtype).str, a.shape) for a in arrays)
        region = self._storage.region_of(key)
        if region and region.layout != layout:
            arrays = [a.copy() if any(a is b for b in region.arrays) else a for a in arrays]
        boxes = self._storage.room_for(key, layout)
        self._fill(arrays, ops, boxes, factor, False)
        self._storage.post()
        gate.meet()
        self._storage.hear()
        everyone = self._storage.arrays(key)
        shapes = [[box.shape for box in each] for each in everyone]
        is_equal = all(each == shapes[0] for each in shapes)
        first = self._all.first
        counting = [r for r in range(worker.n_ranks) if weights[first + r]]
        if is_equal:
            self._reduce_here(everyone, ops, counting)
            if worker.n_ranks > 1:
                gate.meet()
        answer = None
        if self._all.is_leader:
            # Ranks on devices of other kinds may compute in another precision.
            kinds = [box.dtype.str for box in everyone[0]]
            answer = self._reduce_between(key, ops, divisor, is_equal, (kinds, shapes))
        if self._all.verdict(EQUAL if answer is None else UNEQUAL) == UNEQUAL:
            return Unequal(answer)
        return everyone[0]

    def _reduce_here(self, everyone, ops, counting):
        """Reduce this rank's share of the boxes of this machine into those of its first rank."""
        worker = self._worker
        if not counting:
            if worker.rank == 0:
                for op, box in zip(ops, everyone[0]):
                    box.fill(identity(op, box.dtype))
            return
        if counting == [0]:
            return
        sources = [everyone[rank] for rank in counting]
        values = list(zip(everyone[0], *sources))
        for position, (out, *blocks) in cut(values, worker.n_ranks, worker.rank):
            op = "sum" if ops[position] == "avg" else ops[position]
            reduce_block(op, blocks, out, 1)

    def _reduce_between(self, key, ops, divisor, is_equal, layout):
        gate = self._all
        id = gate.next_id()
        kinds, shapes = layout
        # With the machine: no other one's is the same, even if its ranks differ in the same way.
        here = (kinds, shapes[0]) if is_equal else ("unequal", gate.layout.machine, shapes)
        places = self._storage.places(0, key) if is_equal else []
        gate.link.reduce(id, places, ops, divisor, here, gate.compress)
        layouts = gate.wait_for_answer(id)
        if layouts is None:
            return None
        found = []
        for n_ranks, each in zip(gate.layout.counts, layouts):
            found += each[2] if each[0] == "unequal" else [each[1]] * n_ranks
        if all(shapes == found[0] for shapes in found):
            raise ValueError(_about_dtypes(gate.layout.hosts, [dtypes for dtypes, _ in layouts]))
        return found


class Unequal:
    """The shapes of arrays that can't be reduced, because they differ between ranks.

    Attributes
    ----------
    of_ranks : list of list of tuple, or None
        The shapes of the arrays of each rank; only leaders know them.
    """

    def __init__(self, of_ranks):
        self.of_ranks = of_ranks


def identity(op, dtype):
    """Return the number that changes nothing in a reduction.

    >>> identity("max", np.dtype("int8")), identity("prod", np.dtype("f4")), identity("avg", "f8")
    (-128, 1, 0)
    """
    dtype = np.dtype(dtype)
    if op in ("avg", "sum", "prod"):
        return int(op == "prod")
    if dtype.kind == "b":
        return op == "min"
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return limits.max if op == "min" else limits.min
    return np.inf if op == "min" else -np.inf


def _about_dtypes(hosts, dtypes):
    """Return the message for arrays whose dtypes differ between machines.

    >>> _about_dtypes(("node0", "node1"), [["<f8", "<f4"], ["<f8", "<f8"]])
    'all_reduce got arrays of different dtypes on the machines: float32 on node0, float64 on node1.'
    """
    different = next(each for each in zip(*dtypes) if len({*each}) > 1)
    names = [f"{np.dtype(dtype).name} on {host}" for dtype, host in zip(different, hosts)]
    return f"all_reduce got arrays of different dtypes on the machines: {', '.join(names)}."
