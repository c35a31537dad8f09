"""The behaviour suites on OpenCL ranks, and on a mix of CPU and OpenCL ranks: see layouts.py.

Each in a process of its own, because a process can fork for devices only once.
"""

import pytest
from support.on_devices import missing, run_suites

ONE = "opencl0:0"
TWO = "opencl0:0,opencl0:0"
MIX = "opencl0:0,cpu"
MIX_OF_THREE = "opencl0:0,cpu,opencl0:0"
# PoCL builds each operation anew on each rank, so no suite runs on all layouts, and what compiles
# much is left out where another test has the same operations: rules, and training with NCCL, are
# those of `test_device_ranks`; slices of rows are selected as there, and accumulated as in
# `test_every_mode`; the graph on a mix is that on OpenCL ranks alone.
NO_ROWS = "collectives/test_ops::test_what_has_no_rows_counts_for_nothing"
GRAPH = "collectives/test_ops::test_the_gradients_of_a_model_take_one_round"
TRAINING = "collectives/test_ops::test_training_in_one_function_is_serial_training"
MANY = "calls/test_functions::test_many_inputs_and_many_outputs"
SLICEABLE = "calls/test_sliced_updates::test_with_sliceables"
ALL = ["devices/test_device_ranks", "collectives/test_ops"]
CASES = [
    (
        TWO,
        0,
        [
            *ALL,
            "collectives/test_collectives",
            "calls/test_functions",
            "calls/test_slices",
            "training/test_rules::test_rules",
        ],
        [TRAINING, MANY],
    ),
    (
        ONE,
        0,
        ["devices/test_device_ranks::test_training_is_serial_training_on_the_cpu", NO_ROWS],
        [],
    ),
    (
        MIX_OF_THREE,
        1,
        ["collectives/test_collectives", "training/test_updates", "calls/test_distribute"],
        [],
    ),
    (MIX, 0, [*ALL, "calls/test_sliced_updates"], [GRAPH, TRAINING, SLICEABLE]),
]

pytestmark = [
    pytest.mark.opencl,
    pytest.mark.slow("waits for PoCL, which builds each operation on each rank"),
]


@pytest.fixture(autouse=True)
def device():
    if missing("opencl"):
        pytest.skip(f"{missing('opencl')}: run `make opencl`")


@pytest.mark.parametrize(("devices", "master", "suites", "without"), CASES)
def test_suites(devices, master, suites, without, request):
    run_suites(devices, master, suites, request, without=without)


def test_nccl_with_a_stand_in(request):
    """What NCCL is given, and when; not NCCL itself."""
    suites = [*ALL, "devices/test_nccl"]
    run_suites(TWO, 0, suites, request, transport="stand-in", without=[GRAPH, TRAINING])


COMPILED = {"THEANO_FLAGS": "mode=FAST_COMPILE"}  # devices have no operations in Python
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
    env = {"SYNKHRONOS_DEVICES": "opencl0:0, opencl0:0", **COMPILED}
    first, second, third = script(SCRIPT, env=env).stdout.splitlines()
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
    assert script(text, env=COMPILED).stdout == "1\n"
