"""Functions: ``theano.function``, run on every rank.

    function(...)    compiled once, in the master
    f(x)             bind ──▶ stage ──▶ RunFunction ==> ranks ==> combine ──▶ outputs

A call first sends the workers the function, if they don't have it yet.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from typing import Any, Sequence

import numpy as np

from synkhronos import _host
from synkhronos._arithmetic import reduction
from synkhronos._calls import parameters, signature
from synkhronos._calls.arguments import OPTIONS, make_inputs, selected
from synkhronos._calls.check import FIRST, FirstCall, SerialComparison, number_of_calls
from synkhronos._calls.function_values import Containers, Values
from synkhronos._calls.function_warnings import FunctionWarnings
from synkhronos._calls.proof import Proof
from synkhronos._calls.recipe import Definition, Recipe, Source, take_out_row_numbers
from synkhronos._calls.request import Requests
from synkhronos._hints import ArrayLike, Input, Output, Rows, SharedVariable, Update, Variable
from synkhronos._session.current import Current, current
from synkhronos._session.replica import SLICED, Description
from synkhronos._session.session import SessionState
from synkhronos._wording import count, line_of_user, truth
from synkhronos.inputs import Data, data

__all__ = ["Function", "distribute", "function"]


class Function:
    """A Theano function that is replicated over the ranks; made by :func:`function`.

    Examples
    --------
    >>> import theano, theano.tensor as T
    >>> import synkhronos as synk
    >>> synk.fork(2)
    2
    >>> x, calls = T.dvector("x"), theano.shared(0, "calls")
    >>> f = synk.function([x], (x.sum(), "sum"), updates=[(calls, calls + 1, "max")], name="f")
    >>> f
    <Function 'f'(x) -> ['sum'] on 2 ranks>
    >>> f.name, f.output_modes, f.update_modes, f.get_shared()
    ('f', ['sum'], ['max'], [calls])
    >>> d = f.build_inputs([1, 2, 3], minibatch=True)
    >>> float(f(d)), float(f([1, 2, 3], batch=2)), float(f.as_theano([1, 2, 3]))
    (6.0, 3.0, 6.0)
    >>> synk.gather(calls)  # as_theano runs in the master only
    array([3, 2])
    >>> g = f.copy(delete_updates=True)
    >>> float(g([4, 5])), int(f.value["calls"]), g.profile is None
    (9.0, 3, True)
    >>> theano.printing.debugprint(f)
    Sum{acc_dtype=float64} [id A] ''   0
     |x [id B]
    Elemwise{add,no_inplace} [id C] ''   1
     |calls [id D]
     |TensorConstant{1} [id E]
    >>> len(f.maker.fgraph.apply_nodes), len(f.fn.nodes)
    (2, 2)

    Inputs that have a value need not be given:

    >>> y = T.dscalar("y")
    >>> h = synk.function([x, theano.In(y, value=2.0)], (x * y, "gather"))
    >>> h([1, 2]), h([1, 2], y=10), float(h[y]), float(h.container["y"].value)
    (array([2., 4.]), array([10., 20.]), 2.0, 2.0)
    >>> synk.close()
    """

    def __init__(self, session, compiled, inputs, outputs, recipe, source):
        self.trust_input = False  # an attribute of Theano's functions; arguments are always checked
        self._compiled = compiled
        self._sliced = None  # compiled when a call with slices first needs it
        self._recipe = recipe
        self._source = source  # the arguments from which `copy` makes another function
        self._outputs = outputs
        self._modes = tuple(outputs.modes)
        self._returns_plain_list = outputs.is_plain_list
        self._inputs = make_inputs(inputs, recipe.row_numbers, str(self))
        self._definition = Definition(compiled, self._inputs, outputs, recipe, str(self))
        self._result_dtypes = [
            reduction.result_dtype(
                mode, getattr(variable, "dtype", None), _host.library.config.floatX
            )
            for mode, variable in zip(self._modes, outputs.variables)
        ]
        self._description = Description(
            self._modes,
            tuple(recipe.accumulated),
            tuple(recipe.sliceables),
            # Ranks without rows must run, too, if all ranks reduce or advance equal random states.
            _host.communicates(compiled) or any(map(_host.is_state_equal, compiled.get_shared())),
            recipe.draws_all,
            any(outputs.on_device),
            self._inputs.axes if any(self._inputs.axes) else (),
        )
        if source.rows_of_all is not None:
            self._run_by(Function._run_whole)
        check = source.check
        self._tells = source.is_proved or (bool(source.check) and session.n_ranks > 1)
        self._proof: Any = None
        self._check: Any = None
        if check and session.n_ranks > 1 and not source.is_proved:
            self._proof = Proof(self._definition)
        if check:
            self._check = (FirstCall if check == FIRST else SerialComparison)(
                self._definition, check, self._proof
            )
        self._join(session)
        if self._proof is not None:
            self._proof.tell()
            if check == FIRST:
                self._proof.tell_of_mode()
        if check:
            self._run_by(Function._run_checked)

    def _run_by(self, method):
        """Let calls use a method in place of `_run`."""
        # Weak, because a cycle would keep the function alive when the user has dropped it.
        this: Any = weakref.proxy(self)
        # Without `__dict__`: reading it makes later accesses to attributes slower.
        setattr(self, "_run", functools.partial(method, this))  # noqa: B010

    def _join(self, session):
        """Belong to a session, which sends the function to its workers when it is first called."""
        registry, description = session.registry, self._description
        key = registry.add_function(self, self._compiled, description, self._recipe)
        if self._sliced is not None:
            registry.add_variant(key, SLICED, self._sliced)
        self._inputs.join(session)
        self._advice = FunctionWarnings(session, self._definition)
        self._keys_apart = None  # of the variables that ranks update differently
        self._requests = Requests(session, key, self._definition, description, self._advice)
        if self._check is not None:
            self._check.join(session, key, self._advice)
        self._key = key
        self._session = session  # last: after a Ctrl-C before this line the next call joins again

    def _require_session(self):
        """Join the current session if this one is over and that one adopts functions; or raise."""
        with Current.lock:
            session = Current.session
            is_over = self._session.state in (SessionState.CLOSED, SessionState.LEFT)
            if not is_over or session is None or not session.adopts:
                self._session.require_open()  # it is open if another thread has joined meanwhile
            else:
                session.require_open()
                self._join(session)

    def _join_and_call(self, args, kwargs, *options):
        """Call in the current session if it adopts functions of closed ones; else raise."""
        self._require_session()
        return self(*args, **dict(zip(OPTIONS, options)), **kwargs)

    @property
    def name(self) -> str:
        """The name given to :func:`function`, or the file and line of the call that made it."""
        return self._compiled.name

    @property
    def output_modes(self) -> list[str | None]:
        """The reduce mode of each output: a str or None."""
        return list(self._outputs.asked_modes)

    @property
    def update_modes(self) -> list[str | None]:
        """The mode by which each update is accumulated over slices: a str or None."""
        return list(self._recipe.update_modes)

    def __call__(
        self,
        /,
        *args: ArrayLike,
        output_subset: Sequence[int] | Sequence[str] | None = None,
        batch: Rows | None = None,
        batch_s: Rows | Sequence[Rows] | None = None,
        num_slices: int = 1,
        **kwargs: ArrayLike,
    ) -> np.ndarray | list[np.ndarray] | dict[str, np.ndarray]:
        """Run the function on all ranks, and return the reduced outputs.

        Parameters
        ----------
        *args, **kwargs
            One :class:`~synkhronos.inputs.Data`, array, list or scalar for each input, in the order
            of ``inputs`` and then ``bcast_inputs``, or by the name of the variable; those that
            were made with a value, as in ``In(x, value=1.0)``, may be left out. Ranks read a
            Data in place; other values are cast as ``theano.function`` would, and copied once.
        output_subset : list of int, or of keys if `outputs` was a dict, optional
            Compute only these outputs; they are returned in ascending order.
        batch : int, slice, range, list, or array of integers or bools, optional
            The rows of the scattered inputs to use, selected before they are scattered: a number
            of first rows, a slice, row numbers, or a mask. A Data made with ``minibatch=True``
            holds just these rows.
        batch_s : slice, range, list or array of integers, or a list with one of these for each rank
            The rows of the sliceable shared variables to use; each rank selects from its own rows.
        num_slices : int
            The number of parts in which each rank computes its rows, one after the other, to save
            memory. Outputs and updates are accumulated by their modes; updates are applied once, at
            the end.

        Returns
        -------
        numpy.ndarray, or list or dict of numpy.ndarray
            One array if ``outputs`` was one variable, a dict for a dict, else a list. On devices, a
            GpuArray for an output variable of a device type, such as ``x.transfer(None)``.

        Raises
        ------
        TypeError, ValueError
            For wrong arguments, before any rank starts to compute.
        WorkerError
            When a rank raised an error; the session stays usable.
        WorkerDied
            When a worker process has ended.
        """
        recording = self._session.recording
        if recording is None:
            return self._run(args, kwargs, output_subset, batch, batch_s, num_slices)
        with self._session.lock, recording.call(self.name, self._key):
            return self._run(args, kwargs, output_subset, batch, batch_s, num_slices)

    def _run(self, args, kwargs, output_subset, batch, batch_s, num_slices):
        session = self._session
        if session.state is not SessionState.OPEN:
            return self._join_and_call(args, kwargs, output_subset, batch, batch_s, num_slices)
        with session.lock:
            if session.inside.locked():
                session.refuse_nesting()
            with session.inside:
                if session.gate.is_in_call:
                    session.drain()
                if session.changes.pending:
                    session.changes.broadcast_or_warn(self._recipe, self._compiled)
                if session.changes.unreduced and self._tells:
                    session.changes.unreduced.tell(self._recipe, self._compiled, str(self))
                command, own_outputs = self._compute(
                    session, args, kwargs, output_subset, batch, batch_s, num_slices
                )
                modes, dtypes = self._modes, self._result_dtypes
                combine, recorder = session.worker.results.combine, session.worker.recorder
                if recorder is None:
                    results = combine(command, own_outputs, modes, dtypes, self)
                else:
                    with recorder.span("reduce") as span:
                        results = combine(command, own_outputs, modes, dtypes, self)
                        span.moved(*results)
        if self._returns_plain_list:
            return results
        return self._outputs.pack(results, command.output_subset)

    # Not a part of `_run`: Python 3.11 does not leave a `with` block at a Ctrl-C in a line `try:`.
    def _compute(self, session, args, kwargs, output_subset, batch, batch_s, num_slices):
        """Run the function on all ranks; return the command, and the master's own outputs."""
        arrays: Any = []  # of the inputs, for the master's part
        try:
            values: Any = args
            if kwargs or len(args) != self._inputs.n_plain:
                values = self._inputs.bind(args, kwargs)
            command = self._requests.make(
                self._make_ready, values, arrays, output_subset, batch, batch_s, num_slices
            )
            if self._description.updates:
                session.changes.made += 1
            own = session.run(command, arrays)
            session.held.clear()
            if self._proof is not None and self._proof.apart:
                self._note_unreduced(session)
            return command, own
        except BaseException:
            arrays.clear()  # the frames of the error would keep their memory
            session.release_data()
            raise

    def _note_unreduced(self, session):
        if self._keys_apart is None:
            variables = self._proof.apart
            self._keys_apart = list(zip(session.registry.keys_of(variables), variables))
        session.changes.unreduced.note(self._keys_apart, str(self))

    def _run_checked(self, args, kwargs, *options):
        session = self._session
        if session.state is not SessionState.OPEN:
            return self._join_and_call(args, kwargs, *options)
        with session.lock:
            if self._check.left <= 0 or self._check.leaves_out():
                self._end_checks()
                return self._run(args, kwargs, *options)
            with session.call("check"):
                values = self._inputs.bind(args, kwargs, ahead=True)
            subset = self._outputs.check_subset(options[0], self)
            call = functools.partial(Function._run, self, args, kwargs, *options)
            try:
                return self._check.run(call, values, subset, *options[1:])
            finally:
                if self._check.left <= 0:
                    self._end_checks()

    def _run_whole(self, args, kwargs, output_subset, batch, batch_s, num_slices):
        """Run a function that divides nothing: each rank gets all rows that the master selects."""
        if num_slices != 1:
            raise ValueError(f"num_slices={num_slices}, but each rank of {self} computes all rows.")
        if batch is not None:
            values = self._inputs.bind(args, kwargs)
            args = selected(self._inputs, values, batch, self._source.rows_of_all)
            kwargs = {}
        return Function._run(self, args, kwargs, output_subset, None, batch_s, num_slices)

    def _end_checks(self):
        with contextlib.suppress(AttributeError):  # a call in a signal handler may have ended them
            del self._run

    def _make_ready(self, num_slices):
        """Compile the variant for so many slices; send the workers the variants that they lack."""
        if num_slices > 1 and self._description.updates and self._sliced is None:
            compiled = self._recipe.compile_sliced()
            self._session.registry.add_variant(self._key, SLICED, compiled)
            self._sliced = compiled
        if self._key in self._session.registry.pending:
            self._session.registry.distribute(self._key)

    def as_theano(
        self,
        *args: ArrayLike,
        output_subset: Sequence[int] | Sequence[str] | None = None,
        **kwargs: ArrayLike,
    ) -> np.ndarray | list[np.ndarray] | dict[str, np.ndarray]:
        """Run the function in the master only, as ``theano.function`` would have made it.

        It applies updates to the master's shared variables only, and works before `distribute` and
        after `close`, too.

        Raises
        ------
        TypeError, ValueError
            For wrong arguments, as in a call.
        """
        values = self._inputs.bind(args, kwargs, here=True)
        arrays = list(map(self._inputs.array, range(len(values)), values))
        subset = self._outputs.check_subset(output_subset, self)
        return self._outputs.pack(_host.run(self._compiled, arrays, subset), subset)

    def build_inputs(
        self,
        *args: ArrayLike,
        force_cast: bool = False,
        oversize: float = 1.0,
        minibatch: bool | Sequence[bool] = False,
        **kwargs: ArrayLike,
    ) -> Data | tuple[Data, ...]:
        """Make a Data of each value, for each input in order.

        Parameters
        ----------
        *args, **kwargs
            One array for each input, by position or by the name of the variable.
        force_cast, oversize
            As in :func:`~synkhronos.data`.
        minibatch : bool or list of bool
            For all inputs, or one for each.

        Returns
        -------
        Data or tuple of Data
            One Data, not in a tuple, if the function has one input.

        Raises
        ------
        SessionError
            After :func:`~synkhronos.close`.
        TypeError, ValueError
            For too many or too few values, unknown names, values that don't fit their variable, and
            a `minibatch` of another length.
        SharedMemoryFull
            When the shared memory is full.
        """
        values = self._inputs.bind_data(args, kwargs)
        batches = minibatch if isinstance(minibatch, (list, tuple)) else [minibatch] * len(values)
        if len(batches) != len(values):
            raise ValueError(
                f"minibatch must be one bool or one for each of {count(len(values), 'input')}, got "
                f"{minibatch!r}."
            )
        built = tuple(
            data(value, var=variable, minibatch=batch, force_cast=force_cast, oversize=oversize)
            for value, variable, batch in zip(values, self._inputs.variables, batches)
        )
        return built[0] if len(built) == 1 else built

    def _release(self) -> None:
        """Give back the shared memory of plain arrays and of indices; `close` calls this."""
        self._inputs.release()
        self._requests.release()

    def get_shared(self) -> list[SharedVariable]:
        """Return the shared variables that the function uses or updates."""
        return list(self._compiled.get_shared())

    @property
    def value(self) -> Values:
        """The values that inputs have between calls, as in Theano: ``f.value[x]``, or ``f[x]``.

        Only an input made with ``In(x, value=...)`` has one. If it has an update or a container,
        each rank keeps a value: reading gives that of the master, setting sets all ranks. Otherwise
        the value is a default; a value that is set replaces it in the next call. The keys are
        variables, names and positions of inputs, and shared variables, which can only be read here.
        """
        return Values(self, self._inputs, self.get_shared())

    @property
    def container(self) -> Containers:
        """The same values behind objects with a `value`, as in Theano: ``f.container[x].value``."""
        return Containers(self.value)

    def __getitem__(self, item):
        return self.value[item]

    def __setitem__(self, item, value):
        self.value[item] = value

    def __contains__(self, item):
        return item in self.value

    @property
    def maker(self) -> Any:
        """The master's ``FunctionMaker`` of Theano; ``f.maker.fgraph`` is the optimized graph."""
        return self._compiled.maker

    @property
    def profile(self) -> Any:
        """The master's ``ProfileStats`` of Theano, if `profile` was given to :func:`function`."""
        return self._compiled.profile

    @property
    def fn(self) -> Any:
        """The master's compiled code, as in Theano, for tools that print functions."""
        return self._compiled.fn

    @property  # type: ignore[misc]
    def __class__(self):
        # Theano's tools, such as debugprint, and libraries ask isinstance(f, theano Function).
        return _host.CompiledFunction

    def copy(
        self,
        share_memory: bool = False,
        swap: dict[SharedVariable, SharedVariable] | None = None,
        delete_updates: bool = False,
        name: str | None = None,
        profile: Any = None,
    ) -> Function:
        """Compile another function like this one, on the same shared variables.

        Inputs that were made with ``In(x, value=..., update=...)`` begin with their first value.

        Parameters
        ----------
        share_memory : bool
            As in Theano, but without an effect: the copy has memory of its own.
        swap : dict of shared variable, optional
            Shared variables of this function -> others of the same type, in their place.
        delete_updates : bool
            If true, the copy has no updates.
        name : str, optional
            By default the name of this function with "copy" after it.
        profile
            As in :func:`function`.

        Raises
        ------
        SessionError
            After :func:`~synkhronos.close`.
        TypeError, ValueError
            For arguments of the wrong kind, and variables that the function does not use.

        Examples
        --------
        >>> import theano
        >>> import synkhronos as synk
        >>> synk.fork(2)
        2
        >>> a, b = theano.shared(1), theano.shared(10)
        >>> f = synk.function([], (a, None), updates=[(a, a + 1)], name="f")
        >>> g = f.copy(swap={a: b})
        >>> int(f()), int(f()), int(g()), int(g()), g.name
        (1, 2, 10, 11, 'f copy')
        >>> synk.close()
        """
        self._require_session()
        truth("share_memory", share_memory)
        without_updates = truth("delete_updates", delete_updates)
        swapped = signature.check_swap(swap, self.get_shared())
        source = self._source._replace(
            inputs=parameters.for_copy(self._source.inputs, without_updates)
        )
        if swapped:
            defaults = _host.default_updates(self._compiled, self._recipe.updates)
            source = signature.swap_variables(source, swapped, defaults)
        keywords = {**source.keywords, "profile": profile}
        keywords["name"] = f"{self.name} copy" if name is None else str(name)
        if without_updates:
            source = source._replace(updates=[], update_modes=[])
            keywords["no_default_updates"] = True
            keywords["on_unused_input"] = "ignore"  # only the updates may have used an input
        return make(source._replace(keywords=keywords))

    def __copy__(self):
        return self.copy()

    def __reduce_ex__(self, protocol):
        raise TypeError(
            f"{self} can't be pickled or copied: it belongs to this session. Call it here, not in a"
            " pool of processes: its ranks share the work. To keep it, pickle the expressions that "
            "it was made of, and call function() again where they are loaded; its copy() makes a "
            "copy in this session."
        )

    def __str__(self):
        return f"Function {self.name!r}" if self.name else "Function"

    def __repr__(self):
        modes = ", ".join(map(repr, self.output_modes))
        return f"<{self}({self._inputs}) -> [{modes}] on {count(self._session.n_ranks, 'rank')}>"

    def _repr_mimebundle_(self, **kwargs):  # IPython would show __class__, which is Theano's
        return {"text/plain": repr(self)}


