"""Jupyter for tests, with its sockets and threads in another process: see kernels.py."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    child = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "kernels.py"), *command],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout
