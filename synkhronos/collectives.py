"""Collectives on shared variables: broadcast, scatter, gather and reduce their values.

    check ──▶ keys, values in shared memory ──▶ one command ──▶ every rank's communicator

Each takes one shared variable, or a list of them in one round. A variable that no function uses is
sent to the workers, with the master's value, when a collective first gets it. The argument ``nccl``
of the 2017 package is accepted everywhere, but matters only if each rank has a GPU of its own.
"""

from __future__ import annotations

import contextlib
from typing import Any, List, Union

import numpy as np

from synkhronos._calls import collective
from synkhronos._hints import ArrayLike, Rows, SharedVariables, Values
from synkhronos._session import commands
from synkhronos._session.current import Current, call
from synkhronos._wording import is_bool, truth
from synkhronos.inputs import Data

__all__ = ["all_gather", "all_reduce", "broadcast", "gather", "reduce", "scatter"]

_PLAIN = (str, int, type(None))  # options of these types need no checks; bools do

Gathered = Union[np.ndarray, List[np.ndarray]]


def broadcast(
    shared_vars: SharedVariables, values: Values | None = None, nccl: bool = True
) -> None:
    """Set shared variables to the master's value on every rank; shapes may change.

    Parameters
    ----------
    shared_vars : shared variable or list of them
        They may be sparse, or random states (of ``RandomStreams``): then all ranks draw the same
        numbers.
    values : array_like, Data, or list of these with one for each variable, optional
        Values that the master's variables get first; a None in the list keeps the value of one.
    nccl : bool
        If true, ranks that have NCCL use it; else values go through shared memory.

    Raises
    ------
    SessionError
        Before :func:`~synkhronos.fork`.
    TypeError, ValueError
        For arguments that don't fit, before anything is changed.

    Examples
    --------
    >>> import numpy as np, theano
    >>> import synkhronos as synk
    >>> synk.fork(2)
    2
    >>> s = theano.shared(np.zeros(2))
    >>> synk.broadcast(s, [3.0, 4.0])
    >>> synk.get_value(1, s)
    array([3., 4.])
    >>> synk.close()
    """
    options = None if values is not None else _options("broadcast", None, nccl)
    session: Any = Current.session
    if session is not None and session.repeat(options, shared_vars):
        return
    with call("broadcast()") as session:
        variables = collective.check_variables("broadcast", shared_vars, objects=True)
        if values is None:
            values = [None] * len(variables)
        else:
            values = collective.check_values("broadcast", shared_vars, variables, values, none=True)
        command = collective.broadcast(session, variables, values, truth("nccl", nccl))
        if len(command.keys) == len(variables):
            session.repeated.keep(options, shared_vars, command)


def scatter(shared_vars: SharedVariables, values: ArrayLike, batch: Rows | None = None) -> None:
    """Set shared variables on each rank to its part of the rows of a value, in rank order.

    The rows are split like the rows of function inputs: the edges are ``linspace(0, rows, n + 1)``,
    floored. With fewer rows than ranks, some ranks get none.

    Parameters
    ----------
    shared_vars : shared variable or list of them
        Of at least one dimension; each takes the shape of its part.
    values : array_like, Data, or list of these with one for each variable
        All ranks read a Data in place; other values are copied once.
    batch : int, slice, range, list, or array of integers or bools, optional
        The rows of each value to scatter, as in calls of functions.

    Raises
    ------
    SessionError, TypeError, ValueError
        As :func:`broadcast`.

    Examples
    --------
    >>> import numpy as np, theano
    >>> import synkhronos as synk
    >>> synk.fork(2)
    2
    >>> s = theano.shared(np.zeros(1))
    >>> synk.scatter(s, np.arange(5.0))
    >>> synk.gather(s, nd_up=0), synk.get_lengths(s)
    (array([0., 1., 2., 3., 4.]), [2, 3])
    >>> synk.close()
    """
    with call("scatter()") as session:
        options = None
        if batch is None and isinstance(values, Data):
            options = "scatter", values._hold(session).ref
            command = session.repeated.find(options, shared_vars)
            if command is not None:
                session.run_collective(command)
                return
        variables = collective.check_variables("scatter", shared_vars)
        collective.check_rows("scatter", variables)
        checked_values = collective.check_values(
            "scatter", shared_vars, variables, values, rows_may_differ=True
        )
        command = collective.assign(session, "scatter", variables, checked_values, batch, None)
        if options is not None:
            options = "scatter", *command.values  # another thread may have resized the Data before
            session.repeated.keep(options, shared_vars, command)


