"""Checks of the arguments of stores: they raise in the caller's thread, and change nothing."""

from __future__ import annotations

import inspect
from typing import Any, Callable, Sequence

import numpy as np

from synkhronos import _wording
from synkhronos.parameter_server.operands import operand_of
from synkhronos.parameter_server.reductions import NUMBERS
from synkhronos.parameter_server.rounds import LOWEST, Key, plane


def name_of(key: Any) -> int | str:
    """Return a key as a str or an int; raise for anything else."""
    if isinstance(key, str):
        try:
            key.encode()
        except UnicodeEncodeError:
            raise ValueError(f"key must be a text that UTF-8 has, got {key!r}.") from None
        return key
    if _wording.is_bool(key) or not isinstance(key, (int, np.integer)):
        raise TypeError(f"key must be an int or a str, got {_wording.shown(key)}.")
    return int(key)


def priority_of(priority: Any) -> int:
    """Return an argument `priority` as an int."""
    if type(priority) is int and priority >= LOWEST:
        return priority
    return _wording.whole_number("priority", priority, LOWEST)


def devices_of(devices: Any) -> list[int]:
    """Return an argument `devices` as a list of distinct numbers from 0."""
    if isinstance(devices, (str, bytes)) or not hasattr(devices, "__iter__"):
        raise TypeError(
            f"devices must be a list of integers, got {_wording.shown(devices)}; a key needs a "
            "value, too."
        )
    numbers = [_wording.whole_number("a device", each, 0) for each in devices]
    if not numbers:
        raise ValueError("devices must name at least one device, got an empty list.")
    twice = sorted({each for each in numbers if numbers.count(each) > 1})
    if twice:
        raise ValueError(
            f"devices must be distinct, got {numbers}: a round would wait for ever for the "
            f"second device {twice[0]}."
        )
    return numbers


def values_of(value: Any, key: Key, writes: bool = False) -> list[Any]:
    """Return the array or arrays that one caller pushes to a key, as a list for the engine."""
    arrays = value if isinstance(value, (list, tuple)) else [value]
    if not arrays:
        raise ValueError(f"value of key {key.name!r} must have at least one array.")
    if key.op == "gather" and len(arrays) != key.n_devices:
        raise ValueError(
            f"value of key {key.name!r} must have {_wording.count(key.n_devices, 'array')} to "
            f"gather, one for each device, got {len(arrays)}."
        )
    return _fitting(arrays, key, key.shape, "value", writes)


def targets_of(out: Any, key: Key) -> list[Any]:
    """Return the array or arrays that get the result of a key, as a list for the engine."""
    arrays = out if isinstance(out, (list, tuple)) else [out]
    return _fitting(arrays, key, key.result_shape, "out", writes=True)


def _fitting(values, key, shape, name, writes):
    """Return values as arrays or operands; raise if one does not fit the key."""
    arrays = []
    for value in values:
        is_plain = type(value) is np.ndarray and (value.flags.writeable or not writes)
        array = value if is_plain else operand_of(value, name, writes)
        if array.shape != shape or array.dtype != key.dtype:
            refuse_array(name, array, key, shape, None)
        arrays.append(array)
    return arrays


def refuse_array(call: str, array: Any, key: Key, shape: tuple, device: int | None) -> None:
    """Raise for an array of another dtype, size or last axis than a key has."""
    of = "" if device is None else f" of device {device}"
    if array.dtype != key.dtype:
        raise TypeError(
            f"{call}{of}: key {key.name!r} has {key.dtype}, but the array has {array.dtype}."
        )
    if plane(tuple(array.shape)) != plane(tuple(shape)):
        raise ValueError(
            f"{call}{of}: key {key.name!r} takes arrays of shape {tuple(shape)}, but the array "
            f"has {tuple(array.shape)}."
        )


def by_key(key: Any, **arguments: Any) -> list[Sequence[Any]]:
    """Return a list of the keys, and each argument as a list with one entry for each key."""
    is_list = isinstance(key, (list, tuple))
    names = [name_of(each) for each in key] if is_list else [name_of(key)]
    if len(set(names)) < len(names):
        raise ValueError(f"key must name each key once, got {_wording.shown(key)}.")
    lists: list[Sequence[Any]] = [names]
    for name, value in arguments.items():
        values = value if is_list else [value]
        if not isinstance(values, (list, tuple)):
            raise TypeError(
                f"{name} must be a list, with an entry for each of the "
                f"{_wording.count(len(names), 'key')}, got {_wording.shown(values)}."
            )
        if len(values) != len(names):
            raise ValueError(
                f"{name} must have an entry for each of the {_wording.count(len(names), 'key')}, "
                f"got {len(values)}."
            )
        lists.append(values)
    return lists


def dtype_of(dtype: Any) -> np.dtype:
    """Return an argument `dtype` as a dtype of numbers."""
    try:
        numbers = np.dtype(dtype)
    except TypeError:
        raise TypeError(f"dtype must be a dtype, got {_wording.shown(dtype)}.") from None
    if numbers.kind not in NUMBERS:
        raise TypeError(f"dtype must be one of numbers, got {numbers}.")
    return numbers


def callback_of(callback: Any, array: Any) -> Callable[[], Any]:
    """Return a callback as a function without arguments."""
    if not callable(callback):
        raise TypeError(f"callback must be callable, got {_wording.shown(callback)}.")
    try:
        inspect.signature(callback).bind()
    except ValueError:  # some builtins have no signature
        return callback
    except TypeError:
        try:
            inspect.signature(callback).bind(array)
        except TypeError:
            raise TypeError(
                f"callback must take no argument, or the array, got {_wording.shown(callback)}."
            ) from None
        return lambda: callback(array)
    return callback
