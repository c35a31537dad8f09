"""``synkhronos bench machines``: its two programs, its turns and figures, and the whole of it."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import theano
from benchmarks import groups, simulate
from benchmarks.simulated import Costs
from support import hosts, on_hosts
from support.leaks import nothing_left
from support.running import IN_PYTHON, run
from support.waiting import wait_until

import synkhronos as synk
from synkhronos.__main__ import main
from synkhronos._machine import load
from synkhronos.extensions import update_rules
from synkhronos.launch import mpirun, where
from synkhronos.launch.where import Host
from synkhronos.tools.bench import frame, machines, networks, programs
from synkhronos.tools.bench.machines import measured_session
from synkhronos.tools.bench.programs import Program


def options(*given):
    return frame.parser("machines", machines).parse_args(given)


def test_without_machines_it_says_what_it_needs(monkeypatch, capsys):
    for name in ("SLURM_JOB_NODELIST", "PBS_NODEFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(frame, "load_of_quiet_second", lambda seconds: load.Load(0.0))
    assert main(["bench", "machines"]) == 2
    error = capsys.readouterr().err
    assert "can't measure machines: there is no allocation of Slurm or PBS" in error
    assert "--hosts node0:2,node1:2" in error
    assert main(["bench", "machines", "--hosts", "node0"]) == 2
    assert "node0 is one machine alone, and nothing crosses a network" in capsys.readouterr().err
    assert main(["bench", "machines", "--hosts", "a:cpu,b:cpu"]) == 2
    assert "layouts have numbers of ranks, not devices" in capsys.readouterr().err
    assert main(["bench", "machines", "--hosts", "a b"]) == 2
    assert "--hosts: 'a b' is not a machine" in capsys.readouterr().err


def test_the_machines_of_an_allocation_are_found(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-3]")
    found = where.find_hosts(environment=os.environ)
    assert machines.layouts(found, None) == [
        [Host("node1", 1), Host("node2", 1), Host("node3", 1)],
        [Host("node1"), Host("node2"), Host("node3")],
    ]
    assert machines.layouts(found[:2], [1, 2]) == [
        [Host("node1", 1), Host("node2", 1)],
        [Host("node1", 2), Host("node2", 2)],
    ]
    ones = [Host("a", 1), Host("b", 1)]
    assert machines.layouts(ones, None) == [ones]


ECHO = """
import time
class Echo:
    def add(self, **message):
        print("noise", flush=True)
        return message
    def die(self): raise OSError("I am ill")
    def sleep(self): time.sleep(60)
