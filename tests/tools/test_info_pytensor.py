"""``synkhronos info`` where PyTensor is the host: its checks, and the choice of the host."""

import json
import sys

import pytest

from synkhronos.__main__ import main
from synkhronos._host import choice, pythons
from synkhronos.tools import info
from synkhronos.tools.info import pytensor

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


def test_a_pytensor_that_works_has_its_mode():
    check = pytensor.check_pytensor(FACTS, "")
    assert (check.status, check.failed) == ("ok", False)
    assert check.found == "3.3.7 (/p/pytensor), mode=NUMBA, floatX=float64"


@pytest.mark.parametrize(
    ("mode", "linker", "name"),
    [("Mode", "VMLinker", "CVM"), ("FAST_COMPILE", "VMLinker", "FAST_COMPILE")],
)
def test_other_modes_that_ranks_run_are_named(mode, linker, name):
    check = pytensor.check_pytensor({**FACTS, "mode": mode, "linker": linker}, "")
    assert check.status == "ok" and f"mode={name}," in check.found


@pytest.mark.parametrize("name", pytensor.REFUSED.values())
def test_a_mode_that_ranks_cannot_run_is_broken(name):
    [linker] = [each for each in pytensor.REFUSED if pytensor.REFUSED[each] == name]
    for mode in ("Mode", name):
        check = pytensor.check_pytensor({**FACTS, "mode": mode, "linker": linker}, "")
        assert check.failed and check.status == "broken" and f"mode={name}," in check.found
        assert "PYTENSOR_FLAGS=mode=NUMBA" in check.advice


def test_the_modes_that_are_refused_are_those_of_pytensor():
    modes = pytest.importorskip("pytensor.compile.mode").predefined_modes
    for linker, name in pytensor.REFUSED.items():
        assert type(modes[name].linker).__name__ == linker


@pytest.mark.parametrize("version", ["2.38.1", "3.0.2", "3.4.0", "4.0.0rc1"])
def test_another_pytensor(version):
    check = pytensor.check_pytensor({**FACTS, "pytensor": version}, "")
    assert check.failed and pythons.REQUIREMENT in check.advice


@pytest.mark.parametrize(
    ("error", "status", "advice"),
    [
        (
            "ModuleNotFoundError: No module named 'pytensor'",
            "missing",
            "PyTensor needs" if pythons.is_for_theano() else "pip install 'pytensor>=",
        ),
        ("KeyError: 'Invalid option floatX=float99'", "broken", "PYTENSOR_FLAGS"),
    ],
)
def test_a_pytensor_that_does_not_import(error, status, advice):
    check = pytensor.check_pytensor({}, error)
    assert (check.status, check.found, check.failed) == (status, error, True)
    assert advice in check.advice


def test_numba_is_essential(monkeypatch):
    assert not pytensor.check_numba(FACTS).failed
    monkeypatch.setattr(pytensor, "installed_version", lambda name: None)
    assert pytensor.check_numba({}).failed


@pytest.mark.parametrize(
    ("changes", "status", "advice"),
    [
        ({"ldflags": "-lopenblas"}, "ok", ""),
        ({}, "ok", "blas__ldflags"),
        ({"cxx": ""}, "missing", "only functions in the mode CVM"),
    ],
)
def test_a_compiler_is_for_the_c_mode_alone(changes, status, advice):
    check = pytensor.check_compiler({**FACTS, **changes})
    assert (check.status, check.failed) == (status, False)
    assert advice in check.advice and bool(advice) == bool(check.advice)


def test_a_cache_that_cannot_be_written():
    assert not pytensor.check_cache(FACTS).failed
    check = pytensor.check_cache({**FACTS, "cache_writable": False})
    assert check.failed and "base_compiledir" in check.advice
    assert pytensor.check_cache({}).advice == "see PyTensor"


@pytest.mark.parametrize(("version", "status"), [("6.4.0", "ok"), (None, "missing")])
def test_pymc_may_be_missing(monkeypatch, version, status):
    monkeypatch.setattr(pytensor, "installed_version", lambda name: version)
    check = pytensor.check_pymc()
    assert (check.status, check.failed) == (status, False)
    assert ("pip install '.[pymc]' in" in check.advice) == (version is None)


def chosen(monkeypatch, capsys, host):
    """Return the names of the checks where the host is chosen so, and the exit status."""
    monkeypatch.setenv(choice.VARIABLE, host)
    monkeypatch.setattr(pytensor, "probe", lambda: ({}, "No module named 'pytensor'"))
    monkeypatch.setattr(info, "probe_theano", lambda: ({}, "No module named 'theano'"))
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
    facts, error = pytensor.probe()
    assert error == "" and {*FACTS} <= {*facts}
