"""Checkpoints: the shared variables of all ranks in one file, to continue a run later.

    save    values of all ranks ──▶ a file without a name ──▶ name.npz   written, fsynced, named
    load    name.npz ──▶ every value read and checked ──▶ all ranks

A variable that is equal on all ranks is stored once, any other with the value of each rank.
"""

from __future__ import annotations

import itertools
import os
import pickle
import re
from typing import NamedTuple, Sequence, Union

import numpy as np

from synkhronos import _host
from synkhronos._arithmetic.blocks import with_one_nan
from synkhronos._arithmetic.operations import OPERATIONS
from synkhronos._calls import collective
from synkhronos._hints import SharedVariable
from synkhronos._machine.archives import damage_told, reading, writing
from synkhronos._machine.files import new_file, npz_path
from synkhronos._machine.plain_values import decode, encode, names_of
from synkhronos._session import commands
from synkhronos._session.current import call
from synkhronos._wording import advise, count, one_line, sentence, shown
from synkhronos.comm.arrays import reduce_whole
from synkhronos.functions import Function

__all__ = ["load", "save"]

WHAT = "a checkpoint"

# How the ranks' values of a variable are related. ALONE is the value of a single rank, or of a
# variable that the workers don't have yet; loading such a random state gives each rank a stream of
# its own.
ALONE, EQUAL, OF_EACH_RANK = "alone", "equal", "of each rank"

Saved = Union[Function, SharedVariable]


class CheckpointEntry(NamedTuple):
    """A variable of a checkpoint, as the file describes it."""

    name: str | None
    dtype: str | None = None  # None for a random state
    ndim: int | None = None
    relation: str = ALONE
    values: Sequence = ()  # as `encode` returns them: one, or one for each rank

    @classmethod
    def of(cls, variable):
        """Describe a variable, without its values."""
        is_array = _host.is_array_variable(variable)
        return cls(variable.name, *((str(variable.dtype), variable.ndim) if is_array else ()))

    def __str__(self):
        kind = "a random state" if self.dtype is None else one_line(f"{self.dtype}, {self.ndim}-d")
        return f"{self.name!r} ({kind})" if self.name else f"one without a name ({kind})"


def save(path: str | os.PathLike[str], functions_or_variables: Saved | Sequence[Saved]) -> None:
    """Write shared variables of all ranks to a file, from which :func:`load` restores them.

    The values go to a new file in the same folder, which replaces the old one when it is complete:
    if the process is killed or the disk full, the old file is still there.

    Parameters
    ----------
    path : str or path
        It ends with ``.npz``; ``numpy.load`` reads the file, too.
    functions_or_variables : Function, shared variable, or list of these
        A function stands for the shared variables that it uses or updates, except its
        ``sliceable_shareds``: parameters, the state of update rules, random states. The order
        counts, because variables may have no names.

    Raises
    ------
    SessionError
        Before :func:`~synkhronos.fork`.
    TypeError, ValueError
        For a path that does not end with ``.npz``, and anything but functions and shared variables
        with arrays or random states.
    OSError
        When the file can't be written.

    Warns
    -----
    PortingWarning
        Once for each variable that differs between ranks, random states apart: the file then holds
        the values of all ranks, and can be loaded on that number of ranks only.

    Examples
    --------
    >>> import os, tempfile, numpy as np, theano, theano.tensor as T
    >>> import synkhronos as synk
    >>> synk.fork(2)
    2
    >>> x, w = T.dvector("x"), theano.shared(np.zeros(2), "w")
    >>> step = synk.function([x], x.mean(), updates=[(w, w + 1)])
    >>> path = os.path.join(tempfile.mkdtemp(), "run.npz")
    >>> _ = step(np.ones(2))
    >>> synk.save(path, step)
    >>> _ = step(np.ones(2))
    >>> synk.load(path, step)
    >>> synk.gather(w)
    array([[1., 1.],
           [1., 1.]])
    >>> synk.close()
    """
    with call("save()") as session:
        path = npz_path(path)
        variables = variables_of("save", functions_or_variables)
        entries = []
        with new_file(path) as file, writing(file, WHAT, variables=entries) as arrays:
            for variable, entry in describe(session, variables, arrays):
                if are_unequal(variable, entry):
                    _tell(session, variable, entry)
                entries.append(entry._asdict())


