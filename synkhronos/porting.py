"""`parallel`: in its block ``theano.function`` makes functions that run on all ranks.

    theano.function(...) ──▶ divided over the ranks (_host) ──▶ ParallelFunction
                         └─ can't be divided ──▶ the Theano function, in the master

After each call the master has the values that serial Theano has. So a call may run on all ranks or
in the master alone; variables that only the master has set are broadcast before the next call on
all ranks.
"""

from __future__ import annotations

import contextlib
import functools
from time import perf_counter
from typing import Any, ContextManager, Sequence

import numpy as np

from synkhronos import _host, functions
from synkhronos._calls.check import number_of_calls
from synkhronos._machine.interrupts import raised_here
from synkhronos._machine.log import log
from synkhronos._session import commands
from synkhronos._session.current import Current as _Current
from synkhronos._session.current import current
from synkhronos._session.session import SessionState
from synkhronos._wording import count, line_of_user, one_line, sentence, whole_number
from synkhronos.comm.reports import raised_by_rank
from synkhronos.errors import SharedMemoryFull, WorkerError
from synkhronos.profiling.parallel import BlockCounter, ParallelReport
from synkhronos.session import close, fork

__all__ = ["ParallelFunction", "parallel", "parallel_report"]

_DIFFERENT_LENGTHS = (
    "its inputs have different numbers of rows",
    "Give all of them equally many rows; an input that is not part of the minibatch, such as "
    "weights of classes, can be a shared variable.",
)
_FEW_ROWS = "its inputs have fewer rows than there are ranks", "Use larger minibatches."
_FIXED_ROWS = (
    "its graph has a reshape to another number of rows, or one that would split a row",
    "Reshape to (x.shape[0], ...), and use minibatches of one size.",
)
_OTHER_ARGUMENTS = "its arguments are not arrays with rows", ""  # Theano says what is wrong
_SET_INPUTS = "its inputs may have been given other values", "Pass them in each call."
_CLOSED = "the session has been closed", "Call it in the block, or in a session of fork()."
_NO_ROOM = "shared memory has no room for its inputs and outputs"


def parallel(
    n_parallel: int | None = None,
    *,
    devices: Sequence[str] | None = None,
    threads_per_rank: int | None = None,
    check: bool | int = True,
) -> ContextManager[int]:
    """Make ``theano.function`` build functions for all ranks in a ``with`` block.

    With PyTensor it is ``pytensor.function``, which PyMC's ``pm.compile`` calls, too.

    It is for libraries and scripts that know nothing of ranks: they get the values that serial
    Theano computes, to rounding. Inputs with axes are scattered along axis 0. The graph is divided:
    sums over rows are added up over the ranks, rows are gathered, and gradients are reduced before
    an update uses them. A function without an input with rows, or with an operation that has no
    rule for rows, stays a Theano function, which runs in the master. A call runs in the master,
    too, if its inputs have different numbers of rows or fewer rows than there are ranks, or if
    shared memory has no room. :func:`parallel_report` shows which functions these are, and why; the
    first such call of a function that takes a second or more warns with a PortingWarning.
    Exceptions are those of serial Theano, with a :class:`~synkhronos.WorkerError` as their cause;
    no update is applied then, except those that serial Theano, too, makes before it raises.

    Only random numbers differ: each rank draws those of its rows from a stream of its own.

    Parameters
    ----------
    n_parallel, devices, threads_per_rank
        As in :func:`~synkhronos.fork`. Without a session the block forks one, and closes it at its
        end; its functions can still be called, in the master. If there is a session already, the
        functions of the block run on all ranks until it is closed.
    check : bool or int
        As in :func:`~synkhronos.function`, but functions that draw random numbers are not
        compared.

    Returns
    -------
    context manager
        Its value is the number of ranks.

    Raises
    ------
    TypeError, ValueError
        For arguments of the wrong kind; if there is a session already, also for another number of
        ranks, devices or threads. The beginning of the block raises as ``fork`` does, too.

    Notes
    -----
    Values that the script gives shared variables are broadcast (as with ``fork(follow=True)``).
    Functions that are compiled before the block, after it, or in another thread stay Theano
    functions; the variables that they update are broadcast, too.

    Examples
    --------
    >>> import numpy as np, theano, theano.tensor as T
    >>> import synkhronos as synk
    >>> x, w = T.dmatrix("x"), theano.shared(np.ones(2), "w")
    >>> loss = T.sqr(T.dot(x, w)).mean()
    >>> with synk.parallel(2):
    ...     step = theano.function([x], loss, updates=[(w, w - 0.1 * T.grad(loss, w))])
    ...     round(float(step([[1.0, 0.0], [2.0, 1.0], [0.0, 3.0]])), 6)
    6.333333
    >>> w.get_value().round(6)
    array([0.533333, 0.2     ])
    """
    check = number_of_calls("check", check)
    if n_parallel is not None:
        n_parallel = whole_number("n_parallel", n_parallel, 1)
    session = _Current.session
    if session is not None:
        asked = {"devices": devices, "threads_per_rank": threads_per_rank}
        if n_parallel != session.n_ranks:
            asked["n_parallel"] = n_parallel
        for name, value in asked.items():
            if value is not None:
                raise ValueError(
                    f"{name} was given, but there is a session of "
                    f"{count(session.n_ranks, 'rank')} already. Leave it out, or close() the "
                    "session before."
                )
    return _block(n_parallel, devices, threads_per_rank, check)


