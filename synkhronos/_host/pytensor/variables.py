"""Variables of PyTensor: their types, values of these types, and random states."""

import numpy as np
import pytensor
from numpy.random import Generator, SeedSequence
from pytensor import tensor
from pytensor.tensor.random.type import RandomType
from pytensor.tensor.type import DenseTensorType

from synkhronos._host.base.cells import peek, replace_object
from synkhronos._host.base.functions import fixed_axes
from synkhronos._host.base.serial_random import is_state_equal
from synkhronos._host.pytensor.device_arrays import device_context, is_on_device, to_device, to_host

on_host = on_device = to_host  # of a variable, whose type is the same on devices: the variable


def replace(variable, value) -> None:
    """Make `value` the value of a shared variable, cast to its dtype: a copy only on a device."""
    if not is_on_device(value):
        value = np.asarray(value, dtype=variable.dtype)
        value = to_device(value) if lives_on_device(variable) else value
    variable.container.storage[0] = value


def lives_on_device(variable) -> bool:
    """Return whether a variable is a shared one whose value is on a device now."""
    return hasattr(variable, "container") and is_on_device(peek(variable))


def rows_from(variable):
    """Return a shared variable's value, to take rows from: on the device, if there is one."""
    if device_context() is not None:
        replace(variable, to_device(peek(variable)))
    return peek(variable)


def lengths(variable):
    """Return for each axis of a variable the length that it always has by its type, or None.

    PyTensor computes with it, so an array of another length would give wrong results.
    """
    return getattr(variable.type, "shape", ())


def fix_axes(expression, variable):
    """Return an expression with the fixed axes of a variable."""
    axes = [axis for axis, is_fixed in enumerate(fixed_axes(variable)) if is_fixed]
    return tensor.specify_broadcastable(expression, *axes) if axes else expression


def shared_on_host(array, name):
    """Return a new shared variable whose value is an array of the host itself, not a copy."""
    return pytensor.shared(array, name, borrow=True)


def shared_zeros(variable, dtype, name):
    """Return a new shared variable of zeros, of a shared variable's shape and fixed axes."""
    zeros = np.zeros(variable.get_value(borrow=True).shape, dtype)
    return pytensor.shared(zeros, name, shape=variable.type.shape)


def is_array_variable(variable) -> bool:
    """Return whether a variable holds an array of NumPy."""
    return isinstance(variable.type, DenseTensorType)


def is_random_state(variable) -> bool:
    """Return whether a shared variable holds a random generator."""
    return isinstance(variable.type, RandomType)


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
