"""All-reduce as an operation of a PyTensor graph.

Code of `numba_operations` and `jax_functions` calls `reduce_in_place`.
"""

import numpy as np

from synkhronos._host.base import rank_operations
from synkhronos._host.base.calls import current_call


def overlap_reductions(overlaps: bool) -> None:
    """Do nothing: with PyTensor no reduction begins early. The results are the same."""


def reduce_in_place(ops, *arrays):
    """Replace arrays with their reductions over the ranks; outside of a call leave them alone."""
    call = current_call()
    if call is not None:
        call.reduce(list(arrays), ops, list(arrays))


class PyTensorAllReduce(rank_operations.AllReduce):
    """Reduces each input over the ranks; outside of a call, the identity."""

    def perform(self, node, inputs, output_storage):
        arrays = [np.asarray(x) if self.inplace else np.array(x) for x in inputs]
        reduce_in_place(self.ops, *arrays)
        for storage, array in zip(output_storage, arrays):
            storage[0] = array


all_reduce = PyTensorAllReduce.of
