"""What pages, messages and docstrings say to install leaves NumPy as the host library needs it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from synkhronos._host import pythons

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"pip install ([^`\n\"#;]+)")
NAMED = re.compile(r"pythons\.install\(['\"]([\w-]+)['\"]\)")
EXTRA = re.compile(r"(?:synkhronos|\.)(?:\[([\w,-]+)\])?")
# Packages that need no NumPy, or are needed by another host's environment alone.
WITHOUT_NUMPY = re.compile(r"nvidia-[\w-]+|mako|setuptools|mpi4py|impi-rt|notebook|httpstan|numba")
OPTIONS = {"--force-reinstall", "--no-binary"}
OF_BOTH = "completion,mpi,plot,ray,top"
IN_EXAMPLES = {"absent", "...", "pytensor"}  # of docstrings, whose text is elsewhere


def commands():
    """Yield each text that says what to install, the packages, and the file."""
    paths = ROOT / "README.md", *ROOT.glob("docs/*.rst"), *ROOT.glob("synkhronos/**/*.py")
    for path in paths:
        text = path.read_text(encoding="utf-8")
        for found in COMMAND.findall(text):
            if "{" not in found and found.strip("'"):
                yield [each.strip("',:)") for each in found.split()], path
        for extra in NAMED.findall(text):
            yield [pythons.install(extra).split("'")[1]], path


def extras():
    """Return the extras of setup.py, by name."""
    source = (ROOT / "setup.py").read_text(encoding="utf-8")
    return {*re.findall(r'^    "([\w-]+)": \[', source, re.M)}


def test_each_is_an_extra_or_needs_no_numpy():
    known, seen = extras(), 0
    for packages, path in commands():
        of_synkhronos = [EXTRA.fullmatch(each) for each in packages]
        for found in of_synkhronos:
            named = {*found.group(1).split(",")} if found and found.group(1) else set()
            assert named <= known, (path.name, packages)
        if any(of_synkhronos):  # its limits hold for what stands beside it
            seen += 1
            continue
        for each in packages:
            name = re.split(r"[<>=]", each)[0]
            is_host = each in ("Theano==1.0.5", pythons.REQUIREMENT)
            is_free = is_host or each in OPTIONS | IN_EXAMPLES or WITHOUT_NUMPY.fullmatch(name)
            assert is_free, f"{path.name}: pip install {each} may bring another NumPy"
    assert seen > 20


@pytest.mark.slow("pip resolves on the package index")
def test_pip_finds_all_extras_with_the_hosts_numpy(tmp_path):
    """All at once, as each takes pip some seconds."""
    of_host = "demos,gpu,rules" if pythons.is_for_theano() else "jax,pymc"
    report = tmp_path / "report.json"
    line = sys.executable, "-m", "pip", "install", "--dry-run", "--no-build-isolation", "--quiet"
    asked = f"{ROOT}[{of_host},{OF_BOTH}]", "--ignore-installed", "--report", report
    env = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run([*line, *asked], capture_output=True, text=True, env=env)
    if "No module named pip" in done.stderr:
        pytest.skip("there is no pip in this environment")
    if "No matching distribution" in done.stderr or "NewConnectionError" in done.stderr:
        pytest.skip(f"pip reaches no package index: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    found = {
        each["metadata"]["name"].lower(): each["metadata"]["version"]
        for each in json.loads(report.read_text())["install"]
    }
    major, minor = map(int, found["numpy"].split(".")[:2])
    assert (major, minor) < (1, 24) if pythons.is_for_theano() else major >= 2
