"""How many ranks, with how many threads each, are fastest for a function: measured in turns.

    advise()   fork ─────────────▶ a process for each way: k ranks, with t threads each
               a number of calls ▶ its own session calls the function on the same arguments
                                 ◀ their seconds

These processes are forked from the caller's, so they have its compiled functions and the values of
its variables. They change copies only; the caller's ranks sleep.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import numbers
import os
import signal
import warnings
from dataclasses import dataclass
from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np

from synkhronos import _host, session
from synkhronos._calls.arguments import OPTIONS, rows_there, selected
from synkhronos._machine import devices, processes
from synkhronos._machine.interrupts import interrupts_held, interrupts_raised_later
from synkhronos._machine.load import Load, LoadWatch
from synkhronos._machine.log import log
from synkhronos._session.current import Current
from synkhronos._wording import count, sentence, shown, without_folder
from synkhronos.errors import SessionError
from synkhronos.functions import Function
from synkhronos.inputs import Data, data
from synkhronos.profiling.tables import Tables
from synkhronos.tools import turns

__all__ = ["Advice", "advise"]

_NOISE = 1.03  # a smaller speedup does not pay for more ranks
_UNSTEADY = 1.1  # slowest round / best round of a way, from which on the text mentions it
_ROUNDS, _MOST_CALLS = 5, 10_000
_END_SECONDS = 5.0


class Way(NamedTuple):
    """A number of ranks, and of threads in each; with 0 ranks the host's own function runs."""

    ranks: int
    threads: int

    def __str__(self):
        if not self.ranks:
            return f"serial {_host.title}, {count(self.threads, 'thread')}"
        return f"{count(self.ranks, 'rank')} with {count(self.threads, 'thread')} each"


@dataclass(frozen=True, repr=False)
class Advice(Tables):
    """What :func:`advise` has measured; its text is a table with the line to write.

    Attributes
    ----------
    function : str
        The name of the function.
    rows : int
        The rows of a call, on all ranks.
    cores : int
        The cores that this process may use.
    seconds : dict
        (ranks, threads of each) -> seconds of a call: the median of the best round. 0 ranks are
        serial Theano (or PyTensor).
    slowest : dict
        The same for the slowest round.
    busy_cores : float
        The cores that other programs kept busy meanwhile, on average.
    ranks, threads : int
        The fastest way: among ways on ranks that differ by less than 3 %, the one with the fewest
        ranks; serial only if it is more than 3 % faster than that.
    gain : float
        How much faster it is than serial Theano with one thread.
    """

    function: str
    rows: int
    cores: int
    seconds: dict[tuple[int, int], float]
    slowest: dict[tuple[int, int], float]
    others: Load

    @property
    def busy_cores(self) -> float:  # noqa: D102 - the class has it
        return self.others.cores

    @property
    def ranks(self) -> int:  # noqa: D102
        return choose(self.seconds).ranks

    @property
    def threads(self) -> int:  # noqa: D102
        return choose(self.seconds).threads

    @property
    def gain(self) -> float:  # noqa: D102
        return self.seconds[0, 1] / self.seconds[self.ranks, self.threads]

    @property
    def lines(self) -> str:
        """The lines to write."""
        if not self.ranks:
            variable = "" if self.threads == self.cores else "  # and OMP_NUM_THREADS=1"
            plain = f"{_host.library.__name__}.function"
            return (
                f"{plain}(...) in place of synk.function(...), or {plain}(inputs, loss, "
                f"updates=rule(loss, params, ...)) in place of make_train_step(...){variable}"
            )
        gpu = ", use_gpu=False" if devices.has_nvidia_driver() else ""
        names = ",".join(["cpu"] * self.ranks)
        return f"synk.fork({self.ranks}{gpu})  # or synk.fork() and SYNKHRONOS_DEVICES={names}"

    def _headline(self):
        return (
            f"{without_folder(self.function)}: a call with {count(self.rows, 'row')}, "
            f"{count(self.cores, 'core')}"
        )

    def _tables(self):
        columns = ["ranks", "threads", "best round", "slowest", "/ serial, 1 thread"]
        rows = []
        for way, seconds in self.seconds.items():
            ranks, threads = way
            times = [f"{1e3 * each:.3f}" for each in (seconds, self.slowest[way])]
            faster = f"{self.seconds[0, 1] / seconds:.2f}"
            rows.append([str(ranks) if ranks else "serial", str(threads), *times, faster])
        return [("Milliseconds of a call, medians", columns, rows)]

    def _notes(self):
        best = choose(self.seconds)
        gain = f"{self.gain:.2f} times as fast as serial {_host.title} with one thread"
        text = [f"Best: {best}" + (f", {gain}" if best != (0, 1) else ""), f"    {self.lines}"]
        unsteady = max(self.slowest[way] / self.seconds[way] for way in self.seconds)
        if unsteady > _UNSTEADY:
            text.append(f"Rounds of the same way differ by up to {100 * (unsteady - 1):.0f} %.")
        if self.others.is_high:
            text.append(
                f"Other programs kept {self.others}. This tells little: measure without them."
            )
        return text


