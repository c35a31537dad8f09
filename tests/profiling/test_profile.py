"""A profile tells where the time of calls goes, on every rank, and leaves nothing behind."""

import gc
import logging
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import theano
import theano.tensor as T
from support.helpers import Call, function, on_ranks, worker
from support.layouts import ON_DEVICES
from support.profiles import nothing_records, of, recorders, the_session, total
from support.waiting import wait_until

import synkhronos as synk
from synkhronos import SessionError, SharedMemoryFull, WorkerError
from synkhronos.comm.shared.gate_memory import DONE, MET
from synkhronos.profiling.timeline import NAMES, REST, SPAN, Part, Timeline

AHEAD = 0.02  # seconds


def others_are(there, sequence_to_number):
    """Wait until the cell `there` of all other ranks says that they are; then a little more."""
    gate = worker().gate
    number = sequence_to_number(gate.sequence)
    cells = [gate._line(rank) + there for rank in range(gate.n_ranks) if rank != gate.rank]
    wait_until(lambda: all(gate._cells[cell] >= number for cell in cells))
    time.sleep(AHEAD)


def last_where_zero(wait):
    """Return an operation that waits on the rank of the first row, and does nothing elsewhere."""

    def work(x):
        if x[0] == 0:
            wait()
        return x

    return Call(work)


def bars(recorded, name):
    """Return the parts of a name, for each rank."""
    return [[bar for bar in each if bar.label == name] for each in recorded._read().bars]


def test_every_call_is_there_on_every_rank(ranks):
    def number_of_recorders():
        return len([each for each in recorders(worker()) if each is not None])

    f, everyone = total("same"), list(range(ranks.n))
    f(np.ones((8, 3)))
    assert on_ranks(number_of_recorders) == [0] * ranks.n and nothing_records(the_session())
    with synk.profile() as recorded:
        g = total("same")
        f(np.ones((8, 3)))
        assert of(recorded, "same")["rank"].tolist() == everyone  # it can be read at any time
        assert "being recorded" in repr(recorded)
        assert on_ranks(number_of_recorders) == [2] * ranks.n
        f(np.ones((8, 3)))
        g(np.ones((5, 3)))
    f(np.ones((8, 3)))
    assert on_ranks(number_of_recorders) == [0] * ranks.n and nothing_records(the_session())
    calls = of(recorded, "same")
    assert calls["rank"].tolist() == everyone * 3
    assert len({*calls["function"].tolist()}) == 2
    assert [line.split()[1] for line in recorded.summary().splitlines() if line[:4] == "same"] in (
        ["2", "1"],
        ["1", "2"],
    )
    # What is sent with a call is not part of it: one of these, and what `on_ranks` sends.
    assert of(recorded, "distribute()")["rank"].tolist()[: ranks.n] == everyone
    assert not recorded.calls["raised"].any()
    assert recorded.dropped == [0] * ranks.n


def test_the_parts_of_a_call_are_its_time(ranks):
    f = total()
    f(np.ones((8, 3)))
    begin = time.monotonic()
    with synk.profile() as recorded:
        for _ in range(5):
            f(np.ones((8, 3)))
    end = time.monotonic()
    calls = recorded.calls
    parts = np.array([calls[name] for name in NAMES])
    assert (parts >= 0).all()
    np.testing.assert_allclose(parts.sum(axis=0), calls["seconds"], rtol=1e-9)
    assert (calls["compute"] > 0).all() and (calls["start"] > 0).all()
    master = calls[calls["rank"] == ranks.master]
    assert (master["stage"] > 0).all() and (master["reduce"] > 0).all()
    assert master["begin"][0] > begin and master["begin"][-1] + master["seconds"][-1] < end
    for rank in range(ranks.n):  # the whole call, on each rank
        own = calls[calls["rank"] == rank]
        np.testing.assert_allclose(own["seconds"], master["seconds"], rtol=1e-6)


