"""``synkhronos rule``: output, log files, ends of ranks, Ctrl-C, mistakes, the line of mpirun."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support import launching, stand_in_rank
from support.launching import FOR_ROOT, needs_mpirun
from support.leaks import working_in
from support.waiting import LONG, wait_until

from synkhronos.__main__ import main
from synkhronos._machine.devices import module_command
from synkhronos.rules import command as rule
from synkhronos.rules import options, request
from synkhronos.rules.places import RankPlace, find_places


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model.py").write_text("class Model: pass\n")
    return tmp_path


def command(*arguments):
    return [sys.executable, stand_in_rank.__file__, "rule", *map(str, arguments)]


def run(folder, *arguments, **variables):
    """Run the launcher; return its exit status, what it printed, and its errors."""
    given = {"THEANO_FLAGS": None, "PYTHONUNBUFFERED": "1", **variables}
    found = launching.run(command(*arguments), folder, **given)
    assert working_in(folder) == []
    return found


class Launched:
    """A launcher that runs beside the test, until it has printed "begun" for each rank."""

    def __init__(self, folder, *arguments, ranks=2):
        self.folder = folder
        self.process = subprocess.Popen(
            command(*arguments),
            cwd=folder,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        while ranks:
            line = self.process.stdout.readline()
            assert line, self.process.communicate()
            ranks -= line == "begun\n"

    def wait(self):
        """Return the exit status, what was printed, and errors; check that nothing is left."""
        try:
            out, err = self.process.communicate(timeout=300)
        finally:
            self.process.kill()
        wait_until(lambda: not working_in(self.folder))
        return self.process.returncode, out, err


@pytest.fixture
def dry_run(folder, monkeypatch, capsys):
    """Return a function that returns the words of mpirun's line, the job, and notes."""
    monkeypatch.chdir(folder)
    monkeypatch.delenv("THEANO_FLAGS", raising=False)

    def run(*arguments, **variables):
        for name, value in {**FOR_ROOT, **variables}.items():
            monkeypatch.setenv(name, value)
        status = main(["rule", *arguments, "--dry-run"])
        out, err = capsys.readouterr()
        assert status == 0, err
        line = shlex.split(out)
        told = json.loads(line[-1])
        return line, json.loads(told["line"][-1]) if "line" in told else told, err

    return run


@needs_mpirun
def test_the_line_of_mpirun(dry_run):
    line, job, err = dry_run(
        *("BSP", "--devices", "node0:cpu,cpu", "--devices", "node1:cuda0", "model.py", "Model"),
        *("--set", "n_epochs=3", "--set", "data.n_batch_train=10", "--sync-type", "avg"),
        *("--scale-lr", "no", "--resume", "--agent", "my ssh", "--mpirun-args", "--mca btl 'a,b'"),
        THEANO_FLAGS="device=cuda0,mode=FAST_COMPILE",
        SYNKHRONOS_SHOWN="1",
        LD_LIBRARY_PATH="/lib",
    )
    assert line[0].endswith("mpirun")
    assert line[1:5] == ["--host", "node0:1,node1:1", "-n", "2"]
    assert line[5:9] == ["--map-by", "ppr:1:node", "--bind-to", "none"]
    assert line[line.index("plm_rsh_agent") + 1] == "my ssh"
    assert line[line.index("btl") + 1] == "a,b"
    exported = {line[number + 1] for number, word in enumerate(line) if word == "-x"}
    assert {"SYNKHRONOS_SHOWN", "THEANO_FLAGS=mode=FAST_COMPILE", "LD_LIBRARY_PATH=/lib"} < exported
    assert err.startswith("synkhronos rule: device=cuda0 in THEANO_FLAGS is left out")
    assert job["devices"] == ["cpu", "cpu", "cuda0"] and job["cores"] == []
    assert job["settings"] == {"n_epochs": 3, "data.n_batch_train": 10}
    assert job["options"]["sync_type"] == "avg" and job["options"]["resume"] is True
    assert job["options"]["scale_lr"] is False and job["options"]["seed"] == 23455
    told = json.loads(line[-1])
    assert told["counts"] == [2, 1] and len(told["token"]) == 32


def test_the_ranks_run_the_worker():
    asked = request.Request("BSP", [RankPlace(None, "cpu")], "m", "M")
    line = rule.worker_command(asked, [])
    assert line[:-1] == module_command("synkhronos.rules.worker", unbuffered=True)
    assert json.loads(line[-1])["modelclass"] == "M"


