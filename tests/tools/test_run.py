"""``synkhronos run`` runs a script as Python does: names, folders, output, errors, exit status."""

import json
import os
import sys

import pytest
from support.layouts import ON_DEVICES
from support.running import run

from synkhronos import SessionError, WorkerDied
from synkhronos.__main__ import main
from synkhronos.tools.run import _exec

pytestmark = pytest.mark.skipif(ON_DEVICES, reason="forks with options of its own")

SCRIPT = """
import atexit, os, pickle, sys
import helper
print(__name__, __file__, sys.argv, sys.path[0], helper.NAME, len(sys.path))
print(__doc__, __builtins__.__name__, sys.modules["__main__"].__dict__ is globals())
class Kept:
    pass
print(type(pickle.loads(pickle.dumps(Kept()))) is Kept)
def annotated(x: int): pass
print(annotated.__annotations__)
atexit.register(print, "at the end")
how = sys.argv[1]
if how == "status": sys.exit(3)
if how == "message": sys.exit("a message")
if how == "raise": raise ValueError("a reason")
if how == "interrupt": raise KeyboardInterrupt
if how == "close":
    import synkhronos
    if synkhronos.status().ranks:
        synkhronos.close()
"""


def python(folder, *command, **given):
    """Run Python; return its exit status, what it printed, and its errors."""
    unbuffered = {**os.environ, "PYTHONUNBUFFERED": "1"}
    done = run(sys.executable, *command, cwd=folder, env=unbuffered, **given)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def script(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "helper.py").write_text("NAME = 'helper'\n")
    (tmp_path / "scripts" / "script.py").write_text(SCRIPT)
    return tmp_path / "scripts" / "script.py"


def test_a_script_that_forks_takes_the_options(tmp_path):
    (tmp_path / "script.py").write_text(
        "import synkhronos as synk, threadpoolctl\n"
        "print(synk.fork())\n"
        "print({each['num_threads'] for each in threadpoolctl.threadpool_info()})\n"
        "synk.close()\n"
        "print(synk.fork(), synk.fork(restart=True), synk.fork(2, restart=True))\n"
    )
    options = ("-n", "3", "--threads-per-rank", "2")
    status, out, err = python(tmp_path, "-m", "synkhronos", "run", *options, "script.py")
    assert (status, out.split(), err) == (0, ["3", "{2}", "3", "3", "2"], "")


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["end", "status", "message", "raise", "interrupt", "close"])
def test_a_script_runs_as_in_python(tmp_path, script, how):
    relative = script.relative_to(tmp_path)
    status, out, err = python(tmp_path, relative, how)
    found = python(tmp_path, "-m", "synkhronos", "run", "-n", "2", relative, how)
    # After a Ctrl-C Python ends itself by the signal, which shells show as 130.
    assert found == (130 if how == "interrupt" else status, out, err)
    assert out and bool(err) == (how in ("message", "raise", "interrupt"))


@pytest.mark.slow("starts an interpreter")
def test_options_of_the_script_are_its_own(tmp_path):
    (tmp_path / "show.py").write_text(
        "import sys, synkhronos as synk\nprint(sys.argv[1:], len(synk.status().ranks))\n"
    )
    line = ("-m", "synkhronos", "run", "--devices", "cpu,cpu,cpu", "--threads-per-rank", "1")
    _, out, err = python(tmp_path, *line, "show.py", "-n", "5", "--parallel", "--", "x")
    assert (out, err) == ("['-n', '5', '--parallel', '--', 'x'] 3\n", "")


@pytest.mark.slow("starts an interpreter")
def test_a_script_of_standard_input(tmp_path):
    status, out, _ = python(tmp_path, "-m", "synkhronos", "run", "-n", "1", "-", input="print(1)")
    assert (status, out) == (0, "1\n")


def test_follow_and_check(tmp_path):
    (tmp_path / "script.py").write_text(
        "import theano, theano.tensor as T, synkhronos as synk\n"
        "x, w = T.dvector('x'), theano.shared(1.0, 'w')\n"
        "f = synk.function([x], [(x.sum() * w, 'sum'), x.sum()], mode='FAST_COMPILE')\n"
        "f([1, 2, 3, 4]); w.set_value(2.0); print(f([1, 2, 3, 4])[0])\n"
    )
    line = ("-m", "synkhronos", "run", "-n", "2", "--follow", "--check", "script.py")
    status, out, err = python(tmp_path, *line)
    assert (status, out) == (0, "20.0\n")
    assert "PortingWarning: Output 1 of" in err


PARALLEL = """
import sys
import theano, theano.tensor as T
x = T.dmatrix("x")
f, g = (theano.function([x], y, mode="FAST_COMPILE") for y in (x.sum(), x[::-1]))
print([float(f([[1.0], [2.0]])) for _ in range(5)], g([[1.0], [2.0]]).shape)
sys.exit(3)
"""


def test_a_script_that_forks_is_refused_by_parallel_in_a_line(tmp_path):
    (tmp_path / "script.py").write_text("import synkhronos as synk\nsynk.fork(2)\nprint(1)\n")
    run = ("-m", "synkhronos", "run", "--parallel", "-n", "2")
    status, out, err = python(tmp_path, *run, "script.py")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("script.py, line 2: SessionError: the script calls fork() itself: run it")
    status, out, err = python(tmp_path, *run, "--verbose", "script.py")
    assert (status, out) == (1, "") and "synk.fork(2)\n" in err