@contextlib.contextmanager
def _block(n_parallel, devices, threads_per_rank, check):
    intercepting = _host.intercept(functools.partial(_make, check))  # may refuse: before fork()
    is_mine = _Current.session is None
    if is_mine:
        fork(n_parallel, devices=devices, threads_per_rank=threads_per_rank, follow=True)
    session = current("parallel()")
    host_of = session.gate.host_of
    pids = [pid if host_of(rank) is None else None for rank, pid in enumerate(session.pids)]
    if _Current.report is None or not _Current.report.is_of(session, pids):
        _Current.report = BlockCounter(session, pids)
    recorder = _Current.report
    try:
        session.changes.follow_from_now()
        with intercepting:
            yield session.n_ranks
    finally:
        recorder.note_cpu()
        if is_mine and _Current.session is session:
            close()


def parallel_report() -> ParallelReport:
    """Return which functions of :func:`parallel` run on all ranks, and why others don't.

    Returns
    -------
    ParallelReport
        It covers all blocks in the present session, or else in the last session that had a block.
        It is shown as tables: calls, seconds, the workers' part of this time (half, if all calls
        ran on 2 ranks), why calls ran in the master alone, and what to write to have them divided.
        Its attributes have the numbers. ``synkhronos run --parallel`` prints it at the script's
        end.

    Examples
    --------
    >>> import theano, theano.tensor as T
    >>> import synkhronos as synk
    >>> x = T.dmatrix("x")
    >>> with synk.parallel(2):
    ...     total = theano.function([x], x.sum(), name="total")
    ...     turned = theano.function([x], x[::-1], name="turned")
    ...     _ = total([[1.0], [2.0], [3.0]]), turned([[1.0], [2.0], [3.0]])
    >>> total, turned = sorted(synk.parallel_report().functions, key=lambda each: each.name)
    >>> total.is_divided, total.calls, total.calls_on_ranks
    (True, 1, 1)
    >>> turned.is_divided, turned.reason
    (False, 'computes Subtensor of rows that are selected by their number')
    """
    return ParallelReport() if _Current.report is None else _Current.report.report()


def _make(check, compile_serially, arguments):
    """Return a ParallelFunction of arguments of ``theano.function``, or the Theano function."""
    name = arguments["name"]
    name = "{}:{}".format(*line_of_user()) if name is None else str(name)
    try:
        return ParallelFunction(compile_serially, name, arguments, check)
    except _host.CannotDivide as error:
        reason, instead = str(error), error.instead
    except raised_here(Exception) as error:
        # If the arguments are wrong, Theano raises its own error below.
        reason, instead = f"could not be divided: {one_line(error)}", ""
        log.debug("The error was raised here:", exc_info=error)
    log.info("%s stays a Theano function: it %s", one_line(name), sentence(reason))
    return compile_serially(_Current.report.function(name, reason, instead).alone)


