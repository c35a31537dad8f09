"""Signals of a command, as something that can be waited for beside other descriptors."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Collection, Iterator


@contextlib.contextmanager
def signals_of(wanted: Collection[int]) -> Iterator[int]:
    """Yield a descriptor from which the numbers of signals that come can be read."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    before = {number: signal.signal(number, lambda *_: None) for number in wanted}
    old = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(old)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)
