"""A run that is killed and started again is the run that was not interrupted."""

import contextlib
import itertools
import os
import resource
import signal
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import theano
from support.helpers import function
from support.layouts import ON_DEVICES, Layout, forked
from support.waiting import wait_until

import synkhronos as synk
from synkhronos import resuming
from synkhronos._machine.files import held

LAYOUTS = [Layout(2)]

# How attempts end. The timer's may be late and end no run, so it is not the first one.
WAYS = "worker", "at once", "timer", "after the step"
SCRIPT = """
import os, random, signal, sys, threading
import numpy as np, theano, theano.tensor as T
import synkhronos as synk
from support import compiling, host_library
from synkhronos.extensions import train, update_rules
if host_library.ON_PYTENSOR:
    from theano.tensor.shared_randomstreams import RandomStreams
else:
    from theano.sandbox.rng_mrg import MRG_RandomStreams as RandomStreams

attempt, rule, every = int(os.environ["ATTEMPT"]), os.environ["RULE"], float(os.environ["EVERY"])
random = random.Random(attempt)
deadly, way = random.randrange(3, 9) if attempt >= 0 else 0, os.environ["WAY"]
os.chdir(os.environ["FOLDER"])
synk.fork(2)

def kill(pid):
    os.kill(pid, signal.SIGKILL)

with compiling.quickly():
    start = np.random.RandomState(max(attempt, 0))  # a new process begins with other parameters
    data, noise = np.random.RandomState(0), np.random.RandomState(1)
    x, y = T.dmatrix("x"), T.dvector("y")
    w, v = theano.shared(start.randn(5, 4), "w"), theano.shared(start.randn(4), "v")
    hidden = T.tanh(T.dot(x, w))
    kept = RandomStreams(max(attempt, 0) + 2).binomial(size=hidden.shape, p=0.5, dtype="float64")
    loss = ((T.dot(hidden * kept, v) - y) ** 2).mean()
    step = train.make_train_step([x, y], loss, [w, v], getattr(update_rules, rule), 0.05)
    X, target = synk.data(data.randn(23, 5)), data.randn(23)
    Y = synk.data(target)
    with synk.resume("run.npz", [step, noise], every=every) as state:
        print("begins", state.restored, state.step, flush=True)
        for epoch in state.epochs(3):
            for batch in state.batches(23, 4, seed=5):
                deadly -= 1
                if deadly == 0 and way == "at once":
                    kill(os.getpid())
                if deadly == 0 and way == "timer":  # in the middle of something, perhaps of writing
                    threading.Timer(random.random() / 50, kill, [os.getpid()]).start()
                if deadly == 0 and way == "worker":
                    kill(synk.session.current("")._processes[1].pid)
                Y[:] = target + noise.randn() / 10
                found = step(X, Y, batch=batch)
                state["losses"] = [*state.get("losses", []), float(found)]
                if deadly == 0 and way == "after the step":  # w was 101 at step 100
                    kill(os.getpid())
                state.tick()
                print("ticked", state.step, flush=True)
            state["epochs"] = state.get("epochs", 0) + 1
print("ends", state.step, flush=True)
np.savez("result.npz", state["losses"], state["epochs"], noise.rand(2), *map(synk.gather, (w, v)))
"""


