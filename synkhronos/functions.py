"""In place of ``theano.function``: the same function on every rank.

function(...)          compiled once, in the master
f(x)                   bind -> stage -> RunFunction ==> ranks ==> combine -> outputs
"""

import sys
from typing import List, Optional, Sequence

import numpy as np

from synkhronos import _commands, _partition, _reduction, _selection, _signature, _theano
from synkhronos import session as _session
from synkhronos._binding import Inputs
from synkhronos._replica import BATCH, SLICED, SPLIT, WHOLE, Description
from synkhronos._signature import Recipe
from synkhronos.inputs import Data, StagedInput, data

__all__ = ["Function", "distribute", "function"]


class Function:
    """A Theano function that is replicated over the ranks; made by :func:`function`.

    Attributes
    ----------
    name : str or None
        As given to :func:`function`.
    output_modes : list of str or None
        How each output is reduced.
    update_modes : list of str or None
        How each update is accumulated over slices.
    """

    def __init__(self, session, compiled, inputs, n_scattered, outputs, recipe):
        self._session = session
        self._compiled = compiled
        self._recipe = recipe
        self._outputs = outputs
        self.output_modes = list(outputs.modes)
        self.update_modes = list(recipe.update_modes)
        self.name = compiled.name
        self._inputs = Inputs(session, inputs, n_scattered, recipe.allow_downcast, self)
        self._result_dtypes = [
            _reduction.result_dtype(mode, getattr(variable, "dtype", None), _theano.float_dtype())
            for mode, variable in zip(self.output_modes, outputs.variables)
        ]
        self._description = Description(
            tuple(self.output_modes), tuple(recipe.accumulated), tuple(recipe.sliceables)
        )
        self._has_sliced = False
        self._indices = {}
        self._last = (None, None)
        self._key = session.add_function(self, compiled, self._description)

    def __call__(self, *args, output_subset=None, batch=None, batch_s=None, num_slices=1, **kwargs):
        """Run the function on all ranks, and return the reduced outputs.

        Parameters
        ----------
        *args, **kwargs
            One :class:`~synkhronos.inputs.Data`, array, list or scalar for each input, in the order
            of ``inputs`` and then ``bcast_inputs``, or by the name of the variable. Data is used
            where it is; anything else is cast as ``theano.function`` would, and copied once.
        output_subset : list of int, optional
            Compute only these outputs; they are returned in ascending order.
        batch : int, slice, list, or array of integers or bools, optional
            The rows of the scattered inputs to use, selected before they are scattered: the first
            so many, a slice, rows by number, or a mask. Inputs whose Data was made with
            ``minibatch=True`` hold just these rows.
        batch_s : slice, list or array of integers, or a list of these with one for each rank
            The rows of the sliceable shared variables to use, selected on each rank from its own.
        num_slices : int
            Compute each rank's rows in so many parts, one after the other, to save memory. Outputs
            and updates are accumulated by their modes; updates are applied once, at the end.

        Returns
        -------
        numpy.ndarray or list of numpy.ndarray
            One array where ``outputs`` was one variable, else a list.

        Raises
        ------
        TypeError, ValueError
            For wrong arguments, before anything is launched.
        WorkerError
            When a rank raised; the session stays usable.
        WorkerDied
            When a worker is gone.
        """
        session = self._session
        if session.state is not _session.State.OPEN:
            session.require_open()
        with session.lock:
            command = self._request(args, kwargs, output_subset, batch, batch_s, num_slices)
            session.run(command)
            call = session.gate.sequence
            results = self._combine(command)
            session.gate.require_last(call)
            return self._outputs.pack(results)

    # From arguments to a command.

    def _request(self, args, kwargs, output_subset, batch, batch_s, num_slices):
        """Return the command for a call, after checking all that the master can check."""
        session, inputs = self._session, self._inputs
        values = inputs.bind(args, kwargs)
        num_slices = self._check_slices(num_slices)
        subset = _signature.check_subset(output_subset, len(self.output_modes), self)
        refs = tuple(map(inputs.locate, range(len(values)), values))
        if num_slices > 1 and self._description.updates and not self._has_sliced:
            session.add_variant(self._key, SLICED, self._recipe.compile_sliced())
            self._has_sliced = True
        if session.is_pending(self._key):
            session.distribute()
        # A plain call that repeats the last one repeats its message, too.
        plain = batch is None and batch_s is None and not self._description.sliceables
        if plain and (refs, subset, num_slices) == self._last[0]:
            return self._last[1]
        rows, selection, kinds = self._select(values, refs, batch)
        counts = None
        if rows is not None:
            edges = _partition.edges(rows, session.n_ranks)
            counts = [end - begin for begin, end in zip(edges, edges[1:])]
        picked, counts = self._pick(batch_s, counts)
        master = source = session.master_rank
        source_of_nothing = -1
        if counts is not None:
            busy = [rank for rank, count in enumerate(counts) if count]
            if not busy:
                source_of_nothing = master
            elif master not in busy:
                source = busy[0]
        chosen = range(len(self.output_modes)) if subset is None else subset
        command = _commands.RunFunction(
            function=self._key,
            inputs=refs,
            kinds=kinds,
            rows=rows,
            selection=selection,
            picked=picked,
            num_slices=num_slices,
            reduced=tuple(i for i, out in enumerate(chosen) if self.output_modes[out] is not None),
            source=source,
            source_of_nothing=source_of_nothing,
            output_subset=subset,
        )
        if plain:
            self._last = (refs, subset, num_slices), command
        return command

    def _check_slices(self, num_slices):
        if num_slices == 1:
            return 1
        try:
            number = int(num_slices)
            if number != num_slices or number < 1:
                raise ValueError
        except (TypeError, ValueError):
            raise ValueError(f"num_slices must be an integer >= 1, got {num_slices!r}") from None
        if not any(self._inputs.is_scattered) and not self._description.sliceables:
            raise ValueError(
                f"num_slices={number}, but {self} has nothing to slice: neither scattered inputs "
                "nor sliceable_shareds."
            )
        for variable, mode in self._description.updates:
            if mode == "avg" and np.dtype(variable.dtype).kind not in "fc":
                raise ValueError(
                    f"num_slices={number}, but the update of {variable}, of dtype {variable.dtype},"
                    " would be averaged over the slices. Give it a mode: (variable, expression, "
                    "'sum')."
                )
        return number

    def _select(self, values, refs, batch):
        """Return the number of selected rows, which they are, and what ranks take of each input."""
        scattered = [i for i, split in enumerate(self._inputs.is_scattered) if split]
        lengths = {i: refs[i].shape[0] for i in scattered}
        kinds = [SPLIT if split else WHOLE for split in self._inputs.is_scattered]
        if not scattered:
            if batch is not None:
                _selection.select_rows("batch", batch, sys.maxsize)
            return None, None, tuple(kinds)
        if batch is None:
            if len(set(lengths.values())) > 1:
                given = ", ".join(f"{self._inputs.name_of(i)} {lengths[i]}" for i in scattered)
                raise ValueError(
                    f"The scattered inputs of {self} must have the same length along axis 0, got: "
                    f"{given}. With batch= they may differ."
                )
            return lengths[scattered[0]], None, tuple(kinds)
        minibatches = [i for i in scattered if getattr(values[i], "minibatch", False)]
        others = [i for i in scattered if i not in minibatches]
        selected = _selection.select_rows(
            "batch", batch, min(lengths[i] for i in others or minibatches)
        )
        for i in minibatches:
            kinds[i] = BATCH
            if lengths[i] < len(selected):
                raise ValueError(
                    f"{self._inputs.what(i)} is a minibatch of {lengths[i]} rows, but batch selects "
                    f"{len(selected)}."
                )
        return len(selected), self._send("batch", selected), tuple(kinds)

    def _pick(self, batch_s, counts):
        """Return the rows of the sliceable shareds for each rank, and how many each computes."""
        sliceables = self._description.sliceables
        if not sliceables:
            if batch_s is not None:
                raise TypeError(f"batch_s was given, but {self} has no sliceable_shareds.")
            return None, counts
        lengths = self._session.ask(_commands.Lengths(self._key))
        for rank, each in enumerate(lengths):
            if len(set(each)) > 1 and batch_s is None:
                raise ValueError(
                    f"The sliceable_shareds of {self} must have the same length on a rank, got "
                    f"{each} on rank {rank}. With batch_s= they may differ."
                )
        shortest = [min(each) for each in lengths]
        picks = _selection.select_each("batch_s", batch_s, shortest)
        picked_counts = [len(rows) for rows in picks]
        if counts is not None and counts != picked_counts:
            raise ValueError(
                f"{self} has scattered inputs and sliceable_shareds: they must have equally many "
                f"rows on each rank, got {counts} and {picked_counts}."
            )
        if batch_s is None:
            return None, picked_counts
        if all(rows is picks[0] for rows in picks):
            return (self._send("batch_s", picks[0]),) * len(picks), picked_counts
        sent = [self._send(f"batch_s {rank}", rows) for rank, rows in enumerate(picks)]
        return tuple(sent), picked_counts

    def _send(self, name, rows):
        """Return what stands for rows in a message; indices go through shared memory."""
        if isinstance(rows, range):
            return rows.start, rows.stop, rows.step
        staged = self._indices.get(name)
        if staged is None:
            staged = self._indices[name] = StagedInput(self._session, np.int64, 1)
        return staged.put(rows)

    # From parts to outputs.

    def _combine(self, command):
        session, comm = self._session, self._session.comm
        ranks, weights = [], []
        for rank in range(session.n_ranks):
            rows = session.gate.rows_of(rank)
            if rows >= 0:
                ranks.append(rank)
                weights.append(rows)
        chosen = command.output_subset
        if chosen is None:
            chosen = range(len(self.output_modes))
        results = []
        reduced = 0
        for position, output in enumerate(chosen):
            mode = self.output_modes[output]
            if mode is None:
                parts = [self._part(command, command.source, position, None)]
            else:
                parts = [self._part(command, rank, position, reduced) for rank in ranks]
                reduced += 1
            try:
                result = _reduction.combine(mode, parts, weights, self._result_dtypes[output])
            except ValueError as error:
                raise ValueError(f"Output {output} of {self} {error}") from None
            # What a worker deposited stays in its outbox, to be overwritten by the next call.
            alone = len(parts) == 1 and result is parts[0] and command.source != session.master_rank
            results.append(result.copy() if alone else result)
        comm.keep(())
        return results

    def _part(self, command, rank, position, reduced):
        """Return what one rank computed for the output at `position` of those asked for."""
        comm = self._session.comm
        if rank == self._session.master_rank:
            return comm.kept[position]
        return comm.collect(self._key, rank)[position if rank == command.source else reduced]

    # Beside calls.

    def as_theano(self, *args, output_subset=None, **kwargs):
        """Call the function in the master only, as ``theano.function`` would have made it.

        It takes arrays (or Data), applies updates to the master's shared variables only, and
        works before `distribute` and after `close`, too.
        """
        values = self._inputs.bind(args, kwargs)
        arrays = [
            value.data if type(value) is Data else self._inputs.cast(position, value)
            for position, value in enumerate(values)
        ]
        subset = (
            None
            if output_subset is None
            else _signature.check_subset(output_subset, len(self.output_modes), self)
        )
        return self._outputs.pack(_theano.run(self._compiled, arrays, subset))

    def build_inputs(self, *args, force_cast=False, oversize=1.0, minibatch=False, **kwargs):
        """Make a Data of each value, for each input in order.

        Parameters
        ----------
        *args, **kwargs
            One array for each input, by position or by the name of the variable.
        force_cast, oversize
            As in :func:`~synkhronos.data`.
        minibatch : bool or list of bool
            For all, or for each.

        Returns
        -------
        Data or tuple of Data
            A bare Data where the function has one input.
        """
        values = self._inputs.bind(args, kwargs)
        batches = minibatch if isinstance(minibatch, (list, tuple)) else [minibatch] * len(values)
        if len(batches) != len(values):
            raise ValueError(
                f"minibatch must be one bool or one for each of the {len(values)} inputs, got "
                f"{minibatch!r}"
            )
        made = tuple(
            data(value, var=variable, minibatch=batch, force_cast=force_cast, oversize=oversize)
            for value, variable, batch in zip(values, self._inputs.variables, batches)
        )
        return made[0] if len(made) == 1 else made

    def get_shared(self) -> list:
        """Return the shared variables that the function uses or updates."""
        return list(_theano.shared_variables(self._compiled))

    def __str__(self):
        return f"Function {self.name!r}" if self.name else "Function"

    def __repr__(self):
        modes = ", ".join(map(repr, self.output_modes))
        return f"<{self}({self._inputs}) -> [{modes}] on {self._session.n_ranks} ranks>"


