"""From the spans of each rank to the times of each call on each rank: pure arithmetic.

    spans of the master ──▶ calls, one after another; a call may contain another
    spans of a worker   ──▶ by the number of their command, the call that sent the command

Parts of a call are with blocks, so of any two spans of a rank that overlap, one contains the other.
A part's own time is the time of its span, less the time of the spans inside. All clocks are
CLOCK_MONOTONIC, which the processes of a machine share.
"""

import enum
from typing import NamedTuple

import numpy as np


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

_PROCESS = 1  # in traces, numbers of processes and threads start at 1: 0 is the kernel's


class Box(NamedTuple):
    """A call on one rank, or a part of one, as pictures and traces show it."""

    name: str
    begin: int
    end: int
    nbytes: int
    call: int
    is_call: bool


class _Call(NamedTuple):
    name: int
    begin: int
    end: int
    raised: bool


class Timeline:
    """The calls and their parts on all ranks.

    Parameters
    ----------
    recorded : list of numpy.ndarray
        The spans of each rank, dtype SPAN, in rank order.
    names : list of str
        Names of functions and collectives, by number.
    master_rank : int

    Attributes
    ----------
    boxes : list of list of Box
        The boxes of each rank, by the time of their begin.
    """

    def __init__(self, recorded, names, master_rank):
        self._names = names
        self._call_of = {}  # number of a command -> number of the call that sent it
        self._left = {}  # number of a command -> time when the master left it
        self._took = {}  # (number of a call, rank) -> {part: nanoseconds, "bytes": number}
        self.boxes = [[] for _ in recorded]
        spans = recorded[master_rank].tolist()
        calls = sorted((s for s in spans if s[0] <= Part.RAISED), key=lambda s: (s[1], -s[2]))
        self._calls = [_Call(value, *when, part == Part.RAISED) for part, *when, value, _ in calls]
        others = [span for span in spans if span[0] > Part.RAISED]
        for part, end, command, call in self._add(master_rank, others, range(len(calls))):
            if part == Part.START:
                self._call_of[command] = call
            elif part == Part.FINISH:
                self._left[command] = end
        # Sorted, so that of several commands in one call the last one stays.
        self._last = {call: command for command, call in sorted(self._call_of.items())}
        for rank, array in enumerate(recorded):
            if rank != master_rank:
                self._read_worker(rank, array.tolist())

    def _read_worker(self, rank, spans):
        """Add the spans of a worker to the calls; its waits have to be clipped to their calls."""
        kept, edges, left = [], {}, 0
        for part, begin, end, value, command in spans:
            call = self._call_of.get(command)
            if call is None:
                continue  # the master recorded no call, or dropped it
            first, last = self._calls[call].begin, self._calls[call].end
            if part == Part.START:  # clip the wait to this call
                begin = min(max(first, left), end)
            elif part == Part.FINISH:
                # The worker wrote it when it arrived: the wait ends when the master leaves the
                # command, or, after the last command of a call, when the call ends.
                end = max(begin, self._left.get(command, 0))
                if command == self._last[call]:
                    end = max(end, last)
                left = end
            kept.append((part, begin, end, value, command))
            first, last = edges.get(call, (begin, end))
            edges[call] = min(first, begin), max(last, end)
        for _ in self._add(rank, kept, edges, edges):
            pass

    def _add(self, rank, spans, calls, edges=None):
        """Add spans of a rank; yield (part, end, command, number of the call) of each part.

        `calls` are the numbers of the calls to add; `edges` has the begin and end of each on this
        rank, where they are not those of the master.
        """
        found = [(begin, -end, part, value, command) for part, begin, end, value, command in spans]
        for number in calls:
            begin, end = edges[number] if edges else self._calls[number][1:3]
            found.append((begin, -end, Part.CALL, 0, number))
        around = []  # the spans that contain this one: (end, number of the call, name of the part)
        for begin, end, part, value, command in sorted(found, key=lambda each: each[:3]):
            end = -end
            while around and around[-1][0] <= begin:
                around.pop()
            if part == Part.CALL:
                number, name = command, REST
                title = self._names[self._calls[number].name]
            elif around:
                number, name = around[-1][1], NAMES[part - PARTS[0]]
                title = name
                yield part, end, command, number
            else:
                continue  # in no call
            if around:  # the time inside is not part of the outer span's own time
                self._took[around[-1][1], rank][around[-1][2]] -= end - begin
            took = self._took.setdefault((number, rank), dict.fromkeys((*NAMES, "bytes"), 0))
            took[name] += end - begin
            took["bytes"] += value
            around.append((end, number, name))
            self.boxes[rank].append(Box(title, begin, end, value, number, part == Part.CALL))

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
            row = number, self._names[call.name], call.name, rank, call.raised, 1e-9 * call.begin
            rows.append((*row, sum(seconds), *seconds, took["bytes"]))
        return np.array(rows, fields)

    def outer_calls(self, rank) -> list:
        """Return the boxes of a rank's calls that are not inside another call."""
        found = []
        for box in self.boxes[rank]:
            if box.is_call and not (found and box.begin < found[-1].end):
                found.append(box)
        return found

    def events(self, process, ranks) -> list:
        """Return the boxes of all ranks as events of the trace-event format.

        Parameters
        ----------
        process : str
            The name of the process.
        ranks : list of str
            The names of the ranks, which are shown as its threads.

        References
        ----------
        "Trace Event Format", of the Chromium project: complete events (X) and metadata (M).
        """
        events = [_metadata("process_name", 0, name=process)]
        for rank, name in enumerate(ranks):
            events.append(_metadata("thread_name", rank, name=name))
            events.append(_metadata("thread_sort_index", rank, sort_index=rank))
        for rank, boxes in enumerate(self.boxes):
            for box in boxes:
                details = {"call": box.call}
                if box.is_call:
                    details["raised"] = self._calls[box.call].raised
                else:
                    details["bytes"] = box.nbytes
                events.append(
                    {
                        "name": box.name,
                        "cat": "call" if box.is_call else "part",
                        "ph": "X",
                        "pid": _PROCESS,
                        "tid": 1 + rank,
                        "ts": _microseconds(box.begin),
                        "dur": _microseconds(box.end) - _microseconds(box.begin),
                        "args": details,
                    }
                )
        return events


def _microseconds(nanoseconds):
    """Return a time in whole eighths of a microsecond, which floats hold exactly.

    So the end of a part and the begin of the next stay equal when a reader adds them up.
    """
    return nanoseconds // 125 / 8


def _metadata(what, rank, **details):
    return {"name": what, "ph": "M", "pid": _PROCESS, "tid": 1 + rank, "args": details}
