"""The benchmarks of ``synkhronos bench``: each runs, and they share one frame."""

import argparse
import importlib
import io
import json
import sys
import types

import numpy as np
import pytest
from support.leaks import nothing_left

import synkhronos as synk
from synkhronos.__main__ import main
from synkhronos.tools import bench
from synkhronos.tools.bench import (
    call,
    collectives,
    frame,
    networks,
    options,
    programs,
    scaling,
    training,
    turns,
)


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """Leave out the look at the machine, which takes half a second."""
    monkeypatch.setattr(turns, "busy_cores", lambda: 1.5)


def figures_of_call(found):
    assert 0 < found["theano_us"] < found["call_us"] and found["sliced_us"] > 0
    assert found["pipe_us"] > 0 and found["profile_long_us"] > 0
    assert {"profile_us", "profile_percent"} <= set(found)
    assert found["data_bytes"] == 8_000_000
    # The Data is there once, not once for each rank; the margin is what small processes wobble.
    assert 0.9 < found["pss_per_data"] < 2
    assert found["idle_cpu_percent"] < 10


def figures_of_collectives(found):
    cells = {(c["collective"], c["bytes"], c["system"]): c for c in found["cells"]}
    assert set(cells) == {
        (collective, nbytes, system)
        for collective in collectives.COLLECTIVES
        for nbytes in (1024, 65536)
        for system in ("synk", "memcpy")
    }
    for (collective, nbytes, system), cell in cells.items():
        joined = collective in ("all_gather", "gather", "scatter")
        whole = nbytes * (2 if joined else 1)
        assert cell["algbw"] == pytest.approx(whole / cell["seconds"] / 1e9)
        if system == "synk":
            assert cell["busbw"] == pytest.approx(cell["algbw"] / (2 if joined else 1))
            assert cell["ratio"] == 1


def figures_of_function(found):
    assert all(value > 0 for name, value in found.items() if name.endswith("_s"))
    assert {"whole_peak_bytes", "picked_by_ranks_bytes_per_s"} <= set(found)


def figures_of_training(found):
    mlp = found["networks"]["mlp"]
    assert mlp["numbers"] == 784 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10
    ranked = {"1 rank": 1, "2 ranks": 2, "2 ranks, two functions": 2, "2 ranks, plain": 2}
    serial = "serial, 1 thread", f"serial, {found['cores']} threads"
    assert set(mlp["systems"]) == {*serial, *ranked}
    for label, system in mlp["systems"].items():
        assert system["seconds"] == min(system["rounds"]) > 0
        if label in ranked:
            assert system["number"] == ranked[label]
            assert set(system["shares"]) == set(training.SHARES)
            assert sum(system["shares"].values()) == pytest.approx(1)
    # What was measured is what the model is fitted to.
    [curve] = scaling.measured(found)
    seconds = mlp["systems"]["2 ranks"]["seconds"]
    assert 0 < curve["update"] == mlp["update"]
    # Who waits less than the model's latency is modelled as waiting so long.
    modelled = scaling.step_of(curve, curve["compute"])
    assert curve["compute"] == 0 or modelled == pytest.approx(seconds, abs=scaling.LATENCY)


CASES = {
    "call": (
        ["--calls", "200", "--idle", "0.2", "--megabytes", "8"],
        ["One Data in, one number out; 2 ranks", "batch=slice(...)", "A Data of 0.01 GB"],
        figures_of_call,
    ),
    "collectives": (
        ["--sizes", "1K,64K", "--seconds", "0.02"],
        ["reduce; 2 ranks, ", "algbw GB/s", "\n        1,024 ", "memcpy"],
        figures_of_collectives,
    ),
    "function": (
        ["--rows", "30", "--passes", "2", "--megabytes", "1"],
        ["A pass over 30 rows", "2 ranks, 10 slices", "one numpy.take"],
        figures_of_function,
    ),
    "training": (
        ["--networks", "mlp", "--batch", "33", "--seconds", "0.1", "--ranks", "2"]
        + ["--plain-graphs"],
        ["mlp 784-512-512-10: 669,706 numbers; minibatches of 33", "  2 ranks, plain"],
        figures_of_training,
    ),
}