class ParallelFunction:
    """A function that ``theano.function`` made in a block of :func:`parallel`.

    It is called as the Theano function would be. Other attributes, such as ``maker``, are those of
    the Theano function, which is compiled when it is first needed. ``isinstance`` takes it for one.
    """

    def __init__(self, compile_serially, name, arguments, check):
        variables, self._names, self._defaults = _inputs_of(arguments)
        outputs = arguments["outputs"]
        self._is_list = outputs is None or isinstance(outputs, (list, tuple))
        chosen = [] if outputs is None else list(outputs) if self._is_list else [outputs]
        chosen = [getattr(each, "variable", each) for each in chosen]  # of theano.Out
        self._keys = arguments["output_keys"]
        updates = arguments["updates"] or []
        updates = list(updates.items() if hasattr(updates, "items") else updates)
        replaced = arguments["givens"], arguments["no_default_updates"]
        optional = [i for i, each in enumerate(self._defaults) if each is not None]
        divided = _host.divide(variables, chosen, updates, *replaced, optional)
        self.name = name
        self._compile_serially, self._theano = compile_serially, None
        self._axes, self._merged = divided.axes, divided.merged
        self._dtypes, self._n_rows = divided.dtypes, divided.n_rows
        # The axis of the rows of each input that has some.
        self._scattered = {i: a for i, a in enumerate(divided.scattered) if a is not None}
        others = [i for i, axis in enumerate(divided.scattered) if axis is None]
        self._order = [*self._scattered, *others]
        self._session = current("theano.function in a block of parallel()")
        self._variables = variables
        self._calls = _Current.report.function(name)
        self._is_serial, self._count = False, None
        self._n_totals = len(divided.totals)
        counted = divided.totals + divided.remainders
        downcast = arguments["allow_input_downcast"]
        options = {"no_default_updates": True, "allow_input_downcast": downcast}
        if counted:
            self._count = _host.compile_function(
                variables, counted, on_unused_input="ignore", **options
            )
            self._count.trust_input = False
        self._has_updates = bool(divided.updates)
        targets = [target for target, _ in divided.updates]
        self._updated = [each for each in targets if not _host.is_random_state(each)]
        source = functions.checked(
            [divided.inputs[i] for i in self._scattered],
            list(divided.outputs),
            bcast_inputs=[divided.inputs[i] for i in others],
            updates=divided.updates,
            mode=arguments["mode"],
            name=name,
            on_unused_input=arguments["on_unused_input"],
            check=0 if divided.draws else check,
            **options,
        )
        self._on_ranks = functions.make(source._replace(is_proved=True))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function on all ranks, or in the master if the call can't be divided."""
        begin = perf_counter()
        is_plain = not kwargs and len(args) == len(self._names)
        values = args if is_plain else self._bind(args, kwargs)
        why_alone = self._why_alone(values)
        if why_alone is None:
            try:
                results = self._call_on_ranks(values)
                self._calls.on_ranks(perf_counter() - begin)
                return results
            except SharedMemoryFull as error:
                if self._has_updates and not error._is_before_ranks:
                    raise  # a rank may have updated variables in place
                why_alone = _NO_ROOM, str(error)
        result = self.serial(*args, **kwargs)
        self._calls.alone(perf_counter() - begin, *why_alone)
        return result

    def _call_on_ranks(self, values):
        try:
            if any(self._scattered.values()):
                values = list(values)
                for i, axis in self._scattered.items():
                    if axis:
                        array = _host.cast_value(self._variables[i], values[i])
                        values[i] = np.moveaxis(array, axis, 0)
            results = self._on_ranks(*[values[i] for i in self._order])
        except WorkerError as error:
            self._undo_updates(error.rank)
            original = raised_by_rank(error)
            if original is None:
                raise
            raise original from error
        except BaseException:
            for variable in self._updated:  # the next call broadcasts the master's values
                _host.tell(variable)
            raise
        if any(self._axes):
            results = list(map(_placed, results, self._axes, self._merged))
        for i, dtype in self._dtypes:
            results[i] = results[i].astype(dtype)
        if self._keys is not None:
            return dict(zip(self._keys, results))
        return results if self._is_list else results[0]

    def _undo_updates(self, rank):
        """Give all ranks the values of `rank`, which raised: others may have applied updates."""
        arrays = [each for each in self._updated if _host.is_array_variable(each)]
        # `broadcasts=False`: the master's values, which it would send, may be updated already.
        with self._session.call("broadcast", broadcasts=False) as session:
            keys = session.registry.keys_of(arrays)
            if keys:
                session.run(commands.Broadcast(keys, rank))
                session.changes.note_undone(keys)

    def _bind(self, args, kwargs):
        """Return the values of all inputs in order; None where Theano should say what is wrong."""
        rest = self._names[len(args) :]
        if not set(kwargs) <= set(rest) or len(set(rest)) < len(rest):
            return None
        values = {**dict(zip(rest, self._defaults[len(args) :])), **kwargs}.values()
        return None if any(each is None for each in values) else [*args, *values]

    def _why_alone(self, values):
        """Return why a call can't run on all ranks, and what to write instead; None if it can."""
        if values is None or len(values) != len(self._order):
            return _OTHER_ARGUMENTS
        if self._is_serial:
            return _SET_INPUTS
        if self._session.state is not SessionState.OPEN and not self._joins_current():
            return _CLOSED
        try:
            lengths = {
                np.shape(values[i])[axis] if axis else len(values[i])
                for i, axis in self._scattered.items()
            }
            if self._count is not None:
                counted = self._count(*values)
                lengths.update(int(each) for each in counted[: self._n_totals])
                if any(counted[self._n_totals :]):
                    return _FIXED_ROWS
        except (TypeError, ValueError, IndexError):
            return _OTHER_ARGUMENTS
        if len(lengths) != 1:
            return _DIFFERENT_LENGTHS
        if self._n_rows not in (None, *lengths):
            return _FIXED_ROWS
        return _FEW_ROWS if lengths.pop() < self._session.n_ranks else None

    def _joins_current(self):
        """Return whether the current session adopts functions of closed ones; if so, join it."""
        session = _Current.session
        if session is None or session.state is not SessionState.OPEN or not session.adopts:
            return False
        session.changes.follow_from_now()
        self._session = session
        return True

    @property
    def serial(self):
        """The Theano function; it runs in the master, and the next call broadcasts its updates."""
        if self._theano is None:
            self._theano = self._compile_serially()
        return self._theano

    @property
    def __class__(self):
        return _host.CompiledFunction

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in ("container", "input_storage", "value"):
            self._may_have_set_inputs()
        return getattr(self.serial, name)

    def __getitem__(self, item):
        return self.serial[item]

    def __setitem__(self, item, value):
        self._may_have_set_inputs()
        self.serial[item] = value

    def _may_have_set_inputs(self):
        # From now on only the Theano function knows the values of its inputs.
        if any(each is not None for each in self._defaults):
            self._is_serial = True

    def __contains__(self, item):
        return item in self.serial

    def __reduce_ex__(self, protocol):
        # Copies and pickles are Theano functions.
        return _as_it_is, (self.serial,)

    def __repr__(self):
        return f"<ParallelFunction {self.name!r} of {self._on_ranks!r}>"

    def _repr_mimebundle_(self, **kwargs):  # IPython would show __class__, which is Theano's
        return {"text/plain": repr(self)}


