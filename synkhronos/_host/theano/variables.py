"""Shared variables of Theano: their types, and the values in their storage cells."""

import contextlib
import copy
import copyreg

import numpy as np
from theano import shared
from theano.gof import Container
from theano.sandbox import rng_mrg
from theano.tensor import TensorType, patternbroadcast
from theano.tensor.raw_random import RandomStateType

from synkhronos._host.theano import devices


def peek(variable):
    """Return a shared variable's own value, not a copy."""
    return variable.container.storage[0]


def cell(variable) -> list:
    """Return the list whose one item is a shared variable's value, always the same list."""
    return variable.container.storage


def replace(variable, value) -> None:
    """Make `value` the value of a shared variable, cast to its dtype, with no copy on the host.

    A variable on a device gets a copy, in its present memory if the shape is the same.
    """
    storage = variable.container.storage
    if not lives_on_device(variable):
        storage[0] = np.asarray(value, dtype=variable.dtype)
    elif devices.is_on_device(value):
        storage[0] = value
    else:
        value = np.asarray(value, dtype=variable.dtype)
        if storage[0].shape == value.shape:
            devices.copy_to_device(storage[0], value)
        else:
            storage[0] = devices.to_device(value)


def replace_object(variable, value) -> None:
    """Make `value` the value of a shared variable that holds no array, such as a random state."""
    variable.container.storage[0] = variable.type.filter(value)


def put(variable, anything) -> None:
    """Put an object into a shared variable's cell: no check, no copy, and no watcher is told."""
    variable.container.storage[0] = anything


def read(variable):
    """Return a shared variable's own value; those that watch it are told."""
    return variable.container.value


class _Watched(Container):
    """A container that tells when a script sets or reads its value; the package uses `storage`."""

    def _get(self):
        for _, on_read in self.watchers:
            if on_read is not None:
                on_read(self.storage[0])
        return self.storage[0]  # a watcher may have put the current value there

    def _set(self, value):
        Container.__set__(self, value)
        for on_set, _ in self.watchers:
            on_set()

    data = value = property(_get, _set)

    def plain(self):
        """Return a container without the watch, of the same cell."""
        plain = Container.__new__(Container)
        plain.__dict__.update(self.__dict__)
        del plain.watchers
        return plain

    def __reduce_ex__(self, protocol):
        # The reader of the pickle needs Theano only.
        return copyreg._reconstructor, (Container, object, None), self.plain().__dict__

    def __deepcopy__(self, memo):
        return self.plain().__deepcopy__(memo)


def watch(variable, on_set, on_read=None) -> None:
    """Call ``on_set()`` when the script sets a shared variable, ``on_read(value)`` when it reads.

    It sees ``set_value``, ``get_value`` and ``container.value``; not compiled functions, and not
    writes to a borrowed array.
    """
    container = variable.container
    # Several variables may have one container: Lasagne and Theano clone variables so.
    watchers = container.watchers if type(container) is _Watched else ()
    container.watchers = (*watchers, (on_set, on_read))
    container.__class__ = _Watched


def unwatch(variable) -> None:
    """Undo `watch`."""
    container = variable.container
    if type(container) is _Watched:
        container.__class__ = Container
        del container.watchers


def tell(variable) -> None:
    """Call what `watch` was given, for a value that a compiled function has set."""
    container = variable.container
    for on_set, _ in container.watchers if type(container) is _Watched else ():
        on_set()


@contextlib.contextmanager
def lend(variable, rows):
    """Make a shared variable hold some of its rows inside a with block.

    Compiled functions read the value from the variable's storage cell at every call, so no other
    function is compiled for this. A value that an update stores inside the block stays.
    """
    storage = variable.container.storage
    whole = storage[0]
    storage[0] = rows
    try:
        yield
    finally:
        if storage[0] is rows:
            storage[0] = whole


@contextlib.contextmanager
def on_copies(variables, values=()):
    """Let shared variables hold copies of their values inside a with block, or other values.

    Parameters
    ----------
    variables : list of shared variable
    values : dict, optional
        Variable -> its value inside the block.
    """
    cells = [(variable, variable.container.storage) for variable in variables]
    wholes = [storage[0] for _, storage in cells]
    try:
        for variable, storage in cells:
            given = variable in values
            storage[0] = values[variable] if given else copy.deepcopy(storage[0])
        yield
    finally:
        for (_, storage), whole in zip(cells, wholes):
            storage[0] = whole


def fixed_axes(variable):
    """Return for each axis of a variable whether its length is always 1 (it is broadcastable)."""
    return getattr(variable, "broadcastable", ())  # sparse ones have no such axes


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


def cast_value(variable, value):
    """Return a value as a NumPy array of a variable's dtype and number of dimensions.

    Raises Theano's exception if it can't be cast without loss. The caller checks the lengths of
    fixed axes.
    """
    plain = TensorType(variable.dtype, (False,) * variable.ndim)
    return np.asarray(plain.filter(value))


def is_array_variable(variable) -> bool:
    """Return whether a variable holds an array, of NumPy or on a device."""
    return isinstance(variable.type, TensorType) or lives_on_device(variable)


def lives_on_device(variable) -> bool:
    """Return whether the values of a variable are on a device; 0-d and complex ones seldom are."""
    return devices.is_device_type(variable.type)


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
    owner = getattr(update, "owner", None)
    return owner is not None and isinstance(owner.op, rng_mrg.mrg_uniform_base)
