"""A rank of torch.distributed with gloo; the ranks find each other through a file."""

import sys

import torch
import torch.distributed as dist

from benchmarks.programs.serving import Collectives, seconds_of_each, serve


class Rank(Collectives):
    """One rank: a method for each thing that the benchmark asks for."""

    def __init__(self, rank, n_ranks, folder):
        super().__init__(rank, n_ranks)
        torch.set_num_threads(1)
        where = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=n_ranks)

    def hello(self):
        """Return the version."""
        return f"torch {torch.__version__}"

    def check(self, collective, examples):
        """Return whether the result of an example is right on this rank."""
        return self.is_right(collective, examples)

    def times(self, collective, nbytes, count):
        """Return the seconds of each repetition, without the barrier before it."""
        return seconds_of_each(self.prepared(collective, nbytes), count, dist.barrier)

    def _prepare(self, collective, mine, joined):
        mine, joined = torch.from_numpy(mine), torch.from_numpy(joined)
        parts = list(joined.chunk(self.n_ranks))
        at_root = parts if self.rank == 0 else None
        return {
            "all_reduce": lambda: dist.all_reduce(mine),
            "reduce": lambda: dist.reduce(mine, 0),
            "broadcast": lambda: dist.broadcast(mine, 0),
            "all_gather": lambda: dist.all_gather(parts, mine),
            "gather": lambda: dist.gather(mine, at_root),
            "scatter": lambda: dist.scatter(mine, at_root),
        }[collective]


if __name__ == "__main__":
    serve(Rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
    dist.destroy_process_group()