@pytest.mark.skipif(ON_DEVICES, reason="forks for itself")
@pytest.mark.faults
@pytest.mark.slow("starts a script five times")
@pytest.mark.parametrize("rule, every", [("adam", 0), ("momentum", 0.001)])
@pytest.mark.usefixtures("extensions")
def test_a_run_that_is_killed_has_the_bits_of_one_that_is_not(tmp_path, script, rule, every):
    def run(attempt, folder):
        os.makedirs(folder, exist_ok=True)
        names, way = ("ATTEMPT", "WAY", "RULE", "EVERY", "FOLDER"), WAYS[attempt % 4]
        env = dict(zip(names, map(str, (attempt, way, rule, every, folder))))
        return script(SCRIPT, check=False, env=env)

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run(-1, whole).returncode == 0
    ticked, ways, killed_by = 0, set(), None
    for attempt in itertools.count():
        done = run(attempt, killed)
        lines = done.stdout.split("\n")
        restored, begun = lines[0].split()[1:]
        assert restored == str(int(begun) > 0)
        if every == 0:  # the timer's kill may come between saving and printing
            assert int(begun) - ticked in ((0, 1) if killed_by == "timer" else (0,))
        ticked = sum(line.startswith("ticked") for line in lines) + int(begun)
        if done.returncode == 0:
            break
        killed_by = WAYS[attempt % 4]
        ways.add(done.returncode)
        assert "WorkerDied" in done.stderr if killed_by == "worker" else done.returncode == -9
    assert ways == {1, -9} and lines[-2] == "ends 18"
    with np.load(whole / "result.npz") as expected, np.load(killed / "result.npz") as found:
        for name in expected.files:
            assert expected[name].tobytes() == found[name].tobytes()


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "run.npz")


def steps_in(path):
    """Return the step and the value of w in a file."""
    w = theano.shared(np.zeros(3), "w")
    with synk.resume(path, w) as state:
        assert state.restored
    return state.step, w.get_value().tolist()


@pytest.mark.skipif(ON_DEVICES, reason="forks for itself")
@pytest.mark.faults
def test_the_file_stays_where_a_worker_dies(path):
    with forked(Layout(2)) as ranks:
        w = theano.shared(np.zeros(3), "w")
        add = function([], updates=[(w, w + 1)])
        with pytest.raises(synk.WorkerDied), synk.resume(path, w, every=0) as state:
            for _ in range(3):
                add()
                state.tick()
            ranks.session._processes[1].send(signal.SIGKILL)
            while True:
                add()
                state.tick()
        before = state.step
    with forked(Layout(2)):
        w.set_value(np.zeros(3))
        step, value = steps_in(path)
        assert step >= 3 and step in (before, before - 1) and value == [step] * 3


@pytest.mark.skipif(ON_DEVICES, reason="forks for itself")
def test_values_that_differ_on_another_number_of_ranks(path):
    w, i = theano.shared(np.zeros(3), "w"), theano.shared(np.arange(3), "i")
    with forked(Layout(2)):
        synk.broadcast([w, i])
        synk.set_value(1, [w, i], [np.full(3, 3.0), np.arange(3, 6)])
        for name, each in (("", w), (".i.npz", i)):
            with synk.resume(path + name, each, unequal="average") as state:
                state.tick()
    with forked(Layout(3)):
        synk.broadcast([w, i])
        with pytest.raises(ValueError, match="holds the different values of 2 ranks"), synk.resume(
            path, w, unequal="keep"
        ):
            pass
        with pytest.raises(ValueError, match="can't be averaged: it is of int64"), synk.resume(
            path + ".i.npz", i, unequal="average"
        ):
            pass
        with synk.resume(path, w, unequal="average"):
            assert synk.gather(w).tolist() == [[1.5] * 3] * 3


@pytest.mark.skipif(ON_DEVICES, reason="forks for itself")
def test_only_the_state_right_after_a_tick_is_saved_on_one_rank(path):
    """Also of a variable that no function has. One was saved with what was set after the tick."""
    w, best = theano.shared(np.zeros(3), "w"), theano.shared(np.zeros(3), "best")
    with forked(Layout(1)):
        add = function([], updates=[(w, w + 1)])
        for number, changed in enumerate((w, best)):
            w.set_value(np.zeros(3))
            with synk.resume(f"{path}.{number}.npz", [w, best], every=3600) as state:
                ticks(state, add, 2)
                changed.set_value(np.ones(3))
            best.set_value(np.zeros(3))
            with synk.resume(f"{path}.{number}.npz", [w, best]) as state:
                assert state.step == 1
                assert w.get_value().tolist() == [1] * 3 and not best.get_value().any()


@pytest.fixture
def w(ranks):
    w = theano.shared(np.zeros(3), "w")
    synk.broadcast(w)
    return w