@pytest.mark.parametrize("end", ["", "import sys; sys.exit()"])
def test_parallel_says_that_a_script_has_compiled_no_function(tmp_path, end):
    (tmp_path / "script.py").write_text(end)
    run = ("-m", "synkhronos", "run", "--parallel", "-n", "2")
    status, _, err = python(tmp_path, *run, "script.py")
    assert status == 0 and "Synkhronos: no function was compiled" in err


def test_the_report_of_parallel_is_written_for_other_programs(tmp_path):
    (tmp_path / "script.py").write_text(PARALLEL)
    run = ("-m", "synkhronos", "run", "--parallel", "-n", "2", "--no-report")
    status, out, err = python(tmp_path, *run, "--report", "a.json", "script.py")
    assert (status, out, err) == (3, "[3.0, 3.0, 3.0, 3.0, 3.0] (2, 1)\n", "")
    found = json.loads((tmp_path / "a.json").read_text())
    master, worker = found["cpu_seconds"]
    assert found["n_ranks"] == 2 and master > 0 and worker >= 0  # the worker has little to do
    divided, alone = sorted(found["functions"], key=lambda each: not each["is_divided"])
    assert (divided["calls"], divided["calls_on_ranks"], divided["reason"]) == (5, 5, "")
    assert 0 < divided["first_seconds"] < divided["seconds"] == divided["seconds_on_ranks"]
    assert (alone["calls"], alone["calls_on_ranks"]) == (1, 0) and alone["reason"]
    assert alone["first_seconds"] == alone["seconds"] and alone["name"].endswith("script.py:5")
    status, _, err = python(tmp_path, *run, "--report", "no/folder.json", "script.py")
    assert (status, err) == (3, "can't write 'no/folder.json': No such file or directory\n")


ALONE = """
import theano, theano.tensor as T, synkhronos as synk
x = T.dmatrix("x")
f = theano.function([x], x.sum(), mode="FAST_COMPILE")
f([[1.0]])
"""


OF_RANKS = "g = synk.function([x], (x.sum(), 'sum'), mode='FAST_COMPILE')\n"


@pytest.mark.parametrize(
    "more, said",
    [
        ("", "0 functions ran on the ranks, and 1 of theano.function in one process alone: write "),
        (OF_RANKS, ""),
        (OF_RANKS + "f = g", ""),
        (OF_RANKS + "g([[1.0]])", "1 function ran on the ranks, and 1 of theano.function in one "),
    ],
)
def test_the_end_says_which_functions_used_the_ranks(tmp_path, more, said):
    (tmp_path / "script.py").write_text(f"{ALONE}{more}\nprint(synk.status())")
    status, out, err = python(tmp_path, "-m", "synkhronos", "run", "-n", "2", "script.py")
    err = err.replace("pytensor.function", "theano.function")
    assert status == 0 and (said in err if said else err == "")
    n_distributed = int("g(" in more)
    shown = f"; functions: {n_distributed} on ranks, 1 in this process alone\n"
    assert (shown in out) == ("f = g" not in more)


@pytest.mark.parametrize(
    "arguments, status, message",
    [
        (["no_such_file.py"], 2, "can't open 'no_such_file.py': No such file or directory"),
        (["-n", "0", "empty.py"], 2, "can't start the ranks: n_parallel must be at least 1"),
        (["-n", "2", "--devices", "cpu", "empty.py"], 2, "can't start the ranks: n_parallel=2"),
        (["-n", "two", "empty.py"], 2, "invalid int value: 'two'"),
        (["--no-such-option", "empty.py"], 2, "usage: synkhronos"),
        ([], 2, "usage: synkhronos"),
        (["wrong.py"], 1, "SyntaxError"),
        (["."], 2, "can't open '.': Is a directory"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    no_session, tmp_path, monkeypatch, capsys, arguments, status, message
):
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "wrong.py").write_text("print(\n")
    monkeypatch.chdir(tmp_path)
    try:
        found = main(["run", *arguments])
    except SystemExit as ended:  # of argparse
        found = ended.code
    out, err = capsys.readouterr()
    assert found == status and message in err
    assert "Traceback" not in err and out == ""


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("raise WorkerDied('lost')", []),
        ("raise SessionError('it has ended')", []),
        ("try:\n    raise WorkerDied('lost')\nexcept WorkerDied:\n    raise SystemExit(3)", []),
        ("try:\n    raise WorkerDied('lost')\nfinally:\n    1 / 0", []),
        ("try:\n    raise WorkerDied('lost')\nexcept WorkerDied:\n    pass\n1 / 0", ["own"]),
        ("raise SystemExit(3)", ["own"]),
        ("error = ValueError()\nraise error from error", ["own"]),
    ],
)
def test_a_launcher_is_told_of_an_end_that_no_loss_has_brought(script, told):
    found = []
    with pytest.raises((Exception, SystemExit)):
        _exec(
            compile(script, "script", "exec"),
            {"WorkerDied": WorkerDied, "SessionError": SessionError},
            lambda kind, _: found.append(kind),
        )
    assert found == told
