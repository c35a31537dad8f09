"""The behaviour suites on CUDA devices, and what only happens there: NCCL, and deaths within it.

Each in a process of its own, because a process can fork for devices only once. With one GPU, ranks
share it: see one_gpu.py. `tests/gpu` has a check for machines that have no pytest.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.on_devices import missing, run_suites
from support.waiting import wait_until

ONE = "cuda0"
TWO = "cuda0,cuda0"
THREE = "cuda0,cuda0,cuda0"
FOUR = "cuda0,cuda0,cuda0,cuda0"
MIX = "cuda0,cpu"
MIX_OF_THREE = "cpu,cuda0,cuda0"
CASES = [
    (ONE, 0, ["devices/test_device_ranks", "collectives/test_collectives", "collectives/test_ops"]),
    (TWO, 0, ["devices/test_device_ranks", "collectives/test_collectives"]),
    (TWO, 1, ["collectives/test_ops", "collectives/test_bad_collectives"]),
    (TWO, 0, ["training/test_updates", "calls/test_functions"]),
    (TWO, 0, ["calls/test_slices", "calls/test_sliced_updates"]),
    (TWO, 0, ["calls/test_distribute"]),
    (TWO, 0, ["training/test_rules"]),
    (TWO, 0, ["calls/test_axes", "calls/test_rows", "calls/test_data", "calls/test_sparse"]),
    (TWO, 0, ["calls/test_theano_arguments", "session/test_checkpoints"]),
    (TWO, 0, ["training/test_serial_random", "session/test_status"]),
    (THREE, 1, ["collectives/test_collectives", "collectives/test_ops", "training/test_updates"]),
    (MIX, 0, ["devices/test_device_ranks", "collectives/test_ops"]),
    (MIX, 1, ["calls/test_distribute", "calls/test_sliced_updates"]),
    (MIX_OF_THREE, 1, ["collectives/test_collectives", "training/test_updates"]),
]
NCCL = ["devices/test_nccl", "devices/test_device_ranks", "collectives/test_ops"]

pytestmark = [pytest.mark.gpu, pytest.mark.slow("compiles each operation for the device")]


@pytest.fixture(autouse=True)
def device():
    if missing("cuda"):
        pytest.skip(missing("cuda"))


@pytest.mark.parametrize(("devices", "master", "suites"), CASES)
def test_suites(devices, master, suites, request):
    run_suites(devices, master, suites, request)


@pytest.mark.parametrize("devices", [ONE, TWO, THREE, FOUR])
def test_nccl(devices, request):
    run_suites(devices, 0, NCCL, request, transport="nccl")


def test_collectives_through_nccl(request):
    run_suites(TWO, 1, ["collectives/test_collectives"], request, transport="nccl")


def test_nccl_with_a_stand_in(request):
    run_suites(TWO, 0, NCCL, request, transport="stand-in")


@pytest.fixture
def session_script(script):
    """Return a function that runs a script on two ranks that share a GPU."""
    return lambda text, **kwargs: script(BEGIN + text, **kwargs)


BEGIN = """
import faulthandler, logging, os, signal, sys, threading, time
import numpy as np, theano, theano.tensor as T
import synkhronos as synk
from synkhronos import session
from support import one_gpu

faulthandler.dump_traceback_later(40)  # before the time limit of the test

def begin(transport):
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    if transport != "shared":
        one_gpu.install(hosts=transport == "nccl")
    synk.fork(devices=["cuda0"] * 2)
    return theano.shared(np.ones(1 << 22, "float32"))
"""


def test_two_ranks_on_a_gpu_are_refused_by_nccl_and_go_through_memory(session_script):
    done = session_script("""
s = begin("refused")
synk.all_reduce(s, "sum")
print(synk.get_value(1, s)[:2])
synk.close()
""")
    *said, values = done.stdout.strip().splitlines()
    assert values == "[2. 2.]"
    assert any("NCCL can't be used" in line for line in said), done.stdout


@pytest.mark.parametrize("transport", ["shared", "nccl"])
def test_a_killed_worker_is_told_of_and_the_script_ends(session_script, transport):
    """Also in a round of NCCL, in which the kernel of the master waits for ever."""
    done = session_script(
        f"""
