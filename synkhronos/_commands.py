"""What the master tells the ranks: frozen messages, each of which knows how to run itself.

They carry references to shared memory, never data. Every rank runs the same message, the master
too. What `run` returns on a worker is sent to the master as its answer.
"""

import gc
from dataclasses import dataclass
from typing import Optional, Tuple

from synkhronos import _theano
from synkhronos._replica import Replica
from synkhronos._shm import ArrayRef, SegmentRef


@dataclass(frozen=True)
class Ready:
    """Do nothing: whoever reaches the finish barrier has started up."""

    def run(self, worker):
        """Return the process id, for the log."""
        return worker.rank


@dataclass(frozen=True)
class LoadFunctions:
    """Take new functions, and the shared variables among theirs that are new."""

    pickled: ArrayRef

    def run(self, worker):
        """Unpickle them; the master has them already."""
        if worker.is_master:
            return
        data = worker.segments.array(self.pickled).tobytes()
        worker.segments.forget([self.pickled.segment])
        functions, new = _theano.load(data, worker.variables)
        for key in new:
            _theano.spread_random_state(worker.variables[key], worker.rank)
        for key, function in functions.items():
            worker.replicas[key] = Replica(key, function)


@dataclass(frozen=True)
class RunFunction:
    """Run one function on this rank's rows, and hand over its parts of the outputs."""

    function: int
    inputs: Tuple[ArrayRef, ...]
    split: Tuple[bool, ...]  # which inputs are scattered
    rows: Optional[int]  # None where nothing is scattered: then every rank runs
    reduced: Tuple[int, ...]  # the positions of the outputs that the master needs from all ranks
    source: int  # the rank whose own result stands where nothing is reduced
    output_subset: Optional[Tuple[int, ...]] = None

    def run(self, worker):
        """Return the new layout of this rank's outputs, where it has changed."""
        return worker.replicas[self.function].run(worker, self)


@dataclass(frozen=True)
class Forget:
    """Let go of what the master has released."""

    segments: Tuple[SegmentRef, ...]
    functions: Tuple[int, ...]
    variables: Tuple[int, ...]

    def run(self, worker):
        """Drop all that is named, and what belongs to it."""
        worker.segments.forget(self.segments)
        for key in self.functions:
            worker.replicas.pop(key, None)
            worker.comm.forget(key)
        for key in self.variables:
            worker.variables.pop(key, None)
        if (self.functions or self.variables) and not worker.is_master:
            gc.collect()  # compiled functions are cycles, and an idle worker seldom collects


@dataclass(frozen=True)
class Quit:
    """Leave the loop: the session is closing."""

    def run(self, worker):
        """Make this the last command."""
        worker.running = False
