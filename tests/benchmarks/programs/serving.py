"""The end of a program that answers a benchmark, as in `synkhronos.tools.bench.programs`.

It imports nothing of Synkhronos, which another Python may not have.
"""

import json
import os
import sys
import time

import numpy as np

MARK = "synkhronos-bench "
JOINED = ("all_gather", "gather")  # the result is the arrays of all ranks, joined

clock = time.perf_counter


def seconds_of_each(run, count, before=None):
    """Return the seconds of each of `count` runs, without what is done before each."""
    seconds = []
    for _ in range(count):
        if before is not None:
            before()
        begin = clock()
        run()
        seconds.append(clock() - begin)
    return seconds


def serve(answers):
    """Answer the benchmark by methods of `answers`, until it says that this is all."""
    for line in sys.stdin:
        message = json.loads(line)
        do = message.pop("do")
        if do == "stop":
            break
        found = getattr(answers, do)(**message)
        sys.stdout.flush()
        os.write(1, f"\n{MARK}{json.dumps(found)}\n".encode())


class Collectives:
    """What ranks of any library are asked for; ``_prepare`` returns a function to run once."""

    def __init__(self, rank, n_ranks):
        self.rank, self.n_ranks = rank, n_ranks
        self._prepared = None

    def is_right(self, collective, examples):
        """Return whether the result of an example is right on this rank."""
        mine, joined, expected = examples[self.rank]
        mine, joined = np.array(mine, "float32"), np.array(joined, "float32")
        (mine if collective == "scatter" else joined).fill(-1)
        self._prepare(collective, mine, joined)()
        result = joined if collective in JOINED else mine
        return expected is None or bool(np.array_equal(result, expected))

    def prepared(self, collective, nbytes):
        """Return a function that runs a collective once, with arrays of so many bytes."""
        if self._prepared is None or self._prepared[0] != (collective, nbytes):
            self._prepared = None  # frees its memory before more is allocated
            mine = np.full(nbytes // 4, 0, "float32")  # full() writes all pages, zeros() none
            joined = np.full(nbytes // 4 * self.n_ranks, 0, "float32")
            self._prepared = (collective, nbytes), self._prepare(collective, mine, joined)
        return self._prepared[1]
