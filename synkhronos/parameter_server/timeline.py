"""Profiles of a store: when it pushed, reduced, waited, and what was under way meanwhile.

    engine.push, pull ── timed while a profile is on ──┐
    engine.record     ── reduce, wait, copy, callback ─┼──▶ Span ──▶ summary, trace, picture
    link.spans        ── of the process that sends ────┘

A thread's time between two calls of the store is its computing. All clocks are CLOCK_MONOTONIC,
which the processes of a machine share. Without a profile nothing is timed.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from synkhronos._wording import count
from synkhronos.parameter_server.errors import OutOfTurn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = ("compute", "push", "reduce", "copy", "callback", "wait", "away", "send", "receive")
# Waits are orange; what others do meanwhile is blue.
_COLOURS = {
    "compute": "0.85",
    "push": "C2",
    "reduce": "C8",
    "copy": "C4",
    "callback": "C3",
    "wait": "#fd8d3c",
    "away": "#c6dbef",
    "send": "C0",
    "receive": "C9",
}


class Span(NamedTuple):
    """A time in which one thread, process or key was in one state.

    ``track`` says whose it is, ``name`` is one of NAMES, ``begin`` and ``end`` are seconds of
    CLOCK_MONOTONIC, and ``nbytes`` is 0 where nothing was sent.
    """

    track: str
    name: str
    key: int | str | None
    begin: float
    end: float
    nbytes: int = 0


class Profile:
    """Spans of a store, recorded in the block of a ``with``; made by ``store.profile()``.

    ============  ==================================================================================
    span          meaning
    ============  ==================================================================================
    ``compute``   a thread that pushes is in no call of the store
    ``push``      a call hands an array over; with servers it is copied to the process beside it
    ``reduce``    arrays of devices are summed
    ``copy``      a result is copied to the array of a pull
    ``callback``  a callback runs
    ``wait``      a call waits for a result
    ``away``      the array of a key is on its way to the servers, or the result on its way back
    ``send``      the process beside this one sends, ``receive``: it receives
    ============  ==================================================================================

    Examples
    --------
    >>> import numpy as np
    >>> from synkhronos import parameter_server as ps
    >>> with ps.create("local", devices=[0]) as store:
    ...     store.init_key((3,), "w", 0)
    ...     with store.profile() as recorded:
    ...         array = np.ones(3, "float32")
    ...         _ = store.push(array, "w", 0)
    ...         store.pull_req(array, "w", 0).wait()
    >>> sorted({span.name for span in recorded.spans})
    ['compute', 'push']
    >>> [span.key for span in recorded.spans if span.name == "push"]
    ['w', 'w']
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._engine: Any = None
        self._store_link: Any = None
        self._recorded: list[tuple] = []  # (thread, name, key, begin, end)
        self._devices: dict[int, set] = {}  # thread -> the devices that it pushes for
        self._threads: dict[int, str] = {}
        self._handed: dict[tuple, float] = {}  # (key, version) -> when it was handed over
        self._away: list[Span] = []
        self._sent: list[Span] = []
        self._began = self._ended = 0.0

    def __enter__(self) -> Profile:
        engine, self._store_link = self._store._engine, getattr(self._store, "_link", None)
        if engine is None:
            raise OutOfTurn("profile() needs devices: call init() before.")
        if engine.record is not None:
            raise OutOfTurn("a profile of this store is being recorded already.")
        self._engine, self._began = engine, time.monotonic()
        engine.record = self._record
        for name in ("push", "push_all", "push_pull", "pull"):
            setattr(engine, name, self._timed(getattr(engine, name)))
        backend = engine.backend
        if backend.is_remote:
            backend.accept = self._handing(backend.accept)
            engine.publish = self._arriving(engine.publish)
        if hasattr(self._store_link, "record"):
            self._store_link.record(True)
        return self

    def __exit__(self, *error: Any) -> None:
        engine = self._engine
        for owner, names in (
            (engine, ("push", "push_all", "push_pull", "pull", "publish")),
            (engine.backend, ("accept",)),
        ):
            for name in names:
                vars(owner).pop(name, None)  # the method of the class is there again
        engine.record = None
        self._ended = time.monotonic()
        if hasattr(self._store_link, "record"):
            found = self._store_link.spans()
            self._store_link.record(False)
            tracks = {"send": "sending", "receive": "receiving"}
            self._sent = [Span(tracks[name], name, *rest) for name, *rest in found]

    def _record(self, name, key, begin, end):
        thread = threading.get_ident()
        if thread not in self._threads:
            self._threads[thread] = threading.current_thread().name
        self._recorded.append((thread, name, getattr(key, "name", None), begin, end))

    def _timed(self, method):
        def call(first, *arguments, **named):
            device = getattr(first, "device", None)
            if device is None and arguments:  # pull(key, slot, ...)
                device = getattr(arguments[0], "device", None)
            self._devices.setdefault(threading.get_ident(), set()).add(device)
            keys = [pair[0] for pair in first] if isinstance(first, list) else [first]
            begin = time.monotonic()
            try:
                return method(first, *arguments, **named)
            finally:
                end = time.monotonic()
                for key in keys:  # one call of one caller may be for several
                    self._record("push", getattr(key, "key", key), begin, end)

        return call

    def _handing(self, accept):
        def call(closed):
            self._handed[closed.key.name, closed.version] = time.monotonic()
            return accept(closed)

        return call

    def _arriving(self, publish):
        def call(key, version, buffer):
            begin = self._handed.pop((key.name, version), None)
            if begin is not None:
                track = f"key {key.name}"
                self._away.append(Span(track, "away", key.name, begin, time.monotonic()))
            return publish(key, version, buffer)

        return call

    @property
    def spans(self) -> list[Span]:
        """The spans until now, by the time of their begin."""
        found, own = [], {}
        for thread, name, key, begin, end in list(self._recorded):
            span = Span(self._track(thread), name, key, begin, end)
            found.append(span)
            if thread in self._devices:
                own.setdefault(thread, []).append(span)
        for thread, spans in own.items():
            found += _between(spans, self._track(thread), self._began)
        return sorted([*found, *self._away, *self._sent], key=lambda span: (span.begin, -span.end))

    def _track(self, thread):
        devices = self._devices.get(thread)
        if devices is None:
            return self._threads[thread]
        known = sorted(each for each in devices if each is not None)
        if not known:
            return "caller"
        return f"device{'s' * (len(known) > 1)} {', '.join(map(str, known))}"

    def summary(self) -> str:
        """Return a table, as text: the milliseconds of each thread, process and key in each state.

        Examples
        --------
        >>> import numpy as np
        >>> from synkhronos import parameter_server as ps
        >>> with ps.create("local") as store:
        ...     store.init("w", np.zeros(3))
        ...     with store.profile() as recorded:
        ...         _ = store.pushpull("w", [np.ones(3)]).wait()
        >>> print(recorded.summary())
        0... s of worker 0 of 1, 1 key
        milliseconds compute push
        caller ...
        """
        spans = self.spans
        end = self._ended or time.monotonic()
        keys = {span.key for span in spans if span.key is not None}
        lines = [
            f"{end - self._began:.3f} s of worker {self._store.rank} of {self._store.num_workers}, "
            f"{count(len(keys), 'key')}"
        ]
        names = [name for name in NAMES if any(span.name == name for span in spans)]
        lines.append(f"{'milliseconds':16}" + "".join(f"{name:>10}" for name in names))
        for track in self._tracks(spans):
            took, own = dict.fromkeys(names, 0.0), [s for s in spans if s.track == track]
            if own[0].name in ("send", "receive"):  # of several keys at once
                took[own[0].name] = _seconds_of_all(own)
            else:
                for span, seconds in _own_seconds(own):
                    took[span.name] += seconds
            lines.append(f"{track:16.16}" + "".join(f"{1e3 * took[n]:10.2f}" for n in names))
        return "\n".join(lines)

    @staticmethod
    def _tracks(spans):
        """Return the tracks: threads that push first, keys last."""

        def place(track):
            kinds = ("device", "caller", "synkhronos", "sending", "receiving")
            return next((i for i, kind in enumerate(kinds) if track.startswith(kind)), 2), track

        seen = dict.fromkeys(span.track for span in spans)
        keys = [track for track in seen if track.startswith("key ")]
        return sorted((t for t in seen if t not in keys), key=place) + keys

    def save(self, file: str | os.PathLike) -> None:
        """Write a trace (``.json``), or the summary (``.txt``).

        Parameters
        ----------
        file : str or path
            A trace is in the trace-event format, which https://ui.perfetto.dev and
            chrome://tracing open. Times are microseconds of CLOCK_MONOTONIC, so that the traces of
            the workers of one machine can be put together: each is a process of its own.

        Raises
        ------
        TypeError, ValueError
            For anything but a path, or another suffix.
        """
        path = _path(file, (".json", ".txt"))
        text = self.summary() + "\n"
        if path.suffix.lower() == ".json":
            text = json.dumps({"traceEvents": self._events(), "displayTimeUnit": "ms"})
        path.write_text(text, encoding="utf-8")

    def _events(self):
        spans, process = self.spans, 1 + self._store.rank
        events = [_metadata("process_name", process, 0, f"worker {self._store.rank}")]
        for thread, track in enumerate(self._tracks(spans), start=1):
            events.append(_metadata("thread_name", process, thread, track))
            for span in spans:
                if span.track == track:
                    begin, end = round(1e6 * span.begin, 3), round(1e6 * span.end, 3)
                    name = span.name if span.key is None else f"{span.name} {span.key}"
                    events.append(
                        {
                            "name": name,
                            "cat": span.name,
                            "ph": "X",
                            "pid": process,
                            "tid": thread,
                            "ts": begin,
                            "dur": round(end - begin, 3),
                            "args": {"key": span.key, "bytes": span.nbytes},
                        }
                    )
        return events

    def plot(self, file: str | os.PathLike | None = None) -> Figure:
        """Draw all spans along an axis of time: a row for each thread, process and key.

        Parameters
        ----------
        file : str or path, optional
            In any format that Matplotlib knows: ``.png``, ``.svg``, ...

        Returns
        -------
        matplotlib.figure.Figure

        Raises
        ------
        ImportError
            Without Matplotlib.
        """
        try:
            from matplotlib.figure import Figure
            from matplotlib.patches import Patch
        except ImportError as error:
            raise ImportError("Profile.plot() needs Matplotlib: pip install matplotlib.") from error

        spans = self.spans
        tracks = self._tracks(spans)
        figure = Figure(figsize=(10, 1.6 + 0.35 * len(tracks)), layout="constrained")
        axes = figure.subplots()
        for span in spans:
            left, width = 1e3 * (span.begin - self._began), 1e3 * (span.end - span.begin)
            row = tracks.index(span.track)
            axes.barh(row, width, 0.8, left, color=_COLOURS[span.name], linewidth=0)
        axes.set_yticks(range(len(tracks)), tracks)
        axes.set_ylim(len(tracks) - 0.5, -0.5)
        axes.set_xlabel("ms")
        names = [name for name in NAMES if any(span.name == name for span in spans)]
        handles = [Patch(color=_COLOURS[name], label=name) for name in names]
        figure.legend(handles=handles, loc="outside lower center", ncols=9, fontsize="small")
        if file is not None:
            figure.savefig(_path(file, None), dpi=110)
        return figure

    def __repr__(self) -> str:
        state = "ended" if self._ended else "being recorded" if self._began else "not begun"
        return f"<Profile of {count(len(self._recorded), 'call')}, {state}>"


