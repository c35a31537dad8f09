"""One rank's replica of one function: select rows, run slice by slice, hand over the outputs."""

import contextlib
import math
import re
import time
from dataclasses import dataclass
from typing import NamedTuple, Optional, Tuple, Union

import numpy as np

from synkhronos import _host
from synkhronos._arithmetic import partition
from synkhronos._arithmetic.partition import take_rows
from synkhronos._arithmetic.reduction import Accumulator
from synkhronos._machine.interrupts import raised_here
from synkhronos._wording import count
from synkhronos.comm import Reference
from synkhronos.comm.reports import add_advice

# The rows that a rank takes of an input. WHOLE: all. SPLIT: its share of the selected rows. BATCH:
# its share of all rows, because the input holds only selected rows.
WHOLE, SPLIT, BATCH = range(3)
# A selection of consecutive rows, whose bounds the master has posted at the gate: so calls that
# select equally many rows share one command.
POSTED = True
Selection = Union[range, Reference, bool]  # a range, a reference to row numbers, or POSTED
PLAIN, SLICED = "plain", "sliced"
# After an error, all rows run again in one process only if the ranks together took less time: a
# longer call may need too much time, or memory, there.
SECONDS_AGAIN = 2.0
# Words of the errors that Theano and NumPy raise for arrays whose lengths don't fit.
_ABOUT_SHAPES = re.compile("shape|dimension|broadcast|align|size|rows|bounds|split|shorter", re.I)


class Description(NamedTuple):
    """The facts about a function that ranks need besides its code."""

    output_modes: Tuple
    updates: Tuple  # (shared variable, mode) for each update that is accumulated over slices
    sliceables: Tuple  # the shared variables from which `batch_s` and slices select rows
    communicates: bool = False  # whether ranks reduce inside of the function
    draws_all: bool = False  # whether each rank draws the random numbers of all rows
    on_device: bool = False  # whether it has outputs that ranks reduce on their devices
    axes: Tuple = ()  # the axis of rows of each input; empty if all are 0


@dataclass(frozen=True)
class RunFunction:
    """Run one function on this rank's rows, and hand over its parts of the outputs."""

    function: int
    inputs: Tuple[Reference, ...]
    kinds: Tuple[int, ...]  # which rows a rank takes of each input: WHOLE, SPLIT or BATCH
    rows: Optional[int]  # of the scattered inputs; None if no input is scattered
    selection: Optional[Selection]  # the rows of scattered inputs; None for all
    picked: Optional[Tuple[Selection, ...]]  # the rows of sliceable shareds, for each rank
    num_slices: int
    combined: Tuple[int, ...]  # the positions of the outputs that the master combines
    source: int  # the rank of which the master takes outputs of mode None
    source_of_nothing: int  # the rank that runs even without rows; -1 for none
    output_subset: Optional[Tuple[int, ...]] = None
    counts: Optional[Tuple[int, ...]] = None  # rows of each rank, if ranks reduce inside it

    def run(self, worker, arrays=None):
        """Run the function on this rank, as `Replica.run` does."""
        return worker.replicas[self.function].run(worker, self, arrays)


