r"""Takes out of the output of a script what mpirun itself prints there.

mpirun prints pages between two lines of hyphens::

    ------------------------------------------------------------
    PRTE has lost communication with a remote daemon.

      HNP daemon   : [prterun-vm-9@0,0] on node vm
      Remote daemon: [prterun-vm-9@0,1] on node b-2
    ...
    ------------------------------------------------------------

Of this one `PagesOfLosses` returns nothing, and notes that b-2 is lost. It notes a guard that was
killed, too: all else that is told of then has followed from it.
"""

from __future__ import annotations

import re

_EDGE = rb"-{60,}\n"
_INSIDE = rb"(?:(?!" + _EDGE + rb").)"  # a character of a page
# A warning of a race in PRRTE, without consequences.
NOISE = re.compile(rb"^\[[^\]\n]*\] plm:ssh: Warning: setpgid[^\n]*\n", re.MULTILINE)
# Pages about a process that was killed or has failed: its exit status and its output say enough.
PAGE = re.compile(_EDGE + _INSIDE + rb"*prterun.*?" + _EDGE, re.DOTALL)
# Open MPI prints this for each foreign connection after the first; for that it prints a page.
_IGNORED = re.compile(
    rb"^\[[^\n]*btl_tcp_proc\.c:\d+[^\n]*\] opal_modex_recv: [^\n]*\n", re.MULTILINE
)
_FIRST = rb"(?s)(?<!-)" + _EDGE
_NEXT = rb"(?:A daemon failed|PRTE has lost|prterun noticed)" + _INSIDE + rb"{0,4000}"
# mpirun writes a page line by line: the first may come alone.
_INCOMPLETE = re.compile(_FIRST + rb"(?:" + _NEXT + rb")?\Z")
_COMPLETE = re.compile(
    _FIRST + _NEXT + rb"(?:Remote (?:host:|daemon:[^\n]* on node) *(?P<lost>\S+)\n"
    rb"| on node (?P<guard>\S+)\s+exited\s+on\s+signal (?P<signal>\d+)).*?" + _EDGE + rb"\n?"
)


class PagesOfLosses:
    r"""Takes the pages about lost daemons out of a stream, in pieces of any size.

    >>> page = b"PRTE has lost a daemon\n  Remote daemon: [prterun-vm-9@0,1] on node b-2\n"
    >>> edge, pages = b"-" * 60 + b"\n", PagesOfLosses()
    >>> pages.take(b"out\n" + edge), pages.take(page), pages.take(edge + b"more\n"), pages.lost
    (b'out\n', b'', b'more\n', ['b-2'])
    """

    def __init__(self) -> None:
        self.lost: list[str] = []  # hosts
        self.guards: list[tuple[str, int]] = []  # (host, signal)
        self._rest = self._known = b""  # an incomplete page; the same at the last question

    def take(self, data: bytes, is_end: bool = False) -> bytes:
        """Return the output without pages; keep an incomplete one until its end comes."""
        data = _COMPLETE.sub(self._note, self._rest + _IGNORED.sub(b"", data))
        begun = None if is_end else _INCOMPLETE.search(data)
        at = begun.start() if begun else len(data)
        self._rest = data[at:]
        return data[:at]

    def has_rested(self) -> bool:
        """Return whether a page has not grown since the last call: mpirun writes line by line."""
        before, self._known = self._known, self._rest
        return before == self._rest

    def _note(self, page):
        lost, guard, by = page.group("lost", "guard", "signal")
        if lost:
            self.lost.append(lost.decode())
        else:
            self.guards.append((guard.decode(), int(by)))
        return b""