def test_a_server_without_a_device(dry_run):
    given = ("EASGD", "--devices", "cpu", "model.py", "Model", "--server", "extra", "--bind")
    line, job, _ = dry_run(*given)
    assert job["devices"] == ["none", "cpu"] and "mpirun" not in line[0]
    assert job["cores"] == [None, sorted(os.sched_getaffinity(0))]


def test_ranks_are_bound_without_a_gpu_or_ssh(dry_run):
    """Theirs asked nvidia-smi by ssh, of the own host too, and then needed hwloc."""
    none = {"PATH": "/nowhere"}
    _, job, _ = dry_run("BSP", "--devices", "cpu,cpu", "model.py", "Model", "--bind", **none)
    first, second = job["cores"]
    assert first and second and {*first, *second} <= os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["BSP", "--devices", "gpu", "model.py", "Model"], "'gpu' in 'gpu' is not the name of a"),
        (["BSP", "--devices", "cpu", "none.py", "Model"], "no model file 'none.py'"),
        (["BSP", "--devices", "cpu", "model.py", "Modle"], "Perhaps you meant Model."),
        (["EASGD", "--devices", "cpu", "model.py", "Model"], "EASGD with one device"),
        (["BSP", "--devices", "cpu", "model.py", "Model", "--sync-type", "swap"], "must be even"),
        (["BSP", "--devices", "cpu", "model.py", "Model", "--exchange-freq", "2"], "'avg' ranks"),
        (["BSP", "model.py", "Model"], "devices is empty: name a device for each rank"),
        (["EASGD", "--devices", "cpu,cpu", "model.py", "Model", "--alhpa", "1"], "meant --alpha"),
        (["EASGD", "--devices", "cpu,cpu", "model.py", "Model", "--alpha", "2"], "at most 1, got"),
        (["EASGD", "model.py", "Model", "--exchange-freq", "2"], "--exchange-freq: EASGD has no"),
        (["EASGD", "--exchange-freq", "2", "model.py", "Model"], "it is one of BSP."),
        (["BSP", "--devices", "cpu", "model.py", "Model", "--set", "x"], "NAME=VALUE"),
        (["BSP", "--devices", "cpu", "Model", "--resume", "model.py"], "MODELCLASS"),
        (["BSP", "--devices", "cpu", "a", "M", "x", "--resume", "m.py"], "--resume at the end"),
        (["BSP", "--devices", "cpu", "--resume", "no.npz", "model.py", "Model"], "no snapshot 'no"),
        (["BPS", "--devices", "cpu", "model.py", "Model"], "invalid choice: 'BPS'"),
        (["BSP", "--devices", "cpu", "model.py", "Model", "--mpirun-args='"], "No closing quota"),
    ],
)
def test_mistakes_are_told_in_a_sentence(folder, arguments, message, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    try:
        status = main(["rule", *arguments])
    except SystemExit as error:
        status = error.code
    assert status == 2 and not (folder / "logs").exists()
    assert message in capsys.readouterr().err


def test_a_package_that_a_model_lacks_is_told_before_ranks_start(folder, capsys, monkeypatch):
    """They would end with status 1, too."""
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "lasagne", None)  # as if it were not installed
    (folder / "model.py").write_text("import lasagne\nclass Model: pass\n")
    assert main(["rule", "BSP", "--devices", "cpu,cpu", "model.py", "Model"]) == 1
    said = "model.py needs lasagne, which is not installed here: pip install 'synkhronos[demos]'"
    assert capsys.readouterr().err == f"synkhronos rule: {said}\n"
    assert not (folder / "logs").exists()


def test_help_lists_all_options(capsys):
    from synkhronos.__main__ import main

    with pytest.raises(SystemExit):
        main(["rule", "--help"])
    shown = capsys.readouterr().out
    for name, option in options.TABLE.items():
        assert f"{options.flag(name)} " in shown
        assert option.sentence in shown


