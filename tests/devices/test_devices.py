"""Which device each rank gets, and what is refused."""

import functools
import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
from support.running import python

from synkhronos._machine import devices as _devices
from synkhronos._machine.devices import default_threads, get_n_gpu, probe, resolve, usable_cores

INFINITE = float("inf")
needs_pygpu = pytest.mark.skipif(
    importlib.util.find_spec("pygpu") is None, reason="pygpu is not installed"
)
needs_no_pygpu = pytest.mark.skipif(
    importlib.util.find_spec("pygpu") is not None, reason="pygpu is installed"
)


@pytest.fixture
def n_gpu(monkeypatch):
    """Return a function that pretends that there are so many CUDA devices."""

    def pretend(number):
        monkeypatch.setattr(_devices, "probe", lambda kind: (number, ""))

    return pretend


@pytest.mark.parametrize(
    ("arguments", "variable", "devices"),
    [
        ({}, " ", ("cpu",) * usable_cores()),
        ({"n_parallel": 64}, "", ("cpu",) * 64),  # more than the cores
        ({"n_parallel": np.uint8(2), "use_gpu": False}, "", ("cpu",) * 2),
        ({"devices": ["cpu", "cpu"]}, "", ("cpu", "cpu")),
        ({"devices": ("cuda", "opencl0:1"), "n_parallel": 2}, "", ("cuda", "opencl0:1")),
        ({}, "cpu, cpu,cpu", ("cpu",) * 3),
        ({"n_parallel": 3}, "cpu, cpu,cpu", ("cpu",) * 3),
        ({"devices": ["cpu"]}, "cpu, cpu,cpu", ("cpu",)),
    ],
    ids=repr,
)
def test_the_device_of_each_rank(monkeypatch, arguments, variable, devices):
    monkeypatch.setenv("SYNKHRONOS_DEVICES", variable)
    assert resolve(**arguments) == devices


NO_NAME = "is not the name of a device, such as 'cpu'"


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        *[
            ({"n_parallel": wrong}, TypeError, "n_parallel must be an integer or None, got")
            for wrong in (True, 2.0, "2", [2], np.bool_(True))
        ],
        ({"n_parallel": 0}, ValueError, "n_parallel must be at least 1"),
        ({"n_parallel": np.int8(-3)}, ValueError, "n_parallel must be at least 1"),
        *[
            ({"devices": wrong}, TypeError, r"devices must (be a list of|hold) names")
            for wrong in ("cpu,cpu", 2, {"cpu": 1}, ["cpu", None])
        ],
        ({"n_parallel": ["cpu"]}, TypeError, "Names of devices are given as devices="),
        ({"devices": "cuda0"}, TypeError, r'such as \["cuda0"\], got'),
        ({"devices": "2"}, TypeError, r'such as \["cpu", "cpu"\], got'),
        *[
            ({"devices": [wrong]}, ValueError, NO_NAME)
            for wrong in ("gpu0", "cuda-1", "opencl0", "cpu0", "")
        ],
        ({"devices": []}, ValueError, "devices is empty"),
        (
            {"n_parallel": 3, "devices": ["cpu", "cpu"]},
            ValueError,
            r"n_parallel=3, but devices names 2 \(cpu, cpu\)",
        ),
        ({"use_gpu": True, "devices": ["cpu"]}, ValueError, "use_gpu=True, but devices names"),
        (
            {"use_gpu": False, "devices": ["cpu", "cuda0"]},
            ValueError,
            "use_gpu=False, but devices names",
        ),
        ({"use_gpu": "yes"}, TypeError, "use_gpu must be True, False or None"),
        ({"use_gpu": 2}, TypeError, "use_gpu must be True, False or None"),
    ],
    ids=repr,
)
def test_what_is_refused(arguments, kind, said):
    with pytest.raises(kind, match=said):
        resolve(**arguments)


@pytest.mark.parametrize("value", ["gpu0", "cpu,,cpu", "cpu,", "CPU"])
def test_what_the_variable_may_not_be(monkeypatch, value):
    monkeypatch.setenv("SYNKHRONOS_DEVICES", value)
    with pytest.raises(ValueError, match=r"SYNKHRONOS_DEVICES: '.*' is not the name of a device"):
        resolve()
    monkeypatch.setenv("SYNKHRONOS_DEVICES", "cpu,cpu,cpu")
    with pytest.raises(ValueError, match=r"n_parallel=2, but SYNKHRONOS_DEVICES names 3"):
        resolve(2)


