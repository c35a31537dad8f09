"""Random states: each rank draws from a stream of its own."""

import json

import numpy as np
from numpy.random import Generator, SeedSequence

from synkhronos._host.cells import peek, replace_object
from synkhronos._host.draws import is_state_equal
from synkhronos._host.pytensor.variables import is_random_state

_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


def spread_random_state(variable, rank: int) -> None:
    """Move a random state to a stream of the rank's own; rank 0 keeps the state.

    A generator of NumPy jumps `rank` times, each time further than any program draws (PCG64:
    ``2**127`` numbers). SFC64 can't jump: it is seeded anew from its present state and the rank.
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


def state_parts(state):
    """Return the state of a generator as JSON in an array, and the name of its bit generator."""
    bits = state.bit_generator
    text = json.dumps(bits.state, default=lambda value: value.tolist())
    return np.frombuffer(text.encode(), np.uint8), [type(bits).__name__]


def state_of_parts(array, rest):
    """Return the generator of these parts; raise ValueError, TypeError or KeyError for others."""
    if len(rest) != 1:
        raise ValueError("it is the state of a RandomState, as Theano has; PyTensor has Generators")
    [kind] = rest
    if kind not in _BIT_GENERATORS:
        raise ValueError(f"NumPy has no bit generator {kind}")
    bits = getattr(np.random, kind)()
    bits.state = _with_arrays(json.loads(array.tobytes()))
    return Generator(bits)


def _with_arrays(value):
    if isinstance(value, dict):
        return {key: _with_arrays(each) for key, each in value.items()}
    return np.array(value, np.uint64) if isinstance(value, list) else value
