"""The benchmarks run, and measure what they say."""

import argparse
import contextlib
import importlib
import importlib.util
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
from support.leaks import nothing_left
from support.waiting import LONG, wait_until

import synkhronos as synk
from synkhronos.__main__ import main
from synkhronos.comm.mpi import all_reduce
from synkhronos.tools.bench import (
    BENCHMARKS,
    busy,
    call,
    clusters,
    collectives,
    compiling,
    function,
    imports,
    models,
    options,
    peers,
    scaling,
    torch_training,
    training,
    updates,
)


@pytest.mark.slow("compiles a step of training twice")
def test_bench_compile_prints_every_figure(capsys):
    assert main(["bench", "compile", "--rounds", "1", "--functions", "3", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures.pop("same_results") is True
    assert len(figures) == 7
    assert all(seconds > 0 for seconds in figures.values())
    shown = compiling.text({**figures, "same_results": False}, Mock(functions=3, ranks=2))
    assert "results are DIFFERENT" in shown
    assert "3 functions, one by one" in shown


@pytest.mark.slow("measures calls for seconds")
def test_bench_call_prints_every_figure():
    command = [sys.executable, "-m", "synkhronos", "bench", "call", "--json"]
    command += ["--calls", "200", "--idle", "0.5", "--megabytes", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert 0 < figures["theano_us"] < figures["call_us"]
    assert figures["pipe_us"] > 0
    assert figures["profile_long_us"] > 0
    assert {"profile_us", "profile_percent"} <= set(figures)
    assert figures["distribute_s"] > 0
    assert figures["compile_s"] > 0
    assert figures["data_bytes"] == 8_000_000
    # The Data is there once, not once for each rank; the margin is what small processes wobble.
    assert 0.9 < figures["pss_per_data"] < 2
    assert figures["idle_cpu_percent"] < 10


@pytest.mark.slow("imports Theano in another process")
def test_fresh_interpreters_run_no_module_of_the_working_folder(tmp_path, monkeypatch):
    for name in ("theano", "time", "numpy", "resource"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    assert imports.measure(1, 2)["import theano"]["least"] > 0
    [where] = compiling._run("import theano, resource; print(theano.__file__)")
    assert not where.startswith(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_the_echo_answers():
    echo = call._Echo()
    try:
        echo()
        echo()
    finally:
        echo.close()
    assert echo._process.exitcode == 0


@pytest.mark.slow("measures beside busy processes")
def test_bench_call_busy_prints_each_system():
    command = [sys.executable, "-m", "synkhronos", "bench", "call", "--busy", "1", "--json"]
    command += ["--seconds", "0.02"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["busy"]
    systems = {"call", "all_reduce, 1 KiB", "Pipe", "Pool"}
    if importlib.util.find_spec("joblib"):
        systems.add("joblib")
    assert [figure["busy"] for figure in figures] == [0] * len(systems) + [1] * len(systems)
    for load in (0, 1):
        assert {figure["system"] for figure in figures if figure["busy"] == load} == systems
    assert all(0 < figure["best_us"] <= figure["mean_us"] for figure in figures)
    title, head, *lines = busy.text(figures, 2).splitlines()
    assert title.startswith("Busy processes beside; 2 ranks, ")
    assert head.split() == ["0", "1"]
    assert {line[2:20].strip() for line in lines} == systems


def test_busy_processes_run_and_end():
    me = psutil.Process()
    before = set(me.children())
    with pytest.raises(KeyError), busy.kept_busy(2):
        started = set(me.children()) - before
        assert len(started) == 2
        assert {process.nice() for process in started} == {me.nice()}
        wait_until(lambda: all(sum(p.cpu_times()[:2]) > 0.1 for p in started))
        raise KeyError
    assert not any(process.is_running() for process in started)


@pytest.mark.parametrize("value", ["0", "1,,2", "-1", "two", ""])
def test_numbers_of_busy_processes_are_checked(value, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "call", "--busy", value])
    assert "argument --busy: expected a number from 1 on, got" in capsys.readouterr().err


COLLECTIVES = [sys.executable, "-m", "synkhronos", "bench", "collectives"]
TINY = ["--sizes", "1K,64K", "--seconds", "0.02", "--gigabytes", "0.001"]


def run_collectives(*options):
    command = [*COLLECTIVES, *TINY, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.slow("measures each collective")
def test_bench_collectives_prints_every_cell(tmp_path):
    picture = tmp_path / "times.png"
    done = run_collectives("--json", "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    cells = {(c["collective"], c["bytes"], c["system"]): c for c in results["cells"]}
    assert set(cells) == {
        (collective, nbytes, system)
        for collective in peers.COLLECTIVES
        for nbytes in (1024, 65536)
        for system in ("synk", "memcpy")
    }
    for (collective, nbytes, system), cell in cells.items():
        whole = nbytes * (2 if collective in ("all_gather", "gather", "scatter") else 1)
        assert cell["algbw"] == pytest.approx(whole / cell["seconds"] / 1e9)
        if system == "synk":
            half = collective in ("all_gather", "gather", "scatter")
            assert cell["busbw"] == pytest.approx(cell["algbw"] / (2 if half else 1))
            assert cell["ratio"] == 1
    assert 0 <= results["busy_cores"] < 1.5 * results["cores"]
    assert results["model"]["n_numbers"] == 25_557_032
    assert set(results["model"]["seconds"]) == {"variables", "flat"}
    assert results["scatter"]["bytes"] == 1_000_000
    assert all(seconds > 0 for seconds in results["scatter"]["seconds"].values())
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bench_collectives_prints_a_table():
    done = run_collectives("--no-models", "--collectives", "reduce", "--ranks", "3")
    assert done.returncode == 0, done.stderr
    title, head, *lines = done.stdout.splitlines()
    assert title.startswith("reduce; 3 ranks, ")
    assert head.split() == ["bytes", "us", "algbw", "GB/s", "busbw", "GB/s"]
    firsts = [line.split()[0] for line in lines]
    assert firsts == ["1,024", "memcpy", "65,536", "memcpy"]
    assert "memcpy / synk" in lines[1]


def test_sizes_are_parsed():
    assert collectives.parse_sizes("4, 1K,2.5M,1GiB") == [4, 1024, 5 << 19, 1 << 30]
    assert collectives.parse_sizes(collectives.SIZES)[-1] == 64 << 20
    for wrong in ("", "0", "3", "6", "-4", "K", "1T", "1K,,2K", "nan", "inf", "1e999"):
        with pytest.raises(argparse.ArgumentTypeError, match="no number of bytes"):
            collectives.parse_sizes(wrong)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--collectives", "all_reduce,al_gather", "'al_gather' is no collective"),
        ("--ranks", "0", "expected a number from 1 on"),
        ("--seconds", "-1", "expected a number above 0"),
        ("--gigabytes", "much", "expected a number above 0"),
        ("--peer-python", "/nowhere/python", "there is no program '/nowhere/python'"),
    ],
)
def test_options_of_bench_collectives_are_checked(option, value, message, capsys):
    parser = argparse.ArgumentParser()
    collectives.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args([option, value])
    assert message in capsys.readouterr().err


NUMBERS = {
    call: ["--ranks", "--calls", "--megabytes"],
    function: ["--ranks", "--rows", "--slices", "--passes", "--megabytes"],
    compiling: ["--rounds", "--ranks", "--functions"],
    imports: ["--ranks", "--rounds"],
    training: ["--ranks", "--batch"],
    updates: ["--ranks", "--batch", "--steps"],
}


@pytest.mark.parametrize("value", ["0", "-5", "1.5", "many", "²", ""])
@pytest.mark.parametrize("name", ["call", "compile", "function", "import", "training", "updates"])
def test_numbers_of_options_are_checked(name, value, capsys):
    module = importlib.import_module(BENCHMARKS[name])
    for option in NUMBERS[module]:
        with pytest.raises(SystemExit) as refused:
            main(["bench", name, option, value])
        assert refused.value.code == 2
        last = capsys.readouterr().err.splitlines()[-1]
        expected = f"argument {option}: expected a number from 1 on, got {value!r}"
        assert last == f"synkhronos bench {name}: error: {expected}"


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "long", ""])
@pytest.mark.parametrize("name, option", [("call", "--idle"), ("training", "--seconds")])
def test_times_of_options_are_checked(name, option, value, capsys):
    with pytest.raises(SystemExit):
        main(["bench", name, option, value])
    last = capsys.readouterr().err.splitlines()[-1]
    expected = f"argument {option}: expected a number above 0, got {value!r}"
    assert last == f"synkhronos bench {name}: error: {expected}"


def test_every_option_that_takes_a_number_is_checked():
    for path in BENCHMARKS.values():
        parser = argparse.ArgumentParser()
        importlib.import_module(path).add_arguments(parser)
        for action in parser._actions:
            assert action.type not in (int, float), action.option_strings


def test_a_picture_needs_a_folder(capsys, tmp_path):
    wrong = tmp_path / "nothing" / "times.png"
    for name in ("collectives", "training", "scaling"):
        assert main(["bench", name, "--plot", str(wrong)]) == 1
        assert f"--plot can't write {wrong}: {wrong.parent} is no folder" in capsys.readouterr().err


def test_no_room_for_a_benchmark_is_told_in_a_sentence(no_session, capsys, monkeypatch):
    full = synk.SharedMemoryFull("No room for 9 bytes.")
    monkeypatch.setattr(function, "measure_pass", lambda args: {})
    monkeypatch.setattr(synk, "data", Mock(side_effect=full))
    assert main(["bench", "function", "--megabytes", "9"]) == 1
    assert capsys.readouterr().err == "No room for 9 bytes.\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_shown_on_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert list(options.progress("steps", "ab")) == ["a", "b"]
    clear = "\r\x1b[K"
    lines = [f"{clear}steps: 0 of 2{clear}", f"{clear}steps: 1 of 2{clear}"]
    assert sys.stderr.getvalue() == "".join(lines)
    with pytest.raises(KeyboardInterrupt), options.shown("a long step"):
        raise KeyboardInterrupt
    assert sys.stderr.getvalue() == "".join([*lines, f"{clear}a long step{clear}"])


@pytest.mark.parametrize("stream", [None, io.StringIO()], ids=["none", "a file"])
def test_progress_is_shown_nowhere_else(monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    with options.shown("nothing"):
        assert list(options.progress("steps", [1, 2])) == [1, 2]
    assert stream is None or stream.getvalue() == ""


@pytest.mark.slow("measures passes for seconds")
@pytest.mark.parametrize("name", ["call", "function"])
def test_progress_of_benchmarks(name):
    command = [sys.executable, "-m", "synkhronos", "bench", name, "--json", "--megabytes", "1"]
    command += {
        "call": ["--calls", "200", "--idle", "0.1"],
        "function": ["--rows", "30", "--passes", "2"],
    }[name]
    expected = {
        "call": ["calls, in hundreds: 1 of 2", "an idle session, for 0.1 s", "a Data of 1 MB"],
        "function": ["passes: 2 of 3", "the peak memory", "1 MB of images", "picks: 39 of 40"],
    }[name]
    ours, theirs = os.openpty()
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True) as child:
            os.close(theirs)
            told = b""
            with contextlib.suppress(OSError):  # at its end a terminal raises EIO
                while True:
                    part = os.read(ours, 10_000)
                    if not part:
                        break
                    told += part
            assert json.loads(child.stdout.read())
        assert child.returncode == 0
    finally:
        os.close(ours)
    for text in expected:
        assert text in told.decode()
    assert told.endswith(b"\r\x1b[K")


@pytest.mark.usefixtures("quickly_compiled")
def test_bench_updates_prints_every_figure(no_session, capsys):
    options = ["--units", "8,4/6", "--rules", "sgd,adam", "--batch", "4", "--steps", "2"]
    assert main(["bench", "updates", "--json", *options]) == 0
    results = json.loads(capsys.readouterr().out)
    found = [(each["units"], each["rule"], each["parameters"]) for each in results]
    small, large = 784 * 6 + 6 + 6 * 10 + 10, 784 * 8 + 8 + 8 * 4 + 4 + 4 * 10 + 10
    assert found == [
        ([8, 4], "sgd", large), ([8, 4], "adam", large), ([6], "sgd", small), ([6], "adam", small)
    ]  # fmt: skip
    assert all(list(each["ms"]) == ["serial", "plain", "ranks"] for each in results)
    assert all(0 < value < 1e4 for each in results for value in each["ms"].values())
    assert main(["bench", "updates", "--units", "6", "--rules", "sgd", "--steps", "1"]) == 0
    printed = capsys.readouterr().out.splitlines()[-1].split()
    assert printed[:2] == ["sgd", f"{small:,}"] and len(printed) == 6


def test_the_bus_bandwidth_is_that_of_nccl_tests():
    factors = [collectives.bus_factor(name, 4) for name in peers.COLLECTIVES]
    assert factors == [1.5, 1, 1, 0.75, 0.75, 0.75]


def test_resnet50_has_its_size():
    shapes = models.resnet50_shapes()
    assert len(shapes) == 161
    assert sum(int(np.prod(shape)) for shape in shapes) == 25_557_032


def test_the_slowest_rank_of_a_system_counts():
    class System:
        name = "two ranks"

        def times(self, collective, nbytes, repetitions):
            return [[1.0] * repetitions, [2.0] * repetitions]

    assert collectives.measure([System()], "reduce", 4, 1) == {"two ranks": 2.0}


def test_what_is_not_installed_is_named(tmp_path):
    with pytest.raises(peers.PeerError, match="torch is not installed: pip install torch"):
        peers.find("gloo", [])
    with pytest.raises(peers.PeerError, match="mpi4py is not installed"):
        peers.find("mpi", [str(tmp_path / "python")])


def test_a_folder_with_too_long_a_name_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(peers.tempfile, "tempdir", str(folder))
    with nothing_left(), pytest.raises(peers.PeerError, match="TMPDIR names another"):
        peers.Peers("gloo", sys.executable, 2).__enter__()
    assert not list(folder.iterdir())


# These ranks need nothing: what ends them is the same for all.
FAKE = """
import os, sys, time
class Fake:
    def __init__(self, rank, n_ranks, store):
        {start}
        self.rank, self.n_ranks, self.version, self.barrier = int(rank), 2, "fake", lambda: None
    def prepare(self, collective, mine, joined):
        def run():
            {run}
        return run
    def close(self):
        pass
"""


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """Return a function that makes Peers whose ranks do what it says."""

    def make(start="pass", run="pass"):
        text = Path(peers.__file__).read_text().replace('"gloo": _Gloo', '"gloo": Fake')
        script = tmp_path / "peers_fake.py"
        script.write_text(
            text.replace("if __name__", FAKE.format(start=start, run=run) + "\nif __name__")
        )
        monkeypatch.setattr(peers, "__file__", str(script))
        return peers.Peers("gloo", sys.executable, 2)

    return make


def test_peers_that_compute_nonsense_are_found_out(fake):
    with nothing_left(), fake() as ranks:
        assert ranks.version == "fake"
        assert [len(times) for times in ranks.times("gather", 1024, 7)] == [7, 7]
        with pytest.raises(peers.PeerError, match="gloo computed a wrong all_reduce"):
            ranks.check("all_reduce")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": "raise OSError('no network')"}, r"failed \(start\)(.|\n)*no network"),
        ({"start": "os._exit(3)"}, r"ended \(start\)"),
        ({"start": "time.sleep(600)"}, r"too long \(start\)"),
        ({"run": "raise OSError('no network')"}, r"failed \(time reduce\)(.|\n)*no network"),
        ({"run": "os.write(2, b'out of luck') and os._exit(3)"}, r"ended(.|\n)*out of luck"),
        ({"run": "time.sleep(600)"}, r"too long \(time reduce\)"),
    ],
)
@pytest.mark.sample(3)
def test_peers_that_fail_leave_nothing(fake, monkeypatch, options, message):
    for what, setting in ("start", "START_SECONDS"), ("run", "ANSWER_SECONDS"):
        if "sleep" in options.get(what, ""):
            monkeypatch.setattr(peers, setting, 0.5)
    with nothing_left(), pytest.raises(peers.PeerError, match=message), fake(**options) as ranks:
        ranks.times("reduce", 1024, 3)


@pytest.mark.parametrize("run", ["pass", "time.sleep(600)"])
def test_peers_end_with_the_benchmark(fake, monkeypatch, run):
    ranks = fake(run=run)
    with nothing_left(), pytest.raises(KeyboardInterrupt), ranks:
        if run != "pass":
            ranks._send({"do": "time", "collective": "reduce", "nbytes": 4, "repetitions": 1})
        raise KeyboardInterrupt


@pytest.fixture
def mpi_python():
    try:
        # Not in the environment of the tests, where Theano would start MPI: an own one, named here.
        return peers.find("mpi", [os.environ.get("SYNKHRONOS_MPI_PYTHON", sys.executable)])
    except peers.PeerError as error:
        pytest.skip(str(error))


@pytest.mark.mpi
@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_ranks_of_open_mpi(mpi_python, n_ranks):
    with nothing_left(), peers.Peers("mpi", mpi_python, n_ranks) as ranks:
        for collective in peers.COLLECTIVES:
            ranks.check(collective)
            times = np.array(ranks.times(collective, 4096, 5))
            assert times.shape == (n_ranks, 5)
            assert (times > 0).all()


@pytest.mark.mpi
def test_ranks_of_open_mpi_sleep_while_it_is_not_their_turn(mpi_python):
    with peers.Peers("mpi", mpi_python, 2) as ranks:
        ranks.times("all_reduce", 1024, 10)
        processes = [psutil.Process(pid) for pid in ranks._pids]

        def used():
            return sum(sum(process.cpu_times()[:2]) for process in processes)

        before = used()
        with pytest.raises(psutil.TimeoutExpired):
            processes[0].wait(1)
        assert used() - before < 0.1


@pytest.mark.mpi
def test_a_rank_of_open_mpi_that_dies_takes_all_along(mpi_python):
    with nothing_left(), pytest.raises(peers.PeerError, match="ended"), peers.Peers(
        "mpi", mpi_python, 2
    ) as ranks:
        pids = ranks._pids
        os.kill(pids[1], signal.SIGKILL)
        ranks.times("all_reduce", 1024, 10)
    # A dead one may be waiting for its new parent, which is not us, to collect it.
    assert not any(map(peers._is_peer, pids))


@pytest.mark.mpi
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.slow("starts mpirun")
def test_bench_collectives_that_is_ended_leaves_no_process(mpi_python, number):
    command = [*COLLECTIVES, "--peers", "--seconds", "30"]
    # Nobody can tidy up after SIGKILL; and tmp_path is too long for the address of a socket.
    with tempfile.TemporaryDirectory() as folder, subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": folder},
    ) as process:
        try:
            assert process.stdout.readline().startswith(b"all_reduce; 2 ranks")
            children = psutil.Process(process.pid).children(recursive=True)
            assert sum("peers.py" in str(child.cmdline()) for child in children) >= 2
        finally:
            process.send_signal(number)
        process.wait(LONG)
        wait_until(lambda: not any(child.is_running() for child in children))
        if number == signal.SIGINT:
            assert not [name for name in os.listdir(folder) if name.startswith("peers-")]