programs.serve(Echo())
"""


def echo():
    code = f"from synkhronos.tools.bench import programs\n{ECHO}"
    return Program("Echo", programs.interpreter(code))


def test_a_program_answers_until_it_is_told_to_stop():
    with nothing_left(), echo() as program:
        assert program.ask("add", number=7) == {"number": 7}
        assert program.ask("add", text="x" * 1500)["text"] == "x" * 1500
        process = program._process
    assert process.returncode == 0


def kill(program):
    program._process.kill()
    program._process.wait()
    program.ask("add")


@pytest.mark.parametrize(
    "ask, said",
    [
        (
            lambda program: program.ask("die"),
            r"^Echo ended \(die\). It said:\nTraceback.*I am ill$",
        ),
        (kill, r"Echo ended \(add\)"),
        (lambda program: program.ask("sleep", seconds=0.1), r"took too long \(sleep\)"),
    ],
    ids=["raises", "is killed", "hangs"],
)
def test_the_end_of_a_program_is_told_of(ask, said):
    with nothing_left(), pytest.raises(frame.Failed) as raised, echo() as program:
        ask(program)
    assert re.search(said, str(raised.value), re.DOTALL)


def test_a_program_that_is_not_there_is_told_of():
    with pytest.raises(frame.Failed, match="can't be started"), Program("nothing", ["no/such"]):
        pass


def test_programs_end_with_the_benchmark():
    code = (
        "import sys\nfrom synkhronos.tools.bench.programs import Program\n"
        "with Program('Sleep', ['sleep', '600']) as program:\n"
        "    print(program._process.pid, flush=True)\n"
        "    program.ask('nothing')\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as benchmark:
        slept = psutil.Process(int(benchmark.stdout.readline()))
        benchmark.kill()
    wait_until(lambda: not slept.is_running() or slept.status() == psutil.STATUS_ZOMBIE)


class Fake:
    """A program whose times are made up."""

    def __init__(self, name, losses=(2.0, 1.0, 0.5)):
        self.name, self.losses = name, list(losses)
        self.session, self.asked = None, []

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def ask(self, do, **message):
        self.asked.append(do)
        return getattr(self, f"_{do}")(**message)

    def _fork(self, overlap, compress, threads_per_rank):
        self.session = "on" if overlap else "float16" if compress else "off"
        assert threads_per_rank == 1
        return [2, 2]

    def _hello(self):
        return {"version": "Open MPI v5", "hosts": ["a", "a", "b", "b"]}

    def _check(self, nbytes):
        return True

    def _network(self, other, nbytes, count):
        assert other == 2  # the first process of the second machine
        return {"latency": 1e-4, "bandwidth": 12.5e6}

    def _call(self, count):
        return [0.001] * count

    def _all_reduce(self, nbytes, count):
        speed = {"float16": 2e7, "off": 1e7}.get(self.session, 0.5e7)
        return [nbytes / speed] * count

    def _size(self, network):
        return {"title": f"a {network}", "bytes": 4_000_000}

    def _losses(self, network, rows, count):
        return self.losses[:count]

    def _step(self, network, rows, part, count):
        compute, communication = 0.001 * rows, 0.4
        seconds = {"compute": compute, "communication": communication}
        hidden = min(compute, communication) / 2 if self.session == "on" else 0
        return [seconds.get(part, compute + communication - hidden)] * count


@pytest.fixture
def fakes(monkeypatch):
    """Put fakes in place of the programs; return a function that makes them."""

    def put(n_layouts=1, **kwargs):
        sessions = [Fake("Synkhronos", **kwargs), Fake("overlap")]
        made = sessions * n_layouts
        monkeypatch.setattr(machines, "start_session", lambda hosts, args: made.pop(0))
        monkeypatch.setattr(machines, "start_mpi", lambda hosts, counts, args: Fake("MPI"))
        return sessions

    return put


ARGUMENTS = ["--hosts", "a:2,b:2", "--sizes", "1K,1M", "--networks", "mlp", "--seconds", "0.1"]
ARGUMENTS += ["--threads-per-rank", "1"]
HOSTS = [Host("a", 2), Host("b", 2)]


def test_figures_of_a_layout(fakes):
    fakes()
    found = machines.measure_layout(HOSTS, options(*ARGUMENTS), set())
    assert (found["machines"], found["counts"]) == (["a", "b"], [2, 2])
    assert found["network"] == {"latency": 1e-4, "bandwidth": 12.5e6}
    call, small, large = found["rows"]
    assert (call["what"], small["bytes"], large["bytes"]) == ("call", 1024, 1 << 20)
    assert "float16" not in call and call["mpi"]["least"] == 0.001
    figures = [large[name]["median"] for name in ("synkhronos", "mpi", "float16")]
    assert figures == [(1 << 20) / speed for speed in (1e7, 0.5e7, 2e7)]
    assert large["synkhronos"]["count"] >= machines.ROUNDS
    usual, balanced = found["steps"]
    assert (usual["rows"], balanced["rows"]) == (512, 400)
    assert [balanced[part]["median"] for part in ("compute", "communication")] == [0.4, 0.4]
    assert balanced["hidden"] == pytest.approx(0.5)
    assert usual["hidden"] == pytest.approx(0.2 / 0.4)
    assert json.loads(json.dumps(found)) == found
    text = machines.text(found)
    assert text.startswith("2 machines, 2 ranks each: a, b\nMPI: Open MPI v5, 4 processes.")
    assert "0.100 ms, 100.0 Mbit/s each way" in text
    [line] = [line for line in text.splitlines() if line.startswith("all_reduce     1,048,576")]
    expected = "104.858 (104.858) 209.715 (209.715) 0.50 (0.50) 52.429 (52.429) 0.50 84.086"
    assert " ".join(line.split()[2:]) == expected
    fakes()
    assert machines.measure_layout(HOSTS, options(*ARGUMENTS), {(2, 2)}) is None


def test_each_layout_is_measured_printed_and_written(fakes, monkeypatch, tmp_path, capsys):
    """A rank on each machine, and what --hosts says; training is left out."""
    _, overlapping = fakes()
    found = machines.measure_layout(HOSTS, options(*ARGUMENTS, "--no-training"), set())
    assert found["steps"] == [] and "step of training" not in machines.text(found)
    assert not overlapping.asked

    def measured(layout, args, done):
        assert len(done) == (layout == HOSTS)
        return {**found, "counts": [host.ranks for host in layout]}

    monkeypatch.setattr(machines, "measure_layout", measured)
    monkeypatch.setattr(frame, "load_of_quiet_second", lambda seconds: load.Load(0.0))
    monkeypatch.setattr(mpirun, "check", lambda: None)
    file = tmp_path / "figures.json"
    assert main(["bench", "machines", *ARGUMENTS, "--json", str(file)]) == 0
    counts = [each["counts"] for each in json.loads(file.read_text())["layouts"]]
    assert counts == [[1, 1], [2, 2]]
    assert capsys.readouterr().out.count("all_reduce         1,024") == 2


def test_training_that_overlap_changes_is_refused(fakes):
    fakes(losses=[2.0, 1.0, 0.6])
    with pytest.raises(frame.Failed, match="mlp does not train with overlap as without"):
        machines.measure_layout(HOSTS, options(*ARGUMENTS), set())


def test_wrong_sums_and_processes_elsewhere_are_refused(fakes, monkeypatch):
    fakes()
    monkeypatch.setattr(Fake, "_check", lambda self, nbytes: self.name != "MPI")
    with pytest.raises(frame.Failed, match=r"MPI computed a wrong all_reduce\."):
        machines.measure_layout(HOSTS, options(*ARGUMENTS), set())
    fakes()
    elsewhere = {"version": "Open MPI v5", "hosts": ["a", "a", "a", "b"]}
    monkeypatch.setattr(Fake, "_hello", lambda self: elsewhere)
    with pytest.raises(frame.Failed, match=r"MPI has its processes on a, a, a, b"):
        machines.measure_layout(HOSTS, options(*ARGUMENTS), set())


def test_rows_are_chosen_from_what_was_measured():
    asked = []

    def compute(rows):
        asked.append(rows)
        return 0.05 + 0.001 * rows + (0.0001 * rows if rows > 3000 else 0)

    rows = machines.balance(compute, 4.0, 512, 2, 8192)
    assert compute(rows) == pytest.approx(4.0, rel=0.02)
    assert machines.balance(compute, 100.0, 512, 2, 3000) == 6000  # the most
    noisy = iter([0.2, 0.1, 0.1, 0.1, 0.1])
    most = machines.balance(lambda rows: next(noisy), 1.0, 512, 2, 8192)
    assert 512 <= most <= 16384


@contextlib.contextmanager
def ranks():
    """Yield what measures Synkhronos, in this process."""
    floatx = theano.config.floatX
    theano.config.floatX = "float32"
    try:
        yield measured_session.MeasuredRanks()
    finally:
        theano.config.floatX = floatx
        synk.close()


def test_the_ranks_measure_reductions_and_calls(no_session, monkeypatch, quickly_compiled):
    monkeypatch.setenv("SYNKHRONOS_DEVICES", "cpu,cpu")
    with ranks() as measured:
        assert measured.fork(overlap=False, compress=False, threads_per_rank=1) == [2]
        assert measured.check(4000)
        for nbytes in (1024, 40_000, 1024):
            seconds = measured.all_reduce(nbytes, count=3)
            assert len(seconds) == 3 and min(seconds) > 0
            for rank in range(2):
                assert synk.get_value(rank, measured._vector).nbytes == nbytes
        assert len(measured.call(count=2)) == 2
        assert float(measured._call()) == 20
        measured.fork(overlap=False, compress=True, threads_per_rank=1)
        assert len(measured.all_reduce(1024, count=1)) == 1
        assert float(measured._call()) == 20


def test_the_ranks_train_as_serial_theano(no_session, monkeypatch, quickly_compiled):
    monkeypatch.setenv("SYNKHRONOS_DEVICES", "cpu,cpu")
    with ranks() as measured:
        measured.fork(overlap=False, compress=False, threads_per_rank=1)
        losses = measured.losses("mlp", 8, 3)
        model = networks.Mlp()
        x, y = model.rows(8)
        updates = update_rules.momentum(model.loss, model.params, measured_session.RATE)
        serial = theano.function([model.x, model.y], model.loss, updates=updates)
        np.testing.assert_allclose(losses, [serial(x, y) for _ in range(3)], rtol=1e-5)
        for part in ("compute", "communication", "step"):
            [seconds] = measured.step("mlp", 4, part, count=1)
            assert seconds > 0
        # From the first parameters again, though their velocities stay.
        assert measured.losses("mlp", 8, 1) == pytest.approx(losses[:1])
        found = measured.size("mlp")
        assert found == {"title": model.title, "bytes": 4 * 669_706}


@pytest.mark.mpi
@pytest.mark.slow("starts and measures programs on two hosts")
def test_two_hosts(two_hosts, tmp_path):
    file = tmp_path / "figures.json"
    given = "bench machines --sizes 1K,64K --networks mlp --batch 32 --busy-ok --seconds 0.05"
    command = [*given.split(), "--threads-per-rank", "1", "--ranks", "2", "--json", str(file)]
    environment = two_hosts.environment(**IN_PYTHON)
    done = run(*on_hosts.line(two_hosts, command), env=environment, timeout=500)
    assert done.returncode == 0, done.stderr
    [layout] = json.loads(file.read_text())["layouts"]
    assert layout["counts"] == [2, 2]
    assert layout["machines"] == two_hosts.addresses
    assert layout["mpi"].startswith("Open MPI")
    assert 0 < layout["network"]["latency"] < 0.1 and layout["network"]["bandwidth"] > 1e6
    assert [row.get("bytes") for row in layout["rows"]] == [None, 1024, 65536]
    for row in layout["rows"]:
        for name in ("synkhronos", "mpi", "float16")[: 2 if row["what"] == "call" else 3]:
            assert 0 < row[name]["least"] <= row[name]["median"]
    assert layout["steps"][0]["rows"] == 32
    for step in layout["steps"]:
        assert step["bytes"] == 4 * 669_706
        for part in ("compute", "communication", "off", "on"):
            assert 0 < step[part]["least"] <= step[part]["median"]
    assert done.stdout.count("all_reduce         1,024") == 1
    assert two_hosts.is_empty()


@pytest.mark.mpi
@pytest.mark.slow("starts a session on three hosts")
def test_what_machines_send_is_counted_and_is_near_the_least(tmp_path):
    file = tmp_path / "figures.json"
    given = "bench machines --busy-ok --count --sizes 1K,64K,1M,3M --ranks 1 --threads-per-rank 1"
    with hosts.up(3) as these:
        line = on_hosts.line(these, [*given.split(), "--json", str(file)])
        done = run(*line, env=these.environment(**IN_PYTHON), timeout=300)
        assert done.returncode == 0, done.stderr
    [layout] = json.loads(file.read_text())["layouts"]
    busiest = {
        (row["what"], row.get("nbytes")): max(sent for _, sent in row["sent"])
        for row in layout["traffic"]
    }
    assert busiest["call", None] < 2000
    for nbytes in (1 << 16, 1 << 20, 3 << 20):
        assert 4 / 3 * nbytes <= busiest["all_reduce", nbytes] < 1.1 * 4 / 3 * nbytes
        turns = 1 if nbytes > 1 << 18 else 2  # of the first: a chain, or a tree
        assert turns * nbytes <= busiest["broadcast", nbytes] < 1.1 * turns * nbytes
    assert "all_reduce     1,048,576" in done.stdout
    operations = [(row["what"], row["nbytes"]) for row in layout["traffic"] if "nbytes" in row]
    with contextlib.closing(simulate.rows(3, Costs(), operations, calls=5)) as rows:
        _, *simulated = rows  # without the start
    assert len(layout["traffic"]) <= len(simulated)
    for real, same in zip(layout["traffic"], simulated):
        (messages, nbytes), (expected, least) = (
            [sum(column) for column in zip(*row["sent"])] for row in (real, same)
        )
        # Of five calls; and once the question, its answer, and the signs of life of some seconds.
        more = 5 * (messages - expected) / (2 * 2)
        assert 0.99 < more < 30, real["what"]
        assert -100 < nbytes - least < 1000, real["what"]


@pytest.mark.mpi
@pytest.mark.slow("starts a session on two hosts")
def test_the_processes_of_a_machine_are_measured(tmp_path):
    if hosts.missing():
        pytest.skip(hosts.missing())
    file = tmp_path / "figures.json"
    line = [sys.executable, "-m", "benchmarks", "start", "--busy-ok", "--json", str(file)]
    done = run(*line, env=groups.environment(), timeout=300)
    assert done.returncode == 0, done.stderr
    found = {name: taken for name, *taken in json.loads(file.read_text())["processes"]}
    assert len(found) == 4 and all(cpu < 60 and pss > 1e6 for cpu, pss in found.values())
    assert found["guard, its parent"][1] < found["carrier, which speaks with others"][1] < 60e6


@pytest.mark.mpi
@pytest.mark.slow("starts two programs on two hosts")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_on_hosts_when_it_is_ended(two_hosts, number):
    line = on_hosts.line(
        two_hosts, ["bench", "machines", "--busy-ok", "--sizes", "1K", "--seconds", "60"]
    )
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    with subprocess.Popen(line, env=two_hosts.environment(), **quiet) as benchmark:
        try:
            mpi = "bench.machines.processes"
            wait_until(lambda: any(mpi in each for each in two_hosts.programs(2).values()))
            time.sleep(2)
        finally:
            benchmark.send_signal(number)
    assert two_hosts.is_empty()
