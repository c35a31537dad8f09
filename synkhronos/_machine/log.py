"""The rank of this process, and the logger of the library, which puts it in front of messages."""

import logging
import os

log = logging.getLogger("synkhronos")


class _Rank(logging.Filter):
    """Puts the rank of this process, and its host, in front of messages, if it has a rank."""

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


def _harmless(told):
    """Return what a message tells, without control characters where others may have written it."""
    try:
        text = str(told) if isinstance(told, (str, BaseException, os.PathLike)) else ""
    except Exception:  # logging tells of it
        return told
    if text.isprintable():
        return told
    from synkhronos._wording import printable  # which imports NumPy; a launcher begins without

    return printable(text)


_rank = _Rank()
log.addFilter(_rank)


def name_rank(number, in_a_call=None) -> None:
    """Set the rank that messages of this process begin with; None for no rank.

    `in_a_call` returns whether this process computes its part of a call of several ranks.
    """
    _rank.number, _rank.in_a_call = number, in_a_call


def name_host(name) -> None:
    """Set the host that follows the rank in messages, where the ranks are on several machines."""
    _rank.host = _harmless(name).replace("%", "%%")


def rank_in_a_call():
    """Return the rank of this process in a call of several ranks; None outside of one."""
    return _rank.number if _rank.in_a_call and _rank.in_a_call() else None