@pytest.mark.slow("measures for seconds")
@pytest.mark.parametrize("name", CASES)
def test_each_benchmark_prints_its_table_and_writes_its_figures(name, no_session, tmp_path, capsys):
    """Of machines and of PyMC, tests/machines and tests/likelihood have the same."""
    given, shown, check = CASES[name]
    file, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    has_picture = hasattr(importlib.import_module(bench.BENCHMARKS[name]), "plot")
    given = [*given, *(["--plot", str(picture)] if has_picture else [])]
    with nothing_left():
        assert main(["bench", name, *given, "--json", str(file)]) == 0
    out, err = capsys.readouterr()
    assert "others keep 1.5 cores busy" in err
    assert all(text in out for text in shown), out
    check(json.loads(file.read_text()))
    assert not has_picture or picture.read_bytes().startswith(b"\x89PNG")


def test_all_are_tested():
    elsewhere = {"machines", "pymc", "scaling"}
    assert {*CASES} | elsewhere == {*bench.BENCHMARKS}


def test_numbers_of_options_are_checked(capsys):
    """Every option that takes numbers is refused a wrong one in a sentence."""
    wrong = {
        options.count: ("0", "-5", "1.5", "²", ""),
        options.counts: ("1,,2", "0", "two"),
        options.whole: ("-1", "many"),
        options.positive: ("0", "nan", "inf", "long"),
        options.sizes: ("", "0", "3", "6", "-4", "K", "1T", "1K,,2K", "nan", "1e999"),
    }
    n_checked = 0
    for name, path in bench.BENCHMARKS.items():
        parser = frame.parser(name, importlib.import_module(path))
        for action in parser._actions:
            assert action.type not in (int, float), action.option_strings
            for value in wrong.get(action.type, ()):
                with pytest.raises(SystemExit) as refused:
                    parser.parse_args([f"{action.option_strings[0]}={value}"])
                assert refused.value.code == 2
                said = capsys.readouterr().err.splitlines()[-1]
                assert f"argument {action.option_strings[0]}: " in said
                assert "expected " in said
                n_checked += 1
    assert n_checked > 80


def test_sizes_and_names_are_parsed():
    assert options.sizes("4, 1K,2.5M,1GiB") == [4, 1024, 5 << 19, 1 << 30]
    assert options.sizes(collectives.SIZES)[-1] == 64 << 20
    parse = options.names(("a", "b"), "letter")
    assert parse("b, a") == ["b", "a"]
    with pytest.raises(argparse.ArgumentTypeError, match="'c' is no letter; there are: a, b"):
        parse("a,c")


@pytest.mark.parametrize(
    "given, said",
    [
        (["--rows", "8,9", "--batch", "8"], "--rows several: give one of them"),
        (["--ranks", "3", "--devices", "cpu,cpu"], "--ranks 3, but --devices names 2"),
        (["--plot", "no/such/a.png"], "--plot can't write no/such/a.png: no/such is no folder"),
        (["--json", "no/such/a.json"], "--json can't write no/such/a.json: no/such is no folder"),
    ],
)
def test_what_can_not_be_is_refused(given, said, capsys):
    assert main(["bench", "training", *given]) == 2
    assert said in capsys.readouterr().err


def nap(**given):
    """Return a benchmark, with these functions in place of its own."""

    def measure(args, report):
        report.look_at_machine()
        report.show(f"half of {args.seconds:g}")
        report.results["slept"] = args.seconds
        report.show("all")

    module = types.ModuleType("nap", "Sleep for a while.\n\nNot long.")
    module.add_arguments = lambda parser: options.add(
        parser, "--seconds", options.positive, 0.5, "to sleep"
    )
    module.measure = measure
    vars(module).update(given)
    return module


