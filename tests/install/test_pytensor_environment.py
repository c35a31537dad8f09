"""A fresh environment of a Python for PyTensor: what pip installs there, and what works."""

import os
import shutil
from pathlib import Path

import pytest
from support import running

ROOT = Path(__file__).parents[2]
FINDER = ROOT / ".ci" / "python-for-pytensor"
pytestmark = pytest.mark.skipif(not FINDER.exists(), reason="needs a checkout")

SCRIPT = """
import sys
import synkhronos as synk
assert "pytensor" not in sys.modules
assert not [f for f in sys.meta_path if type(f).__name__ == "TheanoFinder"]
import numpy as np, pytensor.tensor as pt
synk.fork(2)
x = pt.dvector("x")
f = synk.function([x], (x.sum(), "sum"), mode="FAST_COMPILE")
print(float(f(np.arange(5.0))))
synk.close()
"""

WITHOUT = """
import sys
for name in ("theano", "pytensor"):
    sys.modules[name] = None
import synkhronos as synk
try:
    synk.function
except ImportError as error:
    print(error)
"""


def run(*command, **kwargs):
    """Run a command without what a run of tests sets, such as the host."""
    own = ("SYNKHRONOS_", "SETUPTOOLS_", "PYTHONPATH", "PYTENSOR_FLAGS")
    kwargs.setdefault("env", {k: v for k, v in os.environ.items() if not k.startswith(own)})
    return running.run(*command, timeout=None, **kwargs)


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Return the Python of a new environment into which pip has installed this checkout."""
    found = run(FINDER)
    if found.returncode:
        pytest.skip(found.stderr.strip())
    folder = tmp_path_factory.mktemp("environment")
    assert run(found.stdout.strip(), "-m", "venv", folder).returncode == 0
    python = folder / "bin" / "python"
    installed = run(python, "-m", "pip", "install", "--quiet", "--editable", ROOT)
    if "No matching distribution" in installed.stderr:
        pytest.skip("pip can't reach an index here")
    assert installed.returncode == 0, installed.stderr
    return python


@pytest.mark.slow("installs PyTensor from an index")
def test_pip_brings_pytensor_and_nothing_of_theano(python, tmp_path):
    listed = run(python, "-m", "pip", "list", "--format=freeze").stdout.lower()
    names = {line.partition("==")[0] for line in listed.splitlines()}
    assert {"pytensor", "numba", "numpy"} <= names and not {"theano", "lasagne", "keras"} & names

    done = run(python, "-W", "error::UserWarning", "-c", SCRIPT, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("10.0\n", "")

    absent = run(python, "-c", "import theano", cwd=tmp_path)
    assert "\nModuleNotFoundError: No module named 'theano': Theano needs" in absent.stderr

    info = run(python, "-m", "synkhronos", "info", cwd=tmp_path)
    assert info.returncode == 0, info.stdout
    assert "PyTensor        ok" in info.stdout and "Theano" not in info.stdout
    assert run(python, "-m", "synkhronos", "--help", cwd=tmp_path).returncode == 0

    without = run(python, "-c", WITHOUT, cwd=tmp_path)
    assert "synkhronos` installs PyTensor on" in without.stdout, without.stdout + without.stderr


def test_the_finder_takes_the_python_that_is_named_or_says_what_is_missing(tmp_path):
    found = run("/bin/bash", FINDER, env={"PATH": str(tmp_path)})
    assert found.returncode == 1 and "which PyTensor needs" in found.stderr
    assert "make test-pytensor PYTENSOR_PYTHON=" in found.stderr
    named = tmp_path / "python"
    named.write_text("#!/bin/sh\nexit 0\n")
    named.chmod(0o755)
    found = run("/bin/bash", FINDER, env={"PATH": os.defpath, "PYTENSOR_PYTHON": str(named)})
    assert (found.returncode, found.stdout.strip()) == (0, str(named))
    named.write_text("#!/bin/sh\nexit 1\n")
    found = run("/bin/bash", FINDER, env={"PATH": os.defpath, "PYTENSOR_PYTHON": str(named)})
    assert found.returncode == 1 and f"PYTENSOR_PYTHON={named} is no Python 3.12" in found.stderr


def test_an_environment_gets_the_first_python_that_is_there_and_works(tmp_path):
    for name, code in (("python3.11", "exit 1"), ("python3.9", "exit 0"), ("python3.13", "exit 0")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / name).chmod(0o755)
    find = "/bin/bash", FINDER.with_name("find-python")
    found = run(*find, "3.11", "3.10", "3.9", "3.13", env={"PATH": str(tmp_path)})
    assert (found.returncode, found.stdout.strip()) == (0, str(tmp_path / "python3.9"))
    assert run(*find, "3.11", "3.10", env={"PATH": str(tmp_path)}).returncode == 1


@pytest.mark.parametrize("has_python", [True, False])
def test_a_run_of_all_checks_says_at_its_end_what_was_not_tested(tmp_path, has_python):
    shutil.copytree(FINDER.parent, tmp_path / ".ci")
    (tmp_path / ".ci" / "python-for-pytensor").write_text(f"exit {int(not has_python)}\n")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, code in (("make", 'echo "make $1"'), ("id", "echo 1000")):
        (programs / name).write_text(f"#!/bin/sh\n{code}\n")
        (programs / name).chmod(0o755)
    path = f"{programs}:{os.defpath}"
    line = f"exec {tmp_path / '.ci' / 'run'} 2>&1"
    done = run("/bin/bash", "-c", line, env={"PATH": path})
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and ("make test-pytensor" in lines) == has_python
    assert ("nothing was tested on PyTensor" in lines[-1]) == (not has_python)
