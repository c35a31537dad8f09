"""The recorder: rows, times, lines and files of a run."""

import importlib
import math
import pickle
import pickletools

import numpy as np
import pytest

from synkhronos.rules import plain_pickles, recorder
from synkhronos.rules.recorder import COLUMNS, Recorder


class Clock:
    """Stands for the module `time`, whose clocks it moves by hand."""

    def __init__(self):
        self.now = 1000.0

    def perf_counter(self):
        return self.now

    monotonic = perf_counter


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(recorder, "time", clock)
    return clock


def silent(print_freq=1):
    return Recorder(None, print_freq, "m", False)


def measured(clock, rec, mode, seconds):
    rec.start()
    clock.now += seconds
    rec.end(mode)


def trained(rec, counts, cost=1.0):
    for count in counts:
        rec.train_error(count, cost, cost / 2)
        rec.print_train_info(count)


def test_times_go_into_their_modes(clock):
    rec = silent(2)
    for mode, seconds in zip(recorder.MODES, (1, 2, 3, 4)):
        measured(clock, rec, mode, seconds)
    measured(clock, rec, "calc", 10)
    trained(rec, [1, 2, 3, 4])
    assert rec.all_time == [[2, 20, 11, 2, 3, 4], [4, 0, 0, 0, 0, 0]]
    with pytest.raises(ValueError, match="mode must be one of calc, sync, comm, wait, got 'load'"):
        rec.end("load")


def test_a_timer_inside_another_is_not_counted_twice(clock):
    """There was one timer, so a second start lost the time before it."""
    rec = silent()
    rec.start()
    clock.now += 1
    measured(clock, rec, "wait", 5)
    clock.now += 2
    rec.end("calc")
    rec.start()
    clock.now += 100
    trained(rec, [1])
    measured(clock, rec, "calc", 1)
    clock.now += 4
    rec.end("comm")  # since the end before
    trained(rec, [2])
    assert rec.all_time == [[1, 8, 3, 0, 0, 5], [2, 5, 1, 0, 4, 0]]


