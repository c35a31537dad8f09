"""A process that a model forks in a rank of a rule has its own values of the model's variables."""

import os
import subprocess
import sys

import pytest
from support.rules import FOR_ROOT, needs_mpirun

pytestmark = [pytest.mark.mpi, needs_mpirun]

# One rank, without mpirun: the variables lie in memory that the ranks of a machine share.
RANK = """
import os
import numpy as np
import theano
from synkhronos.comm.mpi.library import MPI
from synkhronos.rules.machine_sums import MachineSums
from synkhronos.rules.variables import Flat

MPI.Init()
w = theano.shared(np.zeros(3), "w")
flat = Flat([w], MachineSums(MPI.COMM_WORLD, 5.0).allocate)
flat.read()
flat.write()
pid = os.fork()
if pid == 0:
    w.get_value(borrow=True)[...] = 1.0
    os._exit(int(w.get_value().sum()))
print(os.waitpid(pid, 0)[1] >> 8, w.get_value().tolist())
MPI.Finalize()
"""


@pytest.mark.slow("imports Theano and begins MPI in a process of its own")
def test_a_child_of_a_rank_writes_into_its_own_values():
    done = subprocess.run(
        [sys.executable, "-c", RANK],
        # Without a segment of its own, which MPI would leave where there is no mpirun.
        env={**os.environ, **FOR_ROOT, "OMPI_MCA_btl": "self"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.stdout, done.returncode) == ("3 [0.0, 0.0, 0.0]\n", 0), done.stderr
