"""Shared variables of PyTensor: their types, and the values in their storage cells."""

import contextlib
import copy
import copyreg

import numpy as np
import pytensor
from pytensor import tensor
from pytensor.link.basic import Container
from pytensor.tensor.random.type import RandomType
from pytensor.tensor.type import DenseTensorType, TensorType


def peek(variable):
    """Return a shared variable's own value, not a copy."""
    return variable.container.storage[0]


def cell(variable) -> list:
    """Return the list whose one item is a shared variable's value, always the same list."""
    return variable.container.storage


def replace(variable, value) -> None:
    """Make `value` the value of a shared variable, cast to its dtype, with no copy."""
    variable.container.storage[0] = np.asarray(value, dtype=variable.dtype)


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
        # The reader of the pickle needs PyTensor only.
        return copyreg._reconstructor, (Container, object, None), self.plain().__dict__

    def __deepcopy__(self, memo):
        return self.plain().__deepcopy__(memo)


def watch(variable, on_set, on_read=None) -> None:
    """Call ``on_set()`` when the script sets a shared variable, ``on_read(value)`` when it reads.

    It sees ``set_value``, ``get_value`` and ``container.value``; not compiled functions, and not
    writes to a borrowed array.
    """
    container = variable.container
    # Several variables may have one container: clones of a variable do.
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
    return tuple(length == 1 for length in lengths(variable))


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


def cast_value(variable, value):
    """Return a value as a NumPy array of a variable's dtype and number of dimensions.

    Raises PyTensor's exception if it can't be cast without loss. The caller checks the lengths of
    fixed axes.
    """
    plain = TensorType(variable.dtype, shape=(None,) * variable.ndim)
    return np.asarray(plain.filter(value))


def is_array_variable(variable) -> bool:
    """Return whether a variable holds an array of NumPy."""
    return isinstance(variable.type, DenseTensorType)


def lives_on_device(variable) -> bool:
    """Return False: all values are on the host."""
    return False


def on_host(variable):
    """Return the variable, whose values are on the host."""
    return variable


def on_device(variable):
    """Return the variable: this host has no devices."""
    return variable


def is_random_state(variable) -> bool:
    """Return whether a shared variable holds a random generator."""
    return isinstance(variable.type, RandomType)