def function(
    inputs: Sequence[Input],
    outputs: Output | Sequence[Output] | dict[str, Output] | None = None,
    bcast_inputs: Sequence[Input] | None = None,
    updates: dict[SharedVariable, Variable] | Sequence[Update] | None = None,
    givens: dict[Variable, Variable] | Sequence[tuple[Variable, Variable]] | None = None,
    sliceable_shareds: list[SharedVariable] | None = None,
    *,
    check: bool | int | str | None = None,
    axes: dict[Variable, int] | None = None,
    serial_random: bool = False,
    **kwargs: Any,
) -> Function:
    """Compile a Theano function that will run on all ranks.

    Each rank runs it on its part of the scattered inputs, and applies its updates to its own copy
    of the shared variables; the outputs are reduced to the master.

    Parameters
    ----------
    inputs : list of theano variable, In, or tuples as in Theano
        The inputs to scatter, along axis 0 or that of `axes` (every rank gets inputs without axes
        whole). Each rank keeps the whole value of an ``In(x, value=..., update=...)``:
        :doc:`theano_function`.
    outputs : variable, (variable, mode), or list, tuple or dict of str of these, optional
        The expressions to compute, each perhaps in an ``Out``, with the mode by which it is reduced
        over the ranks: ``"avg"`` (the default; a rank's weight is its number of rows, so the result
        is the mean over all rows; equal weights if nothing is scattered; integers and bools are
        averaged in floatX), ``"sum"`` or another of the :ref:`operations <operations>`,
        ``"gather"`` (joined along axis 0, or that of `axes`, in rank order; numbers are stacked),
        or None (the master's own value). With the prefix ``c_``, as in ``"c_sum"``, the CPU reduces
        where NCCL would.
    bcast_inputs : list, as `inputs`, optional
        The inputs that every rank gets whole; in calls they come after `inputs`.
    updates : list of (shared variable, expression[, mode]) or dict, optional
        As in Theano; each rank applies them to its own variables. In a call with slices, every
        slice computes with the old values; the results are accumulated with the update's mode
        (``"avg"`` by default) and applied once. Default updates are accumulated with ``"avg"``.
    givens, **kwargs
        Passed to ``theano.function``: mode, name, no_default_updates, on_unused_input, profile (of
        the master's part), allow_input_downcast, rebuild_strict, accept_inplace.
    sliceable_shareds : list of shared variable, optional
        Shared variables whose rows ``batch_s`` and ``num_slices`` select on each rank. The
        function must use them and may not update them.
    check : {"first"}, bool or int, optional
        When to give a PortingWarning. ``"first"``: examine the graph when the function is made, and
        warn of each output mode, and each operation that reduces a gradient, which does not make
        the value of serial Theano for all inputs; and warn in the next call that computes with a
        variable which each rank has updated with its own rows. Outputs and updates without a rule
        are compared with serial Theano, in some calls that take it at most 0.3 s: :doc:`checks`
        has the conditions. A number: also compare so many first calls (true: 3) as a whole, and
        warn of each output and update that differs by more than rounding, with the likely cause.
        False or 0: neither. By default the `check` of :func:`~synkhronos.fork`.
    axes : dict of variable to int, optional
        The axis of rows of inputs and outputs where it is not 0: ``{x: 1}`` for time-major data.
        Inputs are scattered, selected and sliced along it, and outputs of mode ``"gather"`` joined.
    serial_random : bool
        If true, the random numbers, such as dropout masks, are those of serial Theano: all ranks
        keep the same random state, draw the numbers of the whole minibatch, and take their rows. If
        false, each rank draws for its own rows from a stream of its own.

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
    >>> mean, joined, largest = f(np.arange(5.0))
    >>> float(mean), float(largest)
    (2.0, 4.0)
    >>> synk.close()
    """
    return make(
        checked(
            inputs, outputs, bcast_inputs, updates, givens, sliceable_shareds, check=check,
            axes=axes, serial_random=serial_random, **kwargs,
        )
    )  # fmt: skip


