"""Shared variables' storage cells: the values in them, and those that watch them.

    variable ──▶ container ──▶ storage, a list ──▶ value         compiled functions read the storage
                     └─ watched: tells when a script sets or reads the value

A value is put into the cell as it is; `replace` of a host casts it, or copies it to a device.
"""

import contextlib
import copy
import copyreg
import functools


def peek(variable):
    """Return a shared variable's own value, not a copy."""
    return variable.container.storage[0]


def cell(variable) -> list:
    """Return the list whose one item is a shared variable's value, always the same list."""
    return variable.container.storage


def replace_object(variable, value) -> None:
    """Make `value` the value of a shared variable that holds no array, such as a random state."""
    variable.container.storage[0] = variable.type.filter(value)


def put(variable, anything) -> None:
    """Put an object into a shared variable's cell: no check, no copy, and no watcher is told."""
    variable.container.storage[0] = anything


def read(variable):
    """Return a shared variable's own value; those that watch it are told."""
    return variable.container.value


class _Watched:
    """A container that tells when a script sets or reads its value; the package uses `storage`."""

    plain_class: type  # the host library's class of containers

    def _get(self):
        for _, on_read in self.watchers:
            if on_read is not None:
                on_read(self.storage[0])
        return self.storage[0]  # a watcher may have put the current value there

    def _set(self, value):
        self.plain_class.__set__(self, value)
        for on_set, _ in self.watchers:
            on_set()

    data = value = property(_get, _set)

    def plain(self):
        """Return a container without the watch, of the same cell."""
        plain = self.plain_class.__new__(self.plain_class)
        plain.__dict__.update(self.__dict__)
        del plain.watchers
        return plain

    def __reduce_ex__(self, protocol):
        # The reader of the pickle needs the host library only.
        return copyreg._reconstructor, (self.plain_class, object, None), self.plain().__dict__

    def __deepcopy__(self, memo):
        return self.plain().__deepcopy__(memo)


@functools.lru_cache(maxsize=None)
def _watched(plain_class):
    """Return a class of containers, with a watch."""
    return type(_Watched.__name__, (_Watched, plain_class), {"plain_class": plain_class})


def watch(variable, on_set, on_read=None) -> None:
    """Call ``on_set()`` when the script sets a shared variable, ``on_read(value)`` when it reads.

    It sees ``set_value``, ``get_value`` and ``container.value``; not compiled functions, and not
    writes to a borrowed array.
    """
    container = variable.container
    if isinstance(container, _Watched):
        # Several variables may have one container: Lasagne and Theano clone variables so.
        container.watchers = (*container.watchers, (on_set, on_read))
    else:
        container.watchers = ((on_set, on_read),)
        container.__class__ = _watched(type(container))


def unwatch(variable) -> None:
    """Undo `watch`."""
    container = variable.container
    if isinstance(container, _Watched):
        container.__class__ = container.plain_class
        del container.watchers


def tell(variable) -> None:
    """Call what `watch` was given, for a value that a compiled function has set."""
    container = variable.container
    for on_set, _ in container.watchers if isinstance(container, _Watched) else ():
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
