"""The report of a block of `parallel`: which functions run on all ranks, and why others don't.

theano.function in the block ──▶ FunctionCalls   counts each call
                                 └──▶ FunctionReport ──▶ ParallelReport, a table
"""

from __future__ import annotations

import textwrap
import weakref
from dataclasses import dataclass

from synkhronos._machine.processes import cpu_seconds_of
from synkhronos._wording import advise, count, one_line, without_folder
from synkhronos.profiling.tables import Tables

SLOW_SECONDS = 1.0  # of a call in the master alone, which is worth a warning
FIRST_CALLS = 3  # of a function, which take longer: `check` compares these by default
_WIDTH = 100  # characters of a line of advice
_LEAST = 0.01  # of the time of all functions beyond two seconds: advice for less is left out


@dataclass(frozen=True)
class FunctionReport:
    """The calls of one function of a block of :func:`~synkhronos.parallel`.

    Attributes
    ----------
    name : str
        The function's name, or the line that made it. Functions of one name are counted together.
    is_divided : bool
        Whether calls can run on all ranks.
    calls, calls_on_ranks : int
        All calls, and those that ran on all ranks; the others ran in the master alone.
    seconds, seconds_on_ranks : float
        The time of these calls.
    first_seconds : float
        The time of each function's first three calls, in which ranks load it, and ``check``
        compares with serial Theano.
    reason : str
        Why calls ran in the master alone; empty if none did.
    instead : str
        What to write to have them divided.
    """

    name: str
    is_divided: bool
    calls: int
    calls_on_ranks: int
    seconds: float
    seconds_on_ranks: float
    first_seconds: float
    reason: str
    instead: str


@dataclass(frozen=True, repr=False)
class ParallelReport(Tables):
    """The functions of a block of :func:`~synkhronos.parallel`; shown as a table.

    Attributes
    ----------
    n_ranks : int
    functions : tuple of FunctionReport
        Those that took longest first.
    cpu_seconds : tuple of float or None
        The CPU time of each rank since the begin of the block; None for a rank on another machine.
    """

    n_ranks: int = 0
    functions: tuple[FunctionReport, ...] = ()
    cpu_seconds: tuple[float | None, ...] = ()

    def _headline(self):
        if not self.n_ranks:
            return "Synkhronos: no block of parallel()"
        if not self.functions:
            return "Synkhronos: no function was compiled in the block of parallel()"
        divided = sum(each.is_divided for each in self.functions)
        seconds = sum(each.seconds for each in self.functions)
        on_ranks = sum(each.seconds_on_ranks for each in self.functions)
        ranks = f"all {self.n_ranks} ranks" if self.n_ranks > 1 else "1 rank"
        names = count(len(self.functions), "function")
        if not seconds:
            return f"Synkhronos: {divided} of {names} can run on {ranks}; no call has ended"
        share = f"{on_ranks / seconds:.0%} of the {seconds:.1f} s spent in functions"
        return f"Synkhronos: {divided} of {names} ran on {ranks} ({share})"

    def _tables(self):
        workers = 1 - 1 / max(self.n_ranks, 1)
        rows = [
            (
                without_folder(each.name),
                f"{each.calls:,}",
                f"{each.seconds:.2f}",
                f"{workers * each.seconds_on_ranks / each.seconds:.0%}" if each.seconds else "",
                _answer(each),
            )
            for each in self.functions
        ]
        cpu = [
            (str(rank), "unknown" if seconds is None else f"{seconds:.1f}")
            for rank, seconds in enumerate(self.cpu_seconds)
        ]
        columns = "function", "calls", "seconds", "by workers", "divided"
        advice = [
            (without_folder(each.name) if i == 0 else "", line)
            for each in self.functions
            if each.seconds >= _LEAST * (sum(one.seconds for one in self.functions) - 2)
            for i, line in enumerate(textwrap.wrap(each.instead, _WIDTH))
        ]
        return [
            ("Functions", columns, rows),
            ("Ranks", ("rank", "seconds of CPU"), cpu),
            ("To have them divided", ("function", "write"), advice),
        ]


