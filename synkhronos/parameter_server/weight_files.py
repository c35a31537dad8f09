"""Files of weights and of updaters' states: npz without pickles, written whole or not at all.

    updater ──dump──▶ bytes of each server ──save_states──▶ run.npz
    updater ◀──restore── bytes of each server ◀──load_states── run.npz

The bytes have the form of the file, so a server can send its states to the worker that writes.
"""

from __future__ import annotations

import io
from typing import Any, Mapping, Sequence

import numpy as np

from synkhronos._machine.archives import reading, writing
from synkhronos._machine.files import new_file, npz_path
from synkhronos._wording import count
from synkhronos.parameter_server.updaters import Updater

_WEIGHTS, _STATES, _SERVER = "weights", "states of updaters", "states of one server"


def save_weights(path: Any, weights: Mapping[int | str, np.ndarray]) -> None:
    """Write the weights of all keys into a file, whose name ends with ``.npz``."""
    with new_file(npz_path(path)) as file:
        _write(file, _WEIGHTS, weights.values(), keys=list(weights))


def load_weights(path: Any) -> dict[int | str, np.ndarray]:
    """Return the weights in a file that `save_weights` has written, by key."""
    with reading(npz_path(path), _WEIGHTS) as (table, arrays):
        return dict(zip(table["keys"], _in_order(arrays, len(table["keys"]))))


def dump(updater: Updater) -> bytes:
    """Return the states that an updater keeps for its keys."""
    states = updater.states()
    keys = [[key, list(values)] for key, values in states.items()]
    arrays = [each for values in states.values() for each in values.values()]
    return _bytes_of(arrays, kind=updater.kind, keys=keys)


def restore(updater: Updater, data: bytes) -> None:
    """Set the states that `dump` has returned; if they don't fit, set none and raise ValueError."""
    with reading(io.BytesIO(data), _SERVER, "the data of a server") as (table, arrays):
        kind, keys = table["kind"], table["keys"]
        left = iter(_in_order(arrays, sum(len(names) for _, names in keys)))
        states = {key: {name: next(left) for name in names} for key, names in keys}
    if kind != updater.kind:
        raise ValueError(f"the states are those of {kind!r}, but this updater is {updater.kind!r}.")
    updater.set_states(states)


def save_states(path: Any, servers: Sequence[bytes]) -> None:
    """Write what `dump` has returned in each server into one file."""
    path, tables, all_arrays = npz_path(path), [], []
    for data in servers:
        with reading(io.BytesIO(data), _SERVER, "the data of a server") as (table, arrays):
            tables.append({"kind": table["kind"], "keys": table["keys"], "arrays": len(arrays)})
            all_arrays += _in_order(arrays, len(arrays))
    with new_file(path) as file:
        _write(file, _STATES, all_arrays, servers=tables)


def load_states(path: Any, servers: int = 1) -> list[bytes]:
    """Return the bytes that `restore` takes, for each server: the states of its parts of keys."""
    path, parts = npz_path(path), []
    with reading(path, _STATES) as (table, arrays):
        left = iter(_in_order(arrays, sum(each["arrays"] for each in table["servers"])))
        for each in table["servers"]:
            own = [next(left) for _ in range(each["arrays"])]
            parts.append(_bytes_of(own, kind=each["kind"], keys=each["keys"]))
    if len(parts) != servers:
        raise ValueError(
            f"{path!r} has the states of {count(len(parts), 'server')}, but there "
            f"{'is' if servers == 1 else 'are'} {servers}: each has those of its parts of the keys."
        )
    return parts


def _bytes_of(arrays, **table):
    file = io.BytesIO()
    _write(file, _SERVER, arrays, **table)
    return file.getvalue()


def _write(file, what, arrays, **table):
    with writing(file, what, **table) as written:
        for number, array in enumerate(arrays):
            written[f"{number}"] = array


def _in_order(arrays, number):
    """Return the arrays that `_write` has numbered."""
    if len(arrays) != number:
        raise ValueError(f"its table has {number} arrays, but there are {len(arrays)}")
    return [arrays[f"{each}"] for each in range(number)]
