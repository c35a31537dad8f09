"""In place of ``theano.function``: the same function on every rank.

function(...)          compiled once, in the master
f(x)                   bind -> stage -> RunFunction ==> ranks ==> combine -> outputs
"""

import sys
from typing import List, Optional, Sequence

import numpy as np

from synkhronos import _commands, _partition, _reduction, _signature, _theano
from synkhronos import session as _session
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

    def __init__(self, session, compiled, inputs, n_scattered, outputs, update_modes, downcast):
        self._session = session
        self._compiled = compiled
        self._variables = tuple(inputs)
        self._dtypes = tuple(np.dtype(variable.dtype) for variable in inputs)
        self._has_fixed = tuple(any(variable.broadcastable) for variable in inputs)
        # A scalar can't be scattered: it goes whole to every rank, wherever it was listed.
        self._is_scattered = tuple(
            position < n_scattered and variable.ndim > 0 for position, variable in enumerate(inputs)
        )
        self._outputs = outputs
        self.output_modes = list(outputs.modes)
        self.update_modes = update_modes
        self.name = compiled.name
        self._result_dtypes = [
            _reduction.result_dtype(mode, getattr(variable, "dtype", None), _theano.float_dtype())
            for mode, variable in zip(self.output_modes, outputs.variables)
        ]
        self._allow_downcast = downcast
        self._staged = {}
        self._last = (None, None)
        self._key = session.add_function(self, compiled)

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
        batch, batch_s, num_slices
            Not in this version.

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
        if batch is not None or batch_s is not None or num_slices != 1:
            raise NotImplementedError(
                "batch, batch_s and num_slices are not in this version: select the rows yourself."
            )
        with session.lock:
            values = self._bind(args, kwargs)
            subset = (
                None
                if output_subset is None
                else _signature.check_subset(output_subset, len(self.output_modes), self)
            )
            refs = tuple(map(self._locate, range(len(values)), values))
            if session.is_pending(self._key):
                session.distribute(self._key)
            if (refs, subset) != self._last[0]:
                self._last = (refs, subset), self._make_command(refs, subset)
            command = self._last[1]
            session.run(command)
            call = session.gate.sequence
            results = self._combine(command)
            session.gate.require_last(call)
            return self._outputs.pack(results)

    # From arguments to a command.

    def _bind(self, args, kwargs):
        """Return one value for each input, in order."""
        names = self._variables
        if len(args) + len(kwargs) != len(names):
            raise TypeError(
                f"{self} takes {len(names)} inputs ({self._input_names()}), got "
                f"{len(args) + len(kwargs)}."
            )
        if not kwargs:
            return args
        values = list(args) + [None] * len(kwargs)
        positions = {v.name: i for i, v in enumerate(names) if v.name is not None}
        for name, value in kwargs.items():
            if name not in positions:
                raise ValueError(f"{self} has no input {name!r}. It takes: {self._input_names()}.")
            if positions[name] < len(args):
                raise ValueError(f"{self} got input {name!r} twice: by position and by name.")
            values[positions[name]] = value
        return values

    def _locate(self, position, value):
        """Return what stands for the value of one input in shared memory, after checking it."""
        variable = self._variables[position]
        if type(value) is Data:
            array = value._store.array
            if array.dtype != self._dtypes[position] or array.ndim != variable.ndim:
                raise TypeError(
                    f"Input {self._name_of(position)} of {self} takes {variable.type}, got {value}."
                    " A Data is never cast: make it with data(value, var=variable)."
                )
            if self._has_fixed[position]:
                self._check_broadcastable(position, value.shape)
            return value._ref(self._session)
        staged = self._staged.get(position)
        if staged is None:
            staged = self._staged[position] = StagedInput(self._session, variable)
        return staged.put(self._cast(position, value))

    def _cast(self, position, value):
        variable = self._variables[position]
        try:
            return _theano.cast_input(variable, value, self._allow_downcast)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"Input {self._name_of(position)} of {self} takes {variable.type}, got "
                f"{_signature.describe_value(value)}: {error}"
            ) from error

    def _check_broadcastable(self, position, shape):
        pattern = self._variables[position].broadcastable
        if any(fixed and length != 1 for fixed, length in zip(pattern, shape)):
            raise TypeError(
                f"Input {self._name_of(position)} of {self} is broadcastable ({pattern}): it must "
                f"have length 1 there, got shape {shape}."
            )

    def _make_command(self, refs, subset):
        lengths = {ref.shape[0] for ref, split in zip(refs, self._is_scattered) if split}
        if len(lengths) > 1:
            given = ", ".join(
                f"{self._name_of(position)} {ref.shape[0]}"
                for position, ref in enumerate(refs)
                if self._is_scattered[position]
            )
            raise ValueError(
                f"The scattered inputs of {self} must have the same length along axis 0, got: "
                f"{given}."
            )
        rows = lengths.pop() if lengths else None
        master = source = self._session.master_rank
        if rows:
            busy = _partition.ranks_with_rows(rows, self._session.n_ranks)
            source = master if master in busy else busy[0]
        chosen = range(len(self.output_modes)) if subset is None else subset
        return _commands.RunFunction(
            function=self._key,
            inputs=refs,
            split=self._is_scattered,
            rows=rows,
            reduced=tuple(i for i, out in enumerate(chosen) if self.output_modes[out] is not None),
            source=source,
            output_subset=subset,
        )

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
        values = self._bind(args, kwargs)
        arrays = [
            value.data if type(value) is Data else self._cast(position, value)
            for position, value in enumerate(values)
        ]
        subset = _signature.check_subset(output_subset, len(self.output_modes), self)
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
        values = self._bind(args, kwargs)
        batches = minibatch if isinstance(minibatch, (list, tuple)) else [minibatch] * len(values)
        if len(batches) != len(values):
            raise ValueError(
                f"minibatch must be one bool or one for each of the {len(values)} inputs, got "
                f"{minibatch!r}"
            )
        made = tuple(
            data(value, var=variable, minibatch=batch, force_cast=force_cast, oversize=oversize)
            for value, variable, batch in zip(values, self._variables, batches)
        )
        return made[0] if len(made) == 1 else made

    def release(self) -> None:
        """Let go of the shared memory that it keeps for plain arrays; `close` does it."""
        self._staged.clear()

    def get_shared(self) -> list:
        """Return the shared variables that the function uses or updates."""
        return list(_theano.shared_variables(self._compiled))

    def _name_of(self, position):
        return repr(self._variables[position].name or position)

    def _input_names(self):
        return ", ".join(str(v.name or f"input {i}") for i, v in enumerate(self._variables))

    def __str__(self):
        return f"Function {self.name!r}" if self.name else "Function"

    def __repr__(self):
        modes = ", ".join(map(repr, self.output_modes))
        return f"<{self}({self._input_names()}) -> [{modes}] on {self._session.n_ranks} ranks>"


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
        As in Theano, applied on every rank by itself. The modes concern calls with slices.
    givens, **kwargs
        Passed to ``theano.function``.
    sliceable_shareds : list of shared variable, optional
        Not in this version.

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
    if sliceable_shareds:
        raise NotImplementedError("sliceable_shareds is not in this version.")
    chosen = _signature.Outputs(outputs)
    pairs, update_modes = _signature.check_updates(updates)
    if kwargs.get("name") is None:
        # As Theano names a function that was given none: after the line that makes it.
        caller = sys._getframe(1)
        kwargs["name"] = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    compiled = _theano.compile_function(
        inputs + whole, chosen.variables, updates=pairs, givens=givens, **kwargs
    )
    return Function(
        session,
        compiled,
        inputs + whole,
        len(inputs),
        chosen,
        update_modes,
        kwargs.get("allow_input_downcast"),
    )


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
