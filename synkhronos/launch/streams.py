"""Pieces of streams: lines that come in parts, writes to what may be full for a while, and marks.

A mark is what a process tells the launcher of a rank, between what the rank prints: NUL, the token
of the run, the rank, a kind, a text, NUL.
"""

from __future__ import annotations

import io
import os
import re
import selectors

SIZE = 1 << 16  # bytes that are read or written at once
_MOST = 1 << 20  # bytes of a line that are kept until its end


def mark(token: str, rank: int, kind: str, text: object = "", end: str = "\n") -> bytes:
    r"""Return a mark, which ends a line: PRRTE keeps the rest of one.

    >>> mark("61ab", 1, "lost", os.fsdecode(b"a machine \xff"))
    b'\x0061ab 1 lost a machine ?\x00\n'
    """
    return f"\0{token} {rank} {kind} {text}\0{end}".encode(errors="replace")


def mark_pattern(token: str, kind: str = "[a-z]+", end: str = "") -> re.Pattern[bytes]:
    r"""Return the pattern of marks: groups are the rank, the kind and the text.

    >>> mark_pattern("61ab", end=r"\n").match(mark("61ab", 1, "status", -9)).groups()
    (b'1', b'status', b'-9')
    """
    return re.compile(rf"\x00{token} (\d+) ({kind}) ([^\x00]*)\x00{end}".encode())


class Lines:
    """Lines of a stream, of which the end may not have come."""

    def __init__(self):
        self._tail = bytearray()

    def take(self, data: bytes, is_end: bool = False) -> list[bytes]:
        """Return the lines that are complete now, and pieces of a very long one.

        At the end the last one gets a newline, if it has none.
        """
        tail = self._tail
        tail += data
        if is_end and tail and not tail.endswith(b"\n"):
            tail += b"\n"
        end = len(tail) if len(tail) > _MOST else tail.rfind(b"\n") + 1
        lines = io.BytesIO(tail[:end]).readlines()
        del tail[:end]
        return lines


class Writer:
    """Writes to a descriptor that may be full for a while, which it closes at the end.

    Parameters
    ----------
    fd : int
    selector : selectors.BaseSelector
        Calls the data of its keys with their descriptor.
    """

    def __init__(self, fd: int, selector: selectors.BaseSelector) -> None:
        os.set_blocking(fd, False)
        self._fd: int | None = fd
        self._selector, self._waiting = selector, bytearray()
        self._is_registered = self._ends = False

    @property
    def is_behind(self) -> bool:
        """Whether much is waiting."""
        return len(self._waiting) > 1 << 20

    def write(self, data: bytes) -> None:
        """Write what can be written now, and the rest later."""
        self._waiting += data
        self._flush()

    def end(self) -> None:
        """Close the descriptor after all has been written."""
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
