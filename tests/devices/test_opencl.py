"""The behaviour suites on OpenCL ranks, and on a mix of CPU and OpenCL ranks: see layouts.py.

Each in a process of its own, because a process can fork for devices only once.
"""

import faulthandler
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from synkhronos._machine.devices import probe

HERE = Path(__file__).parents[1]
TWO = "opencl0:0,opencl0:0"
MIX = "opencl0:0,cpu"
MIX_OF_THREE = "opencl0:0,cpu,opencl0:0"
# Rules are made of the same operations: a few tests of them, which take minutes each.
SOME_RULES = [
    "training/test_rules::test_rules",
    "training/test_rules::test_two_steps_accumulate_slices",
    "training/test_rules::test_warm_up_counts_calls_not_slices",
]
# PoCL builds each operation anew on each rank, so no suite runs on all layouts.
CASES = [
    (
        TWO,
        0,
        ["devices/test_device_ranks", "collectives/test_collectives", "training/test_updates"],
    ),
    (TWO, 0, ["calls/test_functions", "collectives/test_ops"]),
    (TWO, 0, ["calls/test_slices", *SOME_RULES]),
    (MIX_OF_THREE, 1, ["collectives/test_collectives", "training/test_updates"]),
    (MIX, 1, ["calls/test_distribute", "calls/test_documented_slices"]),
    (MIX, 0, ["devices/test_device_ranks", "calls/test_sliced_updates", "collectives/test_ops"]),
]
NCCL = ["devices/test_device_ranks", "devices/test_nccl", "collectives/test_ops"]

pytestmark = [
    pytest.mark.opencl,
    pytest.mark.slow("waits for PoCL, which builds each operation on each rank"),
]


@functools.lru_cache(maxsize=None)
def missing():
    """Return why there is no OpenCL device, or nothing."""
    count, problem = probe("opencl")
    return "" if count else f"no OpenCL device ({problem or 'it counts 0'}): run `make opencl`"


def run(names, request, **variables):
    """Run test files in a process of their own, on devices that the environment names."""
    if missing():
        pytest.skip(missing())
    faulthandler.cancel_dump_traceback_later()  # what runs has its own, for each test
    paths = []
    for name in names:
        file, *test = name.split("::")
        paths.append("::".join([str(HERE / f"{file}.py"), *test]))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *paths],
        cwd=HERE.parent,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    summary = done.stdout.strip().splitlines()[-1]
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        request.config.pluginmanager.getplugin("terminalreporter").write_line(f" {summary}")
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]
    assert " passed" in summary


@pytest.mark.parametrize(("devices", "master", "suites"), CASES)
def test_suites(devices, master, suites, request):
    run(suites, request, SYNKHRONOS_TEST_DEVICES=devices, SYNKHRONOS_TEST_MASTER=str(master))


def test_nccl_with_a_stand_in(request):
    """What NCCL is given, and when; not NCCL itself."""
    run(NCCL, request, SYNKHRONOS_TEST_DEVICES=TWO, SYNKHRONOS_TEST_TRANSPORT="nccl")


SCRIPT = """
import numpy as np, theano, theano.tensor as T
import synkhronos as synk
import theano.gpuarray  # opens nothing
print(synk.fork())
x, s = T.fvector(), theano.shared(np.ones(2, "float32"))
f = synk.function([x], (x.sum() * s, "sum"))
print(type(s).__name__, f(np.ones(4, "float32")).tolist())
synk.close()
try:
    synk.fork(2)
except synk.SessionError as error:
    print(error)
"""


def test_devices_by_the_environment_and_once_in_a_process(script):
    if missing():
        pytest.skip(missing())
    first, second, third = script(
        SCRIPT, env={"SYNKHRONOS_DEVICES": "opencl0:0, opencl0:0"}
    ).stdout.splitlines()
    assert first == "2" and second == "GpuArraySharedVariable [4.0, 4.0]"
    assert "has opened opencl0:0" in third and "earlier session" in third


def test_a_device_that_is_open_already(script):
    if missing():
        pytest.skip(missing())
    flags = {"THEANO_FLAGS": "device=opencl0:0"}
    done = script("import theano, synkhronos as s; s.fork(2)", env=flags, check=False)
    assert done.returncode == 1
    assert "SessionError: fork() must come before" in done.stderr
    assert "device=cpu,force_device=True" in done.stderr


def test_a_killed_worker_on_a_device_is_told_of(script):
    if missing():
        pytest.skip(missing())
    text = """
import os, signal, time
import numpy as np, theano, synkhronos as synk
from synkhronos import session
synk.fork(devices=["opencl0:0"] * 2)
s = theano.shared(np.ones(1000, "float32"))
synk.all_reduce(s)
os.kill(session._Current.session.worker_pids[0], signal.SIGKILL)
begin = time.monotonic()
try:
    synk.all_reduce(s)
except synk.WorkerDied as error:
    print(error.rank, time.monotonic() - begin < 2)
synk.close()
"""
    assert script(text).stdout == "1 True\n"
