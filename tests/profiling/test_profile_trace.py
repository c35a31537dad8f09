"""Events of a trace lie inside one another, whatever clock they have and however it is rounded."""

import json

import numpy as np
import pytest

from synkhronos.profiling.timeline import SPAN, Part, Timeline
from synkhronos.profiling.views import trace_events

DAY = 86_400 * 10**9  # nanoseconds


def readers(event):
    """Yield the begin and end of an event, as readers have them: exact, cut, and rounded."""
    begin, length = event["ts"], event["dur"]
    yield begin, begin + length
    for whole in (int, round):
        yield whole(begin * 1000), whole(begin * 1000) + whole(length * 1000)


@pytest.mark.parametrize("up", [0, DAY, 31 * DAY, 100 * DAY])
def test_parts_lie_inside_of_their_calls(up):
    random = np.random.RandomState(1)
    spans, now = [], up
    for call in range(500):
        begin = now
        for _ in range(3):
            part = now + random.randint(2)
            now = part + random.randint(5000)
            spans.append((Part.COMPUTE, part, now, 0, call))
        spans.append((Part.CALL, begin, now, 0, 0))
        now += random.randint(2)
    timeline = Timeline([np.array(spans, SPAN)], ["f"], 0)
    events = json.loads(json.dumps(trace_events(1, "test", {"rank 0": timeline.boxes[0]})))
    events = [event for event in events if event["ph"] == "X"]
    calls = {event["args"]["call"]: event for event in events if event["cat"] == "call"}
    assert len(events) == 4 * len(calls) == 2000
    for event in events:
        around = calls[event["args"]["call"]]
        for (begin, end), (first, last) in zip(readers(event), readers(around)):
            assert first <= begin <= end <= last
    for one, next_one in zip(range(499), range(1, 500)):
        for (_, end), (begin, _) in zip(readers(calls[one]), readers(calls[next_one])):
            assert end <= begin