@pytest.mark.skipif(ON_DEVICES, reason="rows are on the host")
def test_a_slow_rank_shows_as_compute_there_and_as_waiting_elsewhere(ranks):
    x = T.dvector("x")
    wait = last_where_zero(lambda: others_are(DONE, lambda sequence: sequence))
    f = function([x], (wait(x), "gather"), name="busy")
    f(np.arange(1.0, 9.0))
    with synk.profile() as recorded:
        f(np.arange(8.0))
    calls = of(recorded, "busy")
    assert calls["compute"][0] > AHEAD
    assert (calls["finish"][1:] > AHEAD).all()
    computed = [bar for [bar] in bars(recorded, "compute")]
    assert all(bar.end < computed[0].end for bar in computed[1:])


def test_waiting_inside_a_reduction_is_told_apart(ranks):
    x = T.dvector("x")
    wait = last_where_zero(lambda: others_are(MET, lambda sequence: (sequence << 20) + 1))
    reduced = synk.ops.all_reduce(wait(x).sum(), "sum")
    f = synk.function([x], (reduced, "max"), name="step", mode=theano.Mode("vm", "fast_compile"))
    f(np.arange(1.0, 9.0))
    with synk.profile() as recorded:
        assert f(np.arange(8.0)) == 28
    calls = of(recorded, "step")
    assert calls["compute"][0] > AHEAD
    assert (calls["meet"][1:] > AHEAD).all()
    first = [each[0] for each in bars(recorded, "meet") if each]
    assert all(bar.begin < first[0].begin - 1e9 * AHEAD for bar in first[1:])
    for [around, *_], bar in zip(bars(recorded, "reduce"), first):
        assert around.begin <= bar.begin <= bar.end <= around.end


def test_collectives_are_calls_and_say_what_they_moved(ranks):
    shared, last = theano.shared(np.zeros((8, 4)), "s"), ranks.n - 1
    synk.broadcast(shared)
    collectives = [
        (synk.broadcast, shared),
        (synk.scatter, shared, np.ones((8, 4))),
        (synk.gather, shared),
        (synk.all_gather, shared),
        (synk.reduce, shared),
        (synk.all_reduce, shared),
        (synk.get_value, 0, shared),
        (synk.get_lengths, shared),
        (synk.set_value, last, shared, np.ones((3, 4))),
    ]
    with synk.profile() as recorded:
        for collective, *arguments in collectives:
            collective(*arguments)
    is_local = ranks.master == last  # then set_value asks no worker
    everyone, moved = list(range(ranks.n)), [3 * 4 * 8 * (rank == last) for rank in range(ranks.n)]
    if not is_local:
        moved[ranks.master] = 3 * 4 * 8  # its own copy is into shared memory
    for name in [f"{collective.__name__}()" for collective, *_ in collectives[:-1]]:
        assert of(recorded, name)["rank"].tolist() == everyone
    reduced, written = of(recorded, "all_reduce()"), of(recorded, "set_value()")
    assert reduced["bytes"].tolist() == [8 * 4 * 8] * ranks.n and (reduced["reduce"] > 0).all()
    assert written["rank"].tolist() == ([last] if is_local else everyone)
    assert written["bytes"].tolist() == ([3 * 4 * 8] if is_local else moved)
    assert len(recorded.calls) == ranks.n * 8 + len(written)


def test_picked_rows_are_bytes_and_consecutive_ones_are_none(ranks):
    x = T.dmatrix("x")
    f = function([x], (x.sum(), "sum"), name="picked")
    data = synk.data(np.ones((64, 10)))
    f(data)
    with synk.profile() as recorded:
        f(data)
        f(data, batch=np.arange(0, 64, 2)[::-1])
    rows = recorded.calls["bytes"].reshape(2, ranks.n)
    outputs = rows[0]  # no rows: the number that each rank returns
    assert ON_DEVICES or outputs.tolist() == [8] * ranks.n
    assert (rows[1] - outputs).sum() == 32 * 10 * 8 + 32 * 8  # the rows, and their numbers


