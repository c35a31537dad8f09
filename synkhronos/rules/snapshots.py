"""Snapshots: all that a run needs to go on as if it had not been stopped.

    each rank    shared variables, random states, what has changed in model and data, recorder
      ──▶ rank 0, which writes what is equal on all ranks once
      ──▶ a file without a name ──▶ snapshot_0004.npz       written, fsynced, named

Folders of Theano-MPI, which have a file for each weight, are read too.
"""

from __future__ import annotations

import collections
import collections.abc
import hashlib
import inspect
import itertools
import json
import os
import random
import re
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from synkhronos import _host
from synkhronos._machine.archives import damage_told, load_npy, reading, writing
from synkhronos._machine.files import new_file, remove_left
from synkhronos._machine.plain_values import decode, encode
from synkhronos._wording import sentence
from synkhronos.parameter_server.group.interface import Group
from synkhronos.rules.model_variables import described, updated_variables, variables_of
from synkhronos.rules.recorder import Recorder

_WHAT = "a snapshot"
_LARGE = 1 << 20  # bytes: of larger arrays only a sample is compared
_SMALL_SHARED = 1 << 16  # bytes: larger shared variables that no function updates are data
_KINDS = {"rule": str, "epoch": int, "batch": int, "count": (int, float), "more": dict}
_OBJECTS = 10_000  # the most objects of a model whose attributes are kept
_OF_PYTHON = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = {"site-packages", "dist-packages"}  # folders of libraries
_CONTAINERS = (list, tuple, dict, set, collections.deque, bytearray)
_RANDOM = (np.random.RandomState, np.random.Generator, random.Random)
_OF_RUN = {"rank", "size", "verbose", "n_epochs", "sync_type"}


@dataclass
class RankState:
    """One rank's state: arrays by name, and the rest as values of JSON."""

    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    file: str = "the snapshot"  # for messages

    @property
    def left_out(self) -> list[str]:
        """The names of attributes of the model that the file could not hold."""
        return [name for name in self.plain.get("left_out", ()) if isinstance(name, str)]


@dataclass
class Snapshot:
    """A run between two batches."""

    rule: str | None  # None for the files of Theano-MPI
    epoch: int
    batch: int
    count: float  # batches of all ranks before this epoch
    more: dict[str, Any]
    states: list[RankState]

    def state_of(self, rank: int) -> RankState:
        """Return the state of a rank; that of rank 0 for a rank that the file does not have."""
        return self.states[rank if rank < len(self.states) else 0]


