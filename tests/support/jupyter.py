"""Jupyter for tests, with its sockets and threads in another process: see kernels.py."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from support.running import run

needs_jupyter = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("nbclient", "ipykernel", "matplotlib")),
    reason="nbclient, ipykernel or matplotlib is not installed",
)


def in_kernel(folder, *command):
    """Run a command of kernels.py in a folder, to which Jupyter also writes its HOME files."""
    names = ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR")
    env = {**os.environ, **{name: str(folder / name.lower()) for name in names}}
    env.pop("SYNKHRONOS_DEVICES", None)
    env.pop("MPLBACKEND", None)
    kernels = Path(__file__).with_name("kernels.py")
    child = run(sys.executable, kernels, *command, cwd=folder, env=env)
    assert child.returncode == 0, child.stderr
    return child.stdout