s = begin({transport!r})
kept = theano.shared(np.arange(3, dtype="float32"))
synk.all_reduce(s)
pid = session._Current.session.worker_pids[0]
threading.Timer(0.25, os.kill, (pid, signal.SIGKILL)).start()
try:
    while True:
        synk.all_reduce(s)
except synk.WorkerDied as error:
    print(error.rank, flush=True)
print(s.get_value().shape, kept.get_value(), flush=True)
synk.close()
print("closed", flush=True)
"""
    )
    assert done.stdout.splitlines()[-3:] == ["1", "(4194304,) [0. 1. 2.]", "closed"]


@pytest.mark.parametrize("transport", ["shared", "nccl"])
def test_a_killed_master_leaves_no_worker(session_script, transport):
    """Also in a round of NCCL, whose kernels would wait for the master for ever."""
    done = session_script(
        f"""
s = begin({transport!r})
synk.all_reduce(s)
print("pid", session._Current.session.worker_pids[0], flush=True)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
while True:
    synk.all_reduce(s)
""",
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    [pid] = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("pid")]
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), what=lambda: f"{pid} is left")


@pytest.mark.parametrize("transport", ["shared", "nccl"])
def test_a_session_that_is_closed_in_a_call(session_script, transport):
    """By another thread: the workers are killed, perhaps in a round."""
    done = session_script(
        f"""
s = begin({transport!r})
synk.all_reduce(s)
threading.Timer(0.3, synk.close).start()
try:
    while True:
        synk.all_reduce(s)
except (synk.SessionError, synk.WorkerDied) as error:
    print(error, flush=True)
print(s.get_value().shape, flush=True)
"""
    )
    assert done.stdout.splitlines()[-1] == "(4194304,)"


@pytest.mark.parametrize("transport", ["shared", "nccl"])
def test_ctrl_c_leaves_the_session_usable(session_script, transport):
    done = session_script(
        f"""
s = begin({transport!r})
x = T.fmatrix("x")
f = synk.function([x], [(T.dot(x, x.T).sum(axis=0), "sum")])
rows = synk.data(np.ones((600, 400), "float32"))
f(rows)
interrupted = 0
for number in range(30):
    timer = threading.Timer(0.003 + 0.002 * (number % 15), os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        while True:
            synk.all_reduce(s)
            f(rows)
    except KeyboardInterrupt:
        interrupted += 1
    timer.join()
synk.broadcast(s, np.full(4, 3, "float32"))
synk.all_reduce(s, "sum")
print(interrupted, synk.get_value(1, s), f(rows)[0][:1])
synk.close()
"""
    )
    assert done.stdout.splitlines()[-1] == "30 [6. 6. 6. 6.] [240000.]"


def test_without_nccl_arrays_go_through_memory(session_script, tmp_path):
    """A file that is no library hides NCCL from the loader."""
    (tmp_path / "libnccl.so").write_text("no library")
    path = f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    done = session_script(
        """
logging.basicConfig(format="%(message)s", stream=sys.stdout)
synk.fork(devices=["cuda0"])
s = theano.shared(np.ones(3, "float32"))
synk.all_reduce(s, "sum")
print(synk.get_value(0, s))
synk.close()
""",
        env={"LD_LIBRARY_PATH": path},
    )
    *said, values = done.stdout.strip().splitlines()
    assert values == "[1. 1. 1.]"
    [told] = [line for line in said if "NCCL can't be used" in line]
    assert "libnccl.so" in told and "synkhronos info" in told


def test_all_gpus_are_the_default(session_script):
    done = session_script("""
n = synk.fork()
s = theano.shared(np.ones(3, "float32"))
print(n == synk.get_n_gpu(), type(s).__name__)
synk.close()
""")
    assert done.stdout.splitlines()[-1] == "True GpuArraySharedVariable"


@pytest.mark.parametrize("demo", ["demo_1", "demo_2", "demo_3", "demo_4", "demo_5"])
def test_demos_on_the_gpu(demo):
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, str(root / "demos" / f"{demo}.py")], check=True, timeout=300)