class History:
    """The state of a model that changes while it trains.

    It is made before the first batch: attributes that change later are state.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._variables = _kept_variables(model)
        self.lost: list[str] = []  # attributes of a restored state whose object does not exist
        self._first, self._others = {}, {}
        for name, value in _attributes(model):
            # A file holds data, and replaces data only: no function, shared variable or property.
            found = _fingerprint(value)
            if found is None:
                self._others[name] = _rough_fingerprint(value)
            else:
                self._first[name] = found

    def capture(self, recorder: Any) -> RankState:
        """Return the present state."""
        state = RankState()
        described = []
        for number, variable in enumerate(self._variables):
            name = f"variable/{number}"
            kind, value = _describe(variable), _host.peek(variable)
            value = value if kind is None else np.asarray(_host.to_host(value))
            state.plain[name] = encode(value, state.arrays, name)
            described.append([variable.name, kind])
        state.plain["variables"] = described
        numbers = {id(variable): number for number, variable in enumerate(self._variables)}
        state.plain["params"] = [numbers[id(each)] for each in self._model.params]
        state.plain["made"] = _names_and_places(self._model.params)
        changed, left_out = {}, []
        for name, value in _attributes(self._model):
            found = _fingerprint(value)
            if found is None:
                now = _rough_fingerprint(value)
                if _has_position(value) or self._others.get(name, now) != now:
                    left_out.append(f"{name} ({type(value).__name__})")
            if found is None or name in self._others or self._first.get(name) == found:
                continue
            if "[" in name:
                left_out.append(name)
            else:
                changed[name] = encode(value, state.arrays, f"attribute/{name}")
        state.plain["left_out"] = [name.replace("model.", "", 1) for name in left_out]
        # Copies: the model trains on while other ranks still receive this state.
        state.arrays = {name: np.array(array) for name, array in state.arrays.items()}
        state.plain["attributes"] = changed
        version, _, gauss = random.getstate()
        state.plain["numpy"] = encode(np.random.mtrand._rand, state.arrays, "random/numpy")
        state.arrays["random/python"] = np.array(random.getstate()[1], np.uint64)
        state.plain["python"] = [version, gauss]
        state.plain["recorder"] = recorder.state()
        return state

    def restore(
        self, state: RankState, recorder: Any, settings: dict[str, Any], is_own: bool = True
    ) -> None:
        """Give the model and this process a state; raise ValueError for that of another model.

        Attributes that new `settings` of this run have set stay. `is_own` says whether this rank
        has written the state: only then it gets the random numbers, too.
        """
        self._refuse_order(state)
        described = [[each.name, _describe(each)] for each in self._variables]
        with damage_told(state.file, _WHAT):
            kept = [[name, kind] for name, kind in state.plain["variables"]]
        for at, (there, here) in enumerate(itertools.zip_longest(kept, described)):
            if there is None or here is None or there[1] != here[1]:
                raise ValueError(
                    f"{state.file} is of another model: shared variable {at} is "
                    f"{there or 'nothing'} there, and {here or 'nothing'} in "
                    f"{type(self._model).__name__}."
                )
        with damage_told(state.file, _WHAT):  # all is checked before anything is set
            values = self._values(state, is_own)
            attributes = self._attributes(state, settings)
            Recorder(None, 1, "", False).restore(state.plain["recorder"])
            numpy_state = decode(state.plain["numpy"], state.arrays).get_state()
            version, gauss = state.plain["python"]
            words = tuple(int(word) for word in state.arrays["random/python"])
            random.Random(0).setstate((version, words, gauss))
        for variable, value in values:
            is_array = _describe(variable) is not None
            (_host.replace if is_array else _host.replace_object)(variable, value)
        for owner, attribute, value in attributes:
            _set(owner, attribute, value, is_own)
        recorder.restore(state.plain["recorder"])
        if is_own:
            np.random.set_state(numpy_state)
            random.setstate((version, words, gauss))

    def _values(self, state, is_own):
        """Return the shared variables to set, each with its value."""
        found = []
        for number, variable in enumerate(self._variables):
            if is_own or not _host.is_random_state(variable):
                value = decode(state.plain[f"variable/{number}"], state.arrays)
                if not _fits(variable, value):
                    raise ValueError(f"{variable} would get another kind of value")
                found.append((variable, value))
        return found

    def _attributes(self, state, settings):
        """Return the attributes to set, without those that settings of this run have set."""
        found = []
        owners = {"model": self._model, "data": self._model.data}
        self.lost = []
        for name, value in state.plain["attributes"].items():
            whose, *path, attribute = name.split(".")
            owner = owners[whose]
            for part in path:
                owner = _fields(owner).get(part)
                if owner is not None and not _is_owner(owner):
                    raise ValueError(f"it would set {name}")
            if owner is None:  # it was made after the first batch
                self.lost.append(name.replace("model.", "", 1))
                continue
            value = decode(value, state.arrays)
            present = _fields(owner).get(attribute, inspect.getattr_static(owner, attribute, None))
            is_of_run = owner is self._model and attribute in _OF_RUN
            is_right = _fingerprint(present) is not None and not is_of_run
            is_name = attribute.isidentifier() and not attribute.startswith("__")
            is_random = isinstance(present, _RANDOM)
            if not (is_right and is_name) or (is_random and type(value) is not type(present)):
                raise ValueError(f"it would set {name}")
            if name.replace("model.", "", 1) not in settings:
                found.append((owner, attribute, value))
        return found

    def _refuse_order(self, state):
        """Raise ValueError if the parameters have another order than those of a state."""
        own = _names_and_places(self._model.params)
        with damage_told(state.file, _WHAT):
            kept = state.plain["made"]
            is_reordered = kept != own and sorted(map(str, kept)) == sorted(map(str, own))
        if is_reordered:
            raise ValueError(
                f"{state.file} has the parameters of {type(self._model).__name__} in another "
                "order. A set has an order of its own in each process: list params in the order "
                "of the layers, or sort them by their names."
            )

    def restore_parameters(self, state: RankState) -> None:
        """Give the model the parameters of a run of another rule, or another sync type."""
        self._refuse_order(state)
        with damage_told(state.file, _WHAT):
            kept = [state.plain["variables"][number][1] for number in state.plain["params"]]
        if kept != [_describe(variable) for variable in self._model.params]:
            raise ValueError(
                f"{state.file} is of another model: its parameters differ from those of "
                f"{type(self._model).__name__} in number, dtype or dimensions."
            )
        with damage_told(state.file, _WHAT):
            values = [state.arrays[f"variable/{number}"] for number in state.plain["params"]]
            if not all(map(_fits, self._model.params, values)):
                raise ValueError("a parameter would get another kind of value")
        for variable, value in zip(self._model.params, values):
            _host.replace(variable, value)


def _names_and_places(variables):
    """Return each variable's name, and its place in the order in which they were made."""
    return [[name, place] for name, _, _, place in described(variables)]


