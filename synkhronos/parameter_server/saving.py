"""Files of weights, and of the states of updaters: npz without pickles, complete or not there.

    updater ──dump──▶ bytes of each server ──save_states──▶ run.npz
    updater ◀──restore── bytes of each server ◀──load_states── run.npz

The bytes have the form of the file, so a server can send its states to the worker that writes. The
table of contents is JSON.
"""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any, Mapping, Sequence

import numpy as np

from synkhronos._machine.files import NewFile, npz_path
from synkhronos._wording import count, one_line, sentence
from synkhronos.parameter_server.updaters import Updater

_VERSION = 1
_ABOUT = "about"
_WEIGHTS, _STATES, _SERVER = "weights", "states of updaters", "states of one server"


def save_weights(path: Any, weights: Mapping[int | str, np.ndarray]) -> None:
    """Write the weights of all keys into a file.

    Parameters
    ----------
    path : str or path
        It ends with ``.npz``.
    weights : dict of key -> numpy.ndarray

    Examples
    --------
    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "weights.npz")
    >>> save_weights(path, {"bias": np.ones(2)})
    >>> load_weights(path, {"bias": ((2,), "float64")})
    {'bias': array([1., 1.])}
    """
    path = npz_path(path)
    keys = list(weights)
    with NewFile(path) as file:
        _write(file, _WEIGHTS, {"keys": keys}, list(weights.values()))


def load_weights(
    path: Any, expected: Mapping[int | str, tuple] | None = None
) -> dict[int | str, np.ndarray]:
    """Return the weights in a file that `save_weights` has written.

    Parameters
    ----------
    path : str or path
    expected : dict of key -> (shape, dtype), optional
        The keys that the store has.

    Raises
    ------
    OSError
        If the file can't be read.
    ValueError
        If it is damaged or of another kind, or has other keys, shapes or dtypes.
    """
    path = npz_path(path)
    with open(path, "rb") as file:
        weights = _read(file, repr(path), _WEIGHTS, _weights_of)
    if expected is None:
        return weights
    if set(weights) != set(expected):
        raise ValueError(
            f"{path!r} has weights of other keys than the store: {_difference(weights, expected)}."
        )
    for key, (shape, dtype) in expected.items():
        there = weights[key]
        if there.shape != tuple(shape) or there.dtype != np.dtype(dtype):
            raise ValueError(
                f"{path!r} has a weight of shape {there.shape} and dtype {there.dtype} for key "
                f"{key!r}, but the store was given {tuple(shape)} and {np.dtype(dtype)}."
            )
    return weights


def dump(updater: Updater) -> bytes:
    """Return the states that an updater keeps for its keys."""
    file, states = io.BytesIO(), updater.states()
    about = {
        "kind": updater.kind,
        "keys": [[key, list(values)] for key, values in states.items()],
    }
    _write(file, _SERVER, about, [each for values in states.values() for each in values.values()])
    return file.getvalue()


def restore(updater: Updater, data: bytes) -> None:
    """Give an updater the states that `dump` has returned.

    Raises
    ------
    ValueError
        If they are of another kind of updater, or of other keys or shapes. Then none is set.
    """
    kind, states = _read(io.BytesIO(data), "the states", _SERVER, _states_of)
    if kind != updater.kind:
        raise ValueError(f"the states are those of {kind!r}, but this updater is {updater.kind!r}.")
    updater.set_states(states)