def gather(
    shared_vars: SharedVariables, nd_up: int = 1, nccl: bool = True
) -> Gathered | tuple[Gathered, ...]:
    """Return the values on all ranks, in rank order.

    Parameters
    ----------
    shared_vars : shared variable or list of them
    nd_up : {1, 0}
        1 stacks the values along a new axis 0; 0 joins them along their own axis 0.
    nccl : bool
        Ignored: the result is an array on the host, so values go through shared memory.

    Returns
    -------
    numpy.ndarray, or list of numpy.ndarray
        A list with one array for each rank, if arrays of these shapes can't be joined. For more
        than one variable, a tuple of these.

    Raises
    ------
    SessionError, TypeError, ValueError
        As :func:`broadcast`.

    Examples
    --------
    >>> import numpy as np, theano
    >>> import synkhronos as synk
    >>> synk.fork(2)
    2
    >>> s = theano.shared(np.zeros(2))
    >>> synk.set_value(1, s, [3.0, 4.0])
    >>> synk.gather(s)
    array([[0., 0.],
           [3., 4.]])
    >>> synk.gather(s, nd_up=0)
    array([0., 0., 3., 4.])
    >>> synk.close()
    """
    with call("gather()") as session:
        options = _options("gather", nd_up, True)
        command = session.repeated.find(options, shared_vars)
        if command is None:
            variables = collective.check_variables("gather", shared_vars)
            if is_bool(nd_up) or not isinstance(nd_up, (int, np.integer)) or nd_up not in (0, 1):
                raise ValueError(
                    "gather() takes as nd_up 1 (stack along a new axis) or 0 (join along axis 0), "
                    f"got {nd_up!r}."
                )
            if nd_up == 0:
                collective.check_axis("gather(nd_up=0)", variables)
            command = commands.Expose(session.registry.keys_of(variables))
            session.repeated.keep(options, shared_vars, command)
        session.run(command)
        values = session.comm.variables.values_of(command.keys)
        results = [_put_together(each, nd_up) for each in values]
        return results[0] if len(results) == 1 else tuple(results)


def _put_together(values, nd_up):
    """Return the values, stacked or joined, as copies: the next command may change the values."""
    first = values[0].shape
    for value in values:
        if value.shape != first and (nd_up or value.shape[1:] != first[1:]):
            return [value.copy() for value in values]
    if not nd_up:
        return np.concatenate(values)
    stacked = np.empty((len(values), *first), values[0].dtype)  # ten times as fast as np.stack
    for place, value in enumerate(values):
        stacked[place] = value
    return stacked


def all_gather(shared_vars: SharedVariables, nccl: bool = True) -> None:
    """Set shared variables on every rank to the values of all ranks, joined along axis 0.

    Parameters
    ----------
    shared_vars : shared variable or list of them
        Their shapes may differ between ranks along axis 0.
    nccl : bool
        As in :func:`broadcast`.

    Raises
    ------
    SessionError, TypeError, ValueError
        As :func:`broadcast`; ValueError also if shapes differ beyond axis 0. Then nothing has
        changed.

    Examples
    --------
    >>> import numpy as np, theano
    >>> import synkhronos as synk
    >>> synk.fork(2)
    2
    >>> s = theano.shared(np.zeros(1))
    >>> synk.set_value(1, s, [3.0, 4.0])
    >>> synk.all_gather(s)
    >>> synk.get_value(1, s)
    array([0., 3., 4.])
    >>> synk.close()
    """
    with call("all_gather()") as session:
        variables = collective.check_variables("all_gather", shared_vars)
        collective.check_rows("all_gather", variables)
        keys = session.registry.keys_of(variables)
        unequal = session.run_collective(commands.AllGather(keys, truth("nccl", nccl)))
        collective.raise_unequal("all_gather", variables, unequal, " beyond axis 0")