def advise(
    step: Function,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    seconds: float = 2.0,
) -> Advice:
    """Measure how many ranks, with how many threads each, are fastest for a function.

    Few rows, or operations that BLAS divides over threads well, are often faster on one rank with
    all threads than on a rank for each core. Each way is measured in processes of its own, in
    turns: one rank with a thread for each core, two with half as many, ... and serial Theano with
    one thread and with all, without ``num_slices``. Nothing of the script changes, neither
    variables nor random numbers; its session, if there is one, sleeps meanwhile. All ways take
    memory at the same time.

    Parameters
    ----------
    step : Function
        Made by :func:`~synkhronos.function` or ``make_train_step``; its session may be closed.
    args, kwargs : tuple and dict, optional
        The arguments of a call, such as ``(x, y)`` and ``{"batch": rows}``: arrays, Data, and
        ``batch``, ``num_slices`` and ``output_subset``.
    seconds : float
        The time to measure each way, beside its start; five rounds of a call at least.

    Returns
    -------
    Advice
        Print it; or read its ``ranks``, ``threads``, ``gain``, ``lines`` and ``seconds``.

    Raises
    ------
    TypeError, ValueError
        If `step` is no such function, divides no inputs, or has sliceable shared variables; and for
        arguments that a call refuses, or without rows.
    SessionError
        For ranks on GPUs (each GPU has one rank) or on several machines, and if a way fails.

    Examples
    --------
    >>> import numpy as np, theano.tensor as T
    >>> import synkhronos as synk
    >>> synk.fork(2)
    2
    >>> x = T.dmatrix("x")
    >>> f = synk.function([x], T.dot(x, x.T).mean(), name="f")
    >>> advice = synk.advise(f, (np.ones((64, 8)),), seconds=0.01)
    >>> advice.rows, (0, 1) in advice.seconds, (1, advice.cores) in advice.seconds
    (64, True, True)
    >>> synk.close()
    """
    if not issubclass(type(step), Function):
        raise TypeError(
            "step must be a function that synk.function() or make_train_step() has made, without a "
            f"store, got {shown(step)}."
        )
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"args must be a tuple of a call's arguments, got {shown(args)}.")
    if not isinstance(kwargs, (Mapping, type(None))):
        raise TypeError(f"kwargs must be a dict of a call's keywords, got {shown(kwargs)}.")
    if not all(isinstance(name, str) for name in kwargs or ()):
        raise TypeError(
            f"kwargs must have names of inputs or options as keys, got {shown(kwargs)}."
        )
    if isinstance(seconds, bool) or not isinstance(seconds, numbers.Real):
        raise TypeError(f"seconds must be a number, got {shown(seconds)}.")
    if not 0 < seconds < 1e6:
        raise ValueError(f"seconds must be a number above 0, got {shown(seconds)}.")
    if step._recipe.sliceables or (kwargs or {}).get("batch_s") is not None:
        raise ValueError(
            "advise() divides the rows of inputs, but step has sliceable shared variables, of "
            "which each rank has rows of its own: measure a function that takes them as inputs."
        )
    current = Current.session
    if Current.link is not None:
        raise SessionError("advise() is for the ranks of one machine: start it without launch.")
    if set((current or step._session).devices) != {"cpu"}:
        raise SessionError("advise() is for ranks on CPU cores: each GPU has one rank.")
    with contextlib.ExitStack() as stack:
        if current is not None:
            stack.enter_context(current.lock)  # calls of other threads wait
            current.refuse_nesting()
        return _measure(stack, step, (tuple(args), dict(kwargs or {})), seconds)


