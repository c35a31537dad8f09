"""Tables of the ranks that `synkhronos top` has seen: in a terminal, a notebook, and during calls.

    synkhronos top --json --pid THIS   ── a line each second ──▶  a thread here ──▶ the display

Another process samples the ranks. A thread of the master could run only while Theano does not hold
Python's lock, and would count too many waits of the master.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from typing import Any, Iterable, Sequence

from synkhronos._host import pythons
from synkhronos._machine.devices import module_command
from synkhronos._wording import count, one_line
from synkhronos.profiling.tables import Tables

_COLUMNS = (
    *("rank", "device", "pid", "process", "cpu", "memory", "shared"),
    *("computes", "waits", "no call"),
)
_SHARES = ("computes", "waits", "no_call")
_COLOURS = ("green", "red", "bright_black")
_LEAST = "shared", "memory", "process", "device"  # in this order a narrow terminal leaves them out
_KEY = re.compile(rb"(?<=\x1b[O[])(?:[56]~|[AB])|[jk]")  # arrows, PgUp and PgDn send several bytes
_LINES, _PAGES = {b"k": -1, b"A": -1, b"j": 1, b"B": 1}, {b"5~": -1, b"6~": 1}
_WIDE, _BAR = 105, 20  # characters: of a terminal with room for bars, and of a bar


def merged(answers: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the sessions in the answers of machines; join the parts of one on several machines."""
    sessions: dict[str, dict[str, Any]] = {}
    for session in (session for answer in answers for session in answer["sessions"]):
        known = sessions.setdefault(session["id"], session)
        if known is session:
            continue
        first, other = sorted((known, session), key=lambda each: each["ranks"][0]["rank"])
        ranks = sorted([*first["ranks"], *other["ranks"]], key=lambda rank: rank["rank"])
        master = other if any(rank["is_master"] for rank in other["ranks"]) else first
        shared = first["shared"] + other["shared"]
        sessions[session["id"]] = {**master, "shared": shared, "ranks": ranks}
    return list(sessions.values())


class Watched(Tables):
    """The sessions of one moment, shown as tables."""

    def __init__(self, sessions: Sequence[dict[str, Any]], problems: Sequence[str] = ()) -> None:
        self.sessions, self._problems = sessions, problems

    def _headline(self):
        shown = count(len(self.sessions), "session") if self.sessions else "no session"
        return " ".join([f"Synkhronos: {shown}", *self._problems])

    def _tables(self):
        return [
            (_title(each), _COLUMNS, list(map(_cells, each["ranks"]))) for each in self.sessions
        ]

    def rich(self, width: int) -> Any:
        """Return the tables as rich shows them, in a terminal of that width."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        headline, tables, _ = self._printable()
        shown: list[Any] = [Text(headline, style="bold")]
        for session, (title, columns, rows) in zip(self.sessions, tables):
            table = Table(title=Text(title), title_justify="left", box=None, padding=(0, 1, 0, 0))
            shown_columns = _that_fit(width, columns, rows)
            for column in shown_columns:
                is_text = column in ("rank", "device", "process")
                table.add_column(column, justify="left" if is_text else "right", no_wrap=True)
            if width >= _WIDE:
                table.add_column(Text(" ").join(map(Text, columns[-3:], _COLOURS)))
            for rank, row in zip(session["ranks"], rows):
                bar = [_bar(rank)] if width >= _WIDE else []
                cells = dict(zip(columns, row))
                table.add_row(*(Text(cells[column]) for column in shown_columns), *bar)
            shown += [Text(), table]
        return Group(*shown)


def _that_fit(width, columns, rows):
    widths = {column: max(map(len, (column, *cells))) + 1 for column, *cells in zip(columns, *rows)}
    for column in _LEAST:
        if sum(widths.values()) > width:
            del widths[column]
    return list(widths)


def _title(session):
    ranks, n_ranks = session["ranks"], session["n_ranks"]
    what = "calls" if session["kind"] == "session" else "meetings"
    title = (
        f"{one_line(session['script'])}: {count(n_ranks, 'rank')}, {session['calls']:,} {what}, "
        f"{session['calls_per_second']:,.1f} a second, {_amount(session['shared'])} shared"
    )
    if len(ranks) < n_ranks:
        title += f"; {n_ranks - len(ranks)} on other machines (see --hosts)"
    return title


def _cells(rank):
    name = f"{rank['rank']}, master" if rank["is_master"] else str(rank["rank"])
    cpu, *shares = (
        "" if value is None else f"{100 * value:.0f} %"
        for value in (rank["cpu"], *map(rank.get, _SHARES))
    )
    memory = "" if rank["resident"] is None else _amount(rank["resident"])
    device = f"{rank['device']} of {rank['host']}" if rank.get("host") else rank["device"]
    shared = _amount(rank["shared"])
    return (name, device, str(rank["pid"]), rank["process"], cpu, memory, shared, *shares)


def _amount(nbytes):
    return f"{1e-6 * nbytes:,.0f} MB"


def _bar(rank):
    from rich.text import Text

    bar, end, done = Text(), 0.0, 0
    for name, colour in zip(_SHARES, _COLOURS):
        end += _BAR * (rank[name] or 0)
        bar.append("█" * (round(end) - done), colour)
        done = round(end)
    return bar


def screen(alternate: bool = False) -> Any:
    """Return rich's context for a display that changes in place; raise ImportError without rich."""
    try:
        from rich.live import Live
    except ImportError as error:
        raise ImportError(f"A table that changes takes rich: {pythons.install('top')}.") from error
    return Live(screen=alternate, auto_refresh=False)