def save_states(path: Any, servers: Sequence[bytes]) -> None:
    """Write what `dump` has returned in each server into one file.

    Examples
    --------
    >>> import os, tempfile
    >>> from synkhronos.parameter_server.updaters import rule_updater
    >>> from synkhronos.extensions.update_rules import momentum
    >>> updater = rule_updater(momentum, learning_rate=0.5)
    >>> updater.init_model("bias", np.zeros(2))
    >>> updater.update("bias", np.ones(2))
    >>> path = os.path.join(tempfile.mkdtemp(), "states.npz")
    >>> save_states(path, [dump(updater)])
    >>> updater.update("bias", np.ones(2))
    >>> restore(updater, load_states(path)[0])
    >>> updater.states()["bias"]
    {'0 bias_velocity': array([-0.5, -0.5])}
    """
    path, tables, arrays = npz_path(path), [], []
    for data in servers:
        table, found = _read(io.BytesIO(data), "the states of a server", _SERVER, _table_of)
        tables.append({**table, "arrays": len(found)})
        arrays += found
    with NewFile(path) as file:
        _write(file, _STATES, {"servers": tables}, arrays)


def load_states(path: Any, servers: int = 1) -> list[bytes]:
    """Return for each server what `restore` takes.

    Raises
    ------
    OSError
        If the file can't be read.
    ValueError
        If it is damaged or of another kind, or was written with another number of servers: each
        has the states of its parts of the keys.
    """
    path = npz_path(path)
    with open(path, "rb") as file:
        parts = _read(file, repr(path), _STATES, _parts_of)
    if len(parts) != servers:
        raise ValueError(
            f"{path!r} has the states of {count(len(parts), 'server')}, but there "
            f"{'is' if servers == 1 else 'are'} {servers}: each has those of its parts of the keys."
        )
    return parts


def _weights_of(about, arrays):
    return dict(_pairs(about["keys"], arrays))


def _states_of(about, arrays):
    names = [(key, name) for key, each in about["keys"] for name in each]
    states = {key: {} for key, _ in about["keys"]}
    for (key, name), array in _pairs(names, arrays):
        states[key][name] = array
    return about["kind"], states


def _table_of(about, arrays):
    return {"kind": about["kind"], "keys": about["keys"]}, arrays


def _parts_of(about, arrays):
    parts, left = [], iter(arrays)
    for table in about["servers"]:
        file = io.BytesIO()
        mine = [next(left) for _ in range(table.pop("arrays"))]
        _write(file, _SERVER, table, mine)
        parts.append(file.getvalue())
    return parts


def _pairs(names, arrays):
    if len(names) != len(arrays):
        raise ValueError(f"its table has {len(names)} arrays, but there are {len(arrays)}")
    return zip(names, arrays)


def _write(file, what, about, arrays):
    """Write a table of contents and arrays, one after the other: no list keeps copies of all."""
    table = json.dumps({"version": _VERSION, "what": what, **about})
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        _write_array(archive, _ABOUT, np.array(table))
        for number, array in enumerate(arrays):
            _write_array(archive, f"{number}", np.asarray(array))


def _write_array(archive, name, array):
    with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
        np.lib.format.write_array(file, array, allow_pickle=False)


def _read(file, name, what, build):
    """Return ``build(table of contents, arrays)``; every array is read, so a damage is found."""
    try:
        found = np.load(file, allow_pickle=False)
        if not isinstance(found, np.lib.npyio.NpzFile) or _ABOUT not in found.files:
            raise ValueError("it has no table of contents")
        about = json.loads(str(found[_ABOUT]))
        if about["version"] != _VERSION:
            raise ValueError(f"it is of version {about['version']}, this is {_VERSION}")
        there = about["what"]
        if there == what:
            arrays = [found[str(number)] for number in range(len(found.files) - 1)]
            return build(about, arrays)
    except OSError:
        raise
    except Exception as error:
        # Damages raise errors of many kinds, of zipfile, zlib, json and NumPy.
        raise ValueError(
            f"{name} can't be read: it is damaged, or was not written by a store: {sentence(error)}"
        ) from error
    raise ValueError(f"{name} has {one_line(there)}, not {what}.")


def _difference(there, here):
    lacks = [repr(key) for key in here if key not in there]
    more = [repr(key) for key in there if key not in here]
    parts = [f"it lacks {', '.join(lacks)}"] if lacks else []
    parts += [f"the store lacks {', '.join(more)}"] if more else []
    return ", ".join(parts)