def _answer(function):
    if not function.is_divided:
        return f"no: it {function.reason}"
    if not function.reason:
        return "yes"
    alone = function.calls - function.calls_on_ranks
    return f"yes, but for {count(alone, 'call')}: {function.reason}"


class FunctionCalls:
    """Counts the calls of functions of one name; `reason` is None if they are divided."""

    def __init__(self, name, reason=None, instead=""):
        self._name, self._reason, self._instead = name, reason, instead
        self._calls = self._calls_on_ranks = 0
        self._seconds = self._seconds_on_ranks = self._first_seconds = 0.0
        self._alone = {}  # why calls of a divided function ran in the master alone -> what to write
        self._has_warned = False

    def count(self, seconds, is_first, is_on_ranks):
        """Count a call; `is_first` if it is one of its function's first calls."""
        self._calls += 1
        self._seconds += seconds
        if is_first:
            self._first_seconds += seconds
        if is_on_ranks:
            self._calls_on_ranks += 1
            self._seconds_on_ranks += seconds

    def note_alone(self, seconds, why, instead):
        """Note why a call ran in the master alone; warn of the first slow one."""
        if why is not None:
            self._alone.setdefault(why, instead)
        if seconds >= SLOW_SECONDS and not self._has_warned:
            self._has_warned = True
            because = f"it {self._reason}" if why is None else why
            advice = self._instead if why is None else instead
            name = one_line(without_folder(self._name))
            advise(
                f"{name} took {seconds:.1f} s in the master alone: {because}. "
                f"{advice} synkhronos.parallel_report() shows all functions.".replace("  ", " ")
            )

    def report(self):
        """Return the FunctionReport up to now."""
        reasons = [self._reason] if self._reason is not None else list(self._alone)
        advice = [self._instead] if self._reason is not None else list(self._alone.values())
        return FunctionReport(
            self._name,
            self._reason is None,
            *(self._calls, self._calls_on_ranks),
            *(self._seconds, self._seconds_on_ranks, self._first_seconds),
            "; ".join(reasons),
            " ".join(each for each in dict.fromkeys(advice) if each),
        )


class CallsOfOne:
    """Counts the calls of one function in the FunctionCalls of its name."""

    def __init__(self, all_calls):
        self._all, self._left = all_calls, FIRST_CALLS

    def on_ranks(self, seconds):
        """Count a call on all ranks."""
        self._all.count(seconds, self._left > 0, True)
        self._left -= 1

    def alone(self, seconds, why=None, instead=""):
        """Count a call in the master alone; `why` is a sentence if the function is divided."""
        self._all.count(seconds, self._left > 0, False)
        self._left -= 1
        self._all.note_alone(seconds, why, instead)


class BlockCounter:
    """Counts calls and CPU time in blocks of `parallel`; `pids` has None for other machines."""

    def __init__(self, session, pids):
        self._session = weakref.ref(session)  # it may be closed, and collected
        self._pids, self._functions = pids, {}
        self._began = list(map(_cpu_seconds, pids))
        self._used = [0.0 if each is not None else None for each in self._began]

    def is_of(self, session, pids):
        """Return whether this is the session, with the same processes."""
        return self._session() is session and pids == self._pids

    def function(self, name, reason=None, instead=""):
        """Return a new counter for the calls of a function."""
        key = name, reason
        if key not in self._functions:
            self._functions[key] = FunctionCalls(name, reason, instead)
        return CallsOfOne(self._functions[key])

    def note_cpu(self):
        """Note the CPU time that each rank has used; one that has ended keeps its last."""
        now = list(map(_cpu_seconds, self._pids))
        for rank, (began, seconds) in enumerate(zip(self._began, now)):
            if began is not None and seconds is not None:
                self._used[rank] = seconds - began

    def report(self):
        """Return the ParallelReport up to now."""
        self.note_cpu()
        functions = [each.report() for each in self._functions.values()]
        functions.sort(key=lambda each: -each.seconds)
        return ParallelReport(len(self._pids), tuple(functions), tuple(self._used))


def _cpu_seconds(pid):
    return None if pid is None else cpu_seconds_of(pid)
