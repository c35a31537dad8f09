"""Exchanges between the ranks of a rule."""

import os
import subprocess
import sys

import pytest
from support.hosts import mpirun
from support.rules import FOR_ROOT, needs_mpirun

pytestmark = [pytest.mark.mpi, needs_mpirun]

HALVES = """
import numpy as np
import theano
from synkhronos.comm.mpi.library import MPI
from synkhronos.rules.exchange import Exchanger

MPI.Init()
comm = MPI.COMM_WORLD
first = comm.rank == 0
found = []
for strategy in ("ar", "asa32"):
    w = theano.shared(np.float16([1 if comm.rank else 2048, 7]), "w")
    v = theano.shared(np.full(2, comm.rank, np.float32), "v")
    exchanger = Exchanger(comm, strategy, [w, v], [w, v])
    exchanger.sum(1)
    found.append((w.get_value().dtype.name, w.get_value().tolist(), v.get_value().tolist()))
everyone = comm.gather(found)
if first:
    print(all(each == found for each in everyone), found[0] == found[1], found[0])
MPI.Finalize()
"""


@pytest.mark.slow("starts mpirun and imports Theano")
def test_float16_is_summed_in_float32_and_rounded_once():
    line = [mpirun(), "--oversubscribe", "-n", "3", sys.executable, "-c", HALVES]
    env = {**os.environ, **FOR_ROOT}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=300)
    wanted = "True True ('float16', [2050.0, 21.0], [3.0, 3.0])\n"
    assert (done.stdout, done.returncode) == (wanted, 0), done.stderr
