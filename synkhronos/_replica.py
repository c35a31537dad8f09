"""One rank's copy of one function: select the rows, run slice by slice, hand the outputs over."""

import contextlib
from typing import NamedTuple, Tuple

import numpy as np

from synkhronos import _partition, _theano
from synkhronos._reduction import Accumulator
from synkhronos._shm import ArrayRef

WHOLE, SPLIT, BATCH = range(3)  # what a rank takes of an input: all, its share, its share in order
PLAIN, SLICED = "plain", "sliced"


class Description(NamedTuple):
    """What the ranks know of a function beside its code."""

    output_modes: Tuple
    updates: Tuple  # (shared variable, mode) of what is accumulated over slices
    sliceables: Tuple  # the shared variables that `batch_s` and slices select rows of


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
        if computed == 0 and worker.rank != request.source_of_nothing:
            worker.gate.report_rows(-1)
            return None
        outputs = self._run_slices(worker, request, rows)
        worker.gate.report_rows(max(computed, 1))
        if worker.is_master:
            return worker.comm.keep(outputs)
        parts = outputs
        if worker.rank != request.source:
            parts = [outputs[position] for position in request.reduced]
        return worker.comm.deposit(self._key, parts) if parts else None

    def _my_rows(self, worker, request):
        """Return positions in the selection that this rank computes; None if there is none."""
        if request.rows is not None:
            return range(*_partition.share(request.rows, worker.n_ranks, worker.rank))
        if self.description.sliceables:
            if request.picked is not None:
                return range(len(unpack(worker, request.picked[worker.rank])))
            return range(len(_theano.peek(self.description.sliceables[0])))
        return None

    def _run_slices(self, worker, request, rows):
        if rows is None or request.num_slices == 1 or len(rows) == 0:
            return self._run_rows(worker, request, rows, PLAIN, request.output_subset)
        description = self.description
        subset = request.output_subset
        chosen = range(len(description.output_modes)) if subset is None else subset
        variant = PLAIN
        modes = [(description.output_modes[i], f"Output {i}") for i in chosen]
        if description.updates:
            variant = SLICED
            modes += [(mode, f"The update of {target}") for target, mode in description.updates]
            if subset is not None:
                first = len(description.output_modes)
                subset = (*subset, *range(first, first + len(description.updates)))
        totals = [Accumulator(mode, len(rows), what) for mode, what in modes]
        # More slices than rows are one for each row: the rest would be empty.
        edges = _partition.edges(len(rows), min(request.num_slices, len(rows)))
        for begin, end in zip(edges, edges[1:]):
            values = self._run_rows(worker, request, rows[begin:end], variant, subset)
            for total, value in zip(totals, values):
                total.add(value, end - begin)
        results = [total.result() for total in totals]
        for (variable, _), value in zip(description.updates, results[len(chosen) :]):
            _theano.replace(variable, value)
        return results[: len(chosen)]

    def _run_rows(self, worker, request, rows, variant, subset):
        arguments = self._arguments(worker, request, rows)
        if not self.description.sliceables:
            return _theano.run(self.variants[variant], arguments, subset)
        with self._only(worker, request, rows):
            return _theano.run(self.variants[variant], arguments, subset)

    # Rows of inputs.

    def _arguments(self, worker, request, rows):
        selection = request.selection and unpack(worker, request.selection)
        arguments = []
        for position, (ref, kind) in enumerate(zip(request.inputs, request.kinds)):
            array = worker.segments.array(ref)
            if kind == BATCH or (kind == SPLIT and selection is None):
                array = array[rows.start : rows.stop]
            elif kind == SPLIT:
                array = self._take(position, array, selection[rows.start : rows.stop])
            arguments.append(array)
        return arguments

    def _take(self, position, array, rows):
        """Return rows of an array: a view of consecutive ones, else a copy in a kept buffer."""
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

    # Rows of shared variables.

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
                stack.enter_context(_theano.lend(variable, self._take(-1 - number, value, chosen)))
            yield


def unpack(worker, selection):
    """Return what a selection in a message stands for: a range, or indices in shared memory."""
    if isinstance(selection, ArrayRef):
        return worker.segments.array(selection)
    return range(*selection)