def test_slices_and_sliced_shared_variables(ranks):
    shared = theano.shared(np.ones((4, 3)), "s")
    f = function([], (shared.sum(), "sum"), sliceable_shareds=[shared], name="sliced")
    f(num_slices=2, batch_s=[0, 2])
    with synk.profile() as recorded:
        assert f(num_slices=2, batch_s=[0, 2]) == 6 * ranks.n
    calls = of(recorded, "sliced")
    assert calls["rank"].tolist() == list(range(ranks.n))
    assert (calls["rows"] > 0).all() and (calls["bytes"] >= 2 * 3 * 8).all()


def test_what_a_rank_does_lies_inside_the_call_of_the_master(ranks):
    f, shared = total(), theano.shared(np.ones(3), "s")
    with synk.profile() as recorded:
        for _ in range(3):
            f(np.ones((8, 3)))
        synk.all_reduce(shared)
    tracks = recorded._read().bars
    calls = {bar.details["call"]: bar for bar in tracks[ranks.master] if bar.category == "call"}
    expected = ["total", "distribute()", "total", "total", "all_reduce()", "distribute()"]
    assert [bar.label for bar in calls.values()] == expected
    for own in tracks:
        kinds = [bar.kind for bar in own]
        assert kinds.count("compute") == 3 and {*kinds} >= {"start", "rows", "compute", REST}
        # On a worker what comes first begins first.
        assert sorted(bar.label for bar in own if bar.category == "call") == sorted(expected)
        around = []
        for bar in own:  # two of them are apart, or one is inside the other
            call = calls[bar.details["call"]]
            assert call.begin <= bar.begin <= bar.end <= call.end
            around = [end for end in around if end > bar.begin]
            assert all(bar.end <= end for end in around)
            around.append(bar.end)


def test_waits_of_a_worker_end_with_the_commands_of_the_master():
    """A call of two commands; the worker has waited since long ago, and writes when it arrives."""
    master = [
        (Part.START, 0, 10, 0, 1),
        (Part.FINISH, 20, 40, 0, 1),
        (Part.START, 40, 50, 0, 2),
        (Part.FINISH, 60, 90, 0, 2),
        (Part.CALL, 0, 100, 0, 0),
    ]
    worker = [
        (Part.START, -50, 12, 0, 1),
        (Part.FINISH, 15, 15, 0, 1),
        (Part.START, 15, 52, 0, 2),
        (Part.FINISH, 55, 55, 0, 2),
        (Part.START, 55, 70, 0, 3),  # of a command that the master did not record
    ]
    timeline = Timeline([np.array(worker, SPAN), np.array(master, SPAN)], ["f"], 1)
    expected = [("f", 0, 100), ("start", 0, 12), ("finish", 15, 40)]
    expected += [("start", 40, 52), ("finish", 55, 100)]
    assert [(bar.label, bar.begin, bar.end) for bar in timeline.bars[0]] == expected
    took = timeline.table()
    assert (1e9 * took["start"]).round().tolist() == [24, 20]
    assert (1e9 * took["rest"]).round().tolist() == [6, 30]


def test_the_picture_shows_the_last_calls_with_their_names(ranks):
    pytest.importorskip("matplotlib")
    f = total()
    with synk.profile() as recorded:
        for _ in range(10):
            f(np.ones((8, 3)))
    [axes] = recorded.plot(last=4).axes
    assert len(axes.lines) == len(axes.texts) == 4
    assert any(text.get_text() == "total" for text in axes.texts)
    seconds = of(recorded, "total")["seconds"].reshape(10, ranks.n)[-4:, ranks.master]
    longest = max(patch.get_width() for patch in axes.patches)
    assert longest == pytest.approx(1e3 * seconds.max())
    for wrong, error in ((0, ValueError), ("all", TypeError)):
        with pytest.raises(error, match="last"):
            recorded.plot(last=wrong)