def reduce(
    shared_vars: SharedVariables, op: str = "avg", in_place: bool = True, nccl: bool = True
) -> np.ndarray | tuple[np.ndarray, ...] | None:
    """Reduce the values of all ranks, element by element, to the master.

    Parameters
    ----------
    shared_vars : shared variable or list of them
        Of the same shape on all ranks. Half precision is reduced in single precision; integers in
        their own type, which wraps around; bools with "or" (sum, max) and "and" (prod, min).
    op : str
        ``"avg"``, ``"sum"`` or another of the :ref:`operations <operations>`. Every rank has the
        same weight in an average. Integers and bools can't be averaged.
    in_place : bool
        If true, the master's variable is set to the result. The workers' are not changed.
    nccl : bool
        As in :func:`broadcast`; a result that is not `in_place` goes through shared memory.

    Returns
    -------
    None, or numpy.ndarray or tuple of them if not `in_place`

    Raises
    ------
    SessionError, TypeError, ValueError
        As :func:`broadcast`; ValueError also if shapes differ.

    Examples
    --------
    >>> import numpy as np, theano
    >>> import synkhronos as synk
    >>> synk.fork(2)
    2
    >>> s = theano.shared(np.array([1.0, 2.0]))
    >>> synk.set_value(1, s, [3.0, 0.0])
    >>> synk.reduce(s, "max", in_place=False)
    array([3., 2.])
    >>> synk.reduce(s)
    >>> s.get_value()
    array([2., 1.])
    >>> synk.close()
    """
    with call("reduce()") as session:
        variables, op = collective.check_reduction("reduce", shared_vars, op)
        keys = session.registry.keys_of(variables)
        nccl = truth("nccl", nccl)
        if truth("in_place", in_place):
            unequal = session.run(commands.Reduce(keys, op, session.master_rank, nccl))
            collective.raise_unequal("reduce", variables, unequal)
            session.changes.note_apart(keys)
            return None
        session.run(commands.Expose(keys))
        reduce_to_new, recorder = session.comm.variables.reduce_to_new, session.worker.recorder
        results = []
        for position, key in enumerate(keys):
            with contextlib.nullcontext() if recorder is None else recorder.span("reduce"):
                result = reduce_to_new(key, op)
            if not isinstance(result, np.ndarray):
                collective.raise_unequal("reduce", variables[position:], result)
            results.append(result)
        return tuple(results) if isinstance(shared_vars, (list, tuple)) else results[0]


def all_reduce(shared_vars: SharedVariables, op: str = "avg", nccl: bool = True) -> None:
    """Set shared variables on every rank to the reduction of the values of all ranks.

    In shared memory, each rank reduces one part of all arrays and writes the result to the other
    ranks' arrays; so every rank has the same bits.

    Parameters
    ----------
    shared_vars, op, nccl
        As in :func:`reduce`. A list of many small variables costs one round.

    Raises
    ------
    SessionError, TypeError, ValueError
        As :func:`reduce`.

    Examples
    --------
    >>> import numpy as np, theano
    >>> import synkhronos as synk
    >>> synk.fork(2)
    2
    >>> s = theano.shared(np.zeros(1))
    >>> synk.scatter(s, np.array([[1.0, 2.0], [5.0, 6.0]]).ravel())
    >>> synk.all_reduce(s, op="sum")
    >>> synk.gather(s)
    array([[6., 8.],
           [6., 8.]])
    >>> synk.close()
    """
    options = _options("all_reduce", op, nccl)
    session: Any = Current.session
    if session is not None and session.repeat(options, shared_vars):
        return
    with call("all_reduce()") as session:
        variables, op = collective.check_reduction("all_reduce", shared_vars, op)
        keys = session.registry.keys_of(variables)
        nccl = truth("nccl", nccl)
        is_little = session.comm.variables.are_little(keys)
        little = commands.AllReduceLittle(keys, op)
        command = little if is_little else commands.Reduce(keys, op, None, nccl)
        session.repeated.keep(options, shared_vars, command)
        collective.raise_unequal("all_reduce", variables, session.run_collective(command))


def _options(name, option, nccl):
    """Return the arguments of a collective besides the variables; None if they need checks."""
    return (name, option, nccl) if option.__class__ in _PLAIN and nccl.__class__ is bool else None