def test_use_gpu_takes_every_gpu(n_gpu):
    n_gpu(3)
    assert resolve(use_gpu=True) == ("cuda0", "cuda1", "cuda2")
    assert resolve(2, use_gpu=True) == ("cuda0", "cuda1")
    with pytest.raises(ValueError, match="n_parallel=4, but this machine has 3 CUDA devices"):
        resolve(4, use_gpu=True)
    n_gpu(0)
    with pytest.raises(RuntimeError, match="no CUDA device that pygpu can use"):
        resolve(use_gpu=True)


@pytest.fixture
def driver(monkeypatch):
    """NVIDIA's driver is here."""
    monkeypatch.setattr(_devices, "has_nvidia_driver", lambda: True)


@needs_pygpu
def test_gpus_are_the_default_where_there_are_some(monkeypatch, tmp_path, driver):
    pygpu_that(monkeypatch, tmp_path, "def count_devices(kind, platform): return 2\n")
    assert resolve() == resolve(2) == ("cuda0", "cuda1")
    assert resolve(1) == ("cuda0",)
    assert resolve(3, use_gpu=False) == ("cpu",) * 3
    assert resolve(devices=["cpu"]) == ("cpu",)
    with pytest.raises(ValueError, match=r"n_parallel=3, but .* 2 CUDA .*use_gpu=False"):
        resolve(3)


@needs_pygpu
def test_gpus_that_pygpu_can_not_use_are_told_of(monkeypatch, tmp_path, driver, caplog):
    body = "def count_devices(kind, platform): raise RuntimeError('no libcuda.so')\n"
    pygpu_that(monkeypatch, tmp_path, body)
    assert resolve(2) == ("cpu", "cpu")
    [record] = caplog.records
    assert "no libcuda.so" in record.getMessage() and "synkhronos info" in record.getMessage()


def test_a_gpu_that_jax_can_use_is_told_of(monkeypatch, driver, caplog):
    caplog.set_level("INFO", "synkhronos")
    for has_jax in (False, True):
        names = {"jax_plugins"} if has_jax else ()
        find = functools.partial(dict.get, dict.fromkeys(names, True))
        monkeypatch.setattr(_devices.importlib.util, "find_spec", find)
        assert resolve(2) == ("cpu", "cpu")
        assert ('fork(devices=["cuda0"])' in caplog.text) == has_jax


def test_without_a_gpu_nobody_is_asked(monkeypatch):
    monkeypatch.setattr(_devices.glob, "glob", lambda pattern: [])
    monkeypatch.setattr(_devices, "probe", None)
    assert resolve(2) == ("cpu", "cpu")


@needs_no_pygpu
def test_without_pygpu_nothing_is_counted():
    assert probe("cuda")[0] == probe("opencl")[0] == 0
    with pytest.raises(ImportError, match="pygpu, the GPU library of Theano, which cannot be"):
        get_n_gpu()
    with pytest.raises(ImportError, match="pygpu"):
        resolve(use_gpu=True)


@needs_pygpu
def test_counting_imports_no_pygpu_here():
    code = "from synkhronos._machine import devices; import sys; devices.get_n_gpu(); "
    code += "assert 'pygpu' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def pygpu_that(monkeypatch, tmp_path, body):
    """Put a pygpu of our own before any other, for the child that counts."""
    (tmp_path / "pygpu").mkdir()
    (tmp_path / "pygpu" / "__init__.py").write_text("")
    (tmp_path / "pygpu" / "gpuarray.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_devices_of_all_platforms_are_counted(monkeypatch, tmp_path):
    body = (
        "def count_platforms(kind): return 2\n"
        "def count_devices(kind, platform): return {'cuda': 4, 'opencl': platform + 1}[kind]\n"
    )
    pygpu_that(monkeypatch, tmp_path, body)
    assert (get_n_gpu(), probe("cuda"), probe("opencl")) == (4, (4, ""), (3, ""))


def test_no_driver_is_no_device(monkeypatch, tmp_path):
    body = "def count_devices(kind, platform): raise RuntimeError('no libcuda.so')\n"
    pygpu_that(monkeypatch, tmp_path, body)
    assert get_n_gpu() == 0 and "no libcuda.so" in _devices.probe("cuda")[1]


def test_a_crash_or_a_hang_is_no_device(monkeypatch, tmp_path):
    body = (
        "import os, time\n"
        "def count_devices(kind, platform): os.abort() if kind == 'cuda' else time.sleep(60)\n"
        "def count_platforms(kind): return 1\n"
    )
    pygpu_that(monkeypatch, tmp_path, body)
    assert _devices.probe("cuda") == (0, "exit status -6")
    assert _devices.probe("opencl", timeout=0.5) == (0, "no answer within 0.5 s")


def test_affinity_limits_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 5, 6}, raising=False)
    monkeypatch.setattr(_devices, "_cpu_quota", lambda: INFINITE)
    assert usable_cores() == 3
    monkeypatch.setattr(_devices, "_cpu_quota", lambda: 1.5)
    assert usable_cores() == 2
    monkeypatch.setattr(_devices, "_cpu_quota", lambda: 0.1)
    assert usable_cores() == 1


