"""The check for GPU machines must work when a GPU machine is at hand: run it on CPU ranks."""

import collections
import importlib
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import scenarios
from benchmarks import BENCHMARKS
from scenarios import compare
from support import running
from support.leaks import nothing_left

from synkhronos.tools import bench
from synkhronos.tools.bench import frame, scaling

HERE = Path(__file__).parent
GIVEN = """
import os
import time

import theano

from scenarios import Known, Skip, compare, scenario

FORKS = True


@scenario()
def right(run):
    run.figures["ranks"] = run.n
    return "as it should be"


@scenario()
def wrong(run):
    compare.close([1.0, 2.5], [1.0, 2.0], "two numbers")


@scenario()
def absent(run):
    raise Skip("not here")


@scenario()
def foreseen(run):
    raise Known("since 2017")


@scenario()
def crash(run):
    print("last words", flush=True)
    os.abort()


@scenario(limit=1)
def hang(run):
    time.sleep(60)


@scenario()
def right_afterwards(run):
    run.figures["ranks"] = run.n
"""


def check(*arguments, **variables):
    """Run check.py with functions that compile quickly, without a C compiler."""
    flags = f"mode=FAST_COMPILE,cxx=,{os.environ.get('THEANO_FLAGS', '')}".strip(",")
    return subprocess.run(
        [sys.executable, str(HERE / "check.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "THEANO_FLAGS": flags, **variables},
    )


@pytest.fixture
def own(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(GIVEN)
    return file


@pytest.mark.slow("runs all that the check computes")
def test_cpu_ranks_pass(tmp_path):
    file = tmp_path / "record.json"
    done = check("--devices", "cpu,cpu", "--quick", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(file.read_text())
    assert record["ok"]
    passed = collections.Counter(r["group"] for r in record["results"] if r["status"] == "ok")
    assert set(passed) == set(scenarios.GROUPS) - {"cudnn"}  # which skips there
    assert sum(passed.values()) >= 20


@pytest.mark.slow("runs the kit for GPUs on CPU cores")
def test_failures_are_found_and_stop_nothing(own, tmp_path):
    file = tmp_path / "record.json"
    done = check("--devices", "cpu,cpu", "--only", str(own), "--json", str(file))
    assert done.returncode == 1, done.stdout + done.stderr
    results = {r["name"]: r for r in json.loads(file.read_text())["results"]}
    assert {name: r["status"] for name, r in results.items()} == {
        "fork": "ok",
        "right": "ok",
        "wrong": "FAIL",
        "absent": "skip",
        "foreseen": "known",
        "crash": "FAIL",
        "hang": "FAIL",
        "right_afterwards": "ok",
        "close": "ok",
    }
    assert "relative difference 2.5e-01" in results["wrong"]["detail"]
    assert "SIGABRT" in results["crash"]["detail"]
    assert "last words" in results["crash"]["error"]
    assert "no answer" in results["hang"]["detail"]
    assert results["right_afterwards"]["figures"] == {"ranks": 2}
    assert "FAIL  cpu, cpu: " in done.stdout.splitlines()[-1]


@pytest.mark.slow("starts several interpreters")
def test_ranks_that_do_not_start_are_a_failure(own):
    done = check("--devices", "cuda99", "--only", str(own))
    assert done.returncode == 1
    assert "FAIL  fork" in done.stdout
    assert "right" not in done.stdout


@pytest.mark.parametrize(
    "got, expected",
    [
        ([1.0, np.nan], [1.0, 2.0]),
        ([1.0, 2.0 + 1e-9], [1.0, 2.0]),
        (np.float32([1, 2]), np.float64([1, 2])),
        ([[1.0, 2.0]], [1.0, 2.0]),
        ([1, 2], [1, 3]),
        ([], [1.0]),
    ],
)
def test_comparisons_find_differences(got, expected):
    with pytest.raises(compare.DifferenceError):
        compare.close(got, expected, "numbers")
    with pytest.raises(compare.DifferenceError):
        compare.equal(got, expected, "numbers")


def test_comparisons_allow_for_rounding():
    assert 0 < compare.close(np.float32([1, 1 + 2e-7]), np.float32([1, 1]), "numbers") < 1e-6
    with pytest.raises(compare.DifferenceError):
        compare.equal(np.float32([1, 1 + 2e-7]), np.float32([1, 1]), "numbers")
    compare.refused(ValueError, lambda: int("x"), "a word")
    with pytest.raises(compare.DifferenceError, match="not refused"):
        compare.refused(ValueError, lambda: int("1"), "a number")


def test_wrong_arguments():
    assert "no group 'nothing'" in check("--only", "nothing").stderr
    assert check("--devices", ",").returncode == 2


@pytest.mark.slow("runs steps on CPU ranks")
def test_steps_write_their_results_and_all_have_options_that_there_are(tmp_path):
    """With this Python, which is looked at for PyTorch, too, as the one of the machine."""
    out, kept = tmp_path / "out", tmp_path / "kept"
    given = {"OUT": out, "KEEP": kept, "PYTHON": sys.executable, "PEER_PYTHON": sys.executable}
    given = {
        "env": {**os.environ, **running.IN_PYTHON, **given},
        "capture_output": True,
        "text": True,
    }
    with nothing_left():
        done = subprocess.run([HERE / "all.sh", "cores", "--cpu", "--time", "1200"], **given)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == (out / "summary.txt").read_text()
    assert done.stdout.startswith("Steps: 9 ok, 0 failed, 0 left out\n")
    with tarfile.open(out / "results.tar.gz") as results:
        names = {Path(name).name for name in results.getnames()}
    assert names >= {f"{step}.json" for step in ["call", "collectives-2", "threads"]}
    assert "\nthreads: " in done.stdout
    for step in ("strong", "strong-cnn", "weak"):
        assert f"\n{step}: speedup on n devices" in done.stdout
        [curve] = scaling.measured(json.loads((kept / f"results/{step}.json").read_text()))
        assert [each["ranks"] for each in curve["steps"]] == [1, 2]
    for more in ([], ["--cpu"]):
        done = subprocess.run([HERE / "all.sh", "--dry-run", *more], check=True, **given)
        lines = [line.split() for line in done.stdout.splitlines() if " -m " in line]
        for words in lines:
            _, program, *rest = words[words.index("-m") :]
            if program != "pytest" and rest != ["info"]:
                name, *options = rest[program == "synkhronos" :]
                module = importlib.import_module({**bench.BENCHMARKS, **BENCHMARKS}[name])
                frame.parser(name, module).parse_args(options)
        checks = re.findall(r"check\.py .*--only (\S+)", done.stdout)
        assert len(lines) >= 8 and len(checks) >= 3
        assert {*",".join(checks).split(",")} <= {*scenarios.GROUPS}


def test_two_commands_are_enough():
    """Of ten minutes each, and thirteen together; another one has what needs the other kit."""
    given = {"env": {**os.environ, "PYTHON": sys.executable}, "text": True}
    seconds = []
    for parts in (["gpu"], ["cores", "check"], ["jax", "pymc"]):
        line = [HERE / "all.sh", "--dry-run", *parts]
        said = subprocess.run(line, check=True, capture_output=True, **given).stdout
        steps = dict(re.findall(r"^(\S+) +(\d+) s  ", said, re.MULTILINE))
        steps.pop("nccl", None)  # beside the group cudnn
        seconds.append(sum(map(int, steps.values())))
    assert max(seconds) < 570 and sum(seconds[:2]) <= 780


@pytest.mark.slow("compiles a ResNet and an MLP")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("profile_resnet.py --devices cpu --depth 8 --width 2 --size 8 --classes 4 --batch 8",
         ["optimizer", "thunks", "first step", "a step"]),
    ],
    ids=["resnet"],
)  # fmt: skip
def test_scripts_that_measure(line, expected):
    with nothing_left():
        done = running.run(sys.executable, *f"{HERE}/{line}".split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(each in done.stdout for each in expected)


def test_steps_that_fail_or_take_too_long_or_have_no_time_are_told(tmp_path):
    """A Python that hangs, with a child in a session of its own, takes the time of all."""
    python, out = tmp_path / "python", tmp_path / "out"
    hangs = "case $* in *strong*) echo begun; setsid sleep 300; esac"
    python.write_text(f"#!/bin/sh\n{hangs}\nexit 3\n")
    python.chmod(0o755)
    given = {"OUT": out, "KEEP": tmp_path / "kept", "PYTHON": python, "LEAST": "1"}
    earlier = tmp_path / "kept" / "results" / "resnet.status"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("resnet\tok\t7\n")
    line = [HERE / "all.sh", "cores", "gpu", "--cpu", "--time", "16"]
    with nothing_left():
        done = subprocess.run(line, env={**os.environ, **given}, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = [" ".join(text.split()) for text in done.stdout.splitlines()]
    assert lines[0].startswith("Steps: 1 ok, 1 failed, ") and "resnet 7 s ok" in lines
    [late] = [n for n, line in enumerate(lines) if line.startswith("strong ")]
    assert "failed: out of time" in lines[late] and lines[late + 1] == "| begun"
    assert "training 0 s left out: 0 s of 16 were left" in lines


def test_goals_are_reached_or_missed(tmp_path):
    def systems(**milliseconds):
        return {"systems": {name: {"seconds": each / 1e3} for name, each in milliseconds.items()}}

    cnn = {"1 rank": 3.0, "1 rank, without cuDNN": 9.0, "PyTorch, cuda0": 1.0}
    mlp = {"serial, cuda0": 1.0, "1 rank": 1.04}
    found = {"networks": {"cnn": systems(**cnn), "mlp": systems(**mlp)}}
    (tmp_path / "training.json").write_text(json.dumps(found))
    (tmp_path / "resnet.json").write_text("{")  # the step was ended while it wrote
    (tmp_path / "training.status").write_text("training\tok\t12\n")
    done = subprocess.run([HERE / "summary.py", tmp_path], capture_output=True, text=True)
    lines = [" ".join(text.split()) for text in done.stdout.splitlines()]
    assert "cnn: 1 rank / PyTorch, cuda0 3.00 / 1.00 ms = 3.00; goal 2.0: MISSED" in lines
    assert "cnn: 1 rank, without cuDNN / 1 rank 9.00 / 3.00 ms = 3.00" in lines
    assert "mlp: 1 rank / serial, cuda0 1.04 / 1.00 ms = 1.04; goal 1.05: reached" in lines
    assert not any("resnet" in line for line in lines)


@pytest.mark.parametrize("name", ["make_kit.sh", "run_kit.sh", "all.sh"])
def test_scripts_parse_and_say_what_they_are_for(name):
    subprocess.run(["bash", "-n", HERE / name], check=True)
    done = subprocess.run([HERE / name, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"Usage: tests/gpu/{name}")


def test_no_kit_is_said(tmp_path):
    missing = tmp_path / "kit.tar.xz"
    done = subprocess.run([HERE / "run_kit.sh", missing], capture_output=True, text=True)
    assert done.returncode == 2
    assert f"no kit at {missing}" in done.stderr
