"""The logger of the library, with the rank of the process in front of each message."""

import logging

log = logging.getLogger("synkhronos")


class _Rank(logging.Filter):
    """Puts the rank of this process in front of messages, if the process has a rank."""

    number = None

    def filter(self, record):
        record.rank = self.number
        if self.number is not None:
            record.msg = f"rank {self.number}: {record.msg}"
        return True


_rank = _Rank()
log.addFilter(_rank)


def name_rank(number) -> None:
    """Set the rank that messages of this process begin with; None for no rank."""
    _rank.number = number
