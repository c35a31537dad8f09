"""Random states: each rank draws from a stream of its own."""

import numpy as np
from numpy.random import Generator, SeedSequence

from synkhronos._host.base.cells import peek, replace_object
from synkhronos._host.base.serial_random import is_state_equal
from synkhronos._host.pytensor.variables import is_random_state


def spread_random_state(variable, rank: int) -> None:
    """Move a random state to a stream of the rank's own; rank 0 keeps the state.

    A NumPy generator jumps `rank` times, each jump longer than any program draws (PCG64: ``2**127``
    numbers). SFC64 can't jump: it is seeded anew from its present state and the rank.
    """
    if rank == 0 or not is_random_state(variable) or is_state_equal(variable):
        return
    bits = peek(variable).bit_generator
    if hasattr(bits, "jumped"):
        moved = bits.jumped(rank)
    else:
        words = np.asarray(bits.state["state"]["state"], np.uint64).tolist()
        moved = type(bits)(SeedSequence([*words, rank]))
    replace_object(variable, Generator(moved))
