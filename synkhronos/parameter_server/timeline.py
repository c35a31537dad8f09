"""Profiles of a store: when it pushed, reduced and waited, and which arrays were under way.

    Engine._held   ── pushes and pulls ───────────────────┐
    engine, rounds ── reduce, wait, copy, callback, away ─┼──▶ Span ──▶ summary, trace, picture
    link.spans     ── of the process that sends ──────────┘

A thread's time between two calls of the store is its computing. All clocks are CLOCK_MONOTONIC,
which the processes of a machine share. Without a profile `engine.recording` is None.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar, Iterable, Iterator

from synkhronos._wording import count, one_line
from synkhronos.parameter_server.errors import OutOfTurn
from synkhronos.profiling.spans import Span, own_times
from synkhronos.profiling.views import Bar, View

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TRACKS = {"send": "sending", "receive": "receiving"}


class StoreRecording:
    """The spans of a store since its profile began; `engine.recording` while it runs."""

    def __init__(self) -> None:
        self.spans: list[Span] = []  # their tracks are threads
        self.devices: dict[threading.Thread, set] = {}  # for which a thread pushes
        self.others: list[Span] = []  # of keys, and of the mover
        self._handed: dict[tuple, float] = {}  # (key, version) -> when it was handed over

    def record(self, name: str, key: Any, begin: float, end: float) -> None:
        """Add a span of this thread."""
        thread = threading.current_thread()  # an identifier may be another thread's later
        self.spans.append(Span(thread, name, getattr(key, "name", None), begin, end))

    @contextlib.contextmanager
    def call(self, held: Any, pushed: Any) -> Iterator[None]:
        """Record a call of the engine in a with block: see `Engine._held`."""
        device = None if isinstance(pushed, list) else pushed.device
        keys = [each[0] for each in pushed] if isinstance(pushed, list) else [pushed.key]
        self.devices.setdefault(threading.current_thread(), set()).add(device)
        with held:
            begin = time.monotonic()
            try:
                yield
            finally:
                end = time.monotonic()
                for key in keys:  # one caller may push several keys in a call
                    self.record("push", key, begin, end)

    def note_handed(self, closed: Any) -> None:
        """Note that the array of a round is handed over now, to be sent."""
        self._handed[closed.key.name, closed.version] = time.monotonic()

    def note_arrived(self, key: Any, version: int) -> None:
        """Record how long an array was away, if it has been handed over in this profile."""
        begin, name = self._handed.pop((key.name, version), None), key.name
        if begin is not None:
            self.others.append(Span(f"key {name}", "away", name, begin, time.monotonic()))


class StoreProfile(View):
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

    # Waits are orange; what other processes do meanwhile is blue.
    _colours: ClassVar = {
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
    _inches = 0.35

    def __init__(self, store: Any) -> None:
        self._store = store
        self._engine: Any = None
        self._link: Any = None
        self._recording = StoreRecording()
        self._began = self._ended = 0.0

    def __enter__(self) -> StoreProfile:
        engine, link = self._store._engine, getattr(self._store, "_link", None)
        if engine is None:
            raise OutOfTurn("profile() needs devices: call init() before.")
        if engine.recording is not None:
            raise OutOfTurn("a profile of this store is being recorded already.")
        self._engine, self._link = engine, link if hasattr(link, "record") else None
        self._began = time.monotonic()
        engine.recording = self._recording
        if self._link is not None:
            self._link.record(True)
        return self

    def __exit__(self, *error: Any) -> None:
        self._engine.recording = None
        self._ended = time.monotonic()
        if self._link is not None:
            self._recording.others += [
                Span(_TRACKS[name], name, *rest) for name, *rest in self._link.spans()
            ]
            self._link.record(False)

    @property
    def spans(self) -> list[Span]:
        """The spans until now, by the time of their begin, in seconds of CLOCK_MONOTONIC.

        Each has a ``track`` (a thread, process or key), a ``name`` (see above), a ``key``, or None,
        ``begin``, ``end``, and ``nbytes``, which is 0 where nothing was sent.
        """
        recorded = list(self._recording.spans)
        found = [span._replace(track=self._track(span.track)) for span in recorded]
        for thread in list(self._recording.devices):
            track, own = self._track(thread), [span for span in recorded if span.track is thread]
            for begin, end in gaps(own, self._began):
                found.append(Span(track, "compute", None, begin, end))
        return sorted([*found, *self._recording.others], key=lambda span: (span.begin, -span.end))

    def _track(self, thread):
        devices = self._recording.devices.get(thread)
        if devices is None:
            return thread.name
        known = sorted(each for each in devices if each is not None)
        if not known:
            return "caller"
        return f"device{'s' * (len(known) > 1)} {', '.join(map(str, known))}"

    def _tracks(self):
        """Return the spans of each track: threads that push first, keys last."""
        kinds = ("device", "caller", "synkhronos", "sending", "receiving", "key ")

        def place(track):
            found = next((i for i, kind in enumerate(kinds) if track.startswith(kind)), 2)
            return found, "" if kinds[found] == "key " else track  # keys as they began

        tracks: dict[str, list[Span]] = {}
        for span in self.spans:
            tracks.setdefault(span.track, []).append(span)
        return {track: tracks[track] for track in sorted(tracks, key=place)}

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
        return self._text()

    def _content(self):
        tracks = self._tracks()
        spans = [span for own in tracks.values() for span in own]
        keys = {span.key for span in spans if span.key is not None}
        seconds = (self._ended or time.monotonic()) - self._began
        worker = f"worker {self._store.rank} of {self._store.num_workers}"
        names = [name for name in self._colours if any(span.name == name for span in spans)]
        lines = []
        for track, own in tracks.items():
            if own[0].name in _TRACKS:  # transfers of several keys may overlap
                took = {**dict.fromkeys(names, 0.0), own[0].name: covered(own)}
            else:
                took = own_times(names, own)
            lines.append((one_line(track), *(f"{1e3 * took[name]:.2f}" for name in names)))
        headline = f"{seconds:.3f} s of {worker}, {count(len(keys), 'key')}"
        return headline, [("", ("milliseconds", *names), lines)]

    def plot(self, file: str | os.PathLike | None = None) -> Figure:
        """Draw all spans along an axis of time: a row for each thread, process and key.

        Parameters
        ----------
        file : str or path, optional
            The file to write, in any format that Matplotlib knows: ``.png``, ``.svg``, ...

        Returns
        -------
        matplotlib.figure.Figure

        Raises
        ------
        ImportError
            Without Matplotlib.
        TypeError, ValueError
            When `file` is not a path, or its format is unknown to Matplotlib.
        OSError
            When the file can't be written.
        """
        return self._draw(file, self._bars())

    def _process(self):
        return 1 + self._store.rank, f"worker {self._store.rank}", {}

    def _bars(self):
        return {track: [_bar(span) for span in own] for track, own in self._tracks().items()}

    def __repr__(self) -> str:
        state = "ended" if self._ended else "being recorded" if self._began else "not begun"
        return f"<Profile of {count(len(self._recording.spans), 'call')}, {state}>"


def _bar(span):
    label = span.name if span.key is None else f"{span.name} {span.key}"
    begin, end = round(1e9 * span.begin), round(1e9 * span.end)
    return Bar(span.name, begin, end, label, span.name, {"key": span.key, "bytes": span.nbytes})


def gaps(spans: Iterable[Span], begin: float) -> list[tuple[float, float]]:
    """Return the times between spans, from `begin` to the end of the last span.

    >>> gaps([Span("a", "push", 0, 2, 4), Span("a", "wait", 0, 5, 6)], 1)
    [(1, 2), (4, 5)]
    """
    result, at = [], begin
    for span in sorted(spans, key=lambda span: span.begin):
        if span.begin > at:
            result.append((at, span.begin))
        at = max(at, span.end)
    return result


def covered(spans: list[Span]) -> float:
    """Return how long there was at least one span.

    >>> covered([Span("a", "", 0, 1, 3), Span("a", "", 1, 2, 4), Span("a", "", 0, 7, 8)])
    4
    """
    begin = min(span.begin for span in spans)
    return max(span.end for span in spans) - begin - sum(b - a for a, b in gaps(spans, begin))
