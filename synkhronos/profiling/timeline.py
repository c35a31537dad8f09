"""Compute the times of each call on each rank from the spans of the ranks.

    spans of the master ──▶ calls, one after another; a call may contain another
    spans of a worker   ──▶ by the number of their command, the call that sent the command

A part of a call takes its span's own time. All clocks are CLOCK_MONOTONIC, which the processes of a
machine share.
"""

import enum

import numpy as np

from synkhronos.profiling.spans import Span, nested
from synkhronos.profiling.views import Bar


class Part(enum.IntEnum):
    """The kinds of spans: calls, and parts of calls."""

    CALL = 1
    RAISED = 2  # a call that raised
    STAGE = 3  # the master copies arrays into shared memory
    START = 4  # the master sends the command; a worker waits for it
    ROWS = 5  # the rank selects its rows of the inputs
    COMPUTE = 6  # the rank runs the compiled function
    REDUCE = 7  # collectives, reductions inside functions, reductions of outputs
    MEET = 8  # the rank waits for others in a reduction
    FINISH = 9  # the rank waits for others at the end of the call


PARTS = tuple(part for part in Part if part > Part.RAISED)
NUMBERS = {part.name.lower(): int(part) for part in PARTS}
REST = "rest"  # the time of a call that is in no part
NAMES = (*NUMBERS, REST)

# Times are in nanoseconds. The value of a part is the number of bytes that it moved; the value of a
# call is the number of its name. The command is the number of the command that the rank ran.
SPAN = np.dtype([(name, np.int64) for name in ("part", "begin", "end", "value", "command")])


class Timeline:
    """The calls and their parts on all ranks; `bars` has those of each rank, by their begin.

    `recorded` has an array of dtype SPAN for each rank, and `names` those of functions, by number.
    """

    def __init__(self, recorded, names, master_rank):
        self._names = names
        self._took = {}  # (number of a call, rank) -> {part: nanoseconds, "bytes": number}
        self.bars = [[] for _ in recorded]
        spans = recorded[master_rank].tolist()
        calls = sorted((s for s in spans if s[0] <= Part.RAISED), key=lambda s: (s[1], -s[2]))
        # The key of each is the number of its name.
        self._calls = [Span(master_rank, part, value, *when) for part, *when, value, _ in calls]
        parts = [span for span in spans if span[0] > Part.RAISED]
        whole = {number: (call.begin, call.end) for number, call in enumerate(self._calls)}
        sent = {}  # number of a command -> number of the call that sent it
        left = {}  # number of a command -> time when the master left it
        for span, call in self._add(master_rank, parts, whole):
            if span.name == Part.START:
                sent[span.key] = call
            elif span.name == Part.FINISH:
                left[span.key] = span.end
        # Sorted, so that of several commands in one call the last one stays.
        last = {call: command for command, call in sorted(sent.items())}
        for rank, array in enumerate(recorded):
            if rank != master_rank:
                self._add(rank, *self._clipped(array.tolist(), sent, left, last))

    def _clipped(self, spans, sent, left, last):
        """Return the spans of a worker with its waits clipped to their calls, and those calls."""
        kept, calls, free = [], {}, 0
        for part, begin, end, value, command in spans:
            call = sent.get(command)
            if call is None:
                continue  # the master recorded no call, or dropped it
            if part == Part.START:
                begin = min(max(self._calls[call].begin, free), end)
            elif part == Part.FINISH:
                # The worker wrote it when it arrived: the wait ends when the master leaves the
                # command, or, after the last command of a call, when the call ends.
                end = max(begin, left.get(command, 0))
                if command == last[call]:
                    end = max(end, self._calls[call].end)
                free = end
            kept.append((part, begin, end, value, command))
            first, until = calls.get(call, (begin, end))
            calls[call] = min(first, begin), max(until, end)
        return kept, calls

    def _add(self, rank, parts, calls):
        """Add a rank's parts of `calls`, {number: (begin, end)}; return each with its number."""
        numbered = []
        spans = [Span(rank, Part.CALL, number, *when) for number, when in calls.items()]
        spans += [Span(rank, part, key, *when, value) for part, *when, value, key in parts]
        for each in nested(spans):  # a call contains a part of the same times
            span, around = each.span, each
            while around is not None and around.span.name != Part.CALL:
                around = around.outer
            if around is None:
                continue  # in no call
            number = around.span.key
            if around is each:
                name, category, call = REST, "call", self._calls[number]
                raised = call.name == Part.RAISED
                label, details = self._names[call.key], {"call": number, "raised": raised}
            else:
                name, category = NAMES[span.name - PARTS[0]], "part"
                label, details = name, {"call": number, "bytes": span.nbytes}
                numbered.append((span, number))
            took = self._took.setdefault((number, rank), dict.fromkeys((*NAMES, "bytes"), 0))
            took[name] += each.own
            took["bytes"] += span.nbytes
            self.bars[rank].append(Bar(name, span.begin, span.end, label, category, details))
        return numbered

    def table(self) -> np.ndarray:
        """Return one record for each call and rank; see `synkhronos.profiling.Profile.calls`."""
        width = max(map(len, self._names), default=1)
        fields = [("call", np.int64), ("name", f"U{width}"), ("function", np.int64)]
        fields += [("rank", np.int64), ("raised", bool), ("begin", float), ("seconds", float)]
        fields += [*((name, float) for name in NAMES), ("bytes", np.int64)]
        rows = []
        for (number, rank), took in sorted(self._took.items()):
            call = self._calls[number]
            seconds = [1e-9 * took[name] for name in NAMES]
            row = number, self._names[call.key], call.key, rank, call.name == Part.RAISED
            rows.append((*row, 1e-9 * call.begin, sum(seconds), *seconds, took["bytes"]))
        return np.array(rows, fields)

    def outer_calls(self, rank) -> list:
        """Return the bars of a rank's calls that are not inside another call."""
        outer = []
        for bar in self.bars[rank]:
            if bar.kind == REST and not (outer and bar.begin < outer[-1].end):
                outer.append(bar)
        return outer
