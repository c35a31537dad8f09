"""What the master tells the ranks: frozen messages, each of which knows how to run itself.

They carry references to shared memory, never data. Every rank runs the same message, the master
too. What `run` returns on a worker is sent to the master as its answer.
"""

import gc
from dataclasses import dataclass
from typing import Optional, Tuple, Union

from synkhronos import _theano
from synkhronos._replica import Replica
from synkhronos._shm import ArrayRef, SegmentRef

Selection = Union[Tuple[int, int, int], ArrayRef]  # a range, or indices


@dataclass(frozen=True)
class Ready:
    """Do nothing: whoever reaches the finish barrier has started up."""

    def run(self, worker):
        """Do nothing."""


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
        for (key, variant), (function, description) in functions.items():
            replica = worker.replicas.setdefault(key, Replica(key, description))
            replica.variants[variant] = function


@dataclass(frozen=True)
class RunFunction:
    """Run one function on this rank's rows, and hand over its parts of the outputs."""

    function: int
    inputs: Tuple[ArrayRef, ...]
    kinds: Tuple[int, ...]  # what a rank takes of each input, see `_replica`
    rows: Optional[int]  # None where nothing is scattered
    selection: Optional[Selection]  # the rows of scattered inputs; None for all
    picked: Optional[Tuple[Selection, ...]]  # the rows of sliceable shareds, for each rank
    num_slices: int
    reduced: Tuple[int, ...]  # the positions of the outputs that the master needs from all ranks
    source: int  # the rank whose own result stands where nothing is reduced
    source_of_nothing: int  # the rank that runs though it has no rows; -1 for none
    output_subset: Optional[Tuple[int, ...]] = None

    def run(self, worker):
        """Return the new layout of this rank's outputs, where it has changed."""
        return worker.replicas[self.function].run(worker, self)


@dataclass(frozen=True)
class Lengths:
    """Tell how long the sliceable shared variables of a function are on this rank."""

    function: int

    def run(self, worker):
        """Return their lengths along axis 0."""
        sliceables = worker.replicas[self.function].description.sliceables
        return [len(_theano.peek(variable)) for variable in sliceables]


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