def test_output_and_log_files(folder):
    """Theirs had no log files, and a run left no file that names its ranks."""
    status, out, err = run(
        folder,
        *("BSP", "--devices", "cpu,cpu", "model.py", "Model", "--set", "does=shows"),
        THEANO_FLAGS="floatX=float32",
        SYNKHRONOS_SHOWN="this",
    )
    assert status == 0
    [logs] = (folder / "logs").iterdir()
    first, *lines = out.splitlines()
    assert first == f"BSP(cdd, nccl32): 2 workers on cpu, cpu; logs in logs/{logs.name}"
    each = ["environment floatX=float32 this", "no newline"]
    assert sorted(lines) == sorted(each * 2 + [f"rank {r} of 2: cpu, []" for r in range(2)])
    assert sorted(err.splitlines()) == ["an error of rank 0", "an error of rank 1"]
    for number in range(2):
        log = (logs / f"rank_{number}.log").read_text().splitlines()
        own = [f"rank {number} of 2: cpu, []", f"an error of rank {number}", *each]
        assert sorted(log) == sorted(own)


@pytest.mark.parametrize(
    ("does", "status", "words"),
    [
        ("is killed", 137, "was killed by SIGKILL (signal 9), which has ended the run."),
        pytest.param(
            *("raises", 1, "has ended with exit status 1, which has ended the run."),
            marks=pytest.mark.slow("starts three processes"),
        ),
        pytest.param(
            *("aborts", 5, "has ended with exit status 5, which has ended the run."),
            marks=pytest.mark.slow("starts three processes"),
        ),
    ],
)
def test_a_rank_that_dies_ends_bsp(folder, does, status, words):
    """Theirs printed a return code and nothing of the rank, and its own exit status was 0."""
    given = ("BSP", "--devices", "cpu,cpu,cpu", "model.py", "Model", "--set", f"does={does}")
    found, out, err = run(folder, *given, "--set", "saves=True", "--print-freq", "7")
    assert found == status
    host = os.uname().nodename
    assert f"synkhronos rule: rank 2 (cpu on {host}) {words}" in err
    assert "prterun" not in err + out and "MPI_ABORT" not in err
    assert ("ValueError: a reason" in err) == (does == "raises")
    [log] = (folder / "logs").glob("*/rank_2.log")
    assert f"Its output is in {log.relative_to(folder)}." in err
    again = "synkhronos rule BSP --devices cpu,cpu,cpu model.py Model --print-freq 7 --resume"
    assert f"newest snapshot is snapshots/snapshot_0003.npz; this goes on from it: {again}" in err


def test_others_survive_a_rank_that_dies(folder):
    given = ("GOSGD", "--devices", "cpu,cpu,cpu", "model.py", "Model", "--set", "does=exits")
    found, out, err = run(folder, *given)
    words = "has ended with exit status 7"
    assert found == 7
    for survivor in (0, 1):
        assert f"rank {survivor} has noticed that rank 2 has died" in out
    assert f"rank 2 (cpu on {os.uname().nodename}) {words}; the others go on without it." in err
    assert f"{words}; 2 other ranks ended as they should." in err
    assert "There is no snapshot of this run." in err


def test_a_ctrl_c_lets_all_ranks_write_a_snapshot(folder):
    given = ("BSP", "--devices", "cpu,cpu", "model.py", "Model", "--set", "does=waits")
    launched = Launched(folder, *given, "--set", "saves=True", "--grace", "60")
    launched.process.send_signal(signal.SIGINT)
    status, out, err = launched.wait()
    assert status == 130
    assert sorted(out.splitlines())[-2:] == [f"rank {r} was asked 1 times" for r in range(2)]
    assert "stopping; the ranks have 60 s to write a snapshot" in err
    assert "this goes on from it: synkhronos rule BSP" in err and "was killed" not in err


@pytest.mark.slow("waits for stubborn ranks")
@pytest.mark.parametrize(
    ("number", "grace"), [(signal.SIGINT, 30), (signal.SIGTERM, 30), (signal.SIGTERM, 0.5)]
)
def test_a_second_ctrl_c_or_the_end_of_their_grace_ends_stubborn_ranks(folder, number, grace):
    given = ("GOSGD", "--devices", "cpu,cpu", "model.py", "Model", "--set", "does=is stubborn")
    launched = Launched(folder, *given, "--grace", f"{grace}")
    launched.process.send_signal(number)
    said = "".join(launched.process.stderr.readline() for _ in range(3))
    assert f"stopping; the ranks have {grace} s" in said
    if grace == 30:
        time.sleep(2 if number == signal.SIGTERM else 0)  # a batch system may send two at once
        launched.process.send_signal(number)
    assert launched.wait()[0] == 128 + number


