"""The command line: what it finds, what it writes, and what it answers to mistakes."""

import json
import os
import re
import sys
import sysconfig
import types
from pathlib import Path

import pytest
from support.running import run

from synkhronos.__main__ import main, theanorc
from synkhronos._host.theano import import_support
from synkhronos._machine import devices as _devices
from synkhronos.tools import info as _info
from synkhronos.tools.info import cuda_libraries
from synkhronos.tools.info.cuda_libraries import NEEDED, Opened

NAMES = [
    "Python", "Theano", "NumPy", "SciPy", "C++ compiler", "BLAS", "Cores", "Shared memory",
    "Compile cache", "pygpu", "CUDA libraries", "CUDA devices", "OpenCL devices", "NCCL", "cuDNN",
]  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


def info(home, *arguments, **variables):
    """Run ``synkhronos info`` in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("THEANO")}
    environment.update(variables, HOME=str(home))
    return run(sys.executable, "-m", "synkhronos", "info", *arguments, env=environment)


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


@pytest.mark.slow("asks in several interpreters")
def test_a_broken_theano_is_reported(home):
    child = info(home, "--json", THEANO_FLAGS="floatX=float99")
    ok, checks = checks_of(child)
    assert checks["Theano"]["status"] == "broken"
    assert "ValueError" in checks["Theano"]["found"] and "float99" in checks["Theano"]["found"]
    assert "THEANO_FLAGS" in checks["Theano"]["advice"]
    assert checks["NumPy"]["status"] == "ok"
    assert (ok, child.returncode, child.stderr) == (False, 1, "")


@pytest.mark.slow("tries to link with what is not there")
def test_a_blas_that_does_not_link_is_reported(home):
    child = info(home, THEANO_FLAGS="blas.ldflags=-lnowhere_to_be_found")
    line = next(line for line in child.stdout.splitlines() if line.startswith("BLAS"))
    assert "broken" in line and "cannot find -lnowhere_to_be_found" in line
    assert "(from THEANO_FLAGS)" in line
    assert "\033" not in child.stdout
    assert child.returncode == 1


def test_origin_of_the_flags(monkeypatch):
    monkeypatch.setattr(import_support, "find_blas", lambda: ("-lfound", "the system"))
    monkeypatch.delenv("THEANO_FLAGS", raising=False)
    assert _info.ldflags_origin("-lfound") == "the system"
    assert _info.ldflags_origin("-lmine") == ".theanorc"
    monkeypatch.setenv("THEANO_FLAGS", "floatX=float32,blas.ldflags=-lmine")
    assert _info.ldflags_origin("-lmine") == "THEANO_FLAGS"


def opened(**changes):
    """Return what the probe says where all libraries open, but for these."""
    driver, nvrtc = Opened("libcuda", version=(12, 4)), Opened("libnvrtc", version=(12, 1))
    others = (Opened(name) for name in ("libcublas", "libnccl", "libcudnn"))
    libraries = driver, nvrtc, *others
    return {**{library.name: library for library in libraries}, **changes}


def absent(name):
    return Opened(name, error=f"{name}.so: cannot open shared object file: No such file")


def cuda(found, **changes):
    return _info.check_libraries("CUDA libraries", NEEDED, opened(**changes), found)


def nccl(found, library):
    return _info.check_libraries("NCCL", ["libnccl"], opened(libnccl=library), found)


def cudnn(library):
    return _info.check_cudnn(opened(libcudnn=library), {})


def blas(**changes):
    facts = {"cxx": "g++", "ldflags": "-lfoo", "gflops": {"theano": 99.0, "numpy": 100.0}}
    return _info.check_blas({**facts, **changes}, "")


def versions(**changes):
    facts = {"numpy": "1.23.5", "scipy": "1.10.1", **changes}
    return _info.check_versions(facts, import_support.advice_of)


NO_THEANO = "ModuleNotFoundError: No module named 'theano'"
NEW_NUMPY = f"ImportError: {import_support.advice_of('numpy', '2.4.6')}"
OLD_NUMPY = "AttributeError: module 'numpy' has no attribute 'bool'"
ANOTHER = {"theano": "1.1.2", "theano_path": "/p", "floatX": "float64", "device": "cpu"}
LINK = "synkhronos info --link-cuda "
EXPORT = "then export LD_LIBRARY_PATH="
WHEELS = {name: Path(f"/wheels/{name}.so.12") for name in opened()}
STUB = Opened("libcuda", "/stubs/libcuda.so", "a stub")
NEWER = Opened("libnvrtc", version=(13, 0))
SAID_OF_NEWER = "libnvrtc.so is of CUDA 13.0, but the driver knows CUDA only up to 12.4"
# A check, its status, whether nothing works without it, and words of what it finds and advises.
CHECKS = [
    (blas, "ok", False, "", ""),
    (lambda: blas(gflops={"theano": 40.0, "numpy": 100.0}), "broken", True, "", "NumPy's speed"),
    (lambda: blas(ldflags=""), "missing", False, "", "install SciPy"),
    (lambda: blas(cxx=""), "missing", False, "not linked", "see C.. compiler"),
    (lambda: _info.check_blas({}, "ImportError: no"), "broken", True, "not known", "see Theano"),
    (lambda: _info.check_theano({}, NO_THEANO), "missing", True, NO_THEANO, "Theano==1.0.5"),
    (lambda: _info.check_theano({}, NEW_NUMPY), "broken", True, NEW_NUMPY, "see NumPy"),
    (lambda: _info.check_theano({}, OLD_NUMPY), "broken", True, OLD_NUMPY, "reinstall"),
    (lambda: _info.check_theano(ANOTHER, ""), "broken", True, "1.1.2", "Theano==1.0.5"),
    (lambda: versions(numpy="2.4.6")[0], "broken", True, "2.4.6", "pip install 'numpy<1.24'"),
    (lambda: versions(scipy="1.11.4")[1], "broken", False, "1.11.4", "pip install 'scipy<1.11'"),
    (
        lambda: _info.check_compiler({"cxx": ""}), "missing", True,
        "Theano's flag cxx is ''", "apt-get install g++",
    ),
    (lambda: _info.check_shm("/nowhere"), "broken", True, "/nowhere: ", "mount a tmpfs"),
    (
        lambda: _info.check_cache("Theano", {"cache": "/c", "cache_writable": False}),
        "broken", True, "/c", "base_compiledir",
    ),
    (lambda: cuda(WHEELS), "ok", False, "libnvrtc.so (CUDA 12.1)", ""),
    (
        lambda: cuda(WHEELS, libcublas=absent("libcublas")), "missing", False,
        "no libcublas.so, but /wheels/libcublas.so.12", f"{LINK}.*{EXPORT}",
    ),
    (
        lambda: cuda({}, libcublas=absent("libcublas")), "missing", False,
        "no libcublas.so", f"pip install nvidia-cublas-cu12, then {LINK}.*{EXPORT}",
    ),
    (
        lambda: cuda({}, libcuda=absent("libcuda")), "missing", False,
        "no libcuda.so", f"only NVIDIA GPUs.*{EXPORT}",
    ),
    (
        lambda: cuda(WHEELS, libcuda=STUB), "broken", False,
        "libcuda.so does not work: a stub", f"{LINK}.*{EXPORT}",
    ),
    (
        lambda: cuda(WHEELS, libnvrtc=NEWER), "broken", False,
        SAID_OF_NEWER, f"pip install 'nvidia-cuda-nvrtc-cu12<12.5'.*{EXPORT}",
    ),
    (lambda: nccl({}, Opened("libnccl")), "ok", False, "libnccl.so", ""),
    (
        lambda: nccl(WHEELS, absent("libnccl")), "missing", False,
        "no libnccl.so, but /wheels/libnccl.so.12", EXPORT,
    ),
    (lambda: nccl({}, absent("libnccl")), "missing", False, "no libnccl.so", "several NVIDIA GPUs"),
    (
        lambda: cudnn(absent("libcudnn")), "missing", False,
        "no libcudnn.so", f"^only convolutions on .*pip install nvidia-cudnn-cu12, then .*{EXPORT}",
    ),
    (
        lambda: cudnn(Opened("libcudnn", "/x/lib/libcudnn.so.10", version=(100000,))), "broken",
        False, "/x/lib/libcudnn.so.10 is cuDNN 10.0.0, but", "pip install nvidia-cudnn-cu12",
    ),
    (
        lambda: cudnn(Opened("libcudnn", "/x/lib/libcudnn.so.9", version=(92800,))), "broken",
        False, "is cuDNN 9.28.0, but its header cudnn.h is not in /x/include", "pip install",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "status", "failed", "found", "advice"), CHECKS, ids=range(len(CHECKS))
)
def test_checks(make, status, failed, found, advice):
    check = make()
    assert (check.status, check.failed) == (status, failed)
    assert found in check.found
    assert re.search(advice, check.advice) and bool(advice) == bool(check.advice)


def test_no_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    check = _info.check_compiler({})
    assert (check.status, check.failed, check.found) == ("missing", True, "no g++ on the PATH")


def test_no_headers_of_python(monkeypatch, tmp_path):
    monkeypatch.setattr(_info.sysconfig, "get_path", lambda name: str(tmp_path))
    check = _info.check_compiler({"cxx": "g++"})
    assert check.status == "broken" and "Python.h" in check.found
    assert "python3-dev" in check.advice


@pytest.mark.parametrize(
    ("size", "free", "status", "advice"),
    [(64, 64, "missing", "--shm-size"), (8192, 10, "missing", "delete"), (8192, 8000, "ok", "")],
)
def test_shared_memory(monkeypatch, tmp_path, size, free, status, advice):
    stat = types.SimpleNamespace(f_frsize=2**20, f_blocks=size, f_bavail=free)
    monkeypatch.setattr(_info.os, "statvfs", lambda path: stat)
    check = _info.check_shm(str(tmp_path))
    assert (check.status, check.failed) == (status, False)
    assert advice in check.advice
    assert f"{size} MiB, {free} MiB free" in check.found


@pytest.fixture
def no_probes(monkeypatch):
    """Have no libraries of CUDA, whatever this machine has."""
    nothing = {name: absent(name) for name in opened()}
    monkeypatch.setattr(cuda_libraries, "probe", lambda: nothing)
    monkeypatch.setattr(cuda_libraries, "find", dict)


def test_no_pygpu(monkeypatch, no_probes):
    monkeypatch.setattr(_info.importlib.util, "find_spec", lambda name: None)
    checks = _info.check_gpus()
    assert [check.status for check in checks] == ["missing"] * 6
    assert all(check.advice for check in checks)
    assert not any(check.failed for check in checks)
    assert "make opencl" in checks[0].advice and sysconfig.get_path("purelib") in checks[0].advice


def make_pygpu(monkeypatch, folder, code):
    """Let a package of this code be the pygpu of this process and its children."""
    (folder / "pygpu").mkdir()
    (folder / "pygpu" / "__init__.py").write_text(code)
    monkeypatch.delitem(sys.modules, "pygpu", raising=False)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.parametrize(
    ("code", "status", "found", "advice"),
    [
        ("__version__ = '0.7.6'", "ok", "0.7.6 ({folder})", ""),
        ("import mako_of_the_test as mako", "broken", "mako_of_the_test", "reinstall"),
        ("raise ModuleNotFoundError(\"No module named 'mako'\")", "broken", "mako", "pip install"),
        ("raise ImportError('libgpuarray.so.3: gone')", "broken", "libgpuarray.so.3", "reinstall"),
        ("import os; os.abort()", "broken", "status -6", "reinstall"),
    ],
)
def test_pygpu_is_imported_elsewhere(monkeypatch, tmp_path, code, status, found, advice):
    make_pygpu(monkeypatch, tmp_path, code)
    check = _info.check_pygpu()
    assert check.status == status
    assert found.format(folder=tmp_path / "pygpu") in check.found
    assert advice in check.advice and bool(advice) == bool(check.advice)
    assert "pygpu" not in sys.modules


@pytest.mark.parametrize(
    ("cuda", "opencl", "statuses"),
    [
        ((2, ""), (1, ""), ["ok", "ok"]),
        ((0, "GpuArrayException: Could not load libcuda.so"), (1, ""), ["missing", "ok"]),
        ((0, ""), (0, ""), ["missing", "missing"]),
    ],
)
def test_devices(monkeypatch, tmp_path, no_probes, cuda, opencl, statuses):
    make_pygpu(monkeypatch, tmp_path, "__version__ = '0.7.6'")
    monkeypatch.setattr(_devices, "probe", {"cuda": cuda, "opencl": opencl}.get)
    checks = {check.name: check for check in _info.check_gpus()}
    devices = [checks["CUDA devices"], checks["OpenCL devices"]]
    assert [check.status for check in devices] == statuses
    assert all(bool(check.advice) == (check.status != "ok") for check in checks.values())


def test_a_folder_of_links_and_json_are_two_things(capsys):
    with pytest.raises(SystemExit) as exit_status:
        main(["info", "--json", "--link-cuda", "x"])
    assert exit_status.value.code == 2
    assert "not allowed with" in capsys.readouterr().err


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_terminal_is_told_what_takes_seconds(monkeypatch, capsys, is_terminal):
    monkeypatch.setattr(_info, "checks", list)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    assert main(["info"]) == 0
    assert ("looking at this machine: a few seconds" in capsys.readouterr().err) == is_terminal


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
    assert f"[blas]\nldflags = {import_support.find_blas()[0]}\n" in theanorc()


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


@pytest.mark.slow("imports Theano in a new interpreter")
def test_theanorc_serves_a_theano_without_the_import_support(home, tmp_path, monkeypatch):
    flags = {"blas.ldflags": "-L/100%/lib -lfoo"}
    monkeypatch.setattr(import_support, "default_flags", lambda: flags)
    (tmp_path / "rc").write_text(theanorc())
    code = (
        "import sys; sys.meta_path[:] = "
        "[f for f in sys.meta_path if type(f).__name__ != 'TheanoFinder']; "
        "import theano.configparser as c; print(c.fetch_val_for_key('blas.ldflags'))"
    )
    environment = {**os.environ, "HOME": str(home), "THEANORC": str(tmp_path / "rc")}
    environment.pop("THEANO_FLAGS", None)
    child = run(sys.executable, "-c", code, env=environment)
    assert child.stdout == flags["blas.ldflags"] + "\n", child.stderr


COMMANDS = "", "info", "run", "launch", "top", "theanorc", "bench", "rule", "rule BSP", "rule show"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_and_mistakes_show_the_usage_of_the_command(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/some/folder/synkhronos/__main__.py"])  # as of python -m
    for option, status in (("--help", 0), ("--nonsense", 2)):
        with pytest.raises(SystemExit) as exit_status:
            main([*name.split(), option])
        assert exit_status.value.code == status
        shown = "".join(capsys.readouterr())
        assert shown.startswith(" ".join(["usage: synkhronos", *name.split(), "[-h]"]))
        assert not status or f"synkhronos {name}".strip() + ": error: " in shown


@pytest.mark.parametrize("arguments", ["", "--version"])
def test_help(arguments, capsys):
    with pytest.raises(SystemExit) as exit_status:
        main(arguments.split())
    assert exit_status.value.code == 0
    said = "synkhronos " if arguments == "--version" else "usage: synkhronos"
    assert capsys.readouterr().out.startswith(said)
