"""The shared variables that a model and its functions hold, and flat arrays of their values."""

from __future__ import annotations

import collections
import functools
import inspect
import itertools
from typing import Any, Callable, Iterable, Mapping, Sequence

import numpy as np

from synkhronos import _host
from synkhronos._arithmetic.operations import wide

_OBJECTS = 200_000  # the most objects of a model that are searched


def variables_of(model: Any) -> list:
    """Return the shared variables that a model holds, or a compiled function that it holds.

    They are found in attributes, lists, dicts and objects of the model, in the same order on all
    ranks and in each run.
    """
    return _found_in(model)[0]


def updated_variables(model: Any) -> list:
    """Return the shared variables that the compiled functions of a model update."""
    return [each for function in _found_in(model)[1] for each in _host.updated_variables(function)]


def _found_in(model):
    """Return the shared variables and the compiled functions of a model."""
    variables, functions, seen, stack = {}, [], set(), [model]
    while stack and len(seen) < _OBJECTS:
        each = stack.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, _host.SharedVariable):
            variables[id(each)] = each
        elif isinstance(each, _host.CompiledFunction):
            functions.append(each)
            stack.extend(reversed(each.get_shared()))
        else:
            stack.extend(reversed(_parts(each)))
    return list(variables.values()), functions


def _parts(thing):
    if isinstance(thing, (list, tuple, set, frozenset, collections.deque)):
        return list(thing)
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, dict):
        return list(thing.values())
    if isinstance(thing, (_host.Variable, type, np.ndarray)) or inspect.ismodule(thing):
        return []
    if inspect.ismethod(thing):
        return [thing.__self__]
    if inspect.isfunction(thing):  # a closure may be the only place of a compiled function
        cells = thing.__closure__ or ()
        found = [cell.cell_contents for cell in cells if not _is_empty(cell)]
        return [*found, *(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()]
    return list(getattr(thing, "__dict__", {}).values())


def _is_empty(cell):
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def described(variables: Sequence[Any]) -> list[tuple]:
    """Return (name, dtype, shape, place) of each variable, which must be equal on all ranks.

    The place in the order in which the variables were made is None if the name is unique.

    >>> from synkhronos._host import library
    >>> one, other = library.shared(np.zeros(2), "one"), library.shared(np.zeros(2))
    >>> described([other, one])
    [(None, 'float64', (2,), 1), ('one', 'float64', (2,), None)]
    """
    made = [int(each.auto_name.partition("_")[2]) for each in variables]
    place = {number: at for at, number in enumerate(sorted(made))}
    n_named = collections.Counter(each.name for each in variables if each.name)
    return [
        (
            each.name,
            str(each.dtype),
            tuple(_host.peek(each).shape),
            None if n_named[each.name] == 1 else place[number],
        )
        for each, number in zip(variables, made)
    ]


def difference(
    own: Mapping[str, Any], other: Mapping[str, Any], other_rank: str, own_rank: str
) -> str:
    """Return a sentence about the first value that differs on another rank, or "".

    Lists are those of `described`.

    >>> difference({"n_epochs": 2}, {"n_epochs": 3}, "rank 1", "rank 0")
    'n_epochs is 2 on rank 0 and 3 on rank 1: all ranks must have the same.'
    """
    for name, one in own.items():
        two = other[name]
        if one == two:
            continue
        if not isinstance(one, list):
            return (
                f"{name} is {one} on {own_rank} and {two} on {other_rank}: all ranks must have the "
                "same."
            )
        if sorted(map(repr, one)) == sorted(map(repr, two)):
            return (
                f"{name} has another order on {own_rank} than on {other_rank}. Sets have one of "
                "their own in each process, and so have dicts that are filled from them: list the "
                "variables in the order of the layers, or sort them by their names."
            )
        pairs = list(itertools.zip_longest(one, two))
        at = next(at for at, pair in enumerate(pairs) if pair[0] != pair[1])
        first, second = map(_shown, pairs[at])
        return (
            f"{name}[{at}] is {first} on {own_rank}, but {second} on {other_rank}: all ranks must "
            "build the same model."
        )
    return ""


def _shown(each):
    if each is None:
        return "missing"
    name, dtype, shape, place = each
    shown = f"{name or 'a variable without a name'} of {dtype} {shape}"
    return shown if place is None else f"{shown}, number {place + 1} in the order of their making"


class Flat:
    """The values of several shared variables in one array for each dtype.

    On the host `write` makes each variable a view of an array: what is written into the array then
    is the variable's value, and a function that updates the variable in place needs no copy. If
    `sums` have a wider dtype than the variables, `write` makes rounded copies instead.

    `read` copies the values of `sources`, other variables of the same shapes, if they are given.
    ``allocate(size, dtype)`` returns the memory of an array. With `sums` the arrays have the dtypes
    in which sums are computed.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        sources: Sequence[Any] | None = None,
        allocate: Callable[[int, Any], np.ndarray] = np.empty,
        sums: bool = False,
    ) -> None:
        self._variables = list(variables)
        by_dtype: dict[np.dtype, list] = {}
        for variable in self._variables:
            dtype = np.dtype(variable.dtype)
            dtype = wide(dtype) if sums else dtype
            by_dtype.setdefault(dtype, []).append(variable)
        self.arrays: list[np.ndarray] = []
        views: dict[int, np.ndarray] = {}
        for dtype, group in by_dtype.items():
            shapes = [_host.peek(variable).shape for variable in group]
            sizes = [int(np.prod(shape)) for shape in shapes]
            array = allocate(sum(sizes), dtype)
            for variable, view, shape in zip(group, np.split(array, np.cumsum(sizes)[:-1]), shapes):
                views[id(variable)] = view.reshape(shape)
            self.arrays.append(array)
        self._views = [views[id(variable)] for variable in self._variables]
        # Cells and devices of variables never change, and each step needs them.
        self._targets = [_cell_and_device(each) for each in self._variables]
        self._sources = self._targets if sources is None else [*map(_cell_and_device, sources)]

    def read(self) -> list[np.ndarray]:
        """Copy the values of the variables, or of the sources, into the arrays."""
        for (cell, is_on_device), view in zip(self._sources, self._views):
            if is_on_device:
                _host.copy_from_device(cell[0], view)
            elif cell[0] is not view:
                np.copyto(view, cell[0])
        return self.arrays

    def write(self) -> None:
        """Give the variables the values of the arrays: as views on the host, else as copies."""
        for variable, (cell, is_on_device), view in zip(
            self._variables, self._targets, self._views
        ):
            if is_on_device:
                _host.replace(variable, view)
            else:
                cell[0] = view.astype(variable.dtype, copy=False)

    def set(self, arrays: Iterable[np.ndarray]) -> None:
        """Give the variables the values of other arrays; those without one keep theirs."""
        for own, array in zip(self.read(), arrays):
            own[...] = array
        self.write()

    def detach(self) -> None:
        """Give the variables arrays of their own."""
        for (cell, _), view in zip(self._targets, self._views):
            if cell[0] is view:
                cell[0] = view.copy()


def _cell_and_device(variable):
    """Return the cell of a variable's value, and whether that is on a device."""
    return _host.cell(variable), _host.lives_on_device(variable)
