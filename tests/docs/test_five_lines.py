"""The serial script of the documentation and the parallel one: five lines apart, equal results."""

import difflib
import re
from pathlib import Path

import pytest
from support.running import python

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = DOCS / "examples"


def difference():
    names = ("serial.py", "parallel.py")
    texts = [(EXAMPLES / name).read_text(encoding="utf-8").splitlines() for name in names]
    return list(difflib.unified_diff(*texts, *names, n=1, lineterm=""))


def changed(marker):
    """Return the lines that are removed ("-") or added ("+"), but for empty ones."""
    return [line[1:] for line in difference()[2:] if line[0] == marker and line[1:].strip()]


def numbers(script, tmp_path, devices):
    child = python(EXAMPLES / f"{script}.py", cwd=tmp_path, SYNKHRONOS_DEVICES=devices)
    assert child.returncode == 0, child.stderr
    return [[float(n) for n in re.findall(r"[\d.]+", line)] for line in child.stdout.splitlines()]


def test_five_lines_are_new():
    new, old = changed("+"), changed("-")
    assert len(new) == 5, new
    assert len(old) == 3, old  # the two others are added
    assert [line for line in new if "synk" not in line] == []
    assert [line for line in old if "synk" in line] == []


def test_the_page_shows_them():
    page = (DOCS / "five_lines.rst").read_text(encoding="utf-8")
    assert "\n".join(f"    {line}".rstrip() for line in difference()) in page


@pytest.mark.slow("compiles a network of convolutions in two processes")
def test_the_scripts_print_the_same_losses(tmp_path):
    serial = numbers("serial", tmp_path, "cpu")
    parallel = numbers("parallel", tmp_path, "cpu,cpu,cpu")
    page = (DOCS / "five_lines.rst").read_text(encoding="utf-8")
    shown = [line for line in page.splitlines() if line.startswith("    epoch ")]
    assert len(shown) == len(serial)
    assert len(serial) == 5  # epochs
    losses = [loss for _, loss, _ in serial]
    assert losses[-1] < losses[0] / 4
    assert parallel == [pytest.approx(line, abs=2e-6) for line in serial]
