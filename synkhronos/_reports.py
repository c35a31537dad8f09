"""What is said of a rank that raised, and of a process that ended."""

import pickle
import signal
import socket
import traceback

from synkhronos.errors import RemoteTraceback, WorkerDied, WorkerError


def describe(error: BaseException, limit: int) -> bytes:
    """Return what can be said about an exception, pickled, in at most `limit` bytes."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        message = str(error)
    except Exception:
        message = "(its message could not be read)"
    report = {
        "type": type(error).__name__,
        "message": _shorten(message, limit // 16),
        "traceback": _shorten(text, limit // 8),
        "host": socket.gethostname(),
    }
    return pickle.dumps(report, pickle.HIGHEST_PROTOCOL)


def _shorten(text, limit):
    # A character takes at most four bytes, so a quarter of the room is counted in characters.
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n[... {len(text) - limit} characters ...]\n{text[-limit // 2 :]}"


def _how_it_ended(exitcode):
    if exitcode is None:
        return "is gone"
    if exitcode >= 0:
        return f"ended by itself with exit status {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    cause = {
        "SIGKILL": "by somebody, or by the kernel because memory ran out",
        "SIGSEGV": "by a crash in compiled code",
        "SIGBUS": "by a crash in compiled code or lost shared memory",
        "SIGABRT": "by a failed check in compiled code",
        "SIGTERM": "by somebody",
    }.get(name, "by a signal")
    return f"was killed {cause} ({name})"


def worker_error(reports, n_ranks) -> WorkerError:
    """Return one exception for the reports of all ranks that raised (rank -> report)."""
    rank = min(reports)
    report = reports[rank]
    others = ", ".join(
        f"rank {other} {reports[other]['type']}" for other in sorted(reports) if other != rank
    )
    return WorkerError(
        f"Rank {rank} of {n_ranks} on {report['host']} raised {report['type']}: "
        f"{report['message']}{f' (and {others})' if others else ''}",
        rank,
        report["host"],
        report["type"],
        report["traceback"],
    )


def remote_cause(reports) -> RemoteTraceback:
    """Return what stands for the exception of the lowest rank, which is in another process."""
    return RemoteTraceback(reports[min(reports)]["traceback"])


def worker_died(rank, process) -> WorkerDied:
    """Return the exception for a worker process that has ended."""
    return WorkerDied(
        f"Worker rank {rank} (process {process.pid}) {_how_it_ended(process.exitcode)}. The "
        "session has ended: close() and fork() to begin again.",
        rank,
        process.exitcode,
    )
