"""Traces, summaries, pictures and their files: the same suite for all profiles."""

import io
import json
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from support.layouts import Layout, forked
from support.profiles import STRANGE, total
from support.running import python

import synkhronos as synk
from synkhronos import parameter_server as ps
from synkhronos.profiling.views import Bar, trace_events

DRAWS = pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs Matplotlib")
DAY = 86_400 * 10**9  # nanoseconds


@pytest.fixture(scope="module")
def ranks():
    if find_spec("matplotlib") is not None:
        from matplotlib.figure import Figure

        figure = Figure()  # its font, which Matplotlib keeps open, is opened before the test
        figure.text(0, 0, "text")
        figure.savefig(io.BytesIO())
    with forked(Layout(2)) as ranks:
        yield ranks


def of_session(*names):
    """Return a profile of two functions of each name."""
    with synk.profile() as recorded:
        for name in names * 2:
            total(name)(np.ones((8, 3)))
    return recorded


def key(name):
    return name.encode(errors="replace").decode()  # UTF-8 has all keys


def of_store(*names):
    """Return a profile of keys and threads of these names; two threads push, one for a device."""

    def pushes(device):
        array = np.ones(100_000, "float32")
        for name in map(key, names):
            store.push(array, name, device)
            store.pull_req(array, name, device, callback=lambda: None)
            store.pull_wait(name, device)

    with ps.create("local", devices=[0, 1]) as store:
        for name in map(key, names):
            store.init_key((100_000,), name, 0)
            store.init_key((100_000,), name, 1)
        with store.profile() as recorded:
            for device in (0, 1):
                threading.Thread(target=pushes, args=(device,), name=f"pushes {device}").start()
            for thread in [each for each in threading.enumerate() if "pushes" in each.name]:
                thread.join()
            now = time.monotonic()
            for name in names:  # these may have the identifiers of the others
                span = "callback", None, now, now
                record = store._engine.recording.record
                thread = threading.Thread(target=record, args=span, name=name)
                thread.start()
                thread.join()
    return recorded


TRACKS = {
    of_session: ["rank 0 (cpu, master)", "rank 1 (cpu)"],
    of_store: ["device 0", "device 1", "total"],
}


@pytest.fixture(params=TRACKS, ids=["session", "store"])
def make(ranks, request):
    return request.param


def saved(recorded, folder):
    """Return the metadata and the complete events of a trace."""
    recorded.save(folder / "TRACE.JSON")
    trace = json.loads((folder / "TRACE.JSON").read_text())
    assert trace["displayTimeUnit"] == "ms"
    events = trace["traceEvents"]
    return [e for e in events if e["ph"] == "M"], [e for e in events if e["ph"] == "X"]


def whole(event):
    """Return the begin and end of an event as a reader has them that cuts to nanoseconds."""
    begin = int(event["ts"] * 1000)
    return begin, begin + int(event["dur"] * 1000)


def test_a_trace_has_complete_events_in_a_track_of_each(make, tmp_path):
    before = time.monotonic()
    recorded = make("total")
    after = time.monotonic()
    metadata, events = saved(recorded, tmp_path)
    assert len({e["pid"] for e in metadata + events}) == 1
    names = {e["tid"]: e["args"]["name"] for e in metadata if e["name"] == "thread_name"}
    order = {e["tid"]: e["args"]["sort_index"] for e in metadata if "sort_index" in e["args"]}
    assert names == dict(enumerate(names.values(), start=1)) and len(metadata) == 1 + 2 * len(names)
    shown = [names[tid] for tid in sorted(order, key=order.get)]
    assert [each for each in shown if "synkhronos" not in each] == TRACKS[make]
    for event in events:
        assert set(event) == {"name", "cat", "ph", "pid", "tid", "ts", "dur", "args"}
        assert 1e6 * before <= event["ts"] <= event["ts"] + event["dur"] <= 1e6 * after
        assert event["args"].get("bytes", 0) >= 0
    assert {e["cat"] for e in events} <= {"call", "part"} | {*ps.StoreProfile._colours}
    for tid in names:  # two events are apart, or one is inside the other
        around = []
        for event in sorted((e for e in events if e["tid"] == tid), key=lambda e: e["ts"]):
            begin, end = whole(event)
            around = [each for each in around if each > begin]
            assert all(end <= each for each in around)
            around.append(end)
        assert begin