def test_the_processes_of_a_job_share_the_cores_that_it_has(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(16)}, raising=False)
    monkeypatch.setattr(_devices, "_cpu_quota", lambda: INFINITE)
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "12")
    assert usable_cores() == 12
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "2(x3),1")
    for node, cores in ("0", 6), ("2", 6), ("3", 12), ("4", 12):
        monkeypatch.setenv("SLURM_NODEID", node)
        assert usable_cores() == cores
    monkeypatch.setenv("MPI_LOCALNRANKS", "5")  # MPICH
    assert usable_cores() == 2
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "30")
    assert usable_cores() == 1


def test_a_process_that_is_bound_to_its_share_shares_it_no_more(monkeypatch):
    """As srun binds its tasks: with 4 cores for each of 4 tasks it was 1."""
    cores = {os.getppid(): {*range(64)}}
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda pid: cores.get(pid, {*range(4)}), raising=False
    )
    monkeypatch.setattr(_devices, "_cpu_quota", lambda: INFINITE)
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "4")
    monkeypatch.setenv("SLURM_NODEID", "0")
    assert usable_cores() == 4
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "16")
    assert usable_cores() == 4
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "8")
    assert usable_cores() == 2


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, INFINITE),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/cpu.max": "400000 100000\n", "a/b/cpu.max": "max 100000\n"}, 4),
        ("0::/host/only\n", {"cpu.max": "200000 100000\n"}, 2),
        (
            "3:cpu,cpuacct:/\n",
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "1"},
            INFINITE,
        ),
        ("3:cpu:/x\n", {"cpu/cpu.cfs_quota_us": "30", "cpu/cpu.cfs_period_us": "10"}, 3),
        ("nonsense", {}, INFINITE),
    ],
)
def test_cpu_quota(tmp_path, groups, files, expected):
    proc, root = tmp_path / "cgroup", tmp_path / "sys"
    proc.write_text(groups)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    assert _devices._cpu_quota(str(proc), str(root)) == expected
    assert _devices._cpu_quota(str(tmp_path / "absent")) == INFINITE


def test_threads_share_the_cores(monkeypatch):
    monkeypatch.setattr(_devices, "usable_cores", lambda: 8)
    assert [default_threads(n) for n in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]


FAKE_DEVICE = """
import types
import synkhronos
from theano import scalar
from theano.gpuarray import elemwise, type
from synkhronos._host.theano import device_arrays

type._context_reg["fake"] = types.SimpleNamespace(kind=b"cuda", bin_id=b"sm_90")
x = type.GpuArrayType("float32", (False, False), context_name="fake")()
node = elemwise.GpuCAReduceCuda(scalar.add, axis=(0,)).make_node(x)
print(bool(node.op.c_code_cache_version_apply(node)))
device_arrays._let_reductions_be_cached()
print(bool(node.op.c_code_cache_version_apply(node)))
"""


@needs_pygpu
def test_reductions_for_cuda_have_a_version_so_that_the_cache_keeps_them(script):
    assert script(FAKE_DEVICE).stdout.split() == ["False", "True"]


@needs_pygpu
@pytest.mark.parametrize(
    "arguments, flags, status, said",
    [
        (["run", "--devices", "opencl99:0", "file.py"], "", 2, "can't start the ranks: Rank 0"),
        (["run", "-n", "1", "file.py"], "device=opencl99:0", 2, "can't start the ranks: THEANO_FL"),
        (["rule", "BSP", "--devices", "opencl99:0", "file.py", "Model"], "", 1, "Error: The"),
    ],
)
def test_no_command_computes_on_the_cpu_for_a_device_that_can_not_be_opened(
    tmp_path, arguments, flags, status, said
):
    if arguments[0] == "rule":
        pytest.importorskip("synkhronos.rules")
    (tmp_path / "file.py").write_text("print('begun')\nclass Model: ...\n")
    done = python("-m", "synkhronos", *arguments, cwd=tmp_path, THEANO_FLAGS=flags)
    assert done.returncode == status, done.stderr
    assert said in done.stderr and "opencl99:0" in done.stderr and "begun" not in done.stdout