@pytest.fixture
def add(w):
    """Return a function that adds 1 to w."""
    return function([], updates=[(w, w + 1)])


def ticks(state, add, number):
    for _ in range(number):
        add()
        state.tick()


def test_it_goes_on_with_all_that_it_was_given(path, w, add):
    def made():
        of_twister = np.random.Generator(np.random.MT19937(3))
        return [np.random.RandomState(3), np.random.default_rng(3), of_twister]

    before = made()
    with synk.resume(path, [w, *before], every=3600) as state:
        assert not state.restored and "best" not in state
        for each in before:
            each.normal(size=3)
        state["best"], state["kept"] = np.inf, {"a": [np.arange(3), None, ("x", True)]}
        ticks(state, add, 5)
    expected = [each.normal(size=3).tolist() for each in before]
    synk.broadcast(w, np.full(3, 9.0))
    after = made()
    with synk.resume(path, [w, *after], every=3600) as state:
        assert state.restored and (state.step, state.epoch) == (5, 0)
        assert synk.gather(w).tolist() == [[5.0] * 3] * 2
        assert [each.normal(size=3).tolist() for each in after] == expected
        assert state["best"] == np.inf and state["kept"]["a"][2] == ("x", True)
        assert state["kept"]["a"][0].tolist() == [0, 1, 2]
        with pytest.raises(
            TypeError, match=r"state\['it'\] can't be saved: a file can't hold a set."
        ):
            state["it"] = {1}
        with pytest.raises(RuntimeError, match="in its with block already"), state:
            pass
    with pytest.raises(RuntimeError, match="are for the block of"):
        state.tick()
    with pytest.raises(
        ValueError, match=r"has RandomState of NumPy's random states, but .* holds"
    ), synk.resume(path, [w, after[0]]):
        pass
    assert after[0].normal(size=3).tolist() != expected[0]


def test_the_batches_that_are_left_are_those_of_a_run_that_was_not_stopped(tmp_path, path, w):
    def batches(stop=None, seed=7, size=4):
        found = []
        try:
            with synk.resume(path, w, every=0) as state:
                for epoch in state.epochs(3):
                    for batch in state.batches(10, size, seed):
                        found.append((epoch, np.arange(10)[batch].tolist()))
                        if len(found) == stop:
                            raise InterruptedError
                        state.tick()
        except InterruptedError:
            pass
        return found

    for seed in (7, None):
        whole = batches(seed=seed)
        assert len(whole) == 9 and batches(seed=seed) == []
        for epoch in range(3):
            rows = [row for at, each in whole if at == epoch for row in each]
            assert sorted(rows) == list(range(10)) and (rows == sorted(rows)) == (seed is None)
        assert len({str(each) for _, each in whole}) == (9 if seed else 3)
        for file in tmp_path.iterdir():
            file.unlink()
        found = batches(stop=3, seed=seed)[:-1] + batches(stop=6, seed=seed)[:-1]
        with pytest.raises(
            ValueError, match=r"minibatch 1 of epoch 2 .* size=5, seed=.* has rows=10"
        ):
            batches(seed=seed, size=5)
        assert found + batches(seed=seed) == whole
        for file in tmp_path.iterdir():
            file.unlink()
    with pytest.raises(RuntimeError, match=r"loop over state.epochs"), synk.resume(
        path, w, every=0
    ) as state:
        for _epoch in range(2):
            for _ in state.batches(10, 4):
                state.tick()


