"""Which device each rank gets, and what is refused."""

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest

from synkhronos._machine import devices as _devices
from synkhronos._machine.devices import default_threads, get_n_gpu, probe, resolve, usable_cores

needs_pygpu = pytest.mark.skipif(
    importlib.util.find_spec("pygpu") is None, reason="pygpu is not installed"
)
needs_no_pygpu = pytest.mark.skipif(
    importlib.util.find_spec("pygpu") is not None, reason="pygpu is installed"
)


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv("SYNKHRONOS_DEVICES", raising=False)


@pytest.fixture
def n_gpu(monkeypatch):
    """Return a function that pretends that there are so many CUDA devices."""

    def pretend(number):
        monkeypatch.setattr(_devices, "probe", lambda kind: (number, ""))

    return pretend


def test_default_is_one_cpu_rank_per_usable_core():
    assert resolve() == ("cpu",) * usable_cores()


@pytest.mark.parametrize("number", [1, 2, 64, np.int64(3), np.uint8(2)])
def test_n_parallel_is_any_integer_and_may_exceed_the_cores(number):
    assert resolve(number) == ("cpu",) * int(number)
    assert resolve(number, use_gpu=False) == ("cpu",) * int(number)


@pytest.mark.parametrize("devices", [["cpu", "cpu"], ("cpu",), ["cuda0", "cuda1"], ["opencl0:1"]])
def test_devices_decide(devices):
    assert resolve(devices=devices) == tuple(devices)
    assert resolve(len(devices), devices=devices) == tuple(devices)


def test_mixed_devices_and_bare_cuda_are_names():
    assert resolve(devices=["cuda", "cpu"]) == ("cuda", "cpu")


def test_variable_does_the_same_from_outside(monkeypatch):
    monkeypatch.setenv("SYNKHRONOS_DEVICES", "cpu, cpu,cpu")
    assert resolve() == ("cpu",) * 3
    assert resolve(3) == ("cpu",) * 3
    assert resolve(devices=["cpu"]) == ("cpu",)
    with pytest.raises(ValueError, match=r"n_parallel=2, but SYNKHRONOS_DEVICES names 3"):
        resolve(2)


def test_empty_variable_is_as_none(monkeypatch):
    monkeypatch.setenv("SYNKHRONOS_DEVICES", " ")
    assert resolve(2) == ("cpu", "cpu")


@pytest.mark.parametrize("value", ["gpu0", "cpu,,cpu", "cpu,", "CPU"])
def test_bad_variable(monkeypatch, value):
    monkeypatch.setenv("SYNKHRONOS_DEVICES", value)
    with pytest.raises(ValueError, match=r"SYNKHRONOS_DEVICES: '.*' is not the name of a device"):
        resolve()


@pytest.mark.parametrize("number", [True, False, 2.0, "2", [2], np.float64(2), np.bool_(True)])
def test_n_parallel_of_another_kind(number):
    with pytest.raises(TypeError, match="n_parallel must be an integer or None, got"):
        resolve(number)


@pytest.mark.parametrize("number", [0, -1, np.int8(-3)])
def test_n_parallel_below_one(number):
    with pytest.raises(ValueError, match="n_parallel must be at least 1"):
        resolve(number)


@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu", 2, {"cpu": 1}, [0], ["cpu", None]])
def test_devices_of_another_kind(devices):
    with pytest.raises(TypeError, match=r"devices must (be a list of|hold) names"):
        resolve(devices=devices)


@pytest.mark.parametrize("devices", [["gpu0"], ["cuda-1"], ["opencl0"], ["cpu0"], ["cudax"], [""]])
def test_devices_that_are_none(devices):
    with pytest.raises(ValueError, match="is not the name of a device, such as 'cpu'"):
        resolve(devices=devices)


def test_no_devices_at_all():
    with pytest.raises(ValueError, match="devices is empty"):
        resolve(devices=[])


def test_number_must_agree_with_devices():
    with pytest.raises(ValueError, match=r"n_parallel=3, but devices names 2 \(cpu, cpu\)"):
        resolve(3, devices=["cpu", "cpu"])