def test_the_summary_has_a_line_for_each_function_and_each_rank(ranks):
    f, g = total("often"), total("once")
    with synk.profile() as recorded:
        for _ in range(7):
            f(np.ones((8, 3)))
        g(np.ones((8, 3)))
        synk.all_reduce(theano.shared(np.ones(3), "s"))
    lines = recorded.summary().splitlines()
    assert lines[0].startswith(f"12 calls on {ranks.n} rank")
    cells = {line.split("  ")[0]: line.split() for line in lines}
    assert cells["often"][1:3] == ["7", "0"]
    assert cells["once"][1:3] == ["1", "0"]
    assert "all_reduce()" in cells and cells["distribute()"][1] == "3"
    heads = [line.split() for line in lines if "compute" in line]
    assert [head[-9:] for head in heads] == [[*NAMES, "MB"]] * 2
    for rank in range(ranks.n):
        [line] = [line for line in lines if line.startswith(f"rank {rank} (")]
        assert ("master" in line) == (rank == ranks.master)
        assert line.split(")")[1].split()[0] == "12"
    seconds = of(recorded, "often")["seconds"]
    milliseconds = 1e3 * np.median(seconds.reshape(7, ranks.n)[:, ranks.master])
    digits = 3 if milliseconds < 1 else 2 if milliseconds < 100 else 0
    assert cells["often"][4] == f"{milliseconds:.{digits}f}"
    assert cells["often"][3] == f"{seconds[ranks.master :: ranks.n].sum():.3f}"


def fails_where_zero():
    x = T.dvector("x")

    def check(x):
        if 0 in x:
            raise KeyError("zero")
        return x

    return function([x], (Call(check)(x), "gather"), name="fails")


def test_a_call_that_raises_is_recorded_and_the_next_too(ranks):
    f = fails_where_zero()
    f(np.arange(1.0, 9.0))
    with synk.profile() as recorded:
        with pytest.raises(WorkerError, match="KeyError"):
            f(np.arange(8.0))
        with pytest.raises(TypeError):
            f("nothing")
        assert f(np.arange(1.0, 9.0)).tolist() == list(range(1, 9))
    calls = of(recorded, "fails")
    assert calls["raised"][calls["rank"] == ranks.master].tolist() == [True, True, False]
    for rank in range(ranks.n):
        own = calls[calls["rank"] == rank]
        # What is refused in the master reaches no worker.
        assert len(own) == (3 if rank == ranks.master else 2)
        assert own["compute"][0] > 0  # also on the rank that raised
    line = next(line for line in recorded.summary().splitlines() if line.startswith("fails"))
    assert line.split()[1:3] == ["3", "2"]


def test_a_block_left_by_an_exception_ends_the_profile(ranks):
    f = total()
    with pytest.raises(ZeroDivisionError), synk.profile() as recorded:
        f(np.ones((8, 3)))
        raise ZeroDivisionError
    assert nothing_records(the_session())
    f(np.ones((8, 3)))
    assert len(of(recorded, "total")) == ranks.n
    assert "ended" in repr(recorded)


def test_every_part_is_recorded_somewhere_and_no_other():
    sources = [path.read_text() for path in Path(synk.__file__).parent.rglob("*.py")]
    places = [re.findall(r'recorder\.(?:span|mark)\("(\w+)"\)', source) for source in sources]
    assert {part for parts in places for part in parts} == {*NAMES} - {REST}


def test_only_one_profile_is_recorded_and_of_one_block(ranks):
    f = total()
    block = synk.profile()
    with block as recorded:
        with pytest.raises(SessionError, match="profile is being recorded already"), synk.profile():
            raise AssertionError("not reached")
        with pytest.raises(SessionError, match=r"a second time.*profile\(\) again"), block:
            raise AssertionError("not reached")
        f(np.ones((8, 3)))
    with pytest.raises(SessionError, match=r"a second time.*profile\(\) again"), block:
        raise AssertionError("not reached")
    with synk.profile() as second:
        f(np.ones((8, 3)))
    assert len(second.calls) == len(of(second, "total")) == len(of(recorded, "total")) == ranks.n


