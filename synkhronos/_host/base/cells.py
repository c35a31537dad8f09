"""Storage cells of shared variables: the values in them, and callbacks that watch them.

    variable ──▶ container ──▶ storage, a list ──▶ value         compiled functions read the storage
                     └─ watched: calls back if a script sets or reads the value, or takes the cell

Here a value is put into the cell as it is; a host's `replace` casts it, or copies it to a device.
"""

import contextlib
import copy
import copyreg
import functools
import gc
import sys

import numpy as np

from synkhronos._host.base import chosen_library as host

# Arrays of JAX can't be written, and most functions take NumPy's: scripts get copies.
_for_scripts = getattr(host, "for_scripts", lambda value: value)


def peek(variable):
    """Return a shared variable's own value, not a copy."""
    return variable.container.__dict__["storage"][0]


def cell(variable) -> list:
    """Return the list whose one item is a shared variable's value, always the same list."""
    return variable.container.__dict__["storage"]


def replace_object(variable, value) -> None:
    """Make `value` the value of a shared variable that holds no array, such as a random state."""
    cell(variable)[0] = variable.type.filter(value)


def put(variable, anything) -> None:
    """Put an object into a shared variable's cell, without check, copy or callback."""
    cell(variable)[0] = anything


def read(variable):
    """Return a shared variable's own value, after its watchers' callbacks."""
    return variable.container.value


class _Watched:
    """A container that calls back if a script sets or reads its value, or takes its cell."""

    plain_class: type  # the host library's class of containers

    def _get(self):
        storage = self.__dict__["storage"]
        for _, on_read, _ in self.watchers:
            if on_read is not None:
                on_read(storage[0])
        return _for_scripts(storage[0])  # a watcher may have put the current value there

    def _set(self, value):
        self.plain_class.__set__(self, value)
        for on_set, _, _ in self.watchers:
            on_set()

    data = value = property(_get, _set)

    @property
    def storage(self):
        """The cell. Host libraries compile functions with it; a script may set its item."""
        module = sys._getframe(1).f_globals.get("__name__", "")
        if module.partition(".")[0] not in ("theano", "pytensor", "synkhronos"):
            for _, _, on_take in self.watchers:
                if on_take is not None:
                    on_take()
        return self.__dict__["storage"]

    def plain(self):
        """Return a container of the same cell, without watchers."""
        plain = self.plain_class.__new__(self.plain_class)
        plain.__dict__.update(self.__dict__)
        del plain.watchers
        return plain

    def __reduce_ex__(self, protocol):
        # So whoever reads the pickle needs only the host library.
        return copyreg._reconstructor, (self.plain_class, object, None), self.plain().__dict__

    def __deepcopy__(self, memo):
        return self.plain().__deepcopy__(memo)


@functools.lru_cache(maxsize=None)
def _watched(plain_class):
    """Return the watched class for a host library's class of containers."""
    return type(_Watched.__name__, (_Watched, plain_class), {"plain_class": plain_class})


def watch(variable, on_set, on_read=None, on_take=None) -> None:
    """Call back when the script sets or reads a shared variable, or takes ``container.storage``.

    Compiled functions, and writes to a borrowed array, call nothing.
    """
    container = variable.container
    if isinstance(container, _Watched):
        # Clones of a variable, such as Lasagne's, share its container.
        container.watchers = (*container.watchers, (on_set, on_read, on_take))
    else:
        container.watchers = ((on_set, on_read, on_take),)
        container.__class__ = _watched(type(container))


def borrows(variable, known=0) -> bool:
    """Return whether more than `known` references of the caller lead to a variable's memory."""
    value = peek(variable)
    if _for_scripts(value) is not value:
        return False
    while isinstance(value, np.ndarray):
        known += 3  # `value`, getrefcount's argument, and the cell or the view
        if sys.getrefcount(value) > known:
            # Cells of compiled functions, which keep results, don't count.
            referrers = gc.get_referrers(value)
            n_cells = sum(isinstance(each, list) and len(each) == 1 for each in referrers)
            del referrers
            if sys.getrefcount(value) > known + max(0, n_cells - 1):
                return True
        value, known = value.base, 0
    return not isinstance(value, (bytes, type(None)))  # a buffer may have other views


def unwatch(variable) -> None:
    """Undo `watch`, and leave the variable a value that scripts can use."""
    container = variable.container
    if isinstance(container, _Watched):
        put(variable, _for_scripts(peek(variable)))
        container.__class__ = container.plain_class
        del container.watchers


def tell(variable) -> None:
    """Call the watchers' `on_set`: the value in the master may have changed."""
    container = variable.container
    for on_set, _, _ in container.watchers if isinstance(container, _Watched) else ():
        on_set()


@contextlib.contextmanager
def lend(variable, rows):
    """Let a shared variable hold some of its rows in a with block, unless it is updated there."""
    storage = cell(variable)
    whole = storage[0]
    storage[0] = rows
    try:
        yield
    finally:
        if storage[0] is rows:
            storage[0] = whole


@contextlib.contextmanager
def on_copies(variables, values=()):
    """Let shared variables hold copies of their values, or those in `values`, in a with block."""
    cells = [(variable, cell(variable)) for variable in variables]
    wholes = [storage[0] for _, storage in cells]
    try:
        for variable, storage in cells:
            storage[0] = values[variable] if variable in values else copy.deepcopy(storage[0])
        yield
    finally:
        for (_, storage), whole in zip(cells, wholes):
            storage[0] = whole
