"""The rank in front of the text that Theano's operation Print prints."""

import copy
import functools

from theano.printing import Print

from synkhronos._machine.log import rank_in_a_call


def put_ranks_in_front() -> None:
    """Let each Print that runs in a call of several ranks begin with its rank: "[rank 1] ...".

    Functions that Theano runs in the master alone print as before.
    """
    perform = Print.perform

    @functools.wraps(perform)
    def perform_with_rank(op, node, inputs, output_storage):
        rank = rank_in_a_call()
        if rank is not None:
            op = copy.copy(op)  # the graphs of other functions have the same operation
            op.message = f"[rank {rank}] {op.message}"
        perform(op, node, inputs, output_storage)

    Print.perform = perform_with_rank