def _placed(result, axis, is_merged):
    """Move the rows of a result to an axis; if `is_merged`, merge it with the one before."""
    if not axis:
        return result
    result = np.moveaxis(result, 0, axis)
    if not is_merged:
        return result
    shape = result.shape
    return result.reshape(*shape[: axis - 1], shape[axis - 1] * shape[axis], *shape[axis + 1 :])


def _as_it_is(value):
    return value


def _inputs_of(arguments):
    """Return the inputs' variables, names and default values; raise CannotDivide without a rule."""
    if arguments["params"] is None:
        raise _host.CannotDivide(
            "was given tuples as inputs",
            "Call theano.function, and write theano.In in place of a tuple.",
        )
    usual = {"accept_inplace": [False], "rebuild_strict": [True], "profile": [None, False]}
    for name, values in usual.items():
        if arguments[name] not in values:
            raise _host.CannotDivide(f"was given {name}={arguments[name]!r}")
    inputs = arguments["params"]
    variables = [getattr(each, "variable", each) for each in inputs]
    values = [getattr(each, "value", None) for each in inputs]
    for each, value in zip(inputs, values):
        if getattr(each, "strict", False) or getattr(each, "allow_downcast", None) is not None:
            raise _host.CannotDivide(f"has an input with rules of its own for casts, {each}")
        if getattr(each, "update", None) is not None:
            raise _host.CannotDivide(f"has an input with an update, {each}")
        if hasattr(value, "storage") or hasattr(value, "container"):
            raise _host.CannotDivide(f"has an input whose value is a variable's, {each}")
    return variables, [each.name for each in inputs], values
