"""The behaviour suites on OpenCL ranks, and on a mix of CPU and OpenCL ranks: see layouts.py.

Each in a process of its own, because a process can fork for devices only once.
"""

import pytest
from support.on_devices import missing, run_suites

ONE = "opencl0:0"
TWO = "opencl0:0,opencl0:0"
MIX = "opencl0:0,cpu"
MIX_OF_THREE = "opencl0:0,cpu,opencl0:0"
# Rules are made of the same operations: a few tests of them, which take minutes each.
SOME_RULES = [
    "training/test_rules::test_rules",
    "training/test_rules::test_two_steps_accumulate_slices",
    "training/test_rules::test_warm_up_counts_calls_not_slices",
]
NO_ROWS = "collectives/test_ops::test_what_has_no_rows_counts_for_nothing"
# PoCL builds each operation anew on each rank, so no suite runs on all layouts.
CASES = [
    (
        TWO,
        0,
        ["devices/test_device_ranks", "collectives/test_collectives", "training/test_updates"],
    ),
    (ONE, 0, ["devices/test_device_ranks::test_training_is_serial_training_on_the_cpu", NO_ROWS]),
    (TWO, 0, ["calls/test_functions", "collectives/test_ops"]),
    (TWO, 0, ["calls/test_slices", *SOME_RULES]),
    (MIX_OF_THREE, 1, ["collectives/test_collectives", "training/test_updates"]),
    (MIX, 1, ["calls/test_distribute"]),
    (MIX, 0, ["devices/test_device_ranks", "calls/test_sliced_updates", "collectives/test_ops"]),
]
NCCL = ["devices/test_device_ranks", "devices/test_nccl", "collectives/test_ops"]
# Left out where others test the same, as they compile a network for a minute and more: the graph
# on a mix is that on OpenCL ranks alone, and `test_device_ranks` trains with NCCL.
GRAPH = "collectives/test_ops::test_the_gradients_of_a_model_take_one_round"
TRAINING = "collectives/test_ops::test_training_in_one_function_is_serial_training"

pytestmark = [
    pytest.mark.opencl,
    pytest.mark.slow("waits for PoCL, which builds each operation on each rank"),
]


@pytest.fixture(autouse=True)
def device():
    if missing("opencl"):
        pytest.skip(f"{missing('opencl')}: run `make opencl`")


@pytest.mark.parametrize(("devices", "master", "suites"), CASES)
def test_suites(devices, master, suites, request):
    run_suites(devices, master, suites, request, without=[GRAPH] if devices == MIX else ())


def test_nccl_with_a_stand_in(request):
    """What NCCL is given, and when; not NCCL itself."""
    run_suites(TWO, 0, NCCL, request, transport="stand-in", without=[GRAPH, TRAINING])


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
    first, second, third = script(
        SCRIPT, env={"SYNKHRONOS_DEVICES": "opencl0:0, opencl0:0"}
    ).stdout.splitlines()
    assert first == "2" and second == "GpuArraySharedVariable [4.0, 4.0]"
    assert "has opened opencl0:0" in third and "earlier session" in third


def test_a_device_that_is_open_already(script):
    flags = {"THEANO_FLAGS": "device=opencl0:0"}
    done = script("import theano, synkhronos as s; s.fork(2)", env=flags, check=False)
    assert done.returncode == 1
    assert "SessionError: fork() must come before" in done.stderr
    assert "device=cpu,force_device=True" in done.stderr


def test_a_killed_worker_on_a_device_is_told_of(script):
    text = """
import os, signal, time
import numpy as np, theano, synkhronos as synk
from synkhronos import session
synk.fork(devices=["opencl0:0"] * 2)
s = theano.shared(np.ones(1000, "float32"))
synk.all_reduce(s)
os.kill(session._Current.session.worker_pids[0], signal.SIGKILL)
try:
    synk.all_reduce(s)
except synk.WorkerDied as error:
    print(error.rank)
synk.close()
"""
    assert script(text).stdout == "1\n"
