"""Spans, which all profiles consist of, and sums of their times.

    session  every rank writes its parts of calls into shared memory      recorder, recording
    store    threads and the process that sends append to a list          parameter_server.timeline
    rule     start() and end(mode) append to a list, summed into columns  rules.recorder

The spans of one track are nested: of two that overlap, one contains the other. A span's own time is
its time less that of the spans inside.
"""

from __future__ import annotations

from typing import Any, Iterable, NamedTuple


class Span(NamedTuple):
    """A time in which one rank, thread, process or key was in one state.

    ``track`` is the rank, thread, process or key, and ``name`` the state. ``begin`` and ``end`` are
    times of a monotonic clock, in any unit; ``nbytes`` is 0 if nothing was copied or sent.
    """

    track: Any
    name: Any
    key: Any
    begin: float
    end: float
    nbytes: int = 0


class Nested:
    """A span among others: `outer` is the innermost one that contains it, or None."""

    __slots__ = ("outer", "own", "span")

    def __init__(self, span: Span, outer: Nested | None) -> None:
        self.span, self.outer = span, outer
        self.own = span.end - span.begin  # `nested` subtracts the spans inside


def nested(spans: Iterable[Span]) -> list[Nested]:
    """Return the spans of one track by their begin, each with its own time.

    Of two spans with the same times the first contains the second.

    >>> inner, outer = Span("a", "reduce", 0, 1, 2), Span("a", "push", 0, 0, 4)
    >>> [(each.span.name, each.own) for each in nested([inner, outer])]
    [('push', 3), ('reduce', 1)]
    """
    result: list[Nested] = []
    outer = None
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        while outer is not None and outer.span.end <= span.begin:
            outer = outer.outer
        if outer is not None:
            outer.own -= span.end - span.begin
        outer = Nested(span, outer)
        result.append(outer)
    return result


def own_times(names: Iterable[Any], spans: Iterable[Span]) -> dict[Any, float]:
    """Return the sum of the own times of the spans of each name, in one track.

    >>> own_times(["push", "wait"], [Span("a", "push", 0, 0, 4), Span("a", "wait", 0, 1, 2)])
    {'push': 3.0, 'wait': 1.0}
    """
    took = dict.fromkeys(names, 0.0)
    for each in nested(spans):
        took[each.span.name] += each.own
    return took
