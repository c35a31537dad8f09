"""One rank's copy of one function: select the rows, run slice by slice, hand the outputs over."""

import contextlib
from typing import NamedTuple, Optional, Tuple

import numpy as np

from synkhronos import _gpuarrays, _graph, _partition, _theano
from synkhronos._reduction import Accumulator
from synkhronos._shm import ArrayRef

WHOLE, SPLIT, BATCH = range(3)  # what a rank takes of an input: all, its share, its share in order
PLAIN, SLICED = "plain", "sliced"


class Description(NamedTuple):
    """What the ranks know of a function beside its code."""

    output_modes: Tuple
    updates: Tuple  # (shared variable, mode) of what is accumulated over slices
    sliceables: Tuple  # the shared variables that `batch_s` and slices select rows of
    communicates: bool = False  # whether ranks reduce with one another while they run it
    on_device: bool = False  # whether there are outputs that ranks reduce on their devices


class _Slice(NamedTuple):
    """What a rank computes at a time."""

    rows: Optional[range]
    weights: Optional[Tuple[int, ...]]  # rows of each rank, where they reduce with one another


class Replica:
    """The compiled Theano functions of one synkhronos function, on one rank.

    The variant ``plain`` is what ``theano.function`` made; ``sliced`` returns the values of the
    updates after the outputs, instead of applying them, so that they can be accumulated.
    """

    def __init__(self, key, description):
        self._key = key
        self.variants = {}
        self.description = description
        self._buffers = {}

    def run(self, worker, request):
        """Compute this rank's part of a request; see `RunFunction` for what it says.

        Returns
        -------
        tuple or None
            On a worker, what `comm.deposit` wants the master to know.
        """
        rows = self._my_rows(worker, request)
        computed = 1 if rows is None else len(rows)
        idle = computed == 0 and worker.rank != request.source_of_nothing
        # Others would wait for a rank that stays away from a function in which they reduce.
        if not idle or self.description.communicates:
            outputs = self._run_slices(worker, request, rows)
        worker.gate.report_rows(-1 if idle else max(computed, 1))
        reduced = ()
        if self.description.on_device:
            reduced = self._reduce_on_devices(worker, request, None if idle else outputs)
        if idle:
            return None
        if worker.is_master:
            kept = [reduced.get(i, out) for i, out in enumerate(outputs)] if reduced else outputs
            return worker.comm.keep(kept, reduced)
        parts = outputs
        if worker.rank != request.source:
            parts = [outputs[i] for i in request.reduced if i not in reduced]
        return self._deposit(worker, parts) if parts else None

    def _reduce_on_devices(self, worker, request, outputs):
        modes = self.description.output_modes
        if request.output_subset is not None:
            modes = [modes[output] for output in request.output_subset]
        recorder = worker.recorder
        if recorder is None:
            return worker.comm.reduce_outputs(outputs, modes)
        with recorder.span("reduce"):
            return worker.comm.reduce_outputs(outputs, modes)

    def _deposit(self, worker, parts):
        recorder = worker.recorder
        if recorder is None:
            return worker.comm.deposit(self._key, parts)
        with recorder.span("reduce") as span:
            layout = worker.comm.deposit(self._key, parts)
            span.moved(*parts)
            return layout

    def _my_rows(self, worker, request):
        """Return positions in the selection that this rank computes; None if there is none."""
        if request.rows is not None:
            return range(*_partition.share(request.rows, worker.n_ranks, worker.rank))
        if self.description.sliceables:
            if request.picked is not None:
                return range(len(unpack(worker, request.picked[worker.rank])))
            return range(len(_theano.peek(self.description.sliceables[0])))
        return None

    def _slices(self, worker, request, rows):
        """Return what this rank computes, one after another: no slice is empty, unless all are."""
        counts, n_slices = request.counts, request.num_slices
        if counts is None:
            # More slices than rows are one for each row: the rest would be empty.
            edges = _partition.edges(len(rows), min(n_slices, len(rows)))
            return [_Slice(rows[a:b], None) for a, b in zip(edges, edges[1:])]
        # All ranks make as many, so that none is missed by the others when they reduce.
        if not any(counts):
            return [_Slice(rows, worker.equal_weights)]
        each = [_partition.edges(count, min(n_slices, max(counts))) for count in counts]
        mine = each[worker.rank]
        # Who has no rows borrows one, to compute something: its weight is 0.
        spare = rows[:1] or range(1)
        slices = []
        for i in range(len(mine) - 1):
            weights = tuple([edges[i + 1] - edges[i] for edges in each])
            slices.append(_Slice(rows[mine[i] : mine[i + 1]] or spare, weights))
        return slices

    def _run_slices(self, worker, request, rows):
        if request.counts is None and (request.num_slices == 1 or not rows):  # as in most calls
            whole = _Slice(rows, worker.equal_weights)
            return self._run_rows(worker, request, whole, PLAIN, request.output_subset)
        slices = self._slices(worker, request, rows)
        # All ranks that reduce with one another run the same variant, whatever rows each has.
        something = any(request.counts) if request.counts else rows
        if request.num_slices == 1 or not something:
            return self._run_rows(worker, request, slices[0], PLAIN, request.output_subset)
        description = self.description
        subset = request.output_subset
        chosen = range(len(description.output_modes)) if subset is None else subset
        variant = PLAIN
        outputs = [
            Accumulator(description.output_modes[i], len(rows), f"Output {i}") for i in chosen
        ]
        # What is reduced over the ranks weighs as many rows as all of them have.
        everything = sum(request.counts) if request.counts else len(rows)
        updates = [
            Accumulator(mode, everything, f"The update of {target}")
            for target, mode in description.updates
        ]
        if updates:
            variant = SLICED
            if subset is not None:
                first = len(description.output_modes)
                subset = (*subset, *range(first, first + len(updates)))
        for each in slices:
            values = self._run_rows(worker, request, each, variant, subset)
            n_mine = n_all = len(each.rows)
            if each.weights:
                n_mine, n_all = each.weights[worker.rank], sum(each.weights)
            if n_mine:
                for total, value in zip(outputs, values):
                    total.add(_gpuarrays.to_host(value), n_mine)
            for total, value in zip(updates, values[len(outputs) :]):
                total.add(_gpuarrays.to_host(value), n_all)
        results = [total.result() for total in updates]
        values = [total.result() for total in outputs] if len(rows) else []
        for (variable, _), result in zip(description.updates, results):
            _theano.replace(variable, result)
        return values

    def _run_rows(self, worker, request, each, variant, subset):
        recorder = worker.recorder
        if recorder is None:
            return self._compute(worker, request, each, variant, subset)
        with recorder.span("compute"):
            return self._compute(worker, request, each, variant, subset)

    def _compute(self, worker, request, each, variant, subset):
        recorder = worker.recorder
        if recorder is None:
            arguments = self._arguments(worker, request, each.rows)
        else:
            with recorder.span("rows"):
                arguments = self._arguments(worker, request, each.rows)
        if not (self.description.sliceables or self.description.communicates):
            return _theano.run(self.variants[variant], arguments, subset)
        with contextlib.ExitStack() as stack:
            if self.description.sliceables:
                stack.enter_context(self._only(worker, request, each.rows))
            if self.description.communicates:
                reducing = _graph.reducing(worker.comm, each.weights, worker.rank, worker.recorder)
                stack.enter_context(reducing)
            return _theano.run(self.variants[variant], arguments, subset)

    def _arguments(self, worker, request, rows):
        selection = request.selection and unpack(worker, request.selection)
        arguments = []
        for position, (ref, kind) in enumerate(zip(request.inputs, request.kinds)):
            array = worker.segments.array(ref)
            if kind == BATCH or (kind == SPLIT and selection is None):
                array = array[rows.start : rows.stop]
            elif kind == SPLIT:
                array = self._take(worker, position, array, selection[rows.start : rows.stop])
            arguments.append(array)
        return arguments

    def _take(self, worker, position, array, rows):
        """Return rows of an array: a view of consecutive ones, else a copy in a kept buffer."""
        recorder = worker.recorder
        if recorder is None:
            return self._view_or_copy(position, array, rows)
        with recorder.span("rows") as span:
            taken = self._view_or_copy(position, array, rows)
            if not (isinstance(rows, range) and rows.step > 0):
                span.moved(taken)
            return taken

    def _view_or_copy(self, position, array, rows):
        if _gpuarrays.is_on_device(array):
            return _gpuarrays.take(array, rows)
        if isinstance(rows, range):
            if rows.step > 0:
                return array[rows.start : rows.stop : rows.step]
            rows = np.arange(rows.start, rows.stop, rows.step)
        buffer = self._buffers.get(position)
        if buffer is None or len(buffer) < len(rows) or buffer.shape[1:] != array.shape[1:]:
            buffer = np.empty((len(rows), *array.shape[1:]), array.dtype)
            self._buffers[position] = buffer
        # The rows were checked before the launch; "clip" saves a second buffer inside NumPy.
        return np.take(array, rows, axis=0, out=buffer[: len(rows)], mode="clip")

    @contextlib.contextmanager
    def _only(self, worker, request, rows):
        """Have the sliceable shared variables hold only the rows that are to be used."""
        picked = request.picked and unpack(worker, request.picked[worker.rank])
        # Together with scattered inputs the positions are those of this rank's share.
        first = self._my_rows(worker, request).start
        with contextlib.ExitStack() as stack:
            for number, variable in enumerate(self.description.sliceables):
                value = _theano.peek(variable)
                chosen = range(len(value)) if picked is None else picked
                chosen = chosen[rows.start - first : rows.stop - first]
                taken = self._take(worker, -1 - number, value, chosen)
                stack.enter_context(_theano.lend(variable, taken))
            yield


def unpack(worker, selection):
    """Return what a selection in a message stands for: a range, or indices in shared memory."""
    if isinstance(selection, ArrayRef):
        return worker.segments.array(selection)
    return range(*selection)
