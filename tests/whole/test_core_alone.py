"""The core without the folders of the systems: its commands and tests; and the table of systems."""

import faulthandler
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from support.running import python_path, run

from synkhronos import _systems

ROOT = Path(__file__).parents[2]
# Folders of tests that are not the core's: those of systems, and of all that is distributed.
OTHERS = {
    *("bench", "group", "likelihood", "on_ray", "parameter_server", "rules", "training"),
    *("benchmarks", "docs", "gpu", "install", "ported", "whole"),
}
# A fast part of the core's tests that comes to all of its rooms.
CHOSEN = (
    "unit/ or test_functions or test_parallel.py or test_collectives.py or test_session.py or "
    "test_status or test_resuming or test_gate or test_spinning or test_carrier or "
    "test_heartbeats or test_through or test_where or test_run"
)
# The installation of a source tree finds its own folders for each name that the copy lacks.
WITHOUT_INSTALLATION = """
import sys
sys.meta_path[:] = [each for each in sys.meta_path if "Editable" not in str(each)]
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return what runs Python in a copy of the core and its tests."""
    copy = tmp_path_factory.mktemp("alone")
    for name in ("synkhronos", "tests", "docs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    for system in _systems.there():
        shutil.rmtree(copy.joinpath(*system.module.split(".")), ignore_errors=True)
    for name in OTHERS:
        shutil.rmtree(copy / "tests" / name)
    (copy / "sitecustomize.py").write_text(WITHOUT_INSTALLATION)
    variables = {**os.environ, "PYTHONPATH": python_path(copy)}
    variables = {name: each for name, each in variables.items() if "PYTEST" not in name}

    def python(*arguments, **given):
        return run(sys.executable, *arguments, cwd=copy, env=variables, **given)

    return python


def test_what_the_table_names_is_there():
    for system in _systems._ALL:
        named = [system.module, *(module for _, module in system.commands.values())]
        named += [*system.programs, *([system.launch.module] if system.launch else [])]
        for module in named:
            found = Path(ROOT, *module.split("."))
            assert found.is_dir() or found.with_suffix(".py").is_file(), module


def test_commands_of_the_core_say_nothing_of_systems(alone):
    done = alone("-m", "synkhronos", "--help")
    assert " launch " in done.stdout and " rule " not in done.stdout + done.stderr
    done = alone("-m", "synkhronos", "rule", "BSP")
    assert done.returncode == 2 and "invalid choice: 'rule'" in done.stderr
    done = alone("-m", "synkhronos", "launch", "--workers", "2", "script.py")
    assert done.returncode == 2 and "--workers" in done.stderr


@pytest.mark.slow("runs tests in a copy of the core")
def test_tests_of_the_core_pass(alone):
    """All are imported; those of CHOSEN run."""
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()} - OTHERS
    paths = sorted(f"tests/{name}" for name in folders if name[0].isalpha() and name != "support")
    chosen = ["-m", "not (slow or thorough or opencl)", "-k", CHOSEN, "-p", "no:cacheprovider"]
    faulthandler.cancel_dump_traceback_later()  # each test there has its own
    done = alone("-m", "pytest", "-q", *chosen, *paths, timeout=1200)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout).group(1)) > 500
