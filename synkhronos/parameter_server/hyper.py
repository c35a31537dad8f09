"""Hyperparameters: the script changes its copy of an updater; the copy at the weights follows.

    script's copy           updater.hyper_values() ── if changed ──▶ HyperChanges.change   at a push
    where the weights are   HyperChanges.use ──▶ updater.assign_hyper              before an update

A change counts for each key's rounds that close after it.
"""

from __future__ import annotations

import dis
import functools
import inspect
import threading
import types
from typing import Any, Callable, Iterator, Mapping, NamedTuple

import numpy as np

from synkhronos import _host
from synkhronos._host.choice import is_imported
from synkhronos._wording import shown

_PLAIN = (bool, int, float, complex, str, type(None), np.generic)
_SMALL = 4096  # elements; a larger array has changed only if it is another object


class Hyperparameter(NamedTuple):
    """A value that a script may change, and the function that sets it."""

    value: Any
    write: Callable[[Any], None]


def attributes_of(thing: Any, without: frozenset[str] = frozenset()) -> dict[str, Hyperparameter]:
    """Return the followed attributes of an object and of its class, but those in `without`."""
    names = [name for kind in type(thing).__mro__ for name in vars(kind)]
    names += getattr(thing, "__dict__", {})
    wanted = [n for n in dict.fromkeys(names) if n not in without and not n.startswith("__")]
    found = {name: inspect.getattr_static(thing, name) for name in wanted}
    return {
        name: Hyperparameter(value, functools.partial(setattr, thing, name))
        for name, value in found.items()
        if is_followed(value)
    }


def outside_of(function: Any) -> dict[str, Hyperparameter]:
    """Return the outer variables that a function, and functions that it calls, read.

    They are global variables, those of enclosing functions, and attributes of a method's object.
    """
    result: dict[str, Hyperparameter] = {}
    seen, stack = set(), [function]
    while stack:
        thing = stack.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if inspect.ismethod(thing):
            stack += [thing.__self__, thing.__func__]
        elif not inspect.isfunction(thing):
            result = {**attributes_of(thing), **result}
        else:
            outer = dict(_cells_and_globals(thing))
            stack += [p.value for p in outer.values() if inspect.isfunction(p.value)]
            result = {**{n: p for n, p in outer.items() if is_followed(p.value)}, **result}
    return result


def _cells_and_globals(function) -> Iterator[tuple[str, Hyperparameter]]:
    known = function.__globals__
    for name in _global_names(function.__code__):
        if name in known:
            yield name, Hyperparameter(known[name], functools.partial(known.__setitem__, name))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            value = cell.cell_contents
        except ValueError:  # it has no value yet
            continue
        yield name, Hyperparameter(value, functools.partial(setattr, cell, "cell_contents"))


@functools.lru_cache(maxsize=256)
def _global_names(code):
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    own = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    return own.union(*map(_global_names, inner))


def is_followed(value: Any) -> bool:
    """Return whether a change of a value is noticed: a number, text, small array or tuple of them.

    >>> is_followed(0.1), is_followed((0.9, 0.999)), is_followed({"rate": 0.1})
    (True, True, False)
    """
    if is_shared(value):
        return _host.is_array_variable(value)
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biufc" and value.size <= _SMALL
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(map(is_followed, value)))


def is_shared(value: Any) -> bool:
    """Return whether a value is a shared variable."""
    return is_imported() and isinstance(value, _host.SharedVariable)


def copy_of(value: Any) -> Any:
    """Return a copy of the present value of a hyperparameter."""
    if is_shared(value):
        value = _host.to_host(_host.peek(value))
    is_small = isinstance(value, np.ndarray) and value.size <= _SMALL
    return value.copy() if is_small else value


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values of a hyperparameter are equal.

    >>> is_same(0.1, 0.1), is_same(1, 1.0), is_same(np.zeros(2), np.zeros(2))
    (True, False, True)
    """
    if one is other or type(one) is not type(other):
        return one is other
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other


def set_shared(name: str, variable: Any, value: Any) -> None:
    """Set a shared variable; raise TypeError if the value does not fit its dtype and axes."""
    try:
        array = np.asarray(value)
        new = array.astype(variable.dtype)
        is_lost = new.dtype.kind in "biu" and not np.array_equal(new, array)
        if new.ndim != variable.ndim or is_lost:
            raise TypeError
    except (TypeError, ValueError):
        raise TypeError(
            f"{name} is {variable}, a shared variable of {variable.dtype} with {variable.ndim} "
            f"axes: it can't have the value {shown(value)}."
        ) from None
    variable.set_value(new)


class HyperChanges:
    """The script's changes to an updater, and the first round of each key for which each counts.

    Keys and rounds (`version`) are numbers. `use` is called before each update; another thread may
    call `change`.
    """

    def __init__(self, updater: Any, values: Mapping[str, Any]) -> None:
        self._updater, self._first_values = updater, values
        self._used: dict[str, Any] = {}
        self._changes: list[tuple[Mapping[int, int], dict[str, Any]]] = [({}, self._used)]
        self._lock = threading.Lock()

    def change(
        self, first: Mapping[int, int], values: Mapping[str, Any], done: Mapping[int, int]
    ) -> None:
        """Add values for rounds from ``first[key]`` on; those up to ``done[key]`` are updated."""
        values = {name: copy_of(value) for name, value in values.items()}
        with self._lock:
            for name in values:
                for _, before in self._changes:
                    before.setdefault(name, self._first_values.get(name))
            self._changes.append((first, {**self._changes[-1][1], **values}))
            while len(self._changes) > 1 and all(
                begin <= done.get(number, 0) + 1 for number, begin in self._changes[1][0].items()
            ):
                del self._changes[0]

    def use(self, number: int | None, version: int | None) -> None:
        """Set the updater's values to those for a round of a key; with None to the newest."""
        if len(self._changes) == 1 and self._changes[0][1] is self._used:
            return
        with self._lock:
            values = self._changes[0][1]
            for first, later in self._changes[1:]:
                if version is None or number is None or first.get(number, 0) <= version:
                    values = later
        if values is self._used:
            return
        new = {n: v for n, v in values.items() if not is_same(v, self._used.get(n, HyperChanges))}
        self._updater.assign_hyper(new)
        self._used = values
