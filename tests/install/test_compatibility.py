"""Where it runs: older Pythons, processes of other kinds, IPython, tests in parallel."""

import json
import re
import runpy
from pathlib import Path

import pytest
from support.faults import BOUND
from support.jupyter import in_kernel, needs_jupyter
from support.leaks import nothing_left, runs
from support.running import python
from support.waiting import wait_until

from synkhronos._host import pythons

ROOT = Path(__file__).parents[2]


@pytest.fixture
def metadata(monkeypatch):
    """Return the arguments of setup()."""
    given = {}
    monkeypatch.setattr("setuptools.setup", lambda **kwargs: given.update(kwargs))
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(ROOT / "setup.py"))
    return given


def test_the_metadata_and_the_page_name_what_is_checked_for(metadata):
    (major, oldest), (_, newest) = pythons.THEANO[0], pythons.PYTENSOR[1]
    assert metadata["python_requires"] == f">={major}.{oldest},<{major}.{newest + 1}"
    named = [
        c for c in metadata["classifiers"] if c.startswith("Programming Language :: Python :: 3.")
    ]
    versions = [f"{major}.{minor}" for minor in range(oldest, newest + 1)]
    assert [c.split(" :: ")[-1] for c in named] == versions
    page = (ROOT / "docs" / "installation.rst").read_text()
    assert all(version in page for version in versions)
    for host, title in ((pythons.THEANO, "Theano"), (pythons.PYTENSOR, "PyTensor")):
        assert re.search(rf"^{pythons.span(host)} +{title} ", page, re.MULTILINE)
    extras = metadata["extras_require"]
    for requirements in (metadata["install_requires"], extras["pymc"], extras["test-pytensor"]):
        [found] = [each for each in requirements if each.startswith("pytensor")]
        assert found.partition(";")[0] == pythons.REQUIREMENT
    assert f"PyTensor {pythons.span(pythons.RELEASES)}, NumPy" in page


# Processes of other kinds.

SPAWNED = """
import multiprocessing
import numpy as np
import theano.tensor as T
import synkhronos as synk

def total(number):
    synk.fork(2)
    x = T.dvector("x")
    f = synk.function([x], (x.sum(), "sum"), mode="FAST_COMPILE")
    result = float(f(np.full(4, number)))
    synk.close()
    return result

if __name__ == "__main__":
    context = multiprocessing.get_context("KIND")
    if BEFORE:
        synk.fork(2)
        s = synk.data(np.ones(3))
    with context.Pool(2) as pool:
        print(pool.map(total, [1.0, 2.0, 3.0]))
    if BEFORE:
        x = T.dvector("x")
        print(float(synk.function([x], (x.sum(), "sum"), mode="FAST_COMPILE")(s)))
        synk.close()
    else:
        print(total(0.75))
"""


@pytest.mark.parametrize("kind", ["spawn", "forkserver"])
@pytest.mark.parametrize("before", [True, False], ids=["in a session", "without a session"])
@pytest.mark.sample(1)
@pytest.mark.slow("starts several interpreters")
def test_processes_started_anew_have_sessions_of_their_own(script, kind, before):
    done = script(SPAWNED.replace("KIND", kind).replace("BEFORE", str(before)), timeout=300)
    assert done.stdout.splitlines() == ["[4.0, 8.0, 12.0]", "3.0"]
    assert done.stderr == ""


AGAIN = """
import multiprocessing, synkhronos as synk
synk.fork(1)
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=print, args=("child",))
    child.start()
    child.join()
"""


def test_a_script_that_children_run_again_is_told_what_guards_it(script):
    done = script(AGAIN)
    assert done.stdout == "child\n"
    assert done.stderr.count("PortingWarning") == 1 and '__name__ == "__main__":' in done.stderr


# IPython.

LINES = """
import numpy as np, theano.tensor as T, synkhronos as synk
synk.fork(2)
x = T.dvector("x")
f = synk.function([x], (x.sum(), "sum"), mode="FAST_COMPILE")
print("sum", float(f(np.arange(5.0))))
"""


def ipython(tmp_path, *arguments):
    pytest.importorskip("IPython")
    line = "-m", "IPython", "--no-banner", "--colors=NoColor", *arguments
    return python(*line, cwd=tmp_path, IPYTHONDIR=str(tmp_path / "ipython"))


PIDS = 'print("pids", *synk.session.current("a test").worker_pids)'


@pytest.mark.slow("starts IPython")
def test_ipython_runs_code_and_ends_without_close(tmp_path):
    done = ipython(tmp_path, "-c", LINES.replace("fork(2)", "fork(3)") + PIDS)
    assert done.returncode == 0 and "sum 10.0" in done.stdout, done.stdout + done.stderr
    [pids] = re.findall("^pids (.*)$", done.stdout, re.MULTILINE)
    pids = [int(pid) for pid in pids.split()]
    assert len(pids) == 2
    wait_until(lambda: not any(map(runs, pids)), BOUND)


@pytest.mark.slow("starts IPython")
def test_ipython_runs_scripts_again_and_goes_on_after_one_that_fails(tmp_path):
    (tmp_path / "lines.py").write_text(LINES + "synk.close()\n")
    (tmp_path / "fails.py").write_text(LINES + "f('ab')\n")
    code = "%run lines.py\n%run lines.py\nf.as_theano([1, 2])\n%run fails.py\n"
    done = ipython(tmp_path, "-c", code + "print('then', float(f([1, 2])))\nsynk.close()")
    assert done.stdout.count("sum 10.0") == 3, done.stdout + done.stderr
    assert "takes TensorType(float64, vector), got" in done.stdout + done.stderr
    assert "then 3.0" in done.stdout


# Jupyter; see also test_notebook.py.


@pytest.mark.slow("starts kernels of Jupyter")
@needs_jupyter
@pytest.mark.parametrize("how", ["asked to end", "killed"])
@pytest.mark.sample(1)
def test_a_kernel_restarts_in_the_middle_of_a_session(tmp_path, how):
    with nothing_left():
        found = json.loads(in_kernel(tmp_path, "restart", how))
    assert found["said"] == [[None, []], [None, ["array(6.)"]]] * 2
    first, second = found["workers"]
    assert len(first) == len(second) == 2 and not set(first) & set(second)
    assert not any(map(runs, second))
    assert found["alive"] == [0, 0]  # at each end of the kernel


# Tests of users, in parallel.
