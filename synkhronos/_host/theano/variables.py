"""Variables of Theano: their types, values of these types, and random states."""

import numpy as np
from theano import shared
from theano.sandbox import rng_mrg
from theano.tensor import TensorType, patternbroadcast
from theano.tensor.raw_random import RandomStateType

from synkhronos._host.base.cells import cell, peek, replace_object
from synkhronos._host.base.functions import fixed_axes, is_by
from synkhronos._host.base.serial_random import is_state_equal
from synkhronos._host.theano import device_arrays


def replace(variable, value) -> None:
    """Make `value` the value of a shared variable, cast to its dtype: a copy only on a device."""
    storage = cell(variable)
    if not lives_on_device(variable):
        storage[0] = np.asarray(value, dtype=variable.dtype)
    elif device_arrays.is_on_device(value):
        storage[0] = value
    else:
        value = np.asarray(value, dtype=variable.dtype)
        if storage[0].shape == value.shape:
            device_arrays.copy_to_device(storage[0], value)
        else:
            storage[0] = device_arrays.to_device(value)


rows_from = peek  # returns a value to take rows from, on the device if it is there


def lengths(variable):
    """Return for each axis of a variable the length that it always has: 1, or None."""
    return tuple(1 if is_fixed else None for is_fixed in fixed_axes(variable))


def fix_axes(expression, variable):
    """Return an expression with the fixed axes of a variable."""
    return patternbroadcast(expression, variable.broadcastable)


def shared_on_host(array, name):
    """Return a new shared variable whose value is an array of the host itself, not a copy."""
    # The default of a device would be a variable there, with memory of its own.
    return shared(array, name, borrow=True, target="cpu")


def shared_zeros(variable, dtype, name):
    """Return a new shared variable of zeros, of a shared variable's shape and fixed axes."""
    shape = variable.get_value(borrow=True).shape
    return shared(np.zeros(shape, dtype), name, broadcastable=variable.broadcastable)


def is_array_variable(variable) -> bool:
    """Return whether a variable holds an array, of NumPy or on a device."""
    return isinstance(variable.type, TensorType) or lives_on_device(variable)


def lives_on_device(variable) -> bool:
    """Return whether a variable's values are on a device; 0-d and complex ones seldom are."""
    return device_arrays.is_device_type(variable.type)


def on_host(variable):
    """Return a new variable on the host for one on a device; return any other as it is."""
    if not lives_on_device(variable):
        return variable
    return TensorType(variable.dtype, variable.broadcastable)(name=variable.name)


def on_device(variable):
    """Return a variable moved to this rank's device."""
    return variable.transfer(None)


def is_random_state(variable) -> bool:
    """Return whether a shared variable holds the state of a random number generator."""
    return isinstance(variable.type, RandomStateType) or is_mrg_state(variable)


def is_mrg_state(variable) -> bool:
    """Return whether a shared variable holds the state of an MRG_RandomStreams."""
    if getattr(variable.tag, "is_rng", False):
        return is_array_variable(variable)
    update = getattr(variable, "default_update", None)
    return update is not None and is_by(update, rng_mrg.mrg_uniform_base)


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
