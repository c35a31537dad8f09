"""Test files in a process of their own, on devices: a process can fork for devices only once."""

import faulthandler
import functools
import os
import sys
from pathlib import Path

import pytest

from support.running import run
from synkhronos._machine.devices import probe

HERE = Path(__file__).parents[1]
# PoCL and g++ take most of the time of suites on OpenCL devices.
COMPILE_QUICKLY = {
    "POCL_EXTRA_BUILD_FLAGS": "-cl-opt-disable",
    "THEANO_FLAGS": "gcc.cxxflags=-O0",
}
PYTEST = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]


@functools.lru_cache(maxsize=None)
def missing(kind):
    """Return why there is no device of a kind, ``"opencl"`` or ``"cuda"``, or nothing."""
    count, problem = probe(kind)
    return "" if count else f"no {kind} device ({problem or 'it counts 0'})"


def outcome(devices, names, markers="", without=(), master=0, transport="shared", **variables):
    """Run test files on ranks with these devices, but for the tests in `without`.

    Return the process, which has ended.
    """
    paths = []
    for name in names:
        file, *test = name.split("::")
        paths.append("::".join([str(HERE / f"{file}.py"), *test]))
    left_out = [f"--deselect=tests/{name.replace('::', '.py::')}" for name in without]
    layout = {"DEVICES": devices, "MASTER": str(master), "TRANSPORT": transport}
    variables.update({f"SYNKHRONOS_TEST_{name}": value for name, value in layout.items()})
    line = [*PYTEST, "-m", markers, *left_out, *paths]
    return run(*line, cwd=HERE.parent, env={**os.environ, **variables}, timeout=1200)


def run_suites(devices, master, names, request, transport="shared", without=()):
    """Check that test files pass on ranks with these devices; skip if there are none.

    On a mix of kinds of devices without the tests that are thorough, which one kind has.
    """
    kind = "cuda" if "cuda" in devices else "opencl"
    if missing(kind):
        pytest.skip(missing(kind))
    faulthandler.cancel_dump_traceback_later()  # what runs has its own, for each test
    markers = "not thorough" if len(set(devices.split(","))) > 1 else ""
    variables = COMPILE_QUICKLY if kind == "opencl" else {}
    done = outcome(devices, names, markers, without, master, transport, **variables)
    summary = done.stdout.strip().splitlines()[-1]
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        request.config.pluginmanager.getplugin("terminalreporter").write_line(f" {summary}")
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]
    assert " passed" in summary