def _fits(variable, value):
    """Return whether a shared variable can have a value."""
    if _describe(variable) is None:
        return isinstance(value, type(_host.peek(variable)))
    return (
        [str(value.dtype), value.ndim] == _describe(variable)
        and all(n in (None, length) for n, length in zip(_host.lengths(variable), value.shape))
        # Theano divides by the number of rows of a random state.
        and (not _host.is_random_state(variable) or value.shape == _host.peek(variable).shape)
    )


def _set(owner, name, value, is_own):
    """Set an attribute, in place if others may hold its value; no random state of another rank."""
    present = getattr(owner, name, None)
    inner = [each for _, each in _items("", value)]
    if not is_own and any(isinstance(each, _RANDOM) for each in [value, *inner]):
        return
    if isinstance(present, np.random.RandomState) and isinstance(value, np.random.RandomState):
        present.set_state(value.get_state())
    elif isinstance(present, random.Random) and isinstance(value, random.Random):
        present.setstate(value.getstate())
    elif isinstance(present, np.random.Generator) and isinstance(value, np.random.Generator):
        present.bit_generator.state = value.bit_generator.state
    elif (
        isinstance(present, np.ndarray)
        and isinstance(value, np.ndarray)
        and (present.shape, present.dtype) == (value.shape, value.dtype)
        and present.flags.writeable
    ):
        present[...] = value
    elif type(present) is type(value) is list:
        present[:] = value
    elif type(present) is type(value) is dict:
        present.clear()
        present.update(value)
    else:
        object.__setattr__(owner, name, value)  # of frozen classes, too


def _kept_variables(model):
    """Return the shared variables that training changes, without those that only hold data."""
    updated = {id(variable) for variable in [*model.params, *updated_variables(model)]}
    kept = []
    for variable in variables_of(model):
        value = _host.peek(variable)
        is_small = getattr(value, "size", 0) * getattr(value, "itemsize", 1) <= _SMALL_SHARED
        is_random = _host.is_random_state(variable)
        is_known = is_random or _describe(variable) is not None
        if is_known and (is_random or id(variable) in updated or is_small):
            kept.append(variable)
    return kept


def _describe(variable):
    """Return the dtype and the number of dimensions of a variable with an array, or None."""
    if not _host.is_array_variable(variable):
        return None
    return [str(variable.dtype), variable.ndim]


def _attributes(model):
    """Yield the attributes of the model, its data, and the objects of users that these hold.

    A name has brackets if it leads through a list or a dict.
    """
    seen = {id(model), id(model.data)}
    queue = collections.deque([("model", model), ("data", model.data)])
    while queue:
        owner, thing = queue.popleft()
        for name, value in sorted(_fields(thing).items()):
            path = f"{owner}.{name}"
            if owner != "model" or name not in _OF_RUN:
                yield path, value
            for inner, each in [(path, value), *_items(path, value)]:
                if len(seen) < _OBJECTS and id(each) not in seen and _is_owner(each):
                    seen.add(id(each))
                    queue.append((inner, each))


def _fields(thing):
    """Return the attributes of an object, also those of ``__slots__``."""
    slots = [vars(kind).get("__slots__", ()) for kind in type(thing).__mro__]
    names = [n for each in slots for n in ([each] if isinstance(each, str) else each)]
    found = {n: getattr(thing, n) for n in names if not n.startswith("__") and hasattr(thing, n)}
    return {**found, **getattr(thing, "__dict__", {})}


