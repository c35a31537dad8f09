"""The command line: what it finds, what it writes, and what it answers to mistakes."""

import json
import os
import subprocess
import sys
import types

import pytest

from synkhronos import _devices, _import_support, _info
from synkhronos.__main__ import main, theanorc

NAMES = [
    "Python",
    "Theano",
    "NumPy",
    "SciPy",
    "C++ compiler",
    "BLAS",
    "Cores",
    "Shared memory",
    "Compile cache",
    "pygpu",
    "CUDA devices",
    "OpenCL devices",
    "NCCL",
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


def info(home, *arguments, **variables):
    """Run ``synkhronos info`` in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("THEANO")}
    return subprocess.run(
        [sys.executable, "-m", "synkhronos", "info", *arguments],
        env={**environment, "HOME": str(home), **variables},
        capture_output=True,
        text=True,
    )


def checks_of(child):
    results = json.loads(child.stdout)
    return results["ok"], {check["name"]: check for check in results["checks"]}


def test_this_machine_is_fit(home):
    child = info(home, "--json")
    ok, checks = checks_of(child)
    assert list(checks) == NAMES
    for name in NAMES[:7] + ["Compile cache"]:
        assert checks[name]["status"] == "ok", checks[name]
    assert "GFLOP/s" in checks["BLAS"]["found"]
    assert str(home) in checks["Compile cache"]["found"]
    assert (ok, child.returncode, child.stderr) == (True, 0, "")


def test_a_broken_theano_is_reported(home):
    child = info(home, "--json", THEANO_FLAGS="floatX=float99")
    ok, checks = checks_of(child)
    assert checks["Theano"]["status"] == "broken"
    assert "ValueError" in checks["Theano"]["found"] and "float99" in checks["Theano"]["found"]
    assert "THEANO_FLAGS" in checks["Theano"]["advice"]
    assert checks["NumPy"]["status"] == "ok"
    assert (ok, child.returncode, child.stderr) == (False, 1, "")


def test_a_blas_that_does_not_link_is_reported(home):
    child = info(home, THEANO_FLAGS="blas.ldflags=-lnowhere_to_be_found")
    line = next(line for line in child.stdout.splitlines() if line.startswith("BLAS"))
    assert "broken" in line and "cannot find -lnowhere_to_be_found" in line
    assert "(from THEANO_FLAGS)" in line
    assert "\033" not in child.stdout
    assert child.returncode == 1


FACTS = {"cxx": "g++", "ldflags": "-lfoo", "gflops": {"theano": 99.0, "numpy": 100.0}}


@pytest.mark.parametrize(
    ("changes", "status", "failed"),
    [
        ({}, "ok", False),
        ({"gflops": {"theano": 40.0, "numpy": 100.0}}, "broken", True),
        ({"ldflags": ""}, "missing", False),
        ({"cxx": ""}, "missing", False),
    ],
)
def test_blas(changes, status, failed):
    check = _info.check_blas({**FACTS, **changes}, "")
    assert (check.status, check.failed) == (status, failed)
    assert (check.advice == "") == (status == "ok")


def test_blas_without_theano():
    assert _info.check_blas({}, "ImportError: no").failed


def test_origin_of_the_flags(monkeypatch):
    monkeypatch.setattr(_import_support, "find_blas", lambda: ("-lfound", "the system"))
    monkeypatch.delenv("THEANO_FLAGS", raising=False)
    assert _info.ldflags_origin("-lfound") == "the system"
    assert _info.ldflags_origin("-lmine") == ".theanorc"
    monkeypatch.setenv("THEANO_FLAGS", "floatX=float32,blas.ldflags=-lmine")
    assert _info.ldflags_origin("-lmine") == "THEANO_FLAGS"


@pytest.mark.parametrize(
    ("error", "status", "advice"),
    [
        ("ModuleNotFoundError: No module named 'theano'", "missing", "pip install Theano==1.0.5"),
        ("AttributeError: module 'numpy' has no attribute 'bool'", "broken", "reinstall"),
    ],
)
def test_theano_that_does_not_import(error, status, advice):
    check = _info.check_theano({}, error)
    assert (check.status, check.found, check.failed) == (status, error, True)
    assert advice in check.advice


def test_another_theano():
    facts = {"theano": "1.1.2", "theano_path": "/p", "floatX": "float64", "device": "cpu"}
    check = _info.check_theano(facts, "")
    assert check.failed and "Theano==1.0.5" in check.advice


def test_no_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    check = _info.check_compiler({})
    assert (check.status, check.failed, check.found) == ("missing", True, "no g++ on the PATH")
    assert "apt-get install g++" in check.advice


def test_compiler_turned_off():
    check = _info.check_compiler({"cxx": ""})
    assert check.failed and check.found == "Theano's flag cxx is ''"


def test_no_headers_of_python(monkeypatch, tmp_path):
    monkeypatch.setattr(_info.sysconfig, "get_path", lambda name: str(tmp_path))
    check = _info.check_compiler({"cxx": "g++"})
    assert check.status == "broken" and "Python.h" in check.found
    assert "python3-dev" in check.advice


@pytest.mark.parametrize(
    ("size", "free", "status", "advice"),
    [
        (64, 64, "missing", "--shm-size"),
        (8192, 10, "missing", "delete"),
        (8192, 8000, "ok", ""),
    ],
)
def test_shared_memory(monkeypatch, tmp_path, size, free, status, advice):
    stat = types.SimpleNamespace(f_frsize=2**20, f_blocks=size, f_bavail=free)
    monkeypatch.setattr(_info.os, "statvfs", lambda path: stat)
    check = _info.check_shm(str(tmp_path))
    assert (check.status, check.failed) == (status, False)
    assert advice in check.advice
    assert f"{size} MiB, {free} MiB free" in check.found


def test_no_shared_memory(tmp_path):
    check = _info.check_shm(str(tmp_path / "absent"))
    assert check.status == "broken" and check.failed


def test_cache_that_cannot_be_written():
    check = _info.check_cache({"cache": "/c", "cache_writable": False})
    assert check.failed and "base_compiledir" in check.advice


def test_no_pygpu(monkeypatch):
    monkeypatch.setattr(_info.importlib.util, "find_spec", lambda name: None)
    checks = _info.check_gpus()
    assert [check.status for check in checks] == ["missing"] * 3
    assert all(check.advice for check in checks)
    assert not any(check.failed for check in checks)


@pytest.mark.parametrize(
    ("cuda", "opencl", "statuses"),
    [
        ((2, ""), (1, ""), ["ok", "ok", "ok"]),
        ((0, "GpuArrayException: Could not load libcuda.so"), (1, ""), ["ok", "missing", "ok"]),
        ((0, "ImportError: libgpuarray.so.3"),) * 2 + (["broken", "missing", "missing"],),
    ],
)
def test_pygpu(monkeypatch, cuda, opencl, statuses):
    monkeypatch.setattr(_info.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(_devices, "probe", {"cuda": cuda, "opencl": opencl}.get)
    checks = _info.check_gpus()
    assert [check.status for check in checks] == statuses
    assert all(bool(check.advice) == (check.status != "ok") for check in checks)


@pytest.mark.parametrize(
    ("there", "status", "found"),
    [
        ({"libnccl.so", "libnccl.so.2"}, "ok", "libnccl.so"),
        ({"libnccl.so.2"}, "missing", "libnccl.so.2, but no libnccl.so"),
        (set(), "missing", "not found"),
    ],
)
def test_nccl(monkeypatch, there, status, found):
    monkeypatch.setattr(_info, "_can_load", lambda library: library in there)
    check = _info.check_nccl()
    assert (check.status, check.found) == (status, found)
    assert bool(check.advice) == (status != "ok")


def test_colours_are_for_terminals():
    results = [_info.Check("BLAS", _info.BROKEN, "none", "do this")]
    assert _info.table(results, colour=False).splitlines() == [
        "BLAS            broken   none",
        "                         -> do this",
    ]
    assert "\033[31mbroken \033[0m" in _info.table(results, colour=True)


def test_theanorc_prints(capsys):
    assert main(["theanorc", "-"]) == 0
    assert capsys.readouterr().out == theanorc()
    assert f"[blas]\nldflags = {_import_support.find_blas()[0]}\n" in theanorc()


def test_theanorc_refuses_to_overwrite(tmp_path, capsys):
    path = tmp_path / "rc"
    assert main(["theanorc", str(path)]) == 0
    assert path.read_text() == theanorc()
    path.write_text("precious")
    assert main(["theanorc", str(path)]) == 1
    assert "exists: --force overwrites it" in capsys.readouterr().err
    assert path.read_text() == "precious"
    assert main(["theanorc", "--force", str(path)]) == 0
    assert path.read_text() == theanorc()


def test_theanorc_is_in_home_by_default(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["theanorc"]) == 0
    assert (tmp_path / ".theanorc").read_text() == theanorc()


def test_theanorc_where_nothing_can_be_written(tmp_path, capsys):
    assert main(["theanorc", str(tmp_path / "absent" / "rc")]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_theanorc_serves_a_theano_without_the_import_support(home, tmp_path, monkeypatch):
    flags = {"blas.ldflags": "-L/100%/lib -lfoo"}
    monkeypatch.setattr(_import_support, "default_flags", lambda: flags)
    (tmp_path / "rc").write_text(theanorc())
    code = (
        "import sys; sys.meta_path[:] = "
        "[f for f in sys.meta_path if type(f).__name__ != 'TheanoFinder']; "
        "import theano.configparser as c; print(c.fetch_val_for_key('blas.ldflags'))"
    )
    environment = {**os.environ, "HOME": str(home), "THEANORC": str(tmp_path / "rc")}
    environment.pop("THEANO_FLAGS", None)
    child = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert child.stdout == flags["blas.ldflags"] + "\n", child.stderr


@pytest.fixture
def benchmark(monkeypatch, tmp_path):
    """Make "nap" the only benchmark."""
    (tmp_path / "nap_benchmark.py").write_text(
        '"""Sleep for a while.\n\nNot long."""\n'
        "def add_arguments(parser): parser.add_argument('--seconds', type=float, default=0.5)\n"
        "def main(args): print('slept', args.seconds); return 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    package = types.ModuleType("synkhronos.benchmarks")
    package.BENCHMARKS = {"nap": "nap_benchmark"}
    monkeypatch.setitem(sys.modules, "synkhronos.benchmarks", package)
    yield
    sys.modules.pop("nap_benchmark", None)


def test_bench_runs_one_with_its_arguments(benchmark, capsys):
    assert main(["bench", "nap", "--seconds", "0.25"]) == 3
    assert capsys.readouterr().out == "slept 0.25\n"


def test_bench_lists_them_without_an_import(benchmark, capsys):
    assert main(["bench"]) == 0
    assert capsys.readouterr().out == "  nap          Sleep for a while.\n"
    assert "nap_benchmark" not in sys.modules


def test_bench_helps(benchmark, capsys):
    with pytest.raises(SystemExit) as exit_status:
        main(["bench", "nap", "--help"])
    assert exit_status.value.code == 0
    assert "--seconds" in capsys.readouterr().out


def test_bench_of_no_such_name(benchmark, capsys):
    assert main(["bench", "jump"]) == 2
    assert "no benchmark 'jump'; there are: nap" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["info", "--nonsense"]])
def test_mistakes_show_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as exit_status:
        main(arguments)
    assert exit_status.value.code == 2
    assert "usage: synkhronos" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["info", "--help"], ["bench", "--help"]])
def test_help(arguments, capsys):
    with pytest.raises(SystemExit) as exit_status:
        main(arguments)
    assert exit_status.value.code == 0
    assert "usage: synkhronos" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_status:
        main(["--version"])
    assert exit_status.value.code == 0
    assert capsys.readouterr().out.startswith("synkhronos ")
