"""How an error is shown that ends a script: in few lines, or whole; interpreters of their own."""

import os
import signal
import subprocess
import sys

import pytest

BEGIN = """
import sys
import numpy as np
import theano, theano.tensor as T
import synkhronos as synk
x, w = T.dmatrix("x"), theano.shared(np.ones((3, 2)), "w")
synk.fork(2)
f = synk.function([x], T.dot(x, w).sum(), check=0)
"""
RAISES = BEGIN + "f(np.ones((4, 2)))"  # line 9


def run(folder, script, **environment):
    """Return the exit status of a script, and the lines of its stderr."""
    (folder / "script.py").write_text(script)
    command = [sys.executable, "-W", "ignore", "script.py"]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment, "TMPDIR": str(folder)},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    return done.returncode, done.stderr.splitlines()


def test_an_error_of_a_rank_is_shown_with_the_scripts_lines_and_kept_whole(tmp_path):
    status, lines = run(tmp_path, RAISES)
    [kept] = tmp_path.glob("synkhronos-traceback-*.txt")
    assert status == 1 and len(lines) <= 13
    text = "\n".join(lines)
    assert 'script.py", line 9, in <module>\n    f(np.ones((4, 2)))\n' in text
    assert 'It was made here:\n  File "' in text and 'script.py", line 8, in <module>' in text
    assert text.count("Shape mismatch") == 1 and "Apply node that caused the error: Dot22" in text
    assert "Inputs shapes" in text and "Inputs values" not in text and "[1., 1.]" not in text
    assert str(kept) in lines[-1] and "SYNKHRONOS_TRACEBACK=1" in lines[-1]
    whole = kept.read_text()
    assert "synkhronos/functions.py" in whole and "The above exception was the direct" in whole

    status, lines = run(tmp_path, RAISES, SYNKHRONOS_TRACEBACK="1")
    same = [line for line in whole.splitlines() if "^" not in line and "0x" not in line]
    assert status == 1 and [a for a in lines if "^" not in a and "0x" not in a] == same


def test_wrong_arguments_take_five_lines_and_no_file(tmp_path):
    status, lines = run(tmp_path, BEGIN + "f(np.ones((4, 3)), btach=2)")
    message, more = [line for line in lines if "^" not in line][3:]
    assert status == 1 and message.startswith("TypeError: Function '")
    assert message.endswith("has no input 'btach'. It takes: x. Perhaps you meant batch.")
    assert more == "SYNKHRONOS_TRACEBACK=1 prints the whole traceback."
    assert not list(tmp_path.glob("synkhronos-traceback-*"))
    status, lines = run(tmp_path, BEGIN + "synk.function([x], x.sum(), update=[])")
    assert "argument 'update'. Perhaps you meant updates." in lines[-2]


def test_a_line_of_an_installed_package_that_calls_this_one_is_shown(tmp_path):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "mine.py").write_text("def train(f):\n    f(1, 2)\n")
    added = "import mine\nmine.train(f)"
    status, lines = run(tmp_path, f"{BEGIN}sys.path.append({str(folder)!r})\n{added}")
    _, script, _, installed, *_ = [line for line in lines if "^" not in line]
    assert status == 1 and 'script.py", line 11, in <module>' in script
    assert 'mine.py", line 2, in train' in installed


RANK = r"""
from theano.compile.ops import as_op
@as_op([T.dmatrix], [T.dmatrix])
def op(x):
    raise ValueError("\x1b[31m\udcff")
synk.function([x], op(x), check=0)(np.ones((4, 3)))"""


@pytest.mark.parametrize(
    ("script", "shown", "left_out"),
    [
        (RANK, r"ValueError: \x1b[31m\udcff", "\x1b[31m\\udcff"),
        ("f(**{2000 * 'a' + ' end': 1})", "aaaa...", "aaa end"),
        ("try:\n    {}['key']\nexcept KeyError:\n    f(1, 2)", "got 2.", "KeyError"),
    ],
)
def test_a_terminal_obeys_no_message_and_what_is_left_out_is_kept(
    tmp_path, script, shown, left_out
):
    status, lines = run(tmp_path, BEGIN + script)
    [kept] = tmp_path.glob("synkhronos-traceback-*.txt")
    assert status == 1 and str(kept) in lines[-1] and left_out in kept.read_text()
    assert shown in "\n".join(lines) and left_out not in "\n".join(lines)


def test_ctrl_c_shows_the_scripts_line_and_ends_as_python_does(tmp_path):
    send = "threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()"
    loop = f"import os, signal, threading\na = np.ones((40000, 3))\n{send}\nwhile True: f(a)"
    status, lines = run(tmp_path, BEGIN + loop)
    assert status == -signal.SIGINT and "KeyboardInterrupt" in lines and len(lines) <= 6


@pytest.mark.parametrize(
    ("script", "shown"),
    [
        (BEGIN + "f(np.ones((4, 3))) / None", "Traceback (most recent call last):"),
        ("import sys\nsys.excepthook = lambda *error: sys.stderr.write('own')\n" + RAISES, "own"),
    ],
)
def test_the_scripts_own_errors_and_hooks_are_left_alone(tmp_path, script, shown):
    status, lines = run(tmp_path, script)
    assert (status, lines[0]) == (1, shown)
