"""A rank of Open MPI, which mpirun has started."""

from benchmarks.programs.serving import Collectives
from synkhronos.tools.bench.machines import processes


class Rank(processes.Process, Collectives):
    """One rank: a method for each thing that the benchmark asks for."""

    def __init__(self, mpi):
        processes.Process.__init__(self, mpi)
        Collectives.__init__(self, self._comm.rank, self._comm.size)

    def check(self, collective, examples):
        """Return whether the result of an example is right on all ranks."""
        return self.all_right(self.is_right(collective, examples))

    def times(self, collective, nbytes, count):
        """Return the seconds of the slowest rank in each repetition."""
        return self.slowest(self.prepared(collective, nbytes), count)

    def _prepare(self, collective, mine, joined):
        """Return a function that runs a collective once, reductions in place, as in Synkhronos."""
        comm, in_place = self._comm, self._mpi.IN_PLACE
        mine, joined = [mine, self._mpi.FLOAT], [joined, self._mpi.FLOAT]
        at_root = joined if self.rank == 0 else None
        given, to = (in_place, mine) if self.rank == 0 else (mine, None)
        return {
            "all_reduce": lambda: comm.Allreduce(in_place, mine),
            "reduce": lambda: comm.Reduce(given, to),
            "broadcast": lambda: comm.Bcast(mine),
            "all_gather": lambda: comm.Allgather(mine, joined),
            "gather": lambda: comm.Gather(mine, at_root),
            "scatter": lambda: comm.Scatter(at_root, mine),
        }[collective]


def main():
    """Do what the benchmark asks for."""
    processes.main(Rank)