@pytest.mark.parametrize(("use_gpu", "devices"), [(True, ["cpu"]), (False, ["cpu", "cuda0"])])
def test_use_gpu_must_agree_with_devices(use_gpu, devices):
    with pytest.raises(ValueError, match=f"use_gpu={use_gpu}, but devices names"):
        resolve(use_gpu=use_gpu, devices=devices)


@pytest.mark.parametrize("use_gpu", ["yes", 2, [True]])
def test_use_gpu_of_another_kind(use_gpu):
    with pytest.raises(TypeError, match="use_gpu must be True, False or None"):
        resolve(use_gpu=use_gpu)


def test_use_gpu_takes_every_gpu(n_gpu):
    n_gpu(3)
    assert resolve(use_gpu=True) == ("cuda0", "cuda1", "cuda2")
    assert resolve(2, use_gpu=True) == ("cuda0", "cuda1")
    with pytest.raises(ValueError, match="n_parallel=4, but this machine has 3 CUDA devices"):
        resolve(4, use_gpu=True)


def test_use_gpu_without_one(n_gpu):
    n_gpu(0)
    with pytest.raises(RuntimeError, match="no CUDA device that pygpu can use"):
        resolve(use_gpu=True)


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """The files of a driver with two GPUs."""
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    find = _devices._count_default_gpus
    monkeypatch.setattr(_devices, "_count_default_gpus", lambda: find(f"{tmp_path}/nvidia[0-9]*"))


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
    body = "def count_devices(kind, platform): raise RuntimeError('Could not load libcuda.so')\n"
    pygpu_that(monkeypatch, tmp_path, body)
    assert get_n_gpu() == 0
    assert "Could not load libcuda.so" in _devices.probe("cuda")[1]


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
    monkeypatch.setattr(_devices, "_cpu_quota", lambda: float("inf"))
    assert usable_cores() == 3
    monkeypatch.setattr(_devices, "_cpu_quota", lambda: 1.5)
    assert usable_cores() == 2
    monkeypatch.setattr(_devices, "_cpu_quota", lambda: 0.1)
    assert usable_cores() == 1


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, float("inf")),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/cpu.max": "400000 100000\n", "a/b/cpu.max": "max 100000\n"}, 4),
        ("0::/host/only\n", {"cpu.max": "200000 100000\n"}, 2),
        ("3:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "1"}, None),
        ("3:cpu:/x\n", {"cpu/cpu.cfs_quota_us": "30", "cpu/cpu.cfs_period_us": "10"}, 3),
        ("nonsense", {}, float("inf")),
    ],
)
def test_cpu_quota(tmp_path, groups, files, expected):
    proc, root = tmp_path / "cgroup", tmp_path / "sys"
    proc.write_text(groups)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    quota = _devices._cpu_quota(str(proc), str(root))
    assert quota == (float("inf") if expected is None else expected)


def test_quota_without_control_groups(tmp_path):
    assert _devices._cpu_quota(str(tmp_path / "absent")) == float("inf")


def test_threads_share_the_cores(monkeypatch):
    monkeypatch.setattr(_devices, "usable_cores", lambda: 8)
    assert [default_threads(n) for n in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]


FAKE_DEVICE = """
import types
import synkhronos
from theano import scalar
from theano.gpuarray import elemwise, type
from synkhronos._host.theano import devices

type._context_reg["fake"] = types.SimpleNamespace(kind=b"cuda", bin_id=b"sm_90")
x = type.GpuArrayType("float32", (False, False), context_name="fake")()
node = elemwise.GpuCAReduceCuda(scalar.add, axis=(0,)).make_node(x)
print(bool(node.op.c_code_cache_version_apply(node)))
devices._let_reductions_be_cached()
print(bool(node.op.c_code_cache_version_apply(node)))
"""


@needs_pygpu
def test_reductions_for_cuda_have_a_version_so_that_the_cache_keeps_them(script):
    assert script(FAKE_DEVICE).stdout.split() == ["False", "True"]
