"""The logger of the library. Its messages begin with the rank of this process."""

import contextlib
import logging
import os
import sys
import threading

from synkhronos._escapes import printable

log = logging.getLogger("synkhronos")
_SLOW = 3.0  # seconds


class _RankFilter(logging.Filter):
    """Puts the rank of this process and its host in front of messages; changes no others."""

    number = None
    host = None
    in_a_call = None

    def filter(self, record):
        if isinstance(record.args, tuple):
            record.args = tuple(map(_harmless, record.args))
        record.rank = self.number
        if self.number is not None:
            host = "" if self.host is None else f" on {self.host}"
            record.msg = f"rank {self.number}{host}: {record.msg}"
        return True


def _harmless(argument):
    """Return an argument of a message, without control characters in a text, path or error."""
    try:
        text = str(argument) if isinstance(argument, (str, BaseException, os.PathLike)) else ""
    except Exception:  # logging calls str() again, and reports the error
        return argument
    if text.isprintable():
        return argument
    return printable(text)


_rank = _RankFilter()
log.addFilter(_rank)


def name_rank(number, in_a_call=None) -> None:
    """Set the rank that messages of this process begin with, or None.

    `in_a_call` is a function that returns whether this process computes its part of a call.
    """
    _rank.number, _rank.in_a_call = number, in_a_call


def name_host(name) -> None:
    """Set the host that messages name after the rank, if the ranks are on several machines."""
    _rank.host = _harmless(name).replace("%", "%%")


def rank_in_a_call():
    """Return the rank of this process while it computes its part of a call; else None."""
    return _rank.number if _rank.in_a_call and _rank.in_a_call() else None


def has_terminal():
    """Return whether standard error is a terminal; a script may have replaced or closed it."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False


@contextlib.contextmanager
def told_if_slow(what, *names, always=False):
    """Say what the block does if it takes seconds, at the level INFO where nobody seems to wait."""
    waits = always or has_terminal() or "ipykernel" in sys.modules
    level = logging.WARNING if waits else logging.INFO
    timer = threading.Timer(_SLOW, log.log, [level, what, *names])
    with contextlib.suppress(RuntimeError):  # no more threads are allowed: nothing is said
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if timer.ident is not None:
            timer.join()  # so that no later fork meets its thread