def load(path: str | os.PathLike[str], functions_or_variables: Saved | Sequence[Saved]) -> None:
    """Set shared variables, on all ranks, to the values in a file that :func:`save` wrote.

    On as many ranks as before, the run continues exactly as if it had not been interrupted. On
    another number, each rank gets a random stream of its own, as by
    :func:`~synkhronos.distribute`.

    Parameters
    ----------
    path : str or path
    functions_or_variables : Function, shared variable, or list of these
        As for :func:`save`, in the same order.

    Raises
    ------
    SessionError
        Before :func:`~synkhronos.fork`.
    TypeError, ValueError
        As :func:`save`; ValueError also for a file that is damaged or of another kind, for
        variables of another number, name, dtype or number of dimensions, and for variables with
        different values of another number of ranks. No variable is set then.
    OSError
        When the file can't be read.

    Examples
    --------
    Keep the number of the epoch in a shared variable, too:

    >>> import os, tempfile, numpy as np, theano
    >>> import synkhronos as synk
    >>> synk.fork(2)
    2
    >>> w, epoch = theano.shared(np.zeros(2), "w"), theano.shared(7, "epoch")
    >>> path = os.path.join(tempfile.mkdtemp(), "run.npz")
    >>> synk.save(path, [w, epoch])
    >>> epoch.set_value(0)  # as in a new process
    >>> synk.load(path, [w, epoch])
    >>> int(epoch.get_value())
    7
    >>> synk.close()
    """
    with call("load()") as session:
        path = npz_path(path)
        variables = variables_of("load", functions_or_variables)
        with reading(path, WHAT) as (table, arrays):
            entries = [CheckpointEntry(**each) for each in table["variables"]]
            arrays = {name: arrays[name] for name in names_of([each.values for each in entries])}
        LoadPlan(session, path, entries, variables, arrays).carry_out()


def variables_of(name, sources):
    """Return the shared variables among `sources`, and those of its functions, each once."""
    variables = {}
    for each in sources if isinstance(sources, (list, tuple)) else [sources]:
        if isinstance(each, _host.SharedVariable):
            variables[each] = None
        elif isinstance(each, Function):
            data = each._description.sliceables
            variables.update((v, None) for v in each.get_shared() if v not in data)
        else:
            raise TypeError(
                "functions_or_variables must be a function of synkhronos.function(), a shared "
                f"variable, or a list of these, got {shown(each)}."
            )
    if not variables:
        raise ValueError(f"functions_or_variables has no shared variable to {name}.")
    for variable in variables:
        if _host.sparse_format(variable):
            raise TypeError(
                f"{name}() can't take {variable}, of type {variable.type}: it works on arrays and "
                "random states."
            )
    return collective.check_variables(name, list(variables), objects=True)


def are_unequal(variable, entry):
    """Return whether ranks have different values of a variable that is no random state."""
    return entry.relation == OF_EACH_RANK and not _host.is_random_state(variable)


def describe(session, variables, arrays):
    """Write the values of all ranks to `arrays`, or one if workers don't have a variable yet.

    Yield each variable with its entry.
    """
    sent = [variable for variable in variables if session.registry.is_sent(variable)]
    keys = dict(zip(sent, session.registry.keys_of(sent)))
    objects = {
        variable: [pickle.loads(value) for value in session.ask(commands.GetObject(key))]
        for variable, key in keys.items()
        if not _host.is_array_variable(variable)
    }
    equal = _equal_everywhere(session, keys)
    exposed = tuple(keys[each] for each in keys if each not in objects and each not in equal)
    if exposed:
        session.run(commands.Expose(exposed))
    for position, variable in enumerate(variables):
        if variable in objects:
            values = objects[variable]
        elif variable in keys and variable not in equal:
            values = session.comm.variables.values(keys[variable])
        else:
            n_values = session.n_ranks if variable in equal else 1
            values = [_host.to_host(_host.peek(variable))] * n_values
        yield variable, _written(arrays, position, variable, values)


