"""The serial script of the documentation and the parallel one: five lines apart, equal results."""

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"


def changed(marker):
    """Return the lines that the diff removes ("-") or adds ("+"), but for empty ones."""
    texts = [(EXAMPLES / f"{name}.py").read_text().splitlines() for name in ("serial", "parallel")]
    lines = [line for line in difflib.ndiff(*texts) if line.startswith(f"{marker} ")]
    return [line[2:] for line in lines if line[2:].strip()]


def numbers(script, tmp_path, devices):
    child = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{script}.py")],
        cwd=tmp_path,
        env={**os.environ, "SYNKHRONOS_DEVICES": devices},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    return [[float(n) for n in re.findall(r"[\d.]+", line)] for line in child.stdout.splitlines()]


def test_five_lines_are_new():
    new, old = changed("+"), changed("-")
    assert len(new) == 5, new
    assert len(old) == 3, old  # the two others are added
    assert sum(line.strip().startswith("synk.fork(") for line in new) == 1


def test_the_scripts_print_the_same_losses(tmp_path):
    serial = numbers("serial", tmp_path, "cpu")
    parallel = numbers("parallel", tmp_path, "cpu,cpu,cpu")
    assert len(serial) == 5  # epochs
    losses = [loss for _, loss, _ in serial]
    assert losses[-1] < losses[0] / 4
    assert parallel == [pytest.approx(line, abs=2e-6) for line in serial]