def checked(
    inputs, outputs=None, bcast_inputs=None, updates=None, givens=None, sliceable_shareds=None, *,
    check=None, axes=None, serial_random=False, **kwargs,
):  # fmt: skip
    """Check the arguments of `function`, and return them as a `Source`."""
    session = current("function()")
    parameters.check_keywords(kwargs, function)
    check = session.check if check is None else number_of_calls("check", check)
    downcast = kwargs.get("allow_input_downcast")
    input_list = parameters.check_inputs("inputs", inputs, downcast, scattered=True)
    input_list += parameters.check_inputs("bcast_inputs", bcast_inputs, downcast, scattered=False)
    output_signature = signature.OutputSignature(outputs)
    pairs, update_modes = signature.check_updates(updates)
    givens = signature.check_givens(givens)
    signature.check_mode(kwargs.get("mode"))
    parameters.check_tuples((inputs, bcast_inputs), updates, givens, kwargs.get("profile"))
    parameters.check_kept(input_list, givens)
    name = kwargs.get("name")
    # A plain str, because workers may be unable to import the class of another one.
    name = "{}:{}".format(*line_of_user()) if name is None else str(name)
    keywords = {**kwargs, "givens": givens, "name": name}
    input_list = signature.check_axes(axes, input_list, output_signature, sliceable_shareds)
    signature.check_lengths(input_list)
    draws_all = truth("serial_random", serial_random)
    if draws_all and any(each.axis for each in input_list):
        raise ValueError(
            "serial_random=True draws for rows on axis 0, but axes names another axis. Leave one "
            "of the two out."
        )
    in_order = input_list, bool(bcast_inputs), output_signature, pairs, update_modes
    return Source(*in_order, sliceable_shareds, keywords, check, draws_all)