@pytest.mark.parametrize(
    "size, counts", [(1, [40, 80]), (2, [40, 80]), (8, [40, 80]), (3, [42, 81])]
)
def test_a_row_comes_each_40_batches_of_all_ranks(capsys, size, counts):
    """With 3 ranks a row came after 120 batches, and was called that of 40."""
    rec = Recorder(None, 40, "m", True)
    steps = range(1, 90 // size + 1)
    trained(rec, [step * size for step in steps])
    assert [row[0] for row in rec.train_info] == [row[0] for row in rec.all_time] == counts
    out = capsys.readouterr().out
    for before, count in zip([0, *counts], counts):
        assert f"{count} 1.000000 0.500000\n" in out
        assert f"time per {count - before} batches: " in out


def test_means_are_those_since_the_last_row():
    rec = silent(2)
    for count, cost in enumerate([1, 3, 5, 9], 1):
        rec.train_error(count, np.float32(cost), np.array(cost / 10))
        rec.print_train_info(count)
    assert rec.train_info == [[2, 2.0, 0.2], [4, 7.0, pytest.approx(0.7)]]
    assert all(type(value) in (int, float) for row in rec.train_info for value in row)


@pytest.mark.parametrize(
    "print_freq, counts, rows",
    [
        # An epoch drops the batches after its last row; it may end without clear_train_info().
        (4, [*range(1, 8), "clear", *range(1, 8), *range(1, 5)], [[4, 0], [4, 1], [4, 1]]),
        (1, [1, "clear", 1, "clear", 1, "clear"], [[1, 0], [1, 1], [1, 2]]),
        (4, [3, 3, 4, 4, 5, 5, 7], [[4, 0]]),  # counts that stand still
    ],
)
def test_a_new_epoch_may_count_from_the_beginning(print_freq, counts, rows):
    rec, epoch = silent(print_freq), 0
    for count in counts:
        if count == "clear":
            rec.clear_train_info()
            epoch += 1
        else:
            trained(rec, [count], cost=epoch)
    assert [row[:2] for row in rec.train_info] == rows


def test_counts_may_go_on_in_the_next_epoch(capsys):
    rec = Recorder(None, 4, "m", True)
    for epoch in range(3):
        rec.start_epoch()
        trained(rec, range(6 * epoch + 1, 6 * epoch + 7), cost=epoch)
        rec.clear_train_info()
    assert [row[:2] for row in rec.train_info] == [[4, 0], [8, 1], [12, 1], [16, 2]]
    labels = [line.split()[2] for line in capsys.readouterr().out.splitlines() if "time" in line]
    assert labels == ["4", "2", "4", "4"]  # batches 5, 6, 13, 14 and so on are no row's


def test_a_print_frequency_may_be_a_tuple():
    """Their scripts in show/ have a comma too many."""
    assert Recorder(None, printFreq=(40,), modelname="m", verbose=False).printFreq == 40


def test_nothing_recorded_is_no_error(capsys):
    """It was a ZeroDivisionError, in training and in validation."""
    rec = Recorder(None, 1, "m", True)
    rec.print_train_info(1)
    rec.print_val_info(1)
    assert rec.train_info == rec.val_info == [] and rec.get_latest_val_info() is None
    assert len(rec.all_time) == 1
    assert "no validation batches" in capsys.readouterr().out


def test_lines_have_examples_per_second(capsys, clock):
    rec = Recorder(None, 2, "m", True)
    rec.batch_size = 100
    for count in range(1, 5):
        clock.now += 0.5
        trained(rec, [count])
    assert capsys.readouterr().out.count("200.0 examples/s") == 2


def test_one_rank_prints(capsys, clock):
    clock.now += 1
    trained(Recorder(None, 3, "m", False), [1, 2, 3])
    assert not capsys.readouterr().out


class Ranks:
    """Gathers as MPI does, with the parts that the other ranks would send."""

    def __init__(self, *others):
        self.others = others

    def allgather(self, own):
        return [own, *self.others]


def test_validation_is_the_mean_over_all_ranks_batches():
    """Ranks with different numbers of batches could not be gathered."""
    rec = Recorder(Ranks([[4.0, 0.4, 0.0]], []), 40, "m", False)
    rec.val_error(8, 1.0, 0.1, 0.0)
    rec.val_error(8, 1.0, 0.1, 0.3)
    rec.gather_val_info()
    rec.print_val_info(8, comment="center")
    assert rec.val_info == [[8, 2.0, pytest.approx(0.2), pytest.approx(0.1)]]
    assert rec.get_latest_val_info() == rec.val_info[0]
    rec.val_error(16, 5.0, 0.5)
    rec.comm = None
    rec.gather_val_info()
    rec.print_val_info(16)
    assert rec.val_info[1] == [16, 5.0, 0.5, 0.0]


def test_lines_of_validation_and_epochs(capsys, clock):
    rec = Recorder(None, 40, "m", True)
    rec.start_epoch()
    clock.now += 1800
    rec.val_error(1, 1, 0.5, 0.25)
    rec.print_val_info(1, "center")
    rec.end_epoch(1, 3)
    assert capsys.readouterr().out == (
        "center\nvalidation cost: 1.0000\nvalidation error: 0.5000\n"
        "validation top_5_error: 0.2500\nglobal epoch 3 took 0.5000 h\n"
    )


@pytest.mark.parametrize("number", [0, -1, 1.5, True])
def test_a_print_frequency_is_a_number_of_batches(number):
    with pytest.raises(ValueError, match="printFreq must be a number of batches"):
        Recorder(None, number, "m", False)


def run(clock, epochs=3, batches=5, counts_go_on=False):
    """Return the recorder of a run with two rows of training for each epoch."""
    rec = silent(2)
    for epoch in range(epochs):
        rec.start_epoch()
        first = epoch * batches if counts_go_on else 0
        for batch in range(1, batches + 1):
            measured(clock, rec, "calc", 1)
            trained(rec, [first + batch], cost=epoch + 1)
        rec.clear_train_info()
        rec.val_error(first + batches, epoch, 0.5, 0.1)
        rec.print_val_info(first + batches)
        rec.save(first + batches, np.float32(0.5**epoch))
        rec.end_epoch(first + batches, epoch)
    return rec


def test_the_file_is_one_that_old_scripts_read(tmp_path, monkeypatch, clock):
    """Learning rates were 0, and the times of epochs were one behind."""
    monkeypatch.chdir(tmp_path)
    rec = run(clock)
    data = (tmp_path / "inforec" / "inforec.pkl").read_bytes()
    found = pickle.loads(data)
    assert set(found) == {"train_info", "val_info", "epoch_time", "all_time", "lr"}
    assert found["lr"] == [[5, 1.0], [5, 0.5], [5, 0.25]]
    assert found["epoch_time"] == [[5, 5.0]] * 3
    assert found["train_info"] == rec.train_info and len(found["train_info"]) == 6
    assert [row[1] for row in found["train_info"]] == [1, 1, 2, 2, 3, 3]
    opcodes = [each for each, _, _ in pickletools.genops(data)]
    assert not {each.name for each in opcodes} & {"GLOBAL", "STACK_GLOBAL", "REDUCE"}
    assert max(each.proto for each in opcodes) <= 2  # of Python 2
    assert [*(tmp_path / "inforec").iterdir()] == [tmp_path / "inforec" / "inforec.pkl"]


def test_a_run_is_loaded_and_goes_on(tmp_path, monkeypatch, clock):
    monkeypatch.chdir(tmp_path)
    rec = run(clock)
    again = silent(2)
    again.load("./inforec/")
    for name in COLUMNS:
        assert getattr(again, name) == getattr(rec, name)
    again.load("inforec/inforec.pkl")
    assert again.lr == rec.lr * 2


def test_times_of_2016_have_no_sync(tmp_path):
    """A file of 2016 could be read no more: its rows have five columns."""
    rows = {"all_time": [[40, 10.0, 6.0, 1.0, 3.0]], "train_info": [[40, np.float64(6.9), 0.9]]}
    path = tmp_path / "inforec_old.pkl"
    path.write_bytes(pickle.dumps(rows, protocol=2))
    rec = silent(40)
    rec.load(path)
    assert rec.all_time == [[40, 10.0, 6.0, 0.0, 1.0, 3.0]]
    assert rec.train_info == [[40, 6.9, 0.9]] and type(rec.train_info[0][1]) is float


@pytest.mark.parametrize("counts_go_on", [False, True])
@pytest.mark.parametrize("epochs", [0, 1, 2, 3, 9])
def test_cut_keeps_all_rows_of_the_first_epochs(tmp_path, monkeypatch, clock, epochs, counts_go_on):
    """It kept as many rows of training as epochs."""
    monkeypatch.chdir(tmp_path)
    rec = run(clock, counts_go_on=counts_go_on)
    costs = [row[1] for row in rec.train_info]
    rec.cut(epochs)
    kept = min(epochs, 3)
    assert len(rec.val_info) == len(rec.epoch_time) == len(rec.lr) == kept
    assert [row[1] for row in rec.train_info] == [each for each in costs if each <= epochs]
    assert len(rec.all_time) == len(rec.train_info)
    with pytest.raises(ValueError, match="load_epoch must be a number of epochs"):
        rec.cut(-1)


@pytest.mark.parametrize(
    "content, said",
    [
        (b"no pickle", "is no pickle that can be read"),
        (pickle.dumps([1]), "is no recorder's file: it has none of train_info"),
        (pickle.dumps({"lr": [[1, 2, 3]]}), r"rows of lr must have count, lr, got \[1, 2, 3\]"),
        (pickle.dumps({"lr": math.sqrt}), "names math.sqrt, but only containers"),
    ],
)
def test_files_of_others_are_refused(tmp_path, content, said):
    (tmp_path / "inforec.pkl").write_bytes(content)
    with pytest.raises(ValueError, match=said):
        silent(40).load(tmp_path)
    with pytest.raises(FileNotFoundError, match="There is no file"):
        recorder.read(tmp_path / "none.pkl")


def test_a_pickle_runs_nothing(tmp_path):
    class Hostile:
        def __reduce__(self):
            return exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",)

    for protocol in range(5):
        with pytest.raises(ValueError, match=r"names (builtins|__builtin__)\.exec"):
            plain_pickles.load(pickle.dumps({"lr": Hostile()}, protocol), "a.pkl")
    with pytest.raises(ValueError, match="an array of object"):
        plain_pickles.load(pickle.dumps(np.array([{}])), "a.pkl")
    assert not (tmp_path / "ran").exists()


def test_a_pickle_takes_memory_in_proportion(tmp_path):
    shared = [0.5]
    for _ in range(60):  # 2 ** 60 numbers, if each place had its own
        shared = [shared, shared]
    (tmp_path / "inforec.pkl").write_bytes(pickle.dumps({"lr": shared}))
    with pytest.raises(ValueError, match="lr must have rows of numbers, got "):
        silent(40).load(tmp_path)
    shared.append(shared)
    with pytest.raises(ValueError, match="an object contains itself"):
        plain_pickles.load(pickle.dumps(shared), "a.pkl")
    with pytest.raises(ValueError, match="refers to object 2147483647"):
        plain_pickles.load(b"\x80\x02Nr\xff\xff\xff\x7f.", "a.pkl")


def test_a_pickle_makes_no_more_than_many_times_its_size():
    text = b"X\x40\x42\x0f\x00" + b"a" * 1_000_000 + b"q\x00"  # a text with the number 0
    encoded = b"c_codecs\nencode\nq\x01" + b"h\x00h\x01h\x00\x85R" * 1000
    with pytest.raises(ValueError, match="many times its size"):
        plain_pickles.load(b"\x80\x02(" + text + encoded + b"l.", "a.pkl")
    nested = b"\x80\x02}(" + b")" + b"\x85" * 200_000 + b"Nu."  # its hash overflows the stack
    with pytest.raises(ValueError, match="more than 100000 tuples"):
        plain_pickles.load(nested, "a.pkl")


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_long_run_with_numbers_of_numpy_is_read(tmp_path, protocol):
    rows = [[i, np.float32(1), np.array(0.5)] for i in range(30_000)]
    (tmp_path / "inforec.pkl").write_bytes(pickle.dumps({"train_info": rows}, protocol))
    assert recorder.read(tmp_path / "inforec.pkl")["train_info"][-1] == [29_999, 1.0, 0.5]
    one, other = np.ones(1, "i1"), np.ones(1, "i1")
    found = plain_pickles.load(pickle.dumps([one, other], protocol), "a.pkl")
    found[0][0] = 7
    assert found[1][0] == 1


@pytest.mark.parametrize("protocol", range(5))
def test_arrays_and_numbers_are_read_from_pickles(protocol):
    array = np.asfortranarray(np.arange(6, dtype=">u2").reshape(2, 3))
    value = {"a": [array, (np.float32(0.5), np.bool_(True))], b"b": "text", 3: array.dtype}
    found = plain_pickles.load(pickle.dumps(value, protocol), "a.pkl")
    np.testing.assert_array_equal(found["a"][0], array)
    assert found["a"][1] == (0.5, True) and found[3] == array.dtype
    assert "text" in found.values()


def test_a_restored_recorder_goes_on_as_if_nothing_had_happened(clock):
    def steps(rec, counts):
        for count in counts:
            measured(clock, rec, "calc", count)
            measured(clock, rec, "wait", 1)
            trained(rec, [count], cost=count)

    straight, stopped = silent(4), silent(4)
    for rec in (straight, stopped):
        rec.start_epoch()
    steps(straight, range(1, 9))
    straight.end_epoch(8, 0)
    clock.now -= 36 + 8
    steps(stopped, range(1, 7))
    kept = stopped.state()
    steps(stopped, range(7, 9))  # what state() has returned stays as it is
    resumed = silent(4)
    resumed.restore(pickle.loads(pickle.dumps(kept)))
    clock.now -= 15 + 2
    resumed._epoch_began -= 15 + 2
    steps(resumed, range(7, 9))
    assert resumed.train_info == straight.train_info == [[4, 2.5, 1.25], [8, 6.5, 3.25]]
    assert resumed.all_time == straight.all_time
    plain = (dict, list, str, int, float)

    def check(value):
        assert type(value) in plain
        for each in value.values() if isinstance(value, dict) else value:
            if isinstance(each, (dict, list)):
                check(each)

    check(kept)


def test_runs_of_any_length_are_drawn(tmp_path, monkeypatch, clock):
    """Runs of fewer than 250 rows were not drawn."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(pyplot, "get_backend", lambda: "agg")
    monkeypatch.chdir(tmp_path)
    run(clock, epochs=2, batches=2).show(label="short", show=False)
    run(clock, epochs=2, batches=600).show(label="long", color_id=1, show=False)
    figure = pyplot.figure("Synkhronos train")
    for line, most in zip(figure.axes[0].lines, (2, recorder.POINTS)):
        x, y = line.get_data()
        assert 2 <= len(x) <= most and x[-1] == 2
        assert sorted({round(each) for each in y}) == [1, 2]
    hours = [line.get_ydata()[0] for line in pyplot.figure("Synkhronos epoch").axes[0].lines]
    assert hours == [2 / 3600, 600 / 3600]
    silent(40).show()  # of nothing, and the end of the figures
    assert len(figure.axes[0].lines) == 3
    assert not pyplot.get_fignums()
    for name in ("train.png", "val.png"):
        assert (tmp_path / name).stat().st_size > 3000


def test_several_runs_are_drawn_into_one_picture(tmp_path, monkeypatch, clock):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    run(clock)
    files = [tmp_path / f"inforec_{name}.pkl" for name in ("BSP", "of_2016", "empty")]
    (tmp_path / "inforec" / "inforec.pkl").rename(files[0])
    files[1].write_bytes(pickle.dumps({"all_time": [[40, 10.0, 6.0, 1.0, 3.0]]}, protocol=2))
    silent(40).save(0, 0.1, files[2])
    run(clock, epochs=1)
    files.append(tmp_path / "inforec" / "inforec.pkl")
    assert recorder.draw(files, "curves.png").stat().st_size > 10_000
    labels = [recorder._label(file) for file in files]
    assert labels == ["BSP", "of_2016", "empty", str(files[3])]
    with pytest.raises(ValueError, match="files must have one"):
        recorder.draw([], "curves.png")


def test_pictures_while_it_trains(tmp_path, monkeypatch):
    """change_geometry has gone from matplotlib, and a name was misspelt."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    rec = Recorder(None, 40, "gan", False)
    rec.plot_init("loss", fig_specs={"figsize": (3, 2)}, save=True)
    rec.plot_init("samples", save=True)
    rec.plot("loss", lines=[[1, 2], [2, 1, 0]], save=True)
    rec.plot("samples", image=np.eye(4), save=True, cmap="viridis")
    rec.plot("third", lines=[[1]], save=True)
    names = sorted(path.name for path in (tmp_path / "inforec" / "gan").iterdir())
    assert names == ["plot_1.png", "plot_2.png", "plot_3.png"]


def test_it_is_theirs_under_their_name():
    theirs = importlib.import_module("synkhronos.rules.compatible.lib.recorder")
    assert theirs.Recorder is Recorder
