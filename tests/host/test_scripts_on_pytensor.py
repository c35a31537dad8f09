"""README's example and the lessons run on PyTensor, with other imports alone."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import host_library

if not host_library.ON_PYTENSOR:
    pytest.skip("it is about PyTensor", allow_module_level=True)

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
IMPORTS = {
    "import theano.tensor as T": "import pytensor.tensor as T",
    "import theano\n": "import pytensor as theano\n",
}


def run(code, folder):
    """Run a script of Theano's with other imports; return what it prints."""
    for old, new in IMPORTS.items():
        code = code.replace(old, new)
    left_out = [str(host_library.NAMES)]  # which serves Theano's names
    found = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [str(ROOT), *(each for each in found if each not in left_out)]
    script = folder / "script.py"
    script.write_text(code, encoding="utf-8")
    child = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        timeout=300,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
    )
    assert child.returncode == 0, child.stderr
    return child.stdout


@pytest.mark.numba
def test_the_example_of_the_readme(tmp_path):
    code, output = re.search(r"```python\n(.*?)```.*?```text\n(.*?)```", README, re.S).groups()
    assert run(code, tmp_path) == output


def test_other_examples_of_the_readme(tmp_path):
    _, *others = re.findall(r"```python\n(.*?)```", README, re.S)
    for code in others:
        run(code, tmp_path)


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_a_lesson(tmp_path, number):
    code = (ROOT / "demos" / f"demo_{number}.py").read_text(encoding="utf-8")
    assert len(re.findall(r"test passed\.$", run(code, tmp_path), re.M)) >= 2