def _items(path, value):
    """Return the objects in a list, a tuple or a dict, each with its name."""
    if type(value) not in (list, tuple, dict):
        return []
    pairs = value.items() if type(value) is dict else enumerate(value)
    return [(f"{path}[{key!r}]", each) for key, each in pairs]


def _is_owner(value):
    """Return whether a value's class is the user's: not Python's, nor of an installed library."""
    kind = type(value)
    has_slots = any("__slots__" in vars(each) for each in kind.__mro__)
    if isinstance(value, type) or not (has_slots or getattr(kind, "__dictoffset__", 0)):
        return False
    name = kind.__module__
    if name.partition(".")[0] == "synkhronos":
        return name.startswith("synkhronos.rules.compatible.")
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        return name == "__main__"
    return not file.startswith(_OF_PYTHON) and _INSTALLED.isdisjoint(Path(file).parts)


def _leaves(value):
    """Yield all values in a container, at any depth, and keys of dicts; or the value itself."""
    stack, seen = [value], set()
    while stack:
        each = stack.pop()
        if not isinstance(each, _CONTAINERS):
            yield each
        elif id(each) not in seen:  # it may hold itself
            seen.add(id(each))
            stack += [*each, *each.values()] if isinstance(each, dict) else each


def _has_position(value):
    """Return whether a value, or one in it, moves with use: an iterator, a file, random numbers."""
    kinds = (collections.abc.Iterator, *_RANDOM)
    return any(isinstance(each, kinds) and not _is_owner(each) for each in _leaves(value))


def _rough_fingerprint(value):
    """Return bytes that differ between different containers of numbers and texts."""
    kinds = (int, float, str, bytes, type(None))
    if not isinstance(value, _CONTAINERS) or not all(isinstance(v, kinds) for v in _leaves(value)):
        return b""
    return hashlib.blake2b(repr(value).encode(), digest_size=16).digest()


def _is_plain(value):
    """Return whether all containers in a value are exactly dicts, lists and tuples."""
    if isinstance(value, dict):
        return type(value) is dict and all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(_is_plain, value))
    return True


def _fingerprint(value):
    """Return bytes that differ between different values; None for what a file can't hold."""
    arrays: dict[str, np.ndarray] = {}
    try:
        if not _is_plain(value):
            return None
        text = json.dumps(encode(value, arrays, ""), sort_keys=True)
    except (TypeError, RecursionError):
        return None
    digest = hashlib.blake2b(text.encode(), digest_size=16)
    for array in arrays.values():  # hashing all of a data set would take long
        digest.update(_digest(array, 1 << 16 if array.nbytes > _LARGE else None))
    return digest.digest()


