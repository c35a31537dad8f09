"""The logger of the library, whose messages say which rank they come from."""

import logging

log = logging.getLogger("synkhronos")


class _Rank(logging.Filter):
    """Puts the rank of this process in front of messages; without one it leaves them."""

    number = None

    def filter(self, record):
        record.rank = self.number
        if self.number is not None:
            record.msg = f"rank {self.number}: {record.msg}"
        return True


_rank = _Rank()
log.addFilter(_rank)


def name_rank(number) -> None:
    """Have messages of this process name its rank; None for no longer."""
    _rank.number = number