@pytest.fixture
def run(monkeypatch):
    """Return a function that runs a benchmark "nap", and returns the exit status."""

    def run(*given, **functions):
        monkeypatch.setitem(sys.modules, "nap", nap(**functions))
        return frame.main("bench", {"nap": "nap"}, "nap", given)

    return run


def test_output_is_tables_or_json_or_both(run, tmp_path, capsys):
    assert run() == 0
    assert capsys.readouterr().out == "half of 0.5\nall\n"
    assert run("--seconds", "2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["slept"] == 2 and found["busy_cores"] == 1.5
    file = tmp_path / "nap.json"
    assert run("--json", str(file)) == 0
    assert capsys.readouterr().out == "half of 0.5\nall\n"
    assert json.loads(file.read_text())["slept"] == 0.5


def test_figures_so_far_are_written_before_a_failure(run, tmp_path, capsys):
    def measure(args, report):
        report.results["first"] = 1
        report.show("first")
        raise frame.Failed("the second failed")

    file = tmp_path / "nap.json"
    assert run("--json", str(file), measure=measure) == 1
    assert json.loads(file.read_text()) == {"first": 1}
    assert capsys.readouterr().err == "the second failed\n"


def test_no_room_for_a_benchmark_is_told_in_a_sentence(run, capsys):
    def measure(args, report):
        raise synk.SharedMemoryFull("No room for 9 bytes.")

    assert run(measure=measure) == 1
    assert capsys.readouterr().err == "No room for 9 bytes.\n"


def test_a_file_that_is_read_is_not_taken_for_one_to_write(run, capsys):
    def add_arguments(parser):
        parser.add_argument("file")
        parser.add_argument("--seconds", type=float, default=1)

    assert run("--json", "figures.json", add_arguments=add_arguments) == 0
    assert json.loads(capsys.readouterr().out)["slept"] == 1


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_shown_on_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert list(turns.progress("steps", "ab")) == ["a", "b"]
    clear = "\r\x1b[K"
    lines = [f"{clear}steps: 0 of 2{clear}", f"{clear}steps: 1 of 2{clear}"]
    assert sys.stderr.getvalue() == "".join(lines)
    with pytest.raises(KeyboardInterrupt), turns.shown("a long step"):
        raise KeyboardInterrupt
    assert sys.stderr.getvalue() == "".join([*lines, f"{clear}a long step{clear}"])


@pytest.mark.parametrize("stream", [None, io.StringIO()], ids=["none", "a file"])
def test_progress_is_shown_nowhere_else(monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    with turns.shown("nothing"):
        assert list(turns.progress("steps", [1, 2])) == [1, 2]
    assert stream is None or stream.getvalue() == ""


def test_systems_take_turns():
    asked = []

    def times(name, seconds):
        def take(count):
            asked.append((name, count))
            return [seconds + number for number in range(count)]

        return take

    measured = turns.Turns(0.2, rounds=2, most=30)
    measured.add("quick", times("quick", 0.001))
    measured.add("long", times("long", 1.0))
    figures = measured.take_all("turns")
    # Twice to see how long it takes, then as often as there is time; a long one needs no start.
    warm = ("quick", 30 + 4), ("long", 1)
    assert asked == [("quick", 2), warm[0], ("long", 2), warm[1], *warm]
    assert [len(each) for each in measured.rounds_of["quick"]] == [30, 30]
    assert figures["quick"]["least"] == 4.001 and figures["quick"]["count"] == 60
    assert figures["long"]["median"] == figures["long"]["most"] == 1.0


def test_the_echo_answers():
    with call.Echo() as echo:
        echo()
        echo()
    assert echo._process.exitcode == 0


def test_the_bus_bandwidth_is_that_of_nccl_tests():
    factors = [collectives.bus_factor(name, 4) for name in collectives.COLLECTIVES]
    assert factors == [1.5, 1, 1, 0.75, 0.75, 0.75]


def test_a_collective_that_is_wrong_is_told_of(no_session):
    class Wrong:
        name = "nonsense"
        check = staticmethod(lambda collective: False)

    report, args = frame.Report("-"), types.SimpleNamespace(ranks=2, collectives=["reduce"])
    with pytest.raises(frame.Failed, match="nonsense computed a wrong reduce"):
        collectives.measure_beside([Wrong()], args, report)


def test_training_that_is_not_serial_training_is_told_of():
    class System:
        def __init__(self, losses):
            self.ask = lambda do, count: losses

        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda *_: None  # noqa: E731

    systems = {
        "serial, 1 thread": training.System("serial", 1, System([1.0, 0.5])),
        "1 rank": training.System("one", 1, System([1.0, 0.6])),
    }
    with pytest.raises(frame.Failed, match="1 rank does not train as serial Theano"):
        training._measure_network(training.Job("mlp", 8), systems, 1)


@pytest.mark.slow("starts a process that imports Theano")
def test_graphs_stay_plain_on_request(monkeypatch):
    monkeypatch.setenv("THEANO_FLAGS", "floatX=float32")
    system = training._systems(training.Job("mlp", 8), ["cpu"], 1, True)["1 rank, plain"]
    code = "from synkhronos._host import library; from synkhronos.tools.bench import programs\n"
    code += "programs.answer([library.config.floatX, library.config.optimizer_excluding])"
    line = programs.interpreter(code)
    with nothing_left(), programs.Program("flags", line, system.program._environment) as program:
        assert program.hear() == ["float32", "synkhronos_cpu"]


def figures_of(batch, seconds, update):
    """Return what ``bench training --json`` has of a network on two ranks, without overheads."""
    shares = dict.fromkeys(training.SHARES, 0.0)
    ranked = {"form": "one", "number": 2, "seconds": seconds, "shares": {**shares, "compute": 1}}
    serial = {"form": "serial", "number": 1, "seconds": 2 * seconds, "shares": None}
    found = {"title": "mlp", "numbers": 1000, "batch": batch}
    systems = {"serial, 1 thread": serial, "2 ranks": ranked}
    return {**found, **({"update": update} if update else {}), "systems": systems}


def test_an_update_that_all_ranks_compute_is_no_gain():
    # 10 ms on each of two ranks, 2 of them the update; a gradient of 4 kB costs nothing.
    [free] = scaling.measured({"networks": {"mlp": figures_of(512, 0.01, 0)}})
    [curve] = scaling.measured({"networks": {"mlp": figures_of(512, 0.01, 0.002)}})
    assert (free["compute"], curve["compute"]) == pytest.approx((0.01, 0.008))
    for weak, strong in ((free["model"], free["strong"]), (curve["model"], curve["strong"])):
        assert weak["1"] == strong["1"] == 1
        assert weak["2"] == pytest.approx(strong["2"])
        assert all(strong[str(n)] <= weak[str(n)] for n in scaling.DEVICES)
    assert free["model"]["2"] == pytest.approx(2, rel=0.01)
    # One device would compute 16 ms with all rows, and update once.
    assert curve["model"]["2"] == pytest.approx(18 / 10, rel=0.01)
    assert curve["strong"]["8"] == pytest.approx(18 / (16 / 8 + 2 + 0.14), rel=0.01)


def test_scaling_reads_a_file_with_several_sizes(tmp_path, capsys):
    file, picture = tmp_path / "figures.json", tmp_path / "curves.png"
    networks = {f"mlp, {n} rows": figures_of(n, n / 1e5, 1e-4) for n in (128, 512)}
    file.write_text(json.dumps({"networks": networks}))
    assert main(["bench", "scaling", str(file), "--plot", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()[-6:]
    assert [line.split()[0] for line in lines] == ["mlp,", "strong", "measured"] * 2
    assert "mlp, 128 rows" in lines[0] and "mlp, 512 rows" in lines[3]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["bench", "scaling", "--json", str(file)]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2


def test_networks_have_their_sizes():
    assert networks.Mlp().n_numbers == 669_706
    assert 40e6 < 4 * networks.Dense().n_numbers < 42e6
    x, y = networks.Mlp([3]).rows(5)
    assert x.shape == (5, 784) and y.dtype == np.int32
