"""The logger of the library. Its messages begin with the rank of this process."""

import logging
import os

log = logging.getLogger("synkhronos")


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
    from synkhronos._wording import printable  # not above: it imports NumPy, launchers do not

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
