"""Views of profiles: a table as text, a trace, a picture, and their files.

A view of a session or a store has spans as bars in tracks:

    View ── summary() ──▶ table         ──▶ .txt
         ── bars     ──▶ trace_events  ──▶ .json
         ── bars     ──▶ plot()        ──▶ .png, .svg, ...
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Iterable, NamedTuple, Sequence

from synkhronos._host import pythons
from synkhronos._machine.files import new_file
from synkhronos._wording import one_line
from synkhronos.profiling.tables import as_html

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".json", ".txt")
KINDS = ".json (a trace) or .txt (the summary)"


class Bar(NamedTuple):
    """A span in a trace or picture; `kind` selects its colour, and times are in nanoseconds."""

    kind: str
    begin: int
    end: int
    label: str
    category: str
    details: dict[str, Any]


class View:
    """Shows spans that were recorded.

    A derived class has also::

        summary()   `_text()`, with a docstring of its own
        _content()  a headline, and the title, the names of the columns and the rows of each table
        _bars()     a dict of tracks: the bars of each, by the time of their begin
        _process()  for traces: the number of the process, its name, and a dict about it
    """

    _colours: ClassVar[dict[str, str]]  # of each kind
    _inches: ClassVar[float]  # of a row in pictures

    def _text(self) -> str:
        headline, tables = self._content()
        lines = [headline]
        for title, columns, rows in tables:
            lines += [*(["", title] if title else []), *table([columns, *rows])]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return as_html(*self._content())

    def save(self, file: str | os.PathLike) -> None:
        """Write a trace, or the summary.

        Parameters
        ----------
        file : str or path
            ``.json`` is a trace in the trace-event format, which https://ui.perfetto.dev and
            chrome://tracing open: a track for each rank, or for each thread, process and key of a
            store, in microseconds of CLOCK_MONOTONIC. So traces of the processes of one machine
            can be put together. ``.txt`` is the summary.

        Raises
        ------
        TypeError, ValueError
            When `file` is not a path, or has another suffix.
        OSError
            When the file can't be written.
        """
        path = check_file("file", file, SUFFIXES, KINDS)
        if path.suffix.lower() == ".txt":
            text = self.summary() + "\n"
        else:
            number, name, others = self._process()
            events = trace_events(number, name, self._bars())
            trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": others}
            text = json.dumps(trace)
        with new_file(path) as out:
            out.write(text.encode())

    def _draw(self, file: Any, tracks: dict[str, list[Bar]], marked: Sequence[Bar] = ()) -> Figure:
        """Draw the bars of tracks, and mark some at their begin, with their label."""
        try:
            from matplotlib.figure import Figure
            from matplotlib.patches import Patch
        except ImportError as error:
            raise ImportError(f"plot() needs Matplotlib: {pythons.install('plot')}") from error

        figure = Figure(layout="constrained")
        if file is not None:
            suffixes = [f".{name}" for name in figure.canvas.get_supported_filetypes()]
            file = check_file("file", file, suffixes, f"one of {', '.join(sorted(suffixes))}")
        begin = min((bar.begin for bars in tracks.values() for bar in bars), default=0)
        figure.set_size_inches(10, 1.8 + self._inches * len(tracks))
        axes = figure.subplots()
        for row, bars in enumerate(tracks.values()):
            for bar in bars:
                left, width = 1e-6 * (bar.begin - begin), 1e-6 * (bar.end - bar.begin)
                axes.barh(row, width, 0.8, left, color=self._colours[bar.kind])
        for bar in marked:
            left = 1e-6 * (bar.begin - begin)
            axes.axvline(left, color="0.3", linewidth=0.8)
            axes.annotate(bar.label, (left, -0.5), fontsize="small", parse_math=False)
        axes.set_yticks(range(len(tracks)), list(map(one_line, tracks)), parse_math=False)
        axes.set_ylim(max(1, len(tracks)) - 0.5, -0.9 if marked else -0.5)
        axes.set_xlabel("ms")
        handles = [Patch(color=colour, label=name) for name, colour in self._colours.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=9, fontsize="small")
        if file is not None:
            with new_file(file) as out:
                figure.savefig(out, format=file.suffix[1:], dpi=110)
        return figure


def trace_events(number: int, process: str, tracks: dict[str, list[Bar]]) -> list[dict[str, Any]]:
    """Return the bars of a process in Chromium's trace-event format: events (X), metadata (M)."""

    def named(what, thread, **details):
        return {"name": what, "ph": "M", "pid": number, "tid": thread, "args": details}

    events = [named("process_name", 1, name=process)]
    for thread, (track, bars) in enumerate(tracks.items(), start=1):  # 0 is the kernel's
        events.append(named("thread_name", thread, name=track))
        events.append(named("thread_sort_index", thread, sort_index=thread - 1))
        for bar in bars:
            begin = _microseconds(bar.begin)
            event = {"name": bar.label, "cat": bar.category, "ph": "X", "pid": number}
            event.update(tid=thread, ts=begin, dur=_microseconds(bar.end) - begin, args=bar.details)
            events.append(event)
    return events


def _microseconds(nanoseconds):
    # Floats hold eighths exactly, so sums in a reader keep ends equal to the begins that follow.
    return nanoseconds // 125 / 8


def table(lines: Iterable[Sequence[Any]]) -> list[str]:
    """Return lines of cells as text: the first column aligned left, the others right.

    >>> table([("", "calls"), ("step", 2)])
    ['      calls', 'step      2']
    """
    cells = [[str(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return [
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
        for line in cells
    ]


def check_file(argument: str, file: Any, suffixes: Sequence[str], what: str) -> Path:
    """Return the path of a file; raise ValueError for other suffixes, which `what` names."""
    if not isinstance(file, (str, os.PathLike)) or not isinstance(os.fspath(file), str):
        raise TypeError(f"{argument} must be a path, got {file!r}.")
    path = Path(file)
    if path.suffix.lower() not in suffixes:
        raise ValueError(f"{argument} must end in {what}, got {str(path) if file else ''!r}.")
    return path
