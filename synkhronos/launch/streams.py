"""Parts of the streams of processes: marks, a writer that does not block, and signals.

A mark is a message to the launcher about a rank. It stands between the lines that the rank prints:
NUL, the token of the run, the rank, a kind, a text, NUL.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
from typing import Collection, Iterator

SIZE = 1 << 16  # bytes that are read or written at once


@contextlib.contextmanager
def signals_of(wanted: Collection[int]) -> Iterator[int]:
    """Give a descriptor from which the numbers of signals can be read as they come."""
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


def mark(token: str, rank: int, kind: str, text: object = "", end: str = "\n") -> bytes:
    r"""Return a mark. It ends a line, because PRRTE holds back an incomplete one.

    >>> mark("61ab", 1, "lost", os.fsdecode(b"a machine \xff"))
    b'\x0061ab 1 lost a machine ?\x00\n'
    """
    return f"\0{token} {rank} {kind} {text}\0{end}".encode(errors="replace")


def mark_pattern(token: str, kind: str = "[a-z]+", end: str = "") -> re.Pattern[bytes]:
    r"""Return the pattern of a mark; its groups are the rank, the kind and the text.

    >>> mark_pattern("61ab", end=r"\n").match(mark("61ab", 1, "status", -9)).groups()
    (b'1', b'status', b'-9')
    """
    return re.compile(rf"\x00{token} (\d+) ({kind}) ([^\x00]*)\x00{end}".encode())


class Marks:
    r"""Takes the marks of a run out of a stream, in pieces of any size.

    >>> marks, text = Marks("61ab"), b"an error\n" + mark("61ab", 0, "status", -9) + b"more\n"
    >>> [*marks.take(text[:12]), *marks.take(text[12:])]
    [b'an error\n', (0, b'status', '-9'), b'more\n']
    """

    def __init__(self, token: str) -> None:
        self._pattern = mark_pattern(token, end="\n")  # with its newline, which may come later
        self._beginning = f"\0{token} ".encode()  # of every mark
        self._tail = b""  # may be the beginning of a mark

    def take(self, data: bytes) -> Iterator[bytes | tuple[int, bytes, str]]:
        """Yield output, and (rank, kind, text) of the marks between."""
        self._tail += data
        while found := self._pattern.search(self._tail):
            before, self._tail = self._tail[: found.start()], self._tail[found.end() :]
            rank, kind, text = found.groups()
            if before:
                yield before
            yield int(rank), kind, text.decode(errors="replace")
        at = self._tail.find(b"\0")
        while at >= 0 and not self._begins_mark(self._tail[at:]):
            at = self._tail.find(b"\0", at + 1)
        end = len(self._tail) if at < 0 else at
        rest, self._tail = self._tail[:end], self._tail[end:]
        if rest:
            yield rest

    def _begins_mark(self, text):
        return text.startswith(self._beginning) or self._beginning.startswith(text)


class Writer:
    """Writes to a descriptor without blocking, and closes it at the end.

    The owner of the `selector` calls the data of each ready key with the key's descriptor.
    """

    def __init__(self, fd: int, selector: selectors.BaseSelector) -> None:
        os.set_blocking(fd, False)
        self._fd: int | None = fd
        self._selector, self._waiting = selector, bytearray()
        self._is_registered = self._ends = False

    @property
    def is_behind(self) -> bool:
        """Whether more than 1 MiB is waiting."""
        return len(self._waiting) > 1 << 20

    def write(self, data: bytes) -> None:
        """Write the bytes that the descriptor takes now, and the rest later."""
        self._waiting += data
        self._flush()

    def end(self) -> None:
        """Close the descriptor once all is written."""
        self._ends = True
        self._flush()

    def _flush(self, *_):
        if self._fd is None:
            return
        try:
            while self._waiting:
                del self._waiting[: os.write(self._fd, self._waiting[:SIZE])]
        except BlockingIOError:
            pass
        except OSError:  # nothing reads there any more
            self._waiting.clear()
            self._ends = True
        if bool(self._waiting) != self._is_registered:
            self._is_registered = not self._is_registered
            if self._is_registered:
                self._selector.register(self._fd, selectors.EVENT_WRITE, self._flush)
            else:
                self._selector.unregister(self._fd)
        if self._ends and not self._waiting:
            os.close(self._fd)
            self._fd = None