def _equal_everywhere(session, keys):
    """Return the variables that are equal on all ranks, so that other machines needn't send them.

    On a single machine return none: there the master compares the values in the ranks' memory.
    """
    if all(session.gate.host_of(rank) is None for rank in range(session.n_ranks)):
        return set()
    arrays = [v for v in keys if _host.is_array_variable(v) and not _host.is_random_state(v)]
    hashes = session.ask_of_each(commands.Hashes, arrays)
    return {each for each, of_ranks in zip(arrays, hashes) if len({*of_ranks}) == 1}


def _written(arrays, position, variable, values):
    """Write the values of a variable; return its entry."""
    if len(values) == 1:
        relation = ALONE
    elif all(_is_same(value, values[0]) for value in values[1:]):
        relation = EQUAL
    else:
        relation = OF_EACH_RANK
    label = f"{position}_{re.sub(r'[^A-Za-z0-9_.+-]', '_', variable.name or '')[:60]}".rstrip("_")
    names = [label]
    if relation == OF_EACH_RANK:
        names = [f"{label}.rank{rank}" for rank in range(len(values))]
    if _host.is_array_variable(variable):
        values = map(np.asarray, values)
    encoded = [encode(value, arrays, name) for name, value in zip(names, values)]
    return CheckpointEntry.of(variable)._replace(relation=relation, values=encoded)


def _is_same(one, other):
    """Return whether arrays have the same bits, NaNs aside, or random states the same numbers."""
    if one is other:
        return True
    arrays, others = {}, {}
    if encode(one, arrays, "") != encode(other, others, ""):
        return False
    for name, array in arrays.items():
        if array.shape != others[name].shape:
            return False
        pair = map(with_one_nan, (array, others[name]))
        pair = (np.ascontiguousarray(each).reshape(-1) for each in pair)
        if not np.array_equal(*(each.view(np.uint8) for each in pair)):
            return False
    return True


def refusal(what, variable):
    """Return an error that says what to do about different values of a variable on the ranks."""
    name = variable.name or "variable"
    return ValueError(
        f"{what} different values of {variable} for the ranks. Write synkhronos.broadcast({name}), "
        f"or all_reduce({name}), before tick(); or give resume() unequal='keep', with which as "
        "many ranks each get their own back, or unequal='average', with which another number of "
        "ranks gets the mean."
    )


def _tell(session, variable, entry):
    if variable not in session.told_unequal:
        session.told_unequal.add(variable)
        advise(
            f"save(): {variable} has other values on other ranks, so the file holds all of them, "
            f"and only {count(len(entry.values), 'rank')} can load it. If the master's value is "
            f"meant, write synkhronos.broadcast({variable.name or 'variable'}) before save()."
        )


def _compare(path, entries, variables):
    """Raise ValueError unless the variables are those of the file, in the same order."""
    asked = [CheckpointEntry.of(variable) for variable in variables]
    for position, (entry, here) in enumerate(itertools.zip_longest(entries, asked)):
        if entry is None or here is None:
            raise ValueError(
                f"functions_or_variables has {count(len(asked), 'variable')}, but {path!r} holds "
                f"{len(entries)}: {'it' if here is None else 'the file'} lacks {entry or here}."
            )
        if entry[:3] != here[:3]:
            raise ValueError(
                f"functions_or_variables does not fit {path!r}: variable {position} is {here}, and "
                f"{entry} in the file. Give the same functions and variables as to save(), in the "
                "same order."
            )