class Window:
    """Shows tables on a screen; of tables with more lines, a part that keys move."""

    def __init__(self, screen: Any, has_keys: bool) -> None:
        self._screen = screen
        self._keys = ": arrows, j, k, PgUp and PgDn scroll, q ends" * has_keys
        self._lines: list[Any] = []  # (the number of its part, a line): each second part is a table
        self._first, self._room = 0, 1

    def show(self, tables: Watched) -> None:
        """Show tables in place of the last ones."""
        console = self._screen.console
        parts = enumerate(tables.rich(console.width).renderables)
        self._lines = [(i, line) for i, part in parts for line in console.render_lines(part)]
        self._draw()

    def move(self, pressed: bytes) -> None:
        """Move by the keys that were pressed."""
        for key in _KEY.findall(pressed):
            self._first += _LINES.get(key, 0) + self._room * _PAGES.get(key, 0)
            self._draw()

    def _draw(self):
        from rich import console, segment, text

        lines, height = self._lines, self._screen.console.height
        self._room = height - (len(lines) > height)  # the last line says how much is hidden
        self._first = max(0, min(self._first, len(lines) - self._room))
        seen = lines[self._first : self._first + self._room]
        shown: list[Any] = [segment.SegmentLines([line for _, line in seen], new_lines=True)]
        if len(seen) < len(lines):
            n = len({i for i, _ in lines if i and i % 2 == 0} - {i for i, _ in seen})
            more = count(n, "more session") if n else count(len(lines) - len(seen), "more line")
            shown.append(text.Text(more + self._keys, style="reverse", no_wrap=True))
        self._screen.update(console.Group(*shown), refresh=True)


class LiveStatus:
    """The context of ``with synk.status(live=True):``; shows `first` until `top` has an answer."""

    def __init__(self, first: Tables) -> None:
        self.last = first  # the tables that were shown last

    def __enter__(self) -> None:
        """Show the status, and start the process that watches."""
        with contextlib.ExitStack() as stack:
            show = stack.enter_context(_display(self))
            show(self.last)
            mine = "--pid", str(os.getpid())
            child = subprocess.Popen(
                module_command("synkhronos", "top", "--json", "--interval", "1", *mine),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C is for this process
            )
            stack.callback(child.stdout.close)
            stack.callback(child.wait)
            thread = threading.Thread(target=self._follow, args=(child.stdout, show), daemon=True)
            stack.callback(thread.join)
            stack.callback(child.terminate)
            thread.start()
            self._stack = stack.pop_all()
        # The block of a generator may never be left, but the thread must end before Python does.
        self._pid = os.getpid()
        atexit.register(self._close)

    def __exit__(self, *raised: Any) -> None:
        """Leave what was shown last."""
        atexit.unregister(self._close)
        self._close()

    def _close(self):
        if os.getpid() == self._pid:  # a process that is forked in the block has no thread
            self._stack.close()

    def _follow(self, lines, show):
        for line in lines:
            with contextlib.suppress(ValueError):  # the last line may be cut off
                self.last = Watched(merged([json.loads(line)]))
                show(self.last)


@contextlib.contextmanager
def _display(status):
    """Yield a function that shows tables in place of the last ones."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if hasattr(shell, "kernel"):
        from IPython.display import display

        yield display(status.last, display_id=True).update
    elif sys.stdout.isatty():
        with screen() as live:
            yield lambda tables: live.update(_in_terminal(tables, live.console.width), refresh=True)
    else:
        try:
            yield lambda tables: None
        finally:
            sys.stdout.write(f"{status.last}\n")


def _in_terminal(tables, width):
    from rich.text import Text

    return tables.rich(width) if isinstance(tables, Watched) else Text(repr(tables))
