"""Messages about a rank that raised, a worker that ended, and a long wait."""

import contextlib
import pickle
import socket
import time
import traceback
from typing import Optional

from synkhronos._machine.interrupts import raised_here
from synkhronos._machine.log import log
from synkhronos._machine.processes import life_of, name_of_signal
from synkhronos.errors import RemoteTraceback, SessionError, WorkerDied, WorkerError

# Attributes of exceptions: advice, and whether the error follows from one of another rank.
_ADVICE, _FOLLOWS = "_synkhronos_advice", "_synkhronos_follows"


def report_on(error: BaseException, limit: int = 1 << 16) -> dict:
    """Return the report on an exception for a WorkerError; pickled it has at most `limit` bytes."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        message = "".join([str(error)])  # a plain str: a subclass might not unpickle elsewhere
    except raised_here(Exception):
        message = "(its message could not be read)"
    return {
        "exception": _pickled(error, message, limit // 8),
        "type": _shorten(type(error).__name__, 200),
        "message": _shorten(message, limit // 16),
        "traceback": _shorten(text, limit // 8),
        "host": socket.gethostname(),
        "advice": getattr(error, _ADVICE, ""),
        "follows": getattr(error, _FOLLOWS, False),
    }


def _pickled(error, message, limit):
    """Return the class and arguments of an exception, pickled; b"" if that is not possible.

    Its attributes are left out: Theano keeps nodes of the graph there.
    """
    for arguments in (error.args, (message,)):
        try:
            data = pickle.dumps((type(error), arguments), pickle.HIGHEST_PROTOCOL)
        except raised_here(Exception):  # a class or an argument that can't be pickled
            continue
        if len(data) <= limit:
            return data
    return b""


def raised_by_rank(error: WorkerError) -> Optional[BaseException]:
    """Return the exception that a rank raised, caused by this WorkerError; None if unknown."""
    original = error.__cause__
    if isinstance(original, RemoteTraceback):
        try:
            kind, arguments = pickle.loads(error._pickled)
            original = kind(*arguments)
        except raised_here(Exception):  # its module is not here, or it takes other arguments
            return None
    if original is None or isinstance(original, SessionError):
        return None
    # In place of `original`: else each of the two would be the cause of the other.
    error.__cause__ = RemoteTraceback(error.remote_traceback)
    original.__cause__ = error
    return original


def add_advice(error: BaseException, advice: str) -> None:
    """Add a sentence to an exception, which the WorkerError ends with."""
    with contextlib.suppress(AttributeError, TypeError):  # a class of the user may refuse it
        setattr(error, _ADVICE, advice)


def left_early(rank: int, waiting: int) -> SessionError:
    """Return the exception for a rank that has left a call in which another still waits for it."""
    error = SessionError(
        f"Rank {rank} has left a call in which rank {waiting} still waits to reduce with it. All "
        "ranks must compute the same all_reduces, so they can't be in a branch that only some of "
        "them take."
    )
    setattr(error, _FOLLOWS, True)
    return error


def describe(error: BaseException, limit: int) -> bytes:
    """Return the report on an exception, pickled, in at most `limit` bytes."""
    return pickle.dumps(report_on(error, limit), pickle.HIGHEST_PROTOCOL)


def _shorten(text, limit):
    # `limit` is in characters, of up to four bytes each; report_on() leaves room for that.
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n[... {len(text) - limit} characters ...]\n{text[-limit // 2 :]}"


def _how_it_ended(exitcode):
    if exitcode is None:
        return "is gone"
    if exitcode >= 0:
        return f"ended by itself with exit status {exitcode}"
    name = name_of_signal(-exitcode)
    cause = {
        "SIGKILL": "by somebody, or by the kernel because memory ran out",
        "SIGSEGV": "by a crash in compiled code",
        "SIGBUS": "by a crash in compiled code or lost shared memory",
        "SIGABRT": "by a failed check in compiled code",
        "SIGTERM": "by somebody",
    }.get(name, "by a signal")
    return f"was killed {cause} ({name})"


def worker_error(reports, n_ranks) -> WorkerError:
    """Return one exception for the reports (rank -> report) of all ranks that raised."""
    rank = first(reports)
    report = reports[rank]
    others = ", ".join(
        f"rank {other} {reports[other]['type']}" for other in sorted(reports) if other != rank
    )
    line, new_line, rest = report["message"].partition("\n")
    error = WorkerError(
        f"Rank {rank} of {n_ranks} on {report['host']} raised {report['type']}: "
        f"{line}{f' (and {others})' if others else ''}{new_line}{rest}"
        f"{report['advice'] and chr(10)}{report['advice']}",
        rank,
        report["host"],
        report["type"],
        report["traceback"],
    )
    error._pickled = report["exception"]
    return error


def first(reports):
    """Return the lowest rank that raised; one whose error follows from others' comes last."""
    return min(reports, key=lambda rank: (reports[rank]["follows"], rank))


def worker_died(rank, process, host="") -> WorkerDied:
    """Return the exception for a worker process that has ended."""
    where = f" on {host}" if host else ""
    return WorkerDied(
        f"Worker rank {rank}{where} (process {process.pid}) {_how_it_ended(process.exitcode)}. The "
        "session has ended: close() and fork() to begin again.",
        rank,
        process.exitcode,
    )


class Patience:
    """Warn of a wait that began `waited` seconds ago: after `seconds`, then ever less often."""

    def __init__(self, seconds: float, waited: float):
        self._seconds = self._next = seconds
        self._begin = time.monotonic() - waited

    def wait_for(self, processes, in_a_meeting: bool) -> None:
        """Warn, if it is time, with the ranks that the call waits for: rank -> process id."""
        ranks = (f"rank {rank} (process {pid}, {life_of(pid)})" for rank, pid in processes.items())
        what = "come to a reduction with the other ranks" if in_a_meeting else "finish its part"
        self._warn("a call has waited %.0f s for %s to %s", " and ".join(ranks), what)

    def wait_for_hosts(self, hosts) -> None:
        """Warn, if it is time, with the machines that the call waits for."""
        if hosts:
            self._warn("a call has waited %.0f s for %s to finish", " and ".join(hosts))

    def wait_for_others(self, named: str) -> None:
        """Warn, if it is time, with the name of what the wait is for."""
        self._warn("has waited %.0f s for %s", named)

    def _warn(self, text, *arguments):
        waited = time.monotonic() - self._begin
        if waited >= self._next:
            self._next = 2 * waited  # so intervals double
            log.warning(text, waited, *arguments)

    def end(self) -> None:
        """Log the end of the wait, if there was a warning."""
        if self._next > self._seconds:
            log.warning("the call goes on after %.0f s", time.monotonic() - self._begin)