@pytest.mark.slow("starts several processes")
@pytest.mark.parametrize("which", ["launcher", "rank"])
@pytest.mark.parametrize("name", ["BSP", "GOSGD"])
def test_nothing_is_left_of_what_is_killed(folder, which, name):
    given = (name, "--devices", "cpu,cpu", "model.py", "Model", "--set", "does=waits")
    launched = Launched(folder, *given)
    victims = {"launcher": launched.process.pid}
    for child in psutil.Process(launched.process.pid).children():
        victims.setdefault("rank", child.pid)
    os.kill(victims[which], signal.SIGKILL)
    if which == "rank":  # the other one goes on, as it computes
        for _ in range(2):
            time.sleep(2)
            launched.process.send_signal(signal.SIGTERM)
    assert launched.wait()[0] not in (0, None)


@pytest.mark.slow("starts several processes")
def test_a_reader_that_goes_away_ends_the_run(folder):
    given = ("BSP", "--devices", "cpu,cpu", "model.py", "Model", "--set", "does=waits")
    launched = Launched(folder, *given)
    launched.process.stdout.close()
    launched.process.send_signal(signal.SIGINT)  # the ranks print
    assert launched.process.wait(LONG) == 130
    launched.process.stderr.close()
    launched.process.stdin.close()
    wait_until(lambda: not working_in(folder))


@needs_mpirun
@pytest.mark.slow("starts mpirun on hosts")
def test_two_hosts(two_hosts, folder):
    addresses = two_hosts.addresses
    given = ["BSP", "--devices", f"{addresses[0]}:cpu,cpu", "--devices", f"{addresses[1]}:cpu"]
    given += ["model.py", "Model", "--bind", "--set", "does=exits", *two_hosts.reached_by]
    environment = two_hosts.environment(PYTHONUNBUFFERED="1")
    status, out, err = launching.run(command(*given), folder, environment)
    assert status == 7, err
    assert f"rank 2 (cpu on synk{two_hosts.net}-2) has ended with exit status 7" in err
    cores = json.loads(out.partition("rank 0 of 3: cpu, ")[2].partition("\n")[0])
    assert len(cores) == 3 and all(cores)
    assert two_hosts.is_empty()


@needs_mpirun
def test_a_host_that_cannot_be_reached(two_hosts, folder):
    given = ["GOSGD", "--devices", f"10.{two_hosts.net}.0.9:cpu", "model.py", "Model"]
    line = command(*given, *two_hosts.reached_by)
    status, _, err = launching.run(line, folder, two_hosts.environment())
    assert status == 1
    assert f"10.{two_hosts.net}.0.9 (Cannot open network namespace" in err


def test_the_banner_counts_workers():
    """Theirs counted EASGD's server among the workers."""
    given = ("models.none", "Model", {"exch_strategy": "ar", "server": "first"})
    places = find_places("a:cpu,cuda0;b:cuda0")
    asked = request.Request("EASGD", places, *given)
    assert rule.banner(asked, Path("logs/1")) == (
        "EASGD(ar): 2 workers and a server on a:cpu, a:cuda0, b:cuda0; logs in logs/1"
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", ""),
        ("device=cpu", ""),
        ("floatX=float32, device = cuda ,mode=FAST_RUN", "floatX=float32,mode=FAST_RUN"),
        ("contexts=dev0->cuda0;dev1->cuda1,gpuarray.preallocate=0", "gpuarray.preallocate=0"),
    ],
)
def test_flags_name_no_device(flags, expected, capsys):
    """Theirs refused to run with THEANO_FLAGS in the environment."""
    assert rule.without_devices(flags) == expected
    assert bool(capsys.readouterr().err) == (flags != expected)


def test_log_folders_are_of_one_run(tmp_path):
    assert len({rule._new_folder(tmp_path / "logs") for _ in range(3)}) == 3


def test_the_newest_snapshot_is_found_by_a_machine_whose_clock_is_ahead(tmp_path):
    """Or behind: a file server writes the time of its own clock."""
    old, new = (tmp_path / f"snapshot_000{number}.npz" for number in (1, 2))
    old.write_text("of an earlier run")
    before = rule._snapshots(tmp_path)
    assert rule._newest(tmp_path, before) is None
    new.write_text("of this run")
    hour_ago = time.time() - 3600
    os.utime(new, (hour_ago, hour_ago))
    assert rule._newest(tmp_path, before) == new
