"""``synkhronos info`` where PyTensor is the host: its checks, and the choice of the host."""

import functools
import itertools
import json
import subprocess
import sys

import pytest

from synkhronos import _systems
from synkhronos.__main__ import main
from synkhronos._host import choice, pythons
from synkhronos.tools import info

FACTS = {
    "pytensor": "3.3.7",
    "path": "/p/pytensor",
    "mode": "Mode",
    "linker": "NumbaLinker",
    "floatX": "float64",
    "numba": "0.68.0",
    "cxx": sys.executable,
    "ldflags": "",
    "cache": "/c",
    "cache_writable": True,
}


def works(**changes):
    return info.check_pytensor({**FACTS, **changes}, "")


def compiler(**changes):
    return info.check_optional_compiler({**FACTS, **changes})


def cache(**changes):
    return info.check_cache("PyTensor", {**FACTS, **changes})


ABSENT = "ModuleNotFoundError: No module named 'pytensor'"
WRONG = "KeyError: 'Invalid option floatX=float99'"
NEEDED = "PyTensor needs" if pythons.is_for_theano() else "pip install 'pytensor>="
# A check, its status, whether nothing works without it, and words of what it finds and advises.
CHECKS = [
    (works, "ok", False, "3.3.7 (/p/pytensor), mode=NUMBA, floatX=float64", ""),
    (lambda: works(linker="VMLinker"), "ok", False, "mode=CVM,", ""),
    (lambda: works(linker="VMLinker", mode="FAST_COMPILE"), "ok", False, "mode=FAST_COMPILE,", ""),
    (lambda: info.check_pytensor({}, ABSENT), "missing", True, ABSENT, NEEDED),
    (lambda: info.check_pytensor({}, WRONG), "broken", True, WRONG, "PYTENSOR_FLAGS"),
    (lambda: compiler(ldflags="-lopenblas"), "ok", False, "", ""),
    (compiler, "ok", False, "with no BLAS", "blas__ldflags"),
    (lambda: compiler(cxx=""), "missing", False, "", "only functions in the mode CVM"),
    (cache, "ok", False, "/c", ""),
    (lambda: cache(cache_writable=False), "broken", True, "/c", "base_compiledir"),
    (lambda: info.check_cache("PyTensor", {}), "broken", False, "not known", "see PyTensor"),
    (lambda: info.check_numba(FACTS), "ok", False, "0.68.0", ""),
]
for linker, mode in itertools.product(info.REFUSED, (True, False)):
    name = info.REFUSED[linker]
    made = functools.partial(works, linker=linker, mode="Mode" if mode else name)
    CHECKS.append((made, "broken", True, f"mode={name},", "PYTENSOR_FLAGS=mode=NUMBA"))
for version in ("2.38.1", "3.0.2", "3.4.0", "4.0.0rc1"):
    made = functools.partial(works, pytensor=version)
    CHECKS.append((made, "broken", True, version, pythons.REQUIREMENT))


@pytest.mark.parametrize(("make", "status", "failed", "found", "advice"), CHECKS, ids=range(22))
def test_checks(make, status, failed, found, advice):
    check = make()
    assert (check.status, check.failed) == (status, failed)
    assert found in check.found
    assert advice in check.advice and bool(advice) == bool(check.advice)


def test_the_modes_that_are_refused_are_those_of_pytensor():
    modes = pytest.importorskip("pytensor.compile.mode").predefined_modes
    for linker, name in info.REFUSED.items():
        assert type(modes[name].linker).__name__ == linker


def test_numba_is_essential(monkeypatch):
    monkeypatch.setattr(info, "installed_version", lambda name: None)
    assert info.check_numba({}).failed


@pytest.mark.parametrize(("version", "status"), [("6.4.0", "ok"), (None, "missing")])
def test_what_one_system_needs_may_be_missing(monkeypatch, version, status):
    monkeypatch.setattr(info, "installed_version", lambda name: version)
    system = _systems.SystemRow("a.system", package=("PyMC", "pymc"))
    check = info.check_package_of(system)
    assert (check.status, check.failed) == (status, False)
    assert ("pip install 'synkhronos[pymc]'" in check.advice) == (version is None)


@pytest.mark.parametrize("version", [None, "0.11.2"])
def test_jax_is_named_with_its_devices(monkeypatch, version):
    child = subprocess.CompletedProcess([], 0, "0.11.2 cpu\n", "")
    monkeypatch.setattr(info._devices, "run_captured", lambda *command, **options: child)
    monkeypatch.setattr(info, "installed_version", lambda name: version)
    assert info.check_jax() == info.Check("JAX", "ok", "0.11.2 cpu")
    child.returncode, child.stderr = 1, "RuntimeError: no such device\n"
    check = info.check_jax()
    assert (check.status, check.failed) == ("broken" if version else "missing", False)
    assert check.found == ("RuntimeError: no such device" if version else "not installed")
    assert "synkhronos[jax-cuda]" in check.advice


def chosen(monkeypatch, capsys, host):
    """Return the names of the checks where the host is chosen so, and the exit status."""
    monkeypatch.setenv(choice.VARIABLE, host)
    monkeypatch.setattr(info, "probe", lambda host: ({}, f"No module named '{host}'"))
    monkeypatch.setattr(info, "check_gpus", list)
    status = main(["info", "--json"])
    checks = json.loads(capsys.readouterr().out)["checks"]
    return {check["name"]: check for check in checks}, status


def test_the_environment_says_which_host_is_checked(monkeypatch, capsys):
    checks, status = chosen(monkeypatch, capsys, "pytensor")
    assert checks["PyTensor"]["status"] == "missing" and "Theano" not in checks
    assert status == 1
    checks, status = chosen(monkeypatch, capsys, "theano")
    assert checks["Theano"]["status"] == "missing" and "PyTensor" not in checks
    checks, status = chosen(monkeypatch, capsys, "tensorflow")
    assert checks["Host library"]["status"] == "broken" and status == 1
    assert "tensorflow" in checks["Host library"]["found"]


@pytest.mark.parametrize(("python", "host"), [((3, 11), "theano"), ((3, 13), "pytensor")])
def test_without_a_library_the_python_decides(monkeypatch, python, host):
    def missing():
        raise ImportError("neither")

    monkeypatch.delenv(choice.VARIABLE, raising=False)
    monkeypatch.setattr(choice, "choose", missing)
    monkeypatch.setattr(info.pythons, "is_for_theano", lambda: python < (3, 12))
    assert info.host_of_checks() == (host, "")


def test_the_probe_prints_the_facts_that_are_checked():
    if choice.choose() != "pytensor":
        pytest.skip("PyTensor is not the host here")
    facts, error = info.probe("pytensor")
    assert error == "" and {*FACTS} <= {*facts}