def _measure(stack, step, arguments, seconds):
    cores, n_ranks = devices.usable_cores(), step._session.n_ranks
    devices.end_openmp_threads(cores)
    measured, ways = turns.Turns(seconds, _ROUNDS, _MOST_CALLS), [Way(0, 1)]
    for way in ways:  # grows when the first process has told the number of rows
        process = _MeasuringProcess(way)
        stack.push(process)
        with turns.shown(f"advise: {way} start{'' if way.ranks > 1 else 's'}"):
            known = process.start(step, arguments)
        if len(ways) == 1:
            rows = known
            if rows is None:
                raise ValueError(f"{step} divides no inputs: every rank would do all of the work.")
            if not rows:
                raise ValueError(
                    "args must have rows to divide over the ranks, got inputs without rows."
                )
            ways += layouts(cores, rows, n_ranks)
        measured.add(way, process.times)
    watch = LoadWatch()
    measured.take_all("advise: rounds")
    medians = {
        tuple(way): [float(np.median(each)) for each in rounds]
        for way, rounds in measured.rounds_of.items()
    }
    best, worst = ({way: each(found) for way, found in medians.items()} for each in (min, max))
    return Advice(step.name, rows, cores, best, worst, watch.others())


def layouts(cores: int, rows: int, n_ranks: int) -> list[Way]:
    """Return the ways to measure beside one serial thread.

    >>> [tuple(way) for way in layouts(4, 100, 3)]
    [(0, 4), (1, 4), (2, 2), (3, 1), (4, 1)]
    >>> [tuple(way) for way in layouts(1, 100, 1)]
    [(1, 1)]
    """
    numbers = {1 << power for power in range(cores.bit_length())} | {cores, n_ranks}
    possible = sorted(number for number in numbers if number <= min(cores, rows))
    serial = [Way(0, cores)] if cores > 1 else []
    return serial + [Way(number, cores // number) for number in possible]


def choose(seconds: Mapping[tuple[int, int], float]) -> Way:
    """Return the fastest way on ranks, with the fewest of them; or a serial one if that is faster.

    >>> tuple(choose({(0, 1): 4.0, (0, 2): 2.2, (1, 2): 2.2, (2, 1): 2.15}))
    (1, 2)
    >>> tuple(choose({(0, 1): 1.0, (0, 2): 1.0, (1, 2): 1.2, (2, 1): 1.1}))
    (0, 1)
    """

    def first(ways):
        limit = _NOISE * min(seconds[way] for way in ways)
        return min(way for way in ways if seconds[way] <= limit)

    on_ranks = first([way for way in seconds if way[0]])
    serial = first([way for way in seconds if not way[0]])
    # Noise is no reason to change a script that uses ranks.
    return Way(*(serial if _NOISE * seconds[serial] < seconds[on_ranks] else on_ranks))


class _MeasuringProcess:
    """A forked process that calls the function when it is asked, from `start` to `__exit__`."""

    def __init__(self, way):
        self._way, self._process = way, None

    def start(self, step, arguments):
        """Start the process; return the number of rows that ranks would divide, if it is serial."""
        with interrupts_held():  # a Ctrl-C before the last line would leave it running
            ends: list[int] = []
            try:
                ends += processes.make_pipe()
                ends += processes.make_pipe()
                asked, asks, answered, answers = ends
                of_call = step, arguments, self._way
                life = functools.partial(_serve, os.getpid(), *of_call, asked, answers)
                process = processes.ForkedProcess(life, (asked, answers))
            except OSError as error:
                for end in ends:
                    os.close(end)
                raise SessionError(f"advise() can't start {self._way}: {error}.") from error
            os.close(asked)
            os.close(answers)
            self._asks, self._lines, self._process = asks, os.fdopen(answered), process
        return self._hear()

    def __exit__(self, kind, error, trace):
        with interrupts_raised_later():
            process, self._process = self._process, None
            if process is None:
                return
            os.close(self._asks)  # then the process ends
            if kind is not None or not process.join(_END_SECONDS):
                processes.kill_all([process], _END_SECONDS)
            self._lines.close()
            process.close()

    def __del__(self):
        self.__exit__(SystemExit, None, None)  # a Ctrl-C between two exits leaves out the others

    def times(self, number):
        """Return the seconds of so many calls."""
        with contextlib.suppress(BrokenPipeError):  # `_hear` raises, as no answer comes
            os.write(self._asks, b"%d\n" % number)
        return self._hear()

    def _hear(self):
        """Return the next answer; raise an error that the process reports."""
        line = self._lines.readline()
        if not line:
            raise SessionError(f"advise(), {self._way}: the process has ended.")
        answer, error = json.loads(line)
        if error is None:
            return answer
        kind, text = error
        kinds = {"TypeError": TypeError, "ValueError": ValueError}
        if kind in kinds and self._way.ranks < 2:  # undivided rows: the arguments are wrong
            raise kinds[kind](text)
        raise SessionError(f"advise(), {self._way}: {kind}: {text}")


def _serve(parent, step, arguments, way, asked, answers):
    """Answer the requests of the parent, in a measuring process."""
    processes.end_with_parent(parent, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles it, and ends this process
    processes.leave_signals_to_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    warnings.simplefilter("ignore")  # the script's own call warns
    log.setLevel(logging.CRITICAL)
    os.environ.pop("SYNKHRONOS_PROFILE", None)
    with os.fdopen(asked) as lines, os.fdopen(answers, "w") as out:

        def tell(answer, error=None):
            print(json.dumps([answer, error]), file=out, flush=True)

        try:
            for variable in step.get_shared():
                value = _host.peek(variable)
                if isinstance(value, np.ndarray):
                    _host.replace(variable, np.array(value))  # the caller may share its memory
            begin = _on_ranks if way.ranks else _serially
            with begin(step, *arguments, way) as (call, rows):
                tell(rows)
                for line in lines:
                    tell([turns.seconds_of(call) for _ in range(int(line))])
        except BaseException as error:
            tell(None, [type(error).__name__, sentence(error)])


@contextlib.contextmanager
def _serially(step, args, kwargs, way):
    """Yield a call of the host's own function, and the number of rows that ranks would divide."""
    devices.limit_threads(way.threads)
    named = {name: value for name, value in kwargs.items() if name not in OPTIONS}
    inputs, compiled = step._inputs, step._compiled
    axes = inputs.axes_of_rows
    subset = step._outputs.check_subset(kwargs.get("output_subset"), step)
    batch = kwargs.get("batch")

    def chosen():
        values = inputs.bind(args, named, here=True, ahead=True)
        arrays = selected(inputs, values, batch, axes)
        return arrays, rows_there(axes, values, arrays) if axes else None

    def call():
        return _host.run(compiled, chosen()[0], subset)

    _, rows = chosen()
    if rows:
        call()
    yield call, rows


@contextlib.contextmanager
def _on_ranks(step, args, kwargs, way):
    """Yield a call on the ranks of a new session."""
    session.fork(
        devices=["cpu"] * way.ranks, threads_per_rank=way.threads, restart=True, check=False
    )
    try:
        step._end_checks()
        args = [_in_session(each) for each in args]
        kwargs = {name: _in_session(each) for name, each in kwargs.items()}
        step(*args, **kwargs)
        yield lambda: step(*args, **kwargs), None
    finally:
        session.close()


def _in_session(value):
    """Return a Data of the present session in place of one of the caller's."""
    return data(value.data, minibatch=value.minibatch) if type(value) is Data else value