def test_a_full_buffer_counts_what_it_drops(ranks):
    f = total()
    f(np.ones((8, 3)))
    with synk.profile(room=40) as recorded:
        for _ in range(20):
            f(np.ones((8, 3)))
        dropped = recorded.dropped
    assert len(dropped) == ranks.n and min(dropped) > 0
    assert 0 < len(recorded.calls) < 20 * ranks.n
    headline = recorded.summary().splitlines()[0]
    assert headline.endswith(f"; {sum(recorded.dropped):,} more parts of later calls had no room")
    assert f(np.ones((8, 3)))[0] == 24


@pytest.mark.parametrize("room", [10**12, 10**18, 10**30])
def test_more_room_than_there_is_memory_is_refused(ranks, room):
    with pytest.raises(SharedMemoryFull, match=rf"room={room:,}: .* bytes"), synk.profile(room):
        raise AssertionError("not reached")
    with synk.profile() as recorded:
        total()(np.ones((8, 3)))
    assert len(of(recorded, "total")) == ranks.n


def test_profiles_that_come_and_go_change_no_call_of_other_threads(ranks):
    shared = theano.shared(np.ones(3), "s")
    synk.broadcast(shared)
    functions = [total(f"thread {i}") for i in range(4)]
    calls = [lambda f=f: f(np.ones((8, 3)))[0] == 24 for f in functions]
    calls.append(lambda: synk.get_value(ranks.n - 1, shared).tolist() == [1, 1, 1])
    assert all(call() for call in calls)
    is_over, right, wrong = threading.Event(), [0] * len(calls), []

    def work(which):
        try:
            while not is_over.is_set():
                assert calls[which]()
                right[which] += 1
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(which,)) for which in range(len(calls))]
    for thread in threads:
        thread.start()
    profiles = []
    try:
        for _ in range(100):
            with synk.profile(room=20_000) as recorded:
                assert calls[0]()
            profiles.append(recorded)
    finally:
        is_over.set()
        for thread in threads:
            thread.join(60)
    assert not wrong, wrong[0]
    assert all(right)
    names = {f"thread {i}" for i in range(4)} | {"get_value()"}
    for recorded in profiles:
        calls = recorded.calls[recorded.calls["rank"] == ranks.master]
        found = {*calls["name"].tolist()}
        assert found <= names and ("thread 0" in found or any(recorded.dropped))
        # Threads take turns: their calls do not overlap.
        assert (calls["begin"][1:] >= (calls["begin"] + calls["seconds"])[:-1] - 1e-8).all()


def test_the_memory_of_a_profile_is_given_back(ranks):
    f = total()
    f(np.ones((8, 3)))
    before = synk.status().shared
    with synk.profile(room=100_000) as recorded:
        f(np.ones((8, 3)))
        taken = ranks.n * 40 * 100_000 if ranks.n > 1 else 0  # one rank shares no memory
        assert synk.status().shared >= before + taken
    f(np.ones((8, 3)))  # tells the workers
    gc.collect()
    assert synk.status().shared <= before
    assert len(recorded.calls) == ranks.n


def test_calls_are_logged_while_a_profile_is_on(ranks, caplog):
    f = total()
    f(np.ones((8, 3)))
    with caplog.at_level(logging.DEBUG, "synkhronos"):
        f(np.ones((8, 3)))
        assert not caplog.records
        with synk.profile():
            f(np.ones((8, 3)))
    [record] = caplog.records
    assert record.rank == ranks.master and record.levelname == "DEBUG"
    assert re.fullmatch(rf"rank {ranks.master}: total took [\d.]+ ms", record.getMessage())