def make(source):
    """Compile a function from the checked arguments of `function`."""
    session = current("function()")
    # A copy, because its variables are replaced here, and the source may be used again.
    rewritten, numbers = take_out_row_numbers(source._replace(outputs=copy.copy(source.outputs)))
    if rewritten.draws_all:
        rows = [each.variable for each in rewritten.inputs if each.is_scattered]
        rows += [each.variable for each in numbers]
        rows += rewritten.sliceables if isinstance(rewritten.sliceables, list) else []
        rewritten.outputs.variables, updates, keywords = _host.draws_of_all_rows(
            rows, rewritten.outputs.variables, rewritten.updates, rewritten.keywords
        )
        rewritten = rewritten._replace(updates=updates, keywords=keywords)
    rewritten.outputs.keep_on_device(session.comm.outputs.reduces)
    recipe = Recipe(rewritten, numbers)
    compiled = recipe.compile_plain()
    _check_states(session, compiled, rewritten.draws_all)
    parameters.refuse_destroyed(compiled, recipe.inputs)
    recipe.sliceables = signature.check_sliceables(
        rewritten.sliceables, compiled.get_shared(), recipe.updated
    )
    return Function(session, compiled, recipe.given, rewritten.outputs, recipe, source)


def _check_states(session, compiled, draws_all):
    """Mark random states as equal on all ranks if `draws_all`; refuse those of other functions."""
    used = [v for v in compiled.get_shared() if _host.is_random_state(v)]
    mixed = [v for v in used if not draws_all and _host.is_state_equal(v)]
    if draws_all:
        known = {v for function in session.registry.functions() for v in function.get_shared()}
        mixed = [v for v in used if v in known and not _host.is_state_equal(v)]
    if mixed:
        raise ValueError(
            f"serial_random={draws_all}, but another function that draws from {mixed[0]} has "
            f"serial_random={not draws_all}. Give both the same, or let them draw from two "
            "RandomStreams."
        )
    if draws_all:
        for variable in used:
            _host.keep_state_equal(variable)


def distribute() -> None:
    """Send the workers all functions that they do not have yet.

    Calling it is optional: the first call of a function sends it. It sends only new functions, so
    it may be called again. A shared variable is sent once, with the master's value at that moment,
    also if several functions use it. Each rank but rank 0 moves random states to a stream of its
    own.

    Raises
    ------
    SessionError
        Before :func:`~synkhronos.fork`.
    TypeError
        When a function can't be pickled.

    Examples
    --------
    >>> import theano.tensor as T
    >>> import synkhronos as synk
    >>> synk.fork(2)
    2
    >>> x = T.dvector("x")
    >>> f = synk.function([x], (x.sum(), "sum"))
    >>> synk.distribute()  # else the first call does it
    >>> float(f([1, 2, 3]))
    6.0
    >>> synk.close()
    """
    session = current("distribute()")
    with session.lock:
        session.refuse_nesting()
        with session.inside:
            session.registry.distribute()
