"""Random states: each rank draws from a stream of its own."""

import numpy as np
from theano.sandbox import rng_mrg
from theano.tensor.raw_random import RandomStateType

from synkhronos._host.base.cells import peek, replace_object
from synkhronos._host.base.serial_random import is_state_equal
from synkhronos._host.theano import device_arrays
from synkhronos._host.theano.variables import is_mrg_state, replace


def spread_random_state(variable, rank: int) -> None:
    """Move a random state to a stream of the rank's own; rank 0 keeps the state.

    The state of MRG_RandomStreams jumps ahead ``rank * 2**154`` numbers (its own streams are
    ``2**134`` apart, and its period is ``2**185``; L'Ecuyer and Touzin, 2000). The state of
    RandomStreams is seeded anew from its present one and the rank.
    """
    if rank == 0 or is_state_equal(variable):
        return
    if isinstance(variable.type, RandomStateType):
        state = peek(variable)
        key = state.get_state()[1]
        position = state.get_state()[2]
        seed = np.random.SeedSequence([*key.tolist(), position, rank])
        replace_object(variable, np.random.RandomState(np.random.MT19937(seed)))
    elif is_mrg_state(variable):
        states = device_arrays.to_host(peek(variable))
        replace(variable, _jump(states, rank).astype(states.dtype))


def _jump(states, rank):
    matrices = [
        (_power(rng_mrg.A1p134, rank << 20, rng_mrg.M1), rng_mrg.M1),
        (_power(rng_mrg.A2p134, rank << 20, rng_mrg.M2), rng_mrg.M2),
    ]
    halves = np.split(states.astype(object), 2, axis=-1)
    return np.concatenate(
        [half.dot(matrix.T) % modulus for half, (matrix, modulus) in zip(halves, matrices)], axis=-1
    )


def _power(matrix, exponent, modulus):
    base = np.asarray(matrix).astype(object)
    result = np.eye(len(base), dtype=int).astype(object)
    while exponent:
        if exponent & 1:
            result = result.dot(base) % modulus
        base = base.dot(base) % modulus
        exponent >>= 1
    return result
