"""Check the arguments of a call, and make of them the one command that all ranks run.

values ──▶ stage      references to their arrays in shared memory
batch ───▶ select     the rows of the scattered inputs
batch_s ─▶ pick       the rows of the sliceable shared variables, for each rank
"""

import numbers

import numpy as np

from synkhronos import _host
from synkhronos._arithmetic import partition
from synkhronos._arithmetic.operations import OPERATIONS, divides
from synkhronos._arithmetic.selection import ANY_LENGTH, select_each, select_rows
from synkhronos._calls.arguments import is_minibatch, rows_there
from synkhronos._session import commands
from synkhronos._session.replica import BATCH, POSTED, SPLIT, WHOLE, RunFunction
from synkhronos._session.staging import GrowingArray
from synkhronos._wording import count, is_bool, shown
from synkhronos.errors import SharedMemoryFull

_LENGTHS = 16  # so many commands, each for another number of rows, are kept


class Requests:
    """The commands of one function; equal calls share one."""

    def __init__(self, session, key, definition, description, advice):
        self._session, self._key = session, key
        _, self._inputs, self._outputs, recipe, self._owner = definition
        self._conditions = recipe.conditions
        self._description, self._advice = description, advice
        self._indices = {}  # name of an argument -> a GrowingArray of the rows that it selects
        # Arguments of the last call (None if it selected rows), contents of its command, command.
        self._last = None, None, None
        self._selected = _Selected()

    def make(self, make_ready, values, arrays, output_subset, batch, batch_s, num_slices):
        """Return the command for a call, after checking all that the master can check.

        The list `arrays` gets the arrays that the command refers to. ``make_ready(num_slices)``
        sends the workers the compiled variant, if they lack it. If shared memory is full, all
        functions free their copies of plain arrays, and this tries again.
        """
        asked = make_ready, values, arrays, output_subset, batch, batch_s, num_slices
        try:
            return self._make(*asked)
        except SharedMemoryFull as error:
            if not error._lacks_room:
                error._is_before_ranks = True
                raise
        # Only after the handler, in which the frames of the error would keep the memory.
        arrays.clear()
        self._session.registry.free_staged()
        try:
            return self._make(*asked)
        except SharedMemoryFull as error:
            self._session.registry.free_staged()
            error._is_before_ranks = True
            raise

    def _make(self, make_ready, values, arrays, output_subset, batch, batch_s, num_slices):
        session, inputs, modes = self._session, self._inputs, self._description.output_modes
        if num_slices.__class__ is not int or num_slices != 1:
            num_slices = self.check_slices(num_slices)
        subset = None
        if output_subset is not None:
            subset = self._outputs.check_subset(output_subset, self._owner)
        refs = inputs.stage(values, arrays)
        if num_slices > 1 or self._key in session.registry.pending:
            make_ready(num_slices)
        # A command that the workers have is not pickled again. So equal calls share one; calls that
        # differ in the bounds of their rows alone do, too.
        asked = None
        last_asked, last_contents, last = self._last
        if batch_s is None and not self._description.sliceables:
            arguments = refs, subset, num_slices
            if batch is None:
                asked = arguments
                if asked == last_asked:
                    return last
            elif arguments == self._selected.arguments:
                command = self._find_selected(batch)
                if command is not None:
                    return command
        rows, selection, kinds = self._select(values, refs, batch)
        counts = None
        if rows is not None:
            counts = partition.counts(rows, session.n_ranks)
        picked, counts = self._pick(batch_s, counts)
        if self._conditions:
            self._conditions.check(self._owner, self._shapes(refs, rows), rows, num_slices)
        if self._advice.is_pending:
            self._advice.tell(counts, subset)
        contents = refs, subset, num_slices, rows, selection, picked, kinds
        if picked is None and not self._description.sliceables and contents == last_contents:
            return last
        master = source = session.master_rank
        source_of_nothing = -1
        if counts is not None:
            busy = [rank for rank, count in enumerate(counts) if count]
            if len(busy) < len(counts) and rows is not None:
                self._advice.tell_of_idle_ranks(rows)
            if not busy:
                source_of_nothing = master
            elif master not in busy:
                source = busy[0]
        chosen = range(len(modes)) if subset is None else subset
        command = RunFunction(
            function=self._key,
            inputs=refs,
            kinds=kinds,
            rows=rows,
            selection=selection,
            picked=picked,
            num_slices=num_slices,
            combined=tuple(i for i, out in enumerate(chosen) if modes[out] is not None),
            source=source,
            source_of_nothing=source_of_nothing,
            output_subset=subset,
            counts=self._counts_for_all(counts),
        )
        self._last = asked, contents, command
        if _is_plain(batch) and not isinstance(selection, range):
            length = rows_there(self._inputs.axes_of_rows, values, refs)
            self._selected.keep((refs, subset, num_slices), length, rows, command)
        return command

    def _find_selected(self, batch):
        """Return a kept command for rows that need no check, and send the rows; else None."""
        kept = self._selected
        if batch.__class__ is slice:
            start, stop = batch.start, batch.stop
            if start is None:
                start = 0
            if (
                start.__class__ is int
                and stop.__class__ is int
                and 0 <= start <= stop <= kept.length
                and batch.step is None
            ):
                command = kept.find(stop - start, POSTED)
                if command is not None:
                    self._session.gate.post_bounds(start, stop)
                return command
        # As unsigned integers, negative numbers are larger than all others.
        elif _is_plain(batch) and batch.view(np.uint64).max() < kept.length:
            return kept.find(len(batch), self._send("batch", batch))
        return None

    def release(self):
        """Give the shared memory of indices back."""
        self._indices.clear()
        self._last = None, None, None
        self._selected = _Selected()

    def check_slices(self, num_slices):
        """Return the number of slices as an int; raise ValueError if the function can't do it."""
        try:
            if is_bool(num_slices) or not isinstance(num_slices, (numbers.Real, np.ndarray)):
                raise ValueError
            number = int(num_slices)
            if number != num_slices or number < 1:
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise ValueError(
                f"num_slices must be an integer >= 1, got {shown(num_slices)}."
            ) from None
        if number == 1:
            return 1
        if not any(self._inputs.is_scattered) and not self._description.sliceables:
            raise ValueError(
                f"num_slices={number}, but {self._owner} has nothing to slice: neither scattered "
                "inputs nor sliceable_shareds."
            )
        if self._description.draws_all:
            raise ValueError(
                f"num_slices={number}, but {self._owner} has serial_random: serial {_host.title} "
                "draws the random numbers of all rows at once, and not slice by slice."
            )
        for variable, mode in self._description.updates:
            if not _host.is_array_variable(variable):
                raise ValueError(
                    f"num_slices={number}, but the update of {variable}, of type {variable.type}, "
                    "can't be accumulated over the slices: it is no tensor."
                )
            kind = np.dtype(variable.dtype).kind
            if divides(mode) and kind not in OPERATIONS[mode].kinds:
                raise ValueError(
                    f"num_slices={number}, but the update of {variable}, of dtype {variable.dtype},"
                    " would be averaged over the slices. Give it a mode: (variable, expression, "
                    "'sum')."
                )
            if mode == "gather" and (variable.ndim == 0 or _host.fixed_axes(variable)[0]):
                raise ValueError(
                    f"num_slices={number}, but the update of {variable}, of type {variable.type}, "
                    "would be gathered over the slices: it can't have more than one row."
                )
        return number

    def _select(self, values, refs, batch):
        """Return the number of selected rows, the selection for the command, and the inputs' kinds.

        The number is None if nothing is scattered; the selection is None for all rows. The bounds
        of consecutive rows are posted at the gate. `synkhronos._session.replica` defines the kinds.
        """
        scattered = list(self._inputs.axes_of_rows)
        axes = self._inputs.axes
        lengths = {i: refs[i].shape[axes[i]] for i in scattered}
        kinds = [SPLIT if split else WHOLE for split in self._inputs.is_scattered]
        if not scattered:
            if batch is not None:
                self._refuse_batch(batch)
            return None, None, tuple(kinds)
        if batch is None:
            if len(set(lengths.values())) > 1:
                self._refuse_lengths(lengths)
            return lengths[scattered[0]], None, tuple(kinds)
        selected = select_rows("batch", batch, rows_there(self._inputs.axes_of_rows, values, refs))
        for i in scattered:
            if _host.fixed_axes(self._inputs.variables[i])[axes[i]] and len(selected) != 1:
                raise ValueError(
                    f"{self._inputs.label(i)} is broadcastable along axis {axes[i]}: it has exactly"
                    f" one row, but batch selects {len(selected)}."
                )
        for i in scattered:
            if not is_minibatch(values[i]):
                continue
            kinds[i] = BATCH
            if lengths[i] < len(selected):
                raise ValueError(
                    f"{self._inputs.label(i)} is a minibatch of {count(lengths[i], 'row')}, but "
                    f"batch selects {len(selected)}."
                )
        gate = self._session.gate
        if gate.posts_bounds and isinstance(selected, range) and selected.step == 1:
            gate.post_bounds(selected.start, selected.stop)
            return len(selected), POSTED, tuple(kinds)
        return len(selected), self._send("batch", selected), tuple(kinds)

    def _shapes(self, refs, rows):
        """Return the shapes of the inputs, with the number of selected rows."""
        shapes = [list(ref.shape) for ref in refs]
        for i, axis in self._inputs.axes_of_rows.items():
            shapes[i][axis] = rows
        return tuple(map(tuple, shapes))

    def _refuse_lengths(self, lengths):
        """Raise for scattered inputs of different lengths: position -> length."""
        axes, name_of = self._inputs.axes, self._inputs.name_of
        lengths_by_name = ", ".join(
            f"{name_of(i)!r} {length}{f' (axis {axes[i]})' if axes[i] else ''}"
            for i, length in lengths.items()
        )
        if any(axes):
            raise ValueError(
                f"The scattered inputs of {self._owner} must have the same number of rows, got: "
                f"{lengths_by_name}. With batch= they may differ."
            )
        raise ValueError(
            f"The scattered inputs of {self._owner} must have the same length along axis 0, got: "
            f"{lengths_by_name}. With batch= they may differ. An input that each rank needs whole "
            "belongs in bcast_inputs; if an input x has its rows on another axis, give function() "
            "axes={x: 1}."
        )

    def _refuse_batch(self, batch):
        """Raise for a batch if no input is scattered: it would be ignored in silence."""
        select_rows("batch", batch, ANY_LENGTH)
        if self._description.sliceables:
            advice = "To select rows of its sliceable_shareds write batch_s= in place of batch=."
        else:
            advice = (
                "To select rows of an array that each rank has, scatter it: name its variable in "
                "inputs=; or name a shared variable in sliceable_shareds=, and write batch_s=."
            )
        raise ValueError(
            f"batch selects rows of scattered inputs, and {self._owner} has none: its inputs have "
            f"no axes or are bcast_inputs. {advice}"
        )

    def _pick(self, batch_s, counts):
        """Return the rows of the sliceable shareds and the number of rows, for each rank."""
        sliceables = self._description.sliceables
        if not sliceables:
            if batch_s is not None:
                raise TypeError(f"batch_s was given, but {self._owner} has no sliceable_shareds.")
            return None, counts
        lengths = self._session.ask(commands.Lengths(self._key))
        for rank, each in enumerate(lengths):
            if len(set(each)) > 1 and batch_s is None:
                raise ValueError(
                    f"The sliceable_shareds of {self._owner} must have the same length on a rank, "
                    f"got {each} on rank {rank}. With batch_s= they may differ."
                )
        shortest = [min(each) for each in lengths]
        picks = select_each("batch_s", batch_s, shortest)
        picked_counts = [len(rows) for rows in picks]
        for variable in sliceables:
            if _host.fixed_axes(variable)[0] and max(picked_counts) != 1:
                raise ValueError(
                    f"The sliceable {variable} of {self._owner} is broadcastable along axis 0: it "
                    f"has exactly one row, but batch_s selects {picked_counts} on the ranks."
                )
        if counts is not None and counts != picked_counts:
            raise ValueError(
                f"{self._owner} has scattered inputs and sliceable_shareds: they must have equally "
                f"many rows on each rank, got {counts} and {picked_counts}."
            )
        if batch_s is None:
            return None, picked_counts
        if all(rows is picks[0] for rows in picks):
            return (self._send("batch_s", picks[0]),) * len(picks), picked_counts
        sent = [self._send(f"batch_s {rank}", rows) for rank, rows in enumerate(picks)]
        return tuple(sent), picked_counts

    def _counts_for_all(self, counts):
        """Return the row counts of all ranks, if ranks reduce inside the function; else None."""
        if counts is None or not self._description.communicates:
            return None
        if self._description.sliceables and not all(counts) and any(counts):
            raise ValueError(
                f"{self._owner} reduces over the ranks while it runs, so each needs rows of the "
                f"sliceable_shareds; in rank order they have {list(counts)}."
            )
        return tuple(counts)

    def _send(self, name, rows):
        """Return rows for a command: a range, or a reference to indices.

        The reference is valid until the next call that selects rows with the argument `name`.
        """
        if isinstance(rows, range):
            return rows
        staged = self._indices.get(name)
        if staged is None:
            memory = self._session.comm.memory
            staged = self._indices[name] = GrowingArray(memory, np.int64, 1)
        return staged.put(rows, self._session.worker.recorder).ref


class _Selected:
    """The last commands with `batch`, which differ in their number of rows only."""

    def __init__(self):
        # References to inputs, positions of outputs, number of slices: equal for all commands.
        self.arguments = None
        self.length = 0  # of the inputs from which rows are selected
        self._commands = {}  # number of rows -> command

    def find(self, rows, selection):
        """Return the command for so many rows, if its selection is this one."""
        command = self._commands.get(rows)
        return command if command is not None and command.selection is selection else None

    def keep(self, arguments, length, rows, command):
        """Keep a command for `rows` rows of `length`."""
        if arguments != self.arguments or len(self._commands) >= _LENGTHS:
            self.arguments = None  # set last: after a Ctrl-C on the way no command is found
            self._commands = {}
            self.length = length
            self.arguments = arguments
        self._commands[rows] = command


def _is_plain(batch):
    """Return whether rows can be selected without a conversion."""
    kind = batch.__class__
    return kind is slice or (
        kind is np.ndarray and batch.dtype == np.int64 and batch.ndim == 1 and batch.size > 0
    )