def _values_of(path, entry, variable, arrays):
    """Return the values of an entry; raise ValueError for those that the variable can't have."""
    kind = _host.RandomState if entry.dtype is None else np.ndarray
    with damage_told(f"{entry} in {path!r}", "its values"):
        values = [decode(each, arrays) for each in entry.values]
        for value in values or [None]:
            if not isinstance(value, kind):
                raise ValueError(
                    f"it is a {type(value).__name__}, and not a {kind.__name__}, as here"
                )
            # Theano divides by the number of rows of a random state.
            is_empty = _host.is_random_state(variable) and kind is np.ndarray and not value.size
            if is_empty or (entry.dtype and entry[1:3] != (str(value.dtype), value.ndim)):
                raise ValueError("its array has another dtype, or number of dimensions or rows")
    each = [variable] * len(values)
    try:
        return collective.check_values("load", each, each, values)
    except TypeError as error:
        raise ValueError(f"{path!r} does not fit: {sentence(error)}") from error


class LoadPlan:
    """The values that each rank gets from a file; nothing is set until `carry_out`.

    Raises ValueError for a file that does not fit the variables. `unequal`, one of
    `resuming.UNEQUAL`, is what to do with a variable of different values on the ranks.
    """

    def __init__(self, session, path, entries, variables, arrays, unequal="keep"):
        self._session, self._path, self._unequal = session, path, unequal
        self._in_master, self._everywhere, self._to_spread = {}, {}, []
        self._of_rank = [{} for _ in range(session.n_ranks)]
        _compare(path, entries, variables)
        for entry, variable in zip(entries, variables):
            self._add(entry, variable, _values_of(path, entry, variable, arrays))

    def _add(self, entry, variable, values):
        """Plan the values of one variable; raise ValueError if they are of too many ranks."""
        n_ranks, is_random = self._session.n_ranks, _host.is_random_state(variable)
        differ, is_own = entry.relation == OF_EACH_RANK, is_random and entry.relation != EQUAL
        if differ and not is_random and self._unequal == "refuse":
            raise refusal(f"{self._path!r} can't be loaded: it holds", variable)
        if differ and len(values) == n_ranks:
            for of_rank, value in zip(self._of_rank, values):
                of_rank[variable] = value
            return
        if differ and not is_random:
            if self._unequal != "average":
                raise ValueError(
                    f"load() can't give {variable} to {count(n_ranks, 'rank')}: {self._path!r} "
                    f"holds the different values of {count(len(values), 'rank')}. Perhaps "
                    "synkhronos.broadcast() or all_reduce() should make it equal before it is "
                    "saved?"
                )
            values = [self._mean(variable, values)]
        if not self._session.registry.is_sent(variable) and (is_own or not is_random):
            # When a function sends it, workers get the master's value, or a stream of their own.
            self._in_master[variable] = values[0]
        else:
            self._everywhere[variable] = values[0]
            if is_own:
                self._to_spread.append(variable)

    def _mean(self, variable, values):
        is_float = values[0].dtype.kind in OPERATIONS["avg"].kinds
        if not is_float or len({value.shape for value in values}) > 1:
            why = "its shapes differ" if is_float else f"it is of {variable.dtype}"
            raise ValueError(
                f"{self._path!r} holds the different values of {variable} of "
                f"{count(len(values), 'rank')}, which can't be averaged: {why}."
            )
        return reduce_whole("avg", values, np.empty_like(values[0], order="C"), len(values))

    def carry_out(self):
        """Set all variables on all ranks."""
        session = self._session
        for variable, value in self._in_master.items():
            is_array = _host.is_array_variable(variable)
            (_host.replace if is_array else _host.replace_object)(variable, value)
        keys_of = session.registry.keys_of
        keys_of([*self._everywhere, *self._of_rank[0]])  # sends those that workers lack
        collective.broadcast(session, list(self._everywhere), list(self._everywhere.values()))
        if self._to_spread:
            session.run(commands.Spread(keys_of(self._to_spread)))
        for rank, new in enumerate(self._of_rank):
            collective.set_on_rank(session, "load", list(new), list(new.values()), None, rank)