class Replica:
    """The compiled variants of one function, on one rank; `_calls.recipe.Recipe` describes them."""

    def __init__(self, key, description):
        self._key = key
        self.variants = {}
        self.description = description
        self._buffers = {}  # kept from call to call; arguments of a function are views of them
        # The last request, how many items this rank computes, whether it is idle, and its rows.
        self._last = None, 0, False, None
        self._fetched = None, None  # the last request, and the arrays that it refers to

    def run(self, worker, request, arrays=None):
        """Compute this rank's part of a request, a `RunFunction`.

        `arrays` are the inputs; None: fetch them.

        On the master, return its own outputs (None if it had no rows), and a dict of the outputs
        that all ranks have reduced on their devices: position -> array. On a worker, return the
        answer that the master needs to collect the outputs, or None.
        """
        last, computed, idle, rows = self._last
        if last is not request:
            rows = self._my_rows(worker, request)
            computed = 1 if rows is None else len(rows)
            idle = computed == 0 and worker.rank != request.source_of_nothing
            if not self.description.sliceables:  # the lengths of these change from call to call
                self._last = request, computed, idle, rows
        # If ranks reduce inside the function, idle ranks run, too: the others wait for them.
        outputs = None
        if not idle or self.description.communicates:
            if arrays is None and worker.comm.memory.is_near:
                last, arrays = self._fetched
                if last is not request:
                    arrays = [worker.fetch(ref) for ref in request.inputs]
                    self._fetched = request, arrays
            begin = time.monotonic()
            try:
                if request.counts is None and (request.num_slices == 1 or not rows):
                    subset, weights = request.output_subset, worker.equal_weights
                    outputs = self._run_rows(worker, request, rows, arrays, weights, PLAIN, subset)
                else:
                    outputs = self._run_slices(worker, request, rows, arrays)
            except (TypeError, ValueError, IndexError, AssertionError) as error:
                if _may_be_of_rows(error, computed, request):
                    is_short = worker.n_ranks * (time.monotonic() - begin) < SECONDS_AGAIN
                    self._explain(worker, error, computed, request, arrays, is_short)
                raise
        worker.gate.report_rows(-1 if idle else computed or 1)  # 1: a part without rows counts, too
        if idle:
            outputs = None
        reduced = {}
        if self.description.on_device:
            reduced = worker.results.reduce(request, self.description.output_modes, outputs)
        if worker.is_master:
            if self.description.on_device and outputs is not None:
                outputs = [
                    None if position in reduced else _host.to_host(each)
                    for position, each in enumerate(outputs)
                ]
            return outputs, reduced
        return worker.results.deposit(self._key, request, outputs, reduced)

    def forget_arrays(self):
        """Drop the arrays of the last request, which keep shared memory mapped."""
        self._fetched = None, None

    def _my_rows(self, worker, request):
        """Return this rank's share of the positions in the selection; None without rows."""
        if request.rows is not None:
            return range(*partition.share(request.rows, worker.n_ranks, worker.rank))
        if self.description.sliceables:
            if request.picked is not None:
                return range(len(unpack(worker, request.picked[worker.rank])))
            return range(len(_host.peek(self.description.sliceables[0])))
        return None

    def _slices(self, worker, request, rows):
        """Return the slices that this rank computes in turn: none is empty, unless all are.

        A slice is a pair: rows, and the weights of all ranks if they reduce inside the function.
        """
        counts, n_slices = request.counts, request.num_slices
        if counts is None:
            # At most one slice for each row, so that none is empty.
            edges = partition.edges(len(rows), min(n_slices, len(rows)))
            return [(rows[a:b], None) for a, b in zip(edges, edges[1:])]
        # All ranks compute equally many slices, because all reduce once in each.
        if not any(counts):
            return [(rows, worker.equal_weights)]
        if n_slices == 1:
            return [(rows or range(1), counts)]
        n_slices = min(n_slices, max(counts))
        edges_of_ranks = [partition.edges(count, n_slices) for count in counts]
        mine = edges_of_ranks[worker.rank]
        # In place of an empty slice this rank computes one row with weight 0: its first row, or the
        # first of all rows.
        spare = rows[:1] or range(1)
        slices = []
        for i in range(len(mine) - 1):
            weights = tuple([edges[i + 1] - edges[i] for edges in edges_of_ranks])
            slices.append((rows[mine[i] : mine[i + 1]] or spare, weights))
        return slices

    def _run_slices(self, worker, request, rows, arrays):
        subset = request.output_subset
        slices = self._slices(worker, request, rows)
        # If ranks reduce inside the function, all run the same variant, even those without rows.
        something = any(request.counts) if request.counts else rows
        if request.num_slices == 1 or not something:
            some, weights = slices[0]
            return self._run_rows(worker, request, some, arrays, weights, PLAIN, subset)
        description = self.description
        chosen = range(len(description.output_modes)) if subset is None else subset
        variant = PLAIN
        outputs = [
            Accumulator(description.output_modes[i], len(rows), f"Output {i}") for i in chosen
        ]
        # If ranks reduce inside the function, updates have the weight of the rows of all ranks.
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
        for some, weights in slices:
            values = self._run_rows(worker, request, some, arrays, weights, variant, subset)
            n_mine = n_all = len(some)
            if weights:
                n_mine, n_all = weights[worker.rank], sum(weights)
            if n_mine:
                for total, value in zip(outputs, values):
                    total.add(_host.to_host(value), n_mine)
            for total, value in zip(updates, values[len(outputs) :]):
                total.add(_host.to_host(value), n_all)
        results = [total.result() for total in updates]
        values = [total.result() for total in outputs] if len(rows) else []
        for (variable, _), result in zip(description.updates, results):
            _host.replace(variable, result)
        return values

    def _run_rows(self, worker, request, rows, arrays, weights, variant, subset):
        """Return the outputs for some rows: positions in the selection."""
        recorder, lent = worker.recorder, ()
        if recorder is None:
            arguments = self._arguments(worker, request, rows, arrays)
            if self.description.sliceables:
                lent = self._rows_to_lend(worker, request, rows)
            return self._compute(worker, variant, arguments, lent, weights, subset)
        with recorder.span("compute"):
            with recorder.span("rows") as span:
                arguments = self._arguments(worker, request, rows, arrays, span)
                lent = self._rows_to_lend(worker, request, rows, span)
            return self._compute(worker, variant, arguments, lent, weights, subset)

    def _compute(self, worker, variant, arguments, lent, weights, subset):
        function, communicates = self.variants[variant], self.description.communicates
        if not lent and not communicates:
            return _host.run(function, arguments, subset)
        reducing = contextlib.nullcontext()
        if communicates:
            comm, recorder = worker.comm.arrays, worker.recorder
            reducing = _host.reducing(comm, weights, worker.rank, recorder)
        with reducing:
            if not lent:
                return _host.run(function, arguments, subset)
            with contextlib.ExitStack() as stack:
                for variable, rows in lent:
                    stack.enter_context(_host.lend(variable, rows))
                return _host.run(function, arguments, subset)

    def _arguments(self, worker, request, rows, arrays, span=None):
        """Return the rows of each input: of `arrays`, or fetched if these are None."""
        chosen, is_copied, selection = rows, False, request.selection
        axes = self.description.axes
        if selection is POSTED:
            begin, _ = worker.gate.bounds()
            chosen = range(begin + rows.start, begin + rows.stop)
        elif selection is not None:
            chosen = unpack(worker, selection)[rows.start : rows.stop]
            is_copied = not _is_forward(chosen)
        arguments = []
        for position, (ref, kind) in enumerate(zip(request.inputs, request.kinds)):
            axis, buffer = axes[position] if axes else 0, None
            some = None if kind == WHOLE else rows if kind == BATCH else chosen
            if is_copied and kind == SPLIT:
                buffer = self._buffer(position, chosen, ref, axis)
            if arrays is None:
                argument = worker.fetch(ref, some, buffer, axis)
            elif some is None:
                argument = arrays[position]
            elif axis or buffer is not None:
                argument = take_rows(arrays[position], some, buffer, axis)
            else:
                argument = arrays[position][some.start : some.stop : some.step]
            if span is not None and buffer is not None:
                span.moved(argument)
            arguments.append(argument)
        return arguments

    def _rows_to_lend(self, worker, request, rows, span=None):
        """Return pairs of a sliceable shared variable, and the rows of its value to compute."""
        picked, first = request.picked, 0
        if picked is not None:
            picked = unpack(worker, picked[worker.rank])
        if request.rows is not None:
            # With scattered inputs, positions begin with this rank's share and not with 0.
            first = partition.share(request.rows, worker.n_ranks, worker.rank)[0]
        pairs = []
        for number, variable in enumerate(self.description.sliceables):
            value = _host.rows_from(variable)
            chosen = range(len(value)) if picked is None else picked
            chosen = chosen[rows.start - first : rows.stop - first]
            if _host.is_on_device(value):
                taken = _host.take_on_device(value, chosen)
            elif _is_forward(chosen):
                taken = take_rows(value, chosen)
            else:
                taken = take_rows(value, chosen, self._buffer(-1 - number, chosen, value))
            if span is not None and not _is_forward(chosen):
                span.moved(taken)
            pairs.append((variable, taken))
        return pairs

    def _explain(self, worker, error, mine, request, arrays, is_short):
        """Add advice to an error that may come from this rank's number of rows, `mine`."""
        rows, n_slices = request.rows, request.num_slices
        if n_slices == 1 and is_short and self._fails_with_all_rows(worker, error, request, arrays):
            shapes = ", ".join(str(tuple(ref.shape)) for ref in request.inputs)
            add_advice(
                error,
                f"It is not of the ranks: one process with all {count(rows, 'row')} raises it, "
                f"too. The inputs of this call have the shapes {shapes}.",
            )
            return
        slices = f", in {n_slices} slices" if n_slices > 1 else ""
        several = request.kinds.count(WHOLE) < len(request.kinds) - 1
        whole = " An input that each rank needs whole belongs in bcast_inputs." if several else ""
        add_advice(
            error,
            f"Rank {worker.rank} had {mine} of the {count(rows, 'row')} of this call{slices}. If "
            "the graph has a fixed number of rows, such as a batch size, write x.shape[0] of a "
            "scattered input x in its place; in a reshape also -1. If the rows of x are on axis 1, "
            f"give the function axes={{x: 1}}.{whole}",
        )

    def _fails_with_all_rows(self, worker, error, request, arrays):
        """Return whether the master, if it is rank 0, raises the same error with all rows.

        Only rank 0 tries: the user sees its error, and memory may suffice for one serial call.
        """
        if not worker.is_master or worker.rank or self.description.sliceables:
            return False
        function = self.variants[PLAIN]
        try:
            arguments = self._arguments(worker, request, range(request.rows), arrays)
            with _host.on_copies(function.get_shared()):
                _host.run(function, arguments, request.output_subset)
        except raised_here(Exception) as again:
            return type(again) is type(error)
        return False

    def _buffer(self, slot, rows, array, axis=0):
        """Return a contiguous buffer for a copy of rows of an array, valid until the next slice."""
        shape = (*array.shape[:axis], len(rows), *array.shape[axis + 1 :])
        items, buffer = math.prod(shape), self._buffers.get(slot)
        if buffer is None or buffer.size < items:
            buffer = self._buffers[slot] = np.empty(items, array.dtype)
        return buffer[:items].reshape(shape)


def unpack(worker, selection):
    """Return the rows of a command's selection: a range, or an array of indices."""
    if selection is POSTED:
        return range(*worker.gate.bounds())
    return selection if isinstance(selection, range) else worker.fetch(selection)


def _may_be_of_rows(error, mine, request):
    """Return whether an error may occur because this rank has only `mine` of the rows."""
    rows, n_slices = request.rows, request.num_slices
    if rows is None or (mine == rows and n_slices == 1):
        return False
    try:
        message = str(error).partition("\nApply node")[0]  # Theano adds shapes to every message
    except raised_here(Exception):  # of a class of the user
        return False
    if not isinstance(error, AssertionError) and not _ABOUT_SHAPES.search(message):
        return False
    # An index out of bounds counts only if its array may have this rank's rows.
    return "out of bounds" not in message or n_slices > 1 or f"size {mine}" in message


def _is_forward(rows):
    return isinstance(rows, range) and rows.step > 0