def _between(spans, track, begin):
    """Return spans of computing: where a thread was in none of the spans, until the last of them.

    >>> [span[3:5] for span in _between([Span("a", "push", 0, 2, 4), Span("a", "wait", 0, 5, 6)],
    ...                                 "a", 1)]
    [(1, 2), (4, 5)]
    """
    found, at = [], begin
    for span in sorted(spans, key=lambda span: span.begin):
        if span.begin > at:
            found.append(Span(track, "compute", None, at, span.begin))
        at = max(at, span.end)
    return found


def _own_seconds(spans):
    """Return pairs of a span and its seconds, less those of the spans inside; by begin.

    >>> inner, outer = Span("a", "reduce", 0, 1, 2), Span("a", "push", 0, 0, 4)
    >>> [(span.name, seconds) for span, seconds in _own_seconds([inner, outer])]
    [('push', 3), ('reduce', 1)]
    """
    pairs, around = [], []
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        pair = [span, span.end - span.begin]
        while around and around[-1][0].end <= span.begin:
            around.pop()
        if around:
            around[-1][1] -= pair[1]
        around.append(pair)
        pairs.append(pair)
    return [tuple(pair) for pair in pairs]


def _seconds_of_all(spans):
    """Return the seconds in which at least one of some spans was there.

    >>> _seconds_of_all([Span("a", "send", 0, 1, 3), Span("a", "send", 1, 2, 4)])
    3
    """
    total, at = 0, float("-inf")
    for span in sorted(spans, key=lambda span: span.begin):
        total += max(0, span.end - max(at, span.begin))
        at = max(at, span.end)
    return total


def _path(file, suffixes):
    if not isinstance(file, (str, os.PathLike)) or not isinstance(os.fspath(file), str):
        raise TypeError(f"file must be a path, got {file!r}.")
    path = Path(file)
    if suffixes is not None and path.suffix.lower() not in suffixes:
        raise ValueError(f"file must end in {' or '.join(suffixes)}, got {str(path)!r}.")
    return path


def _metadata(what, process, thread, name):
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