def test_only_the_state_right_after_a_tick_is_saved(path, w, add):
    """One was saved where w was 101 at step 100."""
    with synk.resume(path, w, every=3600) as state:
        ticks(state, add, 2)
    assert steps_in(path) == (2, [2, 2, 2])

    def go_on(end, raises=()):
        with contextlib.suppress(*raises), synk.resume(path, w, every=3600) as state:
            ticks(state, add, 1)  # it saves, so that what is wrong shows
            ticks(state, add, 2)
            end(state)
        return steps_in(path)

    def interrupted(state):
        add()
        raise KeyboardInterrupt

    assert go_on(interrupted, raises=[KeyboardInterrupt]) == (3, [3, 3, 3])
    assert go_on(lambda state: add()) == (4, [4, 4, 4])  # as after a break
    assert go_on(lambda state: synk.broadcast(w, np.ones(3))) == (5, [5, 5, 5])
    assert go_on(lambda state: w.set_value(np.ones(3))) == (6, [6, 6, 6])
    assert go_on(lambda state: state.update(best=1)) == (7, [7, 7, 7])
    assert go_on(lambda state: synk.gather(w)) == (10, [10, 10, 10])
    random = np.random.RandomState(0)
    with synk.resume(path + ".npz", [w, random], every=3600) as state:
        ticks(state, add, 2)
        random.rand(312)  # which is all of its numbers: its position is the same
    with synk.resume(path + ".npz", [w, random], every=3600) as state:
        assert state.step == 1


def test_values_that_differ_between_ranks(path, w):
    i = theano.shared(np.arange(3), "i")
    synk.set_value(1, [w, i], [np.full(3, 3.0), np.arange(3, 6)])
    refused = r"different values of w for the ranks. Write synkhronos.broadcast\(w\), or .*='aver"
    with pytest.raises(ValueError, match=r"tick\(\) can't save " + refused), synk.resume(
        path, w
    ) as state:
        state.tick()
    assert not os.path.exists(path)
    with synk.resume(path, w, unequal="keep") as state:
        state.tick()
    with synk.resume(path + ".i.npz", i, unequal="average") as state:
        state.tick()
    synk.broadcast(w)
    with pytest.raises(ValueError, match="can't be loaded: it holds " + refused), synk.resume(
        path, w
    ):
        pass
    for unequal in ("average", "keep"):
        synk.broadcast(w, np.zeros(3))
        with synk.resume(path, w, unequal=unequal):
            assert synk.gather(w).tolist() == [[0] * 3, [3] * 3]
    synk.broadcast(w)


def test_older_files_are_kept_and_used_if_the_newest_is_damaged(tmp_path, path, w, add):
    with synk.resume(path, w, every=0, keep=3) as state:
        ticks(state, add, 5)
    files = [tmp_path / name for name in ("run.npz", "run.1.npz", "run.2.npz")]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert all(zipfile.ZipFile(file).testzip() is None for file in files)
    whole = [file.read_bytes() for file in files]

    def put(*contents):
        for file, data in zip(files, contents):
            file.unlink(missing_ok=True)
            if data is not None:
                file.write_bytes(data)

    put(whole[0][:-20], whole[1], whole[2])
    with pytest.warns(
        synk.PortingWarning, match=r"older file .*run.1.npz.*run.npz' can't be read"
    ) as told:
        assert steps_in(path) == (4, [4, 4, 4])
    assert len(told) == 1 and told[0].filename == __file__
    put(None, b"", whole[2])
    with pytest.warns(
        synk.PortingWarning, match=r"older file .*run.2.npz.*run.1.npz' can't be read"
    ):
        assert steps_in(path) == (3, [3, 3, 3])
    put(None, whole[1], whole[2])
    with pytest.warns(synk.PortingWarning, match=r"not there. To begin anew, remove the older"):
        assert steps_in(path) == (4, [4, 4, 4])
    put(b"", b"", b"")
    with pytest.raises(ValueError, match=r"run.npz' can't be read: it is damaged"):
        steps_in(path)
    put(None, None, None)
    with synk.resume(path, w, every=0, keep=1) as state:
        ticks(state, add, 3)
    assert list(tmp_path.iterdir()) == files[:1]


def test_files_that_are_not_of_this_run_are_refused(path, w):
    synk.save(path, w)
    with pytest.raises(ValueError, match=r"was written by save\(\), which keeps no step"):
        steps_in(path)
    os.unlink(path)
    with synk.resume(path, w) as state:
        state.tick()
    for other in (theano.shared(1.0, "w"), [w, theano.shared(1.0, "v")]):
        with pytest.raises(ValueError, match="functions_or_variables "), synk.resume(path, other):
            pass
    synk.load(path, w)  # it is a checkpoint, too


