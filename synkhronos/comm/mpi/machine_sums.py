"""Sums over all ranks where the ranks of one machine share memory.

    each rank     its values in a segment that all ranks of the machine map
    ──▶ barrier   each rank sums its share of all segments, and writes it into all of them
    ──▶ barrier   with several machines the first rank of each goes on: MPI's all-reduce
    ──▶ barrier   the others copy its result

Every element is summed in the order of ranks, by one rank: all ranks get the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from synkhronos._arithmetic.blocks import plan as plan_of
from synkhronos._machine.log import log
from synkhronos._machine.shared_memory import Segment, Segments
from synkhronos.comm.mpi.library import MPI
from synkhronos.comm.mpi.messages import complete


class MachineSums:
    """Sums arrays, in place, that `allocate` has made.

    Parameters
    ----------
    comm : MPI.Comm
    patience : float
        Seconds to wait for another rank.
    """

    def __init__(self, comm: Any, patience: float) -> None:
        self._comm, self._patience = comm, patience
        self._local = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
        leads = self._local.rank == 0
        leaders = comm.Split(0 if leads else MPI.UNDEFINED, comm.rank)
        n_machines = sum(comm.allgather(leads))
        self._leaders = leaders if n_machines > 1 and leads else None
        self._has_others = n_machines > 1
        self._segments = Segments()
        # By the id of an own array: it, that of the first local rank, and what is to be reduced.
        self._plans: dict[int, tuple[np.ndarray, np.ndarray, list] | None] = {}

    def allocate(self, size: int, dtype: Any) -> np.ndarray:
        """Return an array for values to sum; all ranks must allocate the same."""
        local, problem, attached = self._local, None, []
        own = self._segments.create(max(1, size * np.dtype(dtype).itemsize))
        own.copy_for_children()  # values of variables may lie there
        for rank, ref in enumerate(local.allgather(own.ref)):
            try:
                attached.append(own if rank == local.rank else Segment.attach(ref))
            except OSError as error:
                problem = error
        array = own.array(dtype, (size,))
        if any(local.allgather(problem is not None)):
            if problem is not None:
                log.warning("ranks exchange without shared memory: %s", problem)
            self._plans[id(array)] = None
        else:
            arrays = [each.array(dtype, (size,)) for each in attached]
            arrays[local.rank] = array
            self._plans[id(array)] = (
                array,
                arrays[0],
                plan_of("sum", [arrays], len(arrays), local.rank),
            )
        return array

    def __call__(self, array: np.ndarray) -> None:
        """Set an array, on all ranks, to the sum of those of all ranks."""
        plan = self._plans[id(array)]
        if plan is None:  # on this machine; all others come to the same all-reduce
            self._sum_by_messages(array)
            return
        _, first, blocks = plan
        self._meet()
        for reduce, result, copies in blocks:
            reduce()
            for each in copies:
                each[...] = result
        self._meet()
        if self._leaders is not None:
            self._leaders.Allreduce(MPI.IN_PLACE, array, MPI.SUM)
        if self._has_others:
            self._meet()
            if self._local.rank:
                array[:] = first
            self._meet()  # the first rank may write its array again

    def _sum_by_messages(self, array):
        total = array.copy()
        self._local.Allreduce(MPI.IN_PLACE, total, MPI.SUM)
        if self._leaders is not None:
            self._leaders.Allreduce(MPI.IN_PLACE, total, MPI.SUM)
        self._local.Bcast(total)
        array[:] = total

    def _meet(self):
        complete(self._local.Ibarrier(), "the other ranks of this machine", self._patience)