def function(
    inputs: List,
    outputs=None,
    bcast_inputs: Optional[List] = None,
    updates=None,
    givens=None,
    sliceable_shareds: Optional[Sequence] = None,
    **kwargs,
) -> Function:
    """Compile a Theano function that will run on all ranks.

    Each rank runs it on its part of the scattered inputs, and applies its updates to its own copy
    of the shared variables; the outputs are reduced to the master.

    Parameters
    ----------
    inputs : list of theano variable
        The inputs that are scattered along axis 0 (those without axes go whole to every rank).
    outputs : variable, (variable, mode), or list of these, optional
        What to compute, and how to reduce it over the ranks: ``"avg"`` (the default; each rank
        weighs as many rows as it had, so that it equals the mean over all rows; equal weights
        where nothing is scattered; integers and bools are averaged in floatX), ``"sum"``,
        ``"prod"``, ``"min"``, ``"max"``, ``"gather"`` (joined along axis 0 in rank order;
        numbers are stacked), or None (the master's own). The prefix ``c_``, as in ``"c_sum"``, asks
        for the CPU's reduction.
    bcast_inputs : list of theano variable, optional
        The inputs that every rank gets whole; in calls they come after `inputs`.
    updates : list of (shared variable, expression[, mode]) or OrderedDict, optional
        As in Theano, applied on every rank by itself. In a call with slices every slice is
        evaluated at the original values, and the results, accumulated with the update's mode
        (``"avg"`` by default), are applied once.
    givens, **kwargs
        Passed to ``theano.function``.
    sliceable_shareds : list of shared variable, optional
        Shared variables that the function uses, whose rows ``batch_s`` and ``num_slices`` select
        on each rank; they may not be updated by the function.

    Raises
    ------
    SessionError
        Before :func:`~synkhronos.fork`.
    TypeError, ValueError
        For arguments of the wrong kind, and modes that do not exist.

    Examples
    --------
    >>> import numpy as np, theano.tensor as T
    >>> import synkhronos as synk
    >>> synk.fork(2)
    2
    >>> x = T.vector("x", "float64")
    >>> f = synk.function([x], [x.mean(), (x, "gather"), (x.max(), "max")])
    >>> mean, squares, largest = f(np.arange(5.0))
    >>> float(mean), float(largest)
    (2.0, 4.0)
    >>> synk.close()
    """
    session = _session.current("function()")
    inputs = _signature.check_inputs("inputs", inputs)
    whole = _signature.check_inputs("bcast_inputs", [] if bcast_inputs is None else bcast_inputs)
    chosen = _signature.Outputs(outputs)
    pairs, update_modes = _signature.check_updates(updates)
    if kwargs.get("name") is None:
        # As Theano names a function that was given none: after the line that makes it.
        caller = sys._getframe(1)
        kwargs["name"] = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    recipe = Recipe(inputs + whole, chosen, pairs, update_modes, dict(kwargs, givens=givens))
    compiled = recipe.compile_plain()
    recipe.sliceables = _signature.check_sliceables(
        sliceable_shareds, _theano.shared_variables(compiled), recipe.updates
    )
    return Function(session, compiled, inputs + whole, len(inputs), chosen, recipe)


def distribute() -> None:
    """Send the workers all functions that they do not have yet.

    It may be called at any time, and again; it sends only what is new. Calling it is optional: a
    function that is called is sent if it must be. A shared variable is sent once, with the master's
    value at that moment, however many functions use it; random states are moved to a stream of
    their own on each rank but 0.

    Raises
    ------
    SessionError
        Before :func:`~synkhronos.fork`.
    TypeError
        When a function can't be pickled.
    """
    session = _session.current("distribute()")
    with session.lock:
        session.distribute()