def test_a_full_disk_is_told_at_the_next_tick(tmp_path, path, w, add):
    with synk.resume(path, w, every=0) as state:
        ticks(state, add, 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
    try:
        with pytest.raises(OSError, match=r"too large: .*run.npz'"), synk.resume(path, w) as state:
            state["large"] = np.zeros(3000)
            state.tick()
            wait_until(lambda: state._error)
            state.tick()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert steps_in(path)[0] == 2
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run.1.npz", "run.npz"]


def test_a_path_is_for_one_script_at_a_time(tmp_path, path, w, monkeypatch):
    monkeypatch.setattr(resuming, "_PATIENCE", 0.1)
    with synk.resume(path, w) as state:
        with pytest.raises(BlockingIOError, match=r"another process writes this file: .*run.npz'"):
            steps_in(path)
        state.tick()
    assert steps_in(path)[0] == 1
    (tmp_path / ".run.npz.lock").touch()  # of one that was killed
    assert steps_in(path)[0] == 1
    with contextlib.ExitStack() as lost:  # on a machine whose locks a server holds for a while
        lost.enter_context(held(path, 0))
        monkeypatch.setenv("SYNKHRONOS_RESTART", "1")
        threading.Timer(0.5, lost.close).start()
        assert steps_in(path)[0] == 1
    with pytest.raises(FileNotFoundError, match=r"no such folder for the path: .*none'"):
        synk.resume(tmp_path / "none" / "run.npz", w)


def test_a_restart_that_begins_from_nothing_is_told(path, w, monkeypatch):
    monkeypatch.setenv("SYNKHRONOS_RESTART", "2")
    with pytest.warns(
        synk.PortingWarning, match=r"begins from nothing.*storage that"
    ) as told, synk.resume(path, w) as state:
        state.tick()
    assert len(told) == 1 and told[0].filename == __file__
    assert steps_in(path)[0] == 1


def test_a_sigterm_ends_the_script_at_the_next_tick(path, ranks, w, add):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, synk.resume(
        path, w, every=3600, preemptible=True
    ) as state:
        ticks(state, add, 3)
        for pid in ranks.session.pids:  # as a batch system does
            os.kill(pid, signal.SIGTERM)
        ticks(state, add, 1)
    assert ended.value.code == 143 and signal.getsignal(signal.SIGTERM) is before
    assert steps_in(path) == (4, [4, 4, 4])


def ignoring(pids):
    """Return those of processes that ignore a SIGTERM."""
    found = []
    for pid in pids:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        [mask] = [int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:")]
        found += [pid] * (mask >> (signal.SIGTERM - 1) & 1)
    return found


@pytest.mark.parametrize("ends", [None, ValueError, KeyboardInterrupt])
def test_workers_ignore_a_sigterm_in_the_block_only(path, ranks, w, add, ends):
    with contextlib.suppress(ends or ()), synk.resume(path, w, preemptible=True) as state:
        ticks(state, add, 1)
        assert ignoring(ranks.session.pids) == ranks.session.worker_pids
        if ends is not None:
            raise ends
    assert ignoring(ranks.session.pids) == []


def test_a_sigterm_after_the_last_tick_ends_the_script_with_the_block(path, w, add):
    with pytest.raises(SystemExit) as ended, synk.resume(
        path, w, every=3600, preemptible=True
    ) as state:
        ticks(state, add, 3)
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 143 and steps_in(path) == (3, [3, 3, 3])


def test_a_tick_belongs_to_minibatches_that_were_taken(path, w):
    """Else a run that goes on would take some again, or none of those that were taken ahead."""
    alone = pytest.raises(RuntimeError, match="without a new minibatch: a run that goes on")
    with synk.resume(path, w, every=0) as state:
        for _epoch in state.epochs(2):
            with alone:
                state.tick()
            batches = list(state.batches(10, 4))
            state.tick()  # for all of them
            with alone:
                state.tick()
        assert state.step == 2 and len(batches) == 3