@pytest.mark.slow("starts mpirun for each size")
@pytest.mark.mpi
def test_bench_collectives_compares_with_open_mpi(mpi_python):
    done = run_collectives("--json", "--peers", "--collectives", "all_reduce,gather")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert {"synk", "Open MPI", "memcpy"} <= {cell["system"] for cell in results["cells"]}
    assert results["versions"]["Open MPI"].startswith("Open MPI")
    assert "Open MPI" in results["model"]["seconds"]
    assert ("gloo" in results["missing"]) == ("not compared with gloo" in done.stderr)


TRAINING = [sys.executable, "-m", "synkhronos", "bench", "training"]


@pytest.mark.slow("compiles and times three systems")
def test_bench_training_prints_every_system_and_its_shares(tmp_path):
    picture, figures = tmp_path / "training.png", tmp_path / "training.json"
    options = ["--networks", "mlp", "--batch", "33", "--seconds", "0.1", "--ranks", "2"]
    done = subprocess.run(
        [*TRAINING, *options, "--json", "--plot", str(picture)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    results = json.loads(done.stdout)
    found = results["networks"]["mlp"]
    assert found["numbers"] == 784 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10
    many = f"serial, {results['cores']} threads"
    ranked = {"1 rank": 1, "2 ranks": 2, "2 ranks, two functions": 2}
    assert set(found["systems"]) == {"serial, 1 thread", many, *ranked}
    for label, system in found["systems"].items():
        assert system["seconds"] > 0
        if label in ranked:
            assert system["number"] == ranked[label]
            parts = system["shares"]
            assert set(parts) == set(training.SHARES)
            assert sum(parts.values()) == pytest.approx(1)
            assert all(part > 0 for name, part in parts.items() if name != "waiting")
    text = training.network_text(found, results["cores"])
    assert len(text.splitlines()) == 2 + len(found["systems"])

    # What was measured is what the model is fitted to.
    figures.write_text(done.stdout)
    curve = scaling.measured(results)[-1]
    seconds = found["systems"]["2 ranks"]["seconds"]
    modelled = scaling._on_devices(curve)(curve["compute"])
    assert 0 < curve["update"] == found["update"] < seconds
    # Who waits less than the model's latency is modelled as waiting so long.
    assert modelled == pytest.approx(seconds, abs=scaling.LATENCY)
    command = [sys.executable, "-m", "synkhronos", "bench", "scaling", str(figures), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[-1]["name"] == found["title"]


@pytest.mark.slow("starts a process that imports Theano")
def test_a_system_that_fails_is_told_of():
    with pytest.raises(training.BenchError, match="nothing:\nTraceback"), training._System(
        "nothing", "one", ["cpu"] * 2, training.Job("no such network", 8)
    ):
        pass
    assert not multiprocessing.active_children()


def test_training_that_is_not_serial_training_is_told_of(monkeypatch):
    class System:
        def __init__(self, label, *job, environment=()):
            self._losses = [1.0, 0.5] if "serial" in label else [1.0, 0.6]

        def ask(self, what, count):
            return self._losses

        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda *_: None  # noqa: E731

    monkeypatch.setattr(training, "_System", System)
    with pytest.raises(training.BenchError, match="1 rank does not train as serial Theano"):
        training.measure(training.Job("mlp", 8), ["cpu"] * 2, 1, 2)


def test_rows_of_bench_training_are_checked(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "training", "--rows", "128,0"])
    assert "argument --rows: expected a number from 1 on, got '0'" in capsys.readouterr().err
    assert main(["bench", "training", "--rows", "8,9", "--batch", "8"]) == 2
    assert "--rows several: give one of them" in capsys.readouterr().err


def test_pytorch_that_is_missing_is_told_of(monkeypatch, capsys):
    monkeypatch.setitem(peers.NEEDS, "gloo", "no_torch_anywhere")
    asked = argparse.Namespace(devices=None, peer_python=[])
    assert training._find_torch(asked) is None
    assert "not compared with PyTorch: no_torch_anywhere is not installed: pip install torch" in (
        capsys.readouterr().err
    )
    assert training._find_torch(argparse.Namespace(devices=["cuda0"], peer_python=[])) is None
    assert capsys.readouterr().err == "not compared with PyTorch: that is for CPU ranks\n"


def test_graphs_stay_plain_on_request(monkeypatch):
    monkeypatch.setenv("THEANO_FLAGS", "floatX=float32")
    with training._in_environment(training.PLAIN):
        code = "import theano; print(theano.config.floatX, theano.config.optimizer_excluding)"
        command = [sys.executable, "-c", f"import synkhronos._host.theano.host; {code}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout == "float32 synkhronos_cpu\n", done.stderr
    assert os.environ["THEANO_FLAGS"] == "floatX=float32"


@pytest.fixture(scope="module")
def torch_python():
    try:
        return peers.find("gloo", [os.environ.get("SYNKHRONOS_TORCH_PYTHON", sys.executable)])
    except peers.PeerError as error:
        pytest.skip(str(error))


@pytest.mark.slow("compiles networks and imports torch")
@pytest.mark.parametrize("network", list(training.NETWORKS))
def test_pytorch_begins_with_the_same_losses(network, torch_python):
    job = training.Job(network, 10, "momentum")
    losses = []
    for n_ranks in (1, 2):
        system = torch_training.TorchTraining(
            torch_python, n_ranks, 1, network, training._writer(job)
        )
        with system:
            losses.append(system.ask("losses", 3))
            assert all(seconds > 0 for seconds in system.ask("times", 2))
    with training._stepping("serial", 1, job) as step:
        losses.append([float(step()) for _ in range(3)])
    # A batch normalization of a rank sees the rank's rows.
    compared = losses if network != "resnet" else losses[::2]
    np.testing.assert_allclose(compared, [losses[2]] * len(compared), rtol=1e-3)


def test_the_model_gives_published_figures_back():
    curves = {curve["name"]: curve for curve in scaling.published()}
    assert curves["Synkhronos ResNet-50"]["model"]["8"] == pytest.approx(7.5)
    for name, curve in curves.items():
        assert curve["model"]["1"] == 1
        # It is fitted to what 8 GPUs communicate; what they compute is near a n-th.
        tolerance = 0.2 if name.endswith("16b") else 0.04
        assert curve["model"]["8"] == pytest.approx(curve["measured"]["8"], rel=tolerance)
        speedups = [curve["model"][str(n)] for n in scaling.DEVICES]
        assert speedups == sorted(speedups) and speedups[-1] < 64


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
    assert curve["model"]["64"] < 64 * 8 / 10 + 1 and curve["strong"]["64"] < 18 / 2


def test_sizes_of_minibatches_are_told_apart(tmp_path, capsys):
    file = tmp_path / "figures.json"
    networks = {f"mlp, {n} rows": figures_of(n, n / 1e5, 1e-4) for n in (128, 512)}
    file.write_text(json.dumps({"networks": networks}))
    assert main(["bench", "scaling", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()[-6:]
    assert [line.split()[0] for line in lines] == ["mlp,", "strong", "measured"] * 2
    assert "mlp, 128 rows" in lines[0] and "mlp, 512 rows" in lines[3]


def test_scaling_says_what_is_wrong_with_a_file(tmp_path, capsys):
    file = tmp_path / "figures.json"
    file.write_text("{}")
    parser = argparse.ArgumentParser()
    scaling.add_arguments(parser)
    assert scaling.main(parser.parse_args([str(file)])) == 1
    assert "cannot use" in capsys.readouterr().err
    picture = tmp_path / "curves.png"
    assert scaling.main(parser.parse_args(["--plot", str(picture)])) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "Theano-MPI AlexNet-128b" in capsys.readouterr().out


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
    slow = clusters.Cable(latency=0.1, bandwidth=1e9, call=0.0)
    assert clusters.reduction_seconds(2, 1e9, slow) == pytest.approx(1.3, rel=1e-3)
    alone, on = (clusters.step_seconds(2, 2, 1.5, 1e9, FAST, hidden) for hidden in (0, 1))
    assert (alone, on) == (pytest.approx(3, rel=1e-3), pytest.approx(2, rel=1e-3))
    # Overlap hides no more than there is to compute.
    assert clusters.step_seconds(2, 2, 0.5, 1e9, FAST, 1) == pytest.approx(2.5, rel=1e-3)


def test_figures_of_a_network_are_read_from_a_file():
    cable, fit = clusters.measured({"layouts": [{**LAYOUT, "counts": [2, 2]}, LAYOUT]})
    assert (cable.latency, cable.call, cable.machines, cable.hidden) == (1e-4, 0.001, 2, 0)
    assert cable.bandwidth == pytest.approx((1 << 24) / 1.6, rel=1e-3)
    assert [(nbytes, measured) for nbytes, _, measured in fit] == [(1024, 0.0015), (1 << 24, 1.6)]
    assert fit[1][1] == pytest.approx(1.6)
    # The step of the largest network that computes as long as it communicates.
    steps = [step_with(0.9, 0.4, 1000), step_with(0.2, 0.01), step_with(0.5, 0.39)]
    steps += [step_with(None, 0.4)]
    assert clusters.measured({"layouts": [{**LAYOUT, "steps": steps}]})[0].hidden == 0.5
    with pytest.raises(ValueError, match="no all_reduce of more than 32768 bytes"):
        clusters.measured({"layouts": [{**LAYOUT, "rows": LAYOUT["rows"][:2]}]})


def test_more_machines_are_modelled(capsys, tmp_path):
    file = tmp_path / "network.json"
    file.write_text(json.dumps({"layouts": [{**LAYOUT, "steps": [step_with(0.5, 0.4)]}]}))
    assert main(["bench", "scaling", "--network", str(file), "--json"]) == 0
    for curve in json.loads(capsys.readouterr().out):
        for kind in ("weak", "strong"):
            found = {
                name: [curve["machines"][name][kind][str(n)] for n in clusters.MACHINES]
                for name in ("off", "on")
            }
            for off, on, n in zip(found["off"], found["on"], clusters.MACHINES):
                assert 0 < off <= on < n
            assert kind == "strong" or found["off"] == sorted(found["off"])
    assert main(["bench", "scaling", "--network", str(file), "--bandwidth", "10Gbit"]) == 0
    shown = capsys.readouterr().out
    assert "A model, no measurement: machines with 0.100 ms and 10000.0 Mbit/s between" in shown
    assert "16,777,216" in shown and shown.count("Synkhronos ResNet-50") == 3
    assert main(["bench", "scaling", "--latency", "1ms", "--bandwidth", "1GB"]) == 0
    assert "1.000 ms and 8000.0 Mbit/s" in capsys.readouterr().out


def test_wrong_figures_of_a_network(capsys, tmp_path):
    assert main(["bench", "scaling", "--latency", "1ms"]) == 2
    assert "--latency and --bandwidth go together" in capsys.readouterr().err
    file = tmp_path / "network.json"
    for wrong in ("{", "{}", '{"layouts": []}', '{"layouts": [{"counts": [1, 1]}]}'):
        file.write_text(wrong)
        assert main(["bench", "scaling", "--network", str(file)]) == 1
        assert f"cannot use {file}: " in capsys.readouterr().err
    for option, value, expected in [
        ("--latency", "100", "expected a time such as 100us"),
        ("--latency", "-1s", "expected a time"),
        ("--bandwidth", "1T", "expected an amount for each second, such as 100Mbit"),
        ("--bandwidth", "0Mbit", "expected an amount"),
    ]:
        with pytest.raises(SystemExit):
            main(["bench", "scaling", f"{option}={value}"])
        assert expected in capsys.readouterr().err