@pytest.mark.parametrize("up", [0, DAY, 31 * DAY, 100 * DAY])
def test_parts_lie_inside_of_their_calls_whatever_the_clock_and_the_rounding(up):
    random = np.random.RandomState(1)
    bars, now = [], up
    for _ in range(500):
        begin, parts = now, []
        for _ in range(3):
            part = now + int(random.randint(2))
            now = part + int(random.randint(5000))
            parts.append(Bar("compute", part, now, "compute", "part", {}))
        bars += [Bar("rest", begin, now, "f", "call", {}), *parts]
        now += int(random.randint(2))
    events = json.loads(json.dumps(trace_events(1, "test", {"rank 0": bars})))[3:]
    for first in range(0, 2000, 4):
        call, *parts = events[first : first + 4]
        for cut in (lambda us: us, lambda us: int(us * 1000), lambda us: round(us * 1000)):
            begin, end = cut(call["ts"]), cut(call["ts"]) + cut(call["dur"])
            for part in parts:
                assert begin <= cut(part["ts"]) <= cut(part["ts"]) + cut(part["dur"]) <= end
            for following in events[first + 4 : first + 5]:
                assert end <= cut(following["ts"])


def test_the_suffix_says_what_is_written(make, tmp_path):
    recorded = make("total")
    recorded.save(tmp_path / "summary.txt")
    assert (tmp_path / "summary.txt").read_text() == recorded.summary() + "\n"
    for name in ("trace", "trace.csv"):
        with pytest.raises(ValueError, match=r"file must end in \.json .*\.txt .*, got '.*/trace"):
            recorded.save(tmp_path / name)
    for wrong in (3, b"trace.json", None):
        with pytest.raises(TypeError, match="file must be a path, got "):
            recorded.save(wrong)
    for name in ("missing/trace.json", "missing/summary.txt"):
        with pytest.raises(FileNotFoundError):
            recorded.save(str(tmp_path / name))
    assert [file.name for file in tmp_path.iterdir()] == ["summary.txt"]


@DRAWS
def test_a_picture_has_a_row_for_each_track(make, tmp_path):
    recorded = make("total")
    figure = recorded.plot(str(tmp_path / "PICTURE.PNG"))
    assert (tmp_path / "PICTURE.PNG").read_bytes().startswith(b"\x89PNG")
    [axes] = figure.axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert [each for each in labels if "synkhronos" not in each] == TRACKS[make]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [*recorded._colours]
    heights = {round(patch.get_y() + patch.get_height() / 2) for patch in axes.patches}
    assert heights == set(range(len(labels))) and axes.get_xlabel() == "ms"
    bars = [bar for own in recorded._bars().values() for bar in own]
    longest = max(bar.end - bar.begin for bar in bars)
    widths = [patch.get_width() for patch in axes.patches]
    assert len(widths) == len(bars) and max(widths) == pytest.approx(1e-6 * longest)


@DRAWS
def test_a_wrong_file_is_refused_before_anything_is_drawn(make, tmp_path, monkeypatch):
    recorded = make("total")
    monkeypatch.setattr("matplotlib.figure.Figure.subplots", None)  # which is drawn on
    for file in (3, b"a.png", io.BytesIO()):
        with pytest.raises(TypeError, match="file must be a path, got "):
            recorded.plot(file)
    for file in ("", "picture", tmp_path / "picture.xyz"):
        with pytest.raises(ValueError, match=r"file must end in one of .*\.png.*, got '.*'\."):
            recorded.plot(file)
    monkeypatch.undo()
    with pytest.raises(FileNotFoundError):
        recorded.plot(tmp_path / "missing" / "picture.png")
    assert not [*tmp_path.iterdir()]


def test_without_matplotlib_it_says_what_to_install(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"needs Matplotlib: pip install 'synkhronos\[plot\]'"):
        make().plot()


@DRAWS
def test_an_empty_profile_can_be_shown(make, tmp_path):
    recorded = make()
    metadata, events = saved(recorded, tmp_path)
    [axes] = recorded.plot().axes
    assert metadata and not events and not axes.patches
    assert len(axes.get_yticks()) == (2 if make is of_session else 0)
    assert "0 calls" in repr(recorded) and "ended" in repr(recorded)
    assert recorded.summary().startswith("0")


@DRAWS
def test_strange_names_break_nothing(make, tmp_path):
    recorded = make(*STRANGE)
    recorded.save(tmp_path / "summary.txt")
    assert (tmp_path / "summary.txt").read_text("utf-8") == recorded.summary() + "\n"
    shown = {event["name"] for event in saved(recorded, tmp_path)[1]}
    for name in STRANGE:
        assert (name[:200] if make is of_session else f"push {key(name)}") in shown
    recorded.plot(tmp_path / "picture.svg")


@DRAWS
@pytest.mark.slow("imports Matplotlib in an interpreter of its own")
def test_the_example_of_the_documentation_prints_and_draws(tmp_path):
    example = Path(__file__).parents[2] / "docs" / "examples" / "profiled.py"
    file = tmp_path / "profile.png"
    done = python(example, file, THEANO_FLAGS="mode=FAST_COMPILE")
    assert done.returncode == 0, done.stderr
    names = [line.split()[0] for line in done.stdout.splitlines() if line[:1].strip()]
    assert {"step", "validate", "broadcast()", "rank"} <= {*names}
    assert file.read_bytes().startswith(b"\x89PNG")
