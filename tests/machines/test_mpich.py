"""A session over MPICH, in an environment where mpi4py loads it: pip install mpi4py mpich."""

import os
import sys
from pathlib import Path

import pytest
from support.running import run

from synkhronos.comm.mpi import link

SCRIPT = """
import numpy as np, theano.tensor as T, synkhronos as synk
x = T.dvector("x")
f = synk.function([x], (x.sum(), "sum"), mode="FAST_COMPILE")
print(len(synk.status().ranks), f(np.arange(10.0)))
"""


def mpiexec():
    """Return MPICH's mpiexec of this environment, or skip the test."""
    path = Path(sys.executable).parent / "mpiexec.hydra"
    if not path.exists():
        pytest.skip("there is no MPICH in this environment: pip install mpi4py mpich")
    return str(path)


def test_a_script_over_mpich(tmp_path):
    line = [mpiexec(), "-n", "2", sys.executable, "-m", "synkhronos", "run", "-n", "1", "script.py"]
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run(*line, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2 45.0\n", "")


def test_the_carrier_gets_the_descriptor_that_the_environment_names(monkeypatch):
    """MPICH's processes speak by it with mpiexec."""
    reader, writer = os.pipe()
    monkeypatch.setenv("PMI_FD", str(reader))
    assert link._descriptors_of_mpi() == [reader]
    os.close(reader)
    os.close(writer)
    for number in (str(reader), "none"):
        monkeypatch.setenv("PMI_FD", number)
        assert link._descriptors_of_mpi() == []