def _digest(array, n_samples=None):
    """Return a hash of an array, or of that many of its elements."""
    flat = array.reshape(-1) if array.flags.c_contiguous else array.ravel()
    step = 1 if n_samples is None else max(1, array.size // n_samples)
    digest = hashlib.blake2b(repr((array.dtype, array.shape)).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(flat[::step]).data)
    return digest.digest()


def collect(group: Group, state: RankState) -> list[RankState] | None:
    """Return all ranks' states on rank 0, to which others send only arrays that differ."""
    digests = {name: _digest(array) for name, array in state.arrays.items()}
    everyone = group.all_gather(digests)
    wanted = [name for name in digests if digests[name] != everyone[0].get(name)]
    sent = group.gather((state.plain, {name: state.arrays[name] for name in wanted}))
    if sent is None:
        return None
    return [
        RankState({**{name: state.arrays.get(name) for name in d}, **arrays}, plain)
        for d, (plain, arrays) in zip(everyone, sent)
    ]


def distribute(group: Group, path: Path | None) -> Snapshot:
    """Return the snapshot of a file on all ranks. Rank 0 reads it; all raise its errors."""
    read: Snapshot | Exception | None = None
    if group.rank == 0:
        try:
            assert path is not None
            read = read_old(path) if path.is_dir() else read_file(path)
        except (ValueError, OSError) as error:
            read = error
    read = group.broadcast(read)
    if isinstance(read, Exception):
        raise read
    assert read is not None
    return read


def folder_of(path: str) -> str:
    """Return the folder of snapshots, with a slash at its end, made if it is not there."""
    folder = os.path.join(path, "")
    os.makedirs(folder, exist_ok=True)
    remove_left(folder, r"snapshot_\d+(_\d+)?\.npz")
    return folder


def write(path: str, snapshot: Snapshot) -> str:
    """Write a snapshot into a folder; return the file's name."""
    part = f"_{snapshot.batch:06d}" if snapshot.batch else ""
    name = os.path.join(folder_of(path), f"snapshot_{snapshot.epoch:04d}{part}.npz")
    first = snapshot.states[0]
    ranks = []
    settings = {name: getattr(snapshot, name) for name in _KINDS}
    with new_file(name) as file, writing(file, _WHAT, **settings, ranks=ranks) as written:
        for rank, state in enumerate(snapshot.states):
            places = {}
            for key, array in state.arrays.items():
                places[key] = 0 if rank and array is first.arrays.get(key) else rank
                if places[key] == rank:
                    written[f"{rank}/{key}"] = array
            ranks.append({"plain": state.plain, "arrays": places})
    return name


def read_file(path: Path) -> Snapshot:
    """Return the snapshot in a file; raise ValueError if it is damaged, or holds none."""
    with reading(path, _WHAT) as (table, arrays):
        states = []
        for each in table["ranks"]:
            own = {key: arrays[f"{place}/{key}"] for key, place in each["arrays"].items()}
            states.append(RankState(own, each["plain"], repr(str(path))))
        are_right = all(isinstance(table[name], kind) for name, kind in _KINDS.items())
        if not states or not are_right or not table["rule"].isprintable():
            raise ValueError("its table of contents is not that of a snapshot")
        return Snapshot(*(table[name] for name in _KINDS), states)


def find(resume: bool | str, folder: str) -> Path:
    """Return the file to resume from: the newest of a folder for True."""
    if resume is not True:
        path = Path(str(resume))
        if not path.exists():
            raise FileNotFoundError(f"resume: there is no snapshot {str(path)!r}.")
        if not path.is_dir() or any(path.glob("W*_*.npy")):
            return path
        folder = str(path)
    found = newest(folder)
    if found is None:
        raise FileNotFoundError(f"resume: there is no snapshot_*.npz in {folder!r}.")
    return found


def newest(folder: str) -> Path | None:
    """Return the snapshot of a folder that was written last, or None."""
    files = list(Path(folder).glob("snapshot_*.npz"))
    return max(files, key=lambda path: path.stat().st_mtime_ns) if files else None


_OLD = re.compile(r"(W|W0|W1|b|b0|b1)_(\d+)_(\d+)\.npy")


def read_old(folder: Path) -> Snapshot:
    """Read the newest epoch of a folder of Theano-MPI: a file for each weight of each layer."""
    found = [match for match in map(_OLD.fullmatch, os.listdir(folder)) if match]
    epoch = max(int(match[3]) for match in found)
    arrays = {}
    for match in found:
        if int(match[3]) == epoch:
            try:
                arrays[f"{match[1]}/{match[2]}"] = load_npy(folder / match[0])
            except (EOFError, ValueError) as error:
                raise ValueError(f"{folder / match[0]} is damaged: {sentence(error)}") from error
    return Snapshot(None, epoch + 1, 0, 0, {}, [RankState(arrays)])


def restore_old(model: Any, snapshot: Snapshot) -> None:
    """Give the layers of a model the weights of Theano-MPI's files, if they fit."""
    layers = getattr(model, "layers", None)
    if layers is None:
        raise ValueError(
            f"{type(model).__name__} has no list layers, by which Theano-MPI names its files."
        )
    for key, array in snapshot.states[0].arrays.items():
        name, at = key.split("/")
        layer = layers[int(at)] if int(at) < len(layers) else None
        weight = getattr(layer, name, None)
        variable = getattr(weight, "val", weight)
        if not isinstance(variable, _host.SharedVariable):
            raise ValueError(f"{name}_{at}_*.npy: layer {at} of the model has no weight {name}.")
        if _host.peek(variable).shape != array.shape:
            raise ValueError(
                f"{name}_{at}_*.npy has shape {array.shape}, the layer's {name} has "
                f"{_host.peek(variable).shape}."
            )
        _host.replace(variable, array.astype(variable.dtype))
