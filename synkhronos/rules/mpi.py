"""MPI of the ranks of rules, which only `worker` starts: an import alone starts nothing."""

import mpi4py

mpi4py.rc.initialize = False  # also in processes that only read the docstrings of these modules
mpi4py.rc.finalize = False

from mpi4py import MPI as MPI  # noqa: E402
